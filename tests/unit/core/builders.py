"""Services, children and snapshots for tests, with everything that a test does not speak of filled in."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import patch

from specserve_operator.api.status import KvTransferStatus
from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.core import revision
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.objects import Manifest
from specserve_operator.core.plan import Plan, plan
from specserve_operator.core.snapshot import Snapshot, build_snapshot
from specserve_operator.core.stats import (
    Histogram,
    KvTransferStats,
    PodStats,
    PolicyStats,
    RequestStats,
    SpeculationSettings,
    SpeculationStats,
    TransferTotals,
    merge_pool_stats,
)
from specserve_operator.render import render, render_seeds, workload

NOW = datetime(2030, 1, 1, 12, 0, 0, tzinfo=UTC)
CONFIG = OperatorConfig(
    default_engine_image="registry.test/engine:1", gateway_image="registry.test/gateway:1", operator_version="1.0"
)
DRAFT_MODEL = {"method": "DraftModel", "uri": "file:///models/draft"}
BOUNDS_MS = (10.0, 20.0, 40.0, 80.0)


def service_manifest(
    *,
    generation: int = 1,
    status: Mapping[str, Any] | None = None,
    annotations: Mapping[str, str] | None = None,
    **spec: Any,
) -> Manifest:
    """With a prefill pool, KV caches move unencrypted unless the test says otherwise."""
    if spec.get("prefill") is not None:
        spec["kvTransfer"] = {"tls": "Disabled", **spec.get("kvTransfer", {})}
    return {
        "apiVersion": "specserve.dev/v1alpha1",
        "kind": "SpeculativeService",
        "metadata": {
            "name": "coder",
            "namespace": "llm",
            "uid": "uid-1",
            "generation": generation,
            "annotations": dict(annotations or {}),
        },
        "spec": {"model": {"uri": "file:///models/target"}, **spec},
        "status": dict(status or {}),
    }


def make_service(**spec: Any) -> SpeculativeService:
    """`spec` in the manifest's spelling; `generation`, `status` and `annotations` go where they belong."""
    return SpeculativeService.model_validate(service_manifest(**spec))


def disaggregated(**spec: Any) -> SpeculativeService:
    """Prefill, decode and a draft model."""
    parts: dict[str, Any] = {"prefill": {"replicas": 1}, "decode": {"replicas": 2}}
    return make_service(**{**parts, "speculation": {"draft": DRAFT_MODEL}, **spec})


def make_snapshot(
    service: SpeculativeService,
    children: Sequence[Manifest] = (),
    *,
    now: datetime = NOW,
    stats: Iterable[PodStats] = (),
    kv_transfer: TransferTotals | None = None,
    kv_transfer_found: KvTransferStatus | None = None,
    config: OperatorConfig = CONFIG,
    crd_problem: str = "",
) -> Snapshot:
    """`kv_transfer` by default: what the pods of `stats` say, as if there had never been others, nor an operator."""
    pod_stats = {s.pod_uid: s for s in stats}
    if kv_transfer is None:
        kv_transfer = totals_of(pod_stats.values())
    return build_snapshot(
        service,
        children,
        config=config,
        now=now,
        pod_stats=pod_stats,
        kv_transfer=kv_transfer,
        kv_transfer_found=kv_transfer_found or KvTransferStatus(),
        crd_problem=crd_problem,
    )


def totals_of(stats: Iterable[PodStats], *, inherited: Iterable[PodStats] = ()) -> TransferTotals:
    """What these pods have counted; `inherited`: their first answers, of those that are older than the operator."""
    return TransferTotals(merge_pool_stats(stats).kv_transfer, merge_pool_stats(inherited).kv_transfer)


