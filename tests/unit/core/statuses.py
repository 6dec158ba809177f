"""The status that `compute_status` gives to a service in a cluster of plain objects."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from specserve_operator.api.status import ServiceStatus
from specserve_operator.core.objects import ApplyFailure, Manifest
from specserve_operator.core.plan import plan
from specserve_operator.core.stats import PodStats, TransferTotals
from specserve_operator.core.status import compute_status
from tests.unit.core.builders import (
    NOW,
    disaggregated,
    make_snapshot,
)

Status = dict[str, Any]


def status_of(
    spec: dict[str, Any],
    children: Sequence[Manifest],
    *,
    previous: Status | None = None,
    now: datetime = NOW,
    stats: Iterable[PodStats] = (),
    kv_transfer: TransferTotals | None = None,
    failures: Sequence[ApplyFailure] = (),
) -> Status:
    """The status of a disaggregated service with `spec`; checked against its model."""
    service = disaggregated(status=previous or {}, **spec)
    snapshot = make_snapshot(service, children, now=now, stats=stats, kv_transfer=kv_transfer)
    status = compute_status(snapshot, plan(snapshot), failures)
    validated = ServiceStatus.model_validate(status).to_manifest()
    assert {name: validated[name] for name in status} == status
    return status


def condition(status: Status, type_: str) -> dict[str, Any]:
    return next(c for c in status["conditions"] if c["type"] == type_)


def verdict(status: Status, type_: str) -> tuple[str, str]:
    found = condition(status, type_)
    return found["status"], found["reason"]


def pool(status: Status, name: str) -> dict[str, Any]:
    return next(p for p in status["pools"] if p["name"] == name)
