# make demo    sets up .venv/tf2 and trains an example on real data: locally, and under a hybrid plan
# make test    sets up both environments (.venv/tf2: python3; .venv/tf1: Python 3.7), lints, and passes the tests on both
#
# Setups are stamped: a second call installs nothing.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
TENSORFLOW2 := tensorflow==2.21.*
TENSORFLOW1 := tensorflow==1.15.5

# Python 3.7 is python3.7 where that runs (pyenv leaves a shim which does not), else the newest 3.7 pyenv has.
PYTHON37 ?= $(shell if python3.7 -c '' 2>/dev/null; then echo python3.7; \
	elif command -v pyenv >/dev/null; then ls "$$(pyenv root)"/versions/3.7*/bin/python 2>/dev/null | tail -n 1; fi)

# Worker processes of pytest, and threads of each (TensorFlow would take every core in every worker).
WORKERS ?= 2
THREADS ?= 1
PYTEST_ARGS ?=
LIMITS := TF_NUM_INTRAOP_THREADS=$(THREADS) TF_NUM_INTEROP_THREADS=2 OMP_NUM_THREADS=$(THREADS) \
	OPENBLAS_NUM_THREADS=$(THREADS) TF_CPP_MIN_LOG_LEVEL=3
pytest = mkdir -p $(1) && $(LIMITS) $(1)/bin/python -m pytest -q -n $(WORKERS) $(2) $(PYTEST_ARGS) 2>&1 | tee $(1)/pytest.log

PACKAGING := setup.py pyproject.toml

.PHONY: help demo test test-all test-multiprocess fuzz benchmarks lint test-tf1 test-tf2 test-all-tf1 test-all-tf2 clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile
	@echo "make test-all   the full matrix of models and plans on both TensorFlows (hours)"
	@echo "make test-multiprocess  the tests that start several processes"
	@echo "make fuzz       5,000 generated models"
	@echo "make benchmarks every benchmark of benchmarks/, one after the other"
	@echo "make lint       ruff and mypy"

# -- environments ------------------------------------------------------------------------------------------------------

.venv/tf2/bin/python:
	$(PYTHON) -m venv .venv/tf2

.venv/tf2/.demo: $(PACKAGING) | .venv/tf2/bin/python
	.venv/tf2/bin/python -m pip install -e ".[examples]" "$(TENSORFLOW2)"
	touch $@

.venv/tf2/.test: $(PACKAGING) | .venv/tf2/bin/python
	.venv/tf2/bin/python -m pip install -e ".[test,dev]" "$(TENSORFLOW2)"
	touch $@ .venv/tf2/.demo

.venv/tf1/.test: $(PACKAGING)
	$(PYTHON37) -m venv .venv/tf1
	.venv/tf1/bin/python -m pip install -e ".[test]" "$(TENSORFLOW1)"
	touch $@

# -- what to run -------------------------------------------------------------------------------------------------------

demo: .venv/tf2/.demo
	@$(LIMITS) .venv/tf2/bin/python -m examples.demo

lint: .venv/tf2/.test
	.venv/tf2/bin/ruff check .
	.venv/tf2/bin/mypy

test: lint test-tf2 test-tf1

test-all: lint test-all-tf2 test-all-tf1

test-multiprocess: test-multiprocess-tf2 test-multiprocess-tf1

test-multiprocess-tf2: .venv/tf2/.test
	@$(call pytest,.venv/tf2,tests/multiprocess)

test-tf2: .venv/tf2/.test
	@$(call pytest,.venv/tf2,tests)

test-all-tf2: .venv/tf2/.test
	@$(call pytest,.venv/tf2,tests --full)

fuzz: .venv/tf2/.test
	@$(call pytest,.venv/tf2,tests --full --hypothesis-profile=fuzz -k generated)

benchmarks: .venv/tf2/.test
	@for name in rewrite_time overhead data_parallel processes pipeline split sharded_init memory unequal unequal_processes balance simulator accuracy dapple_tables amp rhino; do .venv/tf2/bin/python -m benchmarks.$$name; done

ifneq ($(PYTHON37),)
test-tf1: .venv/tf1/.test
	@$(call pytest,.venv/tf1,tests)

test-all-tf1: .venv/tf1/.test
	@$(call pytest,.venv/tf1,tests --full)

test-multiprocess-tf1: .venv/tf1/.test
	@$(call pytest,.venv/tf1,tests/multiprocess)
else ifeq ($(CI),true)
test-tf1 test-all-tf1 test-multiprocess-tf1:
	@echo "no Python 3.7 (python3.7, or pyenv install 3.7): the TensorFlow 1.15 leg cannot run" >&2; exit 1
else
test-tf1 test-all-tf1 test-multiprocess-tf1:
	@echo "SKIPPED: the TensorFlow 1.15 leg needs Python 3.7 (python3.7, or pyenv install 3.7); none was found"
endif

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
