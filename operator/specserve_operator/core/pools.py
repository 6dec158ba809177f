"""How far each pool is from what the plan wants, counted from its pods."""

from dataclasses import dataclass

from specserve_operator.api.conditions import Reason
from specserve_operator.api.status import PoolStatus
from specserve_operator.core.diagnosis import Finding, diagnose_pool
from specserve_operator.core.names import Pool
from specserve_operator.core.plan import PoolPlan
from specserve_operator.core.snapshot import Snapshot

# Nothing is wrong yet: a rollout in progress says more than these.
_TRANSIENT = {Reason.MODEL_LOADING, Reason.PODS_NOT_READY}


@dataclass(frozen=True, slots=True)
class PoolState:
    """Pods of a pool that are not on their way out. `updated_ready`: of the wanted revision and serving.

    `updated_young`: those of them that have not been ready for long enough yet.
    """

    pool: Pool
    desired: int
    replicas: int
    ready: int
    updated: int
    updated_ready: int
    updated_young: int
    revision: str
    is_pending: bool
    finding: Finding | None

    @property
    def is_complete(self) -> bool:
        """Exactly the wanted pods, all of the wanted revision, all serving."""
        return self.desired == self.replicas == self.ready == self.updated

    @property
    def reason(self) -> Reason:
        """Why the pool is, or is not, as wanted."""
        if self.is_complete:
            return Reason.PODS_READY if self.desired else Reason.SCALED_TO_ZERO
        if self.is_pending:
            return Reason.PENDING
        if self.finding is not None and self.finding.reason not in _TRANSIENT:
            return self.finding.reason
        if self.updated_ready >= self.desired:
            return Reason.DRAINING
        if self.replicas > self.updated:
            return Reason.ROLLOUT_IN_PROGRESS
        return self.finding.reason if self.finding is not None else Reason.PODS_NOT_READY

    @property
    def message(self) -> str:
        """A sentence with the counts, and the finding if there is one."""
        if self.is_pending:
            return "no pods have been made yet"
        counts = f"{self.ready} of {self.desired} pods are ready"
        if self.replicas > self.updated:
            counts += f", {self.updated} of the new revision"
        if self.replicas > self.desired and self.updated_ready >= self.desired:
            counts += f", {self.replicas - self.desired} to be removed"
        return counts if self.finding is None else f"{counts}: {self.finding.message}"

    def to_status(self) -> PoolStatus:
        return PoolStatus(
            name=str(self.pool),
            desired=self.desired,
            replicas=self.replicas,
            ready=self.ready,
            updated=self.updated,
            revision=self.revision,
            reason=self.reason,
            message=None if self.is_complete else self.message,
        )


def compute_pool_state(snapshot: Snapshot, plan: PoolPlan) -> PoolState:
    """The state of one pool against its plan."""
    revision = plan.current.revision
    pods = [p for p in snapshot.pool_pods(plan.pool) if p.is_active]
    updated = [p for p in pods if p.revision == revision]
    workloads = snapshot.pool_workloads(plan.pool)
    return PoolState(
        pool=plan.pool,
        desired=plan.desired,
        replicas=len(pods),
        ready=sum(p.ready for p in pods),
        updated=len(updated),
        updated_ready=sum(p.ready for p in updated),
        updated_young=sum(snapshot.seconds_to_available(p) > 0 for p in updated),
        revision=revision,
        is_pending=plan.desired > 0 and not workloads,
        finding=diagnose_pool([w for w in workloads if w.revision == revision], updated),
    )
