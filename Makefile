# Every target does its own set-up. `make demo` and `make test` are the first commands on a fresh machine.
SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
PY_DIRS := operator workers tests examples bench hack

.PHONY: help setup demo test e2e unit lint type generate verify lock format bench clean models

help: ## Lists the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | column -t -s $$'\t'

setup: ## Makes .venv (done by every other target too)
	@hack/setup.sh

demo: setup ## Serves a model on this machine, sends requests, prints what happened (MODEL=qwen: a real pair)
	@$(BIN)/python -m examples.demo --model $(or $(MODEL),tiny)

test: setup ## Unit, contract, component and engine tests
	@$(BIN)/python hack/test.py fast engine

e2e: setup ## A whole service with real engines: failures and operations (about 6 minutes)
	@$(BIN)/python hack/test.py e2e

unit: setup ## The fast half of the tests
	@$(BIN)/pytest tests/unit tests/contract -q

lint: setup ## ruff, import layers, YAML
	@$(BIN)/ruff check $(PY_DIRS)
	@$(BIN)/ruff format --check $(PY_DIRS)
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/yamllint -s examples/*.yaml crds

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

models: setup ## Trains the tiny models again (about half an hour); the committed ones stay valid
	@$(BIN)/python examples/tiny/make_models.py

clean: ## Removes everything that set-up and runs made
	@rm -rf .venv .specserve .mypy_cache .ruff_cache .pytest_cache .hypothesis
