# `make demo` and `make test` set everything up by themselves: virtual environment, pinned dependencies, then the work.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

define UNFIT
note: this torchvision does not load beside this torch (the package index has CUDA builds, say), so neither models of \
transformers nor of timm import, but in the tests. For those of transformers: \
$(BIN)/python -m pip uninstall torchvision. For both, beside a CPU torch: \
$(BIN)/python -m pip install --no-deps --force-reinstall --constraint constraints.txt \
--index-url https://download.pytorch.org/whl/cpu torchvision
endef

.PHONY: demo test lint types contracts check clean

demo: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/demo

test: $(READY)
	$(BIN)/python -m pytest -n auto

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

contracts: $(READY)
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

check: lint types contracts test

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed --constraint constraints.txt --editable ".[dev]"
	-$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt timm torchvision
	@$(BIN)/python -c "import torchvision" 2>/dev/null || echo "$(UNFIT)"
	touch $@

clean:
	rm -rf $(VENV) demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
