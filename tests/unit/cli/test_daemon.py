"""Starting the control plane in the background while somebody else does the same."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specserve_operator.cli import daemon
from specserve_operator.cli.client import NotRunning
from specserve_operator.cli.errors import CliError


class EndedProcess:
    """A control plane that has found the state directory in use."""

    pid = 4711

    def __init__(self, _: object, *, stdout: Any, **__: object) -> None:
        stdout.write(b"in use\n")

    def poll(self) -> int:
        return 1

    def wait(self, _: float | None = None) -> int:
        return 1

    def terminate(self) -> None:
        pass


class StubClient:
    """The second time it is asked, another control plane answers."""

    answers: list[dict[str, int] | None]

    def __init__(self, _: Path) -> None:
        pass

    def info(self) -> dict[str, int]:
        answer = self.answers.pop(0)
        if answer is None:
            raise NotRunning("not yet")
        return answer

    def is_running(self) -> bool:
        return self.answers.pop(0) is not None


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(subprocess, "Popen", EndedProcess)
    monkeypatch.setattr(daemon, "Client", StubClient)
    monkeypatch.setattr(daemon, "_POLL_SECONDS", 0)
    (tmp_path / daemon.LOG_NAME).write_bytes(b"of the first\n")
    return tmp_path


def test_a_start_during_another_start_keeps_its_log_and_reports_the_other(
    started: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specserve_operator.cluster.local import StateDir

    monkeypatch.setattr(StateDir, "control_plane_pid", lambda _: os.getpid())
    StubClient.answers = [None, {"pid": os.getpid()}]
    assert daemon.start_daemon(started) is None
    assert (started / daemon.LOG_NAME).read_bytes() == b"of the first\nin use\n"


def test_a_start_that_fails_shows_its_own_log_only(started: Path) -> None:
    StubClient.answers = [None]
    with pytest.raises(CliError, match=r"ended at once:\nin use$"):
        daemon.start_daemon(started)
