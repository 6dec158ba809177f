"""The chart as helm renders it. Helm is the one of the test cluster, built when it is missing."""

import copy
import functools
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hack.kube.commands import built_folder

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "specserve"

Manifest = dict[str, Any]

# Ten times as fast, where PyYAML has its compiled half.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# What a cluster with the Prometheus Operator says it has.
PROMETHEUS_OPERATOR = (
    "monitoring.coreos.com/v1",
    "monitoring.coreos.com/v1/PrometheusRule",
    "monitoring.coreos.com/v1/ServiceMonitor",
)


class HelmError(Exception):
    """Helm refused: its error output."""


@dataclass(frozen=True, slots=True)
class Release:
    """What is given to helm. `apis`: what the cluster has beside Kubernetes' own."""

    values: Mapping[str, Any] = field(default_factory=dict)
    name: str = "specserve"
    namespace: str = "llm-system"
    apis: Sequence[str] = ()
    kubernetes: str = "1.34.0"


@functools.cache
def helm_command() -> str:
    """The path of helm; the first call may build it, which takes a minute or two."""
    path = built_folder() / "helm"
    if not path.exists():
        subprocess.run([ROOT / "hack" / "kube" / "tools" / "build.sh", "helm"], check=True)
    return str(path)


def run_helm(*arguments: str, stdin: str = "", kubeconfig: Path | None = None) -> str:
    """What helm prints. Without `kubeconfig` it reaches no cluster. Raises `HelmError`."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "KUBECONFIG": str(kubeconfig or os.devnull)}
    done = subprocess.run(
        [helm_command(), *arguments], input=stdin, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise HelmError(done.stdout + done.stderr)
    return done.stdout


def render(release: Release) -> list[Manifest]:
    """Every object of a release, in the order of installation. Raises `HelmError`."""
    arguments = (
        "template",
        release.name,
        str(CHART),
        f"--namespace={release.namespace}",
        f"--kube-version={release.kubernetes}",
        *(f"--api-versions={api}" for api in release.apis),
    )
    return copy.deepcopy(_rendered(json.dumps(dict(release.values)), *arguments))


@functools.cache
def _rendered(values: str, *arguments: str) -> list[Manifest]:
    """Each release once: the CRDs take long to read."""
    return [obj for obj in yaml.load_all(run_helm(*arguments, "--values=-", stdin=values), Loader=_LOADER) if obj]


def of_kind(objects: Sequence[Manifest], kind: str) -> list[Manifest]:
    return [obj for obj in objects if obj["kind"] == kind]


def only(objects: Sequence[Manifest], kind: str) -> Manifest:
    """The one object of its kind."""
    (found,) = of_kind(objects, kind)
    return found


def operator_pod(objects: Sequence[Manifest]) -> Manifest:
    """The operator's pod template."""
    template: Manifest = only(objects, "Deployment")["spec"]["template"]
    return template


def operator_container(objects: Sequence[Manifest]) -> Manifest:
    (container,) = operator_pod(objects)["spec"]["containers"]
    return dict(container)
