# make run        set up .venv, let the model that ships tell a story, and ask it for a fact
#                 that it read long before
# make chat       set up .venv and open a chat with it
# make wheel      build a wheel in dist/ with compiled kernels for all levels of this architecture's
#                 CPUs; five minutes on 2 cores
# make test       set up .venv and run the tests
# make test-all   and all cases of long lists, of which `make test` takes some: kernels of all types
#                 for many GPUs and CPUs
# make test-fast  the tests that take some five minutes together, on 2 cores; the first run
#                 takes longer, since it compiles kernels and leaves them for the next
# make attack     long searches for damaged and hostile input that does harm; `make test` has a part
# make real       fetch two published models (350 MB) into REAL_MODELS, and run the tests that read them
# make soak       ask a server for an hour, break off at random, and look for what it loses
# make test-arm64 the tests of the CPU's kernels on 64-bit ARM, in an emulator; as root, slow
# make docs       the documentation as a site in docs/_build; warnings are errors
# make lint       formatting, lint, types, import floors, sentences of pages and docstrings
# make house      how many modules and lines localkv has, and how deep a token's calls go
# make figures    make the documentation's figures again (some 15 minutes on 2 cores)
# make test-triton  the tests of the GPU's kernels with another Triton (TRITON=3.6.0), in a
#                 .venv-triton of its own; 3.6 needs NumPy below 2.4
#
# NVIDIA       whether `make run` and `make chat` set up torch and Triton, for GPUs; by default where
#              NVIDIA's driver is; NVIDIA= for an environment without
# PYTHON       the interpreter of .venv; by default the newest of python3.11 to 3.14 that works
# REAL_MODELS  the folder of `make real`; by default .real-models
# TORCH_INDEX  a wheel index for torch, for instance .../whl/cu126 of https://download.pytorch.org
#              for older drivers, or .../whl/cpu for `make test` without a GPU: PyPI's brings CUDA

NVIDIA ?= $(shell test -e /proc/driver/nvidia/version -o -e /dev/nvidiactl \
	|| command -v nvidia-smi >/dev/null && echo yes)
PYTHON ?= $(shell for v in 3.14 3.13 3.12 3.11; do \
	python$$v -c 'import ensurepip, venv' >/dev/null 2>&1 && { echo python$$v; break; }; done)
TORCH_INDEX ?=
REAL_MODELS ?= .real-models
TRITON ?= 3.6.0

BIN := .venv/bin
# tests of one file stay in one process, which has its models and kernels; who is done takes over
# some of the other's
SHARED := -n 2 --dist worksteal
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check \
	--constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
READY := .venv/.$(if $(NVIDIA),gpu,run)
MODEL := models/tales-4M-F16.gguf
PROMPT := Once upon a time
STORIES := tests/data/llama_cpp_perplexity.json
SHIFT := -ctk q4_0 -ctv q4_0
COSTS := --tokens 1024 --types q8_0,q4_0,q4_1c,kv2_1c --bits 4,4.5,5,6 --smooth 0
COMPILED := kernels/cpu/compiled
KERNELS := localkv/$(COMPILED)/.built
RUNS := $(READY) $(if $(NVIDIA),,$(KERNELS))
BUILD_KERNELS := $(BIN)/python -m localkv.kernels.cpu.build_kernels
QUESTION := Question: What is the code of the owl? Answer:

.PHONY: run chat docs wheel test test-fast test-all attack real soak test-arm64 test-triton lint house figures clean

run: $(RUNS)
	@printf '%s\n' '$$ localkv complete -m $(MODEL) -p "$(PROMPT)" --temp 0.6 --seed 7 -q'
	@printf '%s' '$(PROMPT)'
	@$(BIN)/localkv complete -m $(MODEL) -p '$(PROMPT)' --temp 0.6 --seed 7 -q </dev/null
	@echo
	@printf '%s\n' '$$ head -n 1 models/notes.txt   # and then six stories'
	@head -n 1 models/notes.txt
	@printf '%s\n' '$$ localkv complete -m $(MODEL) -ctk q4_0 -ctv q8_0 -p "{stdin}\n\n $(QUESTION)" -r "\n" --temp 0 -q --stats <models/notes.txt'
	@$(BIN)/localkv complete -m $(MODEL) -ctk q4_0 -ctv q8_0 -p '{stdin}\n\n $(QUESTION)' -r '\n' --temp 0 -q --stats <models/notes.txt

chat: $(RUNS)
	@$(BIN)/localkv chat -m $(MODEL)

# prerequisites are made in their order: kernels by the environment before them
.NOTPARALLEL:

