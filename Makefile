# The habits of this project. Every target sets up its own virtual environment when there is none.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-failed lint format bench docs-check reference clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## run the asynchronous GRPO demo on local Ray and print its goodput
	$(BIN)/python -m examples.async_grpo

test: $(STAMP) ## run all tests
	$(BIN)/python -m pytest

test-failed: $(STAMP) ## run the tests that failed last time, alone
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

lint: $(STAMP) ## ruff check, ruff format --check, mypy --strict, and our own lint on ourselves
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m raytrace_rl.cli lint raytrace_rl examples benchmarks

format: $(STAMP) ## format the code and fix what ruff can fix
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

bench: $(STAMP) ## measure the costs that the documentation states
	$(BIN)/python -m benchmarks

docs-check: $(STAMP) ## follow every link of the documentation and run every Python block in it
	$(BIN)/python -m pytest tests/test_docs.py

reference: $(STAMP) ## write docs/reference.md anew from the code
	$(BIN)/python -m docs.reference

clean: ## remove the environment, the caches and the runs of the demo
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis raytrace_runs build dist

# The stamp is written last, so that an interrupted set-up is done again.
$(STAMP): pyproject.toml constraints-dev.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "make: '$(PYTHON) -m venv' failed: Python 3.10 or newer with venv is needed (Debian: python3-venv)"; rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints-dev.txt --editable '.[dev]'
	@touch $@
