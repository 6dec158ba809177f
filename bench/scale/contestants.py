"""Operators that are measured beside each other: each with objects of its own kind, which differ by name alone."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from hack.kube.control_plane import ControlPlane
from tests.cluster.api import Object
from tests.cluster.operator_process import OperatorProcess, install_rules
from tests.cluster.site import service

NAMESPACES = 20
# A merge patch, and whether a child is as it asks.
Step = tuple[Object, Callable[[Object], bool]]


def namespace_of(number: int) -> str:
    """Which namespace an object is in."""
    return f"bench-{number % NAMESPACES}"


def condition_of(obj: Object, type_: str) -> Object:
    """A condition of the object's status that is about its newest spec; empty if there is none."""
    found: Object = next((c for c in (obj.get("status") or {}).get("conditions") or () if c["type"] == type_), {})
    return found if found.get("observedGeneration", 0) in (0, obj["metadata"]["generation"]) else {}


class Contestant(ABC):
    """An operator, and one object of its kind for every number from 0 on.

    Attributes:
        name: in the results.
        objects: path of its kind's API, and plural.
        children: the same of what a change of an object changes first.
    """

    name: str
    objects: tuple[str, str]
    children: tuple[str, str]

    def path(self, number: int) -> str:
        """Of an object."""
        return f"{self.collection(number)}/{self.manifest(number)['metadata']['name']}"

    def collection(self, number: int) -> str:
        """Where an object is created."""
        return f"{self.objects[0]}/namespaces/{namespace_of(number)}/{self.objects[1]}"

    @property
    @abstractmethod
    def pid(self) -> int:
        """Of its process."""

    @abstractmethod
    def start(self) -> None:
        """Starts it; returns when it says that it is ready."""

    @abstractmethod
    def kill(self) -> None:
        """Kills it, if it runs."""

    @abstractmethod
    def manifest(self, number: int) -> Object:
        """The object as it is created."""

    @abstractmethod
    def scaled(self, number: int, round_: int) -> Step:
        """Changes a number of replicas."""

    @abstractmethod
    def renewed(self, number: int, round_: int) -> Step:
        """Changes the template of pods."""

    @abstractmethod
    def is_settled(self, obj: Object) -> bool:
        """Whether the status says that everything is as asked."""


class Specserve(Contestant):
    """Ours: one prefill pod and two decode pods, each with a control port, and a gateway pod."""

    name = "specserve"
    objects = ("/apis/specserve.dev/v1alpha1", "speculativeservices")
    children = ("/apis/apps/v1", "deployments")

    def __init__(self, control_plane: ControlPlane, folder: Path) -> None:
        self._operator = OperatorProcess(install_rules(control_plane), folder / "specserve.log")

    @property
    def pid(self) -> int:
        return self._operator.pid

    def start(self) -> None:
        self._operator.start()

    def kill(self) -> None:
        if self._operator.is_running:
            self._operator.kill()

    def reconciled(self) -> tuple[float, float]:
        """How many reconciles have ended since it was started, and how many services wait for one."""
        numbers = self._operator.metrics()
        ended = numbers.get('specserve_operator_reconcile_total{result="ok"}', 0.0)
        return ended, numbers["specserve_operator_workqueue_depth"]

    def manifest(self, number: int) -> Object:
        obj = service(f"service-{number}")
        obj["metadata"]["namespace"] = namespace_of(number)
        return obj

    def scaled(self, number: int, round_: int) -> Step:
        replicas, prefix = 3 - round_ % 2, f"service-{number}-decode-"

        def is_so(child: Object) -> bool:
            return bool(child["metadata"]["name"].startswith(prefix) and child["spec"]["replicas"] == replicas)

        return {"spec": {"decode": {"replicas": replicas}}}, is_so

    def renewed(self, number: int, round_: int) -> Step:
        prefix, variable = f"service-{number}-decode-", {"name": "ROUND", "value": str(round_)}
        template = {"spec": {"containers": [{"name": "engine", "env": [variable]}]}}

        def is_so(child: Object) -> bool:
            containers = child["spec"]["template"]["spec"]["containers"]
            is_new = any(variable in (container.get("env") or ()) for container in containers)
            return is_new and bool(child["metadata"]["name"].startswith(prefix))

        return {"spec": {"decode": {"template": template}}}, is_so

    def is_settled(self, obj: Object) -> bool:
        is_ready = condition_of(obj, "Ready").get("status") == "True"
        return is_ready and condition_of(obj, "Progressing").get("reason") == "RolloutComplete"
