"""How long a pool has been getting nowhere."""

from datetime import datetime, timedelta

from specserve_operator.core.snapshot import Snapshot


def last_progress(snapshot: Snapshot, pool: str, *, since: datetime | None = None) -> datetime:
    """When a workload or pod of `pool` last came to be, or a pod last got ready to stay so; not before `since`.

    With nothing to go by it is now: a rollout that is just beginning.
    """
    workloads, pods = snapshot.pool_workloads(pool), snapshot.pool_pods(pool)
    times = [since, *(w.created for w in workloads), *(p.created for p in pods)]
    times += [p.ready_changed for p in pods if snapshot.is_available(p)]
    return max((t for t in times if t is not None), default=snapshot.now)


def deadline_seconds(snapshot: Snapshot, pool: str, *, since: datetime | None = None) -> float:
    """Seconds until the pool's rollout counts as stalled; 0 or less if it does."""
    limit = timedelta(seconds=snapshot.service.spec.rollout.progress_deadline_seconds)
    return (last_progress(snapshot, pool, since=since) + limit - snapshot.now).total_seconds()
