# Chairlift. `make help` lists what there is; every target sets up what it needs.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.synced
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGES ?= chairlift-operator chairlift-gateway chairlift-engine-simulator chairlift-engine
REGISTRY ?= registry.example/chairlift
BASE_IMAGE ?= docker.io/library/python:3.12-slim
HELM := $(or $(shell command -v helm),$(wildcard $(or $(ONE_NODE_HOME),$(HOME)/.cache/one-node)/bin/helm))
export PYTHONUNBUFFERED := 1

help: ## this list
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## the environment in .venv, from hash-pinned requirements (about 5 GB, 1-3 minutes)

# uv keeps one cache for all clones, so torch is downloaded once; pip would fetch it each time.
$(STAMP): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "chairlift needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	@test -x $(VENV)/bin/uv || { echo "making $(VENV) ..."; $(PYTHON) -m venv $(VENV) && $(VENV)/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/uv.txt; }
	@echo "installing the pinned packages ..."
	@$(VENV)/bin/uv pip sync -q --python $(PY) --require-hashes requirements/dev.txt requirements/uv.txt
	@$(VENV)/bin/uv pip install -q --python $(PY) --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP) ## a lunch rush with a real model on this machine: static, fixed and tuned, with a report (8 minutes)
	@$(PY) -m chairlift_bench.rush

bench-demo: $(STAMP) ## the demo in three alternating rounds, medians and spread (25 minutes)
	@$(PY) -m chairlift_bench.bench_demo

bench-tuning: $(STAMP) ## a rush with a real model, tuned, against the best of a grid of fixed settings (35 minutes)
	@$(PY) -m chairlift_bench.bench_tuning

bench-noisy: $(STAMP) ## a chat beside another tenant's 30 requests, and beside 30 tenants, on the real engine (12 minutes)
	@$(PY) -m chairlift_bench.bench_noisy

bench-simulator: $(STAMP) ## how fast simulated time passes: an hour of the Azure trace
	@$(PY) -m chairlift_bench.bench_simulator

bench-fairness: $(STAMP) ## what one tenant's flood does to another's chat, and shares by weight (simulated)
	@$(PY) -m chairlift_bench.bench_fairness

bench-longprompt: $(STAMP) ## what a 6,000-token prompt does to 100 short ones behind it (simulated)
	@$(PY) -m chairlift_bench.bench_longprompt

bench-quota: $(STAMP) ## tenants' quotas on a real Redis: what they cost, and whether they stay true (ARGS=--requests=N)
	@$(PY) -m chairlift_bench.bench_quota $(ARGS)

bench-gateway: $(STAMP) ## what the gateway adds to the first token and costs for each chunk, beside nginx (root installs Debian's Redis and nginx; 5 minutes)
	@tests/gateway/quota/install
	@bench/install-nginx
	@$(PY) -m chairlift_bench.bench_gateway $(ARGS)

bench-routing: $(STAMP) ## routing by predicted wait and prefix against random and least-connections (simulated; 10 to 20 minutes; ARGS=--minutes=3)
	@$(PY) -m chairlift_bench.bench_routing $(ARGS)

bench-tenants: $(STAMP) ## 10,000 tenants on a real Redis: memory for each, what they cost at rest, how long a change takes (7 minutes; ARGS=--tenants=N)
	@tests/gateway/quota/install
	@$(PY) -m chairlift_bench.bench_tenants $(ARGS)

bench-scheduler: $(STAMP) ## what scheduling costs at 1,024 running requests (10 s)
	@$(PY) -m chairlift_bench.bench_scheduler

bench-operator: $(STAMP) ## what 1,000 pools cost the operator, on a real kube-apiserver (root; 10 to 20 minutes)
	@e2e/cluster/with-cluster control-plane env PYTHONPATH=e2e $(PY) -m chairlift_bench.bench_operator

evaluate-quick: $(STAMP) ## the control law against baselines, a first look (5 minutes)
	@$(PY) -m chairlift_bench.evaluate quick

