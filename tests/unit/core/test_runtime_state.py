"""The settings of running pods, and which generation they are of."""

import json
from typing import Any

import pytest

from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.core.objects import Manifest
from specserve_operator.core.plan import plan
from specserve_operator.render import render
from tests.unit.core.builders import DRAFT_MODEL, disaggregated, make_snapshot

LENGTHS = {"draft": DRAFT_MODEL, "length": {"max": 8}}


def state(service: SpeculativeService, children: list[Manifest]) -> dict[str, Any]:
    return dict(json.loads(plan(make_snapshot(service, children)).runtime_state.to_json()))


def config_map(service: SpeculativeService) -> Manifest:
    return next(obj for obj in render(plan(make_snapshot(service))) if obj["kind"] == "ConfigMap")


def test_a_change_of_anything_else_is_no_news_to_the_pods() -> None:
    children = [config_map(disaggregated(generation=3, speculation=LENGTHS))]
    scaled = disaggregated(generation=4, speculation=LENGTHS, decode={"replicas": 5})
    assert state(scaled, children)["generation"] == 3
    assert config_map(scaled)["data"] != children[0]["data"]


def test_other_settings_are_of_the_generation_that_asks_for_them() -> None:
    children = [config_map(disaggregated(generation=3, speculation=LENGTHS))]
    changed = state(disaggregated(generation=4, speculation={**LENGTHS, "mode": "Never"}), children)
    assert (changed["generation"], changed["speculation"]["policy"]) == (4, "Off")


@pytest.mark.parametrize("generation", ["5", "-1", "1e999", "null", "{}", '"3"', "3.0", "true"])
def test_a_generation_that_is_not_ours_is_put_right(generation: str) -> None:
    """One that is ahead would keep the pods from taking the next settings."""
    service = disaggregated(generation=4, speculation=LENGTHS)
    found = config_map(service)
    found["data"]["state.json"] = found["data"]["state.json"].replace('"generation": 4', f'"generation": {generation}')
    assert state(service, [found])["generation"] == 4


@pytest.mark.parametrize("data", [None, {}, {"state.json": ""}, {"state.json": "{"}, {"state.json": "[]"}])
def test_a_state_file_that_is_none_is_written_anew(data: Any) -> None:
    service = disaggregated(generation=4, speculation=LENGTHS)
    assert state(service, [{**config_map(service), "data": data}])["generation"] == 4
