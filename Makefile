# Two commands do all the set-up on a machine that has Python and nothing else:
#   make train   train the digits CNN on two processes
#   make test    run the suite on all three frameworks, a case that they share on one
#   make test-quick   run the tests that take no ranks, or two of PyTorch
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# PyTorch's default build for Linux brings gigabytes of CUDA; name another one to have it: make test TORCH=torch
TORCH ?= torch==2.13.0
ifeq ($(shell uname -s)-$(shell uname -m),Linux-x86_64)
TENSORFLOW ?= tensorflow-cpu
else
TENSORFLOW ?= tensorflow
endif

# KerasHub, for its tests; with the rest of what it needs, tensorflow-text, another version of TensorFlow would come.
KERAS_HUB ?= keras-hub kagglehub 'kagglesdk==0.1.28' regex sentencepiece tokenizers tqdm

.PHONY: help train test test-all test-quick test-clusters test-gpu test-versions matrix coverage install check docs clean

help:  ## Say what there is to make
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 14

train: $(VENV)/trains  ## Train the digits CNN on two processes with TensorFlow
	KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/chorosrun -np 2 --no-prefix-output $(BIN)/python examples/mnist_horovod.py

# Four at a time, on two cores: tests on ranks, which compute, beside tests that start processes and mostly wait for them.
PYTEST := -m pytest -n 4 --dist loadgroup --no-loadscope-reorder

test: PART ?= --part once
test: install  ## Run the suite, each case that several frameworks share on one of them
	$(BIN)/python $(PYTEST) $(PART)

test-all: install  ## Run the whole suite, each case on all of its frameworks
	$(BIN)/python $(PYTEST) $(PART)

test-quick: install  ## Run the tests of one framework on two ranks, and those that need none
	$(BIN)/python $(PYTEST) --part quick

test-gpu:  ## Train on this machine's GPUs, with the frameworks of this Python that support them: make test-gpu BIN=/usr/bin
	$(BIN)/python -m pytest tests/gpu

test-clusters: $(VENV)/clusters  ## Run the tests that need Ray, or Spark and Java
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "(ray or spark) and not nightly" tests/ray_face tests/spark_face

test-versions: install  ## Try a wheel with each Python found, and each framework's oldest and newest release: make test-versions ONLY="3.13 jax"
	cd tests && ../$(BIN)/python -m versions.run --tensorflow $(TENSORFLOW) $(ONLY)

matrix: install  ## Compare all of the transparency matrix that docs/transparency/ lacks, and write docs/transparency.md
	cd tests && ../$(BIN)/python -m training.matrix_run

coverage: PART ?= --part quick
coverage: install  ## Run the quick part (PART=…: another), and say which lines and branches of choros it runs, ranks included
	$(BIN)/coverage erase
	$(BIN)/coverage run $(PYTEST) $(PART)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

install: $(VENV)/tests  ## Only prepare .venv with everything the tests need

check: install  ## Lint, types, import rules, sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/sizes.py

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/documents  ## Build the documentation's site in build/site; a broken link or an undocumented name is an error
	$(BIN)/mkdocs build --strict

clean:  ## Remove .venv and what tools left behind
	rm -rf $(VENV) build/site .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "choros needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

$(VENV)/trains: $(VENV)/made pyproject.toml
	@echo "Installing choros and TensorFlow into $(VENV) (about a minute) ..."
	$(BIN)/python -m pip install --quiet --editable '.[$(TENSORFLOW),examples]'
	@touch $@

$(VENV)/tests: $(VENV)/made pyproject.toml
	@echo "Installing choros, three frameworks and the test tools into $(VENV) (a few minutes) ..."
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[$(TENSORFLOW),torch,jax,dev]'
	@$(BIN)/python -m pip install --quiet --no-deps $(KERAS_HUB) || echo "Without KerasHub, whose tests are skipped."
	@touch $@ $(VENV)/trains

$(VENV)/clusters: $(VENV)/tests
	$(BIN)/python -m pip install --quiet --editable '.[ray,spark]'
	@touch $@

$(VENV)/documents: $(VENV)/made pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@
