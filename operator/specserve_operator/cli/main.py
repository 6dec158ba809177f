"""The `specserve` command: arguments here, the work in the module of each command.

Heavy imports are made by the command that needs them: `specserve get` must answer at once.
"""

import json
import sys
import traceback
from dataclasses import asdict, dataclass
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated

import typer

from specserve_operator.cli.client import BAD_REQUEST, ApiError, Client, NotRunning
from specserve_operator.cli.errors import EXIT_FAILURE, EXIT_USAGE, CliError
from specserve_operator.cli.output import OutputFormat


@dataclass(slots=True)
class Invocation:
    """What holds for one run of the command whatever it does."""

    debug: bool = False


app = typer.Typer(
    name="specserve",
    help="Serve a language model as prefill, decode and gateway pods on this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

StateDir = Annotated[Path, typer.Option(envvar="SPECSERVE_STATE_DIR", help="Where the control plane keeps its state.")]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the service.")]
File = Annotated[Path, typer.Option("--filename", "-f", help="Manifest file, or - for standard input.")]
OptionalFile = Annotated[Path | None, typer.Option("--filename", "-f", help="Manifest file, or -.")]
Output = Annotated[OutputFormat, typer.Option("--output", "-o", help="Form of the output.")]
Json = Annotated[bool, typer.Option("--json", help="The same as -o json.")]
Timeout = Annotated[float, typer.Option(min=0, help="Seconds to wait.")]

_STATE_DIR = Path(".specserve")


@app.callback()
def _common(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    context.ensure_object(Invocation).debug = debug


@app.command()
def up(
    *,
    filename: File,
    wait: Annotated[bool, typer.Option("--wait", help="Run in the background; return when ready.")] = False,
    timeout: Timeout = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="With --wait: print endpoints as JSON.")] = False,
    state_dir: StateDir = _STATE_DIR,
) -> None:
    """Run services on this machine: in the foreground until Ctrl-C, or with --wait in the background."""
    from specserve_operator.cli.manifests import read_manifests
    from specserve_operator.cli.up import Progress, up_in_background, up_in_foreground

    if as_json and not wait:
        raise CliError("--json needs --wait", exit_code=EXIT_USAGE)
    manifests, progress = read_manifests(filename), Progress()
    if not wait:
        up_in_foreground(manifests, state_dir=state_dir, progress=progress)
        return
    endpoints = up_in_background(manifests, state_dir=state_dir, timeout_seconds=timeout, progress=progress)
    if as_json:
        _print(json.dumps({"services": [asdict(endpoint) for endpoint in endpoints]}, indent=2) + "\n")
    else:
        _print("".join(f"{endpoint.name} is ready at {endpoint.endpoint}\n" for endpoint in endpoints))


@app.command()
def down(timeout: Timeout = 150.0, state_dir: StateDir = _STATE_DIR) -> None:
    """End the control plane and all its pods. Nothing running is no error."""
    from specserve_operator.cli.daemon import stop_control_plane

    try:
        is_graceful = stop_control_plane(state_dir, timeout_seconds=timeout)
    except NotRunning:
        _print(f"nothing is running on {state_dir}\n")
        return
    _print("stopped\n" if is_graceful else f"stopped by force: it had not ended within {timeout:g} s\n")


@app.command()
def get(
    *,
    resource: Annotated[str, typer.Argument(help="spsvc, pods, events or all.")] = "spsvc",
    name: Annotated[str | None, typer.Argument(help="Only this one.")] = None,
    output: Output = OutputFormat.TABLE,
    as_json: Json = False,
    namespace: Namespace = "default",
    state_dir: StateDir = _STATE_DIR,
) -> None:
    """Show services, pods or events."""
    from specserve_operator.cli import read

    form = OutputFormat.JSON if as_json else output
    _print(read.get(Client(state_dir), resource, name=name, namespace=namespace, output=form))


@app.command()
def describe(
    *,
    name: Annotated[str | None, typer.Argument(help="A service; all if left out.")] = None,
    output: Output = OutputFormat.TABLE,
    as_json: Json = False,
    namespace: Namespace = "default",
    state_dir: StateDir = _STATE_DIR,
) -> None:
    """Show all about a service: conditions, pools, latency, speculation, KV transfer and events."""
    from specserve_operator.cli import read

    form = OutputFormat.JSON if as_json else output
    _print(read.describe(Client(state_dir), name=name, namespace=namespace, output=form))


