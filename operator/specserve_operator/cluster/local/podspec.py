"""What a container of a pod runs on this machine: command, environment and ports, from its spec. Pure.

Follows what the kubelet does with command, args and env, and adds one step: a path below a mount point becomes the path
of the folder on this machine that stands for the volume.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Protocol

from specserve_operator.core.objects import Manifest

_REFERENCE = re.compile(r"\$(\$|\(([^()$]+)\))")
_MAP_FIELD = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")

_PROXY_VARIABLES = frozenset({"http_proxy", "https_proxy", "all_proxy"})


class PodConfigError(Exception):
    """The spec asks for something that is not there (yet) or not to be had here. `reason` is the kubelet's."""

    reason = "CreateContainerConfigError"


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns what reading a malformed part of a spec raises into a `PodConfigError` about `what`."""
    try:
        yield
    except KeyError as error:
        raise PodConfigError(f"{what}: {error.args[0]} is missing") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise PodConfigError(f"{what} is malformed: {error}") from error


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount point and the local folder or file behind it."""

    mount_path: str
    local_path: Path


@dataclass(frozen=True, slots=True)
class Launch:
    """What is executed. `argv[0]` is looked up in PATH of `env`."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    working_dir: Path


class ConfigReader(Protocol):
    """Reads the keys of a ConfigMap or Secret of the pod's namespace; None if there is no such object."""

    def __call__(self, kind: str, name: str) -> Mapping[str, bytes] | None: ...


def plan_launch(
    pod: Manifest,
    container: Mapping[str, Any],
    *,
    mounts: Sequence[Mount],
    base_env: Mapping[str, str],
    read_config: ConfigReader,
    working_dir: Path,
) -> Launch:
    """What to run for `container`. Raises `PodConfigError`.

    `base_env` is what every container gets; the container's own variables win.
    """
    with explained(f"env of container {container['name']}"):
        own = resolve_env(pod, container, read_config=read_config)
    with explained(f"resources of container {container['name']}"):
        limits = limit_environment(container)
    env = {**base_env, **limits, **{name: to_local_path(value, mounts) for name, value in own.items()}}
    argv = resolve_command([*container.get("command", ()), *container.get("args", ())], own, mounts)
    if not container.get("command"):
        raise PodConfigError(
            f"container {container['name']} has no command: images are not run here, so its entry point is unknown"
        )
    directory = container.get("workingDir")
    local_dir = Path(to_local_path(directory, mounts)) if directory else working_dir
    return Launch(argv=argv, env=env, working_dir=local_dir if local_dir.is_dir() else working_dir)


def limit_environment(container: Mapping[str, Any]) -> dict[str, str]:
    """The container's CPU limit, in CPUs, which nothing enforces here: workers read it where a cgroup has none."""
    limit = ((container.get("resources") or {}).get("limits") or {}).get("cpu")
    if limit is None:
        return {}
    text = str(limit)
    try:
        cpus = Decimal(text[:-1]) / 1000 if text.endswith("m") else Decimal(text)
    except InvalidOperation:
        raise ValueError(f"cpu limit {limit}") from None
    if not cpus.is_finite() or cpus <= 0:
        raise ValueError(f"cpu limit {limit}")
    return {"SPECSERVE_CPU_LIMIT": format(cpus, "f")}


def resolve_command(words: Sequence[str], variables: Mapping[str, str], mounts: Sequence[Mount]) -> tuple[str, ...]:
    """`words` with references replaced and mounted paths made local."""
    return tuple(to_local_path(expand(word, variables), mounts) for word in words)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replaces `$(NAME)`. Unknown names stay as they are and `$$` is one `$`, as on Kubernetes."""

    def replace(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return variables.get(match[2], match[0])

    return _REFERENCE.sub(replace, text)


def to_local_path(text: str, mounts: Sequence[Mount]) -> str:
    """Makes a path below a mount point local, also as the value of `--flag=path`. The deepest mount point wins."""
    flag, separator, value = text.partition("=") if text.startswith("-") else ("", "", text)
    for mount in sorted(mounts, key=lambda m: len(m.mount_path), reverse=True):
        root = mount.mount_path.rstrip("/")
        if value == root or value.startswith(root + "/"):
            return f"{flag}{separator}{mount.local_path}{value[len(root) :]}"
    return text


def resolve_env(pod: Manifest, container: Mapping[str, Any], *, read_config: ConfigReader) -> dict[str, str]:
    """The container's variables, `envFrom` first. A value may refer to those before it. Raises `PodConfigError`."""
    env: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        env.update(_env_from(source, read_config))
    for entry in container.get("env", ()):
        if "valueFrom" not in entry:
            env[entry["name"]] = expand(entry.get("value", ""), env)
        elif (value := _value_from(entry, pod, read_config)) is not None:
            env[entry["name"]] = value
    return env


