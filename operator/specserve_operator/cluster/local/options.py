"""What can be set about a local cluster. Kubernetes' own defaults apply to everything that is not here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Times in seconds. The restart back-off is shorter than on Kubernetes (10 s to 5 min): nobody shares this node.

    `resume`: keep the services of an earlier run of the same state directory; otherwise start empty.
    `listen_host`: where ClusterIP Services listen.
    `shutdown_seconds`: how long leaving the cluster waits for pods to end gracefully before it kills them.
    `orphan_grace_seconds`: from SIGTERM to SIGKILL for containers whose control plane was killed.
    `linger_seconds`: how long children of a container may outlive its main process, to remove what they share.
    `log_limit_bytes`: a larger log of a running container is moved to its `previous` log.
    """

    resume: bool = False
    listen_host: str = "127.0.0.1"
    shutdown_seconds: float = 30.0
    restart_backoff_seconds: float = 1.0
    restart_backoff_max_seconds: float = 60.0
    restart_backoff_reset_seconds: float = 600.0
    orphan_grace_seconds: float = 5.0
    linger_seconds: float = 1.0
    log_limit_bytes: int = 64 * 1024 * 1024
    kept_pod_logs: int = 50
