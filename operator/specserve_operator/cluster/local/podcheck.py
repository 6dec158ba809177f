"""What an API server would refuse in a pod's spec, as far as this machine would stumble over it. Pure.

The operator's own pods are well formed; other containers, and fields that a pod template adds, come from users.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from specserve_operator.cluster.local.podspec import PodConfigError, explained
from specserve_operator.cluster.local.probes import ProbeTiming
from specserve_operator.core.objects import Manifest
from specserve_operator.core.pod_template import PROBES

_MOST_PORT = 65_535


def named_containers(pod: Manifest, field: str) -> list[Mapping[str, Any]]:
    """The objects under `containers` or `initContainers`, with a name each, whatever stands there.

    One without a usable name is empty but for its place as a name: `check_pod` refuses its pod, whose status shows it.
    A pod has one container at least.
    """
    found = pod["spec"].get(field)
    entries = found if isinstance(found, list) else []
    if field == "containers":
        entries = entries or [None]
    return [entry if _has_name(entry) else {"name": f"{field}[{index}]"} for index, entry in enumerate(entries)]


def check_pod(pod: Manifest) -> None:
    """Raises `PodConfigError` about the first thing that no pod of this spec can run with."""
    names: set[str] = set()
    for field in ("initContainers", "containers"):
        entries = pod["spec"].get(field)
        if not isinstance(entries, list) and (entries is not None or field == "containers"):
            raise PodConfigError(f"{field}: must be a list of objects")
        for index, entry in enumerate(entries or ()):
            if not _has_name(entry):
                raise PodConfigError(f"{field}[{index}]: the name is missing")
            if entry["name"] in names:
                raise PodConfigError(f"{field}[{index}]: the name {entry['name']} stands twice")
            names.add(entry["name"])
            _check_container(entry)
    if not pod["spec"].get("containers"):
        raise PodConfigError("containers: there is none")
    if not isinstance(pod["spec"].get("serviceAccountName", ""), str):
        raise PodConfigError("serviceAccountName: must be a string")


def _has_name(entry: Any) -> bool:
    return isinstance(entry, Mapping) and isinstance(entry.get("name"), str) and bool(entry["name"])


def _check_container(container: Mapping[str, Any]) -> None:
    name = container["name"]
    with explained(f"command of container {name}"):
        for field in ("command", "args"):
            _check_strings(container.get(field, ()))
    with explained(f"workingDir of container {name}"):
        _check_strings([container.get("workingDir", "")])
    with explained(f"ports of container {name}"):
        for port in container.get("ports", ()):
            number = port["containerPort"]
            if not isinstance(number, int) or not 1 <= number <= _MOST_PORT:
                raise ValueError(f"containerPort {number} is not in 1-{_MOST_PORT}")
    for field in PROBES:
        if field in container:
            with explained(f"{field} of container {name}"):
                _check_timing(container[field])
                _check_action(container[field])
    with explained(f"lifecycle of container {name}"):
        hook = container.get("lifecycle", {}).get("preStop")
        if hook is not None:
            _check_action(hook)


def _check_strings(words: Any) -> None:
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise TypeError(f"{words} is not made of strings")


def _check_timing(probe: Mapping[str, Any]) -> None:
    for name, value in asdict(ProbeTiming.of(probe)).items():
        if value < 0:
            raise ValueError(f"{name} is {value}")


def _check_action(action: Mapping[str, Any]) -> None:
    """A probe's or a hook's action. That it has none, or one that is not known here, shows when it is carried out."""
    for kind in ("httpGet", "tcpSocket", "grpc"):
        if kind in action and not isinstance(action[kind]["port"], int | str):
            raise TypeError(f"port {action[kind]['port']}")
    if "exec" in action:
        _check_strings(action["exec"]["command"])
    if "sleep" in action and action["sleep"]["seconds"] < 0:
        raise ValueError(f"{action['sleep']['seconds']} seconds")
