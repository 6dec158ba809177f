"""The cluster under test: the one made here, or the one that KUBECONFIG names."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from hack.kube.commands import built

ROOT = Path(__file__).resolve().parents[2]
SYSTEM_NAMESPACE = "specserve-system"
RELEASE = "specserve"
GPU_TAINT_KEY = "nvidia.com/gpu"
NODE_POOL_LABEL = "specserve.dev/node-pool"
POOLS = ("prefill", "decode", "training")

Object = dict[str, Any]


class Site:
    """kubectl, helm and requests against one cluster."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig

    def run(self, command: str, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """The output of kubectl or helm; fails the test with what they say."""
        environment = os.environ | {"KUBECONFIG": str(self.kubeconfig)}
        done = subprocess.run(
            [str(built(command)), *arguments], input=stdin, env=environment, capture_output=True, text=True, check=False
        )
        if check and done.returncode:
            pytest.fail(f"{command} {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done.stdout if check else done.stdout + done.stderr

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        return self.run("kubectl", *arguments, stdin=stdin, check=check)

    def helm(self, *arguments: str) -> str:
        return self.run("helm", *arguments)

    def get(self, *arguments: str) -> Object:
        """An object, or a list of them, as JSON."""
        found: Object = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return found

    def items(self, *arguments: str) -> list[Object]:
        items: list[Object] = self.get(*arguments)["items"]
        return items

    def apply(self, manifest: Object) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))


class Service:
    """One SpeculativeService and what tests do with it."""

    def __init__(self, site: Site, namespace: str, name: str) -> None:
        self.site = site
        self.namespace = namespace
        self.name = name

    def kubectl(self, *arguments: str) -> str:
        return self.site.kubectl("-n", self.namespace, *arguments)

    def apply(self, spec: Object) -> None:
        meta = {"name": self.name, "namespace": self.namespace}
        self.site.apply(
            {"apiVersion": "specserve.dev/v1alpha1", "kind": "SpeculativeService", "metadata": meta, "spec": spec}
        )

    def patch(self, spec: Object) -> None:
        self.kubectl("patch", "spsvc", self.name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def status(self) -> Object:
        status: Object = self.site.get("-n", self.namespace, "spsvc", self.name).get("status") or {}
        return status

    def condition(self, type_: str) -> Object:
        """The condition; empty if there is none."""
        conditions = self.status().get("conditions") or ()
        return next((c for c in conditions if c["type"] == type_), {})

    def is_ready(self) -> bool:
        found = self.site.get("-n", self.namespace, "spsvc", self.name)
        status = found.get("status") or {}
        ready = next((c for c in status.get("conditions") or () if c["type"] == "Ready"), {})
        is_current = status.get("observedGeneration") == found["metadata"]["generation"]
        return bool(is_current and ready.get("status") == "True")

    def pods(self, pool: str) -> list[Object]:
        """Pods of a pool that are not being deleted."""
        selector = f"specserve.dev/service={self.name},specserve.dev/pool={pool}"
        pods = self.site.items("-n", self.namespace, "pods", "-l", selector)
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def wait_ready(self, *, timeout_seconds: float = 600) -> None:
        eventually(self.is_ready, timeout_seconds=timeout_seconds, what=f"{self.name} is ready", show=self.explain)

    def explain(self) -> str:
        """What a person would look at."""
        described = self.site.kubectl("-n", self.namespace, "describe", "spsvc", self.name, check=False)
        pods = self.site.kubectl("-n", self.namespace, "get", "pods", "-o", "wide", check=False)
        logs = self.site.kubectl(
            *("-n", self.namespace, "logs", "-l", f"specserve.dev/service={self.name}"),
            *("--tail=15", "--prefix", "--all-containers"),
            check=False,
        )
        return f"{described}\n{pods}\n{logs}"

    def url(self) -> str:
        """The gateway Service by its address, which this machine can reach."""
        spec = self.site.get("-n", self.namespace, "service", f"{self.name}-gateway")["spec"]
        return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"

    def complete(self, prompt: str, *, max_tokens: int = 16, timeout_seconds: float = 120) -> str:
        """A greedy completion through the gateway."""
        body = {"model": self.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        answer = httpx.post(f"{self.url()}/v1/completions", json=body, timeout=timeout_seconds, trust_env=False)
        assert answer.status_code == 200, f"{answer.status_code}: {answer.text}"
        text: str = answer.json()["choices"][0]["text"]
        return text


def eventually(
    check: Callable[[], Any], *, timeout_seconds: float, what: str, show: Callable[[], str] = lambda: ""
) -> Any:
    """The first true value of `check()`; fails the test with `what` and `show()` when the time is up."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_seconds:.0f} s: {what}\n{show()}")
        time.sleep(0.5)


def on_node_pool(pool: str, *, containers: Sequence[Object] = (), volumes: Sequence[Object] = ()) -> Object:
    """A pod template that goes to the nodes of one pool and takes one of their GPUs."""
    spec: Object = {
        "nodeSelector": {NODE_POOL_LABEL: pool},
        "tolerations": [{"key": GPU_TAINT_KEY, "operator": "Exists", "effect": "NoSchedule"}],
        "containers": list(containers) or [{"name": "engine", "resources": {"limits": {GPU_TAINT_KEY: "1"}}}],
    }
    if volumes:
        spec["volumes"] = list(volumes)
    return {"spec": spec}


def tolerant() -> Object:
    """A pod template that goes to any node."""
    return {"spec": {"tolerations": [{"key": GPU_TAINT_KEY, "operator": "Exists", "effect": "NoSchedule"}]}}
