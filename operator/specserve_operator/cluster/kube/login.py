"""Where the API server is and who we are: in a pod its ServiceAccount, elsewhere a kubeconfig file."""

import os
from pathlib import Path

from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from specserve_operator.cluster.protocol import ClusterError

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def is_in_cluster() -> bool:
    """True in a pod that was given its ServiceAccount's token."""
    return "KUBERNETES_SERVICE_HOST" in os.environ and (_ACCOUNT / "token").exists()


async def load_configuration() -> Configuration:
    """The client's settings. A token that the kubelet renews is read again when it has to be. Raises `ClusterError`."""
    configuration = Configuration()
    try:
        if is_in_cluster():
            load_incluster_config(client_configuration=configuration)
        else:
            await load_kube_config(client_configuration=configuration)
    except (ConfigException, OSError) as error:
        raise ClusterError(
            f"no way to the API server: not in a pod with a ServiceAccount, and no usable kubeconfig ({error})",
            retryable=False,
        ) from error
    return configuration
