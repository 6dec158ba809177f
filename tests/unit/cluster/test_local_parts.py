"""Small parts of the local cluster: back-off, thresholds, addresses, selectors, access, events, names."""

import json
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import ClientConnectionResetError, web
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from specserve_operator.cluster.local import ports
from specserve_operator.cluster.local.addresses import NoFreeAddressError, PodAddresses
from specserve_operator.cluster.local.container import RestartBackoff
from specserve_operator.cluster.local.events import EventRecorder
from specserve_operator.cluster.local.network import endpoints_of, host_names
from specserve_operator.cluster.local.podaccess import PodAccess, ServiceAccount
from specserve_operator.cluster.local.podapi import ApiError, PodApi, parse_selector
from specserve_operator.cluster.local.probes import ProbeTiming, Thresholds
from specserve_operator.cluster.local.shim import Shim
from specserve_operator.cluster.local.store import ObjectKey, ObjectStore


def test_first_restart_is_immediate_then_waits_double_up_to_the_limit() -> None:
    backoff = RestartBackoff(base_seconds=1, max_seconds=5, reset_seconds=600)
    assert [backoff.after_run(1) for _ in range(6)] == [0, 1, 2, 4, 5, 5]


def test_long_run_forgets_the_backoff() -> None:
    backoff = RestartBackoff(base_seconds=1, max_seconds=5, reset_seconds=600)
    for _ in range(4):
        backoff.after_run(599)
    assert backoff.after_run(600) == 0
    assert backoff.after_run(1) == 1


def test_probe_defaults_are_those_of_kubernetes() -> None:
    assert ProbeTiming.of({}) == ProbeTiming(0, 10, 1, 1, 3)
    assert ProbeTiming.of({"failureThreshold": 9, "periodSeconds": 2}) == ProbeTiming(0, 2, 1, 1, 9)


def test_verdict_needs_consecutive_results() -> None:
    thresholds = Thresholds(ProbeTiming(success_threshold=2, failure_threshold=3))
    results = [True, True, False, False, True, False, False, False, False, True, True]
    verdicts = [thresholds.observe(ok) for ok in results]
    assert verdicts == [None, True, None, None, None, None, None, False, False, None, True]


@given(st.lists(st.booleans(), min_size=1), st.integers(1, 4), st.integers(1, 4))
def test_verdict_never_contradicts_the_last_results(results: list[bool], success: int, failure: int) -> None:
    thresholds = Thresholds(ProbeTiming(success_threshold=success, failure_threshold=failure))
    for count, ok in enumerate(results, start=1):
        verdict = thresholds.observe(ok)
        needed = success if ok else failure
        assert (verdict is ok) == (count >= needed and set(results[count - needed : count]) == {ok})


def test_addresses_are_unique_kept_and_reused_last() -> None:
    pool = PodAddresses("127.77.3.1")
    first, second = pool.acquire("a"), pool.acquire("b")
    assert (first, second) == ("127.77.3.2", "127.77.3.3")
    assert pool.acquire("a") == first
    pool.release("a")
    assert pool.acquire("c") == "127.77.3.4"
    pool.release("never")


def test_full_block_of_addresses_is_an_error_until_one_is_free() -> None:
    pool = PodAddresses("127.77.0.1")
    assert len({pool.acquire(str(i)) for i in range(253)}) == 253
    with pytest.raises(NoFreeAddressError, match="at most 253 pods"):
        pool.acquire("one more")
    pool.release("7")
    assert pool.acquire("one more") == "127.77.0.9"


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("", True),
        ("a=1", True),
        ("a=1,b==2", True),
        ("a=2", False),
        ("a!=2", True),
        ("c!=2", True),
        ("a", True),
        ("c", False),
        ("!c", True),
        ("a=1,!b", False),
        ("specserve.dev/pool=decode", True),
    ],
)
def test_label_selectors(selector: str, expected: bool) -> None:
    assert parse_selector(selector)({"a": "1", "b": "2", "specserve.dev/pool": "decode"}) is expected


def test_set_selectors_are_refused_not_misread() -> None:
    with pytest.raises(ApiError, match="set terms") as caught:
        parse_selector("a in (1,2)")
    assert caught.value.code == 400


def role(**rule: list[str]) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "read-pods"},
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"], **rule}],
    }


BINDING: dict[str, Any] = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "RoleBinding",
    "metadata": {"name": "read-pods"},
    "subjects": [{"kind": "ServiceAccount", "name": "gateway", "namespace": "default"}],
    "roleRef": {"kind": "Role", "name": "read-pods"},
}
GATEWAY = ServiceAccount("default", "gateway")


def test_only_what_a_bound_role_allows_is_allowed() -> None:
    store = ObjectStore()
    access = PodAccess(store, "http://x")
    assert not access.may(GATEWAY, "list", "pods", "default")
    store.apply(BINDING)
    store.apply(role())
    assert access.may(GATEWAY, "list", "pods", "default")
    assert not access.may(GATEWAY, "watch", "pods", "default")
    assert not access.may(GATEWAY, "list", "secrets", "default")
    assert not access.may(GATEWAY, "list", "pods", "other")
    assert not access.may(ServiceAccount("other", "gateway"), "list", "pods", "default")
    store.apply(role(apiGroups=["apps"]))
    assert not access.may(GATEWAY, "list", "pods", "default")


