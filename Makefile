# make sweep   build the environment and run the main job
# make test    add to it what tests need; lint, type-check and run the tests, in eight to ten minutes on two cores
VENV   ?= .venv
PYTHON ?= python3
# the interpreter everything runs with: set BIN=python3 to use one that already has a GPU torch
BIN    ?= $(VENV)/bin/python
# tests of one file stay in one process, for what they share; the order is that of tests/conftest.py
SPREAD  = -n auto --dist loadfile --no-loadscope-reorder

# pip would compile 18,000 files; Python compiles what is imported, a tenth of them, and keeps that
PIP     = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE

.PHONY: sweep test suite thorough fuzz mutations test-gpu test-wheel card lint oracle publish docs dist clean

sweep: $(VENV)/sweep
	$(BIN) -m bench.sweep $(ARGS)

# some: make test ARGS=tests/commands/test_card.py; without the thirty slow ones: make test ARGS='-m "not slow"'
test: lint suite

# without make's own flags, since tests run make
suite: $(VENV)/ready
	env -u MAKEFLAGS -u VENV $(BIN) -m pytest $(SPREAD) $(ARGS)

# the tests of parsers and arithmetic, with five times as many examples: before a release
fuzz: $(VENV)/ready
	BENCH_FUZZ=100 $(BIN) -m pytest $(SPREAD) -m hypothesis $(ARGS)

# the tests that need a GPU, by the python3 that has a torch for it, or by GPU=.venv/bin/python.
# ARGS='-m gpu' adds the ten that compile or start several workers for a case
GPU    ?= python3
test-gpu:
	$(GPU) -m pytest -s -m "gpu and not slow" tests/gpu $(ARGS)

# the tests with the torch that pip install brings most people, CUDA's build, where there need be no
# driver: 6 GB in .venv-wheel, so not in CI. make test-wheel PYTHON=python3.13
test-wheel:
	$(MAKE) suite VENV=.venv-wheel ARGS='$(ARGS)'

# everything a GPU must show, by the same python3, into results/<gpu>-<date>/; the same command goes
# on where time cut it: make card, or CARD_MINUTES=3 make card ARGS='--data-dir /data'. Without a
# GPU it rehearses all of it on the CPU
card:
	$(GPU) -m bench.card $(ARGS)

# before a release: every slow test, those too that make test skips: all of make card rehearsed, and
# the sweep killed a hundred times in place of five
thorough: $(VENV)/ready
	BENCH_THOROUGH=100 $(BIN) -m pytest $(SPREAD) --timeout 3600 -m slow $(ARGS)

# are all numbers of an earlier commit the same, and its trainings bit for bit? make oracle OLD=HEAD~3
oracle: $(VENV)/ready
	$(BIN) -m tests.oracle $(OLD) $(ARGS)

# faults made where numbers are decided, one by one: which pass the tests of their file, though
# tests/mutations.md gives no reason? ARGS='bench.results.verdict.*' for some
mutations: $(VENV)/ready
	$(BIN) -m mutmut run $(ARGS)
	$(BIN) -m mutmut results | sed '/: not checked/d'

lint: $(VENV)/ready
	$(BIN) -m ruff check .
	$(BIN) -m ruff format --check .
	$(BIN) -m mypy

$(VENV)/sweep: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 4) and "error: Python 3.11.4 or later is needed; set PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	touch $@

$(VENV)/ready: $(VENV)/sweep
	$(PIP) -e '.[test,asv]'
	touch $@

# html/: the asv site, the report of every sweep and an index, to read without a network
publish: $(VENV)/ready
	$(BIN) -m bench.publish $(ARGS)

# html/docs/: the pages of docs/ as a site, with search, to read without a network; a dead link is an
# error
docs: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(BIN) -m mkdocs build --strict --quiet

# dist/: the wheel and the source of a release, their metadata checked, and the wheel used in an
# environment of its own outside this checkout, beside the torch that is here
dist: $(VENV)/ready
	rm -rf dist
	$(BIN) -m build --no-isolation
	$(BIN) -m twine check --strict dist/*
	BENCH_WHEEL=$$(echo $(CURDIR)/dist/*.whl) $(BIN) -m pytest tests/test_installed.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
