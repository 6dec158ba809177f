"""Merges a user's pod template into ours, as a strategic merge patch would.

Objects merge by field, lists of named things by their key, all other lists are replaced, and null removes a field.
What the operator needs to find and run the pod stays ours: labels, volumes that carry weights or settings, and of our
container the ports, the downward-API variables and the read-only mounts. Fields that are wholly ours, and null for one
that we set, never get here: core/pod_template.py refuses them.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from specserve_operator.core.pod_template import MERGE_KEYS, PROBE_ACTIONS, PROBES, given_actions

Entry = dict[str, Any]

# Objects that may have only one of several forms, so that a patch of another form must not merge.
_WHOLE_ENTRIES = {"volumes", "env"}


def merge_pod_template(ours: Mapping[str, Any], user: Mapping[str, Any] | None) -> dict[str, Any]:
    """`user` over `ours`, with what must be ours put back. Neither argument is changed."""
    if not user:
        return deepcopy(dict(ours))
    merged = _merge_objects(ours, {"spec": user.get("spec") or {}})
    metadata = user.get("metadata") or {}
    merged["metadata"] = {"labels": (metadata.get("labels") or {}) | ours["metadata"]["labels"]}
    if metadata.get("annotations"):
        merged["metadata"]["annotations"] = deepcopy(metadata["annotations"])
    spec, our_spec = merged["spec"], ours["spec"]
    _put_back(spec, our_spec, "volumes", is_required=lambda v: "emptyDir" not in v)
    ours_main = our_spec["containers"][0]
    main = next(c for c in spec["containers"] if c["name"] == ours_main["name"])
    _put_back(main, ours_main, "ports", is_required=lambda _: True)
    _put_back(main, ours_main, "env", is_required=lambda e: "fieldRef" in e.get("valueFrom", {}))
    _put_back(main, ours_main, "volumeMounts", is_required=lambda m: bool(m.get("readOnly")))
    return merged


def _put_back(merged: Entry, ours: Mapping[str, Any], name: str, *, is_required: Callable[[Entry], bool]) -> None:
    """Makes the required entries of the list `name` what they are in `ours`, in their place or in front."""
    key = MERGE_KEYS[name]
    required = {entry[key]: deepcopy(entry) for entry in ours.get(name, ()) if is_required(entry)}
    if required:
        kept = [required.pop(entry.get(key), entry) for entry in merged.get(name) or ()]
        merged[name] = [*required.values(), *kept]


def _merge_objects(base: Mapping[str, Any], patch: Mapping[str, Any]) -> Entry:
    merged = deepcopy(dict(base))
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge_values(name, merged.get(name), value)
    return merged


def _merge_values(name: str, base: Any, patch: Any) -> Any:
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        if name in PROBES and (given := given_actions(patch)):
            base = {k: v for k, v in base.items() if k in given or k not in PROBE_ACTIONS}
        return _merge_objects(base, patch)
    if isinstance(patch, Mapping):
        return _merge_objects({}, patch)
    if name in MERGE_KEYS and isinstance(base, list) and isinstance(patch, list):
        return _merge_lists(name, base, patch)
    return deepcopy(patch)


def _merge_lists(name: str, base: list[Entry], patch: list[Entry]) -> list[Entry]:
    """Entries of equal key merge in place; new ones follow, so that they can refer to variables of ours."""
    key = MERGE_KEYS[name]
    changes = {entry.get(key): entry for entry in patch}
    merged = []
    for entry in base:
        change = changes.pop(entry[key], {})
        merged.append(_merge_objects({} if change and name in _WHOLE_ENTRIES else entry, change))
    return [*merged, *(_merge_objects({}, entry) for entry in changes.values())]
