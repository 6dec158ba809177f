"""What is to hold at every moment of a rollout, counted from every change of a pod."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.cluster.api import Object
from tests.cluster.fake_kubelet import POOL_LABEL
from tests.cluster.mirror import is_ready_pod
from tests.cluster.site import SERVICE_LABEL, Tenant, revision_of, service

TARGET_LABEL = "specserve.dev/target-revision"
SERVING = ("prefill", "decode")
POOLS = (*SERVING, "gateway")


@dataclass(frozen=True, slots=True)
class Moment:
    """The pods of a service after one change of one of them."""

    pods: tuple[Object, ...]

    def ready(self, pool: str, *, target: str | None = None) -> int:
        """Pods of `pool` that serve, and are not on their way out."""
        return sum(is_ready_pod(pod) for pod in self._of(pool) if target in (None, _label(pod, TARGET_LABEL)))

    def targets(self, pool: str) -> set[str]:
        """Target revisions of the pods of `pool` that serve."""
        return {_label(pod, TARGET_LABEL) for pod in self._of(pool) if is_ready_pod(pod)}

    def _of(self, pool: str) -> list[Object]:
        return [pod for pod in self.pods if _label(pod, POOL_LABEL) == pool]


def moments(tenant: Tenant, since: int, name: str = "coder") -> Iterator[Moment]:
    """Every state that the pods of a service were in, from the change of number `since` on."""
    pods: dict[str, Object] = {}
    for change in tenant.history("pods"):
        if _label(change.obj, SERVICE_LABEL) != name:
            continue
        if change.type == "DELETED":
            pods.pop(change.name, None)
        else:
            pods[change.name] = change.obj
        if change.number >= since:
            yield Moment(tuple(pods.values()))


def lowest_ready(tenant: Tenant, pool: str, since: int) -> int:
    """The fewest serving pods that a pool had since then."""
    return min((moment.ready(pool) for moment in moments(tenant, since)), default=len(tenant.ready_pods(pool)))


def most_wanted(tenant: Tenant, pool: str, since: int) -> int:
    """The most pods that the Deployments of a pool were told to have together since then.

    As with any Deployment, pods that are told to go may take a moment to.
    """
    wanted: dict[str, int] = {}
    most = 0
    for change in tenant.history("deployments"):
        if _label(change.obj, POOL_LABEL) == pool:
            wanted[change.name] = 0 if change.type == "DELETED" else change.obj["spec"]["replicas"]
        if change.number >= since:
            most = max(most, sum(wanted.values()))
    return most


def lonely_decode_targets(tenant: Tenant, since: int) -> set[str]:
    """Target revisions of which decode pods served at some moment when no prefill pod did."""
    return {
        target
        for moment in moments(tenant, since)
        for target in moment.targets("decode")
        if not moment.ready("prefill", target=target)
    }


def start(tenant: Tenant, **spec: Any) -> int:
    """Applies a service, waits until it is ready, and returns the number of the next change."""
    tenant.apply(service(**spec))
    tenant.wait_ready()
    return tenant.mirror.mark()


def change_image(tenant: Tenant, image: str) -> None:
    """Starts a rollout of both serving pools."""
    tenant.change(engine={"image": image})


def wait_served_by(tenant: Tenant, image: str, *, timeout_seconds: float = 120.0) -> None:
    """Returns when the rollout to an image is over and nothing of what was before is left."""
    tenant.wait_ready(timeout_seconds=timeout_seconds)

    def is_clean() -> bool:
        own = {SERVICE_LABEL: "coder"}
        pods = [pod for pod in tenant.mirror.find("pods", tenant.namespace, own) if _label(pod, POOL_LABEL) in SERVING]
        images = {pod["spec"]["containers"][0]["image"] for pod in pods}
        return images == {image} and len(tenant.mirror.find("deployments", tenant.namespace, own)) == len(POOLS)

    tenant.wait(is_clean, what=f"only pods with image {image} are left", timeout_seconds=timeout_seconds)


def is_turned(tenant: Tenant, image: str, pool: str = "decode") -> bool:
    """True once a pod of `pool` with the image serves."""
    return any(pod["spec"]["containers"][0]["image"] == image for pod in tenant.ready_pods(pool))


def counts(tenant: Tenant) -> dict[str, int]:
    """Pods of each pool, of its one revision."""
    return {pool: len(tenant.pods(pool, revision=revision_of(tenant.deployment(pool)))) for pool in POOLS}


def _label(pod: Object, key: str) -> str:
    return str((pod["metadata"].get("labels") or {}).get(key, ""))
