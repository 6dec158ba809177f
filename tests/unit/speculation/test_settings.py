import pytest

from specserve_workers.speculation.settings import (
    BatchCap,
    PolicyName,
    SettingsError,
    SpeculationSettings,
    parse_settings,
)

STATE = {"policy": "DSDE", "cap": "Mean", "minTokens": 1, "maxTokens": 8, "staticTokens": 0}


def test_the_state_file_object_is_read_field_by_field() -> None:
    assert parse_settings(STATE) == SpeculationSettings(
        policy=PolicyName.DSDE, cap=BatchCap.MEAN, min_tokens=1, max_tokens=8, static_tokens=0
    )


def test_writing_and_reading_gives_the_same() -> None:
    assert parse_settings(STATE).to_state() == STATE


def test_fields_of_a_newer_operator_are_ignored() -> None:
    assert parse_settings({**STATE, "goodput": True}) == parse_settings(STATE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "Fast"}, "speculation.policy must be one of Off, Static, DSDE, not 'Fast'"),
        ({"cap": None}, "speculation.cap must be one of None, Mean, not None"),
        ({"maxTokens": 65}, "speculation.maxTokens must be between 0 and 64, not 65"),
        ({"maxTokens": "8"}, "speculation.maxTokens must be a whole number, not '8'"),
        ({"minTokens": True}, "speculation.minTokens must be a whole number, not True"),
        ({"minTokens": 9}, r"speculation.minTokens must be between 0 and maxTokens \(8\), not 9"),
        ({"staticTokens": -1}, r"speculation.staticTokens must be between 0 and maxTokens \(8\), not -1"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_settings({**STATE, **change})


def test_a_missing_field_is_named() -> None:
    with pytest.raises(SettingsError, match=r"speculation.cap is missing"):
        parse_settings({key: value for key, value in STATE.items() if key != "cap"})


def test_anything_but_an_object_is_refused() -> None:
    with pytest.raises(SettingsError, match="must be an object, not list"):
        parse_settings([STATE])


def test_lengths_are_limited_to_what_the_engine_was_started_with() -> None:
    limited = SpeculationSettings(PolicyName.STATIC, min_tokens=5, max_tokens=8, static_tokens=6).limited(4)
    assert (limited.min_tokens, limited.max_tokens, limited.static_tokens) == (4, 4, 4)
    assert limited.policy is PolicyName.STATIC


def test_an_engine_without_drafter_is_off() -> None:
    assert parse_settings(STATE).limited(0).policy is PolicyName.OFF
