"""Container images from Dockerfiles, without a container engine: Debian's buildah, run as root.

Its storage is in the cache folder of this package, so that unchanged steps are not done again.
"""

import configparser
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hack.kube.commands import cache_folder, installed, run
from hack.kube.errors import KubeError

ROOT = Path(__file__).resolve().parents[2]
BUSYBOX_IMAGE = "localhost/busybox:1"
_BUSYBOX = Path("/bin/busybox")
_BUSYBOX_DOCKERFILE = Path(__file__).parent / "busybox" / "Dockerfile"

# Debian 12 has Python 3.11.
DEBIAN = "bookworm"
# What running Python does not need, so that images load fast: every file costs a node a millisecond. No package can
# be installed afterwards. The runtime makes /dev itself.
_WASTE = (
    *("dev/*", "var/cache/apt/*", "var/lib/apt/lists/*", "var/lib/dpkg/info/*", "var/log/*", "usr/share/perl*"),
    *("usr/share/doc/*", "usr/share/man/*", "usr/share/locale/*", "usr/share/zoneinfo/*", "usr/share/bash-completion"),
    *("usr/lib/*/perl*", "usr/lib/*/gconv/*", "usr/lib/python3*/lib2to3", "usr/lib/apt", "usr/share/debconf"),
)

# pip's settings that say how packages are reached; `cert` is handled apart.
_PIP_SETTINGS = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "default-timeout")
_CERTIFICATE_SECRET = "/run/secrets/ca"


class ImageBuildError(KubeError):
    """A build failed; its output has gone to standard error."""


def build_image(
    dockerfile: Path,
    context: Path,
    *,
    tag: str,
    arguments: Mapping[str, str] | None = None,
    secrets: Mapping[str, Path] | None = None,
) -> None:
    """Builds `dockerfile` as `tag`, with build arguments, and files that its RUN steps may mount as secrets.

    Raises:
        ImageBuildError: if a step fails.
    """
    options: list[str] = []
    for name, value in (arguments or {}).items():
        options += ["--build-arg", f"{name}={value}"]
    for name, file in (secrets or {}).items():
        options += ["--secret", f"id={name},src={file}"]
    ignore = dockerfile.with_name(f"{dockerfile.name}.dockerignore")
    if ignore.exists():
        options.append(f"--ignorefile={ignore}")
    build = ["build", "--isolation=chroot", "--layers", f"--tag={tag}", *options, f"--file={dockerfile}", str(context)]
    # The caller's environment: steps that download may need its proxies.
    if subprocess.run(_buildah(*build), check=False, stdout=sys.stderr, env=os.environ).returncode:
        raise ImageBuildError(f"{dockerfile} could not be built: its output says why")


def save_image(tag: str, archive: Path) -> None:
    """Writes a built image as an archive that `Cluster.load_image` takes, not compressed: loading is faster so."""
    unfinished = archive.with_name(f"{archive.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    run(*_buildah("push", tag, f"docker-archive:{unfinished}:{tag}"))
    unfinished.rename(archive)


def has_image(tag: str) -> bool:
    return bool(run(*_buildah("images", "--quiet", "--filter", f"reference={tag}")))


def busybox_archive() -> Path:
    """The archive of the sandbox image, which is built if the busybox or the Dockerfile has changed."""
    key = hashlib.sha256(_BUSYBOX.read_bytes() + _BUSYBOX_DOCKERFILE.read_bytes()).hexdigest()[:16]
    archive = cache_folder() / f"busybox-{key}.tar"
    if not archive.exists():
        with tempfile.TemporaryDirectory() as context:
            shutil.copy(_BUSYBOX, context)
            build_image(_BUSYBOX_DOCKERFILE, Path(context), tag=BUSYBOX_IMAGE)
        save_image(BUSYBOX_IMAGE, archive)
    return archive


def debian_image(packages: Sequence[str]) -> str:
    """The tag of an image of a minimal Debian with `packages`, which is made if there is none.

    It stays as it is until its storage is removed: updates of packages do not reach it.
    """
    key = hashlib.sha256(" ".join([DEBIAN, *sorted(packages), *_WASTE]).encode()).hexdigest()[:16]
    tag = f"localhost/debian:{key}"
    if not has_image(tag):
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            include = f"--include={','.join(packages)}"
            bootstrap = ["debootstrap", "--variant=minbase", include, DEBIAN, folder, *_debian_mirror()]
            run(*bootstrap)
            for path in [path for pattern in _WASTE for path in Path(folder).glob(pattern)]:
                run("rm", "-rf", str(path))
            container = run(*_buildah("from", "scratch")).strip()
            run(*_buildah("copy", "--quiet", container, folder, "/"))
            run(*_buildah("commit", "--rm", "--quiet", container, tag))
    return tag


@contextlib.contextmanager
def pip_secrets() -> Iterator[dict[str, Path]]:
    """How pip of this machine reaches its packages, as secrets `pip` and `ca` for the length of a build."""
    listed = run(sys.executable, "-m", "pip", "config", "list", variables=os.environ)
    lines = re.findall(r"^(global|install|:env:)\.([a-z-]+)='(.*)'$", listed, re.MULTILINE)
    # As with pip, a variable of the environment wins.
    found = {name: value for _, name, value in sorted(lines, key=lambda line: str(line[0]) == ":env:")}
    settings = {name: found[name] for name in _PIP_SETTINGS if name in found}
    with tempfile.TemporaryDirectory() as folder:
        secrets = {"pip": Path(folder) / "pip.conf"}
        if "cert" in found:
            secrets["ca"] = Path(found["cert"])
            settings["cert"] = _CERTIFICATE_SECRET
        config = configparser.RawConfigParser()
        config["global"] = settings
        with secrets["pip"].open("w") as file:
            config.write(file)
        yield secrets


def _debian_mirror() -> list[str]:
    """The mirror that this machine's apt uses, if it is Debian's; debootstrap knows another."""
    targets = run("apt-get", "indextargets", "--format", "$(ORIGIN) $(CODENAME) $(REPO_URI)")
    rows = [line.split() for line in targets.splitlines()]
    return [row[2] for row in rows if row[0] == "Debian" and "-" not in row[1]][:1]


def _buildah(*arguments: str) -> list[str]:
    storage = cache_folder() / "images"
    where = [f"--root={storage / 'root'}", f"--runroot={storage / 'run'}", "--storage-driver=overlay"]
    return [installed("buildah"), *where, *arguments]
