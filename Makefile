# `make help` lists the targets. They use the environment in .venv. Stamp files in it record when it
# was installed; pip runs again only after a change of the files that the stamps depend on.
#
#   PYTHON     the interpreter that creates .venv (3.11 or newer)
#   PIP_ARGS   extra arguments for pip, for example the index that has CPU builds of torch
#   ARGS       extra arguments for the target's command: make serve ARGS="--port 8001"
#   JOBS       number of test processes; the tests of one file stay in one process

PYTHON   ?= python3
PIP_ARGS ?=
ARGS     ?=
JOBS     ?= 2

VENV := .venv
IMAGE := .venv-cuda-image
BIN  := $(VENV)/bin
BARE := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)
PIP  := $(BARE) -c constraints.txt

.PHONY: help setup setup-locked serve test compat check cuda-image files bench soak soak-server clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.core: pyproject.toml setup.py constraints.txt $(wildcard kernels/native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Polyhost needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "installing into $(VENV): torch and transformers take a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) -e '.[dev]'
	@touch $@

setup: $(VENV)/.dev  ## create .venv with everything that development needs

# torch is not locked: which build of it is installed is the index's decision. Nothing is built but
# Polyhost itself, and that with the setuptools of the lock.
setup-locked: requirements.lock  ## the same from wheels whose hashes are in requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BARE) --require-hashes --no-deps --only-binary :all: -r requirements.lock
	$(PIP) --only-binary :all: torch
	$(BARE) --no-deps --no-build-isolation -e .
	@$(BIN)/python -m pip --disable-pip-version-check check
	@touch $(VENV)/.core $(VENV)/.dev

serve: $(VENV)/.core  ## start the gateway with the demo models on 127.0.0.1:8000
	@exec $(BIN)/polyhost serve --demo $(ARGS)

check: $(VENV)/.dev  ## run ruff, the formatting check and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(VENV)/.dev  ## run all tests except the long ones
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

compat: $(VENV)/.dev  ## run the SDKs' own suites and agents' loops, from a package index
	$(BIN)/python -m pytest -m compat tests/compat $(ARGS)

# Registration, kernels and the GPU's path on what GPU machines often have: older torch, Triton and
# transformers, a newer Python. No GPU is needed.
cuda-image:  ## test with the packages of a common CUDA image in .venv-cuda-image (3 GB to download)
	$(PYTHON) -m venv $(IMAGE)
	$(IMAGE)/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) \
		-r bench/requirements-cuda-image.txt -e '.[dev]'
	$(IMAGE)/bin/python -m bench.gpu --dry-run
	$(IMAGE)/bin/python -m bench.gpu_compile
	$(IMAGE)/bin/python -m pytest -n $(JOBS) --dist loadfile tests/kernels tests/engine/gpu \
		tests/engine/backend tests/engine/registration tests/bench/test_gpu.py \
		tests/bench/test_gpu_compile.py $(ARGS)

files:  ## write docs/files.md, the list of all files
	$(PYTHON) -m tests.files_page

soak: $(VENV)/.dev  ## run the long tests
	$(BIN)/python -m pytest -m soak $(ARGS)

soak-server: $(VENV)/.dev  ## run the real server under mixed load for half an hour
	$(BIN)/python -m bench.soak $(ARGS)

bench: $(VENV)/.dev  ## measure swaps and serving on this machine (docs/benchmarks.md)
	$(BIN)/python -m bench.swap $(ARGS)
	$(BIN)/python -m bench.serve $(ARGS)

clean:  ## remove .venv, caches and build products, but not the data folder
	rm -rf $(VENV) build dist screenshots *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
