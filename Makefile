# Polyhost's commands. Everything lives in .venv; a stamp file remembers that it is up to date with
# pyproject.toml and constraints.txt, so that only the first run of a target calls pip.
#
#   PYTHON     interpreter that makes the environment (>= 3.11)
#   PIP_ARGS   more arguments for pip, such as the index that has CPU builds of torch
#   ARGS       more arguments for the command a target runs: make serve ARGS="--port 8001"
#   JOBS       processes that share the tests; a test file stays in one

PYTHON   ?= python3
PIP_ARGS ?=
ARGS     ?=
JOBS     ?= 2

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) -c constraints.txt

.PHONY: help setup serve test check bench soak soak-server clean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.core: pyproject.toml constraints.txt $(wildcard kernels/native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Polyhost needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "setting up $(VENV): torch and transformers take a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) -e '.[dev]'
	@touch $@

setup: $(VENV)/.dev  ## make .venv with everything development needs

serve: $(VENV)/.core  ## start the gateway with the demo models on 127.0.0.1:8000
	@exec $(BIN)/polyhost serve --demo $(ARGS)

check: $(VENV)/.dev  ## ruff, formatting, mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(VENV)/.dev  ## all tests but the long ones
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

soak: $(VENV)/.dev  ## the long tests
	$(BIN)/python -m pytest -m soak $(ARGS)

soak-server: $(VENV)/.dev  ## half an hour of the real server under mixed load
	$(BIN)/python -m bench.soak $(ARGS)

bench: $(VENV)/.dev  ## benchmarks of this machine; see docs/benchmarks.md
	$(BIN)/python -m bench.swap $(ARGS)
	$(BIN)/python -m bench.serve $(ARGS)

clean:  ## remove the environment, caches and build products; keeps the data folder
	rm -rf $(VENV) build dist screenshots *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
