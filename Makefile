# What sets everything up on a machine with python3 (3.11 or newer) and make:
#   make demo    install with the TPU compiler, plan the built-in models, say where the results are
#   make test    install for development, run every test
#   make docs    build the documentation into site/, every page executed
# Stamp files in the environment keep repeated calls quick.

PYTHON ?= python3
# The environment of `check-newest`: Python 3.12 or newer with the newest JAX and Flax.
NEWEST_PYTHON ?= python3.12
VENV := .venv
NEWEST := .venv-newest
BIN := $(VENV)/bin
DEMO_OUT ?= rematplan-demo
# Two workers: compile children of the tests take a core each. One that is done takes from what the other has left.
PYTEST_ARGS ?= -n 2 --dist worksteal

.PHONY: demo docs test test-long fast check lint types imports check-newest check-remat3 check-newest-remat3 clean help

help:
	@sed -n 's/^#  *\(make .*\)/\1/p' Makefile
	@echo "make check   lint, types, import rules and tests;  make fast   quick tests only;  make test-long   many random models;  make clean   remove what was made"

demo: $(VENV)/.demo
	$(BIN)/rematplan demo --force --out $(DEMO_OUT)
	@echo "Results are in $(DEMO_OUT)/"

# Built anew each time: what a page prints depends on all of the source.
docs: $(VENV)/.docs
	$(BIN)/sphinx-build -W --keep-going -j 2 -E -a -b html docs site
	REMATPLAN_SITE=site $(BIN)/pytest -m "" tests/docs/test_build.py
	@echo "The documentation is in site/index.html"

test: $(VENV)/.dev
	$(BIN)/pytest -m "" $(PYTEST_ARGS)

# 500 random NNX models with numbers, gradients and state; `test` computes those of 25.
test-long: $(VENV)/.dev
	REMATPLAN_TEST_PROGRAMS=500 $(BIN)/pytest -m "" $(PYTEST_ARGS) tests/verify/test_nnx_programs.py

fast: $(VENV)/.dev
	$(BIN)/pytest $(PYTEST_ARGS)

check: lint types imports test

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/basedpyright

imports: $(VENV)/.dev
	$(BIN)/lint-imports --no-cache

# What a plan uses under JAX's new implementation of rematerialization.
REMAT3_TESTS := tests/nnx tests/inspect tests/verify tests/program tests/cli/test_plan_fuzz.py

check-remat3: $(VENV)/.dev
	JAX_REMAT3=1 $(BIN)/pytest -m "" $(PYTEST_ARGS) $(REMAT3_TESTS)

check-newest-remat3: $(NEWEST)/.dev
	JAX_REMAT3=1 $(NEWEST)/bin/pytest -m "" $(PYTEST_ARGS) $(REMAT3_TESTS)

# What another version of JAX or Flax can break; pages, charts, solvers and what the command line prints are in `make check`.
NEWEST_TESTS := tests/inspect tests/nnx tests/program tests/search tests/sharded tests/target tests/verify tests/workloads \
  tests/test_jax_private.py tests/test_examples.py

check-newest: $(NEWEST)/.dev
	$(NEWEST)/bin/pytest $(PYTEST_ARGS) $(NEWEST_TESTS)
	$(NEWEST)/bin/pytest -m slow $(PYTEST_ARGS) tests/target

clean:
	rm -rf $(VENV) $(NEWEST) build dist site $(DEMO_OUT) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "rematplan needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1); try: make PYTHON=python3.12 demo"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "no virtual environment: install your system's venv package (Debian: python3-venv)"; exit 1; }
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.created
	$(BIN)/python -m pip install --quiet --editable '.[tpu]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.created
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.demo

$(VENV)/.docs: pyproject.toml $(VENV)/.created
	$(BIN)/python -m pip install --quiet --editable '.[dev,docs]'
	@touch $@ $(VENV)/.dev $(VENV)/.demo

$(NEWEST)/.dev: pyproject.toml
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[dev]'
	$(NEWEST)/bin/python -c 'import jax, flax; print("newest: jax", jax.__version__, "flax", flax.__version__)'
	@touch $@
