# Every target does its own set-up: a fresh clone needs Python 3.11, make and a C compiler.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST_WORKERS ?= 2

.PHONY: demo test check bench protos reference format warm clean

demo: warm
	$(BIN)/python -m demo.run

test: warm
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tools.protos --check
	$(BIN)/python -m tools.reference --check
	$(BIN)/python -m pytest -q tests/architecture

bench: warm
	$(BIN)/python -m benchmarks.planning

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
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[service,dev]'
	touch $@
