"""Where the commands of the cluster are: those built here in a cache, the others on the search path."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hack.kube.errors import CommandFailedError, MissingCommandError

TOOLS = Path(__file__).parent / "tools"
# Debian leaves these off the search path of ordinary users.
_SYSTEM_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def kubernetes_version() -> str:
    """The version that is built, such as v1.34.4, from the module that builds it."""
    found = re.search(r"k8s\.io/kubernetes (v\S+)", (TOOLS / "kubernetes" / "go.mod").read_text())
    assert found is not None
    return found.group(1)


def cache_folder() -> Path:
    """Where builds and downloads stay between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "specserve" / "kube"


def built_folder() -> Path:
    """Where `tools/build.sh` puts the commands; the environment's SPECSERVE_KUBE_BIN overrides it."""
    override = os.environ.get("SPECSERVE_KUBE_BIN")
    return Path(override) if override else cache_folder() / kubernetes_version() / "bin"


def built(name: str) -> str:
    """The path of a command that `tools/build.sh` makes.

    Raises:
        MissingCommandError: if it is not built.
    """
    path = built_folder() / name
    if not path.exists():
        raise MissingCommandError(name)
    return str(path)


def installed(name: str) -> str:
    """The path of a command of the system.

    Raises:
        MissingCommandError: if it is not installed.
    """
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SYSTEM_FOLDERS}")
    if path is None:
        raise MissingCommandError(name)
    return path


def environment(**more: str) -> dict[str, str]:
    """The environment of the cluster's processes: no proxies, no cloud credentials, nothing of the caller's."""
    return {"PATH": _SYSTEM_FOLDERS, "HOME": os.environ.get("HOME", "/"), "LANG": "C.UTF-8", **more}


def run(*command: str, stdin: str | None = None, variables: Mapping[str, str] | None = None) -> str:
    """What a command of the system prints; `variables` is its whole environment, by default `environment()`.

    Raises:
        CommandFailedError: if it fails.
    """
    done = subprocess.run(
        [installed(command[0]), *command[1:]],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env=variables if variables is not None else environment(),
    )
    if done.returncode:
        raise CommandFailedError(command, done.stderr)
    return done.stdout
