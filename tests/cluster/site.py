"""A cluster with an operator, and a namespace in it: what most tests of the operator stand on."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

from hack.kube.control_plane import ControlPlane
from tests.cluster.api import Api, BackgroundLoop, Object, RefusedError
from tests.cluster.fake_kubelet import POOL_LABEL, REVISION_LABEL, Behaviour, FakeKubelet
from tests.cluster.mirror import Change, Mirror, condition_of, is_ready_pod
from tests.cluster.operator_process import OperatorOptions, OperatorProcess, install_rules, user_name
from tests.cluster.proxy import Proxy
from tests.cluster.writes import WriteLog

T = TypeVar("T")

SERVICE_LABEL = "specserve.dev/service"
# Everything that the operator makes, and the pods that follow from it.
CHILDREN = (
    *("configmaps", "controllerrevisions", "deployments", "networkpolicies", "poddisruptionbudgets", "poolscalers"),
    *("rolebindings", "roles", "serviceaccounts", "services"),
)
LONG_SECONDS = 60.0
QUIET_SECONDS = 4.0


class Site:
    """One control plane with everything that tests put beside it. A context manager; the operator starts on demand.

    `behind_proxy`: the operator reaches the API server through `proxy`, which can be disturbed.
    """

    proxy: Proxy

    def __init__(
        self,
        control_plane: ControlPlane,
        folder: Path,
        *,
        options: OperatorOptions | None = None,
        behind_proxy: bool = False,
    ) -> None:
        self.control_plane = control_plane
        self._folder = folder
        self._options = options or OperatorOptions()
        self._behind_proxy = behind_proxy
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            background = stack.enter_context(BackgroundLoop())
            self.api = Api(self.control_plane, background)
            stack.callback(self.api.close)
            self.mirror = stack.enter_context(Mirror(self.api, background))
            self.kubelet = stack.enter_context(FakeKubelet(self.api, self.mirror, background))
            kubeconfig = install_rules(
                self.control_plane, self._options.watched, leader_election=self._options.leader_election
            )
            if self._behind_proxy:
                self.proxy = stack.enter_context(Proxy(self.control_plane.layout.address, background))
                kubeconfig = self.proxy.redirect(kubeconfig, self.control_plane.server)
            self.operator = stack.enter_context(
                OperatorProcess(kubeconfig, self._folder / "operator.log", self._options)
            )
            self.writes = WriteLog(self.control_plane, user_name())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def new_namespace(self, name: str) -> "Tenant":
        self.api.create("namespaces", None, {"metadata": {"name": name}})
        return Tenant(self, name)


def service(name: str = "coder", **spec: Any) -> Object:
    """A small disaggregated service: one prefill pod, two decode pods. `spec` replaces whole fields."""
    fields = {
        "model": {"uri": "file:///models/target"},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 2},
    } | spec
    return {
        "apiVersion": "specserve.dev/v1alpha1",
        "kind": "SpeculativeService",
        "metadata": {"name": name},
        "spec": {key: value for key, value in fields.items() if value is not None},
    }


class Tenant:
    """A namespace and what a test does in it. Reads are the mirror's."""

    def __init__(self, site: Site, namespace: str) -> None:
        self.site = site
        self.namespace = namespace
        self.api, self.mirror = site.api, site.mirror

    # Services

    def apply(self, manifest: Object) -> Object:
        """Creates a service, or changes it, as `kubectl apply --server-side` does."""
        return self.api.apply("speculativeservices", self.namespace, manifest)

    def change(self, name: str = "coder", **spec: Any) -> Object:
        """Changes fields of a service's spec."""
        return self.api.patch("speculativeservices", self.namespace, name, {"spec": spec})

    def delete(self, name: str = "coder", *, propagation: str = "Background") -> None:
        self.api.delete("speculativeservices", self.namespace, name, propagation=propagation)

    def service(self, name: str = "coder") -> Object | None:
        return self.mirror.get("speculativeservices", self.namespace, name)

    def status(self, name: str = "coder") -> dict[str, Any]:
        """Its status; empty while it has none."""
        return dict((self.service(name) or {}).get("status") or {})

    def condition(self, type_: str = "Ready", name: str = "coder") -> dict[str, Any]:
        """A condition that is about the newest spec; empty while there is none."""
        obj = self.service(name)
        found = condition_of(obj, type_)
        is_current = obj is not None and found.get("observedGeneration") == obj["metadata"]["generation"]
        return found if is_current else {}

    def pool(self, pool: str, name: str = "coder") -> dict[str, Any]:
        """What the status says of a pool; empty if nothing."""
        return next((dict(p) for p in self.status(name).get("pools") or () if p["name"] == pool), {})

    def wait_ready(self, name: str = "coder", *, timeout_seconds: float = LONG_SECONDS) -> Object:
        """Returns when the service is ready with no pod or object left over from before."""

        def is_ready() -> bool:
            return self.condition("Ready", name).get("status") == "True" and (
                self.condition("Progressing", name).get("reason") == "RolloutComplete"
            )

        self.wait(is_ready, what=f"service {name} is ready", timeout_seconds=timeout_seconds)
        found = self.service(name)
        assert found is not None
        return found

    def wait_reason(self, reason: str, *, type_: str = "Ready", name: str = "coder") -> dict[str, Any]:
        """Returns the condition when it has this reason."""
        what = f"condition {type_} of {name} has reason {reason}"
        self.wait(lambda: self.condition(type_, name).get("reason") == reason, what=what)
        return self.condition(type_, name)

    def wait(self, check: Callable[[], T], *, what: str, timeout_seconds: float = LONG_SECONDS) -> T:
        """See `Mirror.wait_until`; a time-out shows everything in the namespace."""
        return self.mirror.wait_until(check, what=what, timeout_seconds=timeout_seconds, show=self.describe)

    def wait_quiet(self, seconds: float = QUIET_SECONDS) -> None:
        """Returns when the operator has written nothing in this namespace for so long."""
        last, since = -1, time.monotonic()

        def is_quiet() -> bool:
            nonlocal last, since
            count = self.site.writes.count(namespace=self.namespace)
            if count != last:
                last, since = count, time.monotonic()
            return time.monotonic() - since >= seconds

        self.wait(is_quiet, what=f"the operator writes nothing for {seconds:.0f} s")

    # What belongs to them

    def pods(self, pool: str | None = None, *, revision: str | None = None) -> list[Object]:
        """Pods that are not on their way out."""
        labels = _labels(pool, revision)
        return [p for p in self.mirror.find("pods", self.namespace, labels) if "deletionTimestamp" not in p["metadata"]]

    def ready_pods(self, pool: str | None = None, *, revision: str | None = None) -> list[Object]:
        return [p for p in self.pods(pool, revision=revision) if is_ready_pod(p)]

    def deployments(self, pool: str | None = None) -> list[Object]:
        return self.mirror.find("deployments", self.namespace, _labels(pool, None))

    def deployment(self, pool: str) -> Object:
        """The only Deployment of a pool, as soon as all others are seen to be gone."""
        self.wait(lambda: len(self.deployments(pool)) == 1, what=f"pool {pool} has one Deployment")
        (only,) = self.deployments(pool)
        return only

    def children(self, name: str = "coder") -> dict[tuple[str, str], Object]:
        """Everything that carries the service's label, pods excepted, by plural and name."""
        return {
            (plural, obj["metadata"]["name"]): obj
            for plural in CHILDREN
            for obj in self.mirror.find(plural, self.namespace, {SERVICE_LABEL: name})
        }

    def events(self, reason: str, name: str = "coder") -> list[Object]:
        """Events about a service."""
        return [
            e
            for e in self.mirror.find("events", self.namespace)
            if e["reason"] == reason and e["involvedObject"].get("name") == name
        ]

    def history(self, plural: str, since: int = 0) -> list[Change]:
        return self.mirror.history(since, namespace=self.namespace, plural=plural)

    def behave(self, behaviour: Behaviour, **whom: str) -> None:
        """See `FakeKubelet.behave`."""
        self.site.kubelet.behave(self.namespace, behaviour, **whom)

    def describe(self) -> str:
        """Services with their conditions, workloads, pods and events: for the message of a test that failed."""
        lines = []
        for obj in self.mirror.find("speculativeservices", self.namespace):
            lines.append(f"service {_head(obj)} generation {obj['metadata']['generation']}")
            lines += [f"    {_condition_line(c)}" for c in (obj.get("status") or {}).get("conditions") or ()]
        for plural in CHILDREN:
            for obj in self.mirror.find(plural, self.namespace):
                spec, status = obj.get("spec") or {}, obj.get("status") or {}
                counts = f" {status.get('readyReplicas', 0)}/{spec['replicas']}" if "replicas" in spec else ""
                lines.append(f"{plural} {_head(obj)}{counts}")
        for pod in self.mirror.find("pods", self.namespace):
            ready = condition_of(pod, "Ready").get("status", "-")
            lines.append(f"pod {_head(pod)} {(pod.get('status') or {}).get('phase')} ready={ready}")
        for event in self.mirror.find("events", self.namespace)[-20:]:
            lines.append(f"event {event['involvedObject'].get('name')}: {event['reason']}: {event['message'][:200]}")
        return "\n".join(lines)


