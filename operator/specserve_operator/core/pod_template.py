"""What may stand in a user's pod template: it is merged into ours, so what that needs is checked first.

The rest is the API server's to check, which knows every field.
"""

from collections.abc import Iterator, Mapping
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
    for name, why in _OWNED_POD_FIELDS.items():
        if name in pod:
            yield f"{path}.{name}: set by the operator ({why}); remove it"
    owned = _OWNED_ENGINE_FIELDS if container_name == ENGINE_CONTAINER else _OWNED_CONTAINER_FIELDS
    for container in pod.get("containers") or ():
        if container["name"] != container_name:
            continue
        for name, why in owned.items():
            outer, _, inner = name.partition(".")
            value = container.get(outer)
            if inner and value is not None and not isinstance(value, Mapping):
                yield f"{path}.containers[{container_name}].{outer}: must be an object"
            elif outer in container and (not inner or inner in (value or {})):
                yield f"{path}.containers[{container_name}].{name}: set by the operator ({why}); remove it"
