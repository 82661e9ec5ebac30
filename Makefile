# Two commands matter: `make demo` and `make test`. Both set everything up by themselves, once.
PYTHON ?= python3
STEPS ?= 100000
SECONDS ?= 60
BENCHMARKS ?= multi_turn copy_rate restart ranks

PY := .venv/bin/python
INSTALLED := .venv/.stamp-installed
MODEL := .venv/.stamp-model

.DELETE_ON_ERROR:
.PHONY: help setup demo test pytest sim mutants soak lint fuzz bench bench-peers clean FORCE

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile

setup: $(MODEL) ## .venv with the project, the tools and the model; a no-op when nothing changed

demo: setup ## a real model chats with and without the service (3 to 4 minutes)
	$(PY) -m benchmarks.demo

test: setup ## every check: lint, types, tests, the first two beside the last
	@$(MAKE) --no-print-directory -j2 lint pytest

pytest: $(INSTALLED)
	$(PY) -m pytest

sim: $(INSTALLED) ## the node in simulation, all faults from one seed: STEPS=1000000, SEED=1 (one world: WORLD=1)
	$(PY) -m tests.sim.report --steps $(STEPS) $(if $(SEED),--seed $(SEED)) $(if $(WORLD),--world $(WORLD))

mutants: $(INSTALLED) ## each guard switched off in turn, until the simulation sees it
	$(PY) -m tests.sim.mutants

lint: $(INSTALLED) ## ruff and mypy --strict
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

fuzz: $(INSTALLED) ## the wire by coverage, SECONDS=60 a target, and property tests, fresh examples; fails too if one had no wheel
	@$(PY) -m tests.fuzz_wire --seconds $(SECONDS); found=$$?; \
	$(PY) -m pytest -m hypothesis --hypothesis-profile=fresh --timeout=1800 && exit $$found

bench: setup ## the benchmarks, one JSON line each; stops at the first that misses a bar (BENCHMARKS="a b" chooses)
	@for name in $(BENCHMARKS); do echo "benchmarks.$$name"; $(PY) -m benchmarks.$$name --json || exit 1; done

soak: $(INSTALLED) ## 300 kills of a real daemon and its clients, one JSON line (6 to 10 minutes); SOAK="--seed 2" chooses
	$(PY) -m benchmarks.soak --kills 300 --json $(SOAK)

bench-peers: $(INSTALLED) ## ours against its rivals, set up once in .venv-peers (2 GB); PEERS="--systems ours,files" chooses
	$(PY) -m benchmarks.peers --set-up --json $(PEERS)

clean: ## remove caches and build outputs; .venv stays (to start over: rm -rf .venv)
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

# A checkout that was moved needs its editable install again, whatever the dates of its files.
ifneq ($(shell cat $(INSTALLED) 2>/dev/null),$(CURDIR))
$(INSTALLED): FORCE
endif
$(INSTALLED): pyproject.toml .ci/setup
	@PYTHON='$(PYTHON)' .ci/setup

$(MODEL): $(INSTALLED) benchmarks/models.py
	$(PY) -m benchmarks.models
	@touch $@
