"""The operator as a process of its own, with the rights of a ServiceAccount that has exactly the chart's roles."""

import functools
import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from hack.kube.access import Access
from hack.kube.commands import built, environment, installed
from hack.kube.errors import log_tail
from hack.kube.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "specserve"
NAMESPACE = "specserve-system"
ACCOUNT = "specserve-operator"
ENGINE_IMAGE, GATEWAY_IMAGE = "engine:1", "gateway:1"

START_SECONDS = 60.0
STOP_SECONDS = 40.0
_RULES = ("rbac/operator.yaml", "rbac/own-namespace.yaml")
_OWN_OBJECTS = ("serviceaccount.yaml", "identity-secret.yaml")
_HTTP_SECONDS = 5.0


def user_name(namespace: str = NAMESPACE, account: str = ACCOUNT) -> str:
    """How the API server, and its audit log, call a ServiceAccount."""
    return f"system:serviceaccount:{namespace}:{account}"


@functools.cache
def chart_documents(
    templates: tuple[str, ...],
    watched: tuple[str, ...] = (),
    namespace: str = NAMESPACE,
    *,
    leader_election: bool = False,
) -> tuple[dict[str, Any], ...]:
    """Objects that the chart makes from `templates` when it is installed in `namespace`."""
    values = ["--set", f"watch.namespaces={{{','.join(watched)}}}"] if watched else []
    values += ["--set", "leaderElection.enabled=true"] if leader_election else []
    shown = [part for template in templates for part in ("--show-only", f"templates/{template}")]
    command = [built("helm"), "template", "specserve", str(CHART), "--namespace", namespace, "--kube-version=1.34.0"]
    done = subprocess.run([*command, *shown, *values], capture_output=True, text=True, check=True, env=environment())
    return tuple(document for document in yaml.safe_load_all(done.stdout) if document)


def chart_rules(
    watched: tuple[str, ...] = (), namespace: str = NAMESPACE, *, leader_election: bool = False
) -> tuple[dict[str, Any], ...]:
    """The roles and bindings that the chart gives to an operator in `namespace`, for the whole cluster or a part."""
    return chart_documents(_RULES, watched, namespace, leader_election=leader_election)


def chart_flags(
    watched: tuple[str, ...] = (), namespace: str = NAMESPACE, *, leader_election: bool = False
) -> list[str]:
    """The command line with which the chart starts the operator."""
    return list(_chart_container(watched, namespace, leader_election=leader_election)["args"])


def chart_variables() -> dict[str, str]:
    """What the chart sets in the operator's environment, but for what is different in every pod."""
    variables = _chart_container((), NAMESPACE, leader_election=False)["env"]
    return {variable["name"]: variable["value"] for variable in variables if "value" in variable}


def _chart_container(watched: tuple[str, ...], namespace: str, *, leader_election: bool) -> dict[str, Any]:
    (deployment,) = chart_documents(("deployment.yaml",), watched, namespace, leader_election=leader_election)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(container)


def install_rules(
    access: Access, watched: Sequence[str] = (), namespace: str = NAMESPACE, *, leader_election: bool = False
) -> Path:
    """Makes what the chart makes for an operator, but for the process. Returns a kubeconfig of its account."""
    home = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    own = chart_documents(_OWN_OBJECTS, tuple(watched), namespace)
    rules = chart_rules(tuple(watched), namespace, leader_election=leader_election)
    text = yaml.safe_dump_all([home, *own, *rules])
    access.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]
    return access.kubeconfig_for(user_name(namespace), groups)


@dataclass(frozen=True, slots=True)
class OperatorOptions:
    """Flags and environment of an operator. `pod_name`: its identity, also in the leader election."""

    namespace: str = NAMESPACE
    watched: tuple[str, ...] = ()
    engine_image: str = ENGINE_IMAGE
    gateway_image: str = GATEWAY_IMAGE
    leader_election: bool = False
    pod_name: str = "specserve-operator-0"
    more: tuple[str, ...] = ()

    def flags(self, *, health_port: int, metrics_port: int, identity_port: int) -> list[str]:
        """Those of the chart, and what is different here: of a flag that is given twice, the last counts."""
        flags = [
            *chart_flags(self.watched, self.namespace, leader_election=self.leader_election),
            *("--default-engine-image", self.engine_image),
            *("--gateway-image", self.gateway_image),
            *("--health-port", str(health_port)),
            *("--metrics-port", str(metrics_port)),
            *("--identity-port", str(identity_port)),
            *("--log-format", "text"),
        ]
        return flags + list(self.more)


