# Each target makes the virtual environment that it needs. Pass PYTHON=python3.12 for another interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Exact numerics are bound to the library's version, so the version that figures were taken with is the one installed.
TORCH ?= torch==2.13.0
# vLLM pins its own libraries, so it has an environment apart; its CPU wheel is for x86-64 Linux, Python 3.11 and later.
VLLM_VENV ?= .venv-vllm
VLLM_FITS := $(shell $(PYTHON) -c "import platform as p, sys; \
	print('yes' * (sys.version_info >= (3, 11) and (p.system(), p.machine()) == ('Linux', 'x86_64')))")
PAIR ?= smollm2
JSON ?=
TRACES ?= models/$(PAIR)-traces.json
EXECUTIONS ?= 10000000
MINUTES ?= 30
# Makes an aarch64 userland for emulation: SCRIPT DIR WHEEL... leaves DIR/armpy, its Python.
ARM64_USERLAND ?=

.PHONY: demo test test-vllm test-arm lint bench fidelity fuzz sanitize faults clean

demo: $(VENV)/.ready
	@$(BIN)/python -m tools.demo --pair $(PAIR) $(if $(JSON),--json)

test: $(VENV)/.ready
	$(BIN)/python -m pytest
	$(if $(VLLM_FITS),$(MAKE) test-vllm,@echo "vLLM is not tested here: it needs x86-64 Linux and Python 3.11")

# The vLLM engine on a CPU, against vLLM itself.
test-vllm: $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python -m pytest tests/vllm

# What runs on a board, on an emulated Cortex-A76: docs/native.md.
test-arm: $(VENV)/.ready
	@$(BIN)/python -m tests.arm --userland "$(ARM64_USERLAND)"

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The link in full, with its picture: docs/benchmark.md.
bench: $(VENV)/.ready $(TRACES)
	$(BIN)/python -m tools.bench overhead
	$(BIN)/python -m tools.bench link --traces $(TRACES) --rtt-ms 50

# What quantising costs a drafter, on texts of its target: docs/fidelity.md. It takes an hour, and goes on where it was.
fidelity: $(VENV)/.ready
	@mkdir -p models
	$(BIN)/python -m tools.corpus write --pair $(PAIR) --out models/$(PAIR)-corpus.jsonl --tokens 256
	$(BIN)/python -m tools.bench fidelity --pair $(PAIR) --corpus models/$(PAIR)-corpus.jsonl \
		--keep models/$(PAIR)-fidelity --picture models/$(PAIR)-fidelity.svg

# Coverage-guided, over all targets: docs/testing.md.
fuzz: $(VENV)/.ready
	@$(BIN)/python -m tests.fuzz run --executions $(EXECUTIONS)

# The board's library with AddressSanitizer and UndefinedBehaviorSanitizer: docs/native.md.
sanitize: $(VENV)/.ready
	@$(BIN)/python -m tests.native.sanitized --tests

# Everything that can go wrong between boards and verifiers, each by itself and then at random: docs/faults.md.
faults: $(VENV)/.ready
	$(BIN)/python -m tests.faults run
	$(BIN)/python -m tests.faults soak --minutes $(MINUTES)

$(TRACES): | $(VENV)/.ready
	@mkdir -p $(@D)
	$(BIN)/python -m tools.twin record --pair $(PAIR) --out $@ --max-tokens 96 \
		--prompt "Explain in a few sentences why the sky is blue."

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/pip install -q "$(TORCH)"
	$(BIN)/pip install -q "$(TORCH)" -e ".[edge,cloud,cluster,tools,dev,fuzz]"
	touch $@

$(VLLM_VENV)/.ready: cloud/engines/vllm/cpu-requirements.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install -q --no-compile --no-deps "$(TORCH)" -r $< -e .
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build *.egg-info
