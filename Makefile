# Two commands for people: `make demo` trains the tiny model and validates what it saved;
# `make test` checks and tests everything. Both make .venv themselves and install the pinned
# requirements once; nothing has to be activated.

PYTHON ?= python3
CONFIG ?= tiny
DEMO_RUN ?= runs/$(CONFIG)
PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
RUN_READY := $(VENV)/.requirements-installed
DEV_READY := $(VENV)/.requirements-dev-installed
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off

.PHONY: help demo test lint format clean

help:
	@echo "make demo    train --config $(CONFIG) into $(DEMO_RUN), then validate what was saved"
	@echo "make test    lint, then run the tests"
	@echo "make lint    ruff check, ruff format --check, mypy"
	@echo "make format  let ruff rewrite the files"
	@echo "make clean   remove .venv and the caches of the tools; runs/ stays"

demo: $(RUN_READY)
	$(BIN)/python run_finetuning.py --config $(CONFIG) --save $(DEMO_RUN)
	$(BIN)/python run_validation.py --load $(DEMO_RUN)

# `--dist worksteal` keeps the tests of one file together, which keeps module fixtures cheap.
test: lint
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name another with: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# The stamps make an installation happen once, and again when the requirements change. Tests import
# a fraction of what is installed: Python compiles that when they do.
$(RUN_READY): requirements.txt runtime/pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) -r requirements.txt
	@touch $@

$(DEV_READY): requirements-dev.txt requirements.txt runtime/pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) --no-compile -r requirements-dev.txt
	@touch $@
