"""What may stand in a user's pod template: it is merged into ours, so what that needs is checked first.

The rest is the API server's to check, which knows every field.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specserve_operator.constants import ENGINE_CONTAINER

# Lists that merge by key, under the names they have in a PodSpec, with that key (Kubernetes' `patchMergeKey`).
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
}

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
# Of these a probe has exactly one.
PROBE_ACTIONS = frozenset({"httpGet", "exec", "tcpSocket", "grpc"})

_OWNED_POD_FIELDS = {
    "restartPolicy": "it is always Always",
    "terminationGracePeriodSeconds": "it follows from drainTimeoutSeconds",
}
_OWNED_CONTAINER_FIELDS = {
    "command": "it belongs to the operator",
    "args": "use spec.engine.args or the pool's args",
    "lifecycle.preStop": "it drains the pod",
}
# One image for prefill and decode is what makes their KV caches interchangeable.
_OWNED_ENGINE_FIELDS = _OWNED_CONTAINER_FIELDS | {"image": "use spec.engine.image, for all pools"}

# What else is rendered can be changed, and is relied on: it cannot be removed, as null does in a patch.
_KEPT_POD_FIELDS = (
    "automountServiceAccountToken",
    "enableServiceLinks",
    "securityContext",
    "serviceAccountName",
    "volumes",
)
_KEPT_CONTAINER_FIELDS = (
    *PROBES,
    "env",
    "image",
    "lifecycle",
    "ports",
    "securityContext",
    "terminationMessagePolicy",
    "volumeMounts",
)
# Of those, objects that are merged by field. That lists are lists is seen to before.
_MERGED_OBJECTS = {*PROBES, "lifecycle", "securityContext"}


def template_problems(field: str, template: Mapping[str, Any] | None, container_name: str) -> Iterator[str]:
    """One sentence for each thing that keeps `template` from being merged. `field` is where it stands in the spec."""
    spec = (template or {}).get("spec", {})
    broken_lists = [*_list_problems(f"{field}.spec", spec)]
    yield from broken_lists
    if not broken_lists:
        yield from _owned_field_problems(f"{field}.spec", spec, container_name)


def _list_problems(path: str, value: Any) -> Iterator[str]:
    """Walks the whole tree: every list that merges by key must have objects with that key.

    That the outer lists and objects are such, the API has checked (api/markers.py).
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            key = MERGE_KEYS.get(name)
            is_list = isinstance(inner, list | tuple)
            if key is not None and not is_list and inner is not None:
                yield f"{path}.{name}: must be a list"
            elif key is not None and is_list and not all(isinstance(e, Mapping) and key in e for e in inner):
                yield f"{path}.{name}: every entry must have {key}"
            else:
                yield from _list_problems(f"{path}.{name}", inner)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _list_problems(path, entry)


def _owned_field_problems(path: str, pod: Mapping[str, Any], container_name: str) -> Iterator[str]:
    yield from _field_problems(path, pod, owned=_OWNED_POD_FIELDS, kept=_KEPT_POD_FIELDS)
    owned = _OWNED_ENGINE_FIELDS if container_name == ENGINE_CONTAINER else _OWNED_CONTAINER_FIELDS
    for container in pod.get("containers") or ():
        if container["name"] == container_name:
            where = f"{path}.containers[{container_name}]"
            yield from _field_problems(where, container, owned=owned, kept=_KEPT_CONTAINER_FIELDS)
            yield from _probe_problems(where, container)


def _field_problems(
    path: str, obj: Mapping[str, Any], *, owned: Mapping[str, str], kept: Sequence[str]
) -> Iterator[str]:
    """At most one problem for each field of `obj`: one of the operator's is set, or taken away, or cannot be merged."""
    for name, why in owned.items():
        outer, _, inner = name.partition(".")
        holder = obj.get(outer) if inner else obj
        if isinstance(holder, Mapping) and (inner or outer) in holder:
            yield f"{path}.{name}: set by the operator ({why}); remove it"
    for name in kept:
        if name not in obj or name in owned:
            continue
        value = obj[name]
        if value is None:
            yield f"{path}.{name}: null would remove what the operator sets; leave it out, or give values that differ"
        elif name in _MERGED_OBJECTS and not isinstance(value, Mapping):
            yield f"{path}.{name}: must be an object"


def _probe_problems(path: str, container: Mapping[str, Any]) -> Iterator[str]:
    for name in PROBES:
        probe = container.get(name)
        if isinstance(probe, Mapping) and "httpGet" in probe and not given_actions(probe):
            yield f"{path}.{name}.httpGet: null leaves the probe without an action; give another"


def given_actions(probe: Mapping[str, Any]) -> set[str]:
    """The actions that a patch of a probe gives; null removes one."""
    return {name for name in PROBE_ACTIONS if probe.get(name) is not None}
