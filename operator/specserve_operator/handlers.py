"""All that is kopf's: the watches of every kind, the login, and kopf's settings.

Handlers only pass on what they see. What is to be done follows from the whole picture (`runtime.reconciler`), so no
handler can fail, none keeps anything in the objects, and none adds a finalizer: deleting the operator never holds up
deleting a service.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import kopf
from kopf._core.reactor import inventory

from specserve_operator.cluster.kube.kinds import Kind
from specserve_operator.cluster.kube.login import is_in_cluster
from specserve_operator.constants import GROUP, MANAGED_BY
from specserve_operator.core.objects import Manifest

# Kind, type (ADDED, MODIFIED, DELETED) and object.
OnEvent = Callable[[Kind, str | None, Manifest], None]
# Kind, namespace (None: all) and resource version of a watch that begins. Returns the version from which on it is to
# show everything: that one, or an earlier one.
OnWatch = Callable[[Kind, str | None, int], int]

# Watches end on both sides after a while even if all is well, so that one that hangs is never the last.
WATCH_SECONDS = 600
_WATCH_MARGIN_SECONDS = 60
# An API server sends a bookmark every minute, if nothing else: a watch that is silent for longer is not one any more.
_SILENCE_SECONDS = 70
_CONNECT_SECONDS = 10
_REQUEST_SECONDS = 30
_EXIT_SECONDS = 25
# kopf has a task for every object that it has just seen, which waits so long for more.
_IDLE_SECONDS = 0.1


class _Backoffs:
    """Delays between tries of a request, for as long as it takes: a watch must outlive an API server that is away."""

    def __iter__(self) -> Iterator[float]:
        delay = 1.0
        while True:
            yield delay
            delay = min(delay * 2, 30.0)


class _NoDiffBase(kopf.DiffBaseStorage):
    """Remembers nothing: no handler asks what has changed. To know, kopf's own copies objects at every event."""

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        return {}

    def fetch(self, *, body: Any) -> None:
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        pass


class NoMemories(inventory.ResourceMemories):
    """Keeps nothing of any object. kopf's own keeps two kilobytes of every one seen, for handlers that remember.

    kopf takes it as a parameter, and does not export it.
    """

    async def recall(self, raw_body: Any, **more: Any) -> inventory.ResourceMemory:
        return await super().recall(raw_body, **(more | {"ephemeral": True}))


def build_registry(kinds: Iterable[Kind], on_event: OnEvent, *, on_watch: OnWatch) -> kopf.OperatorRegistry:
    """One silent handler for each kind."""
    registry, kinds = kopf.OperatorRegistry(), tuple(kinds)

    @kopf.on.login(registry=registry)
    async def _login(**kwargs: Any) -> kopf.AiohttpSession | None:
        """Said out loud: left to itself, kopf would log in with whatever client library happens to be installed."""
        login = kopf.login_with_service_account if is_in_cluster() else kopf.login_with_kubeconfig
        info = login(**kwargs)
        return None if info is None else open_session(info, kinds, on_watch)

    for kind in kinds:
        _watch(registry, kind, on_event)
    return registry


def _watch(registry: kopf.OperatorRegistry, kind: Kind, on_event: OnEvent) -> None:
    @kopf.on.event(kind.group, kind.version, kind.plural, id=f"watch-{kind.plural}", registry=registry)
    async def _handle(event: kopf.RawEvent, **_: Any) -> None:
        on_event(kind, event["type"], dict(event["object"]))


@dataclass(frozen=True, kw_only=True)
class _Session(kopf.AiohttpSession):
    """Equal to another one of the same credentials: kopf tries none again that was refused before."""

    info: kopf.ConnectionInfo
    aiohttp_session: aiohttp.ClientSession = field(compare=False)


def open_session(info: kopf.ConnectionInfo, kinds: Collection[Kind], on_watch: OnWatch) -> kopf.AiohttpSession:
    """kopf's connections, which it closes. It lists nothing, and watches from the version on that `on_watch` says.

    What there is, our own lists find out: page by page. kopf would hold all objects at once,
    each with a task of its own, whenever a watch begins.
    """

    class _Answer(aiohttp.ClientResponse):
        async def json(self, **more: Any) -> Any:
            document = await super().json(**more)
            found = find_listed(kinds, self.url.path) if "items" in document else None
            if found is None:
                return document
            version = document["metadata"]["resourceVersion"]
            first = on_watch(*found, int(version) if version.isdigit() else 0)
            return {"items": [], "metadata": {"resourceVersion": str(first) if first else version}}

    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        proxy=info.proxy_url,
        trust_env=info.trust_env,
        response_class=_Answer,
    )
    return _Session(
        server=info.server,
        default_namespace=info.default_namespace,
        expiration=info.expiration,
        aiohttp_session=session,
        info=info,
    )


def find_listed(kinds: Iterable[Kind], path: str) -> tuple[Kind, str | None] | None:
    """The kind, and the namespace if it is one, whose objects are listed at `path`."""
    parts = path.strip("/").split("/")
    namespace = parts[-2] if len(parts) > 2 and parts[-3] == "namespaces" else None
    return next(((kind, namespace) for kind in kinds if kind.path(namespace) == path), None)


def kopf_settings(kinds: Iterable[Kind], *, pod_name: str) -> kopf.OperatorSettings:
    """kopf's settings. Those of storages and finalizers are set though unused: their defaults are shared by others."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.scanning.disabled = True  # it would need to list CRDs and namespaces
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.client_timeout = WATCH_SECONDS + _WATCH_MARGIN_SECONDS
    settings.watching.inactivity_timeout = _SILENCE_SECONDS
    settings.watching.connect_timeout = _CONNECT_SECONDS
    settings.watching.reconnect_backoff = 1.0
    settings.watching.chunk_size = 1  # of a list, only the version is looked at
    for kind in kinds:
        if kind.selector:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.selector
    settings.networking.request_timeout = _REQUEST_SECONDS
    settings.networking.connect_timeout = _CONNECT_SECONDS
    settings.networking.error_backoffs = _Backoffs()
    settings.posting.enabled = False
    settings.posting.reporting_component = MANAGED_BY
    settings.posting.reporting_instance = pod_name
    settings.posting.event_name_prefix = f"{MANAGED_BY}-"
    settings.persistence.finalizer = f"{GROUP}/operator"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP, v1=False)
    settings.persistence.diffbase_storage = _NoDiffBase()
    settings.queueing.idle_timeout = _IDLE_SECONDS
    settings.process.ultimate_exiting_timeout = _EXIT_SECONDS
    return settings
