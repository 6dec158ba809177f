"""Runs pods: watches the store for them, carries each through its life, and writes its status."""

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from specserve_operator.cluster.local import podcheck, podspec, podstatus, ports, probes, volumes
from specserve_operator.cluster.local.addresses import NoFreeAddressError, PodAddresses
from specserve_operator.cluster.local.container import ContainerRunner, Termination
from specserve_operator.cluster.local.events import EventRecorder
from specserve_operator.cluster.local.options import LocalOptions
from specserve_operator.cluster.local.podaccess import PodAccess
from specserve_operator.cluster.local.podspec import PodConfigError
from specserve_operator.cluster.local.podstatus import Waiting
from specserve_operator.cluster.local.statedir import StateDir, write_atomically
from specserve_operator.cluster.local.store import (
    Change,
    ChangeType,
    ObjectKey,
    ObjectStore,
    is_being_deleted,
    timestamp,
)
from specserve_operator.core.objects import Manifest

logger = logging.getLogger(__name__)

_VOLUME_RETRY_SECONDS = 1.0
_KILL_LIMIT_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Node:
    """What all pods share."""

    store: ObjectStore
    state: StateDir
    events: EventRecorder
    addresses: PodAddresses
    access: PodAccess
    options: LocalOptions
    http: aiohttp.ClientSession


