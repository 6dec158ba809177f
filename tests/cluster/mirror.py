"""What there is in a cluster, kept in step by watches, with everything that happened since the start.

Tests wait on it: a condition is looked at again whenever anything has changed, and a time-out shows the last state.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import aiohttp

from tests.cluster.api import Api, BackgroundLoop, Object, RefusedError, path_of

T = TypeVar("T")

MIRRORED = (
    *("configmaps", "controllerrevisions", "deployments", "events", "networkpolicies", "poddisruptionbudgets", "pods"),
    *("poolscalers", "replicasets", "rolebindings", "roles", "serviceaccounts", "services", "speculativeservices"),
)

# What no watch tells of (a process, a log, a metric) is looked at again after this long.
_LOOK_SECONDS = 0.25
_RETRY_SECONDS = 0.2
_WAIT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Change:
    """One event of a watch. `time` is this process's monotonic clock."""

    number: int
    time: float
    type: str
    plural: str
    obj: Object

    @property
    def namespace(self) -> str:
        return str(self.obj["metadata"].get("namespace", ""))

    @property
    def name(self) -> str:
        return str(self.obj["metadata"]["name"])


class ConditionNotMetError(AssertionError):
    """Something that was waited for did not happen."""


class Mirror:
    """A copy of all objects of some kinds. Methods may be called from any thread."""

    def __init__(self, api: Api, background: BackgroundLoop, *, plurals: Iterable[str] = MIRRORED) -> None:
        self._api = api
        self._background = background
        self._plurals = tuple(plurals)
        self._changed = threading.Condition()
        self._objects: dict[str, dict[tuple[str, str], Object]] = {plural: {} for plural in self._plurals}
        self._seen: dict[tuple[str, str, str], int] = {}  # the newest version, also of objects that are gone
        self._history: list[Change] = []
        self._listeners: list[Callable[[Change], None]] = []
        self._watches: list[asyncio.Task[None]] = []
        self._listed = {plural: threading.Event() for plural in self._plurals}

    def __enter__(self) -> Self:
        self._watches = [self._background.start(self._follow(plural)) for plural in self._plurals]
        for listed in self._listed.values():
            if not listed.wait(_WAIT_SECONDS):
                raise ConditionNotMetError("the API server did not answer the mirror's lists")
        self._api.on_write = self._catch_up
        return self

    def __exit__(self, *_: object) -> None:
        self._background.end(*self._watches)

    def listen(self, listener: Callable[[Change], None]) -> None:
        """Calls `listener` in the loop's thread for every change from now on, and for every object there is."""
        with self._changed:
            known = [
                Change(0, time.monotonic(), "ADDED", plural, obj)
                for plural, objects in self._objects.items()
                for obj in objects.values()
            ]
            self._listeners.append(listener)
        for change in known:
            self._background.loop.call_soon_threadsafe(listener, change)

    def get(self, plural: str, namespace: str, name: str) -> Object | None:
        with self._changed:
            return self._objects[plural].get((namespace, name))

    def find(self, plural: str, namespace: str, labels: dict[str, str] | None = None) -> list[Object]:
        """Objects of a namespace that carry all of `labels`, by name."""
        with self._changed:
            found = [obj for (where, _), obj in sorted(self._objects[plural].items()) if where == namespace]
        return [obj for obj in found if has_labels(obj, labels or {})]

    def mark(self) -> int:
        """A point in time, for `history`."""
        with self._changed:
            return len(self._history)

    def history(self, since: int = 0, *, namespace: str | None = None, plural: str | None = None) -> list[Change]:
        """All changes after `since`, in the order in which they were seen; over kinds that is roughly their order."""
        with self._changed:
            changes = self._history[since:]
        return [c for c in changes if namespace in (None, c.namespace) and plural in (None, c.plural)]

    def wait_until(
        self,
        check: Callable[[], T],
        *,
        what: str,
        timeout_seconds: float = _WAIT_SECONDS,
        show: Callable[[], str] = lambda: "",
    ) -> T:
        """The first true result of `check`, which is called again after every change.

        Raises `ConditionNotMetError` when the time is up: with `what`, and `show()` for the last state.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            with self._changed:
                seen = len(self._history)
            result = check()
            if result:
                return result
            left = deadline - time.monotonic()
            if left <= 0:
                raise ConditionNotMetError(f"not within {timeout_seconds:.0f} s: {what}\n{show()}")
            with self._changed:
                if len(self._history) == seen:
                    self._changed.wait(min(left, _LOOK_SECONDS))

    def _catch_up(self, plural: str, answer: Object) -> None:
        """Waits until a write shows here too, so that a test sees what it has done."""
        if plural not in self._plurals:
            return
        if answer["kind"] == "Status":
            uid = answer.get("details", {}).get("uid")
            self.wait_until(lambda: uid not in self._uids(plural), what=f"the mirror has seen a deletion of {plural}")
        else:
            where, written = (plural, *_key(answer)), _version(answer)
            self.wait_until(lambda: self._seen.get(where, 0) >= written, what=f"the mirror has seen {where} {written}")

    def _uids(self, plural: str) -> set[str]:
        with self._changed:
            return {obj["metadata"]["uid"] for obj in self._objects[plural].values()}

    async def _follow(self, plural: str) -> None:
        while True:
            with contextlib.suppress(RefusedError, aiohttp.ClientError, OSError, TimeoutError):
                answer = await self._api.aio.request("GET", path_of(plural))
                self._take_list(plural, answer["items"])
                self._listed[plural].set()
                watch = self._api.aio.watch(path_of(plural), answer["metadata"]["resourceVersion"])
                async with contextlib.aclosing(watch) as events:
                    async for event in events:
                        self._take(event["type"], plural, event["object"])
            await asyncio.sleep(_RETRY_SECONDS)

    def _take_list(self, plural: str, items: list[Object]) -> None:
        """Tells the difference between the list and what was known as if a watch had."""
        listed = {_key(item): item for item in items}
        known = dict(self._objects[plural])
        for key, obj in known.items():
            if key not in listed or listed[key]["metadata"]["uid"] != obj["metadata"]["uid"]:
                self._take("DELETED", plural, obj)
        for key, obj in listed.items():
            before = known.get(key)
            if before is None or before["metadata"]["uid"] != obj["metadata"]["uid"]:
                self._take("ADDED", plural, obj)
            elif before["metadata"]["resourceVersion"] != obj["metadata"]["resourceVersion"]:
                self._take("MODIFIED", plural, obj)

    def _take(self, type_: str, plural: str, obj: Object) -> None:
        obj["metadata"].pop("managedFields", None)
        with self._changed:
            if type_ == "DELETED":
                self._objects[plural].pop(_key(obj), None)
            else:
                self._objects[plural][_key(obj)] = obj
            self._seen[plural, *_key(obj)] = _version(obj)
            change = Change(len(self._history), time.monotonic(), type_, plural, obj)
            self._history.append(change)
            self._changed.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            listener(change)


def has_labels(obj: Object, labels: dict[str, str]) -> bool:
    found = obj["metadata"].get("labels") or {}
    return all(found.get(key) == value for key, value in labels.items())


def condition_of(obj: Object | None, type_: str) -> dict[str, Any]:
    """The condition of an object's status; empty if it has none."""
    conditions = ((obj or {}).get("status") or {}).get("conditions") or ()
    return next((dict(c) for c in conditions if c["type"] == type_), {})


def is_ready_pod(pod: Object) -> bool:
    """A pod that serves: ready, and not told to go."""
    return condition_of(pod, "Ready").get("status") == "True" and "deletionTimestamp" not in pod["metadata"]


def _version(obj: Object) -> int:
    return int(obj["metadata"]["resourceVersion"])


def _key(obj: Object) -> tuple[str, str]:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]
