# Each target makes the virtual environment that it needs. Pass PYTHON=python3.12 for another interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Exact numerics are bound to the library's version, so the version that figures were taken with is the one installed.
TORCH ?= torch==2.13.0
PAIR ?= smollm2
JSON ?=
TRACES ?= models/$(PAIR)-traces.json

.PHONY: demo test lint bench clean

demo: $(VENV)/.ready
	@$(BIN)/python -m tools.demo --pair $(PAIR) $(if $(JSON),--json)

test: $(VENV)/.ready
	$(BIN)/python -m pytest

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The link in full, with its picture: docs/benchmark.md.
bench: $(VENV)/.ready $(TRACES)
	$(BIN)/python -m tools.bench overhead
	$(BIN)/python -m tools.bench link --traces $(TRACES) --rtt-ms 50

$(TRACES): | $(VENV)/.ready
	@mkdir -p $(@D)
	$(BIN)/python -m tools.twin record --pair $(PAIR) --out $@ --max-tokens 96 \
		--prompt "Explain in a few sentences why the sky is blue."

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/pip install -q "$(TORCH)"
	$(BIN)/pip install -q "$(TORCH)" -e ".[edge,cloud,tools,dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