class OperatorProcess:
    """One operator process at a time, started, stopped and killed at will. A context manager that ends it.

    Its log goes to one file over all starts.
    """

    def __init__(self, kubeconfig: Path, log: Path, options: OperatorOptions | None = None) -> None:
        self.options = options or OperatorOptions()
        self.log_file = log
        self._kubeconfig = kubeconfig
        self._process: subprocess.Popen[bytes] | None = None
        # Pods are told where certificates come from: with another port, a restart would be an upgrade.
        self._health_port, self._metrics_port, self._identity_port = free_ports(3)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_running:
            self.kill()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *, wait: bool = True) -> None:
        """Starts it; with `wait`, returns when it is ready. Raises AssertionError with the log if it ends instead."""
        assert not self.is_running, "the operator runs already"
        flags = self.options.flags(
            health_port=self._health_port, metrics_port=self._metrics_port, identity_port=self._identity_port
        )
        with self.log_file.open("ab") as log:
            # The kernel kills it when this test run dies.
            command = [installed("setpriv"), "--pdeathsig=KILL", "--", sys.executable, "-m", "specserve_operator"]
            self._process = subprocess.Popen(
                [*command, *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment()
            )
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Returns when the operator says that it is ready."""
        try:
            wait_until(self._is_ready, START_SECONDS, what="the operator is ready")
        except Exception as error:
            error.add_note(f"end of the operator's log:\n{log_tail(self.log_file, 40)}")
            raise

    def _is_ready(self) -> bool:
        assert self.is_running, f"the operator has ended:\n{log_tail(self.log_file, 40)}"
        return self.probe("/readyz")[0] == 200

    def _environment(self) -> Mapping[str, str]:
        source = ":".join(str(ROOT / folder) for folder in ("operator", "workers", "protos"))
        return environment(
            **chart_variables(),
            KUBECONFIG=str(self._kubeconfig),
            PYTHONPATH=source,
            POD_NAME=self.options.pod_name,
            POD_NAMESPACE=self.options.namespace,
            POD_IP="127.0.0.1",
        )

    def stop(self) -> int:
        """Asks it to end, as Kubernetes does, and returns its exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(STOP_SECONDS)

    def kill(self) -> None:
        """Kills it in the middle of whatever it does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_SECONDS)

    def restart(self) -> None:
        """Kills it and starts it anew."""
        self.kill()
        self.start()

    def wait_ended(self, timeout_seconds: float = STOP_SECONDS) -> int:
        """The exit code of a process that ends by itself."""
        assert self._process is not None
        return self._process.wait(timeout_seconds)

    def freeze(self) -> None:
        """Stops it from running at all, without ending it."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def probe(self, path: str) -> tuple[int, str]:
        """Status and text of `/healthz` or `/readyz`; status 0 if nothing answers."""
        return http_get(self._health_port, path)

    def metrics(self) -> dict[str, float]:
        """All samples, by name with labels as they are written."""
        status, text = http_get(self._metrics_port, "/metrics")
        assert status == 200, text
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    def log(self) -> str:
        """Everything that it has said so far, over all starts."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""


def free_ports(count: int) -> Sequence[int]:
    """So many ports that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [opened.getsockname()[1] for opened in sockets]
    finally:
        for opened in sockets:
            opened.close()


def tracebacks(log: str) -> Iterable[str]:
    """Tracebacks in a log, each with the ten lines around its start."""
    lines = log.splitlines()
    return [
        "\n".join(lines[max(i - 2, 0) : i + 40]) for i, line in enumerate(lines) if line.startswith("Traceback (most")
    ]


def http_get(port: int, path: str) -> tuple[int, str]:
    """Status and text of an answer; status 0, and the error, if there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_HTTP_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
    finally:
        connection.close()