def _env_from(source: Mapping[str, Any], read_config: ConfigReader) -> Iterator[tuple[str, str]]:
    kind, reference = (
        ("ConfigMap", source["configMapRef"]) if "configMapRef" in source else ("Secret", source["secretRef"])
    )
    data = read_config(kind, reference["name"])
    if data is None and not reference.get("optional"):
        raise PodConfigError(f"{kind} {reference['name']} not found")
    for key, value in (data or {}).items():
        yield source.get("prefix", "") + key, value.decode()


def _value_from(entry: Mapping[str, Any], pod: Manifest, read_config: ConfigReader) -> str | None:
    source = entry["valueFrom"]
    if "fieldRef" in source:
        return read_field(pod, source["fieldRef"]["fieldPath"])
    for field, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
        if field in source:
            reference = source[field]
            value = (read_config(kind, reference["name"]) or {}).get(reference["key"])
            if value is None and not reference.get("optional"):
                raise PodConfigError(f"env {entry['name']}: {kind} {reference['name']} has no key {reference['key']}")
            return None if value is None else value.decode()
    raise PodConfigError(f"env {entry['name']}: valueFrom {', '.join(source)} is not known to local pods")


def read_field(pod: Manifest, path: str) -> str:
    """A field of the pod for the downward API. Raises `PodConfigError` for one that Kubernetes does not offer."""
    meta, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    if match := _MAP_FIELD.fullmatch(path):
        return str((meta.get(match[1]) or {}).get(match[2], ""))
    fields = {
        "metadata.name": meta["name"],
        "metadata.namespace": meta["namespace"],
        "metadata.uid": meta["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": status.get("podIP", ""),
        "status.podIPs": status.get("podIP", ""),
        "status.hostIP": status.get("hostIP", ""),
    }
    if path not in fields:
        raise PodConfigError(f"fieldPath {path} is not known")
    return str(fields[path])


def resolve_port(pod: Manifest, port: int | str) -> int | None:
    """The number of a port that is given by number or by name; None if no container of the pod names it so."""
    if isinstance(port, int):
        return port
    for declared in declared_ports(pod):
        if declared.get("name") == port:
            return int(declared["containerPort"])
    return None


def declared_ports(pod: Manifest) -> Iterator[Mapping[str, Any]]:
    """All ports that containers of the pod declare."""
    for container in pod["spec"]["containers"]:
        yield from container.get("ports", ())


def base_environment(inherited: Mapping[str, str], *, python_folder: Path, reads_pods: bool) -> dict[str, str]:
    """What containers get of the control plane's environment: all of it, without its access to a cluster.

    `python_folder` leads PATH, so that `python` and the commands of installed packages are those of the control plane.
    Pods reach each other directly, also where a proxy leads to the rest of the world. One that `reads_pods` gets no
    proxy at all: the router's Kubernetes client goes without discovery if it sees one, whatever `NO_PROXY` says.
    """
    dropped = ("KUBECONFIG", "SPECSERVE_")
    env = {name: value for name, value in inherited.items() if not name.startswith(dropped)}
    proxies = [name for name in env if name.lower() in _PROXY_VARIABLES]
    if reads_pods:
        for name in proxies:
            del env[name]
    elif proxies:
        exempt = [env[name] for name in ("no_proxy", "NO_PROXY") if env.get(name)][:1]
        env["no_proxy"] = env["NO_PROXY"] = ",".join([*exempt, "localhost", "127.0.0.0/8"])
    env["PATH"] = os.pathsep.join([str(python_folder), env.get("PATH", os.defpath)])
    env.setdefault("PYTHONUNBUFFERED", "1")  # what a container prints is in its log at once
    return env
