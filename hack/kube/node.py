"""One node: its files, and the process that is the first of its pid namespace.

A node has its own mount namespace, with /run, /var/lib and /var/log of its own, so that containerd, CNI and the
kubelet keep their default paths while hostPath volumes see the machine's other folders. It has its own pid
namespace, so that the kernel ends all of it with its first process. The network namespace is the cluster's.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from hack.kube import cgroups
from hack.kube.certificates import Authority
from hack.kube.commands import built, environment, installed, run
from hack.kube.components import Layout, write_kubeconfig
from hack.kube.errors import CommandFailedError
from hack.kube.images import BUSYBOX_IMAGE
from hack.kube.network import DNS_ADDRESS, POD_NETWORK, cluster_layout, node_address
from hack.kube.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
OWN_FOLDERS = {"run": "/run", "var-lib": "/var/lib", "var-log": "/var/log"}
CONTAINERD_SOCKET = "run/containerd/containerd.sock"
CONTAINERD_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Node:
    """Node `number`, from 1, of the cluster in `layout`."""

    layout: Layout
    number: int

    @property
    def name(self) -> str:
        return f"node{self.number}"

    @property
    def folder(self) -> Path:
        return self.layout.folder / self.name

    @property
    def address(self) -> str:
        return node_address(self.number)

    @property
    def containerd_socket(self) -> Path:
        """The socket of the node's containerd, as the machine sees it."""
        return self.folder / CONTAINERD_SOCKET

    def write_files(self, authority: Authority) -> None:
        """Writes the configuration of CNI, containerd and kubelet, and the kubelet's credentials."""
        for name in ("cni", *OWN_FOLDERS):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        write_kubeconfig(
            self.layout,
            authority,
            user=f"system:node:{self.name}",
            groups=("system:nodes",),
            name=self.name,
            hosts=(self.address, self.name),
        )
        (self.folder / "cni" / "10-bridge.conflist").write_text(json.dumps(self._cni()))
        (self.folder / "containerd.toml").write_text(_CONTAINERD.format(cni=self.folder / "cni", pause=BUSYBOX_IMAGE))
        (self.folder / "kubelet.yaml").write_text(yaml.safe_dump(self._kubelet(), sort_keys=False))

    def command(self) -> list[str]:
        """Starts the node, within the cluster's network namespace; the environment must let Python find this module."""
        spaces = ["--mount", "--propagation=private", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
        main = [sys.executable, "-m", "hack.kube.node", str(self.layout.folder), str(self.number)]
        return [installed("unshare"), *spaces, "--", *main]

    def _cni(self) -> dict[str, object]:
        ranges = [[{"subnet": f"{POD_NETWORK}.{self.number}.0/24"}]]
        bridge = {
            "type": "bridge",
            "bridge": f"pods{self.number}",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {"type": "host-local", "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}]},
        }
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, ports]}

    def _kubelet(self) -> dict[str, object]:
        pki = self.layout.pki
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "healthzBindAddress": self.address,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(pki / f"{self.name}.crt"),
            "tlsPrivateKeyFile": str(pki / f"{self.name}.key"),
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": cgroups.kubelet_root(self.name),
            "failCgroupV1": False,
            "failSwapOn": False,
            # The root device is not found in a mount namespace like this one.
            "localStorageCapacityIsolation": False,
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            # Images were loaded by hand and cannot be pulled again.
            "imageGCHighThresholdPercent": 100,
            "clusterDNS": [DNS_ADDRESS],
            "clusterDomain": "cluster.local",
            "resolvConf": str(self.layout.folder / "resolv.conf"),
        }


_CONTAINERD = """\
version = 2
# This plugin would make a folder in /opt.
disabled_plugins = ["io.containerd.internal.v1.opt"]
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{cni}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""


def main(folder: Path, number: int) -> None:
    """The first process of a node: mounts, starts containerd and the kubelet, ends when one of them does."""
    node = Node(cluster_layout(folder), number)
    socket.sethostname(node.name)
    for own, path in OWN_FOLDERS.items():
        run("mount", "--bind", str(node.folder / own), path)
    # Mounts that a container makes in a volume with bidirectional propagation reach other containers.
    run("mount", "--make-rshared", "/")
    with node.layout.log(f"{node.name}-containerd").open("ab") as log:
        containerd = subprocess.Popen(
            [installed("containerd"), f"--config={node.folder / 'containerd.toml'}"],
            stdout=log,
            stderr=log,
            env=environment(),
        )
    wait_until(
        lambda: containerd.poll() is not None or _is_answering(),
        CONTAINERD_TIMEOUT_SECONDS,
        what=f"containerd of {node.name} answers",
    )
    run("ctr", "--namespace=k8s.io", "images", "import", str(node.layout.folder / "busybox.tar"))
    kubelet = subprocess.Popen(
        [
            built("kubelet"),
            f"--config={node.folder / 'kubelet.yaml'}",
            f"--kubeconfig={node.layout.kubeconfig(node.name)}",
            f"--hostname-override={node.name}",
            f"--node-ip={node.address}",
        ],
        env=environment(),
    )
    # Orphans of the namespace become children of its first process, which must reap them.
    while os.wait()[0] not in {containerd.pid, kubelet.pid}:
        pass


def _is_answering() -> bool:
    try:
        run("ctr", "version")
    except CommandFailedError:
        return False
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
