"""Whether the watches live: a full list must not show what a watch has kept back for long."""

from collections.abc import Callable, Sequence

from specserve_operator.cluster.kube.cache import resource_version
from specserve_operator.cluster.kube.kinds import Kind
from specserve_operator.core.objects import Manifest

# One watch: of a kind, in one namespace or in the whole cluster.
_Watch = tuple[Kind, str | None]


class WatchHealth:
    """For every watch the newest version that it has shown, against the newest that a list has.

    `namespaces`: each has watches of its own; without any, one watch of a kind sees the whole cluster.
    """

    def __init__(self, time: Callable[[], float], *, namespaces: Sequence[str] = ()) -> None:
        self._time = time
        self._is_namespaced = bool(namespaces)
        self._watched: dict[_Watch, int] = {}
        self._behind: dict[_Watch, tuple[int, float]] = {}

    def on_event(self, kind: Kind, obj: Manifest) -> None:
        """A watch has shown an object."""
        self._show((kind, obj["metadata"]["namespace"] if self._is_namespaced else None), resource_version(obj))

    def on_watch(self, kind: Kind, namespace: str | None, version: int) -> None:
        """A watch of one namespace or of all (None) has begun: of what is older than this version it owes nothing."""
        self._show((kind, namespace), version)

    def _show(self, watch: _Watch, version: int) -> None:
        self._watched[watch] = max(version, self._watched.get(watch, 0))
        awaited = self._behind.get(watch)
        if awaited is not None and self._watched[watch] >= awaited[0]:
            del self._behind[watch]

    def on_listed(self, kind: Kind, namespace: str | None, newest: int) -> None:
        """A list of one namespace or of all (None) has shown objects, the newest of this version; 0 for none."""
        watch = kind, namespace
        if kind.is_optional:
            return  # it has no watch
        if newest <= self._watched.get(watch, 0):
            self._behind.pop(watch, None)
        elif watch not in self._behind:
            self._behind[watch] = (newest, self._time())

    def behind_seconds(self) -> float:
        """For how long the slowest watch has not shown what a list did; 0 if none is behind."""
        since = min((since for _, since in self._behind.values()), default=None)
        return 0.0 if since is None else self._time() - since

    def watches_behind(self) -> list[str]:
        """The watches that are behind, each by the plural of its kind and its namespace."""
        return sorted(
            kind.plural if namespace is None else f"{kind.plural} in {namespace}" for kind, namespace in self._behind
        )
