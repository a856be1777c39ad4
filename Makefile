# The gate and the demo, from a fresh clone: `make demo`, `make test`.
SHELL := /bin/bash
SUITABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
# The first that works: a name on the PATH may be a shim of a version that is not there.
PYTHON ?= $(shell for name in python3.13 python3.12 python3.11 python3 python; do \
    $$name -c '$(SUITABLE)' 2>/dev/null && echo $$name && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
# One line of progress from pip's pages.
PROGRESS := \
  /^Collecting/ { n++; printf "\r\033[K%d of %d packages: %s", n, total, $$2 } \
  /^ *Building/ { printf "\r\033[Kbuilding %s", $$NF } \
  /^Installing/ { printf "\r\033[Kinstalling all of them" } \
  { fflush() } \
  END { print "" }
.DEFAULT_GOAL := help

.PHONY: help setup demo test test-long lint types unit lock build clean

help: ## Say what can be made
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 19

setup: $(STAMP) ## Build .venv from the lock file, with the `outbox` command in it

$(STAMP): requirements.lock pyproject.toml
	@"$(PYTHON)" -c '$(SUITABLE)' 2>/dev/null || \
	    { echo "make: no Python 3.11, 3.12 or 3.13 with its venv module was found; install one (or: make PYTHON=…)" >&2; exit 2; }
	@"$(PYTHON)" -m venv $(VENV)
	@set -o pipefail; total=$$(grep -c '==' requirements.lock); \
	{ $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
	      --no-deps --require-hashes -r requirements.lock && \
	  $(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .; } 2>&1 \
	  | tee $(VENV)/install.log | awk -v total="$$total" '$(PROGRESS)' \
	  || { grep -m 3 ERROR $(VENV)/install.log >&2; echo "make: installing failed; see $(VENV)/install.log" >&2; exit 2; }
	@touch $@

demo: setup ## Show it all at work, with the Dagster UI, until Ctrl-C; ONCE=1 ends by itself
	@$(BIN)/python -m definitions.demo $(if $(ONCE),--once)

test: lint types unit ## Check style and types, and run the test suite

lint: setup
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check . && $(BIN)/lint-imports --no-logo

types: setup
	@$(BIN)/mypy

unit: setup
	@$(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations=10

test-long: setup ## Run the tests that take many minutes
	@$(BIN)/pytest --durations=10 -m long

lock: setup ## Resolve the dependencies anew
	@$(BIN)/uv pip compile pyproject.toml --extra all --group dev --universal --generate-hashes --no-emit-index-url \
	    --no-header --quiet --output-file requirements.lock

build: setup ## Build the wheel into dist/
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean: ## Remove everything that was built, and the embedded servers' data
	@rm -rf $(VENV) .outbox dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
