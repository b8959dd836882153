# make demo    sets up .venv/tf2 and trains an example on real data, locally and under a hybrid plan
# make test    sets up both environments (.venv/tf2: python3; .venv/tf1: Python 3.7), lints, and runs the tests on both
#
# Setups are stamped: a second call installs nothing. Another Python (make demo PYTHON=python3.10) has its own environment.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# A Python by its command if that runs (pyenv leaves shims that do not), otherwise pyenv's newest of that version.
find = $(shell if $(1) -c '' 2>/dev/null; then echo $(1); \
	elif command -v pyenv >/dev/null; then ls "$$(pyenv root)"/versions/$(1:python%=%).*/bin/python 2>/dev/null | sort -V | tail -n 1; fi)

PYTHON ?= python3
ifeq ($(PYTHON),python3)
PYTHON2 := python3
TF2 := .venv/tf2
else
PYTHON2 := $(or $(call find,$(PYTHON)),$(error there is no $(PYTHON); give the command or the path of a Python))
TF2 := .venv/tf2-$(shell $(PYTHON2) -c 'import platform; print(platform.python_version())')
endif
PYTHON37 ?= $(call find,python3.7)
DEMO := -e ".[all,examples,tf]"
TEST2 := -e ".[test,dev]" "tensorflow==2.21.*"
TEST1 := -e ".[test]" "tensorflow==1.15.5"
NOTEBOOK := -e ".[notebook]"

# Worker processes of pytest, and threads of each (TensorFlow would take every core in every worker). Many tests start Python
# anew: compiled modules are kept, also where the environment says otherwise.
WORKERS ?= 2
THREADS ?= 1
PYTEST_ARGS ?=
LIMITS := TF_NUM_INTRAOP_THREADS=$(THREADS) TF_NUM_INTEROP_THREADS=2 OMP_NUM_THREADS=$(THREADS) \
	OPENBLAS_NUM_THREADS=$(THREADS) TF_CPP_MIN_LOG_LEVEL=3 PYTHONDONTWRITEBYTECODE=
pytest = mkdir -p $(1) && $(LIMITS) $(1)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal $(2) $(PYTEST_ARGS) 2>&1 | tee $(1)/pytest.log

PACKAGING := setup.py pyproject.toml

# Prints one line, and pip's output if it fails.
install = @echo "setting up $(1) (the first time this takes minutes)"; \
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(2) >$(1)/pip.log 2>&1 || { cat $(1)/pip.log; exit 1; }

.PHONY: help demo environments test test-all test-versions test-multiprocess fuzz mutation benchmarks lint docs notebook test-tf1 test-tf2 test-all-tf1 test-all-tf2 clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile
	@echo "make test-all   the full matrix of models and plans on both TensorFlows (hours)"
	@echo "make test-versions  plain installations with every supported TensorFlow (VERSIONS=\"2.4 2.15\": only these)"
	@echo "make test-multiprocess  the tests that start several processes"
	@echo "make fuzz       5,000 generated models"
	@echo "make mutation   changes code that decides numbers, and lists the changes that no test notices (MODULES=whale_tf.bridges: only in this one)"
	@echo "make benchmarks every benchmark of benchmarks/, one after the other"
	@echo "make lint       ruff and mypy"
	@echo "make docs       the site of docs/ in out/site; a warning or a broken link is an error"
	@echo "make notebook   executes docs/tutorial.ipynb in Jupyter and keeps its output"

# -- environments ------------------------------------------------------------------------------------------------------

$(TF2)/bin/python:
	@$(PYTHON2) -m venv $(TF2)

$(TF2)/.demo: $(PACKAGING) | $(TF2)/bin/python
	$(call install,$(TF2),$(DEMO))
	@touch $@

$(TF2)/.test: $(PACKAGING) | $(TF2)/bin/python
	$(call install,$(TF2),$(TEST2))
	@touch $@ $(TF2)/.demo

.venv/tf1/.test: $(PACKAGING)
	@$(PYTHON37) -m venv .venv/tf1
	$(call install,.venv/tf1,$(TEST1))
	@touch $@

.venv/docs/.docs: docs/requirements.txt
	@$(PYTHON2) -m venv .venv/docs
	$(call install,.venv/docs,--requirement $<)
	@touch $@

$(TF2)/.notebook: $(PACKAGING) | $(TF2)/.test
	$(call install,$(TF2),$(NOTEBOOK))
	@touch $@

# -- what to run -------------------------------------------------------------------------------------------------------

demo: $(TF2)/.demo
	@$(LIMITS) $(TF2)/bin/python -m examples.demo

mutation: $(TF2)/.test
	$(TF2)/bin/python -m tests.mutation --show $(MODULES)

lint: $(TF2)/.test
	$(TF2)/bin/ruff check .
	$(TF2)/bin/mypy

# Everything is read anew: a link may break on a page that has not changed.
docs: .venv/docs/.docs
	@rm -rf out/site
	@.venv/docs/bin/python -m sphinx -q -E -W --keep-going -b html -c docs -d .venv/docs/doctrees . out/site
	@echo "the site: out/site/index.html"

notebook: $(TF2)/.notebook
	@$(LIMITS) $(TF2)/bin/python -m docs.site.execute docs/tutorial.ipynb

test: lint test-tf2 test-tf1

environments: $(TF2)/.test

test-all: lint test-all-tf2 test-all-tf1

test-versions:
	@$(PYTHON2) -m tests.versions $(VERSIONS)

test-multiprocess: test-multiprocess-tf2 test-multiprocess-tf1

test-multiprocess-tf2: $(TF2)/.test
	@$(call pytest,$(TF2),tests/multiprocess)

test-tf2: $(TF2)/.test
	@$(call pytest,$(TF2),tests)

test-all-tf2: $(TF2)/.test
	@$(call pytest,$(TF2),tests --full)

fuzz: $(TF2)/.test
	@$(call pytest,$(TF2),tests --full --hypothesis-profile=fuzz -k generated)

benchmarks: $(TF2)/.test
	@for name in rewrite_time emission overhead keras_fit preprocessing data_parallel processes pipeline split sections sharded_init memory recompute mixed_precision zero unequal unequal_processes balance simulator accuracy dapple_tables amp rhino snapshots; do $(TF2)/bin/python -m benchmarks.$$name; done

ifneq ($(PYTHON37),)
test-tf1 test-tf2: LIMITS += WHALE_TEST_SHARED=1
environments: .venv/tf1/.test

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
