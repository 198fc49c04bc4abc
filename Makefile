# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= smollm2-135m-cpu
ARTIFACT := artifacts/$(RECIPE)
HOST ?= 127.0.0.1
PORT ?= 8000
# The demo's recipe has a head built in: it drafts tokens that the model verifies, beside a lookup in the text.
DRAFTS := $(if $(filter smollm2-135m-cpu,$(RECIPE)),--speculative-config ngram+eagle)
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: help setup demo serve test lint format bench native wheel clean
.DEFAULT_GOAL := help

help: ## show this
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

$(VENV)/.build: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing plancast and what building needs (torch, transformers, onnx, openvino) into $(VENV) ..."
	$(PIP) -e '.[build]'
	@$(BIN)/python -m plugins.native || true # everything works without them
	@touch $@

$(VENV)/.test: $(VENV)/.build
	@echo "installing what the tests need ..."
	$(PIP) -e '.[build,test]'
	@touch $@

setup: $(VENV)/.build ## a virtual environment with everything that building and serving need

demo: $(VENV)/.build ## pull SmolLM2-135M-Instruct, build its engine, let it answer
	$(BIN)/plancast build $(RECIPE)
	$(BIN)/plancast generate $(ARTIFACT) --chat --max-tokens 64 --temperature 0 $(DRAFTS) \
		"What is the capital of France, and what is it known for?"

serve: $(VENV)/.build ## serve the demo's engine on $(HOST):$(PORT)
	$(BIN)/plancast build $(RECIPE)
	$(BIN)/plancast serve $(ARTIFACT) --host $(HOST) --port $(PORT)

test: $(VENV)/.test ## every test (the real engine included)
	$(BIN)/python -m pytest

lint: $(VENV)/.test ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.test ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.build ## measure this machine: scheduler, batching, the demo's engine
	$(BIN)/plancast bench runtime
	$(BIN)/plancast bench batching

native: $(VENV)/.build ## compile the C++ plugins again
	$(BIN)/python -m plugins.native --force

wheel: $(VENV)/.build ## a wheel in dist/ that carries the compiled C++ plugins
	$(BIN)/python -m plugins.native --bundle
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	rm -rf plugins/native/lib build
	@ls dist/*.whl

clean: ## remove the virtual environment and built artifacts
	rm -rf $(VENV) build dist plugins/native/lib *.egg-info
	find artifacts -mindepth 1 -maxdepth 1 -type d -exec rm -rf {} +
