"""One Deployment for each pool and revision. Its pod template never changes: another template is another revision."""

from typing import Any

from specserve_operator.api.pools import Rollout
from specserve_operator.constants import ANNOTATION_POOL_REPLICAS, GROUP
from specserve_operator.core.launch import EngineLaunch
from specserve_operator.core.names import (
    ANNOTATION_INPUTS,
    ANNOTATION_RECORD,
    ANNOTATION_TARGET_INPUTS,
    ANNOTATION_UPGRADE,
    Labels,
    selector,
    workload_labels,
)
from specserve_operator.core.objects import Manifest
from specserve_operator.core.pinning import Resolution, Resolved
from specserve_operator.core.plan import CurrentWorkload, OldWorkload
from specserve_operator.render.engine import render_engine_pod
from specserve_operator.render.gateway import render_gateway_pod
from specserve_operator.render.metadata import Owner
from specserve_operator.render.template import merge_pod_template


def render_workload(owner: Owner, workload: CurrentWorkload, *, resolution: Resolution, rollout: Rollout) -> Manifest:
    """The Deployment of a pool's current revision."""
    resolved = workload.resolved
    annotations = {
        ANNOTATION_POOL_REPLICAS: str(workload.pool_replicas),
        ANNOTATION_RECORD: str(resolution.number),
        ANNOTATION_INPUTS: resolved.inputs,
    }
    if resolved.target_inputs:
        annotations[ANNOTATION_TARGET_INPUTS] = resolved.target_inputs
    if resolution.upgrade:
        annotations[ANNOTATION_UPGRADE] = resolution.upgrade
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": owner.metadata(workload.name, labels=_labels(owner, resolved), annotations=annotations),
        "spec": {
            "replicas": workload.replicas,
            "revisionHistoryLimit": 0,
            **({"minReadySeconds": rollout.min_ready_seconds} if rollout.min_ready_seconds else {}),
            "progressDeadlineSeconds": rollout.progress_deadline_seconds,
            # Only for a template that somebody else has edited: it is put right under the same bounds.
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable},
            },
            "selector": {"matchLabels": selector(owner.name, workload.pool, revision=workload.revision)},
            "template": render_pod_template(owner, resolved),
        },
    }


def render_pod_template(owner: Owner, resolved: Resolved) -> Manifest:
    """The pod template of a pool: as it was rendered once, where that is kept."""
    if resolved.template is not None:
        return resolved.template
    launch = resolved.launch
    if launch is None:
        raise ValueError(f"pool {resolved.pool} is resolved to neither a launch nor a template")
    if isinstance(launch, EngineLaunch):
        pod_spec = render_engine_pod(launch, revision=resolved.revision)
    else:
        pod_spec = render_gateway_pod(launch)
    template = {"metadata": {"labels": _labels(owner, resolved)}, "spec": pod_spec}
    return merge_pod_template(template, launch.template)


def _labels(owner: Owner, resolved: Resolved) -> Labels:
    return workload_labels(
        owner.name, resolved.pool, revision=resolved.revision, target_revision=resolved.target_revision or None
    )


def render_old_workload(workload: OldWorkload) -> Manifest:
    """A former revision's Deployment with other replicas.

    What it was rendered from may be gone, and an apply that leaves fields out would remove them, so the live object is
    applied again, without what belongs to others.
    """
    live: Manifest = workload.live
    meta = live["metadata"]
    annotations = {k: v for k, v in (meta.get("annotations") or {}).items() if k.startswith(f"{GROUP}/")}
    metadata: dict[str, Any] = {
        "name": meta["name"],
        "namespace": meta.get("namespace", "default"),
        "labels": meta.get("labels", {}),
        "annotations": annotations,
        "ownerReferences": meta.get("ownerReferences", []),
    }
    return {
        "apiVersion": live["apiVersion"],
        "kind": live["kind"],
        "metadata": metadata,
        "spec": live["spec"] | {"replicas": workload.replicas},
    }
