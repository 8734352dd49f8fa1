PYTHON ?= python3
VENV ?= .venv
# Which versions the environment has: tested, newest or lowest; see scripts/setup_env.py.
SET ?=
SETUP = $(PYTHON) scripts/setup_env.py $(VENV) $(if $(SET),--set $(SET))
BIN := $(VENV)/bin
READY := $(VENV)/seqarch-ready
PARITY := $(VENV)/seqarch-parity
DOCS := $(VENV)/seqarch-docs

.PHONY: install quickstart test commands coverage slow zoo oldest_triton parity lint types docs results dist

install: $(READY)

quickstart: $(READY)
	$(BIN)/seqarch fit --config recipes/quickstart.yaml
	$(BIN)/seqarch fit --config recipes/quickstart_top1_chunk.yaml
	$(BIN)/seqarch report runs/quickstart/transformer_pp runs/quickstart/top1_chunk --out runs/quickstart/report

# Each process of pytest-xdist would compile the package and the tests anew without files of bytecode.
TEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal -q

test: $(READY) build/litdata
	$(TEST) -m "not commands and not gpu and not slow"

# What starts processes or runs whole commands. `coverage` runs these tests and those of `make test`.
commands: $(READY) build/litdata
	$(TEST) -m "commands and not gpu and not slow"

coverage: $(READY) build/litdata
	$(TEST) --cov --cov-fail-under=85

# The tests that take minutes. Nothing else depends on them: each rule has a quick test too.
slow: $(READY)
	$(TEST) -m "slow and not gpu"

zoo: $(PARITY) build/parity
	rm -rf build/zoo
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target build/zoo plugins/seqarch-zoo
	PYTHONPATH=build/zoo:build/parity $(TEST) plugins/seqarch-zoo

# The kernels in the interpreter of the oldest Triton that the extra `gpu` takes; the environment has the newest. Tests that
# do not name Triton would only run as they did.
oldest_triton: $(READY) build/oldest_triton
	PYTHONPATH=build/oldest_triton $(TEST) $$(grep -l triton tests/kernels/test_*.py)

build/oldest_triton: pyproject.toml
	rm -rf $@
	$(BIN)/python -m pip install --quiet --no-deps --target $@ triton==$$(sed -n 's/^gpu = .*triton>=\([0-9.]*\).*/\1/p' pyproject.toml)

# Reads and writes our shards in a test. It is not in the environment, since it demands a torchvision that matches torch.
build/litdata:
	$(BIN)/python -m pip install --quiet --no-deps --target $@ litdata tifffile obstore

# Published code that the zoo's tests compare with; without its dependencies, which those tests do not need.
build/parity:
	$(BIN)/python -m pip install --quiet --no-deps --target $@ xlstm scipy

parity: $(PARITY)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/plain_english.py
	! git grep -nE '^(<{7}|>{7}) '

types: $(READY)
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The CSV files and figures of docs/results from the records of runs, then the numbers and tables of all pages.
results: $(READY)
	rm -rf build/records build/medium
	$(BIN)/python benchmarks/exam_records.py unpack benchmarks/exam_x3 build/records
	$(BIN)/python benchmarks/exam_records.py merge plugins/seqarch-zoo/benchmarks/exam_small build/records
	$(BIN)/python benchmarks/budget_tables.py build/records docs/results/fourteen --reference transformer_pp --tokens 340131840 \
		--left_out 'transformer_pp-*' 'canon_*' '*_sharp' '*_at_*'
	$(BIN)/python benchmarks/exam_records.py unpack benchmarks/exam_medium build/medium
	$(BIN)/python benchmarks/budget_tables.py build/medium docs/results/medium --reference transformer_pp
	$(BIN)/python -m benchmarks.tables.sizes
	$(BIN)/python -m benchmarks.tables.choice
	$(BIN)/python -m benchmarks.tables.options
	$(BIN)/python -m benchmarks.pages

dist: $(READY)
	rm -rf dist
	$(BIN)/python -m pip install --quiet build twine
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*

$(READY): pyproject.toml constraints.txt scripts/setup_env.py
	$(SETUP)
	@touch $(READY)

$(PARITY): $(READY)
	$(SETUP) parity
	@touch $(PARITY)

$(DOCS): $(READY)
	$(SETUP) docs
	@touch $(DOCS)
