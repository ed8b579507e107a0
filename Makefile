# make sweep   build the environment and run the main job
# make test    build the same environment; lint, type-check and run the tests, in 12 minutes on two cores
# make test-all    the slow tests as well, in 16 minutes
VENV   ?= .venv
PYTHON ?= python3
# the interpreter everything runs with: set BIN=python3 to use one that already has a GPU torch
BIN    ?= $(VENV)/bin/python
# tests of one file stay in one process, for what they share; the order is that of tests/conftest.py
SPREAD  = -n logical --dist loadfile --no-loadscope-reorder

# pip compiles 18,000 files on one core; all cores do so afterwards, in half a minute less
PIP     = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: sweep test test-all test-gpu card lint compiled chaos publish clean

sweep: $(VENV)/ready
	$(BIN) -m bench.sweep $(ARGS)

# all but the 97 slow tests; some: make test ARGS=tests/test_card.py
test: lint compiled
	$(BIN) -m pytest $(SPREAD) -m "not slow" $(ARGS)

# everything, with five times the fuzzing: before a release, and what you changed before a commit, by
# make test-all ARGS=tests/test_lanes.py
test-all: lint compiled
	BENCH_FUZZ=100 $(BIN) -m pytest $(SPREAD) $(ARGS)

# everything that needs a card, in one run, by the python3 that has a torch for it (pytest is all it
# needs besides): make test-gpu, or make test-gpu GPU=.venv/bin/python
GPU    ?= python3
test-gpu:
	$(GPU) -m pytest -s -m gpu tests/gpu tests/data/test_batches.py $(ARGS)

# everything a GPU must show, by the same python3, into results/<gpu>-<date>/; the same command goes
# on where time cut it: make card, or CARD_MINUTES=3 make card ARGS='--data-dir /data'
card:
	$(GPU) -m bench.card $(ARGS)

# the sweep killed a hundred times, and a cluster's parts 33 times; make test does so 10 and 3 times
chaos: $(VENV)/ready
	BENCH_CHAOS=100 $(BIN) -m pytest -s --timeout 3600 tests/test_chaos.py tests/test_cluster.py $(ARGS)

lint: $(VENV)/ready
	$(BIN) -m ruff check .
	$(BIN) -m ruff format --check .
	$(BIN) -m mypy

# where PYTHONDONTWRITEBYTECODE is set, hundreds of processes would each compile what they import:
# 0.4 of the 0.8 CPU s that a report imports for
compiled: $(VENV)/ready
	$(BIN) -m compileall -q bench tests

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 4) and "error: Python 3.11.4 or later is needed; set PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[test,asv]'
	$(VENV)/bin/python -m compileall -qq -j 0 $(VENV)/lib || true  # a template of torch is no Python
	touch $@

# html/: the asv site, the report of every sweep and an index, to read without a network
publish: $(VENV)/ready
	$(BIN) -m bench.publish $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
