"""Container logs: one file each, written by the container itself, and the one of the run before."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

_PREVIOUS = ".previous.log"
_FOLLOW_SECONDS = 0.2
# What Kubernetes keeps of a log as the termination message (FallbackToLogsOnError).
_TERMINATION_BYTES = 2048
_TERMINATION_LINES = 80


def path_of(pod_folder: Path, container: str, *, previous: bool = False) -> Path:
    return pod_folder / (container + (_PREVIOUS if previous else ".log"))


def containers_in(pod_folder: Path) -> list[str]:
    """Names of the containers of a pod that have written a log."""
    names = (path.name for path in pod_folder.glob("*.log"))
    return sorted(name.removesuffix(".log") for name in names if not name.endswith(_PREVIOUS))


def start_new(pod_folder: Path, container: str) -> Path:
    """Keeps the log of the run before as `previous`; returns the path for the new one."""
    path = path_of(pod_folder, container)
    if path.exists():
        os.replace(path, path_of(pod_folder, container, previous=True))
    return path


def limit_size(pod_folder: Path, container: str, limit_bytes: int) -> None:
    """Moves a log past the limit to `previous` and empties it in place: the container keeps its file open."""
    path = path_of(pod_folder, container)
    try:
        if path.stat().st_size <= limit_bytes:
            return
        shutil.copyfile(path, path_of(pod_folder, container, previous=True))
        os.truncate(path, 0)
    except FileNotFoundError:
        return


def read(path: Path, tail_lines: int | None = None) -> str:
    """The log, or its last lines. Bytes that are no UTF-8 are replaced."""
    text = path.read_text(errors="replace")
    if tail_lines is None:
        return text
    return "".join(text.splitlines(keepends=True)[-tail_lines:] if tail_lines > 0 else [])


def termination_message(path: Path) -> str:
    """The end of a log, cut as Kubernetes cuts it; empty if there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TERMINATION_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.strip("\n").splitlines()[-_TERMINATION_LINES:])


async def follow(path: Path, tail_lines: int | None = None, *, is_written: Callable[[], bool]) -> AsyncIterator[str]:
    """Lines of the log as they come (the last may be unfinished), as long as it `is_written`, and then what is left."""
    file = path.open(errors="replace")
    try:
        if tail_lines is not None:
            lines = file.readlines()
            for line in lines[-tail_lines:] if tail_lines > 0 else []:
                yield line
        while True:
            may_grow = is_written()  # asked before the read, so that nothing written until then is missed
            if chunk := file.read():
                for line in chunk.splitlines(keepends=True):
                    yield line
                continue
            if not may_grow:
                return
            await asyncio.sleep(_FOLLOW_SECONDS)
            if _is_replaced(file.fileno(), path):
                file.close()
                file = path.open(errors="replace")
            elif file.tell() > os.fstat(file.fileno()).st_size:
                file.seek(0)  # emptied because it was too long
    finally:
        file.close()


def _is_replaced(handle: int, path: Path) -> bool:
    try:
        return path.stat().st_ino != os.fstat(handle).st_ino
    except FileNotFoundError:
        return False  # between two runs
