"""What a machine must have before a cluster can be made: Debian packages, and commands built from Go modules."""

import os
import subprocess

from hack.kube import cgroups
from hack.kube.commands import TOOLS, built_folder, environment, installed, run
from hack.kube.errors import KubeError, MissingCommandError

# Each package with a command that shows that it is there.
_CONTROL_PLANE_PACKAGES = {"util-linux": "setpriv"}
_CLUSTER_PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "iproute2": "ip",
    "iptables": "iptables",
    "nftables": "nft",
    "procps": "sysctl",
    "mount": "mount",
    "busybox-static": "/bin/busybox",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
}
CLUSTER_COMMANDS = tuple(_CLUSTER_PACKAGES.values())


class MissingPackagesError(KubeError):
    """Debian packages are missing and this user cannot install them."""

    def __init__(self, packages: list[str]) -> None:
        super().__init__(f"missing Debian packages: as root, apt-get install {' '.join(packages)}")


def setup(*, with_nodes: bool) -> None:
    """Makes sure of the built commands, and with nodes of the Debian packages. Returns at once when all is there.

    The first build takes 11 minutes on two cores, and a Go toolchain.

    Raises:
        MissingPackagesError: if packages are missing and the user is not root.
        CommandFailedError: if apt-get or the build fails; their output has gone to the terminal.
    """
    packages = _CONTROL_PLANE_PACKAGES | (_CLUSTER_PACKAGES if with_nodes else {})
    missing = [package for package, command in packages.items() if not _is_installed(command)]
    if missing:
        if os.geteuid() != 0:
            raise MissingPackagesError(missing)
        _install(missing)
    _require_success([str(TOOLS / "build.sh")], {**os.environ, "SPECSERVE_KUBE_BIN": str(built_folder())})


def nodes_refusal() -> str:
    """Why this machine cannot run nodes, whatever is installed; empty if it can."""
    if os.geteuid() != 0:
        return "nodes need root"
    try:
        run("unshare", "--net", "--mount", "--pid", "--fork", "true")
    except KubeError as error:
        return f"namespaces cannot be made: {error}"
    return cgroups.refusal()


def _install(packages: list[str]) -> None:
    quiet = {**environment(), "DEBIAN_FRONTEND": "noninteractive"}
    # Package lists may be old or, in a container, not there.
    _require_success([installed("apt-get"), "update"], quiet)
    _require_success([installed("apt-get"), "install", "--yes", "--no-install-recommends", *packages], quiet)


def _require_success(command: list[str], variables: dict[str, str]) -> None:
    code = subprocess.run(command, check=False, env=variables).returncode
    if code:
        raise KubeError(f"{command[0]} failed with exit code {code}: its output says why")


def _is_installed(command: str) -> bool:
    try:
        installed(command)
    except MissingCommandError:
        return False
    return True
