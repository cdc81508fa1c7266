# make demo: set everything up and run the main job.
# make test: set everything up and pass the tests.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV_PIP := $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt

# uv does not read pip's settings; pass on where wheels may lie.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export UV_NO_PROGRESS ?= 1

# Tests start hundreds of processes, each of which would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

# Tests side by side, neighbours in a file together as far as that keeps all busy; one more
# than there are processors, as some wait for clusters, kills and clocks.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, 1 + (os.cpu_count() or 1)))')
# Processes side by side wait for each other where each multiplies with all processors.
PYTEST := OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

.PHONY: demo notebooks docs test test-all hosted test-hosted test-hosted-sglang test-routers fuzz fuzz-inputs mutants ways scale faults sbom check bench format clean help

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(VENV)/.installed
	$(BIN)/kvsim run examples/demo.yaml --out results/demo --overwrite
	@echo "Look at results/demo/figures: kv_cache_usage.png first, preemptions.png next."
	@echo "To type kvsim as the README does: source $(VENV)/bin/activate"

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow"

# make test-all: what is too heavy for every day, too; the real transformers beside ours; reports
# in a browser, where chromium and chromedriver are installed.
test-all: $(VENV)/.installed-reference $(VENV)/.installed-notebooks $(VENV)/.installed-docs
	$(PYTEST)

# make test-routers: routers beside the real ones; skipped with a reason where a package is missing.
test-routers: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -rs tests/routers

# make test-hosted VLLM="0.11.2 0.33.0": our v1 beside the real ones, each in an environment of its own.
VLLM ?= 0.11.2 0.33.0
test-hosted: $(VLLM:%=test-hosted-%)

# make hosted VLLM=0.33.0, or SGLANG=0.5.9: only the environment, for kvsim conform;
# docs/hosting.md explains.
hosted: $(if $(SGLANG),$(SGLANG:%=.venv-hosted-sglang-%/.installed),$(VLLM:%=.venv-hosted-%/.installed))

# make test-hosted-sglang SGLANG=0.5.9: our sglang beside the real one.
test-hosted-sglang: .venv-hosted-sglang-$(or $(SGLANG),0.5.9)/.installed
	$(<D)/bin/python -m pytest -q tests/hosted/test_sglang.py

test-hosted-%: .venv-hosted-%/.installed
	.venv-hosted-$*/bin/python -m pytest -q tests/hosted

# make notebooks: run all notebooks and store what they show.
notebooks: $(VENV)/.installed-notebooks
	$(BIN)/python -m notebooks.build

# make docs: docs/, the packages' pages and the notebooks as a site with search, in build/site.
docs: $(VENV)/.installed-docs
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs -d build/doctrees . build/site
	@echo "Open build/site/index.html."

# make fuzz N=2000: random configurations, both paths; WITH=--groups: of several groups; WITH=--tiers: with a CPU tier;
# WITH=--plain: nothing cached, so that blocks are counted; WITH=--fleets: several engines; WITH=--pairs: prefill and
# decode apart; WITH=--prefixes: prompts that begin alike, which steps read once; WITH=--of-one (or "--tiers --of-one"): the
# engine beside a fleet that it is alone in.
N ?= 1000
FROM ?= 0
fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m tests.identity.fuzz $(N) --from $(FROM) $(WITH)

# make fuzz-inputs INPUTS=20000: malformed files through every command; SEED=7 draws others.
INPUTS ?= 2000
SEED ?= 0
fuzz-inputs: $(VENV)/.installed-dev
	$(BIN)/python -m tests.doors $(INPUTS) --seed $(SEED)

# make mutants MUTANTS=400: faults in the core, and whether the tests that cover it notice;
# WITH=--again runs survivors again.
MUTANTS ?= 400
mutants: $(VENV)/.installed-dev
	$(BIN)/python -m tests.mutants $(MUTANTS) $(WITH)

# make ways WITH=--short PYTHONS="DIR/bin/python3.12 DIR/bin/python3.13": the same bytes of the examples on other
# Pythons that have kvsim, and under other hash seeds, locales, time zones and numbers of processes.
ways: $(VENV)/.installed-dev
	$(BIN)/python -m tests.identity.ways $(WITH) $(PYTHONS:%=--python %)

