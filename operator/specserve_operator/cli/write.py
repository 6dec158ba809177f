"""`specserve apply`, `delete`, `scale` and `upgrade`."""

from collections.abc import Sequence
from pathlib import Path

from specserve_operator.cli.client import Client
from specserve_operator.cli.errors import CliError, refuse_usage
from specserve_operator.core.objects import ServiceKey


def apply(client: Client, path: Path) -> list[str]:
    """Creates or changes the services of a file. One line each, as kubectl's."""
    from specserve_operator.cli.manifests import read_manifests

    return [_outcome_line(result["name"], result["outcome"]) for result in client.apply(read_manifests(path))]


def delete(client: Client, name: str | None, path: Path | None, *, namespace: str, timeout_seconds: float) -> list[str]:
    """Deletes a service by name, or those of a file, and waits until their pods are gone; for 0 seconds not at all."""
    if (name is None) == (path is None):
        refuse_usage("give either the NAME of a service or -f FILE")
    if path is not None:
        from specserve_operator.cli.manifests import key_of, read_manifests

        keys = [key_of(manifest) for manifest in read_manifests(path)]
    else:
        keys = [ServiceKey(namespace, name or "")]
    for key in keys:
        if not client.delete(key, wait_seconds=timeout_seconds) and timeout_seconds > 0:
            raise CliError(f"service {key.name}: its pods have not ended within {timeout_seconds:g} s; they still do")
    return [_outcome_line(key.name, "deleted") for key in keys]


def scale(client: Client, name: str, assignments: Sequence[str], *, namespace: str) -> str:
    """Sets replicas of pools, e.g. `decode=3`. A line as kubectl's."""
    result = client.scale(ServiceKey(namespace, name), parse_replicas(assignments))
    return _outcome_line(name, "unchanged" if result["outcome"] == "unchanged" else "scaled")


def upgrade(client: Client, name: str, *, namespace: str) -> str:
    """Replaces pods that an earlier version has made. A line as kubectl's."""
    result = client.upgrade(ServiceKey(namespace, name))
    return _outcome_line(name, "unchanged" if result["outcome"] == "unchanged" else "upgraded")


def parse_replicas(assignments: Sequence[str]) -> dict[str, int]:
    """`["decode=3"]` as `{"decode": 3}`. Raises `CliError`."""
    replicas: dict[str, int] = {}
    for assignment in assignments:
        pool, equals, count = assignment.partition("=")
        if not (pool and equals and count.isascii() and count.isdigit()):
            refuse_usage(f"{assignment}: write POOL=REPLICAS, 0 or more, for example decode=2")
        if pool in replicas:
            refuse_usage(f"{pool} is there twice")
        replicas[pool] = int(count)
    return replicas


def _outcome_line(name: str, outcome: str) -> str:
    return f"speculativeservice/{name} {outcome}"
