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
# Containers set it. Each of the gate's processes, which are hundreds, would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-long test-lowest test-newest test-servers lint types unit docs lock build clean

help: ## Say what can be made
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 21

setup: $(STAMP) ## Build .venv from the lock file, with the `outbox` command in it

$(STAMP): requirements.lock pyproject.toml
	@rm -rf $(VENV)/class-archives  # They were made of the jars before.
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
	@$(BIN)/pytest --numprocesses 3 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder --durations=10 --share

test-long: setup ## Run the tests that take many minutes, and all that `make test` takes turns with
	@$(BIN)/pytest --durations=10 -m "long or slow"

# Environments of their own, whose libraries are resolved again; $(1) is the environment.
TESTS ?= tests/unit
INSTALL = $(BIN)/uv pip install --quiet --python $(1)
test-in = @$(INSTALL) --no-deps --no-build-isolation --editable . && $(1)/bin/pytest $(TESTS)

test-lowest: setup ## Test with the oldest libraries that pyproject.toml allows; TESTS=tests/unit
	@$(BIN)/uv venv --quiet --clear --seed --python "$(PYTHON)" .venv-lowest
	@$(BIN)/uv pip compile --quiet --python .venv-lowest --extra all --resolution lowest-direct --no-header --no-annotate \
	    --output-file .venv-lowest/requirements.txt pyproject.toml
	@$(call INSTALL,.venv-lowest) --requirements .venv-lowest/requirements.txt --group test
	$(call test-in,.venv-lowest)

test-newest: setup ## Test with the newest libraries that pyproject.toml allows; TESTS=tests/unit
	@$(BIN)/uv venv --quiet --clear --seed --python "$(PYTHON)" .venv-newest
	@$(call INSTALL,.venv-newest) --requirements pyproject.toml --extra all --group test
	$(call test-in,.venv-newest)

test-servers: setup ## Test with other servers; POSTGRES=/usr/lib/postgresql/16/bin KAFKA=/opt/kafka/libs TESTS=tests/integration
	@TESTS_POSTGRES="$(POSTGRES)" TESTS_KAFKA="$(KAFKA)" $(BIN)/pytest $(TESTS)

DOCS_BIN := .venv-docs/bin
DOCS_STAMP := .venv-docs/.complete

docs: $(DOCS_STAMP) ## Build the documentation as a site, into site/
	@NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --strict  # With --quiet, it counts no warnings.

$(DOCS_STAMP): requirements-docs.lock
	@"$(PYTHON)" -m venv --clear .venv-docs
	@$(DOCS_BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --require-hashes -r requirements-docs.lock
	@touch $@

lock: setup ## Resolve the dependencies again
	@$(BIN)/uv pip compile pyproject.toml --extra all --group dev --universal --generate-hashes --no-emit-index-url \
	    --no-header --quiet --output-file requirements.lock
	@$(BIN)/uv pip compile --group docs --universal --python-version 3.11 --constraints requirements.lock --generate-hashes \
	    --no-emit-index-url --no-header --quiet --output-file requirements-docs.lock

build: setup ## Build the sdist, and from it the wheel, into dist/, and check them
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/uv build --quiet --no-build-isolation --python $(BIN)/python --out-dir dist
	@$(BIN)/uvx --quiet twine check --strict dist/*

clean: ## Remove everything that was built, and the embedded servers' data
	@rm -rf $(VENV) .venv-lowest .venv-newest .venv-docs .outbox dist build site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
