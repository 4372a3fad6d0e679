VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# Most of what is installed is never imported: what is, is compiled then. Half of the time of setting up.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
READY := $(VENV)/.ready
PART ?=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Tests that start ranks wait for them: three at a time keep two cores busy.
AT_ONCE := -n 3
# Dozens of processes import the same sources: they are compiled once, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help ready demo demo-finetune demo-generate test test-all fuzz parts golden bench lint format docs clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | column -t -s "$$(printf '\t')"

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "arachnec needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "arachnec needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch setuptools
	$(PIP) -e '.[diffusers,finetune,plots,parquet,test,demo,dev]'
	@touch $@

ready: $(READY)

demo: $(READY) ## train a small Wan2.1 model on clips of real videos, in turns with data parallelism, on 2 processes
	$(BIN)/python -m examples.demo.run

demo-finetune: $(READY) ## fine-tune a pretrained folder, with LoRA and whole, into files that Diffusers loads
	$(BIN)/python -m examples.finetune.run

demo-generate: $(READY) ## train a tiny pair of models on clips of real videos, and sample videos with both
	$(BIN)/python -m examples.generate.run

test: $(READY) ## the tests, but for more cases of the same rules; `make test PART=solver`: those of one part
	$(PYTEST) $(AT_ONCE) -m "not slow" $(addprefix tests/,$(PART))

test-all: $(READY) ## every test that this machine can run, the slow ones too; `make test-all PART=solver`
	$(PYTEST) $(AT_ONCE) $(addprefix tests/,$(PART))

fuzz: $(READY) ## the properties with 1000 drawn cases each, for minutes; `make fuzz PART=ir`: those of one part
	$(PYTEST) $(AT_ONCE) --hypothesis-profile=long --timeout=3600 -m hypothesis $(addprefix tests/,$(PART))

parts: ## the parts that can be tested alone
	@find tests -name 'test_*.py' -exec dirname {} + | cut -d/ -f2- | sort -u

golden: $(READY) ## write the golden files again; read the diff before you commit it
	$(BIN)/python -m pytest -q tests/golden tests/commands/test_explain.py --update-golden

bench: $(READY) ## the measurements that the documentation quotes
	@for f in benchmarks/kernels $$(grep -l "^if __name__" benchmarks/*.py); do echo "== $$f"; $(BIN)/python $$f || echo "$$f ended with $$?"; done

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## rewrite the sources in the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY) ## check the documentation: links, names, words, and the worked examples step by step
	$(PYTEST) -q tests/house/test_docs.py tests/docs

clean: ## remove the virtual environment and every cache
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
