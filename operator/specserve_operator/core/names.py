"""Names, labels and selectors of everything that belongs to a service. The only place that derives them."""

from collections.abc import Mapping
from enum import StrEnum

from specserve_operator.constants import (
    GROUP,
    LABEL_POOL,
    LABEL_REVISION,
    LABEL_SERVICE,
    LABEL_TARGET_REVISION,
    MANAGED_BY,
)

Labels = dict[str, str]

LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"

# On a service: the user wants its pods as this operator would make them. Any value that was not taken yet does.
# On a workload: the value that was taken last.
ANNOTATION_UPGRADE = f"{GROUP}/upgrade"
# On a workload: digests of what the user had given (core/inputs.py), and the number of the record that it is in.
ANNOTATION_INPUTS = f"{GROUP}/inputs"
ANNOTATION_TARGET_INPUTS = f"{GROUP}/target-inputs"
ANNOTATION_RECORD = f"{GROUP}/record"


class Pool(StrEnum):
    """A set of pods that do the same work. The value is part of names and labels."""

    PREFILL = "prefill"
    DECODE = "decode"
    GATEWAY = "gateway"


def workload_name(service: str, pool: str, revision: str) -> str:
    """The Deployment of one pool and revision."""
    return f"{service}-{pool}-{revision}"


def gateway_name(service: str) -> str:
    """The gateway's Service, ServiceAccount, Role and RoleBinding."""
    return f"{service}-gateway"


def prefill_peers_name(service: str, target_revision: str) -> str:
    """The headless Service over the ready prefill pods of one target revision."""
    return f"{service}-prefill-{target_revision}"


def runtime_config_name(service: str) -> str:
    """The ConfigMap with the run-time state."""
    return f"{service}-runtime"


def disruption_budget_name(service: str, pool: str) -> str:
    return f"{service}-{pool}"


def network_policy_name(service: str, pool: str) -> str:
    return f"{service}-{pool}"


def pool_scaler_name(service: str, pool: str) -> str:
    """The PoolScaler of a pool in mode External."""
    return f"{service}-{pool}"


def pod_monitor_name(service: str) -> str:
    return service


def record_name(service: str, digest: str) -> str:
    """The ControllerRevision whose content has that digest."""
    return f"{service}-{digest}"


def is_derived_name(kind: str, name: str, service: str, labels: Mapping[str, str]) -> bool:
    """Whether an object of this kind, with these labels, would be called so. Anything else may be a copy.

    Pods are named by the cluster.
    """
    pool = labels.get(LABEL_POOL, "")
    match kind:
        case "Deployment":
            derived = workload_name(service, pool, labels.get(LABEL_REVISION, ""))
        case "NetworkPolicy":
            derived = network_policy_name(service, pool)
        case "PodDisruptionBudget":
            derived = disruption_budget_name(service, pool)
        case "PoolScaler":
            derived = pool_scaler_name(service, pool)
        case "PodMonitor":
            derived = pod_monitor_name(service)
        case "Service" if LABEL_TARGET_REVISION in labels:
            derived = prefill_peers_name(service, labels[LABEL_TARGET_REVISION])
        case _:
            return kind == "Pod" or name.startswith(f"{service}-")
    return name == derived


def selector(service: str, pool: Pool, *, revision: str | None = None, target_revision: str | None = None) -> Labels:
    """Labels to select pods by: only own keys, and never one that can change while the pod lives."""
    labels = {LABEL_SERVICE: service, LABEL_POOL: str(pool)}
    if revision is not None:
        labels[LABEL_REVISION] = revision
    if target_revision is not None:
        labels[LABEL_TARGET_REVISION] = target_revision
    return labels


def object_labels(service: str, pool: Pool | None = None) -> Labels:
    """Labels of an object that is no pod: the recommended ones, and those by which children are found."""
    labels = {
        "app.kubernetes.io/name": "speculative-service",
        "app.kubernetes.io/instance": service,
        "app.kubernetes.io/part-of": MANAGED_BY,
        LABEL_MANAGED_BY: MANAGED_BY,
        LABEL_SERVICE: service,
    }
    if pool is not None:
        labels |= {"app.kubernetes.io/component": str(pool), LABEL_POOL: str(pool)}
    return labels


def workload_labels(service: str, pool: Pool, *, revision: str, target_revision: str | None = None) -> Labels:
    """Labels of a workload and of its pods."""
    return object_labels(service, pool) | selector(service, pool, revision=revision, target_revision=target_revision)
