"""The ConfigMap that every serving pod mounts: what may change while it runs."""

from specserve_operator.constants import RUNTIME_FILE
from specserve_operator.core.names import object_labels, runtime_config_name
from specserve_operator.core.objects import Manifest
from specserve_operator.core.runtime_state import RuntimeState
from specserve_operator.render.metadata import Owner


def render_runtime_config(owner: Owner, state: RuntimeState) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": owner.metadata(runtime_config_name(owner.name), labels=object_labels(owner.name)),
        "data": {RUNTIME_FILE: state.to_json()},
    }
