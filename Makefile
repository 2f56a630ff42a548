# One virtual environment, .venv; its stamp holds the folder it was installed from, so that a checkout that was moved installs anew.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp
ARGS ?=

ifneq ($(CURDIR),$(shell cat $(STAMP) 2>/dev/null))
.PHONY: $(STAMP)
endif

.PHONY: train test test-slow test-gpu test-browser lint check clean

train: $(STAMP)
	$(BIN)/segment-env train $(ARGS)

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS)

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu $(ARGS)

test-browser: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[browser]'
	$(BIN)/python -m pytest -m browser $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

check: lint test

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'segment-env needs Python 3.11 or newer: make PYTHON=python3.11' >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[dev]'
	@echo '$(CURDIR)' > $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find segment_env models agents tests -name __pycache__ -prune -exec rm -rf {} +
