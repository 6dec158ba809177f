"""sigs.k8s.io/lws, an operator in Go of similar shape: an object becomes a workload, a Service and revisions."""

import base64
import subprocess
from pathlib import Path
from typing import Any

import yaml

from bench.scale.contestants import Contestant, Step, condition_of, namespace_of
from hack.kube.certificates import Authority
from hack.kube.commands import TOOLS, built, environment, installed
from hack.kube.control_plane import ControlPlane
from hack.kube.waiting import wait_until
from tests.cluster.api import Object
from tests.cluster.operator_process import free_ports, http_get

GROUP = "leaderworkerset.x-k8s.io"
NAMESPACE = "lws-system"
NAME_LABEL = "leaderworkerset.sigs.k8s.io/name"
START_SECONDS = 120.0


def module_folder() -> Path:
    """Where the sources of the version that is built are."""
    command = ["go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/lws"]
    done = subprocess.run(command, cwd=TOOLS / "lws", capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


class LeaderWorkerSet(Contestant):
    """One group of one pod, so that no pod has workers: with three groups each, a thousand take hours to be ready.

    Its webhooks answer, as its makers want it.
    """

    name = "lws"
    objects = (f"/apis/{GROUP}/v1", "leaderworkersets")
    children = ("/apis/apps/v1", "statefulsets")

    def __init__(self, control_plane: ControlPlane, folder: Path) -> None:
        folder.mkdir()
        self._control_plane = control_plane
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._health, self._webhook = free_ports(2)
        self._authority = Authority.create("lws-webhooks")
        self._authority.issue("lws", hosts=["127.0.0.1"]).write(folder, "tls")
        config = {
            "apiVersion": "config.lws.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "webhook": {"host": "127.0.0.1", "port": self._webhook, "certDir": str(folder)},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        sources = module_folder() / "config"
        control_plane.kubectl("create", "namespace", NAMESPACE)
        control_plane.kubectl("apply", "--server-side", "-f", str(sources / "crd" / "bases"))
        wait_until(lambda: control_plane.has("/".join(self.objects)), START_SECONDS, what="its kind is served")
        webhooks = yaml.safe_load_all((sources / "webhook" / "manifests.yaml").read_text())
        self._webhooks = yaml.safe_dump_all([self._reachable(document) for document in webhooks])

    def _reachable(self, configuration: dict[str, Any]) -> dict[str, Any]:
        """Webhooks at our process, and those for pods for its own pods only."""
        for webhook in configuration["webhooks"]:
            path = webhook["clientConfig"]["service"]["path"]
            webhook["clientConfig"] = {
                "url": f"https://127.0.0.1:{self._webhook}{path}",
                "caBundle": base64.b64encode(self._authority.certificate).decode(),
            }
            if path.endswith("-pod"):
                webhook["objectSelector"] = {"matchExpressions": [{"key": NAME_LABEL, "operator": "Exists"}]}
        configuration["metadata"]["name"] = "lws-" + configuration["metadata"]["name"]
        return configuration

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        command = [
            *(installed("setpriv"), "--pdeathsig=KILL", "--", built("lws-manager")),
            *("--config", str(self._folder / "config.yaml"), "--zap-devel=false"),
            "--metrics-bind-address=0",
            f"--health-probe-bind-address=127.0.0.1:{self._health}",
        ]
        variables = environment(KUBECONFIG=str(self._control_plane.kubeconfig))
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables)
        wait_until(lambda: http_get(self._health, "/readyz")[0] == 200, START_SECONDS, what="lws is ready")
        self._control_plane.kubectl("apply", "--server-side", "-f", "-", stdin=self._webhooks)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def manifest(self, number: int) -> Object:
        container = {"name": "engine", "image": "engine:1"}
        template = {"size": 1, "workerTemplate": {"spec": {"containers": [container]}}}
        return {
            "apiVersion": f"{GROUP}/v1",
            "kind": "LeaderWorkerSet",
            "metadata": {"name": f"set-{number}", "namespace": namespace_of(number)},
            "spec": {"replicas": 1, "leaderWorkerTemplate": template},
        }

    def scaled(self, number: int, round_: int) -> Step:
        replicas, name = 2 - round_ % 2, f"set-{number}"

        def is_so(child: Object) -> bool:
            return bool(child["metadata"]["name"] == name and child["spec"]["replicas"] == replicas)

        return {"spec": {"replicas": replicas}}, is_so

    def renewed(self, number: int, round_: int) -> Step:
        name, variable = f"set-{number}", {"name": "ROUND", "value": str(round_)}
        container = {"name": "engine", "image": "engine:1", "env": [variable]}

        def is_so(child: Object) -> bool:
            (found,) = child["spec"]["template"]["spec"]["containers"]
            return child["metadata"]["name"] == name and variable in (found.get("env") or ())

        patch = {"workerTemplate": {"spec": {"containers": [container]}}}
        return {"spec": {"leaderWorkerTemplate": patch}}, is_so

    def is_settled(self, obj: Object) -> bool:
        status, replicas = obj.get("status") or {}, obj["spec"]["replicas"]
        is_available = condition_of(obj, "Available").get("status") == "True"
        return is_available and status.get("readyReplicas") == status.get("updatedReplicas") == replicas