wheel: .venv/.dev
	$(BUILD_KERNELS) --all
	$(BIN)/python -m hatchling build -t wheel

test: .venv/.dev $(KERNELS)
	$(BIN)/python -m pytest $(SHARED)
	$(BIN)/python -m pytest $(SHARED) tests/interpreter

test-fast: .venv/.dev $(KERNELS)
	$(BIN)/python -m pytest $(SHARED) -m "not slow"
	$(BIN)/python -m pytest $(SHARED) -m "not slow" tests/interpreter

test-all: .venv/.dev $(KERNELS)
	$(BIN)/python -m pytest $(SHARED) -m "exhaustive or not attack"
	$(BIN)/python -m pytest $(SHARED) -m "exhaustive or not attack" tests/interpreter

attack: .venv/.dev
	$(BIN)/python -m pytest $(SHARED) -m attack tests/attack

# exit code 75: the models can't be had
real: .venv/.dev
	$(BIN)/python .ci/real_models $(REAL_MODELS)
	LOCALKV_REAL_MODELS=$(abspath $(REAL_MODELS)) $(BIN)/python -m pytest $(SHARED) tests/real

soak: .venv/.run
	$(BIN)/python benchmarks/soak.py --minutes 60

test-arm64: .venv/.dev
	.ci/test-arm64

test-triton:
	$(PYTHON) -m venv .venv-triton
	grep -vE '^(numpy|triton)==' constraints.txt > .venv-triton/constraints.txt
	.venv-triton/bin/python -m pip install --quiet --constraint .venv-triton/constraints.txt \
		--editable '.[dev]' 'triton==$(TRITON)' 'numpy<2.4'
	.venv-triton/bin/python -m pytest $(SHARED) tests/aot
	.venv-triton/bin/python -m pytest $(SHARED) tests/interpreter

docs: .venv/.docs
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build

house: .venv/.run
	$(BIN)/python .ci/house

lint: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/prose

figures: .venv/.dev
	$(BIN)/python docs/make_drawings.py
	$(BIN)/python benchmarks/quality.py --plot docs/kv-cache-quality.png --insert docs/cache-costs.md docs/cache-methods.md
	$(BIN)/localkv plan --synthetic llama-8b:q4_K --memory 16GiB --device cuda --plot docs/plan.svg
	$(BIN)/python -c 'import json; print(json.load(open("$(STORIES)"))["text"])' >.venv/stories.txt
	$(BIN)/localkv perplexity -m $(MODEL) -f .venv/stories.txt --calibrate-kv .venv/scales.json
	$(BIN)/localkv perplexity -m $(MODEL) -f .venv/stories.txt --sweep pure \
		--kv-scales .venv/scales.json --plot docs/sweep.png
	$(BIN)/python models/outliers.py $(MODEL) --out .venv/twin.gguf --k-strength 16 --v-strength 4
	$(BIN)/localkv show $(MODEL) --kv $(SHIFT) --plot docs/kv-channels.png
	$(BIN)/localkv show .venv/twin.gguf --kv $(SHIFT) --plot docs/kv-channels-twin.png
	$(BIN)/localkv calibrate -m $(MODEL) $(COSTS) -o .venv/plain.kv.json --plot docs/kv-costs.png
	$(BIN)/localkv calibrate -m .venv/twin.gguf $(COSTS) -o .venv/twin.kv.json \
		--plot docs/kv-costs-twin.png
	$(BIN)/localkv bench --synthetic llama-1b:q4_0 -p 0 -n 32 -r 3 -d 0,2048,8192 \
		--pairs f16/f16,q8_0/q4_0,q4_0/q4_0 --plot docs/bench.png

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.14 with venv found; set PYTHON=..." >&2; exit 1; }
	@echo "Setting up .venv, once: pip fetches the packages."
	$(PYTHON) -m venv .venv

.venv/.run: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP_INSTALL) --editable .
	@touch $@

.venv/.gpu: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP_INSTALL) --editable '.[gpu]'
	@touch $@ .venv/.run

$(KERNELS): $(shell find localkv/kernels/cpu localkv/quant_formats localkv/simd -name '*.py')
	@echo "Compiling the usual kernels for this processor, once: about a minute on 2 cores."
	@$(BUILD_KERNELS)
	@mkdir -p $(@D) && touch $@

.venv/.docs: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP_INSTALL) --editable '.[docs]'
	@touch $@ .venv/.run

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@ .venv/.run

clean:
	rm -rf docs/_build localkv/$(COMPILED) .venv .venv-triton .arm64 .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
