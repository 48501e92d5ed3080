# Everyday commands; `make help` lists them. Needs Python 3.11 - 3.13, make and git; everything else goes into .venv.
#
#   make run ARGS="--limit 4 --stream"      arguments for the command
#   make demo ARGS="Qwen/Qwen3-0.6B"
#   make test T=tests/tools/test_cli.py     some tests only
#   make venv PIP_ARGS="--index-url ..."    arguments for every pip install (a CPU-only torch, a mirror)
#   make test PYTHON=python3.12             another interpreter for a new .venv

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# An installed python3.11 that starts (a version manager's shim may exist and not work), else python3.
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV ?= .venv
VENV_OLD ?= .venv-5.17
TRITONS ?= 3.6.0 3.8.0 3.9.0
TORCH ?= 2.14.1
ARGS ?=
PIP_ARGS ?=
PYTEST_ARGS ?=
T ?= tests

# Of each test only every fourth case, others with each commit; all of them in .ci/run, and where T names some tests.
EVERY ?= 4
# What the oldest supported transformers is tested with: everything except what drives the package from outside
# (a subprocess per example or command) and what knows no transformers, which the newest one already tests.
NOT_CORE := $(wildcard tests/core/test_*.py tests/kernels/test_*.py tests/memory/test_*.py tests/demo/test_*.py) \
    $(addprefix tests/tools/test_,cli.py examples.py benchmarks.py gpu_runs.py soak.py fuzz.py paper.py report.py tiny_lm.py docs.py release.py) \
    $(addprefix tests/server/test_,every_field.py unwelcome.py hard_use.py requests.py formats.py) \
    tests/attention/test_metadata.py tests/attention/test_decode_work.py tests/attention/test_lazy.py \
    tests/parallel/test_ranks.py

