"""What `specserve get` prints: objects in, text out. Pure."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

import yaml

from specserve_operator.cli.text import NONE, format_age, table
from specserve_operator.constants import LABEL_POOL
from specserve_operator.core.objects import Manifest

_EMPTY_CELL = "-"


class OutputFormat(StrEnum):
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


def format_structured(data: Any, output: OutputFormat) -> str:
    """JSON or YAML with a final newline."""
    if output is OutputFormat.YAML:
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def as_list(items: Sequence[Manifest]) -> Manifest:
    """Several objects as one, as `kubectl get -o json` gives them."""
    return {"apiVersion": "v1", "kind": "List", "items": list(items)}


def condition_of(service: Mapping[str, Any], condition_type: str) -> Mapping[str, Any]:
    """The condition of that type, or an empty mapping before the first status."""
    conditions = service.get("status", {}).get("conditions", ())
    return next((c for c in conditions if c.get("type") == condition_type), {})


def format_services(services: Sequence[Manifest], *, now: datetime, wide: bool = False) -> str:
    """The columns of the CRD: `kubectl get spsvc` shows the same."""
    header = ["NAME", "READY", "PREFILL", "DECODE", "TRAIN", "TTFT", "TPOT", "ACCEPT", "SPEC", "DRAFT", "AGE"]
    if wide:
        header += ["REASON", "SPEEDUP", "KV-FALLBACKS"]
    rows = [_service_row(service, now=now, wide=wide) for service in services]
    return _lines(table(header, rows))


def _service_row(service: Manifest, *, now: datetime, wide: bool) -> list[str]:
    columns = service.get("status", {}).get("columns", {})
    ready = condition_of(service, "Ready")

    def cell(name: str) -> str:
        return str(columns.get(name) or _EMPTY_CELL)

    row = [service["metadata"]["name"], str(ready.get("status", "Unknown"))]
    row += [cell(name) for name in ("prefill", "decode", "train", "ttft", "tpot", "acceptance", "speculation")]
    row += [cell("draft"), format_age(service["metadata"].get("creationTimestamp"), now)]
    if wide:
        row += [str(ready.get("reason", _EMPTY_CELL)), cell("speedup"), cell("kvFallbacks")]
    return row


def format_pods(pods: Sequence[Manifest], *, now: datetime, wide: bool = False) -> str:
    """As `kubectl get pods`; wide adds pool, address and process id where the cluster knows one."""
    header = ["NAME", "READY", "STATUS", "RESTARTS", "AGE"] + (["POOL", "IP"] if wide else [])
    rows = []
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        row = [
            pod["metadata"]["name"],
            _ready_containers(pod),
            pod_state(pod),
            _restarts(pod, now=now),
            format_age(pod["metadata"].get("creationTimestamp"), now),
        ]
        if wide:
            labels = pod["metadata"].get("labels", {})
            row += [labels.get(LABEL_POOL, NONE), pod.get("status", {}).get("podIP") or NONE]
        rows.append(row)
    return _lines(table(header, rows))


def pod_state(pod: Manifest) -> str:
    """One word for a pod: its deletion, else what its first troubled container says, else its phase."""
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    status = pod.get("status", {})
    for container in status.get("containerStatuses", ()):
        state = container.get("state", {})
        if reason := state.get("waiting", {}).get("reason"):
            return str(reason)
        if ended := state.get("terminated"):
            return str(ended.get("reason") or f"ExitCode:{ended.get('exitCode')}")
    return str(status.get("phase", "Unknown"))


def is_pod_ready(pod: Manifest) -> bool:
    """True where the pod's condition `Ready` is true."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def _ready_containers(pod: Manifest) -> str:
    statuses = pod.get("status", {}).get("containerStatuses", ())
    total = len(pod.get("spec", {}).get("containers", ())) or len(statuses)
    return f"{sum(bool(s.get('ready')) for s in statuses)}/{total}"


def _restarts(pod: Manifest, *, now: datetime) -> str:
    statuses = pod.get("status", {}).get("containerStatuses", ())
    count = sum(int(s.get("restartCount", 0)) for s in statuses)
    if count == 0:
        return "0"
    ends = [s.get("lastState", {}).get("terminated", {}).get("finishedAt") for s in statuses]
    last = max((end for end in ends if end), default=None)
    return f"{count} ({format_age(last, now)} ago)" if last else str(count)


def format_events(events: Sequence[Manifest], *, now: datetime) -> str:
    """As `kubectl events`, oldest first."""
    rows = [
        [
            event_age(event, now=now),
            str(event.get("type", "")),
            str(event.get("reason", "")),
            _event_object(event),
            one_line(str(event.get("message", ""))),
        ]
        for event in sort_events(events)
    ]
    return _lines(table(["LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE"], rows))


def sort_events(events: Sequence[Manifest]) -> list[Manifest]:
    """Oldest last occurrence first."""
    return sorted(events, key=lambda event: str(event.get("lastTimestamp") or event.get("firstTimestamp") or ""))


def event_age(event: Manifest, *, now: datetime) -> str:
    """`5s`, or `5s (x3 over 2m)` where it happened several times."""
    last = format_age(event.get("lastTimestamp") or event.get("firstTimestamp"), now)
    count = int(event.get("count") or 1)
    if count == 1:
        return last
    return f"{last} (x{count} over {format_age(event.get('firstTimestamp'), now)})"


def _event_object(event: Manifest) -> str:
    involved = event.get("involvedObject", {})
    return f"{str(involved.get('kind', '')).lower()}/{involved.get('name', '')}"


def one_line(text: str) -> str:
    """The text with its line breaks made visible, so that a table stays a table."""
    return " ".join(text.split())


def _lines(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"
