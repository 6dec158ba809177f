"""The state directory: where everything lies, who owns it, and how another process reads it.

lock                                    pid of the control plane; locked as long as it lives
objects/<Kind>/<namespace>/<name>.json  every object, each replaced atomically
hosts/<namespace>/<host name>           addresses of a name, as pods of that namespace see it
pods/<namespace>/<pod>/                 <container>.log, <container>.previous.log, volumes/, run/, kubeconfig
claims/<namespace>/<name>/              PersistentVolumeClaims: they outlive pods and control planes
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Self

from specserve_operator.cluster.local import logs, procfs
from specserve_operator.cluster.protocol import ClusterError
from specserve_operator.core.objects import Manifest


class StateDirInUse(ClusterError):  # noqa: N818 - says what is, for the user
    """Another control plane runs on the state directory."""

    def __init__(self, path: Path, pid: int | None) -> None:
        owner = f"pid {pid}" if pid is not None else "another process"
        super().__init__(
            f"{path} is in use by the control plane of {owner}: end that one (`specserve down`) "
            "or choose another state directory",
            retryable=False,
        )
        self.pid = pid


class LogNotFound(ClusterError):  # noqa: N818 - says what is, for the user
    """There is no such pod or container, or it has not started yet."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


def write_atomically(path: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Replaces `path` in one step: readers see the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class StateDir:
    """Paths and readers of one state directory. Reading needs no lock and no control plane."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.objects = self.path / "objects"
        self.hosts = self.path / "hosts"
        self.pods = self.path / "pods"
        self.claims = self.path / "claims"
        self.lock = self.path / "lock"

    def pod(self, namespace: str, name: str) -> Path:
        """The folder of one pod."""
        return self.pods / namespace / name

    def control_plane_pid(self) -> int | None:
        """The pid of the control plane that runs on this directory now; None if there is none."""
        try:
            owner = json.loads(self.lock.read_text())
            pid, start_ticks = int(owner["pid"]), int(owner["startTicks"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        return pid if procfs.is_running(pid, start_ticks) else None

    def list_objects(self, kind: str, namespace: str | None = None) -> list[Manifest]:
        """Objects of `kind` as last stored, by namespace and name. Raises `ClusterError` for a damaged file."""
        return sorted(
            self._read(self.objects / kind, namespace),
            key=lambda obj: (obj["metadata"]["namespace"], obj["metadata"]["name"]),
        )

    def read_all(self) -> Iterator[Manifest]:
        """Every object of every kind. Raises `ClusterError` for a damaged file."""
        if self.objects.is_dir():
            for folder in self.objects.iterdir():
                yield from self._read(folder, None)

    def _read(self, folder: Path, namespace: str | None) -> Iterator[Manifest]:
        for path in folder.glob(f"{namespace or '*'}/*.json"):
            try:
                yield _parse_object(path.read_bytes())
            except FileNotFoundError:
                continue  # deleted since it was listed
            except ValueError as error:
                message = f"{path} is damaged ({error}): remove it, or choose another state directory"
                raise ClusterError(message, retryable=False) from error

    def write_object(self, obj: Manifest) -> None:
        write_atomically(self._object_path(obj), json.dumps(obj, indent=1))

    def remove_object(self, obj: Manifest) -> None:
        self._object_path(obj).unlink(missing_ok=True)

    def _object_path(self, obj: Manifest) -> Path:
        meta = obj["metadata"]
        return self.objects / str(obj["kind"]) / str(meta["namespace"]) / f"{meta['name']}.json"

    def read_log(
        self,
        namespace: str,
        pod: str,
        *,
        container: str | None = None,
        previous: bool = False,
        tail_lines: int | None = None,
    ) -> str:
        """The log of a container; `container` may be left out if the pod has only one. Raises `LogNotFound`."""
        return logs.read(self.log_path(namespace, pod, container=container, previous=previous), tail_lines)

    def follow_log(
        self, namespace: str, pod: str, *, container: str | None = None, tail_lines: int | None = None
    ) -> AsyncIterator[str]:
        """The log so far, then what is added, over restarts of the container, until the pod is gone."""
        stored = self.objects / "Pod" / namespace / f"{pod}.json"
        return logs.follow(self.log_path(namespace, pod, container=container), tail_lines, is_written=stored.exists)

    def log_path(self, namespace: str, pod: str, *, container: str | None = None, previous: bool = False) -> Path:
        """Where the log of a container lies. Raises `LogNotFound`."""
        folder = self.pod(namespace, pod)
        if not folder.is_dir():
            known = sorted(path.name for path in (self.pods / namespace).glob("*"))
            raise LogNotFound(f"no pod {pod} in namespace {namespace}; there is: {', '.join(known) or 'none'}")
        containers = logs.containers_in(folder)
        if container is None:
            if len(containers) != 1:
                names = ", ".join(containers) or "none yet"
                raise LogNotFound(f"pod {pod} has several or no logs, name a container: {names}")
            container = containers[0]
        path = logs.path_of(folder, container, previous=previous)
        if not path.exists():
            what = "no earlier run" if previous and container in containers else "no log"
            raise LogNotFound(f"container {container} of pod {pod} has {what}")
        return path

    def clear(self) -> None:
        """Forgets everything but the claims. Only for the owner of the lock."""
        for folder in (self.objects, self.hosts, self.pods):
            shutil.rmtree(folder, ignore_errors=True)


def _parse_object(content: bytes) -> Manifest:
    """Raises ValueError for what is no stored object."""
    obj = json.loads(content)
    meta = obj.get("metadata") if isinstance(obj, dict) else None
    if not isinstance(meta, dict) or not {"namespace", "name", "uid", "resourceVersion"} <= meta.keys():
        raise ValueError("no stored object")
    return dict(obj)


class StateDirLock:
    """Held by the control plane for its life; the kernel lets go of it however the control plane ends."""

    def __init__(self, state: StateDir, handle: int) -> None:
        self._state = state
        self._handle = handle

    @classmethod
    def acquire(cls, state: StateDir) -> Self:
        """Raises `StateDirInUse`, or `ClusterError` if the directory can't be made."""
        try:
            state.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(state.lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            message = f"state directory {state.path} can't be used: {error.strerror}"
            raise ClusterError(message, retryable=False) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise StateDirInUse(state.path, state.control_plane_pid()) from None
        own = procfs.read_stat(os.getpid())
        owner = {"pid": os.getpid(), "startTicks": own.start_ticks if own else 0}
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(owner).encode(), 0)
        return cls(state, handle)

    def release(self) -> None:
        os.ftruncate(self._handle, 0)
        os.close(self._handle)
