# `make demo` and `make test` set everything up from a fresh clone and then do their job.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Installed again only when what it is made from changes.
STAMP := $(VENV)/.installed
NATIVE := CMakeLists.txt setup.py $(wildcard marlhf_kernels/cpu/*.cpp) $(wildcard marlhf_kernels/cpu/*.h)
# Two processes with one thread each are faster here than one with two, and nothing spins on a busy core.
RUN := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile
# The kernels' tests run on each backend that a CPU has.
PYTEST := $(RUN) --backend reference --backend cpu
# Triton's kernels on CPU tensors; apart, for a kernel is decorated for the interpreter or for a GPU.
INTERPRET := TRITON_INTERPRET=1 $(RUN) --backend gpu
# Of each kind of kernel the tests that find most; `make test-all` runs those of every op.
INTERPRETED := $(addprefix tests/kernels/test_,gpu_launches.py token_logprobs.py whiten.py)
INTERPRETED_ALL := $(INTERPRETED) $(addprefix tests/kernels/test_,gpu_walks.py advantages.py macro.py policy_loss.py \
	value_loss.py segmentation.py golden.py token_ppo.py)

.PHONY: setup demo test test-all test-long bench bench-quick lint clean

setup: $(STAMP)

# torch is named first: whatever needs it then finds the pinned build instead of choosing one.
$(STAMP): constraints.txt pyproject.toml $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,gpu,dev]'
	touch $@

demo: setup
	$(BIN)/marlhf demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(PYTEST) -m 'not slow and not long'
	$(INTERPRET) $(INTERPRETED) -m 'not slow and not long'

# What `make test` leaves out.
test-all: setup
	$(PYTEST) -m 'slow and not long'
	$(INTERPRET) $(INTERPRETED_ALL) -m 'not slow and not long'

test-long: setup
	$(RUN) -m long

# CSV, table and picture go to benchmarks/results/; benchmarks/README.md says how to read them.
bench-quick: setup
	$(BIN)/python -m benchmarks --sizes quick

bench: setup
	$(BIN)/python -m benchmarks --sizes full

clean:
	rm -rf build dist *.egg-info $(STAMP)
