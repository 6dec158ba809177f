import logging
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from specserve_workers.flags import ServingFlags
from specserve_workers.frontend.middleware import Pool
from specserve_workers.startup import TERMINATION_LOG_VARIABLE, StartupError, report_failure, run_pod
from specserve_workers.vllm.engine_logs import (
    FAILURE_VARIABLE,
    FailureNote,
    FirstFailureHandler,
    describe_error,
    logging_config,
)
from tests.unit.entrypoints.test_flags import REQUIRED


def failing(flags: ServingFlags) -> int:
    raise StartupError("--model: there is\nno such thing")


def test_a_failed_start_ends_with_one_line_and_fills_the_termination_message(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(TERMINATION_LOG_VARIABLE, str(tmp_path / "log"))
    assert run_pod(Pool.DECODE, failing, argv=REQUIRED) == 1
    line = "error: --model: there is no such thing\n"
    assert capsys.readouterr().err == line
    assert (tmp_path / "log").read_text() == line


def test_a_wrong_flag_exits_with_2(capsys: pytest.CaptureFixture[str]):
    assert run_pod(Pool.DECODE, failing, argv=[*REQUIRED, "--", "--port", "1"]) == 2
    assert (
        capsys.readouterr().err == "error: --port: set by the operator, not to be given among the engine's arguments\n"
    )


def test_a_pod_told_to_stop_during_its_start_says_nothing(capsys: pytest.CaptureFixture[str]):
    def interrupted(flags: ServingFlags) -> int:
        raise KeyboardInterrupt

    assert run_pod(Pool.DECODE, interrupted, argv=REQUIRED) == 143
    assert capsys.readouterr().err == ""


def test_a_termination_message_that_cannot_be_written_does_not_hide_the_failure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    environ = {TERMINATION_LOG_VARIABLE: str(tmp_path / "no" / "log")}
    assert report_failure("x", environ=environ) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: x"


def test_the_first_logged_exception_of_any_process_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(FAILURE_VARIABLE, str(tmp_path / "failure"))
    note = FailureNote(tmp_path / "failure")
    log = logging.Logger("engine")
    log.addHandler(FirstFailureHandler(level=logging.ERROR))
    log.error("no exception")
    assert note.read() is None
    for message in ("the cause", "a consequence"):
        try:
            raise ValueError(message)
        except ValueError:
            log.exception("failed")
    assert note.read() == "ValueError: the cause"
    note.clear()
    assert note.read() is None


def test_of_a_failed_validation_only_what_was_wrong_is_told():
    with pytest.raises(ValidationError) as raised:
        TypeAdapter(int).validate_python("secret")
    assert describe_error(raised.value) == ("Input should be a valid integer, unable to parse string as an integer")


def test_our_loggers_write_where_the_engine_writes():
    engine = {"handlers": {"vllm": {}}, "loggers": {"vllm": {"handlers": ["vllm"], "level": "INFO"}}}
    config = logging_config(engine)
    assert config["loggers"]["specserve_workers"] == config["loggers"]["vllm"]
    assert config["loggers"]["vllm"]["handlers"] == ["vllm", "specserve_failure"]
    assert engine["loggers"]["vllm"]["handlers"] == ["vllm"]
