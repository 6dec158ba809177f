"""Records of what the pods of a service were resolved to, in ControllerRevisions, so that only the user changes it.

A newer operator, or one with another default image, would render other pods from the same spec. It does not: what was
resolved once is kept, the complete pod template included, until the user changes what it was made from or asks for the
upgrade. A second copy of all that is on the live workloads, so that a record that is lost is made again from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specserve_operator.core.names import Pool
from specserve_operator.core.objects import Manifest, ObjectRef

# Of the layout of `data`. Records of another version are left alone, and not read.
RECORD_VERSION = 1
# Records are kept for people to look at and to compare; only the last one is ever used.
HISTORY_LIMIT = 10


@dataclass(frozen=True, slots=True)
class PoolPin:
    """What the pods of one pool are.

    `inputs`, `target_inputs`: digests of what the user had given (core/inputs.py). `template` is the whole pod
    template, the user's part merged in. `identity_server` is None for pods without certificates. Of a gateway,
    `target_inputs` and `target_revision` are empty.
    """

    inputs: str
    target_inputs: str
    revision: str
    target_revision: str
    image: str
    max_draft_tokens: int | None
    identity_server: str | None
    template: Manifest

    def to_data(self) -> Manifest:
        """The pin as it stands in a record."""
        data = {
            "inputs": self.inputs,
            "targetInputs": self.target_inputs,
            "revision": self.revision,
            "targetRevision": self.target_revision,
            "image": self.image,
            "template": self.template,
        }
        optional = {"maxDraftTokens": self.max_draft_tokens, "identityServer": self.identity_server}
        return data | {name: value for name, value in optional.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Record:
    """One ControllerRevision. `number` grows with each that is made; `upgrade` is the request that was taken last."""

    ref: ObjectRef
    number: int
    upgrade: str
    pins: Mapping[Pool, PoolPin]
    data: Manifest


def record_data(pins: Mapping[Pool, PoolPin], upgrade: str) -> Manifest:
    """The `data` of a record, which never changes once it is stored."""
    pools = {str(pool): pin.to_data() for pool, pin in pins.items()}
    return {"version": RECORD_VERSION, "upgrade": upgrade, "pools": pools}


def parse_record(obj: Manifest) -> Record | None:
    """The record in a ControllerRevision; None for one that this version does not understand."""
    data = obj.get("data")
    if not isinstance(data, Mapping) or data.get("version") != RECORD_VERSION:
        return None
    try:
        return Record(
            ref=ObjectRef.of(obj),
            number=int(obj["revision"]),
            upgrade=str(data["upgrade"]),
            pins={Pool(name): _parse_pin(pin) for name, pin in data["pools"].items()},
            data=dict(data),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # somebody has edited it: what the live workloads say counts then


def _parse_pin(pin: Mapping[str, Any]) -> PoolPin:
    tokens, server, template = pin.get("maxDraftTokens"), pin.get("identityServer"), pin["template"]
    if not isinstance(template["spec"], Mapping):
        raise TypeError("the pod template has no spec")
    return PoolPin(
        inputs=str(pin["inputs"]),
        target_inputs=str(pin["targetInputs"]),
        revision=str(pin["revision"]),
        target_revision=str(pin["targetRevision"]),
        image=str(pin["image"]),
        max_draft_tokens=None if tokens is None else int(tokens),
        identity_server=None if server is None else str(server),
        template=template,
    )
