"""What the operator sees of one service at one moment: the only input of `plan` and `compute_status`.

Objects are parsed here once. Fields that a cluster leaves out are what Kubernetes' defaults say.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise, takewhile
from typing import Any

from specserve_operator.api.status import KvTransferStatus
from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.constants import (
    ANNOTATION_POOL_REPLICAS,
    ENGINE_CONTAINER,
    GATEWAY_CONTAINER,
    LABEL_POOL,
    LABEL_REVISION,
    LABEL_SERVICE,
    LABEL_TARGET_REVISION,
    MANAGED_BY,
)
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.names import (
    ANNOTATION_INPUTS,
    ANNOTATION_RECORD,
    ANNOTATION_TARGET_INPUTS,
    ANNOTATION_UPGRADE,
    LABEL_MANAGED_BY,
    is_derived_name,
)
from specserve_operator.core.objects import Manifest, ObjectRef, ServiceKey
from specserve_operator.core.records import PoolPin, Record, parse_record
from specserve_operator.core.stats import PodStats, TransferTotals
from specserve_operator.identity.names import FLAG_IDENTITY_SERVER

FLAG_MAX_DRAFT_TOKENS = "--max-draft-tokens"


@dataclass(frozen=True, slots=True)
class ContainerView:
    """One container, init containers included.

    `started`: it has been ready since it was last started. `terminated_*` is of the last end, also if it runs again.
    """

    name: str
    ready: bool
    restarts: int
    waiting_reason: str = ""
    waiting_message: str = ""
    terminated_reason: str = ""
    terminated_message: str = ""
    exit_code: int | None = None
    is_running: bool = False
    started: bool = False


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod with our labels. `unschedulable_message` is set while no node takes it."""

    name: str
    uid: str
    pool: str
    revision: str
    target_revision: str
    phase: str
    ready: bool
    deleting: bool
    ip: str
    node: str
    created: datetime | None
    ready_changed: datetime | None
    unschedulable_message: str
    containers: tuple[ContainerView, ...]

    @property
    def restarts(self) -> int:
        return sum(c.restarts for c in self.containers)

    @property
    def started(self) -> bool:
        """Every container is past its start-up, so a pod that is not ready only pauses."""
        return bool(self.containers) and all(c.started or c.exit_code == 0 for c in self.containers)

    @property
    def is_active(self) -> bool:
        """Counts towards its workload: not on its way out, and not a leftover of an eviction."""
        return not self.deleting and not self.is_finished

    @property
    def is_finished(self) -> bool:
        """Evicted or shut down with its node: its workload has another pod, but the object stays for a while."""
        return self.phase in {"Failed", "Succeeded"}

    @property
    def is_serving(self) -> bool:
        """Ready and not on its way out."""
        return self.ready and not self.deleting


