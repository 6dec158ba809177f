"""The record of what a service's pods are: a ControllerRevision, so that it is found where one looks for such."""

from specserve_operator.core.names import object_labels, record_name
from specserve_operator.core.objects import Manifest
from specserve_operator.core.pinning import Resolution, Resolved
from specserve_operator.core.records import PoolPin, record_data
from specserve_operator.core.revision import digest
from specserve_operator.render.metadata import Owner
from specserve_operator.render.workload import render_pod_template


def render_record(owner: Owner, resolution: Resolution) -> Manifest:
    """The record with the pod templates in full. Its name follows from its content, which nobody can change.

    Going back to what was recorded before gives the same record a new number.
    """
    if resolution.stored is not None:
        name, data = resolution.stored.ref.name, resolution.stored.data
    else:
        data = record_data({r.pool: _pin(owner, r) for r in resolution.pools}, resolution.upgrade)
        name = record_name(owner.name, digest(data))
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": owner.metadata(name, labels=object_labels(owner.name)),
        "revision": resolution.number,
        "data": data,
    }


def _pin(owner: Owner, resolved: Resolved) -> PoolPin:
    return PoolPin(
        inputs=resolved.inputs,
        target_inputs=resolved.target_inputs,
        revision=resolved.revision,
        target_revision=resolved.target_revision,
        image=resolved.image,
        max_draft_tokens=resolved.max_draft_tokens,
        identity_server=resolved.identity_server,
        template=render_pod_template(owner, resolved),
    )
