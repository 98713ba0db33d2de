# Everything runs in .venv, made here from pyproject.toml and constraints.txt.
PYTHON ?= python3
PYTEST_ARGS ?=
JOBS ?= 2
# The best drafter that comes with jspec.
DEMO_ARGS ?= --drafter=trained --trained=eagle --lookup --drafter_weights=int8 \
  --min_confidence=0.3 --gamma=3

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# What only tests need, since the demo should not wait for it.
TESTABLE := $(VENV)/.testable
# Compilers for TPUs and GPUs that are not here (what the extras compile-tpu and compile-gpu bring),
# in a folder that tests alone see: JAX starts whatever backend it finds, and libtpu complains.
COMPILERS := $(VENV)/compilers
COMPILER_PACKAGES := libtpu triton jax-triton jax-cuda13-plugin jax-cuda13-pjrt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test lint model compilers clean

help:
	@echo 'make demo    decode a few prompts, plain and with speculation, and compare'
	@echo '             (DEMO_ARGS="--drafter=ngram" to try another drafter)'
	@echo 'make test    ruff, mypy and pytest (PYTEST_ARGS="-k name" to choose)'
	@echo 'make lint    ruff and mypy alone'
	@echo 'make clean   remove .venv and the caches; results/ stays'

demo: model
	$(BIN)/python -m experiments.launch --experiment=demo $(DEMO_ARGS)

test: lint model compilers $(TESTABLE)
	PYTHONPATH="$(abspath $(COMPILERS))$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# No stamp: the model lies outside the checkout, so only the command knows whether it is there.
model: $(INSTALLED)
	$(BIN)/python -m jspec.hub fetch

# Not everywhere: without them the tests that want one are skipped, and say so.
compilers: $(INSTALLED)
	@test $(COMPILERS)/.installed -nt constraints.txt || { \
	  $(BIN)/python -m pip install --quiet --retries 1 --no-deps --upgrade --target $(COMPILERS) \
	    -c constraints.txt $(COMPILER_PACKAGES) && touch $(COMPILERS)/.installed; } || \
	  echo "No compilers for TPU and GPU here (see above): tests that compile for them are skipped." >&2

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