PY := $(VENV)/bin/python
PIP_INSTALL = -m pip install $(if $(CI),--quiet) --disable-pip-version-check $(PIP_ARGS)
QUICK := not slow and not gpu and not browser and not ci
SOURCES := hf_paged tests examples $(wildcard docs/*.py) readme_hook.py $(wildcard benchmarks demo)
RESULTS ?= benchmarks/results

# Nothing here may reach for a model hub behind our back; `make run` may (ARGS="--model Qwen/Qwen3-0.6B").
OFFLINE := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# The tests' models are tiny: a second thread only waits for the first, and for minutes where the cores are shared.
TEST_ENV := $(OFFLINE) OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}

# ------------------------------------------------------------------------------------------------------ environments
# One stamp per set of extras: nothing is installed again until pyproject.toml or the constraints change.

CHECK_PYTHON := import sys; v = sys.version_info[:2]; \
    sys.exit(0 if (3, 11) <= v < (3, 14) else f"hf_paged needs Python 3.11 to 3.13, this is {v[0]}.{v[1]}: add PYTHON=python3.11")

$(VENV)/bin/python $(VENV_OLD)/bin/python:
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	$(PYTHON) -m venv $(@:/bin/python=)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing hf_paged into $(VENV) (once)"
	$(PY) $(PIP_INSTALL) -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing hf_paged with its tests and tools into $(VENV) (once)"
	$(PY) $(PIP_INSTALL) -c constraints.txt -e '.[test,dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PY) $(PIP_INSTALL) -c constraints.txt -e '.[bench]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PY) $(PIP_INSTALL) -c constraints.txt -e '.[demo]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(VENV)/.installed-dev
	$(PY) $(PIP_INSTALL) -c constraints.txt -e '.[docs]'
	@touch $@

$(VENV_OLD)/.installed-test: pyproject.toml constraints-5.17.txt | $(VENV_OLD)/bin/python
	@echo "installing hf_paged with its tests and transformers 5.17 into $(VENV_OLD) (once)"
	$(VENV_OLD)/bin/python $(PIP_INSTALL) -c constraints-5.17.txt -e '.[test]'
	@touch $@

# Not an environment but one package, another release of Triton, to lie on the path before the environment's own.
.venv-triton-%/.installed: | $(VENV)/.installed-dev
	$(PY) $(PIP_INSTALL) --target $(@D) triton==$*
	@touch $@

.venv-torch-%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	grep -v '^torch==\|^triton==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python $(PIP_INSTALL) -c $(@D)/constraints.txt torch==$* -e '.[test]'
	@touch $@

# ---------------------------------------------------------------------------------------------------------- commands

.PHONY: run
run: $(VENV)/.installed ## generate with and without hf_paged, compare: make run ARGS="--limit 4"
	@$(PY) -m hf_paged run $(ARGS)

.PHONY: demo
demo: $(VENV)/.installed-demo ## watch the paged cache work, in a browser: make demo ARGS="MODEL"
	@$(PY) -m demo $(ARGS)

.PHONY: serve
serve: $(VENV)/.installed-dev ## OpenAI's HTTP interface: make serve ARGS="NAME_OR_PATH --port 8000"
	@$(PY) -m hf_paged serve $(ARGS)

.PHONY: venv
venv: $(VENV)/.installed-dev ## make .venv with everything that the tests and tools need

.PHONY: test
test: $(VENV)/.installed-dev ## the CPU tests: one case of four, and what .ci/run alone runs left out (CI=1: all of it)
	$(TEST_ENV) $(PY) -m pytest $(if $(CI)$(filter-out tests,$(T)),,--every $(EVERY) -m "$(QUICK)") $(PYTEST_ARGS) $(T)

.PHONY: test-slow
test-slow: $(VENV)/.installed-dev ## the CPU tests marked slow
	$(TEST_ENV) $(PY) -m pytest -m "slow and not gpu and not browser" $(PYTEST_ARGS) $(T)

# A process that pretends to have a GPU does so for good: these tests run apart from the others.
.PHONY: test-pretend
test-pretend: $(VENV)/.installed-dev ## the CUDA path on a device that is pretended
	$(TEST_ENV) $(PY) -m pytest $(PYTEST_ARGS) $(if $(filter-out tests,$(T)),$(T),tests/pretend)

# All architectures in all modes take three quarters of an hour on two cores: what has passed with the same code is not
# run again.
PRETEND_RECORD = .pretend/$(shell cat $(shell find hf_paged tests/pretend tests/pretend_cuda tests/helpers -name '*.py' -o -name '*.cpp' | sort) \
    | sha256sum | cut -c1-16).jsonl
.PHONY: pretend
pretend: $(VENV)/.installed-dev ## the same for all architectures in all modes, 45 minutes on two cores; goes on where it was
	@mkdir -p .pretend
	PYTHONPATH=tests $(TEST_ENV) $(PY) -m pytest -m "" -p gpu_plugin --record $(PRETEND_RECORD) --run-id $$$$ -n $$(nproc) \
	    $(PYTEST_ARGS) $(if $(filter-out tests,$(T)),$(T),tests/pretend) || [ $$$$? = 5 ] # nothing was left to run

BROWSER_TESTS := $(shell grep -l mark.browser tests/*/test_*.py)

.PHONY: test-browser
test-browser: $(VENV)/.installed-dev ## the demo in a real browser, which has to be installed
	$(TEST_ENV) $(PY) -m pytest -m browser $(PYTEST_ARGS) $(if $(filter-out tests,$(T)),$(T),$(BROWSER_TESTS))

# Needs Node and Firefox (Debian's npm and firefox-esr). What npm brings lies beside the environments, not in the tree.
FIREFOX ?= $(shell command -v firefox-esr || command -v firefox)
PUPPETEER := .venv-puppeteer
.PHONY: test-firefox
test-firefox: $(VENV)/.installed-dev ## the demo in Firefox: a smoke test by hand, which needs npm and firefox-esr
	@[ -n "$(FIREFOX)" ] || { echo "there is no Firefox here: install the package firefox-esr"; exit 1; }
	@[ -d $(PUPPETEER) ] || npm install --silent --no-audit --no-fund --prefix $(PUPPETEER) puppeteer-core@24.43.1
	@$(TEST_ENV) $(PY) -m demo --port 7899 --speed 60 --no-welcome & demo=$$!; trap "kill $$demo" EXIT; \
	    until $(PY) -c 'import socket; socket.create_connection(("127.0.0.1", 7899))' 2>/dev/null; do \
	        kill -0 $$demo && sleep 0.5; done; \
	    node tests/demo/firefox_smoke.mjs http://127.0.0.1:7899 $(abspath $(PUPPETEER)) $(FIREFOX)

