"""Between the control protocol and the core's values."""

import pytest

from specserve_operator.core.stats import Histogram, PolicyStats, SpeculationSettings
from specserve_operator.runtime.wire import (
    DesiredSpeculation,
    UnknownSettingError,
    parse_state_file,
    pod_stats,
    settings_request,
)
from specserve_protos.v1alpha1 import control_pb2 as pb

STATE = """{"version": 1, "generation": 3, "speculation":
  {"policy": "DSDE", "cap": "Mean", "minTokens": 0, "maxTokens": 8, "staticTokens": 0}}"""
DSDE = SpeculationSettings(policy="DSDE", cap="Mean", min_tokens=0, max_tokens=8, static_tokens=0)


def test_the_state_file_is_what_pods_are_hastened_to() -> None:
    desired = parse_state_file(STATE)
    assert desired == DesiredSpeculation(3, DSDE)
    request = settings_request(desired)
    assert request.generation == 3
    assert request.settings.policy == pb.LENGTH_POLICY_DSDE
    assert request.settings.cap == pb.BATCH_CAP_MEAN
    assert request.settings.max_tokens == 8


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"generation": 1, "speculation": {"policy": "DSDE"}}',
        "[" * 100_000,
        STATE.replace('"generation": 3', '"generation": 1e999'),
        STATE.replace('"generation": 3', f'"generation": {2**63}'),
        STATE.replace('"maxTokens": 8', '"maxTokens": 1e999'),
    ],
)
def test_a_broken_state_file_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_state_file(text)


def test_a_policy_that_the_protocol_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(UnknownSettingError, match="Goodput"):
        settings_request(DesiredSpeculation(1, SpeculationSettings(policy="Goodput", cap="None")))


def test_an_answer_becomes_values() -> None:
    answer = pb.GetStatsResponse(
        pod_name="p",
        pod_uid="u",
        pool="decode",
        revision="r",
        uptime_seconds=12.5,
        draining=True,
        requests=pb.RequestStats(
            started=5,
            running=1,
            time_to_first_token=pb.Histogram(upper_bounds_ms=[10, 20], counts=[1, 2, 3], sum_ms=99.0),
        ),
        speculation=pb.SpeculationStats(
            in_force=pb.SpeculationSettings(policy=pb.LENGTH_POLICY_STATIC, cap=pb.BATCH_CAP_NONE, static_tokens=4),
            generation=2,
            by_policy=[
                pb.PolicyStats(policy=pb.LENGTH_POLICY_STATIC, drafted_tokens=10, accepted_by_position=[3, 1]),
                pb.PolicyStats(policy=pb.LENGTH_POLICY_DSDE, drafted_tokens=4),
            ],
        ),
        kv_transfer=pb.KvTransferStats(remote_prefills=2, fallbacks=[pb.Fallback(cause="Timeout", count=1)]),
    )
    stats = pod_stats(answer)
    assert (stats.pod_name, stats.pod_uid, stats.pool, stats.uptime_seconds) == ("p", "u", "decode", 12.5)
    assert stats.draining
    assert stats.requests.time_to_first_token == Histogram((10.0, 20.0), (1, 2, 3), 99.0)
    assert stats.speculation.in_force == SpeculationSettings("Static", "None", 0, 0, 4)
    assert stats.speculation.by_policy == (
        ("DSDE", PolicyStats(drafted_tokens=4)),
        ("Static", PolicyStats(drafted_tokens=10, accepted_by_position=(3, 1))),
    )
    assert stats.kv_transfer.fallbacks == (("Timeout", 1),)


def test_a_pod_without_speculation_has_no_settings() -> None:
    assert pod_stats(pb.GetStatsResponse()).speculation.in_force is None


def test_a_policy_of_a_newer_pod_is_shown_by_its_number() -> None:
    answer = pb.GetStatsResponse()
    answer.speculation.by_policy.add().policy = 17  # type: ignore[assignment]
    assert pod_stats(answer).speculation.by_policy[0][0] == "Policy17"


def test_an_answer_that_contradicts_itself_is_a_value_error() -> None:
    broken = pb.GetStatsResponse()
    broken.requests.time_to_first_token.upper_bounds_ms.append(1.0)
    with pytest.raises(ValueError, match="bounds"):
        pod_stats(broken)


def test_bounds_of_histograms_are_kept_once_for_all_pods() -> None:
    answers = [
        pb.GetStatsResponse(
            requests=pb.RequestStats(time_to_first_token=pb.Histogram(upper_bounds_ms=[1.0, 2.0], counts=[0, n, 0]))
        )
        for n in (1, 2)
    ]
    first, second = (pod_stats(answer).requests.time_to_first_token for answer in answers)
    assert first.upper_bounds_ms == (1.0, 2.0)
    assert first.upper_bounds_ms is second.upper_bounds_ms
    assert (first.counts, second.counts) == ((0, 1, 0), (0, 2, 0))
