#!/usr/bin/env bash
# Writes every generated file: gRPC code from protos/, CRDs from the pydantic models, their copies in the chart.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python -m grpc_tools.protoc -I protos --python_out=protos --pyi_out=protos --grpc_python_out=protos \
  protos/specserve_protos/v1alpha1/*.proto
.venv/bin/python -m specserve_operator.api.crd crds
# Helm cannot reach outside its chart, so the chart has copies.
rm -f charts/specserve/files/crds/*.yaml && cp crds/*.yaml charts/specserve/files/crds/
