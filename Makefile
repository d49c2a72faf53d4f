# `make demo` and `make test` set everything up by themselves: virtual environment, pinned dependencies, then the work.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

define ASIDE
note: this torchvision does not load beside this torch (the package index has CUDA builds, say), and transformers fails \
where one is there that does not load: it lies in $(VENV)/aside now, where only tests find it. Models of timm need one that \
loads. For a CPU torch: $(BIN)/python -m pip install --no-deps --constraint constraints.txt \
--index-url https://download.pytorch.org/whl/cpu torchvision
endef

.PHONY: demo test lint types contracts check pictures clean

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

pictures: $(READY)
	$(BIN)/python scripts/pictures.py

check: lint types contracts test

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed --constraint constraints.txt --editable ".[dev]"
	-$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt timm torchvision
	@$(BIN)/python -c "import torchvision" 2>/dev/null || { mkdir -p $(VENV)/aside; \
	mv $(VENV)/lib/python*/site-packages/torchvision* $(VENV)/aside/ 2>/dev/null && echo "$(ASIDE)" || true; }
	touch $@

clean:
	rm -rf $(VENV) demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
