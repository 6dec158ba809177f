"""Services: names of headless ones as files, ClusterIP ones as listeners on this machine."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from specserve_operator.cluster.local import ports
from specserve_operator.cluster.local.events import EventRecorder
from specserve_operator.cluster.local.forwarder import Backend, Forwarder
from specserve_operator.cluster.local.podspec import resolve_port
from specserve_operator.cluster.local.podstatus import is_ready
from specserve_operator.cluster.local.statedir import StateDir, write_atomically
from specserve_operator.cluster.local.store import Change, ObjectKey, ObjectStore, is_being_deleted, timestamp
from specserve_operator.cluster.protocol import ClusterError
from specserve_operator.cluster.wakeups import DirtyKeys, serve
from specserve_operator.core.objects import Manifest

_ALL = "all"
_RETRY_SECONDS = 2.0


def endpoints_of(service: Manifest, pods: list[Manifest]) -> list[Manifest]:
    """Pods that a Service stands for: selected, with an address, ready and not ending; by name."""
    spec = service["spec"]
    if not spec.get("selector"):
        return []
    return [
        pod
        for pod in pods
        if pod.get("status", {}).get("podIP")
        and (spec.get("publishNotReadyAddresses") or (is_ready(pod) and not is_being_deleted(pod)))
    ]


def is_headless(service: Manifest) -> bool:
    return bool(service["spec"].get("clusterIP") == "None")


def host_names(service: Manifest, *, seen_from: str) -> Iterator[str]:
    """The names of a Service as a pod of namespace `seen_from` may write them."""
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    if namespace == seen_from:
        yield name
    for domain in ("", ".svc", ".svc.cluster.local"):
        yield f"{name}.{namespace}{domain}"


class ServiceNetwork:
    """Keeps names and listeners in step with Services and the readiness of pods."""

    def __init__(self, store: ObjectStore, state: StateDir, events: EventRecorder, *, listen_host: str) -> None:
        self._store = store
        self._state = state
        self._events = events
        self._listen_host = listen_host
        # How this machine itself reaches a listener on all addresses.
        self._own_host = "127.0.0.1" if listen_host == "0.0.0.0" else listen_host
        self._forwarders: dict[tuple[ObjectKey, int], Forwarder] = {}
        self._dirty: DirtyKeys[str] = DirtyKeys()
        self._written: dict[str, str] = {}
        store.subscribe(self._on_change)
        self._dirty.add(_ALL)

    def _on_change(self, change: Change) -> None:
        if change.obj["kind"] in ("Service", "Pod"):
            self._dirty.add(_ALL)

    async def run(self) -> None:
        """Runs until it is cancelled."""
        await serve("services", self._dirty, self._reconcile)

    async def reserve_ports(self, service: Manifest) -> None:
        """Before a Service is stored: takes its ports. Raises `ClusterError` for one that can't be had.

        The caller stores it without awaiting anything in between, or the ports are let go again as nobody's.
        """
        await self._close_unwanted(self._store.list("Service"))
        self._dirty.add(_ALL)
        key = ObjectKey.of(service)
        for port in self._listening_ports(service):
            self._reserve(key, port)

    def _listening_ports(self, service: Manifest) -> list[int]:
        if is_headless(service) or service["spec"].get("type") == "ExternalName":
            return []
        return [int(port["port"]) for port in service["spec"].get("ports", ())]

    def _reserve(self, key: ObjectKey, port: int) -> Forwarder:
        if (key, port) in self._forwarders:
            return self._forwarders[key, port]
        for other, other_port in self._forwarders:
            if other_port == port:
                why = f"port {port} of {self._listen_host} belongs to Service {other.namespace}/{other.name}"
                raise _port_error(key, why)
        try:
            forwarder = Forwarder(self._listen_host, port)
        except OSError as error:
            raise _port_error(key, ports.explain(error, self._listen_host, port)) from error
        self._forwarders[key, port] = forwarder
        return forwarder

    def endpoint_of(self, namespace: str, name: str) -> str | None:
        """The URL of the first port of a ClusterIP Service; None if it does not listen here."""
        service = self._store.get(ObjectKey("Service", namespace, name))
        for port in self._listening_ports(service) if service is not None else ():
            if (ObjectKey.of(service or {}), port) in self._forwarders:
                return f"http://{self._own_host}:{port}"
        return None

    async def _reconcile(self, _: str) -> None:
        services = self._store.list("Service")
        await self._close_unwanted(services)
        self._write_names(services)
        for service in services:
            self._forward(service)

    async def _close_unwanted(self, services: list[Manifest]) -> None:
        wanted = {(ObjectKey.of(s), port) for s in services for port in self._listening_ports(s)}
        for key in self._forwarders.keys() - wanted:
            if (forwarder := self._forwarders.pop(key, None)) is not None:
                await forwarder.close()

    def _forward(self, service: Manifest) -> None:
        """Points the listeners of one Service to its pods; what fails becomes an event and a condition."""
        key = ObjectKey.of(service)
        pods = self._endpoints(service)
        failure: str | None = None
        for port in service["spec"].get("ports", ()):
            number = int(port["port"])
            if number not in self._listening_ports(service):
                continue
            try:
                self._reserve(key, number).set_backends(_backends(port, pods))
            except ClusterError as error:
                failure = str(error)
            except OSError as error:
                failure = ports.explain(error, self._listen_host, number)
        self._report(service, failure)

    def _report(self, service: Manifest, failure: str | None) -> None:
        before = service.get("status", {}).get("conditions", [])
        if failure is None:
            if before:
                self._store.patch_status(ObjectKey.of(service), {})
            return
        condition = {"type": "Listening", "status": "False", "reason": "PortUnavailable", "message": failure}
        if not before or before[0]["message"] != failure:
            self._events.warning(service, "PortUnavailable", failure)
            status = {"conditions": [{**condition, "lastTransitionTime": timestamp()}]}
            self._store.patch_status(ObjectKey.of(service), status)
        asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._dirty.add, _ALL)

    def _endpoints(self, service: Manifest) -> list[Manifest]:
        selector: Mapping[str, str] = service["spec"].get("selector") or {}
        return endpoints_of(service, self._store.list("Pod", service["metadata"]["namespace"], selector=selector))

    def _write_names(self, services: list[Manifest]) -> None:
        """Writes files of names whose addresses changed, and removes those of Services that are gone."""
        namespaces = {obj["metadata"]["namespace"] for obj in [*services, *self._store.list("Pod")]}
        wanted: dict[str, str] = {}
        for service in services:
            addresses = [self._own_host]
            if is_headless(service):
                addresses = [pod["status"]["podIP"] for pod in self._endpoints(service)]
            content = "".join(f"{address}\n" for address in addresses)
            for namespace in namespaces:
                wanted |= {f"{namespace}/{n}": content for n in host_names(service, seen_from=namespace)}
        for name, content in wanted.items():
            if self._written.get(name) != content:
                write_atomically(self._state.hosts / name, content)
        for name in self._written.keys() - wanted.keys():
            (self._state.hosts / name).unlink(missing_ok=True)
        self._written = wanted

    async def close(self) -> None:
        """Ends all listeners and forgets all names."""
        for forwarder in self._forwarders.values():
            await forwarder.close()
        self._forwarders.clear()
        self._write_names([])


def _backends(port: Mapping[str, Any], pods: list[Manifest]) -> list[Backend]:
    target = port.get("targetPort", port["port"])
    found = ((pod["status"]["podIP"], resolve_port(pod, target)) for pod in pods)
    return [(host, number) for host, number in found if number is not None]


def _port_error(key: ObjectKey, why: str) -> ClusterError:
    hint = "set spec.gateway.port to another one" if key.name.endswith("-gateway") else "choose another one"
    return ClusterError(f"Service {key.namespace}/{key.name}: {why}; {hint}")
