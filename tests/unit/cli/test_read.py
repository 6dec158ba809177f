"""What the read commands make of the control plane's answers."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from specserve_operator.cli.client import ApiError, NotRunning
from specserve_operator.cli.errors import CliError
from specserve_operator.cli.output import OutputFormat
from specserve_operator.cli.read import LogOptions, describe, get, logs

TABLE, JSON = OutputFormat.TABLE, OutputFormat.JSON


def service(name: str) -> dict[str, Any]:
    return {"kind": "SpeculativeService", "metadata": {"name": name}, "spec": {}, "status": {}}


def pod(name: str, pool: str, of: str = "tiny") -> dict[str, Any]:
    labels = {"specserve.dev/pool": pool, "specserve.dev/service": of}
    return {"kind": "Pod", "metadata": {"name": name, "labels": labels}, "status": {}}


def event(reason: str, kind: str, name: str) -> dict[str, Any]:
    return {"kind": "Event", "reason": reason, "involvedObject": {"kind": kind, "name": name}}


class StubClient:
    """A control plane with two services and three pods."""

    def __init__(self, logs: dict[str, str | Exception] | None = None) -> None:
        self.objects = {
            "SpeculativeService": [service("tiny"), service("other")],
            "Pod": [pod("d1", "decode"), pod("d2", "decode"), pod("p1", "prefill", of="other")],
            "Event": [event("Ready", "SpeculativeService", "tiny"), event("Started", "Pod", "d1")],
        }
        self.log_texts = logs or {"d1": "one\ntwo\n", "d2": "three\n", "p1": "four\n"}
        self.log_options: list[dict[str, Any]] = []

    def list_objects(self, kind: str, *, namespace: str | None = None) -> list[dict[str, Any]]:
        return self.objects[kind] if namespace == "default" else []

    def log_lines(self, namespace: str, pod: str, **options: Any) -> Iterator[str]:
        self.log_options.append(options)
        text = self.log_texts.get(pod, ApiError(f"no pod {pod}; there is: d0", status=404))
        if isinstance(text, Exception):
            raise text
        yield from text.splitlines(keepends=True)


def get_text(resource: str, name: str | None = None, *, namespace: str = "default", output: Any = TABLE) -> str:
    return get(StubClient(), resource, name=name, namespace=namespace, output=output)  # type: ignore[arg-type]


def log_text(target: str, client: StubClient | None = None, **options: Any) -> str:
    stub: Any = client or StubClient()
    return "".join(logs(stub, target, namespace="default", options=LogOptions(**options)))


@pytest.mark.parametrize("alias", ["spsvc", "service", "services", "speculativeservices"])
def test_services_are_found_under_all_their_names(alias: str) -> None:
    assert [line.split()[0] for line in get_text(alias).splitlines()] == ["NAME", "tiny", "other"]


def test_all_shows_a_table_for_each_kind() -> None:
    assert [line.split()[0] for line in get_text("all").splitlines() if line] == [
        *("NAME", "tiny", "other"),
        *("NAME", "d1", "d2", "p1"),
        *("LAST", "<unknown>", "<unknown>"),
    ]


def test_a_name_selects_one_object_and_json_is_that_object() -> None:
    assert json.loads(get_text("pods", "d2", output=JSON))["metadata"]["name"] == "d2"
    assert json.loads(get_text("pods", output=JSON))["kind"] == "List"
    assert len(json.loads(get_text("all", output=JSON))["items"]) == 7


def test_events_are_selected_by_the_object_they_are_about() -> None:
    assert [line.split()[-1] for line in get_text("events", "d1").splitlines()[1:]] == ["pod/d1"]


def test_a_name_that_is_not_there_is_an_error_with_those_that_are() -> None:
    with pytest.raises(CliError, match="there is no pod d9; there is: d1, d2, p1") as caught:
        get_text("pods", "d9")
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(("resource", "name"), [("secrets", None), ("all", "tiny")])
def test_a_resource_that_does_not_exist_is_bad_usage(resource: str, name: str | None) -> None:
    with pytest.raises(CliError) as caught:
        get_text(resource, name)
    assert caught.value.exit_code == 2


def test_an_empty_namespace_says_so() -> None:
    assert get_text("pods", namespace="else") == "no pods in namespace else\n"
    assert get_text("all", namespace="else") == "nothing in namespace else\n"


def test_describe_brings_a_services_own_pods_and_events_together() -> None:
    client: Any = StubClient()
    data = json.loads(describe(client, name="tiny", namespace="default", output=JSON))
    assert [p["metadata"]["name"] for p in data["pods"]] == ["d1", "d2"]
    assert [e["reason"] for e in data["events"]] == ["Ready"]
    assert len(json.loads(describe(client, name=None, namespace="default", output=JSON))) == 2
    text = describe(client, name=None, namespace="default", output=TABLE)
    assert text.count("Namespace:  ") == 2


def test_the_log_of_one_pod_is_shown_as_it_is() -> None:
    assert log_text("d1") == "one\ntwo\n"


def test_the_logs_of_a_pool_are_shown_with_the_names_of_their_pods() -> None:
    assert log_text("decode") == "[d1] one\n[d1] two\n[d2] three\n"


def test_the_log_of_a_pools_only_pod_needs_no_name() -> None:
    assert log_text("prefill") == "four\n"


def test_logs_as_json_are_one_object_a_line() -> None:
    lines = [json.loads(line) for line in log_text("d1", as_json=True).splitlines()]
    assert lines == [{"pod": "d1", "line": "one"}, {"pod": "d1", "line": "two"}]


def test_a_pod_without_a_log_does_not_hide_the_others() -> None:
    client = StubClient({"d1": ApiError("no log yet", status=404), "d2": "three\n"})
    assert log_text("decode", client) == "[d1] (no log yet)\n[d2] three\n"
    with pytest.raises(ApiError):
        log_text("d1", client)


def test_following_a_pool_ends_when_all_its_pods_are_gone() -> None:
    lines = log_text("decode", follow=True).splitlines()
    assert sorted(lines) == ["[d1] one", "[d1] two", "[d2] three"]
    assert lines.index("[d1] one") < lines.index("[d1] two")


def test_options_of_logs_reach_the_control_plane() -> None:
    client = StubClient()
    log_text("d1", client, previous=True, tail_lines=3, container="engine")
    assert client.log_options == [{"container": "engine", "previous": True, "tail_lines": 3, "follow": False}]


def test_following_an_ended_run_is_bad_usage() -> None:
    with pytest.raises(CliError, match="exclude each other"):
        log_text("d1", follow=True, previous=True)


def test_an_unknown_log_target_is_an_error_with_what_there_is() -> None:
    with pytest.raises(CliError, match="no pod or pool x in namespace default; there is: decode, prefill, d1, d2, p1"):
        log_text("x")


def test_the_kept_log_of_a_pod_that_is_gone_is_shown() -> None:
    client = StubClient({"d0": "last words\n"})
    assert log_text("d0", client) == "last words\n"
    assert log_text("pod/d0", client) == "last words\n"


def test_pods_may_be_named_as_kubectl_names_them() -> None:
    assert log_text("pod/d1") == "one\ntwo\n"
    assert json.loads(get_text("pod/d2", output=JSON))["metadata"]["name"] == "d2"
    with pytest.raises(CliError, match="write pod/NAME or pod NAME") as caught:
        get_text("pod/d1", "d2")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("end", [NotRunning("it has ended"), ApiError("it does not answer", status=504)])
def test_following_a_pool_ends_when_the_control_plane_does(end: Exception) -> None:
    client = StubClient({"d1": end, "d2": "three\n"})
    assert sorted(log_text("decode", client, follow=True).splitlines()) == [f"[d1] ({end})", "[d2] three"]


def test_a_fault_in_a_reader_of_a_log_ends_the_command_instead_of_hanging_it() -> None:
    client = StubClient({"d1": ZeroDivisionError("oops"), "d2": "three\n"})
    with pytest.raises(ZeroDivisionError, match="oops"):
        log_text("decode", client, follow=True)
