"""A service with many pods: rollouts under traffic, lack of room, pods that fail. Its engines are fake ones.

Scheduler, kubelets, router and everything around the engine are real.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.fakes.engine.image import IMAGE
from tests.kube.site import GPU_TAINT_KEY, SYSTEM_NAMESPACE, Object, Service, Site, eventually, on_node_pool, tolerant

pytestmark = pytest.mark.kube

NAMESPACE = "operations"
PROMPT = "A prompt that is long enough to be read somewhere else. " * 12


def engine(fake: Object) -> Object:
    """`spec.engine` of fake engines that behave so."""
    return {"image": IMAGE, "args": ["--fake", json.dumps(fake, sort_keys=True)]}


def pool(name: str, replicas: int) -> Object:
    limits = {GPU_TAINT_KEY: "1", "memory": "256Mi"}
    containers = [{"name": "engine", "imagePullPolicy": "Never", "resources": {"limits": limits}}]
    return {"replicas": replicas, "drainTimeoutSeconds": 10, "template": on_node_pool(name, containers=containers)}


def busy_spec(**fake: Any) -> Object:
    return {
        "model": {"uri": "file:///models/target"},
        "engine": engine(fake),
        "prefill": pool("prefill", 1),
        "decode": pool("decode", 2),
        "gateway": {"template": tolerant()},
        "rollout": {"maxSurge": 1, "maxUnavailable": 0},
    }


@pytest.fixture(scope="module")
def namespace(site: Site) -> Iterator[str]:
    site.kubectl("create", "namespace", NAMESPACE)
    yield NAMESPACE
    site.kubectl("delete", "namespace", NAMESPACE, "--wait", "--timeout=180s")


@pytest.fixture
def busy(site: Site, namespace: str) -> Iterator[Service]:
    service = Service(site, namespace, "busy")
    service.apply(busy_spec())
    service.wait_ready(timeout_seconds=180)
    yield service
    service.kubectl("delete", "spsvc", "busy", "--cascade=foreground", "--wait", "--timeout=120s")


class Traffic:
    """Clients that ask one question after the other. `answers`: what they got; `failures`: what else happened."""

    def __init__(self, service: Service, clients: int) -> None:
        self.answers: list[str] = []
        self.failures: list[str] = []
        self._body = {"model": service.name, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        self._url = f"{service.url()}/v1/completions"
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()

    def _ask(self) -> None:
        with httpx.Client(timeout=60, trust_env=False) as client:
            while not self._stop.is_set():
                try:
                    answer = client.post(self._url, json=self._body)
                    answer.raise_for_status()
                    self.answers.append(answer.json()["choices"][0]["text"])
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))


def test_a_rollout_under_traffic_loses_no_request_though_the_operator_is_killed_in_the_middle(
    busy: Service, site: Site
) -> None:
    old = {pod["metadata"]["uid"] for name in ("prefill", "decode") for pod in busy.pods(name)}
    traffic = Traffic(busy, clients=3)
    with traffic.running():
        eventually(lambda: len(traffic.answers) > 20, timeout_seconds=60, what="traffic", show=busy.explain)
        busy.apply(busy_spec(time_per_output_token_ms=6))
        eventually(
            lambda: busy.condition("Progressing").get("reason") == "RolloutInProgress",
            timeout_seconds=60,
            what="the rollout has begun",
            show=busy.explain,
        )
        selector = "app.kubernetes.io/name=specserve-operator"
        site.kubectl("-n", SYSTEM_NAMESPACE, "delete", "pod", "-l", selector, "--force", "--grace-period=0")
        busy.wait_ready(timeout_seconds=240)
        seen = len(traffic.answers)
        eventually(lambda: len(traffic.answers) > seen + 20, timeout_seconds=60, what="traffic afterwards")

    now = {pod["metadata"]["uid"] for name in ("prefill", "decode") for pod in busy.pods(name)}
    assert not now & old
    assert traffic.failures == []
    assert len(set(traffic.answers)) == 1


def test_pods_that_find_no_room_are_told_of_in_the_schedulers_words_and_the_others_serve(busy: Service) -> None:
    busy.patch({"decode": {"replicas": 9}})

    found = eventually(
        lambda: busy.condition("DecodeReady").get("reason") == "InsufficientCapacity" and busy.condition("DecodeReady"),
        timeout_seconds=60,
        what="DecodeReady says InsufficientCapacity",
        show=busy.explain,
    )
    assert "Insufficient nvidia.com/gpu" in found["message"]
    assert busy.complete(PROMPT)

    busy.patch({"decode": {"replicas": 2}})
    busy.wait_ready(timeout_seconds=120)


def test_a_new_revision_that_cannot_start_is_named_with_its_last_words_and_the_old_one_serves_on(busy: Service) -> None:
    answer = busy.complete(PROMPT)
    busy.apply(busy_spec(startup_error="ModelLoadFailed: config.json has no architecture"))

    # Decode pods wait for their prefill pods, which are the first to fail.
    found = eventually(
        lambda: busy.condition("PrefillReady").get("reason") == "ModelLoadFailed" and busy.condition("PrefillReady"),
        timeout_seconds=120,
        what="PrefillReady says ModelLoadFailed",
        show=busy.explain,
    )
    assert "config.json has no architecture" in found["message"]
    assert busy.condition("Ready")["status"] == "False"
    assert busy.complete(PROMPT) == answer

    busy.apply(busy_spec())
    busy.wait_ready(timeout_seconds=180)


def test_a_pod_that_takes_more_memory_than_it_may_is_called_so(busy: Service) -> None:
    busy.apply(busy_spec(ballast_mib=600))

    eventually(
        lambda: "OutOfMemory" in {pool.get("reason") for pool in busy.status()["pools"]},
        timeout_seconds=120,
        what="a pool says OutOfMemory",
        show=busy.explain,
    )
    assert busy.complete(PROMPT)

    busy.apply(busy_spec())
    busy.wait_ready(timeout_seconds=180)


def test_kubectl_scale_reaches_a_pool_that_is_scaled_from_outside(busy: Service) -> None:
    spec = busy_spec()
    spec["decode"] |= {"scaling": {"mode": "External", "minReplicas": 1, "maxReplicas": 3}}
    del spec["decode"]["replicas"]
    busy.kubectl("delete", "spsvc", "busy", "--cascade=foreground", "--wait", "--timeout=120s")
    busy.apply(spec)
    busy.wait_ready(timeout_seconds=180)
    assert len(busy.pods("decode")) == 1

    busy.kubectl("scale", "poolscaler/busy-decode", "--replicas=3")

    eventually(lambda: busy.status()["columns"]["decode"] == "3/3", timeout_seconds=120, what="3/3", show=busy.explain)
    busy.apply(spec)
    busy.wait_ready(timeout_seconds=60)
    assert len(busy.pods("decode")) == 3
