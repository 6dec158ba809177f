"""Nodes without machines: pods get a node and a status, and nothing runs.

What becomes of a pod is a `Behaviour`, chosen by the test for a namespace, a pool or an image; pods without one are
ready at once. Scheduler and kubelet in one: it binds, writes status, and ends the deletion of pods.

Node objects and their leases are there because Kubernetes' own controllers ask for them: pods on unknown nodes are
deleted, and pods of a node that gives no sign of life for 40 s are marked unready.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Self

import aiohttp

from tests.cluster.api import APPLY_PATCH, MERGE_PATCH, Api, BackgroundLoop, Object, RefusedError, path_of
from tests.cluster.mirror import Change, Mirror, condition_of

POOL_LABEL = "specserve.dev/pool"
REVISION_LABEL = "specserve.dev/revision"
GPU = "nvidia.com/gpu"

_NODES = ("node-a", "node-b")
_LEASE_NAMESPACE = "kube-node-lease"
_RENEW_SECONDS = 10.0
_RETRY_SECONDS = 0.2
_SYNCED_AT_ONCE = 16
# Loopback, where nothing answers on the ports of a pod, so that whoever calls a pod is refused at once.
_POD_NETWORK = "127.64"


class Outcome(StrEnum):
    """What becomes of a pod."""

    READY = "Ready"
    NEVER_READY = "NeverReady"
    CRASH_LOOP = "CrashLoopBackOff"
    OUT_OF_MEMORY = "OOMKilled"
    IMAGE_PULL = "ImagePullBackOff"
    UNSCHEDULABLE = "Unschedulable"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """An outcome and its times. `message`: what the cluster says, or what the container said last.

    `start_seconds`: running before it is ready. `stop_seconds`: from the deletion to the end.
    """

    outcome: Outcome = Outcome.READY
    message: str = ""
    start_seconds: float = 0.0
    stop_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Rule:
    """Whom a behaviour is for. What is None is any."""

    namespace: str
    pool: str | None
    image: str | None
    revision: str | None
    behaviour: Behaviour

    def matches(self, pod: Object) -> bool:
        labels = pod["metadata"].get("labels") or {}
        images = {container["image"] for container in pod["spec"]["containers"]}
        return (
            self.namespace == pod["metadata"]["namespace"]
            and self.pool in (None, labels.get(POOL_LABEL))
            and self.revision in (None, labels.get(REVISION_LABEL))
            and (self.image is None or self.image in images)
        )


@dataclass(slots=True)
class _Work:
    """Pods to look at. A pod is in the hands of one task at a time."""

    dirty: dict[tuple[str, str], None] = field(default_factory=dict)
    held: set[tuple[str, str]] = field(default_factory=set)
    added: asyncio.Event = field(default_factory=asyncio.Event)


class FakeKubelet:
    """All nodes of a cluster, for the life of a `with` block."""

    def __init__(self, api: Api, mirror: Mirror, background: BackgroundLoop) -> None:
        self._api = api
        self._mirror = mirror
        self._background = background
        self._rules: list[_Rule] = []
        self._pods: dict[tuple[str, str], Behaviour] = {}
        self._gpus: dict[str, int] = {}
        self._work = _Work()
        self._tasks: list[asyncio.Task[None]] = []
        self._addresses = 0
        self._placed: dict[str, dict[str, int]] = {}  # GPUs by namespace and pod uid
        self._written: dict[str, str] = {}  # by pod uid: the cause of its last status
        self._due: dict[tuple[str, str], float] = {}  # by pod uid and step: when its time has come

    def __enter__(self) -> Self:
        self._background.run(self._make_nodes())
        self._mirror.listen(self._on_change)
        self._tasks = [self._background.start(self._renew_leases()), self._background.start(self._serve())]
        return self

    def __exit__(self, *_: object) -> None:
        self._background.end(*self._tasks)

    def behave(
        self,
        namespace: str,
        behaviour: Behaviour,
        *,
        pool: str | None = None,
        image: str | None = None,
        revision: str | None = None,
    ) -> None:
        """From now on pods that fit behave so, also those that are there. The last word counts."""
        self._rules.append(_Rule(namespace, pool, image, revision, behaviour))
        self._look_again(namespace)

    def fail_pod(self, namespace: str, name: str, behaviour: Behaviour) -> None:
        """From now on this one pod behaves so."""
        self._pods[namespace, name] = behaviour
        self._look_again(namespace)

    def limit_gpus(self, namespace: str, gpus: int) -> None:
        """Pods of the namespace that ask for GPUs share so many; the others wait, as on a full cluster."""
        self._gpus[namespace] = gpus
        self._look_again(namespace)

    def _look_again(self, namespace: str) -> None:
        for pod in self._mirror.find("pods", namespace):
            self._background.loop.call_soon_threadsafe(self._add, (namespace, pod["metadata"]["name"]))

    def _on_change(self, change: Change) -> None:
        if change.plural != "pods":
            return
        if change.type != "DELETED":
            self._add((change.namespace, change.name))
        elif self._placed.get(change.namespace, {}).pop(change.obj["metadata"]["uid"], 0):
            self._look_again(change.namespace)

    def _add(self, key: tuple[str, str]) -> None:
        self._work.dirty[key] = None
        self._work.added.set()

    def _behaviour(self, pod: Object) -> Behaviour:
        own = self._pods.get((pod["metadata"]["namespace"], pod["metadata"]["name"]))
        if own is not None:
            return own
        return next((rule.behaviour for rule in reversed(self._rules) if rule.matches(pod)), Behaviour())

    async def _serve(self) -> None:
        slots = asyncio.Semaphore(_SYNCED_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            while True:
                await self._work.added.wait()
                self._work.added.clear()
                for key in [key for key in self._work.dirty if key not in self._work.held]:
                    del self._work.dirty[key]
                    self._work.held.add(key)
                    group.create_task(self._handle(key, slots))

    async def _handle(self, key: tuple[str, str], slots: asyncio.Semaphore) -> None:
        try:
            async with slots:
                pod = self._mirror.get("pods", *key)
                if pod is not None:
                    await self._sync(pod)
        except RefusedError as error:
            if error.status not in (404, 409):
                asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._add, key)
        except (aiohttp.ClientError, OSError, TimeoutError):
            asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._add, key)
        finally:
            self._work.held.discard(key)
            if key in self._work.dirty:
                self._work.added.set()

    async def _sync(self, pod: Object) -> None:
        """The next step of a pod's life; the change that it makes brings the one after it."""
        behaviour = self._behaviour(pod)
        if "deletionTimestamp" in pod["metadata"]:
            if self._is_due(pod, "end", behaviour.stop_seconds):
                await self._end(pod)
        elif pod["status"].get("phase") in ("Succeeded", "Failed"):
            return
        elif pod["spec"].get("nodeName"):
            await self._run(pod, behaviour)
        elif behaviour.outcome is Outcome.UNSCHEDULABLE:
            await self._hold(pod, behaviour.message or "0/2 nodes are available: 2 node(s) had untolerated taint(s).")
        elif self._lacks_gpus(pod):
            await self._hold(pod, f"0/2 nodes are available: 2 Insufficient {GPU}.")
        else:
            await self._bind(pod)

    def _is_due(self, pod: Object, what: str, seconds: float) -> bool:
        """True once `seconds` have passed since this was first asked; until then the pod is looked at again then."""
        loop, meta = asyncio.get_running_loop(), pod["metadata"]
        due = self._due.setdefault((meta["uid"], what), loop.time() + seconds)
        if loop.time() < due:
            loop.call_at(due, self._add, (meta["namespace"], meta["name"]))
        return loop.time() >= due

    async def _end(self, pod: Object) -> None:
        meta = pod["metadata"]
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
        await self._api.aio.request("DELETE", path_of("pods", meta["namespace"], meta["name"]), body=body)

    async def _bind(self, pod: Object) -> None:
        meta = pod["metadata"]
        self._placed.setdefault(meta["namespace"], {})[meta["uid"]] = _gpus_of(pod)
        node = _NODES[self._addresses % len(_NODES)]
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": meta["name"], "namespace": meta["namespace"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        await self._api.aio.request("POST", path_of("pods", meta["namespace"], meta["name"], "binding"), body=body)

    async def _run(self, pod: Object, behaviour: Behaviour) -> None:
        is_up = behaviour.outcome is not Outcome.READY or condition_of(pod, "Ready").get("status") == "True"
        if not is_up and not self._is_due(pod, "start", behaviour.start_seconds):
            behaviour = Behaviour(Outcome.NEVER_READY)
        cause = f"{behaviour.outcome} {behaviour.message}"
        await self._write_once(pod, cause, container_status(pod, behaviour, ip=self._ip(pod)))

    async def _hold(self, pod: Object, message: str) -> None:
        await self._write_once(pod, message, unschedulable_status(pod, message))

    def _lacks_gpus(self, pod: Object) -> bool:
        limit = self._gpus.get(pod["metadata"]["namespace"])
        placed = self._placed.get(pod["metadata"]["namespace"], {})
        return limit is not None and sum(placed.values()) + _gpus_of(pod) > limit

    def _ip(self, pod: Object) -> str:
        known: str = pod["status"].get("podIP", "")
        if known:
            return known
        self._addresses += 1
        return f"{_POD_NETWORK}.{self._addresses // 250}.{self._addresses % 250 + 1}"

    async def _write_once(self, pod: Object, cause: str, status: Mapping[str, Any]) -> None:
        """Writes the status that follows from `cause`, unless it did already."""
        meta = pod["metadata"]
        if self._written.get(meta["uid"]) == cause:
            return
        body = {"metadata": {"uid": meta["uid"]}, "status": status}
        path = path_of("pods", meta["namespace"], meta["name"], "status")
        await self._api.aio.request("PATCH", path, body=body, content_type=MERGE_PATCH)
        self._written[meta["uid"]] = cause

    async def _make_nodes(self) -> None:
        for name in _NODES:
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
            await self._api.aio.request(
                "PATCH", path_of("nodes", None, name), body=node, content_type=APPLY_PATCH, query=_MANAGER
            )
            status = {"capacity": {"pods": "1000"}, "allocatable": {"pods": "1000"}, "conditions": [_node_ready()]}
            path = path_of("nodes", None, name, "status")
            await self._api.aio.request("PATCH", path, body={"status": status}, content_type=MERGE_PATCH)

    async def _renew_leases(self) -> None:
        while True:
            with contextlib.suppress(RefusedError, aiohttp.ClientError, OSError, TimeoutError):
                for name in _NODES:
                    await self._api.aio.request(
                        "PATCH",
                        path_of("leases", _LEASE_NAMESPACE, name),
                        body=_lease(name),
                        content_type=APPLY_PATCH,
                        query=_MANAGER,
                    )
            await asyncio.sleep(_RENEW_SECONDS)


