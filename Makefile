# Two commands: `make repro` runs the whole pipeline, `make test` checks it. Both set up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
UV_VERSION := 0.13.9

# torch's CPU build lies in a folder that PIP_FIND_LINKS names, or else in PyTorch's own CPU index. uv does not read
# pip's settings, so they are handed on.
TORCH_HERE := $(wildcard $(addsuffix /torch-*+cpu-*.whl,$(PIP_FIND_LINKS)))
UV_TORCH := $(if $(TORCH_HERE),,--torch-backend cpu)
UV_LINKS := $(addprefix --find-links ,$(PIP_FIND_LINKS))

.PHONY: repro test test-fast lint setup ui clean

repro: $(READY)
	$(BIN)/oneaxis run

# Two workers: the engine tests of one fill the waits of the other. Tests of one file stay together and in order.
# What is held against the clock runs first, and alone.
PYTEST := $(BIN)/pytest -q -n 2 --dist loadfile

test: $(READY) lint
	$(BIN)/pytest -q -m clock
	$(PYTEST) -m "not clock" --durations=12

test-fast: $(READY) lint
	$(PYTEST) -m "not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

ui: $(READY)
	$(BIN)/oneaxis ui

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "oneaxis needs Python 3.11 or newer; this is %s: make PYTHON=python3.11 ..." % sys.version.split()[0])'
	@rm -f $(READY)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip sync --quiet --compile-bytecode $(UV_TORCH) $(UV_LINKS) requirements.lock
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps --editable .
	@touch $(READY)

clean:
	rm -rf artifacts .oneaxis mlflow.db mlartifacts .pytest_cache .mypy_cache .ruff_cache
