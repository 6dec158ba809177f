"""Pods of the local cluster live as pods do on Kubernetes: small programs stand in for engines."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specserve_operator.cluster.local import LocalCluster, StateDir, StateDirInUse, procfs
from specserve_operator.core.objects import Event, EventType, ObjectRef, ServiceKey
from tests.component.local_cluster_support import (
    OPTIONS,
    POD_IP,
    config_map,
    deployment,
    eventually,
    first_status,
    http_server,
    log_of,
    pods,
    python,
    ready_pods,
    reasons,
    shell,
)

SLEEP = "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.05; done"
STUBBORN = "trap '' TERM; echo up; while :; do sleep 0.05; done"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(tmp_path / "state", OPTIONS) as running:
        yield running


async def test_deployment_runs_its_pods_and_reports_them_ready(cluster: LocalCluster) -> None:
    await cluster.apply(deployment("a", shell(SLEEP), replicas=2))
    running = await ready_pods(cluster, "a", 2)
    addresses = {pod["status"]["podIP"] for pod in running}
    assert len(addresses) == 2
    assert all(address.startswith("127.77.") for address in addresses)
    status = await eventually(
        lambda: (d := cluster.list_objects("Deployment")[0]["status"]).get("readyReplicas") == 2 and d
    )
    assert (status["replicas"], status["availableReplicas"], status["observedGeneration"]) == (2, 2, 1)
    await cluster.apply(deployment("a", shell(SLEEP), replicas=1))
    await eventually(lambda: len(pods(cluster, "a")) == 1)
    assert {"SuccessfulCreate", "SuccessfulDelete", "Started", "Killing"} <= reasons(cluster)


async def test_container_gets_the_downward_api_and_the_path_of_its_environment(cluster: LocalCluster) -> None:
    names = {"POD_NAME": "metadata.name", "POD_UID": "metadata.uid", "POD_NAMESPACE": "metadata.namespace"}
    env = [{"name": k, "valueFrom": {"fieldRef": {"fieldPath": v}}} for k, v in names.items()]
    facts = "json.dumps([dict(os.environ), sys.argv[1:], sys.executable])"
    code = f"import json, os, sys, time; print({facts}, flush=True); time.sleep(99)"
    await cluster.apply(deployment("a", python(code, "$(POD_IP):8000", env=[POD_IP, *env])))
    (pod,) = await ready_pods(cluster, "a")
    text = await eventually(lambda: log_of(cluster, pod))
    environment, arguments, executable = json.loads(text)
    meta = pod["metadata"]
    assert arguments == [f"{pod['status']['podIP']}:8000"]
    assert environment["POD_NAME"] == environment["HOSTNAME"] == meta["name"]
    assert environment["POD_UID"] == environment["SPECSERVE_POD_UID"] == meta["uid"]
    assert environment["POD_NAMESPACE"] == "default"
    assert Path(environment["SPECSERVE_HOSTS_DIR"]) == cluster.state.hosts / "default"
    assert Path(environment["SPECSERVE_RUN_DIR"]) == cluster.state.pod("default", meta["name"]) / "run"
    assert "KUBECONFIG" not in environment
    assert Path(executable).parent == Path(sys.executable).parent


async def test_crash_restarts_with_backoff_and_shows_the_end_of_the_log(cluster: LocalCluster) -> None:
    crash = shell("echo out of luck >&2; exit 3", terminationMessagePolicy="FallbackToLogsOnError")
    await cluster.apply(deployment("a", crash))
    status = await eventually(
        lambda: (
            (s := first_status(cluster, "a")).get("restartCount", 0) >= 2
            and "CrashLoopBackOff" in json.dumps(s["state"])
            and s
        )
    )
    assert status["state"]["waiting"]["message"].startswith("back-off 0.")
    ended = status["lastState"]["terminated"]
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (3, "Error", "out of luck")
    assert status["ready"] is False
    (pod,) = pods(cluster, "a")
    assert pod["status"]["phase"] == "Running"
    assert log_of(cluster, pod, previous=True) == "out of luck\n"
    assert "BackOff" in reasons(cluster)


async def test_killed_container_is_an_error_with_its_signal_and_comes_back(cluster: LocalCluster) -> None:
    await cluster.apply(deployment("a", shell("echo $$$$; exec sleep 99")))
    (pod,) = await ready_pods(cluster, "a")
    pid = int(await eventually(lambda: log_of(cluster, pod).strip()))
    os.kill(pid, signal.SIGKILL)
    status = await eventually(
        lambda: (s := first_status(cluster, "a"))["restartCount"] == 1 and "running" in s["state"] and s
    )
    ended = status["lastState"]["terminated"]
    assert (ended["exitCode"], ended["signal"], ended["reason"]) == (137, 9, "Error")
    assert "message" not in ended


async def test_missing_program_and_missing_config_are_named_as_reasons(cluster: LocalCluster) -> None:
    await cluster.apply(deployment("a", shell("x") | {"command": ["no-such-program"]}))
    waiting = await eventually(
        lambda: "message" in (w := first_status(cluster, "a").get("state", {}).get("waiting", {})) and w
    )
    assert waiting["reason"] == "RunContainerError"
    assert waiting["message"].startswith("no-such-program: no such executable in PATH")
    volumes = [{"name": "c", "configMap": {"name": "late"}}]
    reader = shell("cat /c/k; exec sleep 99", volumeMounts=[{"name": "c", "mountPath": "/c"}])
    await cluster.apply(deployment("b", reader, volumes=volumes))
    await eventually(lambda: "FailedMount" in reasons(cluster))
    assert pods(cluster, "b")[0]["status"]["phase"] == "Pending"
    await cluster.apply(config_map("late", k="v"))
    await ready_pods(cluster, "b")


async def test_a_pod_without_a_readable_volume_does_not_keep_others_from_new_settings(cluster: LocalCluster) -> None:
    await cluster.apply(deployment("a", shell(SLEEP), volumes=[{"name": "s", "configMap": "settings"}]))
    await eventually(lambda: "FailedMount" in reasons(cluster))
    await cluster.apply(config_map("settings", k="1"))
    follow = shell("while :; do cat $0; sleep 0.05; done", volumeMounts=[{"name": "s", "mountPath": "/s"}])
    follow["command"].append("/s/k")
    await cluster.apply(deployment("b", follow, volumes=[{"name": "s", "configMap": {"name": "settings"}}]))
    (pod,) = await ready_pods(cluster, "b")
    await cluster.apply(config_map("settings", k="2"))
    await eventually(lambda: log_of(cluster, pod).endswith("2"))


async def test_mounted_config_changes_under_a_running_pod(cluster: LocalCluster) -> None:
    await cluster.apply(config_map("settings", **{"state.json": "1"}))
    follow = "while :; do cat $1; echo; sleep 0.05; done"
    reader = shell(follow, volumeMounts=[{"name": "s", "mountPath": "/etc/settings"}])
    reader["command"] += ["-", "/etc/settings/state.json"]
    await cluster.apply(deployment("a", reader, volumes=[{"name": "s", "configMap": {"name": "settings"}}]))
    (pod,) = await ready_pods(cluster, "a")
    await eventually(lambda: log_of(cluster, pod))
    await cluster.apply(config_map("settings", **{"state.json": "2"}))
    await eventually(lambda: log_of(cluster, pod).endswith("2\n"))
    assert set(log_of(cluster, pod).split()) == {"1", "2"}
    assert first_status(cluster, "a")["restartCount"] == 0


async def test_readiness_follows_its_probe(cluster: LocalCluster, tmp_path: Path) -> None:
    probe = {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 0.05, "failureThreshold": 1}
    await cluster.apply(deployment("a", http_server("x", readinessProbe=probe)))
    await eventually(lambda: first_status(cluster, "a").get("started"))
    (pod,) = pods(cluster, "a")
    assert first_status(cluster, "a")["ready"] is False
    switch = cluster.state.pod("default", pod["metadata"]["name"]) / "work" / "ready"
    switch.touch()
    await ready_pods(cluster, "a")
    switch.unlink()
    await eventually(lambda: first_status(cluster, "a")["ready"] is False)
    assert first_status(cluster, "a")["restartCount"] == 0
    assert "Unhealthy" in reasons(cluster)


async def test_liveness_restarts_and_startup_probe_holds_it_off(cluster: LocalCluster) -> None:
    fail = {"exec": {"command": ["sh", "-c", "test -e up"]}, "periodSeconds": 0.05, "failureThreshold": 1}
    startup = {**fail, "failureThreshold": 100}
    script = "trap 'echo bye; exit 0' TERM; sleep 0.5; touch up; while :; do sleep 0.05; done"
    await cluster.apply(deployment("a", shell(script, startupProbe=startup, livenessProbe=fail)))
    (pod,) = await ready_pods(cluster, "a")
    assert first_status(cluster, "a")["restartCount"] == 0
    (cluster.state.pod("default", pod["metadata"]["name"]) / "work" / "up").unlink()
    await eventually(lambda: first_status(cluster, "a")["restartCount"] == 1)
    assert log_of(cluster, pod, previous=True) == "bye\n"


@pytest.mark.parametrize("action", ["tcpSocket", "grpc"])
async def test_socket_and_grpc_probes_reach_the_pod(cluster: LocalCluster, action: str) -> None:
    probe = {action: {"port": 8000}, "periodSeconds": 0.05, "timeoutSeconds": 0.5}
    await cluster.apply(deployment("a", http_server("x", readinessProbe=probe)))
    if action == "tcpSocket":
        await ready_pods(cluster, "a")
    else:  # an HTTP/1 server is no gRPC server
        await eventually(lambda: first_status(cluster, "a").get("started"))
        await asyncio.sleep(0.3)
        assert first_status(cluster, "a")["ready"] is False


async def test_pod_ends_with_hook_then_signal_then_force(cluster: LocalCluster) -> None:
    drain = {"preStop": {"httpGet": {"path": "/drain", "port": "http"}}}
    await cluster.apply(deployment("polite", http_server("x", lifecycle=drain)))
    await cluster.apply(deployment("stubborn", shell(STUBBORN), terminationGracePeriodSeconds=0.3))
    (polite,) = await ready_pods(cluster, "polite")
    (stubborn,) = await ready_pods(cluster, "stubborn")
    for pod in (polite, stubborn):
        await eventually(lambda p=pod: log_of(cluster, p))
    for name in ("polite", "stubborn"):
        await cluster.delete(ObjectRef("apps/v1", "Deployment", "default", name))
    await eventually(lambda: not cluster.list_objects("Pod"))
    assert log_of(cluster, polite) == "serving\ndrained\nterminated\n"
    assert log_of(cluster, stubborn) == "up\n"


async def test_a_hook_that_is_a_command_runs_as_in_the_container_and_is_waited_for(cluster: LocalCluster) -> None:
    command = ["sh", "-c", "echo $SPECSERVE_RUN_DIR $MINE $(pwd) > hooked; sleep 0.3; echo slept >> hooked"]
    hook = {"preStop": {"exec": {"command": command}}}
    script = "trap 'cat hooked; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    await cluster.apply(deployment("a", shell(script, lifecycle=hook, env=[{"name": "MINE", "value": "1"}])))
    (pod,) = await ready_pods(cluster, "a")
    await eventually(lambda: log_of(cluster, pod))
    await cluster.delete(ObjectRef("apps/v1", "Deployment", "default", "a"))
    await eventually(lambda: not cluster.list_objects("Pod"))
    folder = cluster.state.pod("default", pod["metadata"]["name"])
    assert log_of(cluster, pod) == f"up\n{folder / 'run'} 1 {folder / 'work'}\nslept\n"


async def test_a_hook_without_end_is_killed_with_the_grace_period_and_one_that_fails_is_told(
    cluster: LocalCluster,
) -> None:
    endless = {"preStop": {"exec": {"command": ["sh", "-c", "echo $$$$ > pid; sleep 99; touch late"]}}}
    await cluster.apply(deployment("a", shell(STUBBORN, lifecycle=endless), terminationGracePeriodSeconds=1))
    failing = {"preStop": {"exec": {"command": ["sh", "-c", "echo no way; exit 3"]}}}
    await cluster.apply(deployment("b", shell("trap 'exit 0' TERM; sleep 99 & wait", lifecycle=failing)))
    (first,), _ = await ready_pods(cluster, "a"), await ready_pods(cluster, "b")
    work = cluster.state.pod("default", first["metadata"]["name"]) / "work"
    for name in ("a", "b"):
        await cluster.delete(ObjectRef("apps/v1", "Deployment", "default", name))
    await eventually(lambda: not cluster.list_objects("Pod"))
    stat = procfs.read_stat(int((work / "pid").read_text()))
    assert stat is None or not stat.is_alive
    assert not (work / "late").exists()
    messages = {e["message"] for e in cluster.list_objects("Event") if e["reason"] == "FailedPreStopHook"}
    assert messages == {
        "PreStop hook of container engine failed: no answer within 1 s",
        "PreStop hook of container engine failed: no way",
    }


async def test_children_of_a_container_end_with_it(cluster: LocalCluster) -> None:
    # `$$` in a command is one `$`, as on Kubernetes.
    own_session = "setsid sh -c 'trap \"\" TERM; echo $$$$; sleep 99' &"
    script = f"(trap '' TERM; while :; do sleep 0.05; done) & echo $!; {own_session} sleep 0.3; echo done"
    await cluster.apply(deployment("a", shell(script)))
    await eventually(lambda: first_status(cluster, "a").get("restartCount", 0) >= 1)
    (pod,) = pods(cluster, "a")
    pids = [int(word) for word in log_of(cluster, pod, previous=True).split() if word.isdigit()]
    assert len(pids) == 2
    assert not any((stat := procfs.read_stat(pid)) and stat.is_alive for pid in pids)


async def test_init_containers_run_first_and_in_order(cluster: LocalCluster) -> None:
    def with_file(script: str, name: str) -> dict[str, Any]:
        spec = shell(script, name=name, volumeMounts=[{"name": "s", "mountPath": "/s"}])
        spec["command"].append("/s/f")  # $0 of the script
        return spec

    init = [with_file(f"echo {name} >> $0", name) for name in ("one", "two")]
    main = with_file("cat $0; exec sleep 99", "engine")
    await cluster.apply(deployment("a", main, initContainers=init, volumes=[{"name": "s", "emptyDir": {}}]))
    (pod,) = await ready_pods(cluster, "a")
    await eventually(lambda: cluster.read_log("default", pod["metadata"]["name"], container="engine") == "one\ntwo\n")
    ended = [s["state"]["terminated"]["reason"] for s in pod["status"]["initContainerStatuses"]]
    assert ended == ["Completed", "Completed"]


async def test_followed_log_goes_on_over_a_restart(cluster: LocalCluster) -> None:
    await cluster.apply(deployment("a", shell("echo run $$$$; sleep 0.3; exit 1")))
    (pod,) = await eventually(lambda: [p for p in pods(cluster, "a") if first_status(cluster, "a").get("restartCount")])
    lines: set[str] = set()
    async with asyncio.timeout(10):
        async for line in cluster.follow_log("default", pod["metadata"]["name"]):
            lines.add(line)
            if len(lines) == 2:
                break
    assert all(line.startswith("run ") for line in lines)


def speculative_service(replicas: int = 1) -> dict[str, object]:
    return {
        "apiVersion": "specserve.dev/v1alpha1",
        "kind": "SpeculativeService",
        "metadata": {"name": "tiny", "namespace": "default"},
        "spec": {"replicas": replicas},
    }


KEY = ServiceKey("default", "tiny")


async def test_service_is_watched_and_takes_what_it_owns_along(cluster: LocalCluster) -> None:
    watch = cluster.watch()
    await cluster.put_service(speculative_service())
    assert await anext(watch) == KEY
    stored = await cluster.get_service(KEY)
    assert stored is not None
    owned = deployment("tiny-decode-r1", shell(SLEEP))
    owned["metadata"] |= {
        "labels": {"specserve.dev/service": "tiny"},
        "ownerReferences": [
            {
                "apiVersion": stored["apiVersion"],
                "kind": "SpeculativeService",
                "name": "tiny",
                "uid": stored["metadata"]["uid"],
            }
        ],
    }
    owned["spec"]["template"]["metadata"]["labels"] |= {"specserve.dev/service": "tiny"}
    await cluster.apply(owned)
    await ready_pods(cluster, "tiny-decode-r1")
    assert await anext(watch) == KEY
    assert {obj["kind"] for obj in await cluster.list_owned(KEY)} == {"Deployment", "Pod"}
    await cluster.patch_status(KEY, {"observedGeneration": 1})
    await cluster.emit(KEY, Event(EventType.NORMAL, "RolloutComplete", "done"))
    assert (await cluster.get_service(KEY) or {})["status"] == {"observedGeneration": 1}
    assert await cluster.delete_service(KEY)
    assert await cluster.wait_gone(KEY, timeout_seconds=10)
    assert await cluster.list_owned(KEY) == []
    assert not await cluster.delete_service(KEY)
    assert "RolloutComplete" in reasons(cluster)
    await watch.aclose()  # type: ignore[attr-defined]


async def test_what_was_handed_out_may_be_changed(cluster: LocalCluster) -> None:
    await cluster.put_service(speculative_service())
    (await cluster.get_service(KEY) or {})["spec"]["replicas"] = 99
    assert (await cluster.get_service(KEY) or {})["spec"]["replicas"] == 1


@pytest.mark.parametrize("delay_seconds", [0, 0.5])
async def test_pods_are_killed_at_once_if_patience_ends_before_or_while_the_cluster_is_left(
    tmp_path: Path, delay_seconds: float
) -> None:
    loop = asyncio.get_running_loop()
    async with LocalCluster(tmp_path / "state", replace(OPTIONS, shutdown_seconds=60.0)) as cluster:
        await cluster.apply(deployment("a", shell(STUBBORN), terminationGracePeriodSeconds=60))
        await ready_pods(cluster, "a")
        began = loop.time()
        if delay_seconds:
            loop.call_later(delay_seconds, cluster.kill_pods)
        else:
            cluster.kill_pods()
    assert loop.time() - began < 10
    assert StateDir(tmp_path / "state").list_objects("Pod") == []


async def test_malformed_volume_and_environment_are_reasons_to_wait_not_new_pods(cluster: LocalCluster) -> None:
    def waiting(app: str) -> Any:
        state = first_status(cluster, app).get("state", {}).get("waiting", {})
        return state if "message" in state else None

    await cluster.apply(deployment("a", shell("sleep 99"), volumes=[{"name": "v", "configMap": {}}]))
    await cluster.apply(deployment("b", shell("sleep 99", env=[{"name": "X", "valueFrom": {"configMapKeyRef": {}}}])))
    mount = await eventually(lambda: waiting("a"))
    assert (mount["reason"], mount["message"]) == (
        "FailedMount",
        "MountVolume.SetUp failed: volume v: name is missing",
    )
    env = await eventually(lambda: waiting("b"))
    assert (env["reason"], env["message"]) == (
        "CreateContainerConfigError",
        "env of container engine: name is missing",
    )
    names = [pod["metadata"]["name"] for pod in cluster.list_objects("Pod")]
    await eventually(
        lambda: any(e["reason"] == "FailedMount" and e["count"] >= 2 for e in cluster.list_objects("Event"))
    )
    assert [pod["metadata"]["name"] for pod in cluster.list_objects("Pod")] == names


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": None}, "containers[1]: the name is missing"),
        ({"name": "engine"}, "containers[1]: the name engine stands twice"),
        ({"command": 5}, "command of container side is malformed"),
        ({"args": [5]}, "command of container side is malformed"),
        ({"workingDir": 5}, "workingDir of container side is malformed"),
        ({"ports": [{"containerPort": 99_999}]}, "ports of container side is malformed"),
        ({"readinessProbe": 5}, "readinessProbe of container side is malformed"),
        ({"livenessProbe": {"periodSeconds": "x"}}, "livenessProbe of container side is malformed"),
        ({"lifecycle": {"preStop": 5}}, "lifecycle of container side is malformed"),
    ],
)
async def test_malformed_container_is_a_reason_to_wait_not_a_new_pod(
    cluster: LocalCluster, fields: dict[str, Any], message: str
) -> None:
    def waiting() -> Any:
        found = [
            state["waiting"]
            for pod in cluster.list_objects("Pod")
            for status in pod.get("status", {}).get("containerStatuses", ())
            if "message" in (state := status["state"]).get("waiting", {})
        ]
        return found[-1] if found else None

    side = {key: value for key, value in {**shell("sleep 99", name="side"), **fields}.items() if value is not None}
    await cluster.apply(deployment("a", shell("sleep 99"), side))
    shown = await eventually(waiting)
    assert (shown["reason"], shown["message"][: len(message)]) == ("CreateContainerConfigError", message)
    (pod,) = cluster.list_objects("Pod")
    await cluster.delete(ObjectRef("apps/v1", "Deployment", "default", "a"))
    await eventually(lambda: not cluster.list_objects("Pod"))
    assert pod["status"]["phase"] == "Pending"


async def test_followed_log_ends_with_its_pod_though_the_log_is_kept(cluster: LocalCluster) -> None:
    await cluster.apply(deployment("a", shell(SLEEP)))
    (pod,) = await ready_pods(cluster, "a")
    await eventually(lambda: log_of(cluster, pod))
    lines = cluster.follow_log("default", pod["metadata"]["name"])
    async with asyncio.timeout(10):
        assert await anext(lines) == "up\n"
        await cluster.apply(deployment("a", shell(SLEEP), replicas=0))
        assert [line async for line in lines] == ["bye\n"]
    assert log_of(cluster, pod) == "up\nbye\n"


async def test_leaving_ends_all_pods_within_the_limit_and_keeps_objects_to_read(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    state = StateDir(tmp_path / "state")
    async with LocalCluster(tmp_path / "state", OPTIONS) as cluster:
        await cluster.apply(deployment("polite", shell(SLEEP), replicas=2, terminationGracePeriodSeconds=60))
        await cluster.apply(deployment("stubborn", shell(STUBBORN), terminationGracePeriodSeconds=1))
        await ready_pods(cluster, "polite", 2)
        await ready_pods(cluster, "stubborn")
        with pytest.raises(StateDirInUse):
            await LocalCluster(tmp_path / "state", OPTIONS).__aenter__()
        assert state.control_plane_pid() == os.getpid()
        names = [p["metadata"]["name"] for p in pods(cluster, "polite")]
        await eventually(lambda: all(state.read_log("default", name) for name in names))
        began = loop.time()
    assert loop.time() - began < 4
    assert state.control_plane_pid() is None
    assert state.list_objects("Pod") == []
    assert len(state.list_objects("Deployment")) == 2
    assert all(state.read_log("default", name) == "up\nbye\n" for name in names)


@pytest.mark.parametrize("resume", [False, True])
async def test_next_run_starts_empty_unless_it_resumes(tmp_path: Path, resume: bool) -> None:
    async with LocalCluster(tmp_path / "state", OPTIONS) as first:
        await first.put_service(speculative_service())
        await first.apply(deployment("a", shell(SLEEP)))
        (before,) = await ready_pods(first, "a")
    async with LocalCluster(tmp_path / "state", replace(OPTIONS, resume=resume)) as second:
        assert await second.list_services() == ([KEY] if resume else [])
        if resume:
            (after,) = await ready_pods(second, "a")
            assert after["metadata"]["uid"] != before["metadata"]["uid"]
