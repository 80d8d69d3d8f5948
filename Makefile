# make run: set up and run the main job.   make test: set up what tests need and run them.   make check: lint, types, architecture.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
ARGS ?= system=edge0 hw=m4pro

.PHONY: run test check bench clean

run: $(VENV)/.run
	$(BIN)/moebench run $(ARGS)

test: $(VENV)/.test
	OMP_NUM_THREADS=1 MOEBENCH_PLUGINS= $(BIN)/python -m pytest tests

check: $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/check_architecture.py

bench: $(VENV)/.run
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/replay_speed.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/decode_overhead.py

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "moebench needs Python 3.11 to 3.13; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.run: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e '.[test]'
	touch $@ $(VENV)/.run

$(VENV)/.check: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.test $(VENV)/.run

clean:
	rm -rf $(VENV) build dist *.egg-info
