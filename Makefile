# ARGS goes to the tool: make test ARGS="-k merge -x"
# PYTHON names the interpreter that .venv is made from: make test PYTHON=python3.12
ARGS   ?=
PYTHON ?=
# three processes of pytest, since on two cores one of them often waits, for ranks or a browser; the tests of a file stay
# in one process, and share ranks, a browser and results
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder

VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
SMALL := $(VENV)/.bench

.DEFAULT_GOAL := bench
.PHONY: bench train test test-all test-gpu gpu-wheels test-integrations lint format docs docs-serve clean help

bench: $(SMALL) ## check about ten implementations, time those that are right, report in report/ (the default)
	$(PY) -m dilated_attention bench $(ARGS)

# on two ranks, one thread each; `rm -r report/train` to start anew
train: $(SMALL) ## train a small language model on far context, report in report/train (two minutes on two cores)
	$(PY) examples/stories.py report/stories
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node 2 examples/train_lm.py report/stories \
		--out report/train --dim 64 --pattern "Window(1)" "Dense(heads=[0, 1]), Window(31, heads=[2, 3])" --tokens 2048 \
		--rows 2 --steps 600 --short 250 --lr 3e-3 --ask ABCDEFGHIJKLMNOPQRSTUVWXYZ --evaluate 128 512 2048 --sample 400 --plot \
		$(ARGS) || { echo "if report/train is from another training: delete it, or make train ARGS='--out report/again'"; exit 1; }

# tensors of tests are small: threads would only wait for one another
test test-all: export OMP_NUM_THREADS = 1
test test-all: export OPENBLAS_NUM_THREADS = 1
# hundreds of processes import the package: Python compiles it once, even where its environment says otherwise
test test-all: export PYTHONDONTWRITEBYTECODE =

test: $(STAMP) ## run the tests, less the slow ones
	$(PY) -m pytest $(WORKERS) -m "not slow" $(ARGS)

test-all: $(STAMP) ## run all tests
	$(PY) -m pytest $(WORKERS) $(ARGS)

test-gpu: $(STAMP) ## run the tests that need a GPU, many processes at once
	$(PY) tests/run_gpu.py $(ARGS)

# for a machine with a GPU and no network, of x86-64 and Python 3.12; numpy is there, as torch is
gpu-wheels: $(STAMP) ## download transformers into build/wheels, for tests/run_gpu.py --wheels build/wheels
	rm -rf build/wheels
	$(PY) -m pip download -qq --disable-pip-version-check -c constraints.txt --only-binary :all: --dest build/wheels \
		--python-version 312 $(foreach x,2014 _2_17 _2_28,--platform manylinux$(x)_x86_64) transformers
	rm -f build/wheels/numpy-*

# torchtitan, and what it needs to be imported, beside .venv and not in it
OTHERS := $(CURDIR)/build/others
test-integrations: $(STAMP) ## install torchtitan into build/, and run what needs it
	$(PY) -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target $(OTHERS) \
		torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.16 docstring_parser==0.18.0
	PYTHONPATH=$(OTHERS) OMP_NUM_THREADS=1 $(PY) -m pytest tests/integrations/torchtitan_cases.py $(ARGS)

lint: $(STAMP) ## check style, format and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP) ## format the code and apply safe fixes
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(STAMP) ## build the documentation into build/site
	$(PY) -m zensical build --strict

docs-serve: $(STAMP) ## serve it on localhost:8000, built anew at every change
	$(PY) -m zensical serve

clean: ## remove reports, builds and caches (.venv stays: it is slow to make)
	rm -rf report build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache
	find src tests \( -name __pycache__ -o -name '*.egg-info' \) -type d -prune -exec rm -rf {} +

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# A stamp is written last: without one .venv is half-made and starts over, with an old one it is updated in place.
# The candidates are run, not just looked up: a version manager's shim can exist without its interpreter.
# -qq keeps errors. The constraints matter: they are what keeps torch at a known build.
INSTALL := $(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt -e

$(SMALL): pyproject.toml constraints.txt
	@if [ ! -e $@ ]; then \
		for py in $(or $(PYTHON),python3 python3.11 python3.12 python3.13); do \
			"$$py" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
			py=; \
		done; \
		[ -n "$$py" ] || { echo "error: no Python >= 3.11 with venv found; name one: make PYTHON=..." >&2; exit 1; }; \
		echo "setting up $(VENV) with $$py (half a minute, plus the download of torch) ..."; \
		"$$py" -m venv --clear $(VENV); \
	else \
		echo "updating $(VENV) ..."; \
	fi
	@$(INSTALL) ".[bench]"
	@touch $@

$(STAMP): $(SMALL)
	@echo "adding what tests, docs and checks of style need (about a minute) ..."
	@$(INSTALL) ".[dev]"
	@touch $@
