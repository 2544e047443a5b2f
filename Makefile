# Two commands for a newcomer: `make demo` and `make test`. Each sets up what it needs.
PYTHON ?= python3
BIN := .venv/bin
# The demo's and tests' matrices are tiny: a second thread costs more in waiting than it computes.
export OMP_NUM_THREADS ?= 1

.PHONY: demo wheel matrix unchanged faults mutate test setup lint unit clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup:  ## make .venv with pinned packages and both upstreams patched
	@PYTHON=$(PYTHON) scripts/setup.sh

demo: setup  ## the main job on the real upstreams; writes out/demo/report.json and a picture
	$(BIN)/python -m examples.demo --out out/demo

wheel: setup  ## build and check the distributions, install the wheel elsewhere and run the demo's job
	@PYTHON=$(PYTHON) scripts/check_wheel.sh

matrix: setup  ## the demo on every pair of upstream releases with patches; writes out/matrix/matrix.json
	$(BIN)/python -m examples.matrix

unchanged: setup  ## compare the released and the patched upstreams with everything of ours off
	$(BIN)/python -m scripts.unchanged --json out/unchanged.json

faults: setup  ## the bridge's fault table, every fault 100 times (half an hour); writes out/faults.json
	$(BIN)/python -m tests.faults.table --json out/faults.json

mutate: setup  ## mutations of the arithmetic, layout and joining, and whether tests notice; writes out/mutation.json
	$(BIN)/python -m pip install -q --no-deps -r requirements/mutation.txt
	nice -n 15 $(BIN)/python -m tests.mutation.run --json out/mutation.json

# Two at a time, file by file: a file's tests share servers, and those with servers come first.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: lint  ## lint, types and every test that runs without a GPU
	$(PYTEST)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m scripts.house

unit: setup  ## the tests that start no server and no training job (about two minutes)
	$(PYTEST) -m "not server"

clean:  ## remove .venv and everything the demo and the matrix wrote
	rm -rf .venv out
