# Every target does its own set-up: a fresh clone needs Python 3.11, make and a C compiler.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST_WORKERS ?= 2

.PHONY: demo test test-long test-full fuzz parity check bench bench-data bench-scale protos reference format warm clean soak faults

demo: warm
	$(BIN)/python -m demo.run

# By file: what a module shares, such as a running service, is then set up once.
test: warm
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile

# What takes minutes: launchers, upgrades, restarts, services that hang, large and hostile jobs.
test-long: warm
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile -m "long and not full"

# What CI has no time for: the rest of the fault matrix, and variants of what it runs.
test-full: warm
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile -m full

# Other damage than that of `make test`, and eight times as much: 13,000 files and requests for a
# factor of 1. A failure names its seed and its input.
FUZZ_SEED ?= $(shell date +%s)
FUZZ_FACTOR ?= 1

fuzz: warm
	@echo FUZZ_SEED=$(FUZZ_SEED) FUZZ_FACTOR=$(FUZZ_FACTOR)
	FUZZ_SEED=$(FUZZ_SEED) FUZZ_FACTOR=$(FUZZ_FACTOR) \
	    $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal --timeout 1800 -m "" tests/fuzz

# Pixels of 10,200 pictures, tokens of 2,880 samples of each family and 600 conversations of each
# template, 20,400 resizes, beside those of transformers and torch: 24 times what CI compares.
parity: warm
	PARITY_FACTOR=24 $(BIN)/python -m pytest -m long -s \
	    tests/decode/test_pixel_parity.py tests/decode/test_parity_tokens.py \
	    tests/decode/test_template_parity.py

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.10 -p trainer_client -p dataservice_proto
	$(BIN)/python -m tools.protos --check
	$(BIN)/python -m tools.reference --check
	$(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) tests/architecture

bench: warm
	$(BIN)/python -m benchmarks.planning

# What a delivered picture costs beside other loaders; Streaming gets an environment of its own.
bench-data: warm
	$(BIN)/python -m benchmarks.data --out benchmarks/results

# One coordinator under 512, 2,560 and 10,000 ranks: some minutes.
bench-scale: warm
	$(BIN)/python -m benchmarks.scale

soak: warm
	$(BIN)/python -m soak --out benchmarks/results

faults: warm
	$(BIN)/python -m pytest tests/faults -m ""

reference: $(READY)
	$(BIN)/python -m tools.reference

protos: $(READY)
	$(BIN)/python -m tools.protos

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .demo

# The planner's kernels compile for a minute after an installation or a change of their sources.
warm: $(READY)
	$(BIN)/python -m tools.warm

# torch is pinned to one version because a plain range downloads gigabytes of GPU packages
# onto machines that have no GPU; the constraints file pins the rest for the same reason
# that a lock file exists: the same build tomorrow.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	PYTHONWARNINGS='ignore:Editable installation' \
	    $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[service,dev]'
	touch $@
