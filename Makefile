# `make demo` and `make test` set up their own environment in .venv; nothing else is needed but Python 3.10 on.
#   PYTHON=python3.12   which Python makes the environment
#   TORCH=torch         which torch goes into it
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo test lint unit gpu sanitize format figures clean
help:
	@echo 'make demo     attention on a real-sized problem against the oracle, with a picture'
	@echo 'make test     ruff, mypy, import floors, and all tests that need no GPU'
	@echo 'make gpu      the tests that need a Hopper GPU'
	@echo 'make sanitize compute-sanitizer over one small call of every kernel, on a Hopper GPU'
	@echo 'make figures  the README table and picture, from benchmarks/results'

setup: $(STAMP)

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), f"Python 3.10 on is needed, this is {sys.version}"'
	@# Debian keeps the parts of venv in a package of its own. Compiled kernels are linked with a C compiler.
	@missing=''; \
	$(PYTHON) -c 'import ensurepip' 2>/dev/null || missing+=' python3-venv'; \
	command -v cc gcc clang >/dev/null || missing+=' gcc libc6-dev'; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing; \
	elif [[ $$missing == *venv* ]]; then \
		echo 'This Python has no venv: install the package python3-venv, or set PYTHON.' >&2; exit 1; \
	elif [ -n "$$missing" ]; then \
		echo 'There is no C compiler: install gcc, or tests that compile kernels fail.' >&2; fi
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,bench,inspect,hopper]'
	@touch $@

demo: $(STAMP)
	$(BIN)/fa3 demo --png demo.png

test: lint unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(STAMP)
	$(BIN)/pytest -m 'not gpu'

gpu: $(STAMP)
	$(BIN)/pytest -m gpu tests/gpu

sanitize: $(STAMP)
	for tool in memcheck racecheck synccheck; do \
	    compute-sanitizer --tool $$tool --error-exitcode 1 $(BIN)/python tests/gpu/small_set.py || exit 1; done

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

figures: $(STAMP)
	$(BIN)/python scripts/make_figures.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
