"""The command as a whole: exit codes, messages, and what it costs to start."""

import subprocess
import sys
from pathlib import Path

import pytest

from specserve_operator.api.validation import InvalidManifest, Problem
from specserve_operator.cli.client import ApiError, NotRunning
from specserve_operator.cli.errors import CliError
from specserve_operator.cli.main import explain_error, main
from specserve_operator.cli.preflight import PreflightError
from specserve_operator.cluster.protocol import ClusterError


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["specserve", *args])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPECSERVE_STATE_DIR", raising=False)


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (CliError("x"), 1),
        (CliError("x", exit_code=2), 2),
        (NotRunning("x"), 1),
        (ApiError("x", status=400), 2),
        (ApiError("x", status=404), 1),
        (InvalidManifest([Problem("", "x")]), 2),
        (PreflightError("x"), 2),
        (ClusterError("x"), 1),
        (OSError("x"), 1),
    ],
)
def test_each_expected_error_is_its_message_and_a_code(error: Exception, exit_code: int) -> None:
    assert explain_error(error) == ("x", exit_code)


def test_an_unforeseen_error_is_owned_up_to() -> None:
    message, exit_code = explain_error(KeyError("pools"))
    assert "a fault of specserve itself" in message
    assert exit_code == 1


@pytest.mark.parametrize(
    "command", [["get"], ["describe"], ["logs", "decode"], ["scale", "a", "decode=1"], ["delete", "a"]]
)
def test_without_a_control_plane_every_command_says_how_to_start_one(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *command) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == ("error: no control plane is running on .specserve: start one with `specserve up -f FILE`\n")


def test_down_without_a_control_plane_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "down") == 0
    assert capsys.readouterr().out == "nothing is running on .specserve\n"


@pytest.mark.parametrize(
    "command", [["nonsense"], ["up"], ["get", "--nonsense"], ["logs"], ["up", "-f", "x", "--json"]]
)
def test_bad_usage_ends_with_code_2(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, *command) == 2


def test_a_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "up", "-f", "none.yaml") == 2
    assert capsys.readouterr().err == "error: none.yaml: No such file or directory\n"


def test_a_traceback_is_shown_only_with_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "get")
    assert "Traceback" not in capsys.readouterr().err
    run(monkeypatch, "--debug", "get")
    assert "Traceback" in capsys.readouterr().err


def test_a_state_dir_too_deep_for_a_socket_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "get", "--state-dir", "x" * 120) == 2
    assert "too long for a unix socket" in capsys.readouterr().err


def modules_loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_command_starts_without_the_engine_and_without_what_only_some_commands_need() -> None:
    loaded = modules_loaded_by("import specserve_operator.cli.main, specserve_operator.cli.read")
    assert not loaded & {"torch", "vllm", "transformers", "numpy", "grpc", "aiohttp", "kopf", "kubernetes", "pydantic"}


def test_the_control_plane_never_loads_the_engine() -> None:
    loaded = modules_loaded_by("import specserve_operator.cli.controlplane, specserve_operator.cli.up")
    assert not loaded & {"torch", "vllm", "transformers", "numpy", "specserve_workers", "kopf", "kubernetes"}
