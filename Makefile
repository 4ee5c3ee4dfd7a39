# Every target makes what it needs on a machine with Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
INSTALLED := $(VENV)/.installed

# The tests start hundreds of processes, which would compile the package each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-only portable package lint nightly chaos bench bench-compare bench-programs bench-peers conformance coverage clean

demo: $(INSTALLED)
	$(BIN)/python examples/first_calls.py
	$(BIN)/python examples/pipeline.py --steps 60

test: lint test-only

test-only: $(INSTALLED)
	$(BIN)/pytest -m "not nightly and not cuda" -n 3 --dist loadfile

nightly: lint
	-$(BIN)/pip install --disable-pip-version-check -q 'atheris>=3.0'  # where there is none, fuzzing is skipped
	-$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[torchrl]'  # likewise, its tests
	-$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt --group models  # and those that cut models
	-$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt --group launchers  # and theirs
	-$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt --group docs  # and those of the pages
	-$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt basedpyright  # and what judges the public types
	-npm install --silent --no-save --prefix build axe-core@4  # and that of the dashboard's page
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt --group mutants
	$(BIN)/pytest -m "not cuda" -n 2 --dist loadfile --timeout 900
	$(BIN)/python -m tests.mutants
	$(BIN)/python -m tests.chaos --seconds 1800 --soak

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ruff format --check --line-length 72 --config 'format.exclude = ["*.py"]' .  # the code of the pages
	$(BIN)/mypy
	$(BIN)/codespell

chaos: $(INSTALLED)
	$(BIN)/python -m tests.chaos --seconds 60
	$(BIN)/python -m tests.chaos --seconds 60 --supervised
	$(BIN)/python -m tests.chaos --seconds 60 --soak

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks

bench-compare: $(INSTALLED)
	$(BIN)/python -m benchmarks.compare --to "$(TO)"

bench-programs: $(INSTALLED)
	$(BIN)/python -m benchmarks.programs

bench-peers: $(PEERS)/.installed
	$(PEERS)/bin/python -m benchmarks.peers

conformance: $(INSTALLED)
	$(BIN)/python -m tests.conformance --report docs/conformance.md

.PHONY: docs docs-links
docs: $(VENV)/.docs
	$(BIN)/python docs/build.py

# Those to other sites; those between the pages are looked at by `make docs` and its tests.
docs-links: $(VENV)/.docs
	$(BIN)/python -m sphinx -q -b linkcheck -d build/doctrees docs build/links

$(VENV)/.docs: $(INSTALLED)
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt --group docs
	touch $@

# The pure files by their own tests, which fails below 95%; then the whole package by all, whose figure nothing asks for yet.
coverage: $(INSTALLED)
	$(BIN)/python -m tests.covering
	$(BIN)/coverage erase
	-$(BIN)/coverage run -m pytest -m "not nightly and not cuda" --timeout 300
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --skip-covered

# What needs nothing of Linux or macOS: no fork, no Unix sockets.
portable: $(INSTALLED)
	$(BIN)/pytest -m "not nightly and not cuda" tests/windows tests/sim tests/wire tests/transport tests/rref \
		tests/autograd/test_backward.py tests/rpc/test_streams.py

# What is published, into dist/: the same bytes twice, and the wheel is tried where there is nothing else.
package: $(INSTALLED)
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt --group release
	$(BIN)/python -m tests.packaging

$(INSTALLED): pyproject.toml constraints.txt telegrad/version.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q 'pip>=25.1'  # which knows dependency groups
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[examples,insight,prometheus,opentelemetry,redis]' --group dev
	$(BIN)/python -m compileall -q telegrad  # as pip does for what it copies; else each start compiles it where none may be written
	touch $@

# A peer that cannot be installed leaves its log, from which the table tells why.
$(PEERS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --disable-pip-version-check -c constraints.txt -e . numpy
	for package in ray torchmonarch; do \
		$(PEERS)/bin/pip install --disable-pip-version-check -c constraints.txt $$package > $(PEERS)/$$package.log 2>&1 \
			|| echo "$$package: not installed, see $(PEERS)/$$package.log"; \
	done
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) .nox .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage* build dist *.egg-info
