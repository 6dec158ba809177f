"""All objects of a service, in the order of application: what pods refer to comes before the pods."""

from specserve_operator.core.names import Pool
from specserve_operator.core.objects import Manifest
from specserve_operator.core.plan import Plan, needs_disruption_budget
from specserve_operator.render.access import render_gateway_access
from specserve_operator.render.disruption import render_disruption_budget
from specserve_operator.render.metadata import Owner, stamp
from specserve_operator.render.network import render_gateway_service, render_prefill_peers
from specserve_operator.render.runtime_config import render_runtime_config
from specserve_operator.render.workload import render_old_workload, render_workload


def render(plan: Plan) -> list[Manifest]:
    """Every object that the plan wants applied; none while the spec has problems.

    An old revision's workload is among them only where its replicas change. Each object carries the hash of what is
    rendered here, so that one that is equal can be told without asking the cluster.
    """
    if not plan.pools:
        return []
    owner = Owner.of(plan.service)
    objects = [*render_gateway_access(owner), render_runtime_config(owner, plan.runtime_state)]
    for pool in plan.pools:
        if pool.pool is Pool.PREFILL and pool.current.target_revision is not None:
            objects.append(render_prefill_peers(owner, pool.current.target_revision))
    objects.append(render_gateway_service(owner, plan.service.spec.gateway.port))
    for pool in plan.pools:
        objects.append(render_workload(owner, pool.current, rollout=plan.service.spec.rollout))
        objects += [render_old_workload(old) for old in pool.old if old.replicas != old.live_replicas]
        if needs_disruption_budget(pool):
            objects.append(render_disruption_budget(owner, pool.pool))
    return [stamp(obj) for obj in objects]
