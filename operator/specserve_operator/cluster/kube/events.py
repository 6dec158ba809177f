"""Events about services: one object for the same thing said again, with a count."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from specserve_operator.cluster.kube.client import ApiError, KubeClient
from specserve_operator.cluster.kube.kinds import EVENT
from specserve_operator.constants import FIELD_MANAGER
from specserve_operator.core.objects import Event, Manifest

# The API server forgets an event after an hour.
_MEMORY = timedelta(minutes=50)
_REMEMBERED = 4096


@dataclass(slots=True)
class _Said:
    name: str
    first: datetime
    last: datetime
    count: int


class EventRecorder:
    """Writes events, each thing at most once in `quiet_seconds`; what was held back is in the next one's count."""

    def __init__(
        self, client: KubeClient, *, now: Callable[[], datetime], reporter: str, quiet_seconds: float = 10.0
    ) -> None:
        self._client = client
        self._now = now
        self._reporter = reporter
        self._quiet = timedelta(seconds=quiet_seconds)
        self._said: OrderedDict[str, _Said] = OrderedDict()

    async def emit(self, about: Manifest, event: Event) -> None:
        """Raises `ClusterError`. A namespace that is going away takes no events, which is no error."""
        now = self._now()
        meta = about["metadata"]
        text = "\0".join([meta["uid"], event.type, event.reason, event.message])
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        said = self._said.get(digest)
        if said is None or now - said.last > _MEMORY:
            said = _Said(f"{meta['name'][:200]}.{digest}.{int(now.timestamp()):x}", now, now, 0)
        elif now - said.last < self._quiet and said.count:
            said.count += 1
            return
        said.count, said.last = said.count + 1, now
        self._said[digest] = said
        self._said.move_to_end(digest)
        while len(self._said) > _REMEMBERED:
            self._said.popitem(last=False)
        try:
            await self._client.apply(EVENT, self._render(about, event, said), manager=FIELD_MANAGER)
        except ApiError as error:
            if error.status != 404 and "being terminated" not in str(error):
                raise

    def _render(self, about: Manifest, event: Event, said: _Said) -> Manifest:
        meta = about["metadata"]
        involved: dict[str, Any] = {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            "namespace": meta["namespace"],
            "name": meta["name"],
            "uid": meta["uid"],
        }
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": said.name, "namespace": meta["namespace"]},
            "involvedObject": involved,
            "type": str(event.type),
            "reason": event.reason,
            "message": event.message[:1024],
            "count": said.count,
            "firstTimestamp": _text(said.first),
            "lastTimestamp": _text(said.last),
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
            "reportingInstance": self._reporter,
        }


def _text(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
