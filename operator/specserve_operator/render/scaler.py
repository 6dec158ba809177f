"""The PoolScaler of a pool whose size others choose. Its `spec.replicas` is theirs: the operator only makes a start."""

from specserve_operator.constants import API_VERSION
from specserve_operator.core.names import Pool, object_labels, pool_scaler_name
from specserve_operator.core.objects import Manifest
from specserve_operator.core.plan import ScalerPlan
from specserve_operator.core.scalers import POOL_SCALER_KIND
from specserve_operator.render.metadata import Owner


def render_pool_scaler(owner: Owner, pool: Pool) -> Manifest:
    """All of it that the operator owns."""
    return {
        "apiVersion": API_VERSION,
        "kind": POOL_SCALER_KIND,
        "metadata": owner.metadata(pool_scaler_name(owner.name, pool), labels=object_labels(owner.name, pool)),
    }


def render_pool_scaler_seed(owner: Owner, scaler: ScalerPlan) -> Manifest:
    """The first number of a new one, which belongs to whoever writes it next."""
    return {
        "apiVersion": API_VERSION,
        "kind": POOL_SCALER_KIND,
        "metadata": {"name": pool_scaler_name(owner.name, scaler.pool), "namespace": owner.namespace},
        "spec": {"replicas": scaler.seed},
    }