# The kernels in C with gcc's sanitizers in them: an access out of bounds, or what C does not define, ends the run with a
# report. Tests of the compiler itself, and of the last bit of what it makes, are about another build.
SANITIZED_TESTS := tests/kernels/test_hostile_shapes.py tests/kernels/test_kernels_cpu.py \
    tests/model/test_fused_layers.py tests/kernels/test_cpu_linear.py tests/kernels/test_cpu_scan.py \
    tests/kernels/test_cpu_adapters.py tests/kernels/test_cpu_noise.py
NOT_SANITIZED := triton or exponential or compile or compiler or library or cache or home or others or models or logits
.PHONY: sanitize
sanitize: $(VENV)/.installed-dev ## the kernels in C on tensors of all shapes, with gcc's address and undefined-behaviour sanitizers
	CC="gcc -g1 -O1 -fsanitize=address,undefined -fno-sanitize-recover=all" \
	    ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=abort_on_error=1:print_stacktrace=1 $(TEST_ENV) \
	    LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	    $(PY) -m pytest --capture=sys -k "not ($(NOT_SANITIZED))" $(PYTEST_ARGS) $(SANITIZED_TESTS)

.PHONY: test-5.17
test-5.17: $(VENV_OLD)/.installed-test ## the core tests on the oldest supported transformers, in .venv-5.17
	$(TEST_ENV) $(VENV_OLD)/bin/python -m pytest --every $(EVERY) $(NOT_CORE:%=--ignore=%) $(PYTEST_ARGS) $(T)

# By hand, with what can be had: most releases bring gigabytes of CUDA, which their tests on a CPU don't use.
.PHONY: test-torch
test-torch: .venv-torch-$(TORCH)/.installed ## the CPU tests, one case of sixteen, on another torch: make test-torch TORCH=2.14.1
	$(TEST_ENV) .venv-torch-$(TORCH)/bin/python -m pytest --every 16 -m "$(QUICK)" $(PYTEST_ARGS) $(T)

# By hand, too: a dozen environments, gigabytes of them where pip finds no CPU build of torch (PIP_ARGS).
.PHONY: clients
clients: $(VENV)/.installed-dev ## other people's programs against the server, at pinned versions: make clients ARGS="--only openai"
	PIP_ARGS='$(PIP_ARGS)' $(OFFLINE) $(PY) tests/clients/run.py $(ARGS)

.PHONY: lint
lint: $(VENV)/.installed-dev ## ruff, mypy, import-linter, budgets
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(if $(wildcard benchmarks),$(VENV)/bin/lint-imports) # which an archive of the sources lacks
	$(PY) tests/budgets.py
	$(PY) -m mypy

.PHONY: format
format: $(VENV)/.installed-dev ## let ruff format the code and fix what it can
	$(VENV)/bin/ruff check --fix-only --quiet $(SOURCES)
	$(VENV)/bin/ruff format $(SOURCES)

.PHONY: docs
docs: $(VENV)/.installed-docs ## the site, into build/docs; warnings are errors
	$(PY) docs/notebook.py
	$(OFFLINE) $(PY) -m sphinx -q -W --keep-going -c docs -d build/doctrees . build/docs

# train_tiny_lm.py makes the embedded model anew: three quarters of an hour, not a demonstration. Ray is an extra.
.PHONY: release-check
release-check: $(VENV)/.installed-dev ## a clone, the wheel and the sdist in bare environments, the docs, the demo in Firefox
	tests/release_check.sh

