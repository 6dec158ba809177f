"""What decides about every service and is not in any of them. Read from the environment or flags by the shell."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OperatorConfig:
    """The operator's own settings.

    `default_engine_image` is used where `spec.engine.image` is absent.
    `local`: pods are processes on this machine: they share its file system, so nothing is mounted over its folders.
    `stats_window_seconds`: the time that the latencies in `PodStats` cover; shown in the status.
    `network_policies`, `pod_monitors`: whether such objects are made. `operator_namespace`: where the operator runs.
    `identity_server`: HOST:PORT at which pods get their certificates; None: nobody gives any.
    `trust_bundle`: PEM of the authorities that pods are to trust now. It changes while the operator runs.
    """

    default_engine_image: str
    gateway_image: str
    operator_version: str
    local: bool = False
    stats_window_seconds: int = 300
    network_policies: bool = True
    operator_namespace: str = ""
    pod_monitors: bool = False
    identity_server: str | None = None
    trust_bundle: str = ""
