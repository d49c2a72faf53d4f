# `make demo` and `make test` set everything up by themselves: virtual environment, pinned dependencies, then the work.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# For `matrix`: a release of torch, and whatever options of benchmarks/torch_versions.py.
TORCH ?= 2.15.0
MATRIX ?=
READY := $(VENV)/.ready
DOCS := .venv-docs
# Bytecode is cached, whatever the environment says: the tests start over a hundred processes that import the package.
export PYTHONDONTWRITEBYTECODE :=
# What builds the package has pins, too: the first is read by pip up to 25.2, the second by later ones.
PINNED := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt

define ASIDE
note: this torchvision does not load beside this torch (the package index has CUDA builds, say), and transformers fails \
where one is there that does not load: it lies in $(VENV)/aside now, where only tests find it. Models of timm need one that \
loads. For a CPU torch: $(BIN)/python -m pip install --no-deps --constraint constraints.txt \
--index-url https://download.pytorch.org/whl/cpu torchvision
endef

.PHONY: demo test quick nightly light newest lowest matrix lint types contracts check docs pictures clean

demo: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/demo

test: $(READY)
	$(BIN)/python -m pytest -n auto

# All that is not marked slow: at most 300 CPU seconds.
quick: $(READY)
	$(BIN)/python -m pytest -n auto -m "not slow and not nightly"

# What is too slow for every change, all that compares real times, and all examples of the property tests.
nightly: $(READY)
	TIMED=1 $(BIN)/python -m pytest -n auto -m "nightly or timed"
	TIMED=1 $(BIN)/python -m pytest -n auto tests/property

# The wheel in an empty environment, without torch.
light:
	PYTHON=$(PYTHON) scripts/light

# The commands and a training, with the newest and with the lowest versions of packages that pyproject.toml allows.
newest lowest:
	PYTHON=$(PYTHON) scripts/versions $@

# Another release of torch, in an environment of its own beside .venv.
matrix:
	$(PYTHON) benchmarks/torch_versions.py $(TORCH) $(MATRIX)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select DOC102,DOC202,DOC403 planner gpipe_plan
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

contracts: $(READY)
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

# The README's picture of the report needs chromium.
pictures: $(READY)
	$(BIN)/python scripts/pictures.py
	$(BIN)/python scripts/readme_pictures.py

# The site, in build/site, by an environment of its own beside .venv; no torch.
docs: $(DOCS)/.ready
	$(DOCS)/bin/mkdocs build --strict

$(DOCS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(PINNED) $(DOCS)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

check: lint types contracts test

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PINNED) $(BIN)/python -m pip install --quiet --no-compile --upgrade-strategy only-if-needed --constraint constraints.txt \
	--editable ".[dev]"
	-$(BIN)/python -m pip install --quiet --no-compile --no-deps --constraint constraints.txt timm torchvision
	@$(BIN)/python -c "import torchvision" 2>/dev/null || { rm -rf $(VENV)/aside; mkdir $(VENV)/aside; \
	mv $(VENV)/lib/python*/site-packages/torchvision* $(VENV)/aside/ 2>/dev/null && echo "$(ASIDE)" || true; }
	touch $@

clean:
	rm -rf $(VENV) $(DOCS) .venv-matrix demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
