"""What can go wrong with a test cluster; each message says what to do."""

from collections.abc import Sequence
from pathlib import Path


class KubeError(Exception):
    """Base of this package's errors. The command line prints it without a traceback."""


class MissingCommandError(KubeError):
    """A command that the cluster consists of is not on this machine."""

    def __init__(self, command: str) -> None:
        super().__init__(f"{command} is missing: run 'python -m hack.kube setup' (as root for Debian packages)")


class CommandFailedError(KubeError):
    """A command of the system failed; the message has its error output."""

    def __init__(self, command: Sequence[str], stderr: str) -> None:
        super().__init__(f"{' '.join(command)}: {stderr.strip()}")


class ComponentFailedError(KubeError):
    """A process of the cluster ended although it should run; the message has the end of its log."""

    def __init__(self, name: str, log: Path) -> None:
        super().__init__(f"{name} has ended; the end of {log}:\n{log_tail(log)}")


class WaitTimeoutError(KubeError):
    """A condition did not come true in time."""

    def __init__(self, what: str, timeout_seconds: float, *, hint: str = "") -> None:
        super().__init__(f"not within {timeout_seconds:.0f} s: {what}" + (f"; {hint}" if hint else ""))


class ClusterDownError(KubeError):
    """Something needs a running cluster and there is none."""

    def __init__(self) -> None:
        super().__init__("the cluster is down: python -m hack.kube up")


class KubectlError(KubeError):
    """kubectl ended with an error: `exit_code` and `stderr` have it as it came."""

    def __init__(self, arguments: tuple[str, ...], exit_code: int, stderr: str) -> None:
        super().__init__(f"kubectl {' '.join(arguments)}: exit code {exit_code}: {stderr.strip()}")
        self.exit_code = exit_code
        self.stderr = stderr


def log_tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log; empty if there is no such file."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
