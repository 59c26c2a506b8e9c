# The one door to everything: `make` lists the targets. Each works as the first command on a fresh clone; it creates .venv
# (Python 3.11 or newer) and installs what it needs, and does nothing of that when it is there.

PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; done; echo $$p)
CONFIG ?= configs/sample.yaml
SOURCE ?=
OUT ?=
ARGS ?=
PEERS ?=
QUICK ?=
COUNT ?= $(if $(filter-out 0,$(QUICK)),2000,9000)
PHOTOS ?= data/photos-$(COUNT)
TESTERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))

PY := .venv/bin/python
SAMPLE := $(filter configs/sample.yaml,$(if $(SOURCE),,$(CONFIG)))
QUIET_PIP := python -m pip install --quiet --disable-pip-version-check --no-warn-script-location --root-user-action=ignore
PIP := .venv/bin/$(QUIET_PIP) -c constraints.txt
TOOLS := hypothesis|moto|flask|flask-cors|pytest|pytest-timeout|pytest-xdist|pillow

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help shards test test-slow test-lowest test-newest corpus lint example interop bench-setup bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

shards: .venv/.shardify-pack ## pack CONFIG from SOURCE into OUT (default: draw the sample set, pack it into shards/sample)
	@$(if $(SOURCE),$(if $(filter configs/sample.yaml,$(CONFIG)),echo 'make: SOURCE needs CONFIG: make shards CONFIG=configs/glr2020.yaml SOURCE=... OUT=...' >&2; exit 2))
	@$(if $(SAMPLE),$(PY) -m shardify sample data/sample)
	@$(PY) -m shardify build "$(CONFIG)" $(if $(SOURCE),--source "$(SOURCE)") $(if $(OUT),--out "$(OUT)") $(if $(filter --force,$(ARGS)),,--if-missing --resume) $(ARGS)

test: .venv/.shardify-dev ## run the tests, some at once (ARGS="-k name" picks some, TESTERS=0 runs them in one process)
	@$(PY) -m pytest -q --numprocesses=$(TESTERS) --dist=worksteal $(ARGS)

test-slow: .venv/.shardify-dev ## run the tests that take minutes
	@$(PY) -m pytest -q -m slow $(ARGS)

interop: .venv/.shardify-dev ## read our shards with other tools (each gets an environment of its own, .venv-interop)
	@$(PY) -m pytest -q -m interop $(ARGS)

test-lowest: .venv-lowest/.shardify ## run the tests with the lowest versions that pyproject.toml allows (.venv-lowest)
	@.venv-lowest/bin/python -m pytest -q --numprocesses=$(TESTERS) --dist=worksteal $(ARGS)

test-newest: .venv-newest/.shardify ## run the tests with the newest versions that pyproject.toml allows (.venv-newest)
	@.venv-newest/bin/python -m pytest -q --numprocesses=$(TESTERS) --dist=worksteal $(ARGS)

corpus: .venv/.shardify-dev ## pack and read every picture of Pillow's own tests, which pip fetches
	@$(PY) -m pytest -q -s -m corpus tests/test_corpus.py $(ARGS)

lint: .venv/.shardify-dev ## ruff, mypy strict, import contracts
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m mypy
	@$(PY) .venv/bin/lint-imports

example: .venv/.shardify-dev ## train a small CNN from shards/sample (ARGS="--epochs 20")
	@$(MAKE) --no-print-directory shards ARGS= CONFIG=configs/sample.yaml SOURCE= OUT=
	@$(PY) examples/train.py shards/sample $(ARGS)

bench-setup: .venv/.shardify-bench ## install the benchmark's peers, each in an environment of its own, .venv-bench (PEERS="grain spdl" picks some)
	@$(PY) benchmarks/bench setup $(PEERS)

bench: .venv/.shardify-bench ## measure ours, the peers and the limit on COUNT photographs (PEERS="ours grain"; QUICK=1: one cold epoch each)
	@test -e "$(PHOTOS)/train.csv" || { rm -rf "$(PHOTOS).partial" && mkdir -p "$(dir $(PHOTOS))" && \
		$(PY) benchmarks/photos.py "$(PHOTOS).partial" --count $(COUNT) && mv -T "$(PHOTOS).partial" "$(PHOTOS)"; }
	@$(PY) benchmarks/bench run "$(PHOTOS)" --count $(COUNT) $(if $(filter-out 0,$(QUICK)),--quick) $(if $(PEERS),--peers $(PEERS)) $(ARGS)

clean: ## delete .venv and its like (.venv-bench, ...) and tools' caches; data/ and shards/ stay
	rm -rf .venv .venv-interop .venv-bench .venv-lowest .venv-newest build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find shardify pipeline tests examples -type d -name __pycache__ -prune -exec rm -rf {} +

# What is installed, as stamps that are written last: an interrupted install leaves none. flock: two makes at once install in turn.

.venv/.shardify-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo 'make: $(PYTHON) is no Python of 3.11 or newer; install one, or name it: make PYTHON=/path/to/python3.11' >&2; exit 3; }
	@mkdir -p .venv
	@flock .venv/.lock $(PYTHON) -m venv .venv
	@touch $@

.venv/.shardify-pack: pyproject.toml constraints.txt | .venv/.shardify-python
	@echo 'make: installing what packing needs into .venv' >&2
	@flock .venv/.lock $(PIP) -e .
	@touch $@

.venv/.shardify-dev: pyproject.toml constraints.txt | .venv/.shardify-python
	@echo 'make: installing what training and the tests need into .venv (the first time this takes minutes)' >&2
	@flock .venv/.lock $(PIP) -e '.[dev]'
	@touch .venv/.shardify-pack $@

.venv/.shardify-bench: pyproject.toml constraints.txt | .venv/.shardify-python
	@echo 'make: installing what the benchmark needs into .venv (the first time this takes minutes)' >&2
	@flock .venv/.lock $(PIP) -e '.[dev,bench]'
	@touch .venv/.shardify-pack .venv/.shardify-dev $@

.venv-lowest/.shardify: pyproject.toml constraints.txt tests/versions/lowest.txt
	@echo 'make: installing the lowest versions into .venv-lowest' >&2
	@$(PYTHON) -m venv .venv-lowest
	@.venv-lowest/bin/$(QUIET_PIP) -c tests/versions/lowest.txt -e '.[train,cloud,parquet]'
	@.venv-lowest/bin/$(QUIET_PIP) -c tests/versions/lowest.txt $$(grep -E '^($(TOOLS))==' constraints.txt)
	@touch $@

# torch stays as tested: its newest wheel brings CUDA. Tools that only lint needs are left out.
.venv-newest/.shardify: pyproject.toml constraints.txt
	@echo 'make: installing the newest versions into .venv-newest' >&2
	@$(PYTHON) -m venv .venv-newest
	@.venv-newest/bin/$(QUIET_PIP) --upgrade --upgrade-strategy eager $$(grep '^torch==' constraints.txt) -e '.[train,cloud,parquet]'
	@.venv-newest/bin/$(QUIET_PIP) --upgrade $$(grep '^torch==' constraints.txt) $(subst |, ,$(TOOLS))
	@touch $@
