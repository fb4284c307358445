# Every target sets up what it needs in .venv: Python 3.11 or newer is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests run in two processes; `make test WORKERS=0` runs them in one.
WORKERS ?= 2
# Where the traces are: bench/README.md says where to get them.
TRACES ?= ../shared/traces

# A run of chaos: how long, with which seed, with how many clients.
SECONDS ?= 300
SEED ?= 1
CLIENTS ?= 200

.PHONY: run test test-engines test-pd chaos bench replay replay-quick check format lock clean

run: $(STAMP) ## a demo fleet behind Envoy on port 9000
	$(BIN)/inferact up --demo

test: $(STAMP) ## every test, on the real Envoy too; those of transports over both (TRANSPORT=lean: all over that one)
	$(if $(TRANSPORT),INFERACT_TRANSPORT=$(TRANSPORT)) $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup

test-engines: $(STAMP) ## two real vLLM and a llama.cpp server behind Envoy: 3 GB of downloads, under 15 minutes
	$(BIN)/python tests/engines/engines_setup.py
	INFERACT_TEST_ENGINES=1 $(BIN)/python -m pytest -q -p no:randomly tests/engines

test-pd: $(STAMP) ## two real vLLM that hand over KV by NIXL: on two cores it takes minutes
	$(BIN)/python tests/engines/engines_setup.py --pd
	INFERACT_TEST_PD=1 $(BIN)/python -m pytest -q -p no:randomly tests/engines/pair

chaos: $(STAMP) ## nodes, service and Envoy fail under load; nothing may be lost (see tests/chaos/chaos_ledger.py)
	$(BIN)/python tests/chaos/chaos_run.py --seconds $(SECONDS) --seed $(SEED) --clients $(CLIENTS)

bench: $(STAMP) ## what a decision costs, and what the queue is worth
	$(BIN)/python bench/decision.py
	$(BIN)/python -m bench.admission

replay: $(STAMP) ## every policy on public traces, over fleets of 8 and 64 nodes: under 20 minutes (see bench/README.md)
	$(BIN)/python -m bench.replay --traces $(TRACES)

replay-quick: $(STAMP) ## the same, a minute's worth of it
	$(BIN)/python -m bench.replay --traces $(TRACES) --quick

check: $(STAMP) ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP) ## put the code into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: $(STAMP) ## take newer dependencies into the lock files
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header --no-emit-index-url --generate-hashes pyproject.toml -o requirements.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header --no-emit-index-url --generate-hashes --extra dev pyproject.toml -o requirements-dev.lock

clean:
	rm -rf $(VENV) .inferact .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(STAMP): pyproject.toml requirements-dev.lock
	$(PYTHON) -c 'import sys; sys.exit("Inferact needs Python 3.11 or newer; run: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@
