"""A whole cluster on one machine: scheduler, kubelets, containers, Services and names. Needs root."""

import contextlib
import fcntl
import http.client
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from hack.kube import cgroups, prerequisites
from hack.kube.access import Access
from hack.kube.certificates import Authority
from hack.kube.commands import built, built_folder, installed, run
from hack.kube.components import (
    ADMIN,
    api_server_command,
    controller_manager_command,
    etcd_command,
    write_files,
)
from hack.kube.errors import ClusterDownError, KubeError
from hack.kube.images import busybox_archive
from hack.kube.network import CONTROL_PLANE_ADDRESS, DNS_ADDRESS, POD_NETWORK, Network, cluster_layout
from hack.kube.node import OWN_FOLDERS, ROOT, Node
from hack.kube.processes import Processes, proportional_memory_bytes
from hack.kube.waiting import wait_until

START_TIMEOUT_SECONDS = 120.0
MAX_NODES = 200
DNS_READY_PORT = 8181
# The kubelet changes these on the whole machine.
SYSCTLS = (
    "vm.overcommit_memory",
    "kernel.panic",
    "kernel.panic_on_oops",
    "kernel.keys.root_maxkeys",
    "kernel.keys.root_maxbytes",
)
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "coredns")


@dataclass(frozen=True, slots=True)
class ComponentStatus:
    """A running component: its outermost process, and the memory of all its processes (PSS), pods' included."""

    name: str
    pid: int
    memory_bytes: int


def default_folder() -> Path:
    """Where a cluster keeps its state: SPECSERVE_KUBE_DIR, or a folder of the user's."""
    override = os.environ.get("SPECSERVE_KUBE_DIR")
    if override:
        return Path(override)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "specserve" / "kube"


