# Everything sets itself up: a fresh clone needs Python 3.11 or newer and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.paceline

.PHONY: demo check test test-all clean

demo: $(SETUP)
	$(BIN)/paceline train

check: $(SETUP)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(SETUP)
	$(BIN)/pytest -n 2 --dist worksteal -m "not long and not accelerator" --hypothesis-seed=0

test-all: $(SETUP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all]"
	$(BIN)/pytest -n 2 --dist worksteal

$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(SETUP)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
