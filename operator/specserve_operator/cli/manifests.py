"""Manifest files as the user writes them: read, checked, and made ready to be sent."""

import sys
from collections.abc import Sequence
from pathlib import Path

from specserve_operator.api.validation import parse_manifests, parse_service
from specserve_operator.cli.errors import refuse_usage
from specserve_operator.cli.preflight import check_services
from specserve_operator.cli.settings import local_config
from specserve_operator.core.objects import Manifest, ServiceKey

STDIN = Path("-")


def read_manifests(path: Path) -> list[Manifest]:
    """The services of a file (`-`: standard input), with what the user wrote and absolute `file://` URIs.

    Raises `InvalidManifest`, and `CliError` if the file cannot be read.
    """
    try:
        text = sys.stdin.read() if path == STDIN else path.read_text(encoding="utf-8")
    except OSError as error:
        refuse_usage(f"{path}: {error.strerror}")
    except UnicodeDecodeError:
        refuse_usage(f"{path}: is no text file")
    source, folder = ("standard input", Path.cwd()) if path == STDIN else (str(path), path.resolve().parent)
    manifests = []
    for service in parse_manifests(text, source, base_dir=folder):
        manifest = service.model_dump(mode="json", by_alias=True, exclude_unset=True)
        manifest["metadata"]["namespace"] = service.metadata.namespace
        manifests.append(manifest)
    return manifests


def check_runs_here(manifests: Sequence[Manifest]) -> None:
    """What the control plane would refuse, before there is one. Raises `InvalidManifest` and `PreflightError`."""
    check_services([parse_service(manifest) for manifest in manifests], config=local_config())


def key_of(manifest: Manifest) -> ServiceKey:
    """Namespace and name of a service."""
    return ServiceKey(manifest["metadata"].get("namespace", "default"), manifest["metadata"]["name"])
