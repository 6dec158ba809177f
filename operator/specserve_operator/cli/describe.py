"""What `specserve describe` prints, in the look of `kubectl describe`. Pure."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from specserve_operator.cli.output import event_age, format_pods, one_line, sort_events
from specserve_operator.cli.text import (
    NONE,
    format_age,
    format_bytes,
    format_duration,
    indent,
    pairs,
    ruled_table,
)
from specserve_operator.core.objects import Manifest

_WRITTEN_BY_TOOLS = "kubectl.kubernetes.io/last-applied-configuration"


def describe_service(service: Manifest, *, pods: Sequence[Manifest], events: Sequence[Manifest], now: datetime) -> str:
    """One service: what is wanted, what is so, and what happened."""
    spec, status = service.get("spec", {}), service.get("status", {})
    sections = [
        pairs(_identity(service, now=now)),
        _section("Model", _model(service)),
        _section("Speculation", _speculation(spec)),
        _section("Conditions", _conditions(status, now=now)),
        _section("Pools", _pools(status)),
        _section("Pods", format_pods(pods, now=now).splitlines() if pods else []),
        _section("Latency", _latency(status)),
        _section("Speculation Status", _speculation_status(status)),
        _section("KV Transfer", _kv_transfer(status)),
        _section("Scaling History", _scaling_history(status, now=now)),
        _section("Events", _events(events, now=now), always=True),
    ]
    return "\n".join(line for section in sections for line in section) + "\n"


def _section(title: str, lines: Sequence[str], *, always: bool = False) -> list[str]:
    if not lines:
        return [f"{title}:  {NONE}"] if always else []
    return [f"{title}:", *indent(lines)]


def _identity(service: Manifest, *, now: datetime) -> list[tuple[str, str]]:
    meta, status = service["metadata"], service.get("status", {})
    annotations = {k: v for k, v in meta.get("annotations", {}).items() if k != _WRITTEN_BY_TOOLS}
    return [
        ("Name", meta["name"]),
        ("Namespace", meta.get("namespace", "default")),
        ("Labels", _map(meta.get("labels", {}))),
        ("Annotations", _map(annotations)),
        ("API Version", service.get("apiVersion", "")),
        ("Kind", service.get("kind", "")),
        ("Generation", f"{meta.get('generation', 0)} (observed {status.get('observedGeneration', 0)})"),
        ("Age", format_age(meta.get("creationTimestamp"), now)),
        ("Endpoint", status.get("endpoint") or NONE),
    ]


def _map(values: Mapping[str, str]) -> str:
    return "\n".join(f"{key}={value}" for key, value in sorted(values.items())) or NONE


def _model(service: Manifest) -> list[str]:
    model = service.get("spec", {}).get("model", {})
    args = service.get("spec", {}).get("engine", {}).get("args", ())
    return pairs(
        [
            ("Name", model.get("name") or service["metadata"]["name"]),
            ("URI", model.get("uri", NONE)),
            ("Engine Args", " ".join(args) or NONE),
        ]
    )


def _speculation(spec: Mapping[str, Any]) -> list[str]:
    speculation = spec.get("speculation")
    if speculation is None:
        return []
    draft, length = speculation.get("draft", {}), speculation.get("length", {})
    policy = length.get("policy", "DSDE")
    if policy == "Static":
        wanted = f"Static, {length.get('tokens')} tokens"
    else:
        bounds = f"{length.get('min', 0)} to {length.get('max', 8)}"
        wanted = f"{policy}, {bounds} tokens, cap {length.get('cap', 'Mean')}"
    return pairs(
        [
            ("Mode", speculation.get("mode", "Auto")),
            ("Draft", " ".join(part for part in (draft.get("method"), draft.get("uri")) if part) or NONE),
            ("Length", wanted),
        ]
    )


def _conditions(status: Mapping[str, Any], *, now: datetime) -> list[str]:
    rows = [
        [
            c.get("type", ""),
            c.get("status", ""),
            c.get("reason", ""),
            format_age(c.get("lastTransitionTime"), now),
            one_line(c.get("message", "")),
        ]
        for c in status.get("conditions", ())
    ]
    return ruled_table(["Type", "Status", "Reason", "Age", "Message"], rows) if rows else []


def _pools(status: Mapping[str, Any]) -> list[str]:
    rows = [
        [
            pool.get("name", ""),
            *(str(pool.get(field, 0)) for field in ("desired", "replicas", "ready", "updated")),
            pool.get("revision") or NONE,
            pool.get("reason") or "",
            one_line(pool.get("message") or ""),
        ]
        for pool in status.get("pools", ())
    ]
    header = ["Name", "Desired", "Current", "Ready", "Updated", "Revision", "Reason", "Message"]
    return ruled_table(header, rows) if rows else []


def _latency(status: Mapping[str, Any]) -> list[str]:
    latency = status.get("latency") or {}
    rows = [
        [
            title,
            f"p{entry.get('percentile')}",
            _milliseconds(entry.get("observedMilliseconds")),
            _milliseconds(entry.get("objectiveMilliseconds")),
            str(entry.get("samples", 0)),
            format_duration(entry.get("windowSeconds", 0)),
        ]
        for title, field in (("TTFT", "timeToFirstToken"), ("TPOT", "timePerOutputToken"))
        for entry in latency.get(field, ())
    ]
    header = ["Metric", "Percentile", "Observed", "Objective", "Samples", "Window"]
    return ruled_table(header, rows) if rows else []


def _milliseconds(value: int | None) -> str:
    return NONE if value is None else f"{value}ms"


def _speculation_status(status: Mapping[str, Any]) -> list[str]:
    speculation = status.get("speculation")
    if not speculation:
        return []
    speedup = speculation.get("speedup")
    acceptance = speculation.get("acceptancePercent")
    known = [
        ("State", _with_reason(speculation.get("state", ""), speculation.get("reason"))),
        ("Message", speculation.get("message")),
        ("Policy", speculation.get("policy")),
        ("Acceptance", None if acceptance is None else f"{acceptance}%"),
        ("Mean Accepted Length", speculation.get("meanAcceptedLength")),
        ("Speed-up", speedup and f"{speedup['ratio']}x (95% {speedup['low']} to {speedup['high']})"),
        ("Draft", speculation.get("draft")),
    ]
    return pairs([(key, str(value)) for key, value in known if value is not None])


def _with_reason(state: str, reason: str | None) -> str:
    return f"{state} ({reason})" if reason else state


def _kv_transfer(status: Mapping[str, Any]) -> list[str]:
    transfer = status.get("kvTransfer")
    if not transfer:
        return []
    return pairs(
        [
            ("Transfers", str(transfer.get("transfers", 0))),
            ("Fallbacks", str(transfer.get("fallbacks", 0))),
            ("Tokens", str(transfer.get("tokens", 0))),
            ("Bytes", format_bytes(int(transfer.get("bytes", 0)))),
        ]
    )


def _scaling_history(status: Mapping[str, Any], *, now: datetime) -> list[str]:
    rows = [
        [
            format_age(entry.get("time"), now),
            entry.get("pool", ""),
            f"{entry.get('fromReplicas')} -> {entry.get('toReplicas')}",
            entry.get("reason", ""),
            one_line(entry.get("message", "")),
        ]
        for entry in status.get("scalingHistory", ())
    ]
    return ruled_table(["Age", "Pool", "Replicas", "Reason", "Message"], rows) if rows else []


def _events(events: Sequence[Manifest], *, now: datetime) -> list[str]:
    rows = [
        [e.get("type", ""), e.get("reason", ""), event_age(e, now=now), one_line(e.get("message", ""))]
        for e in sort_events(events)
    ]
    return ruled_table(["Type", "Reason", "Age", "Message"], rows) if rows else []
