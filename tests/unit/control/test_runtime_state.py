import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_workers.control.runtime_state import (
    RuntimeState,
    RuntimeStateError,
    SpeculationControl,
    StateFile,
    parse_runtime_state,
)
from specserve_workers.speculation.settings import BatchCap, PolicyName, SpeculationSettings

SPECULATION = {"policy": "DSDE", "cap": "Mean", "minTokens": 0, "maxTokens": 8, "staticTokens": 0}
DOCUMENT = {"version": 1, "generation": 3, "speculation": SPECULATION}
STATIC = SpeculationSettings(PolicyName.STATIC, BatchCap.NONE, max_tokens=4, static_tokens=2)
DSDE = SpeculationSettings(PolicyName.DSDE, BatchCap.MEAN, max_tokens=4)


def test_the_example_of_the_contract_is_read():
    state = parse_runtime_state(json.dumps(DOCUMENT))
    assert state == RuntimeState(3, SpeculationSettings(PolicyName.DSDE, BatchCap.MEAN, max_tokens=8))


def test_fields_of_a_newer_operator_are_ignored():
    document = DOCUMENT | {"draft": "x", "speculation": SPECULATION | {"gate": "on"}}
    assert parse_runtime_state(json.dumps(document)).generation == 3


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        (json.dumps(DOCUMENT | {"version": 2}), "version"),
        (json.dumps(DOCUMENT | {"generation": "3"}), "generation"),
        (json.dumps(DOCUMENT | {"generation": True}), "generation"),
        (json.dumps(DOCUMENT | {"generation": -1}), "generation"),
        (json.dumps(DOCUMENT | {"generation": 2**63}), "generation"),
        (json.dumps({"version": 1, "generation": 1}), "speculation"),
        (json.dumps(DOCUMENT | {"speculation": SPECULATION | {"policy": "Best"}}), "speculation.policy"),
        (json.dumps(DOCUMENT | {"speculation": SPECULATION | {"maxTokens": 65}}), "speculation.maxTokens"),
    ],
)
def test_a_wrong_state_is_refused_with_the_field_named(text: str, named: str):
    with pytest.raises(RuntimeStateError, match=named):
        parse_runtime_state(text)


@given(st.text())
def test_any_text_is_either_a_state_or_a_state_error(text: str):
    try:
        state = parse_runtime_state(text)
    except RuntimeStateError:
        return
    assert state.generation >= 0


class Engine:
    def __init__(self) -> None:
        self.applied: list[RuntimeState] = []
        self.fails = False

    async def apply(self, state: RuntimeState) -> None:
        if self.fails:
            raise RuntimeError("the engine is busy dying")
        self.applied.append(state)


def control_of(engine: Engine, *, started_max_tokens: int = 4) -> SpeculationControl:
    return SpeculationControl(DSDE, started_max_tokens=started_max_tokens, apply=engine.apply)


async def test_settings_of_an_older_generation_never_replace_newer_ones():
    engine = Engine()
    control = control_of(engine)
    assert await control.offer(RuntimeState(5, STATIC)) is True
    assert await control.offer(RuntimeState(4, DSDE)) is False
    assert control.state == RuntimeState(5, STATIC)
    assert engine.applied == [RuntimeState(5, STATIC)]


async def test_the_same_settings_again_are_in_force_without_asking_the_engine():
    engine = Engine()
    control = control_of(engine)
    await control.offer(RuntimeState(5, STATIC))
    assert await control.offer(RuntimeState(5, STATIC)) is True
    assert len(engine.applied) == 1


async def test_lengths_stay_within_what_the_engine_was_started_with():
    engine = Engine()
    control = control_of(engine)
    await control.offer(RuntimeState(1, SpeculationSettings(PolicyName.STATIC, max_tokens=8, static_tokens=6)))
    assert engine.applied[0].speculation.max_tokens == 4
    assert engine.applied[0].speculation.static_tokens == 4


async def test_an_engine_without_a_drafter_is_off_whatever_is_asked():
    engine = Engine()
    control = control_of(engine, started_max_tokens=0)
    await control.install()
    await control.offer(RuntimeState(1, STATIC))
    assert [state.speculation.policy for state in engine.applied] == [PolicyName.OFF, PolicyName.OFF]


@pytest.mark.parametrize(("warns", "count"), [(True, 1), (False, 0)])
async def test_a_policy_that_needs_a_missing_drafter_is_told_once(
    caplog: pytest.LogCaptureFixture, warns: bool, count: int
):
    control = SpeculationControl(DSDE, started_max_tokens=0, apply=Engine().apply, warns_without_drafter=warns)
    off = SpeculationSettings(PolicyName.OFF, max_tokens=0)
    await control.offer(RuntimeState(1, off))
    assert "no drafter" not in caplog.text
    for generation in (2, 3):
        await control.offer(RuntimeState(generation, DSDE))
    told = [record for record in caplog.records if "no drafter" in record.message]
    assert len(told) == count
    assert all("DSDE" in record.message and record.levelname == "WARNING" for record in told)


async def test_settings_the_engine_did_not_take_are_not_in_force():
    engine = Engine()
    control = control_of(engine)
    engine.fails = True
    with pytest.raises(RuntimeError):
        await control.offer(RuntimeState(2, STATIC))
    assert control.state.generation == 0


async def test_a_state_file_is_applied_when_its_content_changes(tmp_path: Path):
    engine, path = Engine(), tmp_path / "state.json"
    file = StateFile(path, offer=control_of(engine).offer)
    await file.poll()
    assert engine.applied == []
    path.write_text(json.dumps(DOCUMENT))
    await file.poll()
    await file.poll()
    path.write_text(json.dumps(DOCUMENT | {"generation": 4}))
    await file.poll()
    assert [state.generation for state in engine.applied] == [3, 4]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\xff", b'{"version": 9}'])
async def test_the_last_good_state_stays_when_the_file_is_bad(tmp_path: Path, content: bytes):
    engine, path = Engine(), tmp_path / "state.json"
    control = control_of(engine)
    file = StateFile(path, offer=control.offer)
    path.write_text(json.dumps(DOCUMENT))
    await file.poll()
    path.write_bytes(content)
    await file.poll()
    assert control.state.generation == 3


async def test_a_state_that_the_engine_did_not_take_is_offered_again(tmp_path: Path):
    engine, path = Engine(), tmp_path / "state.json"
    control = control_of(engine)
    file = StateFile(path, offer=control.offer)
    path.write_text(json.dumps(DOCUMENT))
    engine.fails = True
    await file.poll()
    engine.fails = False
    await file.poll()
    assert control.state.generation == 3