def test_kubeconfig_holds_a_token_that_names_its_account() -> None:
    access = PodAccess(ObjectStore(), "http://127.77.0.1:6443")
    config = json.loads(access.kubeconfig("default", "gateway"))
    assert config["clusters"][0]["cluster"]["server"] == "http://127.77.0.1:6443"
    assert access.account_of(config["users"][0]["user"]["token"]) == GATEWAY
    assert access.account_of("guess") is None
    assert access.kubeconfig("default", "gateway") == json.dumps(config, indent=1)


def config_map(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": "default", "uid": name}}


def test_same_event_is_counted_and_another_is_its_own() -> None:
    store = ObjectStore()
    recorder = EventRecorder(store)
    for _ in range(3):
        recorder.warning(config_map("a"), "BackOff", "back-off 1s")
    recorder.warning(config_map("a"), "BackOff", "back-off 2s")
    recorder.warning(config_map("b"), "BackOff", "back-off 1s")
    counts = {(e["involvedObject"]["name"], e["message"]): e["count"] for e in store.list("Event")}
    assert counts == {("a", "back-off 1s"): 3, ("a", "back-off 2s"): 1, ("b", "back-off 1s"): 1}


def test_oldest_events_are_dropped() -> None:
    store = ObjectStore()
    recorder = EventRecorder(store, kept=3)
    for number in range(3):
        recorder.normal(config_map("a"), "Step", str(number))
    recorder.normal(config_map("a"), "Step", "0")  # said again: no longer the oldest
    recorder.normal(config_map("a"), "Step", "3")
    assert {e["message"] for e in store.list("Event")} == {"0", "2", "3"}


def service(**spec: Any) -> dict[str, Any]:
    meta = {"name": "coder-prefill-r1", "namespace": "llm"}
    return {"metadata": meta, "spec": {"clusterIP": "None", "selector": {"a": "b"}, **spec}}


def pod(name: str, *, ready: bool = True, ip: str = "127.77.0.2", ending: bool = False) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    meta = {"name": name, "deletionTimestamp": "x"} if ending else {"name": name}
    return {"metadata": meta, "status": {"podIP": ip, "conditions": conditions}}


def test_endpoints_are_ready_pods_with_an_address_that_do_not_end() -> None:
    pods = [pod("good"), pod("unready", ready=False), pod("ending", ending=True), pod("no-address", ip="")]
    assert [p["metadata"]["name"] for p in endpoints_of(service(), pods)] == ["good"]
    everyone = endpoints_of(service(publishNotReadyAddresses=True), pods)
    assert [p["metadata"]["name"] for p in everyone] == ["good", "unready", "ending"]
    assert endpoints_of(service(selector={}), pods) == []


def test_short_name_is_known_in_its_own_namespace_only() -> None:
    full = ["coder-prefill-r1.llm", "coder-prefill-r1.llm.svc", "coder-prefill-r1.llm.svc.cluster.local"]
    assert list(host_names(service(), seen_from="llm")) == ["coder-prefill-r1", *full]
    assert list(host_names(service(), seen_from="other")) == full


def test_event_of_one_object_does_not_touch_the_object() -> None:
    store = ObjectStore()
    store.apply(config_map("a"))
    before = store.get(ObjectKey("ConfigMap", "default", "a"))
    assert before is not None
    EventRecorder(store).normal(before, "Step", "done")
    assert store.get(ObjectKey("ConfigMap", "default", "a")) is before


def test_address_that_is_not_usable_is_skipped_unless_none_is() -> None:
    pool = PodAddresses("127.77.3.1")
    assert pool.acquire("a", is_usable=lambda address: not address.endswith(".2")) == "127.77.3.3"
    assert pool.acquire("b", is_usable=lambda _: False) == "127.77.3.2"
    assert pool.acquire("c") == "127.77.3.4"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_reserved_port_is_refused_to_everybody_else_before_during_and_after_listening() -> None:
    port = free_port()
    with ports.reserve("127.0.0.1", port) as reserved:
        changes: list[Callable[[], None]] = [
            lambda: None,
            lambda: ports.start_listening(reserved, backlog=1),
            lambda: ports.stop_listening(reserved),
        ]
        for change in changes:
            change()
            with pytest.raises(OSError, match="in use"):
                ports.reserve("127.0.0.1", port)
            assert not ports.can_listen("127.0.0.1", port)
    assert ports.can_listen("127.0.0.1", port)


def test_reserved_port_refuses_connections_and_may_listen_again_after_some() -> None:
    address = "127.0.0.1", free_port()
    with ports.reserve(*address) as reserved:
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address).close()
            ports.start_listening(reserved, backlog=1)
            with socket.create_connection(address) as client:
                reserved.accept()[0].close()  # this side closes first, and so has the port in TIME_WAIT
                assert client.recv(1) == b""
            ports.stop_listening(reserved)
    ports.reserve(*address).close()


def test_supervisor_without_a_main_process_signals_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    signalled: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: signalled.append(pid))
    Shim({"orphan_grace_seconds": 5.0})._give_up()
    assert signalled == []


async def test_watch_whose_client_is_gone_before_it_begins_just_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(web.StreamResponse, "prepare", refuse)
    store = ObjectStore()
    request = make_mocked_request("GET", "/api/v1/namespaces/default/pods?watch=1")
    response = await PodApi(store, PodAccess(store, "http://x"))._watch(request, lambda _: True)
    assert not response.prepared
