# Everything a developer or a newcomer does here. `make help` lists the targets.
# Needs: Python 3.11 or newer, make, and the Python package index. Each target sets up what it needs.

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_STAMP := $(VLLM_VENV)/.installed
INPUTS := pyproject.toml proto/compile.py proto/hatch_build.py $(wildcard proto/*.proto)

.DEFAULT_GOAL := help
.PHONY: help demo test test-redis test-vllm check lint format types bench envoy-files clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): $(INPUTS)
	@echo "==> Setting up $(VENV) (about a minute on a fresh machine)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kvsteer needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.11 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP) ## Real Envoy, kvsteer and four emulated workers on recorded agent sessions (KEEP=1 stays up)
	@$(BIN)/kvsteer demo --out build/demo.json $(if $(KEEP),--keep) $(DEMO_ARGS)

test: $(STAMP) ## The whole test suite that needs only the package index
	@$(BIN)/python -m pytest -m "not vllm and not redis" $(TEST_ARGS)

test-redis: $(STAMP) ## Tests of replicas on a real redis-server (apt-get install redis-server)
	@command -v redis-server >/dev/null || { echo "make test-redis needs redis-server (Debian: apt-get install redis-server)"; exit 1; }
	@$(BIN)/python -m pytest -m redis tests/shared $(TEST_ARGS)

test-vllm: $(STAMP) $(VLLM_STAMP) ## Tests on real vLLM workers on the CPU (2.4 GB more; Python 3.11)
	@KVSTEER_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest -m vllm tests/vllm $(TEST_ARGS)

$(VLLM_STAMP): tests/vllm/requirements.txt
	@echo "==> Installing vLLM for the CPU into $(VLLM_VENV): 2.4 GB on disk, one to five minutes"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info[:2] == (3, 11) else "the pinned vLLM wheels need Python 3.11, this is " + sys.version.split()[0])'
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r tests/vllm/requirements.txt
	@touch $@

check: lint types ## Lint, format check and strict types

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)
	@$(BIN)/mypy

format: $(STAMP) ## Format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(STAMP) ## Measure: CPU per request beside a C++ ext_proc server, index, scheduler (build/bench.json)
	@$(BIN)/python -m bench --out build/bench.json $(BENCH_ARGS)

envoy-files: $(STAMP) ## Write envoy/*.yaml anew from epp/envoy_config.py
	@$(BIN)/python envoy/generate.py

clean: ## Remove what the targets made
	rm -rf $(VENV) $(VLLM_VENV) build epp/gateway/pb .mypy_cache .ruff_cache .pytest_cache .hypothesis