def make_pod(
    deployment: Manifest,
    number: int = 0,
    *,
    ready: bool = True,
    created: datetime = NOW,
    ready_since: datetime | None = None,
    container: Mapping[str, Any] | None = None,
    unschedulable: str = "",
    deleting: bool = False,
) -> Manifest:
    """A pod as the cluster makes it from a rendered Deployment. `container` is its container's status."""
    name = f"{deployment['metadata']['name']}-{number}"
    template = deployment["spec"]["template"]
    conditions = [
        {"type": "PodScheduled", "status": "False" if unschedulable else "True", "message": unschedulable},
        {"type": "Ready", "status": str(ready), "lastTransitionTime": iso(ready_since or created)},
    ]
    state: dict[str, Any] = {"name": "engine", "ready": ready, "started": ready, "restartCount": 0}
    state["state"] = {"running": {}}
    pod: Manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": deployment["metadata"]["namespace"],
            "uid": f"uid-{name}",
            "labels": template["metadata"]["labels"],
            "creationTimestamp": iso(created),
        },
        "spec": {} if unschedulable else {"nodeName": "node"},
        "status": {
            "phase": "Pending" if unschedulable else "Running",
            "podIP": "" if unschedulable else "10.0.0.1",
            "conditions": conditions,
            "containerStatuses": [] if unschedulable else [{**state, **(container or {})}],
        },
    }
    if deleting:
        pod["metadata"]["deletionTimestamp"] = iso(created)
    return pod


