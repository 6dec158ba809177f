#!/usr/bin/env bash
# Generates into a copy and compares: what is committed must be what the sources give.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r protos crds "$work"
.venv/bin/python -m grpc_tools.protoc -I protos --python_out="$work/protos" --pyi_out="$work/protos" \
  --grpc_python_out="$work/protos" protos/specserve_protos/v1alpha1/*.proto
.venv/bin/python -m specserve_operator.api.crd "$work/crds" >/dev/null
status=0
for dir in protos crds; do
  diff -r -x __pycache__ "$dir" "$work/$dir" || status=1
done
diff -r crds charts/specserve/files/crds || status=1
[ "$status" = 0 ] || echo "generated files are not current: run 'make generate'" >&2
exit "$status"
