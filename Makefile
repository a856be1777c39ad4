# The gate and the demo, from a fresh clone: `make demo`, `make test`.
SHELL := /bin/bash
PYTHON ?= $(firstword $(foreach name,python3.13 python3.12 python3.11 python3,$(shell command -v $(name) 2>/dev/null)))
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

.PHONY: help setup demo test lint types unit lock build clean

help: ## Say what can be made
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

setup: $(STAMP) ## Build .venv from the lock file, with the `outbox` command in it

$(STAMP): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python found; 3.11, 3.12 or 3.13 is needed" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	    { echo "make: $(PYTHON) is $$("$(PYTHON)" -V); Python 3.11, 3.12 or 3.13 is needed (make PYTHON=…)" >&2; exit 2; }
	@"$(PYTHON)" -m venv $(VENV) || { echo "make: $(PYTHON) cannot make a venv; install its venv module" >&2; exit 2; }
	@set -o pipefail; total=$$(grep -c '==' requirements.lock); \
	{ $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
	      --no-deps --require-hashes -r requirements.lock && \
	  $(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .; } 2>&1 \
	  | tee $(VENV)/install.log | awk -v total="$$total" '$(PROGRESS)' \
	  || { grep -m 3 ERROR $(VENV)/install.log >&2; echo "make: installing failed; see $(VENV)/install.log" >&2; exit 2; }
	@touch $@

demo: setup ## Show it all at work, with the Dagster UI, until Ctrl-C; ONCE=1 ends by itself
	@$(BIN)/python -m definitions.demo $(if $(ONCE),--once)

test: lint types unit ## Check style and types, and run the whole test suite

lint: setup
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check . && $(BIN)/lint-imports --no-logo

types: setup
	@$(BIN)/mypy

unit: setup
	@$(BIN)/pytest --durations=10

lock: setup ## Resolve the dependencies anew
	@$(BIN)/uv pip compile pyproject.toml --all-extras --group dev --universal --generate-hashes --no-emit-index-url \
	    --no-header --quiet --output-file requirements.lock

build: setup ## Build the wheel into dist/
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean: ## Remove everything that was built, and the embedded servers' data
	@rm -rf $(VENV) .outbox dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