def iso(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def ready_children(service: SpeculativeService, *, config: OperatorConfig = CONFIG) -> list[Manifest]:
    """What a cluster has once everything that the first plan wants runs."""
    cluster = FakeCluster(config=config)
    cluster.apply(cluster.plan(service))
    cluster.run_pods()
    return cluster.children()


def pods_of(children: Iterable[Manifest], pool: str) -> list[Manifest]:
    return [c for c in children if c["kind"] == "Pod" and c["metadata"]["labels"]["specserve.dev/pool"] == pool]


def deployments_of(children: Iterable[Manifest], pool: str) -> list[Manifest]:
    return [c for c in children if c["kind"] == "Deployment" and c["metadata"]["labels"]["specserve.dev/pool"] == pool]


_PRESENT_VERSION = revision.RENDER_VERSION


@contextmanager
def operator(version: int) -> Iterator[None]:
    """Another operator: it renders pods in another way, and says so in their revisions. 1 is named as this one is."""

    def render_pod(render_own: Callable[..., Manifest]) -> Callable[..., Manifest]:
        return lambda *args, **kwargs: {**render_own(*args, **kwargs), "hostname": f"operator-{version}"}

    with (
        patch.object(revision, "RENDER_VERSION", _PRESENT_VERSION + version - 1),
        patch.object(workload, "render_engine_pod", render_pod(workload.render_engine_pod)),
        patch.object(workload, "render_gateway_pod", render_pod(workload.render_gateway_pod)),
    ):
        yield


class FakeCluster:
    """Applies plans, and makes pods as Deployments ask: unready first, ready when told. `config` may be replaced."""

    def __init__(self, *, now: datetime = NOW, config: OperatorConfig = CONFIG) -> None:
        self.now = now
        self.config = config
        self.objects: dict[tuple[str, str], Manifest] = {}
        self._pods: dict[str, list[Manifest]] = {}

    def plan(self, service: SpeculativeService) -> Plan:
        """What an operator that starts just now makes of what is there."""
        return plan(make_snapshot(service, self.children(), now=self.now, config=self.config))

    def apply(self, plan_: Plan, *, at_most: int | None = None) -> None:
        """Carries out a plan; with `at_most`, the operator dies after so many objects."""
        writes = [*((obj, True) for obj in render_seeds(plan_)), *((obj, False) for obj in render(plan_))]
        for obj, is_seed in writes[:at_most]:
            key = (obj["kind"], obj["metadata"]["name"])
            old = self.objects.get(key, {})
            if not (is_seed and old):
                # Fields of others stay: of what is rendered, that is the whole spec of a PoolScaler, or nothing.
                spec = {"spec": old["spec"]} if "spec" in old else {}
                created = old.get("metadata", {}).get("creationTimestamp", iso(self.now))
                self.objects[key] = {**spec, **obj, "metadata": {**obj["metadata"], "creationTimestamp": created}}
        if at_most is None or at_most >= len(writes):
            for ref in plan_.deletions:
                self.objects.pop((ref.kind, ref.name), None)
        self._scale()

    def _scale(self) -> None:
        """As a ReplicaSet does: what is not ready goes first."""
        deployments = {name: obj for (kind, name), obj in self.objects.items() if kind == "Deployment"}
        for name in set(self._pods) - set(deployments):
            del self._pods[name]
        for name, deployment in deployments.items():
            pods = sorted(self._pods.get(name, []), key=_is_ready, reverse=True)
            wanted = deployment["spec"]["replicas"]
            numbers = iter(
                n for n in range(1000) if n not in {int(p["metadata"]["name"].rpartition("-")[2]) for p in pods}
            )
            while len(pods) < wanted:
                pods.append(make_pod(deployment, next(numbers), ready=False, created=self.now))
            self._pods[name] = pods[:wanted]

    def run_pods(self, *, fails: str | None = None) -> None:
        """Makes every pod ready, but for those whose Deployment's name contains `fails`."""
        for name, pods in self._pods.items():
            for pod in pods:
                if fails is None or fails not in name:
                    set_ready(pod, True, now=self.now)

    def step(self, service: SpeculativeService, *, fails: str | None = None) -> Plan:
        """One reconcile, after which pods have had the time to start."""
        self.now += timedelta(seconds=10)
        plan_ = self.plan(service)
        self.apply(plan_)
        self.run_pods(fails=fails)
        return plan_

    def children(self) -> list[Manifest]:
        return [*self.objects.values(), *(p for pods in self._pods.values() for p in pods)]

    def pods(self, pool: str) -> list[Manifest]:
        return pods_of(self.children(), pool)


def _is_ready(pod: Manifest) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"]["conditions"])


def set_ready(pod: Manifest, ready: bool, *, now: datetime = NOW) -> None:
    for condition in pod["status"]["conditions"]:
        if condition["type"] == "Ready" and condition["status"] != str(ready):
            condition |= {"status": str(ready), "lastTransitionTime": iso(now)}
    for container in pod["status"]["containerStatuses"]:
        container["ready"] = ready
        container["started"] = container["started"] or ready


def decode_stats_of(
    pod: Manifest,
    *,
    transfers: int = 0,
    fallbacks: Mapping[str, int] | None = None,
    drafted: int = 0,
    accepted: int = 0,
    verified: int = 0,
    ttft_counts: Sequence[int] = (),
    tpot_counts: Sequence[int] = (),
    policy: str = "DSDE",
) -> PodStats:
    """What a decode pod answers; histograms over `BOUNDS_MS`."""
    return PodStats(
        pod_name=pod["metadata"]["name"],
        pod_uid=pod["metadata"]["uid"],
        pool=pod["metadata"]["labels"]["specserve.dev/pool"],
        revision=pod["metadata"]["labels"]["specserve.dev/revision"],
        requests=RequestStats(
            started=sum(ttft_counts),
            succeeded=sum(ttft_counts),
            time_to_first_token=Histogram(BOUNDS_MS, tuple(ttft_counts)) if ttft_counts else Histogram(),
            time_per_output_token=Histogram(BOUNDS_MS, tuple(tpot_counts)) if tpot_counts else Histogram(),
            prompt_tokens=100 * sum(ttft_counts),
        ),
        speculation=SpeculationStats(
            in_force=SpeculationSettings(policy=policy, max_tokens=8),
            started_max_tokens=8,
            by_policy=((policy, PolicyStats(verified, drafted, accepted)),),
        ),
        kv_transfer=KvTransferStats(
            remote_prefills=transfers,
            loaded_tokens=100 * transfers,
            loaded_bytes=1000 * transfers,
            fallbacks=tuple(sorted((fallbacks or {}).items())),
        ),
    )
