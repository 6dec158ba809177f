"""Names shared by everything the operator writes: group, labels, ports. Part of the API: never reuse a key."""

from typing import Final

GROUP: Final = "specserve.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
FIELD_MANAGER: Final = "specserve"

LABEL_SERVICE: Final = f"{GROUP}/service"
LABEL_POOL: Final = f"{GROUP}/pool"
# Hash of everything in the pod template: names the workload. Differs per pool.
LABEL_REVISION: Final = f"{GROUP}/revision"
# Hash of what decides the KV cache's content (model, engine flags, image): pods pair only within one.
LABEL_TARGET_REVISION: Final = f"{GROUP}/target-revision"
ANNOTATION_SPEC_HASH: Final = f"{GROUP}/spec-hash"
# On a workload: how many replicas its whole pool is to have, over all revisions.
ANNOTATION_POOL_REPLICAS: Final = f"{GROUP}/pool-replicas"
MANAGED_BY: Final = "specserve"

ENGINE_CONTAINER: Final = "engine"
GATEWAY_CONTAINER: Final = "gateway"

PORT_HTTP: Final = 8000
PORT_CONTROL: Final = 9000
PORT_KV: Final = 9100  # plus the tensor-parallel rank
PORT_GATEWAY_METRICS: Final = 29000

RUNTIME_MOUNT: Final = "/etc/specserve/runtime"
RUNTIME_FILE: Final = "state.json"
