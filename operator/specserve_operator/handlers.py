"""All that is kopf's: the watches of every kind, the login, and kopf's settings.

Handlers only pass on what they see. What is to be done follows from the whole picture (`runtime.reconciler`), so no
handler can fail, none keeps anything in the objects, and none adds a finalizer: deleting the operator never holds up
deleting a service.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import kopf

from specserve_operator.cluster.kube.kinds import Kind
from specserve_operator.cluster.kube.login import is_in_cluster
from specserve_operator.constants import GROUP, MANAGED_BY
from specserve_operator.core.objects import Manifest

# Kind, type (ADDED, MODIFIED, DELETED, or None where a list has shown it) and object.
OnEvent = Callable[[Kind, str | None, Manifest], None]

# Watches end on both sides after a while even if all is well, so that one that hangs is never the last.
WATCH_SECONDS = 600
_WATCH_MARGIN_SECONDS = 60
_CONNECT_SECONDS = 10
_REQUEST_SECONDS = 30
_LIST_CHUNK = 500
_EXIT_SECONDS = 25


class _Backoffs:
    """Delays between tries of a request, for as long as it takes: a watch must outlive an API server that is away."""

    def __iter__(self) -> Iterator[float]:
        delay = 1.0
        while True:
            yield delay
            delay = min(delay * 2, 30.0)


def build_registry(kinds: Iterable[Kind], on_event: OnEvent) -> kopf.OperatorRegistry:
    """One silent handler for each kind."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(_login)
    for kind in kinds:
        _watch(registry, kind, on_event)
    return registry


def _watch(registry: kopf.OperatorRegistry, kind: Kind, on_event: OnEvent) -> None:
    @kopf.on.event(kind.group, kind.version, kind.plural, id=f"watch-{kind.plural}", registry=registry)
    async def _handle(event: kopf.RawEvent, **_: Any) -> None:
        on_event(kind, event["type"], dict(event["object"]))


async def _login(**kwargs: Any) -> kopf.ConnectionInfo | None:
    """Said out loud: left to itself, kopf would log in with whatever client library happens to be installed."""
    login = kopf.login_with_service_account if is_in_cluster() else kopf.login_with_kubeconfig
    return login(**kwargs)


def kopf_settings(kinds: Iterable[Kind], *, pod_name: str) -> kopf.OperatorSettings:
    """kopf's settings. Those of storages and finalizers are set though unused: their defaults are shared by others."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.scanning.disabled = True  # it would need to list CRDs and namespaces
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.client_timeout = WATCH_SECONDS + _WATCH_MARGIN_SECONDS
    settings.watching.connect_timeout = _CONNECT_SECONDS
    settings.watching.reconnect_backoff = 1.0
    settings.watching.chunk_size = _LIST_CHUNK
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
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP, v1=False)
    settings.process.ultimate_exiting_timeout = _EXIT_SECONDS
    return settings
