# Everything runs in .venv, made here from pyproject.toml and constraints.txt.
PYTHON ?= python3
PYTEST_ARGS ?=
JOBS ?= 2
DEMO_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# What only tests need, since the demo should not wait for it.
TESTABLE := $(VENV)/.testable
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test lint model clean

help:
	@echo 'make demo    decode a few prompts, plain and with speculation, and compare'
	@echo '             (DEMO_ARGS="--gamma=4" to try another setting)'
	@echo 'make test    ruff, mypy and pytest (PYTEST_ARGS="-k name" to choose)'
	@echo 'make lint    ruff and mypy alone'
	@echo 'make clean   remove .venv and the caches; results/ stays'

demo: model
	$(BIN)/python -m experiments.launch --experiment=demo $(DEMO_ARGS)

test: lint model $(TESTABLE)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# No stamp: the model lies outside the checkout, so only the command knows whether it is there.
model: $(INSTALLED)
	$(BIN)/python -m jspec.hub fetch

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "jspec needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	       "name another one, as in: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

$(TESTABLE): $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,lm-eval]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