.PHONY: examples
examples: $(VENV)/.installed-dev ## run every example
	@for example in $(filter-out examples/train_tiny_lm.py examples/ray_%.py,$(sort $(wildcard examples/*.py))); do \
	    echo; echo "== $$example"; $(TEST_ENV) $(PY) $$example; done

.PHONY: bench
bench: $(VENV)/.installed-bench ## one caller alone beside stock, into benchmarks/results
	@mkdir -p $(RESULTS)
	@for bench in $(sort $(wildcard benchmarks/cpu*.py)); do \
	    echo; echo "== $$bench"; $(OFFLINE) $(PY) $$bench --out $(RESULTS); done

PAPER = PYTHONPATH=.:benchmarks $(TEST_ENV) $(PY) -m
.PHONY: paper paper-full
paper: $(VENV)/.installed-bench ## the PagedAttention paper's evaluation, simulated: six minutes of one core
	$(PAPER) paper --out $(RESULTS)/paper $(ARGS)
paper-full: $(VENV)/.installed-bench ## the same with an hour of arrivals a point; goes on where it was
	$(PAPER) paper --times 6 --resume --out $(RESULTS)/paper-full $(ARGS)

.PHONY: kernel-table
kernel-table: $(VENV)/.installed-dev ## what every specialisation of the kernels takes on five GPUs; half an hour, needs none of them
	PYTHONPATH=. $(PY) benchmarks/compile_kernels.py --table --out $(RESULTS) $(ARGS)

.PHONY: server-fields
server-fields: $(VENV)/.installed-dev ## write docs/server_fields.md anew: which fields of requests are honoured
	$(PY) -c 'from hf_paged.server.fields import page; print(page(), end="")' > docs/server_fields.md

# Which specialisations of the kernels serving launches: found by a soak in minutes, written to a file that is reviewed.
.PHONY: kernel-census
kernel-census: $(VENV)/.installed-dev ## write benchmarks/kernel_census.jsonl anew: all that serving launches on a GPU
	PYTHONPATH=. $(TEST_ENV) $(PY) benchmarks/kernel_soak.py --write

.PHONY: compile-kernels
compile-kernels: $(VENV)/.installed-dev $(TRITONS:%=.venv-triton-%/.installed) ## compile that census for five GPUs, and a little for six more, by four releases of Triton; goes on where it was
	for folder in "" $(TRITONS:%=.venv-triton-%:); do \
	    PYTHONPATH=$$folder. $(PY) benchmarks/compile_kernels.py --out $(RESULTS) $(ARGS); done

# For a machine with a GPU and a python3 that has torch, triton, transformers and pytest: no environment is made, nothing
# is installed. benchmarks/GPU.md says what each step is, how long it takes and what to send back. Stopped anywhere, the
# same command goes on where it was; it stops by itself after GPU_SECONDS, with an error while something is left to do.
#
#   make gpu GPU_PACK=/kept/gpu-state.tar.gz     the folder as one archive, for machines that forget it
GPU_STATE ?= gpu-state
GPU_SECONDS ?= 540
GPU_PACK ?=
GPU = python3 benchmarks/gpu.py --state $(GPU_STATE) --seconds $(GPU_SECONDS) $(GPU_PACK:%=--pack %) $(ARGS)

.PHONY: gpu
gpu: ## GPU tests and benchmarks in the order of what they tell, with the system's python3
	$(GPU)

.PHONY: gpu-smoke gpu-kernels gpu-generate gpu-tests gpu-sanitizer gpu-preemption
gpu-smoke: ## one test a kernel and one step of a large model on a GPU, in some three minutes
	$(GPU) --only smoke-tests smoke-step
gpu-kernels:
	$(GPU) --only kernels kernels-all
gpu-generate:
	$(GPU) --only generate generate-all
gpu-tests:
	$(GPU) --only tests
gpu-sanitizer:
	$(GPU) --only sanitizer-memcheck sanitizer-racecheck
gpu-preemption:
	$(GPU) --only preemption

.PHONY: gpu-results
gpu-results: ## copy what a GPU measured to benchmarks/results, to be committed
	@[ -d $(GPU_STATE) ] || { mkdir -p $(GPU_STATE) && tar -xzf gpu-state.tar.gz -C $(GPU_STATE) --strip-components 1; }
	@mkdir -p $(RESULTS)
	@for name in gpu_kernels generate-gpu preemption-cuda gpu-tests; do for kind in json md png txt; do \
	    if [ -f $(GPU_STATE)/results/$$name.$$kind ]; then cp -v $(GPU_STATE)/results/$$name.$$kind $(RESULTS); fi; done; done

.PHONY: clean
clean: ## remove what the tools leave behind (not the environments)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis $(RESULTS)/*.tmp
	find hf_paged tests examples $(wildcard benchmarks demo) -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## clean, and remove the environments
	rm -rf $(VENV) $(VENV_OLD) .venv-triton-* .venv-torch-* $(PUPPETEER) .clients

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-zA-Z0-9_.-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