_MANAGER = {"fieldManager": "kubelet", "force": "true"}


def unschedulable_status(pod: Object, message: str) -> Object:
    """What the scheduler writes on a pod that no node takes."""
    return {"conditions": [_condition(pod, "PodScheduled", is_true=False, reason="Unschedulable", message=message)]}


def container_status(pod: Object, behaviour: Behaviour, *, ip: str) -> Object:
    """What a kubelet writes on a pod that it runs, or cannot run."""
    is_ready = behaviour.outcome is Outcome.READY
    conditions = [
        _condition(pod, "PodScheduled", is_true=True),
        _condition(pod, "Initialized", is_true=True),
        _condition(pod, "ContainersReady", is_true=is_ready, reason="" if is_ready else "ContainersNotReady"),
        _condition(pod, "Ready", is_true=is_ready, reason="" if is_ready else "ContainersNotReady"),
    ]
    containers = [_container(container, behaviour) for container in pod["spec"]["containers"]]
    phase = "Pending" if behaviour.outcome is Outcome.IMAGE_PULL else "Running"
    return {
        "phase": phase,
        "conditions": conditions,
        "containerStatuses": containers,
        "hostIP": "127.0.0.1",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "startTime": _now(),
    }


def _container(container: Object, behaviour: Behaviour) -> Object:
    outcome = behaviour.outcome
    restarts, last_state = 0, {}
    match outcome:
        case Outcome.READY | Outcome.NEVER_READY:
            state: Object = {"running": {"startedAt": _now()}}
        case Outcome.CRASH_LOOP:
            text = f"back-off 40s restarting failed container={container['name']}"
            state, restarts = {"waiting": {"reason": "CrashLoopBackOff", "message": text}}, 5
            last_state = {"terminated": {"exitCode": 1, "reason": "Error", "message": behaviour.message}}
        case Outcome.OUT_OF_MEMORY:
            state, restarts = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}, 2
            last_state = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
        case _:
            text = behaviour.message or f'Back-off pulling image "{container["image"]}"'
            state = {"waiting": {"reason": "ImagePullBackOff", "message": text}}
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "ready": outcome is Outcome.READY,
        "started": outcome is Outcome.READY,
        "restartCount": restarts,
        "state": state,
        "lastState": last_state,
    }


def _gpus_of(pod: Object) -> int:
    limits = [(c.get("resources") or {}).get("limits") or {} for c in pod["spec"]["containers"]]
    return sum(int(limit.get(GPU, 0)) for limit in limits)


def _condition(pod: Object, type_: str, *, is_true: bool, reason: str = "", message: str = "") -> Object:
    """Its time moves only where its status does."""
    status, before = "True" if is_true else "False", condition_of(pod, type_)
    is_same = before.get("status") == status and before.get("lastTransitionTime")
    condition = {
        "type": type_,
        "status": status,
        "lastTransitionTime": before["lastTransitionTime"] if is_same else _now(),
    }
    return condition | ({"reason": reason} if reason else {}) | ({"message": message} if message else {})


def _node_ready() -> Object:
    times = {"lastHeartbeatTime": _now(), "lastTransitionTime": _now()}
    return {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "there is no kubelet"} | times


def _lease(node: str) -> Object:
    renewed = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": node, "namespace": _LEASE_NAMESPACE},
        "spec": {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": renewed},
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
