"""The API server's audit log: who asked for what, and what the answer was."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

# One line for each request, when it is answered; a watch, which may stay open for long, when it begins.
POLICY = yaml.safe_dump(
    {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "rules": [
            {"level": "Metadata", "verbs": ["watch"], "omitStages": ["RequestReceived", "ResponseComplete"]},
            {"level": "Metadata", "omitStages": ["RequestReceived"]},
        ],
    },
    sort_keys=False,
)


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One answered request. What it does not name, such as the namespace in a list of all, is empty."""

    user: str
    verb: str
    group: str
    resource: str
    subresource: str
    namespace: str
    name: str
    code: int
    user_agent: str
    uri: str
    time: str

    @classmethod
    def from_json(cls, event: Mapping[str, Any]) -> "AuditEvent":
        target = event.get("objectRef", {})
        return cls(
            user=event["user"].get("username", ""),
            verb=event["verb"],
            group=target.get("apiGroup", ""),
            resource=target.get("resource", ""),
            subresource=target.get("subresource", ""),
            namespace=target.get("namespace", ""),
            name=target.get("name", ""),
            code=event.get("responseStatus", {}).get("code", 0),
            user_agent=event.get("userAgent", ""),
            uri=event["requestURI"],
            time=event["stageTimestamp"],
        )


def read_audit_log(path: Path) -> list[AuditEvent]:
    """All events of a log, in the order of their lines. An unfinished last line is left out."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [AuditEvent.from_json(json.loads(line)) for line in whole.splitlines()]
