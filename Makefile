# The habits of this project. Every target sets up its own virtual environment when there is none.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Real engines, of 4 GB: an environment of their own.
ENGINES ?= .venv-engines
ENGINES_STAMP := $(ENGINES)/.installed
# The real verl, with what its worker groups need.
VERL ?= .venv-verl
VERL_STAMP := $(VERL)/.installed
# A coverage-guided fuzzer; FUZZ_S are seconds for each of its targets.
FUZZ ?= .venv-fuzz
FUZZ_STAMP := $(FUZZ)/.installed
FUZZ_S ?= 60
# A Phoenix server, as a backend that traces are sent to.
PHOENIX ?= .venv-phoenix
PHOENIX_STAMP := $(PHOENIX)/.installed
# What the library is compared with: other tracers, at the versions that the documentation's figures are of.
BENCH ?= .venv-bench
BENCH_STAMP := $(BENCH)/.installed
# How long `make soak` goes on, and how many spans a second each of its writers ends.
SOAK_MINUTES ?= 10
SOAK_RATE ?= 50
# What builds the documentation's site.
DOCS ?= .venv-docs
DOCS_STAMP := $(DOCS)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo demo-engines test test-engines test-failed test-long test-phoenix test-verl fuzz soak lint format bench docs-check docs-site reference release-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## run the asynchronous GRPO demo on local Ray and print its goodput
	$(BIN)/python -m examples.async_grpo

demo-engines: $(ENGINES_STAMP) ## run the GRPO demo with a real vLLM engine and Megatron-core at tensor parallel 2
	$(ENGINES)/bin/python -m examples.vllm_megatron_grpo

test: $(STAMP) ## run all tests but the long ones
	$(BIN)/python -m pytest -m "not long"

test-long: $(STAMP) ## run the tests that take minutes: planted faults in the demo, three hosts
	$(BIN)/python -m pytest -m long

test-engines: $(ENGINES_STAMP) ## run the tests with real vLLM and Megatron-core engines, on a CPU
	$(ENGINES)/bin/python -m pytest tests/engines

test-verl: $(VERL_STAMP) ## run the tests with the real verl's worker groups, on a CPU
	$(VERL)/bin/python -m pytest tests/test_verl.py

test-phoenix: $(STAMP) $(PHOENIX_STAMP) ## send a run to a real Phoenix, and compare what it has with what was written
	PHOENIX=$(abspath $(PHOENIX))/bin/phoenix $(BIN)/python -m pytest tests/test_phoenix.py

fuzz: $(FUZZ_STAMP) ## fuzz what reads bytes of others, FUZZ_S=60 seconds a target
	$(FUZZ)/bin/python -m tests.fuzz --seconds $(FUZZ_S)

soak: $(STAMP) ## 64 writers and a relay for SOAK_MINUTES=10, at SOAK_RATE=50 spans a second each: nothing lost or grown
	$(BIN)/python -m tests.soak --minutes $(SOAK_MINUTES) --rate $(SOAK_RATE)

test-failed: $(STAMP) ## run the tests that failed last time, alone
	$(BIN)/python -m pytest -m "not long" --last-failed --last-failed-no-failures none

lint: $(STAMP) ## ruff check, ruff format --check, mypy --strict, and our own lint on ourselves
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m raytrace_rl.cli lint raytrace_rl examples benchmarks

format: $(STAMP) ## format the code and fix what ruff can fix
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

bench: $(BENCH_STAMP) ## measure the costs that the documentation states, beside those of other tracers
	$(BENCH)/bin/python -m benchmarks

docs-check: docs-site $(STAMP) ## build the documentation strictly, follow its links, and run every block of code in it
	$(BIN)/python -m pytest tests/test_docs.py tests/test_docs_blocks.py

# Not --quiet: mkdocs counts no warning that it does not print.
docs-site: $(DOCS_STAMP) ## build the documentation as a site, in build/site; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --site-dir build/site

reference: $(STAMP) ## write docs/reference.md and docs/blocks.md anew, from the code and from the pages
	$(BIN)/python -m docs.reference
	$(BIN)/python -m docs.blocks

release-check: ## build wheel and sdist, check both, and try the wheel in a clean environment
	PYTHON=$(PYTHON) .ci/release-check

clean: ## remove the environment, the caches and the runs of the demo
	rm -rf $(VENV) $(ENGINES) $(VERL) $(DOCS) $(FUZZ) $(PHOENIX) $(BENCH) .fuzz .mypy_cache .pytest_cache .ruff_cache .hypothesis raytrace_runs build dist

# The stamp is written last, so that an interrupted set-up is done again.
$(STAMP): pyproject.toml constraints-dev.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "make: '$(PYTHON) -m venv' failed: Python 3.10 or newer with venv is needed (Debian: python3-venv)"; rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints-dev.txt --editable '.[dev]'
	@touch $@

$(ENGINES_STAMP): pyproject.toml constraints-engines.txt
	@test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --no-deps --requirement constraints-engines.txt --editable .
	@touch $@

# verl's wheel brings a package "tests" of its own, which would hide ours from Ray's workers.
$(VERL_STAMP): pyproject.toml constraints-verl.txt
	@test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip install --quiet --no-deps --requirement constraints-verl.txt --editable .
	rm -rf $(VERL)/lib/python*/site-packages/tests $(VERL)/lib/python*/site-packages/scripts
	@touch $@

$(DOCS_STAMP): constraints-docs.txt
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --no-deps --requirement constraints-docs.txt
	@touch $@

$(FUZZ_STAMP): constraints-fuzz.txt
	@test -x $(FUZZ)/bin/python || $(PYTHON) -m venv $(FUZZ)
	$(FUZZ)/bin/python -m pip install --quiet --no-deps --requirement constraints-fuzz.txt
	@touch $@

$(PHOENIX_STAMP): constraints-phoenix.txt
	@test -x $(PHOENIX)/bin/python || $(PYTHON) -m venv $(PHOENIX)
	$(PHOENIX)/bin/python -m pip install --quiet --no-deps --requirement constraints-phoenix.txt
	@touch $@

$(BENCH_STAMP): pyproject.toml constraints-bench.txt
	@test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet --no-deps --requirement constraints-bench.txt --editable .
	@touch $@