class Cluster(Access):
    """The cluster whose state is in `folder`. Its processes outlive this object: `down` ends them."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(cluster_layout((folder or default_folder()).resolve()))
        self._network = Network(self.layout.folder / "netns")
        self._processes = Processes(self._network, self.layout.folder / "log")

    def up(self, nodes: int = 3) -> None:
        """Starts the cluster with `nodes` nodes and waits until it is usable; a running one gets the nodes it lacks.

        Whatever a killed run left is removed first: a cluster that lost a part is not repaired but begun anew.

        Raises:
            KubeError: with what is missing or did not start.
        """
        self._check_preconditions(nodes)
        with self._locked():
            wanted = [Node(self.layout, number) for number in range(1, nodes + 1)]
            if not self._is_whole():
                self._remove()
                self._prepare()
            authority = write_files(self.layout)
            self._start_control_plane()
            for node in [node for node in wanted if node.name not in self._processes.running()]:
                self._launch_node(node, authority)
            self._start_services()
            self._wait_for_nodes(wanted)

    def down(self) -> None:
        """Ends everything and removes all but the logs. Harmless if nothing runs."""
        if not self.layout.folder.exists():
            return
        _require_root()
        with self._locked():
            self._remove()

    def status(self) -> list[ComponentStatus]:
        """What runs, in the order of names; empty if the cluster is down."""
        return [
            ComponentStatus(name, pid, proportional_memory_bytes(pid))
            for name, pid in sorted(self._processes.running().items())
        ]

    def nodes(self) -> list[Node]:
        """The nodes of the cluster, the stopped ones too."""
        numbers = [int(path.parent.name.removeprefix("node")) for path in self.layout.folder.glob("node*/cni")]
        return [Node(self.layout, number) for number in sorted(numbers)]

    def load_image(self, *archives: Path, nodes: Sequence[str] = ()) -> None:
        """Imports image archives (Docker's or OCI's format) into `nodes`, by default all that run, two at a time."""
        targets = [self._node(name) for name in nodes] or self._running_nodes()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda node: _import_images(node, archives), targets))

    def set_gpus(self, node: str, count: int) -> None:
        """Lets a node report `count` GPUs (nvidia.com/gpu): a number that the scheduler counts with, and no more."""
        resources = {"nvidia.com/gpu": str(count)}
        patch = json.dumps({"status": {"capacity": resources, "allocatable": resources}})
        self.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", patch)

    def stop_node(self, name: str) -> None:
        """Cuts a node's power: its kubelet, containerd and pods are gone at once. Its images stay.

        The cluster notices after the controllers' 50 seconds.
        """
        self._processes.kill(self._node(name).name)

    def start_node(self, name: str) -> None:
        """Boots a stopped node and waits until it is ready. GPUs are to be set again."""
        node = self._node(name)
        if name in self._processes.running():
            return
        self._launch_node(node, Authority.load(self.layout.pki))
        self._wait_for_nodes([node])

    def stop_apiserver(self) -> None:
        """Kills the API server; everything else goes on as it can."""
        self._processes.kill("kube-apiserver")

    def start_apiserver(self) -> None:
        """Starts the API server and waits until it is ready."""
        self._start_api_server()

    def restart_apiserver(self) -> None:
        self.stop_apiserver()
        self.start_apiserver()

    def command_inside(self, *command: str) -> list[str]:
        """The command line that runs `command` in the cluster's network, where names of Services do not resolve."""
        return self._network.enter(*command)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps a second `up` or `down` waiting until this one is done."""
        self.layout.folder.mkdir(parents=True, exist_ok=True)
        with (self.layout.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _check_preconditions(self, nodes: int) -> None:
        refusal = prerequisites.nodes_refusal()
        if refusal:
            raise KubeError(f"{refusal}: use a control plane (python -m hack.kube control-plane DIR)")
        if not 1 <= nodes <= MAX_NODES:
            raise KubeError(f"nodes: {nodes} is not between 1 and {MAX_NODES}")
        for command in prerequisites.CLUSTER_COMMANDS:
            installed(command)
        for path in (self.layout.folder, built_folder(), ROOT, Path(sys.executable)):
            for own in OWN_FOLDERS.values():
                if path.is_relative_to(own):
                    raise KubeError(f"{path} is in {own}, which a node replaces by its own: use another folder")

    def _is_whole(self) -> bool:
        return self._processes.running().keys() >= set(CONTROL_PLANE)

    def _prepare(self) -> None:
        folder = self.layout.folder
        shutil.rmtree(folder / "log", ignore_errors=True)
        (folder / "log").mkdir()
        (folder / "sysctl").write_text(run("sysctl", *SYSCTLS))
        (folder / "resolv.conf").write_text(f"nameserver {CONTROL_PLANE_ADDRESS}\n")
        (folder / "Corefile").write_text(_COREFILE.format(kubeconfig=self.kubeconfig))
        shutil.copyfile(busybox_archive(), folder / "busybox.tar")
        self._network.create()

    def _start_control_plane(self) -> None:
        layout = self.layout
        self._processes.start("etcd", etcd_command(layout))
        self._start_api_server()
        self._processes.start("kube-controller-manager", controller_manager_command(layout, "--bind-address=127.0.0.1"))
        scheduler = f"--kubeconfig={layout.kubeconfig('kube-scheduler')}"
        self._processes.start(
            "kube-scheduler", [built("kube-scheduler"), scheduler, "--bind-address=127.0.0.1", "--leader-elect=false"]
        )

    def _start_api_server(self) -> None:
        pki = self.layout.pki
        command = api_server_command(
            self.layout,
            f"--advertise-address={self.layout.address}",
            # Names of nodes do not resolve; exec and logs need the kubelet.
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-certificate-authority={pki / 'ca.crt'}",
            f"--kubelet-client-certificate={pki / f'{ADMIN}.crt'}",
            f"--kubelet-client-key={pki / f'{ADMIN}.key'}",
        )
        self._processes.start("kube-apiserver", command)
        self._wait(self.is_ready, "etcd", "kube-apiserver", what="the API server is ready")

    def _launch_node(self, node: Node, authority: Authority) -> None:
        self._withdraw_readiness(node)
        # As after a boot: what the containerd of before knew of its processes is here.
        shutil.rmtree(node.folder / "run", ignore_errors=True)
        node.write_files(authority)
        self._network.add_address(node.address)
        cgroups.create(node.name)
        self._processes.start(node.name, node.command(), PYTHONPATH=str(ROOT), SPECSERVE_KUBE_BIN=str(built_folder()))

    def _withdraw_readiness(self, node: Node) -> None:
        """Marks a node that had run before as unknown, as the controllers do when they have missed it for long."""
        if self.has(f"/api/v1/nodes/{node.name}"):
            condition = {"type": "Ready", "status": "Unknown", "reason": "Stopped", "message": "it did not run"}
            patch = json.dumps({"status": {"conditions": [condition]}})
            self.kubectl("patch", "node", node.name, "--subresource=status", "-p", patch)

    def _start_services(self) -> None:
        # Flags and no file: kube-proxy ends when its file is written again. It must not set limits on connection
        # tracking, which belong to the whole machine.
        proxy = [
            built("kube-proxy"),
            f"--kubeconfig={self.layout.kubeconfig('kube-proxy')}",
            "--proxy-mode=nftables",
            f"--cluster-cidr={POD_NETWORK}.0.0/16",
            "--hostname-override=node1",
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0s",
            "--conntrack-tcp-timeout-close-wait=0s",
        ]
        self._processes.start("kube-proxy", proxy)
        self._processes.start("coredns", [built("coredns"), "-conf", str(self.layout.folder / "Corefile")])
        self.kubectl("apply", "--server-side", "-f", "-", stdin=_DNS_SERVICE)
        self._wait(_is_dns_ready, "kube-proxy", "coredns", what="CoreDNS is ready")

    def _wait_for_nodes(self, nodes: Sequence[Node]) -> None:
        names = {node.name for node in nodes}
        self._wait(lambda: self._ready_nodes() >= names, *CONTROL_PLANE, *sorted(names), what="the nodes are ready")
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self._wait(lambda: self.has(account), *CONTROL_PLANE, what="the default service account is there")

    def _ready_nodes(self) -> set[str]:
        ready = set()
        _, body = self.get("/api/v1/nodes")
        for node in json.loads(body)["items"]:
            if any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", [])):
                ready.add(node["metadata"]["name"])
        return ready

    def _wait(self, check: Callable[[], bool], *components: str, what: str) -> None:
        def checked() -> bool:
            self._processes.require(*components)
            return check()

        wait_until(checked, START_TIMEOUT_SECONDS, what=what, hint=f"see {self.layout.folder / 'log'}")

    def _remove(self) -> None:
        self._processes.kill_all()
        self._network.remove()
        wait_until(cgroups.remove, START_TIMEOUT_SECONDS, what="the cluster's control groups are empty")
        folder = self.layout.folder
        if (folder / "sysctl").exists():
            run("sysctl", "-q", "-p", str(folder / "sysctl"))
        if f" {folder}/" in Path("/proc/self/mountinfo").read_text():
            raise KubeError(f"something is mounted below {folder}: see /proc/self/mountinfo, unmount it, try again")
        doomed = [str(path) for path in folder.iterdir() if path.name not in {"log", "lock"}]
        # Not shutil.rmtree: nodes hold tens of thousands of files of images.
        run("rm", "-rf", "--one-file-system", *doomed)

    def _node(self, name: str) -> Node:
        for node in self.nodes():
            if node.name == name:
                return node
        raise KubeError(f"there is no node {name!r}: the nodes are {', '.join(n.name for n in self.nodes()) or 'none'}")

    def _running_nodes(self) -> list[Node]:
        running = self._processes.running()
        nodes = [node for node in self.nodes() if node.name in running]
        if not nodes:
            raise ClusterDownError
        return nodes


_COREFILE = f"""\
. {{{{
    bind {CONTROL_PLANE_ADDRESS}
    errors
    ready {CONTROL_PLANE_ADDRESS}:{DNS_READY_PORT}
    kubernetes cluster.local in-addr.arpa {{{{
        kubeconfig {{kubeconfig}}
        ttl 5
    }}}}
    cache 5
}}}}
"""

# CoreDNS is a process beside the nodes: a Service without a selector, and where its one server is.
_DNS_SERVICE = f"""\
apiVersion: v1
kind: Service
metadata: {{name: kube-dns, namespace: kube-system}}
spec:
  clusterIP: {DNS_ADDRESS}
  ports: [{{name: dns, port: 53, protocol: UDP}}, {{name: dns-tcp, port: 53, protocol: TCP}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: kube-dns, namespace: kube-system, labels: {{kubernetes.io/service-name: kube-dns}}}}
addressType: IPv4
endpoints: [{{addresses: [{CONTROL_PLANE_ADDRESS}]}}]
ports: [{{name: dns, port: 53, protocol: UDP}}, {{name: dns-tcp, port: 53, protocol: TCP}}]
"""


def _require_root() -> None:
    if os.geteuid() != 0:
        raise KubeError("a cluster with nodes is ended by root")


def _import_images(node: Node, archives: Sequence[Path]) -> None:
    for archive in archives:
        socket = str(node.containerd_socket)
        run("ctr", "--address", socket, "--namespace=k8s.io", "images", "import", str(archive))


def _is_dns_ready() -> bool:
    connection = http.client.HTTPConnection(CONTROL_PLANE_ADDRESS, DNS_READY_PORT, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
