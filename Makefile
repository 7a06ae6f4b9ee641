# Everything a checkout needs lives in .venv; versions are pinned in constraints.txt.

VENV  := .venv
BIN   := $(VENV)/bin
NATIVE := $(shell find native -type f) CMakeLists.txt pyproject.toml src/outlast/__init__.py
# Build tools come from the environment itself and not from an isolated one, so that they are pinned too.
PIP   := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
ARGS  ?=

.PHONY: help demo test test-nightly lint bench clean distclean
.DELETE_ON_ERROR:

help:
	@echo "make demo          set up and watch streams survive a killed engine"
	@echo "make test          set up and run the tests (ARGS='-k name' passes options to pytest)"
	@echo "make test-nightly  the long tests as well"
	@echo "make lint          ruff, mypy, import-linter"
	@echo "make bench         the benchmarks"
	@echo "make clean         remove what builds and tests made; make distclean: .venv too"

demo: $(VENV)/.demo
	@$(BIN)/outlast model fetch > /dev/null
	@$(BIN)/outlast demo $(ARGS)

test: $(VENV)/.test
	@$(BIN)/outlast model fetch > /dev/null
	$(BIN)/python -m pytest -m "not nightly" $(ARGS)

test-nightly: $(VENV)/.test
	@$(BIN)/outlast model fetch > /dev/null
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest --timeout 36000 $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.bench
	@$(BIN)/outlast model fetch > /dev/null
	$(BIN)/outlast bench recovery $(ARGS)
	$(BIN)/outlast bench checkpoint $(ARGS)
	$(BIN)/outlast bench engine $(ARGS)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage* htmlcov
	rm -f $(VENV)/.demo $(VENV)/.test $(VENV)/.lint $(VENV)/.bench

distclean: clean
	rm -rf $(VENV)

$(VENV)/.tools: constraints.txt .ci/preflight
	@python=$$(.ci/preflight) && echo "setting up $(VENV) with $$python" && $$python -m venv $(VENV)
	@$(PIP) scikit-build-core nanobind cmake ninja
	@touch $@

# One rule for the extras demo, test, lint and bench: build the extensions and install what the extra brings.
$(VENV)/.demo $(VENV)/.test $(VENV)/.lint $(VENV)/.bench: $(VENV)/.%: $(VENV)/.tools $(NATIVE)
	@echo "building, and installing the extra $*"
	@$(PIP) --no-build-isolation --editable '.[$*]'
	@touch $@
