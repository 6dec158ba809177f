"""The control plane in the background: what `specserve up --wait` starts, and how it starts and ends it.

`python -m specserve_operator.cli.daemon STATE_DIR` runs it; its output goes to `control-plane.log` there.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from specserve_operator.cli.client import Client, NotRunning
from specserve_operator.cli.errors import CliError

LOG_NAME = "control-plane.log"
_POLL_SECONDS = 0.1
_START_TIMEOUT_SECONDS = 60.0
_LOG_LINES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Daemon:
    """A control plane that this process has started."""

    process: subprocess.Popen[bytes]
    state_dir: Path

    def stop(self, *, timeout_seconds: float) -> None:
        """Ends it and all its pods, by force if the time runs out."""
        self.process.terminate()
        try:
            self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_daemon(state_dir: Path) -> Daemon | None:
    """Starts a control plane that outlives this process and waits until it answers. Raises `CliError`.

    None if another one, that somebody else was starting at the same time, has the state directory and answers.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    # Appended to: it may be the log of the other one.
    with (state_dir / LOG_NAME).open("ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(state_dir)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    daemon = Daemon(process, state_dir)
    try:
        is_own = _wait_until_one_answers(daemon, log_start=log_start)
    except BaseException:
        daemon.stop(timeout_seconds=10)
        raise
    if not is_own:
        daemon.process.wait()  # it ends because the state directory is in use
        return None
    return daemon


def _wait_until_one_answers(daemon: Daemon, *, log_start: int) -> bool:
    """True once the control plane just started answers, False if it is another one that does."""
    from specserve_operator.cluster.local import StateDir

    client, state = Client(daemon.state_dir), StateDir(daemon.state_dir)
    deadline = time.monotonic() + _START_TIMEOUT_SECONDS
    while (pid := _answering_pid(client)) is None:
        if daemon.process.poll() is not None and state.control_plane_pid() is None:
            lines = last_log_lines(daemon.state_dir, start=log_start)
            raise CliError(f"the control plane ended at once:\n{lines}")
        if time.monotonic() > deadline:
            raise CliError(f"the control plane does not answer; see {daemon.state_dir / LOG_NAME}")
        time.sleep(_POLL_SECONDS)
    return pid == daemon.process.pid


def _answering_pid(client: Client) -> int | None:
    try:
        return int(client.info()["pid"])
    except NotRunning:
        return None


def write_log_to(stream: TextIO) -> None:
    """Has the control plane's own log written there."""
    logging.basicConfig(stream=stream, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def last_log_lines(state_dir: Path, *, start: int = 0) -> str:
    """The end of the control plane's log, from byte `start` at the earliest."""
    text = (state_dir / LOG_NAME).read_bytes()[start:].decode(errors="replace")
    return "\n".join(text.splitlines()[-_LOG_LINES_SHOWN:])


def stop_control_plane(state_dir: Path, *, timeout_seconds: float) -> bool:
    """Ends the control plane of a state directory, whoever started it, and waits until it has ended.

    Returns False if it had to be killed. Raises `NotRunning`.
    """
    from specserve_operator.cluster.local import StateDir, procfs

    pid = StateDir(state_dir).control_plane_pid()
    process = procfs.read_stat(pid) if pid is not None else None
    if pid is None or process is None:
        raise NotRunning(f"no control plane is running on {state_dir}")
    client, is_asked = Client(state_dir), False
    deadline = time.monotonic() + timeout_seconds
    while procfs.is_running(pid, process.start_ticks):
        # One that is just starting does not listen yet; one that is ending already listens no more.
        is_asked = is_asked or _ask_to_end(client)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _ask_to_end(client: Client) -> bool:
    try:
        client.shut_down()
    except NotRunning:
        return False
    return True


def main() -> None:
    """Runs a control plane until it is told to end."""
    import asyncio

    from specserve_operator.cli.controlplane import Options, run_control_plane
    from specserve_operator.cli.settings import local_config
    from specserve_operator.cluster.protocol import ClusterError

    write_log_to(sys.stderr)
    log = logging.getLogger("specserve")
    try:
        options = Options(Path(sys.argv[1]), local_config())
        asyncio.run(run_control_plane(options, say=log.info))
    except ClusterError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
