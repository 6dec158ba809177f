"""An API server with its store, for tests that need no pods: ready in seconds, without root, any number at once."""

import contextlib
import random
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from hack.kube.access import Access
from hack.kube.commands import environment, installed
from hack.kube.components import (
    API_SERVER_PORT,
    ETCD_PEER_PORT,
    ETCD_PORT,
    Layout,
    api_server_command,
    controller_manager_command,
    etcd_command,
    write_files,
)
from hack.kube.errors import ComponentFailedError, KubeError
from hack.kube.waiting import wait_until

START_TIMEOUT_SECONDS = 120.0
STOP_TIMEOUT_SECONDS = 30.0
ADDRESS_ATTEMPTS = 20


class ControlPlane(Access):
    """etcd and kube-apiserver, and with `controllers` also kube-controller-manager, as children of this process.

    Files of `manifests` are applied before the controllers start: the garbage collector looks for new kinds only
    every 30 seconds, and so knows the kinds of these from its start.

    The processes end with this one, however it ends. Data stay in `folder`: another control plane there, later,
    has them. Deployments get their ReplicaSets and Pods, owners their garbage collection, namespaces and service
    accounts their life; nothing runs pods.
    """

    def __init__(self, folder: Path, *, controllers: bool = False, manifests: Sequence[Path] = ()) -> None:
        folder = folder.resolve()
        address = _recorded_address(folder) or _free_address()
        super().__init__(Layout(folder, address, etcd_address=address))
        self._controllers = controllers
        self._manifests = manifests
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # A child asks the kernel to be killed when the thread that made it ends. This thread stays until `stop`.
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="control-plane")

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts everything; returns when the API server is ready and, with controllers, service accounts are made.

        Raises:
            MissingCommandError: if the commands are not built yet.
            ComponentFailedError: if a process ends; WaitTimeoutError: if it takes too long.
        """
        write_files(self.layout)
        (self.layout.folder / "address").write_text(self.layout.address)
        self._spawn("etcd", etcd_command(self.layout))
        self.start_apiserver()
        for manifest in self._manifests:
            self.kubectl("apply", "--server-side", "-f", str(manifest))
        if self.kubectl("get", "crd", "-o", "name"):
            self.kubectl("wait", "--for=condition=Established", "crd", "--all")
        if self._controllers:
            command = controller_manager_command(self.layout, "--secure-port=0")
            self._spawn("kube-controller-manager", command)
            self._wait(
                lambda: self.has("/api/v1/namespaces/default/serviceaccounts/default"),
                what="the default service account is there",
            )

    def stop(self) -> None:
        """Ends everything at once. Data stay."""
        for name in reversed(list(self._processes)):
            self._kill(name)
        self._spawner.shutdown()

    def start_apiserver(self) -> None:
        """Starts the API server, at the address it had before, and waits until it is ready."""
        # No pod ever asks for the `kubernetes` Service, whose endpoint could not be a loopback address.
        extra = ("--advertise-address=192.0.2.1", "--endpoint-reconciler-type=none")
        self._spawn("kube-apiserver", api_server_command(self.layout, *extra))
        self._wait(self.is_ready, what="the API server is ready")

    def stop_apiserver(self) -> None:
        """Kills the API server: connections break, later ones are refused."""
        self._kill("kube-apiserver")

    def restart_apiserver(self) -> None:
        self.stop_apiserver()
        self.start_apiserver()

    def pause_etcd(self) -> None:
        """Freezes the store: the API server accepts connections, its requests hang and time out."""
        self._processes["etcd"].send_signal(signal.SIGSTOP)

    def resume_etcd(self) -> None:
        self._processes["etcd"].send_signal(signal.SIGCONT)

    def pids(self) -> dict[str, int]:
        """The process ids of what runs, by name."""
        return {name: process.pid for name, process in self._processes.items()}

    def _spawn(self, name: str, command: list[str]) -> None:
        if name in self._processes:
            raise KubeError(f"{name} runs already: stop it first")
        with self.layout.log(name).open("ab") as log:
            self._processes[name] = self._spawner.submit(
                subprocess.Popen,
                [installed("setpriv"), "--pdeathsig=KILL", "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
                # Ctrl-C in a terminal is for the test run, which then stops these in order.
                start_new_session=True,
            ).result()

    def _kill(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            process.kill()
            process.wait(STOP_TIMEOUT_SECONDS)

    def _wait(self, check: Callable[[], bool], *, what: str) -> None:
        def checked() -> bool:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise ComponentFailedError(name, self.layout.log(name))
            return check()

        wait_until(checked, START_TIMEOUT_SECONDS, what=what, hint=f"see {self.layout.folder / 'log'}")


def _recorded_address(folder: Path) -> str:
    """The address that certificates and kubeconfigs in `folder` name; empty if it is new."""
    path = folder / "address"
    return path.read_text() if path.exists() else ""


def _free_address() -> str:
    """A loopback address of its own for each control plane, so that ports can be fixed.

    Ports of 127.0.0.1 would have to be free ones, and a client that calls again and again while the API server is
    down can take such a port for its own end of the connection, whereupon the API server cannot start.
    """
    for _ in range(ADDRESS_ATTEMPTS):
        address = f"127.{random.randint(128, 254)}.{random.randint(0, 255)}.{random.randint(1, 254)}"
        with contextlib.suppress(OSError):
            for port in (ETCD_PORT, ETCD_PEER_PORT, API_SERVER_PORT):
                with socket.socket() as probe:
                    probe.bind((address, port))
            return address
    ports = f"{ETCD_PORT}, {ETCD_PEER_PORT} and {API_SERVER_PORT}"
    raise KubeError(f"no loopback address has ports {ports} free: end what listens there on all addresses")
