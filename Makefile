# make run: set up and run the main job.   make test: set up what tests need and run them.   make check: lint, types, architecture.
# make regress: replay the committed traces and compare with results/baseline; FORMAT=github annotates a pull request.
# make regress-live: the same for answers of the shipped model.   make baseline: make results/baseline anew, both parts.
# make fuzz: readers of untrusted files, new examples every time (FUZZ=20 times those of make test: about ten minutes on one core).
# make faults: kills, full disks, failing reads and a soak, FAULTS=25 times those of make test (about an hour on one core); docs/reliability.md.
# make validate: what forecasts for this machine are off by (moebench calibrate first; a quarter of an hour).
# make claims: docs/claims.md, what six papers claim beside what is modeled here (a quarter of an hour).
# make report: the sample report of the committed results, in reports/sample.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
ARGS ?= system=edge0 hw=m4pro

SWEEP := -m system=lru,slru,specprefetch,belady budget=0.15,0.5,0.75 hw=m4pro
MACHINES := m4pro rtx5090_32gb snapdragon_8_elite_gen5
BASELINE := results/baseline
TRACES := $(BASELINE)/traces
REPLAYS := replay-bigmomo replay-edge0 replay-budgets $(MACHINES:%=replay-%)
comma := ,
space := $() $()
NEW := build/regress
FORMAT ?= table
FUZZ ?= 20
FAULTS ?= 25
JOBS ?= 2
MOEBENCH := OMP_NUM_THREADS=1 MOEBENCH_PLUGINS= $(BIN)/moebench
LIVE := systems=lru,edge0,flashmoe,moe_infinity,specprefetch,ssd_llama,bigmomo baselines=false
REPLAY := model=tinymoe workload=trace workload.path=$(TRACES)

.PHONY: run test fuzz faults check claims validate bench clean report regress regress-live baseline live traces $(REPLAYS)

run: $(VENV)/.run
	$(BIN)/moebench run $(ARGS)

test: $(VENV)/.test
	OMP_NUM_THREADS=1 MOEBENCH_PLUGINS= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile tests

fuzz: $(VENV)/.test
	MOEBENCH_FUZZ=$(FUZZ) OMP_NUM_THREADS=1 MOEBENCH_PLUGINS= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile tests/test_untrusted_*.py

faults: $(VENV)/.test
	rm -f build/faults.txt
	MOEBENCH_FAULTS=$(FAULTS) OMP_NUM_THREADS=1 MOEBENCH_PLUGINS= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile tests/test_faults_*.py
	sort build/faults.txt

check: $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/check_architecture.py

validate: $(VENV)/.run
	$(MOEBENCH) validate hw=host

claims: $(VENV)/.run
	$(MOEBENCH) reproduce out=build/claims docs=docs/claims.md

bench: $(VENV)/.run
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/replay_speed.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/decode_overhead.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/cache_replay.py

regress: $(VENV)/.run
	rm -rf $(NEW)/replay
	$(MAKE) -j2 --no-print-directory OUT=$(NEW)/replay $(REPLAYS)
	$(BIN)/moebench regress baseline=$(BASELINE)/replay current=$(NEW)/replay exact=true format=$(FORMAT)

report: $(VENV)/.run
	$(MOEBENCH) report results=$(BASELINE) out=reports/sample

regress-live: $(VENV)/.run
	rm -rf $(NEW)/live
	$(MAKE) --no-print-directory OUT=$(NEW)/live live
	$(BIN)/moebench regress baseline=$(BASELINE)/live current=$(NEW)/live format=$(FORMAT)

baseline: $(VENV)/.run
	rm -rf $(BASELINE)/replay $(BASELINE)/live
	$(MAKE) -j2 --no-print-directory OUT=$(BASELINE)/replay $(REPLAYS)
	$(MAKE) --no-print-directory OUT=$(BASELINE)/live live

# What fails is a failed row or a missing one, and regress says so.
$(MACHINES:%=replay-%): replay-%: $(VENV)/.run
	-$(MOEBENCH) compare systems=all hw=$* $(REPLAY)/tinymoe.safetensors out=$(OUT) > /dev/null

replay-edge0 replay-bigmomo: replay-%: $(VENV)/.run
	-$(MOEBENCH) run -m system=$* hw=$(subst $(space),$(comma),$(MACHINES)) $(REPLAY)/tinymoe-$*.safetensors out=$(OUT) > /dev/null

replay-budgets: $(VENV)/.run
	-$(MOEBENCH) run $(SWEEP) $(REPLAY)/tinymoe.safetensors out=$(OUT) > /dev/null

live: $(VENV)/.run
	-$(MOEBENCH) compare $(LIVE) hw=m4pro model=tinymoe quality=quick out=$(OUT) > /dev/null

# Only where the model or a system's predictions change: then the baseline is another one too.
traces: $(VENV)/.run
	$(MOEBENCH) trace record system=specprefetch requests=4 new_tokens=32 out=$(TRACES)/tinymoe.safetensors
	$(MOEBENCH) trace record system=edge0 requests=4 new_tokens=32 out=$(TRACES)/tinymoe-edge0.safetensors
	$(MOEBENCH) trace record system=bigmomo requests=4 new_tokens=32 out=$(TRACES)/tinymoe-bigmomo.safetensors

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
