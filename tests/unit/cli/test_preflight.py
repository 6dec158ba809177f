"""What is refused before any process starts: each with the field or file that is wrong."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.cli.preflight import PreflightError, check_services, find_port_problem
from specserve_operator.cluster.local import ports
from specserve_operator.core.config import OperatorConfig


def model_folder(folder: Path, *, vocab_size: Any = 100, tokenizer: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def make_service(
    target: str,
    draft: str | None = None,
    *,
    name: str = "tiny",
    port: int = 18080,
    method: str = "DraftModel",
) -> SpeculativeService:
    spec: dict[str, Any] = {"model": {"uri": target}, "gateway": {"port": port}}
    if draft is not None:
        spec["speculation"] = {"draft": {"method": method, "uri": draft}}
    return SpeculativeService.model_validate({"metadata": {"name": name}, "spec": spec})


CONFIG = OperatorConfig("engine", "gateway", "1", local=True)


def check(service: SpeculativeService) -> None:
    check_services([service], config=CONFIG, port_problem=lambda _: None)


def test_a_service_whose_models_are_there_passes(tmp_path: Path) -> None:
    target, draft = model_folder(tmp_path / "t"), model_folder(tmp_path / "d")
    check(make_service(f"file://{target}", f"file://{draft}"))


def test_a_hub_model_is_not_looked_for_on_disk() -> None:
    check(make_service("hf://org/target", "hf://org/draft"))


def test_a_missing_model_folder_is_named_with_its_field(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=rf"tiny: spec.model.uri: there is no folder {tmp_path}/none"):
        check(make_service(f"file://{tmp_path}/none"))


def test_a_folder_without_config_json_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"spec\.model\.uri: .* has no config\.json"):
        check(make_service(f"file://{tmp_path}"))


def test_a_missing_draft_is_named_with_its_field(tmp_path: Path) -> None:
    target = model_folder(tmp_path / "t")
    with pytest.raises(PreflightError, match=r"spec\.speculation\.draft\.uri: there is no folder"):
        check(make_service(f"file://{target}", f"file://{tmp_path}/none"))


@pytest.mark.parametrize("uri", ["s3://bucket/m", "oci://registry/m"])
def test_storage_that_no_pod_can_read_is_refused_with_its_field(uri: str) -> None:
    with pytest.raises(PreflightError, match=rf"tiny: spec\.model\.uri: {uri[:2]}.*not supported"):
        check(make_service(uri))


def test_what_this_version_cannot_serve_is_refused_before_anything_starts() -> None:
    with pytest.raises(PreflightError, match=r"tiny: spec\.speculation\.draft\.method: EAGLE3 is not supported"):
        check(make_service("hf://a/b", "hf://a/c", method="EAGLE3"))


def test_a_path_with_spaces_is_found(tmp_path: Path) -> None:
    model_folder(tmp_path / "my model")
    check(make_service(f"file://{tmp_path}/my%20model"))


def test_a_draft_with_another_vocabulary_is_refused_with_both_sizes(tmp_path: Path) -> None:
    target, draft = model_folder(tmp_path / "t"), model_folder(tmp_path / "d", vocab_size=99)
    with pytest.raises(PreflightError, match=r"draft\.uri: the draft's vocabulary has 99 tokens .* 100"):
        check(make_service(f"file://{target}", f"file://{draft}"))


def test_the_vocabulary_of_a_multimodal_target_is_that_of_its_text_model(tmp_path: Path) -> None:
    target, draft = model_folder(tmp_path / "t"), model_folder(tmp_path / "d")
    (target / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 100}}))
    check(make_service(f"file://{target}", f"file://{draft}"))


def tokenizer(**vocab: int) -> dict[str, Any]:
    return {"model": {"type": "BPE", "vocab": vocab, "merges": ["a b"]}, "added_tokens": []}


def test_a_draft_with_another_tokenizer_is_refused_with_both_files(tmp_path: Path) -> None:
    target = model_folder(tmp_path / "t", tokenizer=tokenizer(a=0, b=1))
    draft = model_folder(tmp_path / "d", tokenizer=tokenizer(a=1, b=0))
    expected = rf"draft\.uri: {draft}/tokenizer\.json is another tokenizer than {target}/tokenizer\.json"
    with pytest.raises(PreflightError, match=expected):
        check(make_service(f"file://{target}", f"file://{draft}"))


def test_tokenizers_that_differ_only_in_writing_are_the_same(tmp_path: Path) -> None:
    other_writer = tokenizer(b=1, a=0) | {"version": "1.0"}
    other_writer["model"]["merges"] = [["a", "b"]]
    target = model_folder(tmp_path / "t", tokenizer=tokenizer(a=0, b=1))
    draft = model_folder(tmp_path / "d", tokenizer=other_writer)
    check(make_service(f"file://{target}", f"file://{draft}"))


def test_a_broken_config_names_the_file(tmp_path: Path) -> None:
    target, draft = model_folder(tmp_path / "t"), model_folder(tmp_path / "d")
    (draft / "config.json").write_text("{")
    with pytest.raises(PreflightError, match=rf"{draft}/config\.json: cannot be read as JSON"):
        check(make_service(f"file://{target}", f"file://{draft}"))


def test_a_config_without_vocabulary_names_the_file(tmp_path: Path) -> None:
    target, draft = model_folder(tmp_path / "t"), model_folder(tmp_path / "d", vocab_size="many")
    with pytest.raises(PreflightError, match=rf"{draft}/config\.json: vocab_size is missing"):
        check(make_service(f"file://{target}", f"file://{draft}"))


def test_a_port_with_a_listener_is_refused() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is in use" in str(find_port_problem(port))
        with pytest.raises(PreflightError, match=rf"tiny: spec\.gateway\.port: port {port} of 127\.0\.0\.1 is in use"):
            check_services([make_service("hf://a/b", port=port)], config=CONFIG)


def test_a_free_port_is_fine() -> None:
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        port = finder.getsockname()[1]
    assert find_port_problem(port) is None


def test_the_port_of_another_service_is_refused_by_name() -> None:
    first, second = make_service("hf://a/b", name="first"), make_service("hf://a/b", name="second")
    with pytest.raises(
        PreflightError, match=r"second: spec.gateway.port: port 18080 is the gateway of service default/first"
    ):
        check_services([second], existing=[first], config=CONFIG)


def test_a_services_own_listener_is_not_taken_for_somebody_elses() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        service = make_service("hf://a/b", port=listener.getsockname()[1])
        check_services([service], existing=[service], config=CONFIG)


def test_two_services_of_one_file_cannot_share_a_port() -> None:
    services = [make_service("hf://a/b", name=name, port=free_port()) for name in ("one", "two")]
    same = [services[0], make_service("hf://a/b", name="two", port=services[0].spec.gateway.port)]
    check_services(services, config=CONFIG)
    with pytest.raises(PreflightError, match=r"two: spec\.gateway\.port"):
        check_services(same, config=CONFIG)


def free_port() -> int:
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        return int(finder.getsockname()[1])


def test_a_port_that_another_control_plane_holds_for_a_gateway_is_refused() -> None:
    port = free_port()
    with ports.reserve("127.0.0.1", port):
        assert f"port {port} of 127.0.0.1 is in use" in str(find_port_problem(port))
    assert find_port_problem(port) is None


def test_the_vocabulary_of_a_model_with_an_empty_text_config_is_missing(tmp_path: Path) -> None:
    target, draft = model_folder(tmp_path / "t"), model_folder(tmp_path / "d")
    (draft / "config.json").write_text(json.dumps({"text_config": None}))
    with pytest.raises(PreflightError, match=r"d/config\.json: vocab_size is missing or no number"):
        check(make_service(f"file://{target}", f"file://{draft}"))
