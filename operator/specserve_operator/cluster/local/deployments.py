"""Deployments: as many pods as they ask for, and their status.

Pods belong to their Deployment, without a ReplicaSet between. A Deployment whose template changes replaces all of its
pods at once (`Recreate`): those of specserve never change theirs, because the revision is part of their name.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specserve_operator.cluster.local.events import EventRecorder
from specserve_operator.cluster.local.podstatus import NODE_NAME, is_ready
from specserve_operator.cluster.local.store import (
    Change,
    ObjectKey,
    ObjectStore,
    is_being_deleted,
    matches,
    timestamp,
)
from specserve_operator.cluster.wakeups import DirtyKeys, serve
from specserve_operator.core.objects import Manifest

TEMPLATE_HASH = "pod-template-hash"
# Kubernetes' alphabet for generated names: no vowels, so no words; nothing that looks like something else.
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
_SUFFIX_LENGTH = 5


@dataclass(frozen=True, slots=True)
class PodPlan:
    """What makes the pods of a Deployment as it wants them."""

    create: int
    delete: tuple[str, ...]


def template_hash(deployment: Manifest) -> str:
    """Identifies the pod template's content."""
    text = json.dumps(deployment["spec"]["template"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def plan_pods(deployment: Manifest, pods: Sequence[Manifest]) -> PodPlan:
    """How many pods to create and which to delete. `pods`: all of the Deployment, those that end included.

    Scaling down takes pods that are not ready first, then the newest, so that pods with warm caches stay.
    """
    wanted_hash = template_hash(deployment)
    outdated = [p for p in pods if p["metadata"]["labels"].get(TEMPLATE_HASH) != wanted_hash]
    if outdated:
        return PodPlan(0, tuple(p["metadata"]["name"] for p in outdated if not is_being_deleted(p)))
    active = [p for p in pods if not is_being_deleted(p)]
    surplus = len(active) - deployment["spec"].get("replicas", 1)
    if surplus <= 0:
        return PodPlan(-surplus, ())
    newest_first = sorted(active, key=_age_key, reverse=True)
    victims = sorted(newest_first, key=is_ready)[:surplus]
    return PodPlan(0, tuple(p["metadata"]["name"] for p in victims))


def _age_key(pod: Manifest) -> tuple[str, str]:
    meta = pod["metadata"]
    return meta["creationTimestamp"], meta["name"]


def render_pod(deployment: Manifest, suffix: str) -> Manifest:
    """A pod of the Deployment's template."""
    meta, template = deployment["metadata"], deployment["spec"]["template"]
    template_meta = template.get("metadata", {})
    owner = {
        "apiVersion": deployment["apiVersion"],
        "kind": "Deployment",
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    pod_meta: dict[str, Any] = {
        "name": f"{meta['name']}-{suffix}",
        "namespace": meta["namespace"],
        "labels": {**template_meta.get("labels", {}), TEMPLATE_HASH: template_hash(deployment)},
        "ownerReferences": [owner],
    }
    if "annotations" in template_meta:
        pod_meta["annotations"] = template_meta["annotations"]
    spec = {"restartPolicy": "Always", "nodeName": NODE_NAME, **template["spec"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": pod_meta, "spec": spec}


def render_deployment_status(deployment: Manifest, pods: Sequence[Manifest], *, now: str) -> dict[str, Any]:
    """The status; counts that are 0 are left out, as Kubernetes leaves them out."""
    wanted = deployment["spec"].get("replicas", 1)
    wanted_hash = template_hash(deployment)
    active = [p for p in pods if not is_being_deleted(p)]
    ready = sum(is_ready(p) for p in active)
    updated = sum(p["metadata"]["labels"].get(TEMPLATE_HASH) == wanted_hash for p in active)
    counts = {
        "replicas": len(active),
        "updatedReplicas": updated,
        "readyReplicas": ready,
        "availableReplicas": ready,
        "unavailableReplicas": max(0, wanted - ready),
    }
    available = ready >= wanted
    before = {c["type"]: c for c in deployment.get("status", {}).get("conditions", ())}.get("Available")
    status = "True" if available else "False"
    unchanged = before is not None and before["status"] == status
    condition = {
        "type": "Available",
        "status": status,
        "reason": "MinimumReplicasAvailable" if available else "MinimumReplicasUnavailable",
        "lastTransitionTime": before["lastTransitionTime"] if unchanged and before else now,
    }
    return {
        "observedGeneration": deployment["metadata"]["generation"],
        **{name: count for name, count in counts.items() if count},
        "conditions": [condition],
    }


class DeploymentController:
    """Keeps the pods of every Deployment as planned."""

    def __init__(self, store: ObjectStore, events: EventRecorder) -> None:
        self._store = store
        self._events = events
        self._dirty: DirtyKeys[ObjectKey] = DirtyKeys()
        self._random = random.Random()
        store.subscribe(self._on_change)
        for deployment in store.list("Deployment"):
            self._dirty.add(ObjectKey.of(deployment))

    def _on_change(self, change: Change) -> None:
        obj = change.obj
        if obj["kind"] == "Deployment":
            self._dirty.add(ObjectKey.of(obj))
        elif obj["kind"] == "Pod":
            for owner in obj["metadata"].get("ownerReferences", ()):
                if owner["kind"] == "Deployment":
                    self._dirty.add(ObjectKey("Deployment", obj["metadata"]["namespace"], owner["name"]))

    async def run(self) -> None:
        """Runs until it is cancelled."""
        await serve("deployments", self._dirty, self.reconcile)

    async def reconcile(self, key: ObjectKey) -> None:
        """One look at one Deployment."""
        deployment = self._store.get(key)
        if deployment is None:
            return
        pods = self._pods_of(deployment)
        plan = plan_pods(deployment, pods)
        for name in plan.delete:
            self._store.delete(ObjectKey("Pod", key.namespace, name))
            self._events.normal(deployment, "SuccessfulDelete", f"Deleted pod: {name}")
        for _ in range(plan.create):
            pod = render_pod(deployment, self._free_suffix(key))
            self._store.apply(pod)
            self._events.normal(deployment, "SuccessfulCreate", f"Created pod: {pod['metadata']['name']}")
        current = self._store.get(key)
        if current is not None:
            status = render_deployment_status(current, self._pods_of(current), now=timestamp())
            self._store.patch_status(key, status)

    def _pods_of(self, deployment: Manifest) -> list[Manifest]:
        selector = deployment["spec"]["selector"].get("matchLabels", {})
        uid = deployment["metadata"]["uid"]
        return [
            pod
            for pod in self._store.list("Pod", deployment["metadata"]["namespace"])
            if matches(selector, pod)
            and any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences", ()))
        ]

    def _free_suffix(self, key: ObjectKey) -> str:
        while True:
            suffix = "".join(self._random.choices(_ALPHABET, k=_SUFFIX_LENGTH))
            if self._store.get(ObjectKey("Pod", key.namespace, f"{key.name}-{suffix}")) is None:
                return suffix
