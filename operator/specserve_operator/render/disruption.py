"""How many pods of a pool may be taken away at once when nodes are drained."""

from specserve_operator.core.names import Pool, disruption_budget_name, object_labels, selector
from specserve_operator.core.objects import Manifest
from specserve_operator.render.metadata import Owner


def render_disruption_budget(owner: Owner, pool: Pool) -> Manifest:
    """One pod at a time, over all revisions of the pool. Pods that do not serve may always go."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": owner.metadata(disruption_budget_name(owner.name, pool), labels=object_labels(owner.name, pool)),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector(owner.name, pool)},
        },
    }
