"""Events tell of transitions, once, with the numbers that decided them."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from specserve_operator.api.status import KvTransferStatus
from specserve_operator.core.events import transition_events
from specserve_operator.core.objects import Manifest
from specserve_operator.core.plan import plan
from specserve_operator.core.stats import PodStats, TransferTotals
from specserve_operator.core.status import compute_status
from tests.unit.core.builders import (
    DRAFT_MODEL,
    NOW,
    FakeCluster,
    decode_stats_of,
    disaggregated,
    make_snapshot,
    pods_of,
    ready_children,
    set_ready,
    totals_of,
)

Status = dict[str, Any]
Told = list[tuple[str, str, str]]


def observe(
    spec: dict[str, Any],
    children: Sequence[Manifest],
    *,
    previous: Status | None = None,
    now: datetime = NOW,
    stats: Iterable[PodStats] = (),
    kv_transfer: TransferTotals | None = None,
    kv_transfer_found: KvTransferStatus | None = None,
) -> tuple[Status, Told]:
    """The next status, and the events of the way there as (type, reason, message)."""
    service = disaggregated(status=previous or {}, **spec)
    snapshot = make_snapshot(
        service, children, now=now, stats=stats, kv_transfer=kv_transfer, kv_transfer_found=kv_transfer_found
    )
    plan_ = plan(snapshot)
    status = compute_status(snapshot, plan_)
    events = transition_events(previous or {}, status, snapshot, plan_)
    return status, [(str(e.type), e.reason, e.message) for e in events]


def reasons(told: Told) -> list[str]:
    return [reason for _, reason, _ in told]


def test_a_new_service_tells_of_its_rollout_and_of_its_end() -> None:
    first, told = observe({}, [])
    assert reasons(told) == ["RolloutStarted"]
    assert "decode to revision" in told[0][2]
    second, told = observe({}, ready_children(disaggregated()), previous=first)
    assert told == [
        ("Normal", "RolloutComplete", "prefill 1/1, decode 2/2, gateway 1/1"),
        ("Normal", "ServiceReady", "prefill 1/1, decode 2/2, gateway 1/1"),
    ]
    assert observe({}, ready_children(disaggregated()), previous=second)[1] == []


def test_a_new_revision_starts_a_rollout_of_the_pools_it_concerns() -> None:
    children = ready_children(disaggregated())
    first, _ = observe({}, children)
    spec = {"decode": {"replicas": 2, "args": ["--max-num-seqs", "4"]}}
    _, told = observe(spec, children, previous=first)
    assert reasons(told) == ["RolloutStarted"]
    assert told[0][2].startswith("decode to revision ")


def test_a_stalled_rollout_is_told_once() -> None:
    spec = {"rollout": {"progressDeadlineSeconds": 60}}
    cluster = FakeCluster()
    cluster.apply(plan(make_snapshot(disaggregated(**spec))))
    first, _ = observe(spec, cluster.children())
    late = NOW + timedelta(seconds=61)
    second, told = observe(spec, cluster.children(), previous=first, now=late)
    assert [(kind, reason) for kind, reason, _ in told] == [("Warning", "RolloutStalled")]
    assert "no progress for 60 s" in told[0][2]
    assert observe(spec, cluster.children(), previous=second, now=late)[1] == []


def test_a_scaled_pool_tells_its_numbers() -> None:
    children = ready_children(disaggregated())
    first, _ = observe({}, children)
    _, told = observe({"decode": {"replicas": 5}}, children, previous=first)
    assert ("Normal", "PoolScaled", "decode: 2 -> 5 replicas") in told


def test_speculation_is_told_when_the_pods_switch() -> None:
    children = ready_children(disaggregated())
    pod = pods_of(children, "decode")[0]
    first, _ = observe({}, children)
    second, told = observe({}, children, previous=first, stats=[decode_stats_of(pod)])
    assert told == [("Normal", "SpeculationEnabled", "policy DSDE")]
    spec = {"speculation": {"draft": DRAFT_MODEL, "mode": "Never"}}
    _, told = observe(spec, children, previous=second, stats=[decode_stats_of(pod, policy="Off")])
    assert told == [("Normal", "SpeculationDisabled", "reason ModeNever")]


def test_new_fallbacks_are_told_with_their_causes_and_the_recovery_too() -> None:
    children = ready_children(disaggregated())
    pod = pods_of(children, "decode")[0]
    first, _ = observe({}, children, stats=[decode_stats_of(pod, transfers=7)])
    causes = {"connect": 2, "stalled": 1}
    second, told = observe({}, children, previous=first, stats=[decode_stats_of(pod, transfers=7, fallbacks=causes)])
    assert told == [
        (
            "Warning",
            "KVTransferFallback",
            "decode pods prefilled prompts themselves, for these causes so far: connect, stalled",
        )
    ]
    _, told = observe({}, children, previous=second, stats=[decode_stats_of(pod, transfers=8, fallbacks=causes)])
    assert told == [("Normal", "KVTransferResumed", "decode pods get their prompts from prefill pods again")]


def test_pods_that_fall_silent_or_leave_and_others_that_come_are_no_news_of_kv_transfer() -> None:
    children = ready_children(disaggregated())
    pods = pods_of(children, "decode")
    before = [decode_stats_of(pods[0], transfers=7), decode_stats_of(pods[1], transfers=4)]
    first, _ = observe({}, children, stats=before)
    failing = [
        decode_stats_of(pods[0], transfers=7, fallbacks={"connect": 2}),
        decode_stats_of(pods[1], transfers=4, fallbacks={"stalled": 2}),
    ]
    total = totals_of(failing)
    status, told = observe({}, children, previous=first, stats=failing)
    assert reasons(told) == ["KVTransferFallback"]
    for answering in (failing[:1], failing, failing[1:], [], failing):
        status, told = observe({}, children, previous=status, stats=answering, kv_transfer=total)
        assert [r for r in reasons(told) if r.startswith("KVTransfer")] == []
    assert status["kvTransfer"] == {"transfers": 11, "fallbacks": 4, "bytes": 11000, "tokens": 1100}
    gone = [c for c in children if c is not pods[1]]
    spec = {"decode": {"replicas": 1}}
    _, told = observe(spec, gone, previous=status, stats=failing[:1], kv_transfer=total)
    assert reasons(told) == ["PoolScaled"]


def test_totals_that_a_restarted_operator_no_longer_knows_are_no_news() -> None:
    children = ready_children(disaggregated())
    pods = pods_of(children, "decode")
    good, _ = observe({}, children, stats=[decode_stats_of(pods[0], transfers=7)])
    causes = {"connect": 5}
    bad, _ = observe({}, children, previous=good, stats=[decode_stats_of(pods[0], transfers=7, fallbacks=causes)])
    found = KvTransferStatus(**bad["kvTransfer"])
    first = [decode_stats_of(pods[0], transfers=3, fallbacks={"connect": 1})]
    status, told = observe(
        {},
        children,
        previous=bad,
        stats=first,
        kv_transfer=totals_of(first, inherited=first),
        kv_transfer_found=found,
    )
    assert (status, told) == (bad, [])
    later = [decode_stats_of(pods[0], transfers=3, fallbacks={"connect": 3})]
    status, told = observe(
        {},
        children,
        previous=bad,
        stats=later,
        kv_transfer=totals_of(later, inherited=first),
        kv_transfer_found=found,
    )
    assert told == [
        (
            "Warning",
            "KVTransferFallback",
            "decode pods prefilled prompts themselves, for these causes so far: connect",
        )
    ]


def test_the_end_of_the_prefill_pool_is_no_recovery() -> None:
    children = ready_children(disaggregated())
    pods = pods_of(children, "decode")
    good, _ = observe({}, children, stats=[decode_stats_of(pods[0])])
    bad, told = observe({}, children, previous=good, stats=[decode_stats_of(pods[0], fallbacks={"connect": 1})])
    assert reasons(told) == ["KVTransferFallback"]
    _, told = observe({"prefill": None}, children, previous=bad)
    assert "KVTransferResumed" not in reasons(told)


def test_pods_that_fall_silent_have_not_switched_speculation_off() -> None:
    children = ready_children(disaggregated())
    pod = pods_of(children, "decode")[0]
    first, _ = observe({}, children)
    on, _ = observe({}, children, previous=first, stats=[decode_stats_of(pod)])
    silent, told = observe({}, children, previous=on)
    assert told == []
    assert (silent["speculation"]["state"], silent["speculation"]["policy"]) == ("On", "DSDE")
    assert silent["speculation"]["reason"] == "MetricsStale"
    assert observe({}, children, previous=silent, stats=[decode_stats_of(pod)])[1] == []


def test_a_failing_pod_is_told_with_its_last_words() -> None:
    children = ready_children(disaggregated())
    first, _ = observe({}, children)
    pod = pods_of(children, "prefill")[0]
    set_ready(pod, False)
    pod["status"]["containerStatuses"][0] |= {
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
    }
    second, told = observe({}, children, previous=first)
    assert reasons(told) == ["ServiceNotReady", "PodFailed"]
    assert "prefill: OutOfMemory" in told[1][2]
    assert observe({}, children, previous=second)[1] == []


def test_an_invalid_spec_is_told_once_for_each_problem() -> None:
    children = ready_children(disaggregated())
    first, _ = observe({}, children)
    bad = {"model": {"uri": "s3://bucket/x"}}
    second, told = observe(bad, children, previous=first)
    assert [(kind, reason) for kind, reason, _ in told] == [("Warning", "InvalidSpec")]
    assert observe(bad, children, previous=second)[1] == []
    _, told = observe({"model": {"uri": "oci://bucket/x"}}, children, previous=second)
    assert reasons(told) == ["InvalidSpec"]


def test_mending_the_spec_brings_the_service_back() -> None:
    children = ready_children(disaggregated())
    first, _ = observe({}, children)
    second, _ = observe({"model": {"uri": "s3://bucket/x"}}, children, previous=first)
    third, told = observe({}, children, previous=second)
    assert reasons(told) == ["ServiceReady"]
    assert third == first