@app.command()
def logs(
    *,
    target: Annotated[str, typer.Argument(help="A pod, or a pool for all its pods.", metavar="POD|POOL")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the pods are gone.")] = False,
    previous: Annotated[bool, typer.Option("--previous", "-p", help="The run before the last restart.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Only the last lines.")] = None,
    container: Annotated[str | None, typer.Option("--container", "-c", help="A container of the pod.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    namespace: Namespace = "default",
    state_dir: StateDir = _STATE_DIR,
) -> None:
    """Show the log of a pod, or of all pods of a pool."""
    from specserve_operator.cli import read

    for text in read.logs(
        Client(state_dir),
        target,
        namespace=namespace,
        options=read.LogOptions(
            container=container, follow=follow, previous=previous, tail_lines=tail, as_json=as_json
        ),
    ):
        _print(text)


@app.command()
def apply(filename: File, state_dir: StateDir = _STATE_DIR) -> None:
    """Create or change services. Returns when they are stored; `get` shows how far they are."""
    from specserve_operator.cli import write

    _print("".join(f"{line}\n" for line in write.apply(Client(state_dir), filename)))


@app.command()
def delete(
    *,
    name: Annotated[str | None, typer.Argument(help="A service.")] = None,
    filename: OptionalFile = None,
    timeout: Timeout = 150.0,
    namespace: Namespace = "default",
    state_dir: StateDir = _STATE_DIR,
) -> None:
    """Delete services and wait until their pods have ended."""
    from specserve_operator.cli import write

    lines = write.delete(Client(state_dir), name, filename, namespace=namespace, timeout_seconds=timeout)
    _print("".join(f"{line}\n" for line in lines))


@app.command()
def scale(
    *,
    name: Annotated[str, typer.Argument(help="A service.")],
    replicas: Annotated[list[str], typer.Argument(help="For example decode=2.", metavar="POOL=N...")],
    namespace: Namespace = "default",
    state_dir: StateDir = _STATE_DIR,
) -> None:
    """Set the number of pods of one or more pools."""
    from specserve_operator.cli import write

    _print(write.scale(Client(state_dir), name, replicas, namespace=namespace) + "\n")


@app.command()
def upgrade(
    *,
    name: Annotated[str, typer.Argument(help="A service.")],
    namespace: Namespace = "default",
    state_dir: StateDir = _STATE_DIR,
) -> None:
    """Replace pods that an earlier version made. `describe` shows in UpgradeAvailable which those are."""
    from specserve_operator.cli import write

    _print(write.upgrade(Client(state_dir), name, namespace=namespace) + "\n")


@app.command()
def version() -> None:
    """Print the version."""
    _print(f"specserve {package_version('specserve')}\n")


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main() -> None:
    """Runs the command line. Errors end with one message on stderr and an exit code."""
    invocation = Invocation()
    try:
        app(obj=invocation)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone, as `head` does; nothing more can be said
        sys.exit(EXIT_FAILURE)
    except Exception as error:
        if invocation.debug:
            traceback.print_exc()
        message, exit_code = explain_error(error)
        sys.stderr.write(f"error: {message}\n")
        sys.exit(exit_code)


def explain_error(error: Exception) -> tuple[str, int]:
    """What the user is told, and the exit code: the only place that translates errors."""
    match error:
        case CliError():
            return str(error), error.exit_code
        case NotRunning():
            return str(error), EXIT_FAILURE
        case ApiError():
            return str(error), EXIT_USAGE if error.status == BAD_REQUEST else EXIT_FAILURE
    # Loaded only now: the commands that cannot raise these do without them.
    from specserve_operator.api.validation import InvalidManifest
    from specserve_operator.cli.preflight import PreflightError
    from specserve_operator.cluster.protocol import ClusterError

    match error:
        case InvalidManifest() | PreflightError():
            return str(error), EXIT_USAGE
        case ClusterError() | OSError():
            return str(error), EXIT_FAILURE
    what = str(error) or type(error).__name__
    return f"{what} (a fault of specserve itself: `specserve --debug ...` shows where)", EXIT_FAILURE


if __name__ == "__main__":
    main()
