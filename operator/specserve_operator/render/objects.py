"""All objects of a service."""

from specserve_operator.core.launch import has_certificates
from specserve_operator.core.names import Pool
from specserve_operator.core.objects import Manifest
from specserve_operator.core.plan import Plan, has_network_policies, needs_disruption_budget
from specserve_operator.render.access import render_gateway_access
from specserve_operator.render.disruption import render_disruption_budget
from specserve_operator.render.isolation import render_network_policy
from specserve_operator.render.metadata import Owner, stamp
from specserve_operator.render.monitoring import render_pod_monitor
from specserve_operator.render.network import render_gateway_service, render_prefill_peers
from specserve_operator.render.record import render_record
from specserve_operator.render.runtime_config import render_runtime_config
from specserve_operator.render.scaler import render_pool_scaler, render_pool_scaler_seed
from specserve_operator.render.trust import render_trust
from specserve_operator.render.workload import render_old_workload, render_workload


def render(plan: Plan) -> list[Manifest]:
    """Every object that the plan wants applied; while the spec has problems, only what running pods cannot do without.

    An old revision's workload is among them only where its replicas change. Each object carries the hash of what is
    rendered here, so that one that is equal can be told without asking the cluster.
    """
    owner, objects = Owner.of(plan.service), list[Manifest]()
    if plan.config.trust_bundle and has_certificates(plan.service, plan.config):
        objects.append(render_trust(owner, plan.config.trust_bundle))
    if plan.resolution is None:
        return [stamp(obj) for obj in objects]
    objects += [*render_gateway_access(owner), render_runtime_config(owner, plan.runtime_state)]
    if has_network_policies(plan.config):
        objects += [render_network_policy(owner, pool.pool, plan.config) for pool in plan.pools]
    for pool in plan.pools:
        if pool.pool is Pool.PREFILL and pool.current.target_revision is not None:
            objects.append(render_prefill_peers(owner, pool.current.target_revision))
    objects.append(render_gateway_service(owner, plan.service.spec.gateway.port))
    objects += [render_pool_scaler(owner, scaler.pool) for scaler in plan.scalers]
    objects.append(render_record(owner, plan.resolution))
    for pool in plan.pools:
        objects.append(
            render_workload(owner, pool.current, resolution=plan.resolution, rollout=plan.service.spec.rollout)
        )
        objects += [render_old_workload(old) for old in pool.old if old.replicas != old.live_replicas]
        if needs_disruption_budget(pool):
            objects.append(render_disruption_budget(owner, pool.pool))
    if plan.config.pod_monitors:
        objects.append(render_pod_monitor(owner))
    return [stamp(obj) for obj in objects]


def render_seeds(plan: Plan) -> list[Manifest]:
    """Objects to be made before all others, where there are none, by another field manager: the fields are not ours."""
    owner = Owner.of(plan.service)
    return [render_pool_scaler_seed(owner, scaler) for scaler in plan.scalers if scaler.seed is not None]
