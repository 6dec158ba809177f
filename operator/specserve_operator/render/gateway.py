"""The pod of the gateway: vllm-router in regular mode over the decode pods, which it finds by their labels.

Whoever reaches the router's own port can add and remove workers. So it is a child of our guard, which has the port of
the pod and passes the API on.
"""

from typing import Any

from specserve_operator.constants import GATEWAY_CONTAINER, PORT_GATEWAY_METRICS, PORT_HTTP
from specserve_operator.core.launch import GatewayLaunch
from specserve_operator.core.names import Pool, gateway_name, selector
from specserve_operator.render.pod import (
    TERMINATION_MARGIN_SECONDS,
    container_security_context,
    field_env,
    http_probe,
    pod_security_context,
    port,
)

# A request may take this long in all. Longer than any drain, so the drain decides.
REQUEST_TIMEOUT_SECONDS = 1800
# The router counts tries, not retries: a request is tried on at most two pods, since it may be what kills them.
TRIES = 2
# Before the second try: sooner, it may go to the same dead pod again. Long enough for a pod whose end the kubelet sees;
# a node that is lost is noticed by the router's own checks only, after HEALTH_CHECKS of them.
RETRY_DELAY_MILLISECONDS = 1500
HEALTH_CHECKS = 2
# What pods take (workers, `FrontendSettings`).
MAX_BODY_BYTES = 64 << 20
# Until every node has heard that the pod is leaving, new connections still arrive.
STOP_DELAY_SECONDS = 5


def render_gateway_pod(launch: GatewayLaunch) -> dict[str, Any]:
    """The `spec` of the pod template, before the user's template is merged in."""
    container: dict[str, Any] = {
        "name": GATEWAY_CONTAINER,
        "image": launch.image,
        "command": ["python", "-m", "specserve_workers.gateway"],
        "args": ["--host", "$(POD_IP)", "--http-port", str(PORT_HTTP), "--", *router_flags(launch)],
        "env": [field_env("POD_IP", "status.podIP")],
        "ports": [port("http", PORT_HTTP), port("metrics", PORT_GATEWAY_METRICS)],
        "startupProbe": http_probe("/liveness", period_seconds=2, timeout_seconds=5, failures=60),
        # Ready while it has a healthy decode pod.
        "readinessProbe": http_probe("/readiness", period_seconds=2, timeout_seconds=5, failures=3),
        "livenessProbe": http_probe("/liveness", period_seconds=10, timeout_seconds=10, failures=6),
        "lifecycle": {"preStop": {"sleep": {"seconds": STOP_DELAY_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": container_security_context(),
    }
    pod: dict[str, Any] = {
        "serviceAccountName": gateway_name(launch.service),
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": (
            launch.drain_timeout_seconds + STOP_DELAY_SECONDS + TERMINATION_MARGIN_SECONDS
        ),
        "securityContext": pod_security_context(),
        "containers": [container],
    }
    if not launch.local:
        container["volumeMounts"] = [{"name": "tmp", "mountPath": "/tmp"}]
        pod["volumes"] = [{"name": "tmp", "emptyDir": {}}]
    return pod


def router_flags(launch: GatewayLaunch) -> list[str]:
    """Arguments of `vllm-router`, apart from its address; `$(POD_IP)` is for the kubelet to fill in."""
    decode_labels = selector(launch.service, Pool.DECODE)
    return [
        # Of the policies of this router it is the only one whose second try goes to another pod. The cache-aware one
        # repeats the try on the same pod and asks every pod to tokenize every prompt; the power-of-two one does not
        # start before there are two pods.
        *("--policy", "round_robin"),
        *("--service-discovery", "--selector", *(f"{key}={value}" for key, value in decode_labels.items())),
        *("--service-discovery-port", str(PORT_HTTP)),
        *("--service-discovery-namespace", launch.namespace),
        *("--prometheus-host", "$(POD_IP)"),
        *("--prometheus-port", str(PORT_GATEWAY_METRICS)),
        *("--health-check-endpoint", "/ready"),
        *("--health-check-interval-secs", "2"),
        *("--health-failure-threshold", str(HEALTH_CHECKS)),
        *("--health-success-threshold", "1"),
        *("--retry-max-retries", str(TRIES)),
        *("--retry-initial-backoff-ms", str(RETRY_DELAY_MILLISECONDS)),
        *("--retry-max-backoff-ms", str(RETRY_DELAY_MILLISECONDS)),
        *("--retry-jitter-factor", "0"),
        # It counts a pod's answers, not its health: five requests that a pod answers with 500 would take that pod from
        # everyone for a minute, and one client could so take them all. Probes and discovery find the dead ones.
        "--disable-circuit-breaker",
        *("--request-timeout-secs", str(REQUEST_TIMEOUT_SECONDS)),
        # The router holds a body in memory until it is whole; it would take eight times as much.
        *("--max-payload-size", str(MAX_BODY_BYTES)),
    ]
