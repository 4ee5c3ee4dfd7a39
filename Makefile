# Every target makes what it needs on a machine with Python 3.10 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint nightly bench conformance clean

demo: $(INSTALLED)
	$(BIN)/python examples/first_calls.py
	$(BIN)/python examples/pipeline.py

test: lint
	$(BIN)/pytest -m "not nightly and not cuda"

nightly: lint
	-$(BIN)/pip install --disable-pip-version-check -q 'atheris>=3.0'  # where there is none, fuzzing is skipped
	$(BIN)/pytest -m "not cuda" --timeout 900

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks

conformance: $(INSTALLED)
	$(BIN)/python -m tests.conformance --report docs/conformance.md

$(INSTALLED): pyproject.toml constraints.txt telegrad/version.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
