# Each target sets up what it needs in .venv; only Python 3.11+ and make must be there.
#   make demo            train a small GPT on real text, watch it, read what it writes
#   make test            the test suite
#   make test-long       tests that take too long for every change
#   make soak            the same kind of tests for longer: thousands of crashes
#   make lint            formatting, lint rules, types, the order of imports
#   make bench           the figures that the README quotes, one script each
#   make bench QUICK=1   the same with less work: some minutes, and no figures to quote
#   make docs            the documentation, into site/
#   make wafer-figures   the pictures of the simulated wafer, into docs/pictures/
# Another Python: make test PYTHON=python3.12
# The tests run in three processes of one thread each, a file at a time; in one process: make test WORKERS=0

PYTHON ?= python3
WORKERS ?= 3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Bytecode is kept whatever the environment says: without it each process of the tests rewrites asserts
# for 10 s, and each start of the demo compiles 400 modules.
WITH_BYTECODE := PYTHONDONTWRITEBYTECODE=
PYTEST := $(WITH_BYTECODE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
READY_DOCS := $(VENV)/.ready-docs

.PHONY: demo test test-long soak lint bench docs wafer-figures clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(WITH_BYTECODE) $(BIN)/python -m penstock.demo

test: $(READY)
	$(PYTEST) $(PYTEST_ARGS)

test-long: $(READY)
	$(PYTEST) -m 'long and not slow' --timeout 900 $(PYTEST_ARGS)

soak: $(READY)
	$(BIN)/python -m pytest -m slow --timeout 3600 $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: $(READY)
	$(BIN)/python benchmarks/contract $(if $(QUICK),--quick)

docs: $(READY) $(READY_DOCS)
	$(BIN)/python -m mkdocs build --strict --quiet

wafer-figures: $(READY)
	for file in acceleration.svg sorting.svg ring.svg accumulators.svg queues.svg cores.png links.png; do \
		$(BIN)/python -m penstock wafer figure $${file%.*} --out docs/pictures/wafer_$$file || exit 1; \
	done
	$(BIN)/python -m penstock wafer figure animation --out docs/pictures/wafer_animation.gif

clean:
	rm -rf site build .pytest_cache .ruff_cache .mypy_cache

# The stamp is newer than pyproject.toml when the environment has what it names.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Penstock needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
			"name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "Installing Penstock and the packages that it needs into $(VENV): one to five minutes, once."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

$(READY_DOCS): pyproject.toml $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@