class PodRunner:
    """The life of one pod; the context of its containers."""

    def __init__(self, pod: Manifest, node: Node) -> None:
        meta, spec = pod["metadata"], pod["spec"]
        self._node = node
        self._key = ObjectKey.of(pod)
        self._pod = pod
        self._started_at = timestamp()
        self._volumes: Mapping[str, Path] = {}
        self.pod_uid: str = meta["uid"]
        self.pod_ip = ""
        self.folder = node.state.pod(self._key.namespace, self._key.name)
        self.grace_seconds = float(spec.get("terminationGracePeriodSeconds", 30))
        self.options = node.options
        self.termination = Termination()
        self._restart_policy: str = spec.get("restartPolicy", "Always")
        make = partial(ContainerRunner, context=self, restart_policy=self._restart_policy)
        self._init_runners = [make(c, is_init=True) for c in podcheck.named_containers(pod, "initContainers")]
        self._runners = [make(c, is_init=False) for c in podcheck.named_containers(pod, "containers")]

    async def run(self) -> None:
        """From the pod's creation to its end; afterwards nothing of it runs."""
        try:
            if self._is_well_formed() and await self._prepare() and await self._initialise():
                async with asyncio.TaskGroup() as tasks:
                    for runner in self._runners:
                        tasks.create_task(runner.run())
            if not self.termination.requested.is_set():
                await self.termination.requested.wait()  # all containers have ended, the object stays
        finally:
            self._node.addresses.release(self.pod_uid)
            shutil.rmtree(self.folder / "volumes", ignore_errors=True)
            (self.folder / "kubeconfig").unlink(missing_ok=True)

    def _is_well_formed(self) -> bool:
        """False if no pod of this spec can run; the status says why, and stays so until the pod is deleted."""
        try:
            podcheck.check_pod(self._pod)
        except PodConfigError as error:
            self._wait_for(error.reason, str(error))
            return False
        return True

    async def _prepare(self) -> bool:
        """Address, folders, volumes, credentials; waits for what is missing. False if the pod ends first."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "work").mkdir(exist_ok=True)
        while not self.termination.requested.is_set():
            try:
                self.pod_ip = self._node.addresses.acquire(self.pod_uid, is_usable=self._can_listen)
                self.refresh_volumes()
                self._write_kubeconfig()
            except NoFreeAddressError as error:
                self._wait_for("FailedCreatePodSandBox", str(error))
            except (PodConfigError, OSError) as error:
                self._wait_for("FailedMount", f"MountVolume.SetUp failed: {error}")
            else:
                for runner in self._all_runners():
                    runner.wait_for_pod(Waiting("ContainerCreating"))
                self.publish()
                return True
            with suppress(TimeoutError):
                await asyncio.wait_for(self.termination.requested.wait(), _VOLUME_RETRY_SECONDS)
        return False

    def _can_listen(self, address: str) -> bool:
        """True if all ports that the pod declares are free on `address`."""
        numbers = [port.get("containerPort") for port in podspec.declared_ports(self._pod)]
        return all(ports.can_listen(address, number) for number in numbers if isinstance(number, int))

    def _wait_for(self, reason: str, message: str) -> None:
        """Shows what keeps the pod from starting: an event, and the reason why all containers wait."""
        self.event(warning=True, reason=reason, message=message)
        for runner in self._all_runners():
            runner.wait_for_pod(Waiting(reason, message))
        self.publish()

    def _all_runners(self) -> list[ContainerRunner]:
        return [*self._init_runners, *self._runners]

    async def _initialise(self) -> bool:
        """Runs the init containers, one after the other. False if one failed for good or the pod ends."""
        for runner in self._init_runners:
            if not await runner.run():
                return False
        return True

    def refresh_volumes(self) -> None:
        """Brings mounted ConfigMaps and Secrets up to date. Raises `PodConfigError`, OSError."""
        self._volumes = volumes.materialise(self._pod_with_address(), self._node.state, self._read_config)

    def mounts_config(self, kind: str, name: str) -> bool:
        """Raises `PodConfigError` if the pod's volumes cannot be read."""
        with podspec.explained("volumes"):
            return (kind, name) in volumes.config_names(self._pod)

    def _pod_with_address(self) -> Manifest:
        status = {"podIP": self.pod_ip, "hostIP": podstatus.HOST_IP}
        return {**self._pod, "status": status}

    def _read_config(self, kind: str, name: str) -> Mapping[str, bytes] | None:
        found = self._node.store.get(ObjectKey(kind, self._key.namespace, name))
        return None if found is None else volumes.decode_config(found)

    def _write_kubeconfig(self) -> None:
        account = self._pod["spec"].get("serviceAccountName")
        if account:
            content = self._node.access.kubeconfig(self._key.namespace, account)
            write_atomically(self.folder / "kubeconfig", content, mode=0o600)

    def plan_launch(self, container: Mapping[str, Any]) -> podspec.Launch:
        """What to run for a container of this pod. Raises `PodConfigError`."""
        kubeconfig = self.folder / "kubeconfig"
        base = podspec.base_environment(
            os.environ, python_folder=Path(sys.executable).parent, reads_pods=kubeconfig.exists()
        )
        base |= {
            "HOSTNAME": self._key.name,
            "SPECSERVE_POD_UID": self.pod_uid,
            "SPECSERVE_HOSTS_DIR": str(self._node.state.hosts / self._key.namespace),
            "SPECSERVE_RUN_DIR": str(self.folder / "run"),
        }
        if kubeconfig.exists():
            base["KUBECONFIG"] = str(kubeconfig)
        return podspec.plan_launch(
            self._pod_with_address(),
            container,
            mounts=volumes.mounts_of(container, self._volumes),
            base_env=base,
            read_config=self._read_config,
            working_dir=self.folder / "work",
        )

    def probe_target(self, container: Mapping[str, Any]) -> probes.ProbeTarget:
        def in_container(command: list[str]) -> podspec.Launch:
            return self.plan_launch({**container, "command": command, "args": []})

        return probes.ProbeTarget(
            pod_ip=self.pod_ip,
            resolve_port=partial(podspec.resolve_port, self._pod),
            resolve_command=in_container,
            http=self._node.http,
        )

    def publish(self) -> None:
        """Writes the status."""
        current = self._node.store.get(self._key)
        if current is None:
            return
        status = podstatus.render_pod_status(
            [runner.record for runner in self._runners],
            [runner.record for runner in self._init_runners],
            pod_ip=self.pod_ip,
            started_at=self._started_at,
            now=timestamp(),
            previous=current.get("status", {}),
            restarts=self._restart_policy != "Never",
        )
        self._node.store.patch_status(self._key, status)

    def event(self, *, warning: bool, reason: str, message: str) -> None:
        emit = self._node.events.warning if warning else self._node.events.normal
        emit(self._pod, reason, message)


