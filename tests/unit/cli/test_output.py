"""What `get` prints, as golden text."""

import json
from datetime import UTC, datetime
from typing import Any

import yaml

from specserve_operator.cli.output import (
    OutputFormat,
    as_list,
    format_events,
    format_pods,
    format_services,
    format_structured,
    is_pod_ready,
    pod_state,
)

NOW = datetime(2026, 1, 1, 12, 3, 20, tzinfo=UTC)
START = "2026-01-01T12:00:00Z"


def service(name: str = "tiny", **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "specserve.dev/v1alpha1",
        "kind": "SpeculativeService",
        "metadata": {"name": name, "namespace": "default", "creationTimestamp": START},
        "spec": {"model": {"uri": "file:///m"}},
        "status": status,
    }


READY = {
    "conditions": [{"type": "Ready", "status": "True", "reason": "AllPoolsReady"}],
    "columns": {
        "prefill": "1/1",
        "decode": "2/2",
        "ttft": "38ms/500ms",
        "tpot": "9ms",
        "acceptance": "62%",
        "speculation": "DSDE",
        "draft": "DraftModel",
        "kvFallbacks": "0",
    },
}


def pod(name: str = "tiny-decode-abc-1", **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "creationTimestamp": START,
            "labels": {"specserve.dev/pool": "decode"},
        },
        "spec": {"containers": [{"name": "engine"}]},
        "status": {"phase": "Running", "podIP": "127.0.0.2", **status},
    }


def test_services_show_the_columns_of_the_status() -> None:
    text = format_services([service(**READY), service("fresh")], now=NOW)
    assert text.splitlines() == [
        "NAME    READY     PREFILL   DECODE   TRAIN   TTFT         TPOT   ACCEPT   SPEC   DRAFT        AGE",
        "tiny    True      1/1       2/2      -       38ms/500ms   9ms    62%      DSDE   DraftModel   3m20s",
        "fresh   Unknown   -         -        -       -            -      -        -      -            3m20s",
    ]


def test_wide_services_show_the_reason_and_the_fallbacks() -> None:
    header, row = format_services([service(**READY)], now=NOW, wide=True).splitlines()
    assert header.endswith("AGE     REASON          SPEEDUP   KV-FALLBACKS")
    assert row.endswith("3m20s   AllPoolsReady   -         0")


def test_pods_are_sorted_and_show_restarts_with_the_time_of_the_last() -> None:
    restarted = pod(
        "a",
        containerStatuses=[
            {
                "ready": True,
                "restartCount": 2,
                "state": {"running": {}},
                "lastState": {"terminated": {"finishedAt": "2026-01-01T12:02:45Z"}},
            }
        ],
    )
    starting = pod("b", containerStatuses=[{"ready": False, "restartCount": 0, "state": {"running": {}}}])
    assert format_pods([starting, restarted], now=NOW).splitlines() == [
        "NAME   READY   STATUS    RESTARTS      AGE",
        "a      1/1     Running   2 (35s ago)   3m20s",
        "b      0/1     Running   0             3m20s",
    ]


def test_wide_pods_show_pool_and_address() -> None:
    header, row = format_pods([pod()], now=NOW, wide=True).splitlines()
    assert header.split() == ["NAME", "READY", "STATUS", "RESTARTS", "AGE", "POOL", "IP"]
    assert row.split() == ["tiny-decode-abc-1", "0/1", "Running", "0", "3m20s", "decode", "127.0.0.2"]


def test_pod_state_names_what_keeps_a_container_from_running() -> None:
    waiting = pod(containerStatuses=[{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}])
    ended = pod(containerStatuses=[{"state": {"terminated": {"exitCode": 3}}}])
    deleted = pod()
    deleted["metadata"]["deletionTimestamp"] = START
    assert [pod_state(p) for p in (waiting, ended, deleted, pod())] == [
        "CrashLoopBackOff",
        "ExitCode:3",
        "Terminating",
        "Running",
    ]


def test_a_pod_is_ready_only_by_its_condition() -> None:
    assert is_pod_ready(pod(conditions=[{"type": "Ready", "status": "True"}]))
    assert not is_pod_ready(pod(conditions=[{"type": "Ready", "status": "False"}]))
    assert not is_pod_ready(pod())


def test_events_come_oldest_first_with_their_count() -> None:
    once = {
        "type": "Normal",
        "reason": "PodReady",
        "message": "pod\nis ready",
        "firstTimestamp": "2026-01-01T12:03:15Z",
        "lastTimestamp": "2026-01-01T12:03:15Z",
        "count": 1,
        "involvedObject": {"kind": "SpeculativeService", "name": "tiny"},
    }
    often = {**once, "reason": "PodFailed", "type": "Warning", "count": 3}
    often["firstTimestamp"], often["lastTimestamp"] = "2026-01-01T12:00:20Z", "2026-01-01T12:03:10Z"
    assert format_events([once, often], now=NOW).splitlines() == [
        "LAST SEEN          TYPE      REASON      OBJECT                    MESSAGE",
        "10s (x3 over 3m)   Warning   PodFailed   speculativeservice/tiny   pod is ready",
        "5s                 Normal    PodReady    speculativeservice/tiny   pod is ready",
    ]


def test_structured_output_keeps_the_objects() -> None:
    listed = as_list([service()])
    assert json.loads(format_structured(listed, OutputFormat.JSON)) == listed
    assert yaml.safe_load(format_structured(listed, OutputFormat.YAML)) == listed
    assert listed["kind"] == "List"
