"""Lays out what makes a fake pod's image of a worker's image, or of any with Python and `requirements/workers.txt`.

    python -m tests.fakes.engine.image FOLDER

FOLDER/layer is a layer: its content belongs to the root of the file system, with `PYTHONPATH` as in FOLDER/Dockerfile,
which builds the image on the workers' one, `BASE`. The pods' commands stay as the operator renders them, and the
`vllm-router` behind the gateway comes from the base.
"""

import argparse
import compileall
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Final

from tests.fakes.engine import ROOT

IMAGE: Final = "localhost/specserve-fake:test"
BASE_IMAGE: Final = "localhost/specserve-worker:test"
INSTALLED: Final = "/opt/specserve-fake"
_DOCKERFILE: Final = f"""\
ARG BASE={BASE_IMAGE}
FROM ${{BASE}}
COPY layer /
ENV PYTHONPATH={INSTALLED}
"""
_ENGINE: Final = Path(__file__).resolve().parent
_CODE_ONLY: Final = shutil.ignore_patterns("__pycache__", "*.pyi", "*.proto")


def lay_out(folder: Path) -> Path:
    """Writes the layer and the Dockerfile; the layer's folder. What was in it before is replaced."""
    layer = folder / "layer"
    if layer.exists():
        shutil.rmtree(layer)
    code = layer / INSTALLED.removeprefix("/")
    for package in (ROOT / "workers" / "specserve_workers", ROOT / "protos" / "specserve_protos"):
        shutil.copytree(package, code / package.name, ignore=_CODE_ONLY)
    fake = code / _ENGINE.relative_to(ROOT)
    shutil.copytree(_ENGINE, fake, ignore=_CODE_ONLY)
    for entry in ("decode.py", "prefill.py"):
        shutil.copy(fake / "path" / "specserve_workers" / entry, code / "specserve_workers" / entry)
    shutil.rmtree(fake / "path")
    # The file system is read-only in a pod, and compiling takes longer than all else at a start.
    is_compiled = compileall.compile_dir(
        code, ddir=INSTALLED, quiet=1, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH
    )
    if not is_compiled:
        raise RuntimeError(f"{code}: not all files could be compiled, see above")
    (folder / "Dockerfile").write_text(_DOCKERFILE, encoding="utf-8")
    return layer


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.fakes.engine.image", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    sys.stdout.write(f"{lay_out(parser.parse_args(argv).folder)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