# make scale: ten million requests, a million sessions, five million blocks, a sweep of 5,000 runs and a
# report of a hundred million steps, each in bounded memory; SCALE=0.1 for a tenth of it.
SCALE ?= 1
scale: $(VENV)/.installed-dev
	KVSIM_SCALE=$(SCALE) $(BIN)/python -m pytest -q -s tests/scale

# make faults STOPS=20: commands stopped by signals at random moments, so many of each.
STOPS ?= 20
faults: $(VENV)/.installed-dev
	KVSIM_STOPS=$(STOPS) $(BIN)/python -m pytest -q tests/faults

# make sbom: what an installed kvsim is made of, as CycloneDX, in build/sbom.cdx.json; each package
# has the hash of constraints.txt, or is not installed.
sbom: $(VENV)/.installed
	@mkdir -p build
	$(BIN)/uv pip compile --quiet --constraint constraints.txt --generate-hashes --no-header \
	  --no-annotate --extra traces pyproject.toml --output-file build/requirements.txt
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python build/product
	$(BIN)/uv pip install --quiet --python build/product/bin/python --require-hashes --requirements build/requirements.txt
	$(BIN)/uv pip install --quiet --python build/product/bin/python --no-deps .
	$(BIN)/uv tool run --quiet --from cyclonedx-bom==7.5.0 cyclonedx-py environment --pyproject pyproject.toml \
	  --output-reproducible --output-file build/sbom.cdx.json build/product
	@echo "Look at build/sbom.cdx.json; docs/security.md lists the licences."

# make check: format, lint, types, layers.
check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# make bench: how fast it is on this machine, in processor time; tests/bench/README.md explains.
bench: $(VENV)/.installed-dev
	@mkdir -p results
	$(BIN)/python -m pytest -q -s tests/bench --benchmark-only --benchmark-timer=time.process_time \
	  --benchmark-disable-gc --benchmark-columns=min,median,max,rounds --benchmark-json=results/bench.json --timeout=0
	$(BIN)/python -m tests.bench.tables results/bench.json

# make format: let ruff mend what it can.
format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix --unsafe-fixes --quiet .
	$(BIN)/ruff format --quiet .

clean:
	rm -rf $(VENV) .venv-hosted-* build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache results

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "kvsim needs Python 3.11 or newer; try make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(VENV)/.installed: $(BIN)/uv pyproject.toml constraints.txt
	$(UV_PIP) --editable ".[traces]"
	@touch $@

# Compiled once here; otherwise each worker would do so, all at the same time.
COMPILED := import hypothesis.stateful, matplotlib.pyplot, pandas, plotly.graph_objects, \
  pyarrow.parquet, pydantic, scipy.stats, simpy, sklearn.ensemble, starlette.applications, torch

# The kernels are tested on the CPU: torch's CPU build, from the wheels at hand or its index.
$(VENV)/.installed-dev: $(VENV)/.installed
	$(UV_PIP) --editable ".[traces]" --group test --group sweeps --group quality
	$(UV_PIP) $(if $(UV_FIND_LINKS),,--torch-backend cpu) --group kernels
	@$(BIN)/python -c '$(COMPILED)'
	@touch $@

$(VENV)/.installed-reference: $(VENV)/.installed-dev
	$(UV_PIP) --group reference --group browser
	@touch $@

$(VENV)/.installed-notebooks: $(VENV)/.installed-dev
	$(UV_PIP) --group notebooks
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-dev
	$(UV_PIP) --group docs
	@touch $@

# An engine's wheel without what it depends on, what its scheduler imports, and CPU torch.
define HOSTED
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(@D)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python --no-deps $(1)==$*
	$(BIN)/python tests/hosted/requirements.py $(@D)/lib/python*/site-packages > $(@D)/requirements.txt
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python $(if $(UV_FIND_LINKS),,--torch-backend cpu) \
	  --requirements $(@D)/requirements.txt --editable . --group test
	@touch $@
endef

.venv-hosted-sglang-%/.installed: $(VENV)/.installed tests/hosted/requirements.py
	$(call HOSTED,sglang)

.venv-hosted-%/.installed: $(VENV)/.installed tests/hosted/requirements.py
	$(call HOSTED,vllm)

.PRECIOUS: .venv-hosted-%/.installed .venv-hosted-sglang-%/.installed
