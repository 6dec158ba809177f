"""The small process around each container, which sees to it that nothing of a container outlives it.

Run as `python -I -S shim.py` with the standard library only. The first line of standard input is a JSON object:

    argv, env, cwd      what to run
    log                 file for its output, appended to
    pid_file            where to note the container's pid, for a control plane that has to clean up after a crash
    orphan_grace_seconds, linger_seconds   see options.py

More lines are orders: TERM (to the main process), KILL (everything). The end of standard input means that the control
plane is gone: SIGTERM, the grace, then everything is killed. Standard output gets one JSON object a line:

    {"started": <pid>} or {"failed": "<why>"}, then {"exited": <code>, "signal": <number or 0>, "killed": <by an order>}

The shim adopts orphans (PR_SET_CHILD_SUBREAPER), so "no child left" means that no descendant is left. If the shim
itself is killed, the kernel kills the main process (PR_SET_PDEATHSIG), and the control plane looks for the rest.
"""

import ctypes
import json
import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_INTERVAL_SECONDS = 0.02
_KEPT_SIGNALS = {signal.SIGKILL, signal.SIGSTOP}


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


class Shim:
    def __init__(self, config: dict) -> None:  # type: ignore[type-arg]
        self._config = config
        self._main_pid = 0
        self._start_ticks = 0
        self._exit_status: int | None = None
        self._children_left = True
        self._killed_by_order = False
        self._kill_at: float | None = None  # monotonic time from which everything is killed
        self._orders_open = True

    def run(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        # A SIGTERM waits until there is a main process to pass it on to.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGTERM, lambda *_: self._give_up())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if not self._start():
            return
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        while self._children_left:
            self._wait(wake_read)
            self._reap()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_descendants()
        self._remove_pid_file()
        self._report_exit()

    def _start(self) -> bool:
        """Starts the main process and reports it, or why it could not be."""
        error_read, error_write = os.pipe2(os.O_CLOEXEC)
        own_pid = os.getpid()
        # The note comes after the process. If this one is killed in between, the kernel kills the main process
        # (PR_SET_PDEATHSIG), and what that one has started is known by the pod's uid in its environment.
        self._main_pid = os.fork()
        if self._main_pid == 0:
            self._become_container(own_pid, error_write)
        os.close(error_write)
        self._note_pid()
        with os.fdopen(error_read) as pipe:
            error = pipe.read()
        if error:
            os.waitpid(self._main_pid, 0)
            self._remove_pid_file()
            self._report({"failed": error})
            return False
        self._report({"started": self._main_pid})
        return True

    def _become_container(self, shim_pid: int, error_write: int) -> None:
        """In the child: never returns."""
        try:
            os.setsid()
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != shim_pid:
                os._exit(137)
            signal.set_wakeup_fd(-1)
            for number in signal.valid_signals() - _KEPT_SIGNALS:
                if signal.getsignal(number) is not None:
                    signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(2, 1)  # standard error of the shim is the log
            os.chdir(self._config["cwd"])
            argv, env = self._config["argv"], self._config["env"]
            os.execvpe(argv[0], argv, env)
        except BaseException as error:
            os.write(error_write, _explain(error, self._config).encode())
        os._exit(127)

    def _wait(self, wake_read: int) -> None:
        """Until something happens: an order, a child's end, or the time to kill."""
        timeout = None
        if self._kill_at is not None:
            timeout = max(_KILL_INTERVAL_SECONDS, self._kill_at - time.monotonic())
        sources = [wake_read, 0] if self._orders_open else [wake_read]
        readable, _, _ = select.select(sources, [], [], timeout)
        if wake_read in readable:
            os.read(wake_read, 512)
        if 0 in readable:
            self._obey(os.read(0, 512))

    def _obey(self, orders: bytes) -> None:
        if not orders:
            self._orders_open = False
            self._give_up()
        if b"TERM" in orders:
            self._terminate()
        if b"KILL" in orders:
            self._killed_by_order = True
            self._kill_from(0.0)

    def _give_up(self) -> None:
        """The control plane is gone, or somebody asked this process to end."""
        self._terminate()
        self._kill_from(self._config["orphan_grace_seconds"])

    def _terminate(self) -> None:
        if self._exit_status is None and self._main_pid > 0:  # pid 0 would be this process's whole group
            os.kill(self._main_pid, signal.SIGTERM)

    def _kill_from(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)

    def _reap(self) -> None:
        """Collects ended children. With the main process the container ends: what it left gets a moment, no more."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._children_left = False
                return
            if pid == 0:
                return
            if pid == self._main_pid:
                self._exit_status = status
                self._kill_from(self._config["linger_seconds"])

    def _kill_descendants(self) -> None:
        for pid in _descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _note_pid(self) -> None:
        path = self._config["pid_file"]
        temporary = path + ".new"
        with open(temporary, "w") as file:
            note = {"pid": self._main_pid, "startTicks": _start_ticks(self._main_pid), "shim": os.getpid()}
            json.dump(note | {"boot": _boot_id()}, file)
        os.replace(temporary, path)

    def _remove_pid_file(self) -> None:
        try:
            os.unlink(self._config["pid_file"])
        except FileNotFoundError:
            return

    def _report_exit(self) -> None:
        status = self._exit_status or 0
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = 128 + number if number else os.WEXITSTATUS(status)
        self._report({"exited": code, "signal": number, "killed": self._killed_by_order})

    def _report(self, message: dict) -> None:  # type: ignore[type-arg]
        try:
            os.write(1, (json.dumps(message) + "\n").encode())
        except BrokenPipeError:
            return  # nobody is left to hear it


def _explain(error: BaseException, config: dict) -> str:  # type: ignore[type-arg]
    command = config["argv"][0]
    if isinstance(error, FileNotFoundError) and os.path.isdir(config["cwd"]):
        where = "" if "/" in command else f" in PATH ({config['env'].get('PATH', '')})"
        return f"{command}: no such executable{where}"
    return f"{command}: {error}"


def _stat_fields(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat") as file:
        text = file.read()
    return text[text.rindex(")") + 2 :].split()


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _start_ticks(pid: int) -> int:
    return int(_stat_fields(pid)[19])


def _descendants(root: int) -> list[int]:
    """All processes below `root`, without zombies."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = _stat_fields(int(entry))
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def _read_config() -> dict:  # type: ignore[type-arg]
    line = b""
    while not line.endswith(b"\n"):
        # Byte by byte past the line would swallow an order; the sender waits for a report before it gives one.
        part = os.read(0, 65536)
        if not part:
            sys.exit(1)
        line += part
    config: dict = json.loads(line)  # type: ignore[type-arg]
    return config


def main() -> None:
    config = _read_config()
    log = os.open(config["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.dup2(log, 2)
    Shim(config).run()


if __name__ == "__main__":
    main()