evaluate: $(STAMP) ## the control law against every baseline in virtual time, three seeds, with a report (an hour)
	@$(PY) -m chairlift_bench.evaluate usual --report-to docs

evaluate-full: $(STAMP) ## every scenario, five seeds and the whole grid (many hours)
	@$(PY) -m chairlift_bench.evaluate full --report-to docs

fuzz: $(STAMP) ## a million random scheduler steps, watched: blocks, fairness, nobody starves
	@$(PY) -m chairlift_bench.fuzz

test: $(STAMP) model ## all tests
	$(PY) -m pytest -q

model: $(STAMP) ## the real model (SmolLM2-135M-Instruct, 93 MB download) in the user's cache
	@$(VENV)/bin/chairlift model get smollm2-135m

crds: $(STAMP) ## crds/ from the operator's spec, and the chart's copy of them
	$(PY) -m chairlift_operator.crd crds
	cp crds/*.yaml helm/chairlift/files/crds/

lint: $(STAMP) ## ruff, mypy --strict, import contracts, helm lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo 2>/dev/null || $(VENV)/bin/lint-imports
	@if [ -n "$(HELM)" ]; then $(HELM) lint --strict --quiet helm/chairlift; \
	else echo "no helm: the chart was not linted; make helm builds it"; fi

helm: ## helm, built once from source (needs Go); lint and tests of the chart use it
	@e2e/cluster/one-node helm

test-cluster: $(STAMP) ## tests on a real kube-apiserver, and of the chart (root; builds Kubernetes once, 8 minutes)
	e2e/cluster/with-cluster control-plane env CHAIRLIFT_NEEDS_HELM=1 $(PY) -m pytest -q -m "" $(or $(ARGS),tests/chart tests/cluster)

test-prometheus: $(STAMP) ## what is asked of Prometheus, against a real one (root installs Debian's where there is none)
	tests/prometheus/install
	CHAIRLIFT_NEEDS_PROMETHEUS=1 $(PY) -m pytest -q $(or $(ARGS),tests/prometheus)

test-redis: $(STAMP) ## tenants' quotas, against a real Redis (root installs Debian's where there is none)
	tests/gateway/quota/install
	CHAIRLIFT_NEEDS_REDIS=1 $(PY) -m pytest -q $(or $(ARGS),tests/gateway/quota)

e2e: $(STAMP) model ## end to end on a real one-node Kubernetes: chart, pods, traffic (root; see e2e/README.md)
	e2e/cluster/with-cluster up e2e/run $(ARGS)

images: ## container images by docker or buildah (REGISTRY=, BASE_IMAGE=, IMAGES=)
	@build="docker build"; docker info >/dev/null 2>&1 || build="buildah build"; \
	for image in $(IMAGES); do echo "$$build $$image"; \
	  $$build -q -f images/Dockerfile --target $$image --build-arg BASE_IMAGE=$(BASE_IMAGE) \
	    -t $(REGISTRY)/$$image:$(VERSION) . || exit; done

lock: ## rewrite requirements/*.txt from pyproject.toml
	@for extra in engine simulator gateway operator dev; do \
	  $(VENV)/bin/uv pip compile -q pyproject.toml --extra $$extra --universal --python-version 3.11 \
	    --generate-hashes --no-emit-index-url --custom-compile-command "make lock" -o requirements/$$extra.txt; done
	@echo "uv==0.13.9" | $(VENV)/bin/uv pip compile -q - --generate-hashes --no-emit-index-url \
	  --custom-compile-command "make lock" -o requirements/uv.txt

clean: ## remove the environment and caches of this clone
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.PHONY: help setup demo bench-demo bench-tuning bench-noisy bench-operator bench-gateway bench-quota bench-routing bench-scheduler bench-simulator bench-tenants \
	bench-fairness bench-longprompt \
	evaluate-quick evaluate evaluate-full fuzz test model \
	crds lint helm test-cluster test-prometheus test-redis e2e images lock clean
