"""Whether the watches live: a full list must not show what a watch has kept back for long."""

from collections.abc import Callable

from specserve_operator.cluster.kube.cache import resource_version
from specserve_operator.cluster.kube.kinds import Kind
from specserve_operator.core.objects import Manifest


class WatchHealth:
    """For every kind the newest version that its watch has shown, against the newest that a list has."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self._watched: dict[Kind, int] = {}
        self._behind: dict[Kind, tuple[int, float]] = {}

    def on_event(self, kind: Kind, obj: Manifest) -> None:
        """A watch has shown an object."""
        version = resource_version(obj)
        self._watched[kind] = max(version, self._watched.get(kind, 0))
        awaited = self._behind.get(kind)
        if awaited is not None and self._watched[kind] >= awaited[0]:
            del self._behind[kind]

    def on_listed(self, kind: Kind, newest: int) -> None:
        """A list has shown objects, the newest of this version; 0 if there were none."""
        if newest <= self._watched.get(kind, 0):
            self._behind.pop(kind, None)
        elif kind not in self._behind:
            self._behind[kind] = (newest, self._time())

    def behind_seconds(self) -> float:
        """For how long the slowest watch has not shown what a list did; 0 if none is behind."""
        since = min((since for _, since in self._behind.values()), default=None)
        return 0.0 if since is None else self._time() - since

    def kinds_behind(self) -> list[str]:
        """Plural names of the kinds whose watches are behind."""
        return sorted(kind.plural for kind in self._behind)
