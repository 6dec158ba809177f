"""The command line: python -m hack.kube COMMAND."""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from hack.kube import prerequisites
from hack.kube.cluster import Cluster
from hack.kube.commands import built
from hack.kube.control_plane import ControlPlane
from hack.kube.errors import ClusterDownError, KubeError
from hack.kube.product_images import build_product_images

app = typer.Typer(
    help="Real Kubernetes for tests on this machine.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
CANNOT_RUN_NODES = 3
NodeName = Annotated[str, typer.Argument(metavar="NODE", show_default=False)]


@app.command()
def setup(
    control_plane_only: Annotated[bool, typer.Option(help="Without the Debian packages that nodes need.")] = False,
) -> None:
    """Install and build what is missing."""
    prerequisites.setup(with_nodes=not control_plane_only)


@app.command()
def check() -> None:
    """Say why this machine cannot run nodes, and end with exit code 3, if that is so."""
    refusal = prerequisites.nodes_refusal()
    if refusal:
        print(f"this machine cannot run nodes, only a control plane: {refusal}", file=sys.stderr)
        raise typer.Exit(CANNOT_RUN_NODES)


@app.command()
def control_plane(
    folder: Annotated[Path, typer.Argument(help="For its files and data.", show_default=False)],
    controllers: Annotated[bool, typer.Option(help="Run kube-controller-manager too.")] = True,
) -> None:
    """Run an API server, without nodes and without root, until Ctrl-C."""
    told_to_stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: told_to_stop.set())
    with ControlPlane(folder, controllers=controllers) as started:
        print(f"export KUBECONFIG={started.kubeconfig}", flush=True)
        told_to_stop.wait()


@app.command()
def up(nodes: Annotated[int, typer.Option(help="How many nodes.")] = 3) -> None:
    """Start the cluster, or add the nodes that it lacks."""
    cluster = Cluster()
    cluster.up(nodes)
    print(f"export KUBECONFIG={cluster.kubeconfig}")


@app.command()
def down() -> None:
    """End and remove the cluster. Logs stay."""
    Cluster().down()


@app.command()
def status() -> None:
    """Show processes, memory and nodes."""
    cluster = Cluster()
    components = cluster.status()
    if not components:
        raise ClusterDownError
    for component in components:
        print(f"{component.name:24} pid {component.pid:<8} {component.memory_bytes >> 20:6} MiB")
    print(f"{'total':36} {sum(c.memory_bytes for c in components) >> 20:7} MiB")
    print(cluster.kubectl("get", "nodes", "-o", "wide"), end="")


@app.command()
def kubeconfig() -> None:
    """Print the path of the administrator's kubeconfig."""
    print(Cluster().kubeconfig)


@app.command(context_settings=ANY_ARGUMENTS)
def kubectl() -> None:
    """Run kubectl as the administrator."""
    # Not what was parsed: parsing takes the `--` of `kubectl exec` away.
    command = Cluster().kubectl_command(*sys.argv[2:])
    os.execv(command[0], command)


@app.command(context_settings=ANY_ARGUMENTS)
def helm() -> None:
    """Run helm as the administrator."""
    command = [built("helm"), f"--kubeconfig={Cluster().kubeconfig}", *sys.argv[2:]]
    os.execv(command[0], command)


@app.command()
def load_image(
    archives: Annotated[list[Path], typer.Argument(metavar="TAR...", show_default=False)],
    node: Annotated[list[str] | None, typer.Option(help="Only into this node; may be repeated.")] = None,
) -> None:
    """Import image archives into the nodes."""
    Cluster().load_image(*archives, nodes=node or [])


@app.command()
def build_images(
    out: Annotated[Path, typer.Option(help="Folder for operator.tar and worker.tar.", show_default=False)],
) -> None:
    """Build the product's images."""
    for archive in build_product_images(out):
        print(archive)


@app.command()
def gpus(node: NodeName, count: Annotated[int, typer.Argument(show_default=False)]) -> None:
    """Let a node report GPUs."""
    Cluster().set_gpus(node, count)


@app.command()
def stop_node(node: NodeName) -> None:
    """Cut a node's power."""
    Cluster().stop_node(node)


@app.command()
def start_node(node: NodeName) -> None:
    """Boot a stopped node."""
    Cluster().start_node(node)


@app.command()
def restart_apiserver() -> None:
    """Kill the API server and start it again."""
    Cluster().restart_apiserver()


def main() -> int:
    try:
        app()
    except KubeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
