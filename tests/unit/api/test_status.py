from typing import Any

import pytest
from pydantic import ValidationError

from specserve_operator.api.conditions import ConditionType, EventReason, Reason
from specserve_operator.api.status import (
    Columns,
    Condition,
    ConditionStatus,
    KvTransferStatus,
    LatencyObservation,
    LatencyStatus,
    PoolStatus,
    ScalingDecision,
    ServiceStatus,
    SpeculationState,
    SpeculationStatus,
    Speedup,
    format_time,
)
from specserve_operator.api.structural import structural_schema
from tests.unit.api.fake_apiserver import admit


def condition(kind: ConditionType) -> Condition:
    return Condition(
        type=kind,
        status=ConditionStatus.UNKNOWN,
        reason=Reason.PENDING,
        last_transition_time=format_time(1_700_000_000),
    )


FULL = ServiceStatus(
    observed_generation=3,
    endpoint="http://coder-gateway.llm/v1",
    conditions=tuple(condition(kind) for kind in ConditionType),
    pools=(PoolStatus(name="decode", desired=2, replicas=3, ready=1, updated=2, revision="0123456789"),),
    latency=LatencyStatus(
        time_to_first_token=(LatencyObservation(percentile=90, observed_milliseconds=38, window_seconds=300),)
    ),
    speculation=SpeculationStatus(
        state=SpeculationState.ON,
        reason=Reason.DRAFTS_ACCEPTED,
        policy="DSDE",
        acceptance_percent=62,
        mean_accepted_length="2.7",
        speedup=Speedup(ratio="1.83", low="1.71", high="1.95", windows=12),
    ),
    kv_transfer=KvTransferStatus(transfers=10, bytes=1 << 40),
    scaling_history=(
        ScalingDecision(time=format_time(0), pool="decode", from_replicas=1, to_replicas=2, reason=Reason.LATENCY_HIGH),
    ),
    columns=Columns(prefill="1/1", ttft="38ms/500ms", acceptance="62%"),
)


def test_full_status_fits_the_schema() -> None:
    assert admit(structural_schema(ServiceStatus, with_defaults=False), FULL.to_manifest()) == []


def test_status_is_camel_case_and_leaves_out_what_is_unknown() -> None:
    written: dict[str, Any] = FULL.to_manifest()
    assert written["observedGeneration"] == 3
    assert written["conditions"][0] == {
        "type": "Ready",
        "status": "Unknown",
        "reason": "Pending",
        "message": "",
        "lastTransitionTime": "2023-11-14T22:13:20Z",
        "observedGeneration": 0,
    }
    assert "reason" not in written["pools"][0]
    assert written["latency"]["timeToFirstToken"] == [
        {"percentile": 90, "observedMilliseconds": 38, "samples": 0, "windowSeconds": 300}
    ]
    assert written["speculation"]["state"] == "On"
    assert ServiceStatus.model_validate(written) == FULL


def test_status_of_a_newer_operator_fits_the_schema() -> None:
    newer = FULL.to_manifest()
    newer["conditions"][0] |= {"type": "NotYetInvented", "reason": "NotYetKnown"}
    assert admit(structural_schema(ServiceStatus, with_defaults=False), newer) == []


def test_condition_cannot_be_there_twice() -> None:
    with pytest.raises(ValidationError, match="Ready is doubled"):
        ServiceStatus(conditions=(condition(ConditionType.READY), condition(ConditionType.READY)))


def test_float_is_no_decimal_string() -> None:
    with pytest.raises(ValidationError):
        SpeculationStatus(state=SpeculationState.ON, mean_accepted_length="about 2")


@pytest.mark.parametrize("words", [ConditionType, Reason, EventReason])
def test_words_of_the_api_are_valid_in_kubernetes(words: type[ConditionType | Reason | EventReason]) -> None:
    for word in words:
        assert word.isalnum()
        assert word[0].isupper()
        assert len(word) <= 128


def test_every_condition_of_the_api_exists() -> None:
    assert {str(kind) for kind in ConditionType} == {
        "Ready",
        "GatewayReady",
        "PrefillReady",
        "DecodeReady",
        "TrainingReady",
        "KVTransferReady",
        "SpeculationEffective",
        "ObjectivesMet",
        "Progressing",
        "DraftUpToDate",
        "UpgradeAvailable",
    }
