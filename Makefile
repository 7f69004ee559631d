# Everything sets itself up: `make demo` and `make test` need Python 3.11 or later and make, nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Installed before everything else, so that its dependants settle for it.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint types docs protos format clean

help: ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY) ## Create the virtual environment (once)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Rollmesh needs Python 3.11 or later: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $(READY)

demo: $(READY) ## Train the demonstration: real services, held-out reward goes up
	$(BIN)/python -m examples.demo

test: check ## Lint, types and the whole test suite, on two cores
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile
	$(BIN)/python -m pytest -m slow -n 2

check: lint types ## Lint, format and types

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

format: $(READY) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY) ## Generate the references of the configuration and of the algorithms
	$(BIN)/python -c "from mesh.config.reference import reference; print(reference(), end='')" > docs/configuration.md
	$(BIN)/python -m buffer.figures docs/operations.md
	$(BIN)/python -m learner.reference docs/algorithms.md --exceptions tests/golden/exceptions.json

protos: $(READY) ## Generate the protobuf modules and descriptors from protos/*.proto
	$(BIN)/python -m protos.generate

clean: ## Remove the virtual environment and caches (runs/ stays)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
