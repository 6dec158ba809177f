# Every target does its own set-up. `make demo` and `make test` are the first commands on a fresh machine.
SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
PY_DIRS := operator workers tests examples bench hack

.PHONY: help setup demo test cluster-test e2e local-e2e soak unit lint type generate verify lock format bench operator-bench clean models

help: ## Lists the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | column -t -s $$'\t'

setup: ## Makes .venv (done by every other target too)
	@hack/setup.sh

demo: setup ## Serves a model on this machine, sends requests, prints what happened (MODEL=qwen: a real pair)
	@$(BIN)/python -m examples.demo --model $(or $(MODEL),tiny)

test: setup ## Unit, contract, component, chart and engine tests
	@hack/kube/tools/build.sh helm >/dev/null
	@$(BIN)/python hack/test.py fast engine

cluster-test: setup ## The operator against a real API server (the first time builds Kubernetes: 12 minutes)
	@$(BIN)/python -m hack.kube setup --control-plane-only
	@$(BIN)/python hack/test.py cluster

e2e: local-e2e cluster-test ## Whole services with real engines: on this machine, and on a Kubernetes of three nodes (needs root)
	@$(BIN)/python -m hack.kube setup
	@$(BIN)/python hack/test.py kube

local-e2e: setup ## The part of it on this machine, as processes (about 6 minutes)
	@$(BIN)/python hack/test.py e2e

soak: setup ## The long forms of the cluster tests: ten idle minutes, hundreds of random services
	@$(BIN)/python -m hack.kube setup --control-plane-only
	@SPECSERVE_SOAK=1 $(BIN)/python hack/test.py cluster

unit: setup ## The fast half of the tests
	@$(BIN)/pytest tests/unit tests/contract -q

lint: setup ## ruff, import layers, YAML
	@$(BIN)/ruff check $(PY_DIRS)
	@$(BIN)/ruff format --check $(PY_DIRS)
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/yamllint -s examples/*.yaml crds charts/specserve/values.yaml charts/specserve/Chart.yaml charts/specserve/files

type: setup ## mypy, strict
	@$(BIN)/mypy

format: setup ## Formats the Python code
	@$(BIN)/ruff check --fix $(PY_DIRS)
	@$(BIN)/ruff format $(PY_DIRS)

generate: setup ## Writes the CRDs and the gRPC code again
	@hack/generate.sh

verify: setup ## Fails if generated files are not current
	@hack/verify.sh

lock: setup ## Resolves the dependencies again
	@hack/lock.sh

bench: setup ## The interleaved speed comparisons; writes bench/results (about 40 minutes)
	@$(BIN)/python -m bench.serving

operator-bench: setup ## The operator with a thousand services, beside one in Go (about 40 minutes; builds Kubernetes)
	@$(BIN)/python -m bench.operator_scale

models: setup ## Trains the tiny models again (about half an hour); the committed ones stay valid
	@$(BIN)/python examples/tiny/make_models.py

clean: ## Removes everything that set-up and runs made
	@rm -rf .venv .specserve .mypy_cache .ruff_cache .pytest_cache .hypothesis