@dataclass(frozen=True, slots=True)
class WorkloadView:
    """A Deployment of ours: one pool at one revision. `replicas` is what it was told to have.

    `pin`: what its pods are, and what from; None where somebody has removed that. `record`: the number of the record
    that had it last; `upgrade`: the request that was taken last by then.
    """

    ref: ObjectRef
    pool: str
    revision: str
    target_revision: str
    replicas: int
    pool_replicas: int | None
    created: datetime | None
    replica_failure: str
    pin: PoolPin | None
    record: int
    upgrade: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class ScalerView:
    """A PoolScaler. `replicas` is what somebody asks for; None where that cannot be read."""

    ref: ObjectRef
    pool: str
    replicas: int | None
    generation: int
    status: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`pod_stats` holds the pods that answered. `others`: children that are neither workloads nor pods.

    `records`: those that can be read, oldest first. `crd_problem`: what the installed CRDs lack; empty if nothing.
    `kv_transfer` is the sum over all pods that the control plane has heard of: it never shrinks. `kv_transfer_found` is
    what the status said when the control plane first saw the service: the word of earlier ones. `are_pods_asked`: the
    control plane has asked them for their statistics, whether or not they have answered.
    """

    service: SpeculativeService
    config: OperatorConfig
    now: datetime
    workloads: tuple[WorkloadView, ...] = ()
    pods: tuple[PodView, ...] = ()
    scalers: tuple[ScalerView, ...] = ()
    records: tuple[Record, ...] = ()
    others: tuple[Manifest, ...] = ()
    pod_stats: tuple[PodStats, ...] = ()
    kv_transfer: TransferTotals = field(default_factory=TransferTotals)
    kv_transfer_found: KvTransferStatus = field(default_factory=KvTransferStatus)
    are_pods_asked: bool = True
    crd_problem: str = ""

    @property
    def key(self) -> ServiceKey:
        return ServiceKey(self.service.metadata.namespace, self.service.metadata.name)

    def pool_workloads(self, pool: str) -> tuple[WorkloadView, ...]:
        """Oldest first."""
        return tuple(w for w in self.workloads if w.pool == pool)

    def scaler(self, pool: str) -> ScalerView | None:
        return next((s for s in self.scalers if s.pool == pool), None)

    def pool_pods(self, pool: str, *, revision: str | None = None) -> tuple[PodView, ...]:
        """Pods of a pool, those that are being deleted included."""
        return tuple(p for p in self.pods if p.pool == pool and revision in (None, p.revision))

    def is_available(self, pod: PodView) -> bool:
        """Ready for long enough to give up another one for it."""
        return pod.ready and not self.seconds_to_available(pod)

    def seconds_to_available(self, pod: PodView) -> float:
        """For how much longer a ready pod has to stay so until it is available; 0 for one that is not ready."""
        least = self.service.spec.rollout.min_ready_seconds
        # Without a bound, clocks that differ must not make one.
        if not least or not pod.ready or pod.ready_changed is None:
            return 0.0
        return max(least - (self.now - pod.ready_changed).total_seconds(), 0.0)


def build_snapshot(
    service: SpeculativeService,
    children: Sequence[Manifest],
    *,
    config: OperatorConfig,
    now: datetime,
    pod_stats: Mapping[str, PodStats],
    kv_transfer: TransferTotals,
    kv_transfer_found: KvTransferStatus,
    are_pods_asked: bool = True,
    crd_problem: str = "",
) -> Snapshot:
    """Sorts the children of a service by what they are.

    Objects that carry the service's label but were not made by the operator are left out, so that they are never
    touched. `pod_stats` of pods that are gone are left out too.
    """
    ours = [c for c in children if _is_ours(c, service)]
    workloads = [_parse_workload(c) for c in ours if c["kind"] == "Deployment"]
    pods = [_parse_pod(c) for c in ours if c["kind"] == "Pod"]
    records = [r for c in ours if c["kind"] == "ControllerRevision" and (r := parse_record(c)) is not None]
    uids = {p.uid for p in pods}
    return Snapshot(
        service=service,
        config=config,
        now=now,
        workloads=tuple(sorted(workloads, key=lambda w: (w.created is not None, w.created or now, w.ref.name))),
        pods=tuple(sorted(pods, key=lambda p: p.name)),
        scalers=tuple(_parse_scaler(c) for c in ours if c["kind"] == "PoolScaler"),
        records=tuple(sorted(records, key=lambda r: r.number)),
        others=tuple(c for c in ours if c["kind"] not in {"Deployment", "Pod"}),
        pod_stats=tuple(s for _, s in sorted(pod_stats.items()) if s.pod_uid in uids),
        kv_transfer=kv_transfer,
        kv_transfer_found=kv_transfer_found,
        are_pods_asked=are_pods_asked,
        crd_problem=crd_problem,
    )


def _is_ours(child: Manifest, service: SpeculativeService) -> bool:
    """By its labels and, since people copy objects with their labels, by its name."""
    labels = child["metadata"].get("labels") or {}
    return bool(
        labels.get(LABEL_SERVICE) == service.metadata.name
        and labels.get(LABEL_MANAGED_BY) == MANAGED_BY
        and child["metadata"].get("namespace", "default") == service.metadata.namespace
        and is_derived_name(child["kind"], child["metadata"]["name"], service.metadata.name, labels)
    )


def _parse_workload(obj: Manifest) -> WorkloadView:
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    failure = _condition(status, "ReplicaFailure")
    return WorkloadView(
        ref=ObjectRef.of(obj),
        pool=labels.get(LABEL_POOL, ""),
        revision=labels.get(LABEL_REVISION, ""),
        target_revision=labels.get(LABEL_TARGET_REVISION, ""),
        replicas=spec.get("replicas", 1),
        pool_replicas=_parse_count(annotations.get(ANNOTATION_POOL_REPLICAS)),
        created=_parse_time(meta.get("creationTimestamp")),
        replica_failure=failure.get("message", "") if failure.get("status") == "True" else "",
        pin=_parse_pin(obj) if ANNOTATION_INPUTS in annotations else None,
        record=_parse_count(annotations.get(ANNOTATION_RECORD)) or 0,
        upgrade=annotations.get(ANNOTATION_UPGRADE, ""),
        manifest=obj,
    )


def _parse_pin(deployment: Manifest) -> PoolPin:
    """What a workload with our annotations says of its pods."""
    meta, template = deployment["metadata"], deployment["spec"]["template"]
    labels, annotations = meta.get("labels") or {}, meta["annotations"]
    names = {ENGINE_CONTAINER, GATEWAY_CONTAINER}
    containers = [c for c in template["spec"]["containers"] if c["name"] in names]
    return PoolPin(
        inputs=annotations[ANNOTATION_INPUTS],
        target_inputs=annotations.get(ANNOTATION_TARGET_INPUTS, ""),
        revision=labels.get(LABEL_REVISION, ""),
        target_revision=labels.get(LABEL_TARGET_REVISION, ""),
        image=containers[0].get("image", "") if containers else "",
        max_draft_tokens=_parse_count(_flag_value(containers, FLAG_MAX_DRAFT_TOKENS)),
        identity_server=_flag_value(containers, FLAG_IDENTITY_SERVER),
        template=_without_nulls(template),
    )


def _parse_scaler(obj: Manifest) -> ScalerView:
    meta, replicas = obj["metadata"], (obj.get("spec") or {}).get("replicas")
    return ScalerView(
        ref=ObjectRef.of(obj),
        pool=(meta.get("labels") or {}).get(LABEL_POOL, ""),
        replicas=replicas if isinstance(replicas, int) else None,
        generation=meta.get("generation", 1),
        status=obj.get("status") or {},
    )


def _parse_pod(obj: Manifest) -> PodView:
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    labels = meta.get("labels") or {}
    ready, scheduled = _condition(status, "Ready"), _condition(status, "PodScheduled")
    is_unschedulable = scheduled.get("status") == "False" and not spec.get("nodeName")
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    return PodView(
        name=meta["name"],
        uid=meta.get("uid", ""),
        pool=labels.get(LABEL_POOL, ""),
        revision=labels.get(LABEL_REVISION, ""),
        target_revision=labels.get(LABEL_TARGET_REVISION, ""),
        phase=status.get("phase", "Pending"),
        ready=ready.get("status") == "True",
        deleting=bool(meta.get("deletionTimestamp")),
        ip=status.get("podIP", ""),
        node=spec.get("nodeName", ""),
        created=_parse_time(meta.get("creationTimestamp")),
        ready_changed=_parse_time(ready.get("lastTransitionTime")),
        unschedulable_message=scheduled.get("message", "no node") if is_unschedulable else "",
        containers=tuple(_parse_container(c) for c in containers),
    )


def _parse_container(status: Mapping[str, Any]) -> ContainerView:
    state, last = status.get("state") or {}, status.get("lastState") or {}
    waiting = state.get("waiting") or {}
    terminated = state.get("terminated") or last.get("terminated") or {}
    return ContainerView(
        name=status["name"],
        ready=bool(status.get("ready")),
        restarts=status.get("restartCount", 0),
        waiting_reason=waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
        terminated_reason=terminated.get("reason", ""),
        terminated_message=terminated.get("message", ""),
        exit_code=terminated.get("exitCode"),
        is_running="running" in state,
        started=bool(status.get("started")),
    )


def _condition(status: Mapping[str, Any], type_: str) -> Mapping[str, Any]:
    conditions: Iterable[Mapping[str, Any]] = status.get("conditions") or ()
    return next((c for c in conditions if c.get("type") == type_), {})


def _flag_value(containers: Iterable[Mapping[str, Any]], flag: str) -> str | None:
    """What follows `flag` in the arguments of any of `containers`. Those behind `--` are the engine's own."""
    for container in containers:
        own = takewhile(lambda arg: arg != "--", container.get("args") or ())
        for name, value in pairwise(own):
            if name == flag:
                return str(value)
    return None


def _without_nulls(template: Manifest) -> Manifest:
    """An API server writes `creationTimestamp: null` into templates."""
    metadata = {k: v for k, v in (template.get("metadata") or {}).items() if v is not None}
    return {**template, "metadata": metadata}


def _parse_count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _parse_time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
