# make demo · make test · make bench · make lint        (each does its own set-up in .venv)
#
#   BASE_PYTHON=python3.12   the interpreter .venv is made from (3.10 to 3.13)
#   PYTHON=/path/to/python   use this interpreter as it is and install nothing
#   TORCH_INDEX=URL          where pip finds torch's CPU build, if its configured index has none
#   ARGS="…"                 passed on: make demo ARGS="--steps 50", make test ARGS="-k convert"

BASE_PYTHON ?= python3
PYTHON ?=
TORCH_INDEX ?=
TORCH_CPU := 2.13.0
ARGS ?=
VENV := .venv

ifeq ($(strip $(PYTHON)),)
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
else
PY := $(PYTHON)
READY := native-in-place
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

NATIVE := CMakeLists.txt $(wildcard src/*/native/* src/*/*/native/*)

.PHONY: demo test bench lint figures clean native-in-place

demo: $(READY)
	$(PY) -m hfai demo $(ARGS)

# Passive: torch's threads must not spin on the cores that other tests are waiting for.
test: $(READY)
	OMP_WAIT_POLICY=passive $(PY) -m pytest -n $$($(PY) -c "import os; print(min(16, len(os.sched_getaffinity(0))))") --dist loadgroup $(ARGS)

bench: $(READY)
	$(PY) benchmarks/ops.py --op layer_norm $(ARGS)

# The README's and docs' tables and plots, drawn from benchmarks/results.
figures: $(READY)
	$(PY) benchmarks/figures.py $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

$(VENV)/.ready: pyproject.toml $(NATIVE)
	@$(BASE_PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 13) else \
	  "hfai needs Python 3.10 to 3.13; $(BASE_PYTHON) is %d.%d. Name another: make BASE_PYTHON=python3.12" % v)'
	test -x $(VENV)/bin/python || $(BASE_PYTHON) -m venv $(VENV)
	@sh .ci/install $(VENV)/bin/python $(TORCH_CPU) "$(TORCH_INDEX)"
	touch $@

# With PYTHON=…: only the native parts, compiled where that interpreter has what it takes.
native-in-place:
	@sh .ci/native-in-place $(PY)

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache src/hfai/kernels/_launch*.so src/ffrecord/_native*.so \
	  src/hfreduce/_engine*.so src/hfai/client/_worker_signals*.so src/hfai/checkpoint/_transfer*.so
