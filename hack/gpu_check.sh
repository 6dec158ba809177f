#!/usr/bin/env bash
# Checks on one GPU what a CPU cannot show; prints JSON on standard output, everything else on standard error.
# Takes up to 6 minutes once the packages are there. PYTHON=/path/to/python with vllm 0.32 skips the installation.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv-gpu/bin/python}"
if ! "$python" -c 'import vllm' 2>/dev/null; then
  [ -z "${PYTHON:-}" ] || { echo "gpu_check: $python has no vllm" >&2; exit 1; }
  python3 -m venv .venv-gpu
  .venv-gpu/bin/pip install --quiet --no-deps --require-hashes -r requirements/vllm.txt >&2
fi
export PYTHONPATH="$PWD/operator:$PWD/workers:$PWD/protos:$PWD"
exec "$python" -m hack.gpu_check
