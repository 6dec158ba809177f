"""The network namespace that a whole cluster lives in, and the cable that joins it to the machine.

Bridges, rules, forwarding and listening ports stay inside and vanish with it. Addresses: the control plane
10.99.0.1, node N 10.99.0.(10 + N), the machine 10.99.0.254; pods of node N 10.244.N.0/24; Services 10.97.0.0/16.
"""

import os
from pathlib import Path

from hack.kube.commands import installed, run
from hack.kube.components import Layout
from hack.kube.errors import KubeError

LINK = "sskube0"
NODE_NETWORK = "10.99.0"
CONTROL_PLANE_ADDRESS = f"{NODE_NETWORK}.1"
MACHINE_ADDRESS = f"{NODE_NETWORK}.254"
POD_NETWORK = "10.244"
# Not the usual 10.96: on a machine that is itself a node, its own rules would take that range.
SERVICE_NETWORK = "10.97"
DNS_ADDRESS = f"{SERVICE_NETWORK}.0.10"


def cluster_layout(folder: Path) -> Layout:
    """The layout of a whole cluster. No pod reaches etcd."""
    return Layout(folder, CONTROL_PLANE_ADDRESS, etcd_address="127.0.0.1", service_network=SERVICE_NETWORK)


def node_address(number: int) -> str:
    return f"{NODE_NETWORK}.{10 + number}"


class Network:
    """A network namespace that `file` keeps alive, with its cable to the machine."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def exists(self) -> bool:
        return os.path.ismount(self._file)

    def enter(self, *command: str) -> list[str]:
        """The command line that runs `command` inside."""
        return [installed("nsenter"), f"--net={self._file}", "--", *command]

    def create(self) -> None:
        """Makes the namespace; whatever is left of an unfinished one goes first."""
        self._refuse_a_second_cluster()
        self._file.touch()
        # Not `ip netns add`, which leaves a mount of its own on the machine.
        run("unshare", f"--net={self._file}", "true")
        run("ip", "link", "add", LINK, "type", "veth", "peer", "name", "eth0", "netns", str(self._file))
        inside = [
            "link set lo up",
            "link set eth0 up",
            f"address add {CONTROL_PLANE_ADDRESS}/24 dev eth0",
            # Pods reach pods, Services and the machine's end of the cable. Packets to elsewhere would leave the
            # machine if it forwards.
            "route add unreachable default",
            # A local process needs some route to a Service before kube-proxy's rules replace the address.
            f"route add {SERVICE_NETWORK}.0.0/16 via {MACHINE_ADDRESS}",
        ]
        run(*self.enter("ip", "-batch", "-"), stdin="\n".join(inside))
        run(*self.enter("sysctl", "-q", "net.ipv4.ip_forward=1"))
        outside = [
            f"address add {MACHINE_ADDRESS}/24 dev {LINK}",
            f"link set {LINK} up",
            f"route add {POD_NETWORK}.0.0/16 via {CONTROL_PLANE_ADDRESS}",
            f"route add {SERVICE_NETWORK}.0.0/16 via {CONTROL_PLANE_ADDRESS}",
        ]
        run("ip", "-batch", "-", stdin="\n".join(outside))

    def add_address(self, address: str) -> None:
        run(*self.enter("ip", "address", "replace", f"{address}/24", "dev", "eth0"))

    def remove(self) -> None:
        """Takes the namespace and the cable away. Its processes must have ended."""
        if not self.exists():
            return
        if has_link():
            run("ip", "link", "delete", LINK)
        run("umount", str(self._file))

    def process_ids(self) -> list[int]:
        """All processes inside, except those of pods with a network of their own."""
        if not self.exists():
            return []
        namespace = self._file.stat()
        return [pid for pid in _all_process_ids() if _is_in(pid, namespace)]

    def _refuse_a_second_cluster(self) -> None:
        if has_link():
            raise KubeError(
                f"the network link {LINK} exists: a cluster of another folder runs here. Take that down first "
                "(SPECSERVE_KUBE_DIR=FOLDER python -m hack.kube down)"
            )


def has_link() -> bool:
    return (Path("/sys/class/net") / LINK).exists()


def _all_process_ids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _is_in(pid: int, namespace: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), namespace)
    except OSError:
        return False