class Kubelet:
    """All pods of the cluster, a task each."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._runners: dict[ObjectKey, PodRunner] = {}
        self._tasks: dict[ObjectKey, asyncio.Task[None]] = {}
        self._stopping = False
        self._is_hastened = False
        self._unsubscribe = node.store.subscribe(self._on_change)
        for pod in node.store.list("Pod"):
            self._on_pod(pod)

    def _on_change(self, change: Change) -> None:
        kind = change.obj["kind"]
        if kind == "Pod" and change.type is not ChangeType.DELETED:
            self._on_pod(change.obj)
        elif kind in ("ConfigMap", "Secret") and change.type is not ChangeType.DELETED:
            # Not within the change: what follows from it may change objects itself.
            asyncio.get_running_loop().call_soon(self._refresh_volumes, ObjectKey.of(change.obj))

    def _on_pod(self, pod: Manifest) -> None:
        key = ObjectKey.of(pod)
        runner = self._runners.get(key)
        if runner is not None and is_being_deleted(pod):
            self._request_end(runner, float(pod["metadata"]["deletionGracePeriodSeconds"]))
        elif runner is None and not self._stopping:
            runner = self._runners[key] = PodRunner(pod, self._node)
            self._tasks[key] = asyncio.create_task(self._live(key, runner), name=f"pod {key.name}")
            if is_being_deleted(pod):
                runner.termination.hasten()

    def _request_end(self, runner: PodRunner, grace_seconds: float) -> None:
        limit = self._node.options.shutdown_seconds if self._stopping else grace_seconds
        if not runner.termination.requested.is_set():
            runner.termination.request(min(grace_seconds, limit))
            asyncio.get_running_loop().call_soon(
                partial(runner.event, warning=False, reason="Killing", message="Stopping the pod's containers")
            )

    def _refresh_volumes(self, changed: ObjectKey) -> None:
        for key, runner in self._runners.items():
            try:
                if key.namespace == changed.namespace and runner.mounts_config(changed.kind, changed.name):
                    runner.refresh_volumes()
            except (PodConfigError, OSError) as error:
                runner.event(warning=True, reason="FailedMount", message=str(error))

    async def _live(self, key: ObjectKey, runner: PodRunner) -> None:
        try:
            await runner.run()
        except Exception:
            logger.exception("pod %s/%s failed", key.namespace, key.name)
            await asyncio.sleep(_VOLUME_RETRY_SECONDS)  # its Deployment makes another one at once
        finally:
            del self._runners[key], self._tasks[key]
        self._node.store.remove(key)
        self._forget_old_logs()

    def _forget_old_logs(self) -> None:
        """Logs of pods that are gone stay readable, the newest few."""
        state, store = self._node.state, self._node.store
        dead = [
            folder
            for folder in state.pods.glob("*/*")
            if store.get(ObjectKey("Pod", folder.parent.name, folder.name)) is None
        ]
        dead.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
        for folder in dead[self._node.options.kept_pod_logs :]:
            shutil.rmtree(folder, ignore_errors=True)

    def hasten(self) -> None:
        """No pod gets grace any more: those that run are killed now, and `stop` does not wait."""
        self._is_hastened = True
        for runner in self._runners.values():
            runner.termination.hasten()

    async def stop(self) -> None:
        """Ends all pods side by side: gracefully, within the limit, then by force."""
        self._stopping = True
        for pod in self._node.store.list("Pod"):
            self._node.store.delete(ObjectKey.of(pod))
        tasks = set(self._tasks.values())
        if tasks:
            patience = 0.0 if self._is_hastened else self._node.options.shutdown_seconds
            _, late = await asyncio.wait(tasks, timeout=patience)
            for runner in self._runners.values():
                runner.termination.hasten()
            if late:
                _, stuck = await asyncio.wait(late, timeout=_KILL_LIMIT_SECONDS)
                for task in stuck:
                    task.cancel()
                await asyncio.gather(*stuck, return_exceptions=True)
        self._unsubscribe()
