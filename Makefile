# `make demo` and `make test` work on a fresh machine with Python 3.11 or newer: they
# make a virtual environment in .venv first, once. No MPI is needed: mpirun comes from
# PyPI. CONSTRAINTS= takes the newest versions instead of the pinned ones, into
# .venv-newest; CONSTRAINTS=constraints-oldest.txt the oldest torch, into .venv-oldest.

PYTHON ?= python3
CONSTRAINTS ?= constraints-cpu.txt
EPOCHS ?= 4
KIND := $(patsubst constraints-%,%,$(basename $(notdir $(CONSTRAINTS))))
VENV ?= .venv$(if $(KIND),$(filter-out -cpu,-$(KIND)),-newest)
BIN := $(VENV)/bin
READY := $(VENV)/ready
# a worker of xdist that crashes fails the run: with loadfile, or a new one, it may hang
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, max(2, os.cpu_count() or 1)))')
PARALLEL := --numprocesses $(WORKERS) --dist worksteal --max-worker-restart 0
UNET := examples/unet_histology/model.py

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DELETE_ON_ERROR:
.PHONY: help demo test slow nightly format bench size site release clean

help:  ## say what the commands are
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(READY)  ## compile a U-Net for 4 ranks, train it, check it against one process
	@echo "== a U-Net, cut into 4 stages for 4 processes"
	$(BIN)/gemsc compile $(UNET) --ranks 4 --schedule 1f1b --micro-batches 8 -o build/unet
	@echo "== train it to find the stain in a photograph of tissue; a second time, go on"
	$(BIN)/gemsc run build/unet --epochs $(EPOCHS) --save build/unet-trained --resume
	@echo "== compare with one process that trains the same model"
	$(BIN)/gemsc verify build/unet
	@echo "== look at"
	@echo "  build/unet/rank0.py                       what the first of 4 processes runs"
	@echo "  build/unet/graph.svg                      the stages and what they send"
	@echo "  build/unet/plan.toml                      every decision; gemsc show build/unet"
	@echo "  build/unet-trained/model.safetensors      the trained weights"
	@echo "  build/unet-trained/curves.svg             loss and score; the figures are in log.csv"
	@echo "  build/unet-trained/latest/                the checkpoint that this goes on from:"
	@echo "                                            make demo EPOCHS=8"
	@test -e build/unet/graph.svg || echo "no graph.svg: install Graphviz and compile again"

test: $(READY)  ## lint, types and tests, with real mpirun jobs, in a few minutes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "$(BIN)/mypy, and at the same time"  # on one core, while many tests wait
	$(BIN)/mypy & types=$$!; $(BIN)/python -m pytest $(PARALLEL); tests=$$?; \
	  wait $$types && exit $$tests

slow: $(READY)  ## those tests and all for which make test has no time
	$(BIN)/python -m pytest $(PARALLEL) --slow

nightly: $(READY)  ## all tests with those that take long; PART=1/4: the first of four parts
	@$(BIN)/python -c 'import torch; print("torch", torch.__version__)'
	$(BIN)/python -m pytest $(PARALLEL) --nightly $(PART:%=--part %)

format: $(READY)  ## put all files into the one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## measure: docs/benchmarks.md says what
	@for script in $(filter-out %/contender_process.py %/gpu_rank.py, $(shell grep -l __main__ benchmarks/*.py)); do \
	  echo "== $$script"; $(BIN)/python $$script || exit; done

size:  ## lines of each room of gemsc/, and the most that it may have
	@$(PYTHON) tests/house/size.py

site: $(READY)  ## build the documentation: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

release: $(READY)  ## check all that a release needs, and build it in dist/
	@test -z "$$(git status --porcelain)" || { echo "commit first"; exit 1; }
	@! grep -q 'not released yet' docs/changelog.md || { echo "docs/changelog.md: date the version"; exit 1; }
	$(MAKE) test nightly
	rm -rf dist && $(BIN)/python -m build
	packaging/try_wheel.sh dist/*.whl
	MPI=mpich packaging/try_wheel.sh dist/*.whl
	@echo "next: git tag v$$($(BIN)/gemsc --version | cut -d' ' -f2), push it, and upload dist/"

clean:  ## remove what was built, not .venv
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find gemsc tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(READY): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "gemsc needs Python 3.11 or newer: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "== install into $(VENV): a minute or two, once"
	@$(BIN)/pip install -qq $(CONSTRAINTS:%=-c %) -e '.[mpi,onnx,keras,examples,docs,dev]'
	@touch $@
