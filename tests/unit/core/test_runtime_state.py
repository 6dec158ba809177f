"""The settings of running pods, and which generation they are of."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.core.objects import Manifest
from specserve_operator.core.plan import plan
from specserve_operator.core.stats import PodStats, SpeculationStats
from specserve_operator.render import render
from tests.unit.core.builders import DRAFT_MODEL, disaggregated, make_snapshot, pods_of, ready_children

LENGTHS = {"draft": DRAFT_MODEL, "length": {"max": 8}}


def state(service: SpeculativeService, children: list[Manifest]) -> dict[str, Any]:
    return dict(json.loads(plan(make_snapshot(service, children)).runtime_state.to_json()))


def config_map(service: SpeculativeService, children: Sequence[Manifest] = ()) -> Manifest:
    return next(obj for obj in render(plan(make_snapshot(service, children))) if obj["kind"] == "ConfigMap")


def test_a_change_of_anything_else_is_no_news_to_the_pods() -> None:
    children = [config_map(disaggregated(generation=3, speculation=LENGTHS))]
    scaled = disaggregated(generation=4, speculation=LENGTHS, decode={"replicas": 5})
    assert state(scaled, children)["generation"] == 3
    assert config_map(scaled)["data"] != children[0]["data"]


def test_other_settings_are_of_the_generation_that_asks_for_them() -> None:
    children = [config_map(disaggregated(generation=3, speculation=LENGTHS))]
    changed = state(disaggregated(generation=4, speculation={**LENGTHS, "mode": "Never"}), children)
    assert (changed["generation"], changed["speculation"]["policy"]) == (4, "Off")


def test_settings_that_come_back_are_news_again() -> None:
    first = [config_map(disaggregated(generation=1, speculation=LENGTHS))]
    off = config_map(disaggregated(generation=2, speculation={**LENGTHS, "mode": "Never"}), first)
    again = config_map(disaggregated(generation=3, speculation=LENGTHS), [off])
    assert json.loads(again["data"]["state.json"])["generation"] == 3


def test_pods_that_a_former_service_left_take_the_settings_of_the_one_that_has_its_name() -> None:
    """They have generation 7, and refuse what is older."""
    left = [config_map(disaggregated(generation=7, speculation=LENGTHS))]
    assert state(disaggregated(generation=1, speculation=LENGTHS), left)["generation"] == 7
    assert state(disaggregated(generation=2, speculation={**LENGTHS, "mode": "Never"}), left)["generation"] == 8


def test_settings_that_somebody_wrote_are_followed_by_newer_ones() -> None:
    found = config_map(disaggregated(generation=9, speculation={**LENGTHS, "mode": "Never"}))
    put_right = state(disaggregated(generation=4, speculation=LENGTHS), [found])
    assert (put_right["generation"], put_right["speculation"]["policy"]) == (10, "DSDE")


def test_settings_that_a_pod_would_refuse_are_made_newer() -> None:
    """Somebody has put back an older state file."""
    service = disaggregated(generation=4, speculation=LENGTHS)
    children = ready_children(service)
    pod = pods_of(children, "decode")[0]["metadata"]
    stats = PodStats(pod["name"], pod["uid"], "decode", "1", speculation=SpeculationStats(generation=6))
    assert plan(make_snapshot(service, children)).runtime_state.generation == 4
    assert plan(make_snapshot(service, children, stats=[stats])).runtime_state.generation == 7


@pytest.mark.parametrize(
    "generation", ["-1", "1e999", "null", "{}", '"3"', "3.0", "true", str(2**53), "9" * 50, "[" * 100_000]
)
def test_a_generation_that_is_not_ours_is_put_right(generation: str) -> None:
    service = disaggregated(generation=4, speculation=LENGTHS)
    found = config_map(service)
    found["data"]["state.json"] = found["data"]["state.json"].replace('"generation": 4', f'"generation": {generation}')
    assert state(service, [found])["generation"] == 4


@pytest.mark.parametrize("data", [None, {}, {"state.json": ""}, {"state.json": "{"}, {"state.json": "[]"}])
def test_a_state_file_that_is_none_is_written_anew(data: Any) -> None:
    service = disaggregated(generation=4, speculation=LENGTHS)
    assert state(service, [{**config_map(service), "data": data}])["generation"] == 4
