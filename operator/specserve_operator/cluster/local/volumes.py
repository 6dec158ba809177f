"""Volumes of a pod as folders on this machine.

ConfigMaps and Secrets are laid out as the kubelet lays them out: keys are links into `..data`, itself a link that is
switched in one step, so a running program sees all of an update or nothing of it.
"""

import base64
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specserve_operator.cluster.local.podspec import ConfigReader, Mount, PodConfigError, explained, read_field
from specserve_operator.cluster.local.statedir import StateDir
from specserve_operator.core.objects import Manifest

_CONFIG_SOURCES = ("configMap", "secret", "projected", "downwardAPI")


def decode_config(obj: Manifest) -> dict[str, bytes]:
    """The keys of a ConfigMap or Secret with their content."""
    encoded = obj.get("data") or {}
    if obj["kind"] == "Secret":
        data = {key: base64.b64decode(value) for key, value in encoded.items()}
        return data | {key: value.encode() for key, value in (obj.get("stringData") or {}).items()}
    binary = {key: base64.b64decode(value) for key, value in (obj.get("binaryData") or {}).items()}
    return binary | {key: value.encode() for key, value in encoded.items()}


def config_names(pod: Manifest) -> Iterator[tuple[str, str]]:
    """Kind and name of each ConfigMap and Secret that the pod mounts."""
    for volume in pod["spec"].get("volumes", ()):
        for source in [volume, *(volume.get("projected") or {}).get("sources", ())]:
            if (source.get("configMap") or {}).get("name"):
                yield "ConfigMap", source["configMap"]["name"]
            if source.get("secret"):
                yield "Secret", str(source["secret"].get("secretName") or source["secret"].get("name"))


def materialise(pod: Manifest, state: StateDir, read_config: ConfigReader) -> dict[str, Path]:
    """Makes or updates the folder of each volume; returns them by volume name. Raises `PodConfigError`."""
    meta = pod["metadata"]
    folder = state.pod(meta["namespace"], meta["name"]) / "volumes"
    paths: dict[str, Path] = {}
    for volume in pod["spec"].get("volumes", ()):
        with explained(f"volume {volume.get('name', 'without a name')}"):
            name = volume["name"]
            if any(source in volume for source in _CONFIG_SOURCES):
                paths[name] = folder / name
                write_config(paths[name], _content_of(volume, pod, read_config))
            else:
                paths[name] = _plain_folder(volume, folder / name, state, meta["namespace"])
    return paths


def _plain_folder(volume: Mapping[str, Any], own: Path, state: StateDir, namespace: str) -> Path:
    if "hostPath" in volume:
        path = Path(volume["hostPath"]["path"])
        if not path.exists() and volume["hostPath"].get("type", "").endswith("OrCreate"):
            path.mkdir(parents=True)
        if not path.exists():
            raise PodConfigError(f"volume {volume['name']}: {path} does not exist")
        return path
    if "persistentVolumeClaim" in volume:
        own = state.claims / namespace / volume["persistentVolumeClaim"]["claimName"]
    elif "emptyDir" not in volume:
        kind = ", ".join(key for key in volume if key != "name") or "empty"
        raise PodConfigError(f"volume {volume['name']}: a volume of kind {kind} is not known to local pods")
    own.mkdir(parents=True, exist_ok=True)
    return own


def _content_of(volume: Mapping[str, Any], pod: Manifest, read_config: ConfigReader) -> dict[str, bytes]:
    """Files of a volume, by path within it."""
    files: dict[str, bytes] = {}
    for source in volume["projected"].get("sources", ()) if "projected" in volume else [volume]:
        if "configMap" in source:
            files |= _select("ConfigMap", source["configMap"]["name"], source["configMap"], read_config)
        elif "secret" in source:
            files |= _select("Secret", _secret_name(source["secret"]), source["secret"], read_config)
        elif "downwardAPI" in source:
            for item in source["downwardAPI"].get("items", ()):
                files[item["path"]] = read_field(pod, item["fieldRef"]["fieldPath"]).encode()
        else:
            kind = ", ".join(source)
            raise PodConfigError(f"volume {volume['name']}: source {kind} is not known to local pods")
    return files


def _secret_name(secret: Mapping[str, Any]) -> str:
    """A volume says secretName, a source of a projected volume name."""
    return str(secret.get("secretName") or secret["name"])


def _select(kind: str, name: str, source: Mapping[str, Any], read_config: ConfigReader) -> dict[str, bytes]:
    data = read_config(kind, name)
    if data is None:
        if source.get("optional"):
            return {}
        raise PodConfigError(f"{kind} {name} not found")
    if "items" not in source:
        return dict(data)
    missing = [item["key"] for item in source["items"] if item["key"] not in data]
    if missing and not source.get("optional"):
        raise PodConfigError(f"{kind} {name} has no key {missing[0]}")
    return {item["path"]: data[item["key"]] for item in source["items"] if item["key"] in data}


def write_config(folder: Path, files: Mapping[str, bytes]) -> None:
    """Makes `files` the content of the volume in one step; does nothing if they are already."""
    current = folder / "..data"
    if current.is_dir() and _read_files(current) == dict(files):
        return
    folder.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix="..", dir=folder))
    fresh.chmod(0o755)
    for name, content in files.items():
        (fresh / name).parent.mkdir(parents=True, exist_ok=True)
        (fresh / name).write_bytes(content)
    old = folder / os.readlink(current) if current.is_symlink() else None
    link = folder / "..data_new"
    link.unlink(missing_ok=True)
    link.symlink_to(fresh.name)
    os.replace(link, current)
    _link_keys(folder, {Path(name).parts[0] for name in files})
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _link_keys(folder: Path, names: set[str]) -> None:
    for name in names:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data") / name)
    for path in folder.iterdir():
        if not path.name.startswith("..") and path.name not in names:
            path.unlink()


def _read_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def mounts_of(container: Mapping[str, Any], volumes: Mapping[str, Path]) -> list[Mount]:
    """The mount points of a container. Raises `PodConfigError` for a volume that the pod does not have."""
    mounts = []
    for mount in container.get("volumeMounts", ()):
        with explained(f"volumeMounts of container {container['name']}"):
            if mount["name"] not in volumes:
                raise PodConfigError(f"container {container['name']} mounts {mount['name']}, which is no volume")
            mounts.append(Mount(mount["mountPath"], volumes[mount["name"]] / mount.get("subPath", "")))
    return mounts
