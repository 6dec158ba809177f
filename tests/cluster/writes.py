"""What one user asked an API server to change, from the audit log as it grows."""

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable

from hack.kube.access import Access
from hack.kube.audit import AuditEvent
from hack.kube.waiting import wait_until

_READS = {"get", "list", "watch"}
_LOG_SECONDS = 20.0
_LOOK_SECONDS = 0.001


class WriteLog:
    """Requests of `user` that are no reads, refused ones included, in the order of their answers."""

    def __init__(self, access: Access, user: str) -> None:
        self._access = access
        self._user = user
        self._offset = 0
        self._writes: list[AuditEvent] = []
        self._by_namespace: Counter[str] = Counter()

    def mark(self) -> int:
        """The number of writes that were answered before this call."""
        mark = f"/version?audit-mark={uuid.uuid4()}"
        self._access.get(mark)
        wait_until(lambda: self.read(until=mark), _LOG_SECONDS, what="the audit log has the latest request")
        return len(self._writes)

    def since(self, mark: int, *, namespace: str | None = None) -> list[AuditEvent]:
        """Writes between `mark` and this call; those without a namespace too, unless one is asked for."""
        end = self.mark()
        return [w for w in self._writes[mark:end] if namespace in (None, w.namespace)]

    def count(self, *, namespace: str | None = None) -> int:
        """Like `mark`, from what is in the log by now: quick, and a moment late. Of one namespace if it is given."""
        self.read()
        return len(self._writes) if namespace is None else self._by_namespace[namespace]

    def wait_count(self, count: int, *, timeout_seconds: float, unless: Callable[[], bool]) -> bool:
        """True as soon as there are `count` writes in all, false when `unless` is true or the time is up.

        Looks every millisecond, so that whoever waits can act between one write and the next.
        """
        deadline = time.monotonic() + timeout_seconds
        while self.count() < count:
            if time.monotonic() > deadline or unless():
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def read(self, *, until: str = "") -> bool:
        """Takes in new lines. True if one of them is the request for `until`."""
        path = self._access.layout.audit_log
        if not path.exists():
            return False
        with path.open("rb") as log:
            log.seek(self._offset)
            whole, _, _ = log.read().rpartition(b"\n")
        if not whole:
            return False
        self._offset += len(whole) + 1
        found = False
        for line in whole.splitlines():
            if self._user.encode() in line:
                self._take(AuditEvent.from_json(json.loads(line)))
            found = found or (bool(until) and until.encode() in line)
        return found

    def _take(self, event: AuditEvent) -> None:
        if event.user == self._user and event.resource and event.verb not in _READS:
            self._writes.append(event)
            self._by_namespace[event.namespace] += 1


def summary(writes: Iterable[AuditEvent]) -> str:
    """One line for each thing that was written, with how often."""
    counts = Counter(
        f"{w.verb} {w.resource}{'/' + w.subresource if w.subresource else ''} {w.namespace}/{w.name} -> {w.code}"
        for w in writes
    )
    return "\n".join(f"{count:4} x {what}" for what, count in counts.items())