def content_of(obj: Object | None) -> Object:
    """An object without what the cluster counts and reports; empty if there is none."""
    if obj is None:
        return {}
    volatile = ("creationTimestamp", "generation", "managedFields", "resourceVersion", "uid")
    metadata = {key: value for key, value in obj["metadata"].items() if key not in volatile}
    annotations = metadata.get("annotations") or {}
    metadata["annotations"] = {k: v for k, v in annotations.items() if not k.startswith("deployment.kubernetes.io/")}
    rest = {key: value for key, value in obj.items() if key not in ("metadata", "status", "apiVersion", "kind")}
    spec = {k: v for k, v in (rest.pop("spec", None) or {}).items() if k not in ("clusterIP", "clusterIPs")}
    return {"metadata": metadata, "spec": spec, **rest}


def difference(wanted: Any, found: Any, path: str = "") -> Iterator[str]:
    """One line for each field that is not as wanted."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in sorted(wanted.keys() | found.keys()):
            yield from difference(wanted.get(key), found.get(key), f"{path}.{key}")
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for index, (one, other) in enumerate(zip(wanted, found, strict=True)):
            yield from difference(one, other, f"{path}[{index}]")
    elif wanted != found:
        yield f"{path}: {found!r} instead of {wanted!r}"


def revision_of(obj: Object) -> str:
    """The revision label of a Deployment or pod."""
    return str(obj["metadata"]["labels"][REVISION_LABEL])


def is_gone(api: Api, plural: str, namespace: str | None, name: str) -> bool:
    """Asks the API server itself."""
    try:
        return api.get(plural, namespace, name) is None
    except RefusedError:
        return False


def _labels(pool: str | None, revision: str | None) -> dict[str, str]:
    labels: Mapping[str, str | None] = {POOL_LABEL: pool, REVISION_LABEL: revision}
    return {key: value for key, value in labels.items() if value is not None}


def _head(obj: Object) -> str:
    meta = obj["metadata"]
    return f"{meta['name']} v{meta['resourceVersion']}" + (" DELETING" if "deletionTimestamp" in meta else "")


def _condition_line(condition: Mapping[str, Any]) -> str:
    text = str(condition.get("message", ""))[:200]
    return f"{condition['type']}={condition['status']} {condition['reason']} @{condition['observedGeneration']} {text}"
