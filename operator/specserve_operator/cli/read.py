"""`specserve get`, `describe` and `logs`."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from queue import SimpleQueue

from specserve_operator.cli.client import NOT_FOUND, ApiError, Client, NotRunning
from specserve_operator.cli.describe import describe_service
from specserve_operator.cli.errors import CliError, refuse_usage
from specserve_operator.cli.output import (
    OutputFormat,
    as_list,
    format_events,
    format_pods,
    format_services,
    format_structured,
)
from specserve_operator.constants import LABEL_POOL, LABEL_SERVICE
from specserve_operator.core.objects import Manifest

_SERVICES, _PODS, _EVENTS, _ALL = "spsvc", "pods", "events", "all"
_KINDS = {_SERVICES: "SpeculativeService", _PODS: "Pod", _EVENTS: "Event"}
_ALIASES = {
    "speculativeservices": _SERVICES,
    "speculativeservice": _SERVICES,
    "services": _SERVICES,
    "service": _SERVICES,
    "pod": _PODS,
    "po": _PODS,
    "event": _EVENTS,
    "ev": _EVENTS,
}
RESOURCES = (*_KINDS, _ALL)


def get(client: Client, resource: str, *, name: str | None, namespace: str, output: OutputFormat) -> str:
    """The text of `specserve get`. Raises `CliError` where a name is not there."""
    kind, slash, part = resource.partition("/")
    if slash:
        if name is not None or not part:
            refuse_usage(f"write {kind}/NAME or {kind} NAME")
        resource, name = kind, part
    resource = _ALIASES.get(resource, resource)
    if resource == _ALL:
        if name is not None:
            refuse_usage("`get all` takes no name")
        return _get_all(client, namespace=namespace, output=output)
    if resource not in _KINDS:
        refuse_usage(f"there is no resource {resource}; choose one of {', '.join(RESOURCES)}")
    items = client.list_objects(_KINDS[resource], namespace=namespace)
    if name is not None:
        items = _named(items, name, resource=resource)
    if output in (OutputFormat.JSON, OutputFormat.YAML):
        is_one = name is not None and resource != _EVENTS
        return format_structured(items[0] if is_one else as_list(items), output)
    if not items:
        return f"no {resource} in namespace {namespace}\n"
    return _format(resource, items, is_wide=output is OutputFormat.WIDE)


def _named(items: Sequence[Manifest], name: str, *, resource: str) -> list[Manifest]:
    """Those of that name; events by the object they are about."""
    if resource == _EVENTS:
        return [event for event in items if event.get("involvedObject", {}).get("name") == name]
    found = [item for item in items if item["metadata"]["name"] == name]
    if not found:
        known = ", ".join(str(item["metadata"]["name"]) for item in items) or "none"
        noun = {_SERVICES: "service", _PODS: "pod"}.get(resource, resource)
        raise CliError(f"there is no {noun} {name}; there is: {known}")
    return found


def _get_all(client: Client, *, namespace: str, output: OutputFormat) -> str:
    lists = {resource: client.list_objects(kind, namespace=namespace) for resource, kind in _KINDS.items()}
    if output in (OutputFormat.JSON, OutputFormat.YAML):
        return format_structured(as_list([item for items in lists.values() for item in items]), output)
    is_wide = output is OutputFormat.WIDE
    texts = [_format(resource, items, is_wide=is_wide) for resource, items in lists.items() if items]
    return "\n".join(texts) or f"nothing in namespace {namespace}\n"


def _format(resource: str, items: Sequence[Manifest], *, is_wide: bool) -> str:
    now = datetime.now(UTC)
    if resource == _SERVICES:
        return format_services(items, now=now, wide=is_wide)
    if resource == _PODS:
        return format_pods(items, now=now, wide=is_wide)
    return format_events(items, now=now)


def describe(client: Client, *, name: str | None, namespace: str, output: OutputFormat) -> str:
    """The text of `specserve describe`: one service, or all."""
    services = client.list_objects("SpeculativeService", namespace=namespace)
    if name is not None:
        services = _named(services, name, resource=_SERVICES)
    pods = client.list_objects("Pod", namespace=namespace)
    events = client.list_objects("Event", namespace=namespace)
    described = [(service, _pods_of(service, pods), _events_of(service, events)) for service in services]
    if output in (OutputFormat.JSON, OutputFormat.YAML):
        data = [{"service": service, "pods": own, "events": about} for service, own, about in described]
        return format_structured(data[0] if name is not None else data, output)
    if not described:
        return f"no {_SERVICES} in namespace {namespace}\n"
    now = datetime.now(UTC)
    return "\n\n".join(describe_service(s, pods=own, events=about, now=now) for s, own, about in described)


def _pods_of(service: Manifest, pods: Sequence[Manifest]) -> list[Manifest]:
    name = service["metadata"]["name"]
    return [pod for pod in pods if pod["metadata"].get("labels", {}).get(LABEL_SERVICE) == name]


def _events_of(service: Manifest, events: Sequence[Manifest]) -> list[Manifest]:
    """Events about the service itself; those of its pods show in `get events`."""
    kind, name = "SpeculativeService", service["metadata"]["name"]
    about = ((event, event.get("involvedObject", {})) for event in events)
    return [event for event, obj in about if (obj.get("kind"), obj.get("name")) == (kind, name)]


@dataclass(frozen=True, slots=True)
class LogOptions:
    """What to show of a log; `tail_lines` None is all of it."""

    container: str | None = None
    follow: bool = False
    previous: bool = False
    tail_lines: int | None = None
    as_json: bool = False


def logs(client: Client, target: str, *, namespace: str, options: LogOptions) -> Iterator[str]:
    """The lines of `specserve logs`: of one pod, or of all pods of a pool. Raises `CliError`."""
    if options.follow and options.previous:
        refuse_usage("--follow and --previous exclude each other")
    pods = _log_pods(client, target, namespace=namespace)
    if not pods:
        yield from _kept_log(client, target, namespace=namespace, options=options)
        return
    readers = {pod: _reader(client, namespace, pod, options) for pod in pods}
    lines: Iterator[tuple[str, str]]
    if len(pods) == 1:
        lines = ((pods[0], line) for line in readers[pods[0]]())
    elif options.follow:
        lines = _interleave(readers)
    else:
        lines = ((pod, line) for pod in pods for line in _or_note(readers[pod]))
    for pod, line in lines:
        yield format_log_line(pod, line, as_json=options.as_json, with_pod=len(pods) > 1)


def _kept_log(client: Client, target: str, *, namespace: str, options: LogOptions) -> Iterator[str]:
    """The log of a pod that is gone. Raises `CliError` if there is none."""
    pod = _pod_name(target)
    try:
        for line in _reader(client, namespace, pod, options)():
            yield format_log_line(pod, line, as_json=options.as_json, with_pod=False)
    except ApiError as error:
        if error.status != NOT_FOUND:
            raise
        pods = client.list_objects("Pod", namespace=namespace)
        names = [str(pod["metadata"]["name"]) for pod in pods]
        known = ", ".join([*sorted({_pool_of(pod) for pod in pods}), *names]) or "none"
        message = f"there is no pod or pool {target} in namespace {namespace}; there is: {known}; of kept logs: {error}"
        raise CliError(message) from error


LogReader = Callable[[], Iterator[str]]


def _reader(client: Client, namespace: str, pod: str, options: LogOptions) -> LogReader:
    return lambda: client.log_lines(
        namespace,
        pod,
        container=options.container,
        previous=options.previous,
        tail_lines=options.tail_lines,
        follow=options.follow,
    )


def _or_note(read: LogReader) -> Iterator[str]:
    """The lines of one of several pods, or why it has none: that must not hide the others."""
    try:
        yield from read()
    except (ApiError, NotRunning) as error:
        yield f"({error})\n"


def _interleave(readers: Mapping[str, LogReader]) -> Iterator[tuple[str, str]]:
    """Lines of several logs as they come, until all pods are gone."""
    queue: SimpleQueue[tuple[str, str] | Exception | None] = SimpleQueue()

    def read(pod: str) -> None:
        try:
            for line in _or_note(readers[pod]):
                queue.put((pod, line))
        except Exception as error:  # ends the command, in the thread that can say so
            queue.put(error)
        finally:
            queue.put(None)

    for pod in readers:
        # Daemons: a reader waits in the socket for as long as its pod lives, and Ctrl-C must end the command.
        threading.Thread(target=read, args=(pod,), daemon=True).start()
    remaining = len(readers)
    while remaining:
        item = queue.get()
        if item is None:
            remaining -= 1
        elif isinstance(item, Exception):
            raise item
        else:
            yield item


def _log_pods(client: Client, target: str, *, namespace: str) -> list[str]:
    """The pods that run now under that name or in that pool."""
    pods = client.list_objects("Pod", namespace=namespace)
    names = [str(pod["metadata"]["name"]) for pod in pods]
    if _pod_name(target) in names:
        return [_pod_name(target)]
    return [name for name, pod in zip(names, pods, strict=True) if _pool_of(pod) == target]


def _pod_name(target: str) -> str:
    """`pod/NAME`, as kubectl writes it, or the name alone."""
    kind, slash, name = target.partition("/")
    return name if slash and _ALIASES.get(kind, kind) == _PODS else target


def _pool_of(pod: Manifest) -> str:
    return str(pod["metadata"].get("labels", {}).get(LABEL_POOL, ""))


def format_log_line(pod: str, line: str, *, as_json: bool, with_pod: bool) -> str:
    """One line of a log: as it is, with its pod's name, or as a JSON object."""
    if as_json:
        return json.dumps({"pod": pod, "line": line.rstrip("\n")}, ensure_ascii=False) + "\n"
    return f"[{pod}] {line}" if with_pod else line
