# Every target sets up what it needs. ARGS reaches the program that a target runs: make test ARGS="-k csrc -x"
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.docs-installed
BENCHMARKS := $(sort $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py)))

CORE := tests/unit tests/e2e -m "(unit or smoke) and not thorough"
QUICK := -m "not gpu and not zoo and not tiers and not thorough and not slow and not distributed" --ignore tests/zoo
NUMBERS := tests/unit tests/e2e $(QUICK)

CSRC_TESTED := $(filter-out csrc/bindings/%,$(wildcard csrc/*/*.cpp))

.PHONY: setup train test test-core test-device test-isa test-torch test-csrc tiers thorough zoo lint docs bench clean

setup: $(INSTALLED)

# The development requirements pin torch; --no-deps keeps the package's own installation from choosing another build.
$(INSTALLED): pyproject.toml requirements-dev.txt CMakeLists.txt $(wildcard csrc/*/*.*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -r requirements-dev.txt
	$(BIN)/pip install --no-build-isolation --no-deps -e .
	touch $@

train: setup
	$(BIN)/python examples/train_gpt.py --nvme . --device-memory 128MiB $(ARGS)

# Three at a time: many tests wait for processes that they start, so that two leave cores idle. ARGS="-n 0" runs one after the other.
test: setup
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not gpu and not zoo and not tiers and not thorough" $(ARGS)

# The parts by themselves, and one test of each thing that the README promises: a minute.
test-core: setup
	$(BIN)/pytest -n 2 --dist loadfile $(CORE) $(ARGS)

# On `late`, a device for tests that stands in for a GPU: compiled once, a minute, and kept in build/device. In processes of its own.
test-device: setup
	$(BIN)/pytest -n 2 --dist loadfile -m "not thorough" tests/device $(ARGS)

# The quick tests as on a processor with AVX2, on one with SSE4.1, with four threads, and the core beside eight busy processes: nothing
# may rest on how one processor's kernels round.
AVX2 := MKL_CBWR=AVX2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
SSE41 := MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41
test-isa: setup
	@echo "== AVX2"
	env $(AVX2) $(BIN)/pytest -n 2 --dist loadfile $(NUMBERS) $(ARGS)
	@echo "== SSE4.1"
	env $(SSE41) $(BIN)/pytest -n 2 --dist loadfile $(NUMBERS) $(ARGS)
	@echo "== four threads"
	$(BIN)/pytest --threads 4 -n 2 --dist loadfile $(NUMBERS) $(ARGS)
	@echo "== eight busy processes"
	for i in 1 2 3 4 5 6 7 8; do yes > /dev/null & done; trap "kill $$(jobs -p | tr '\n' ' ')" EXIT; \
	$(BIN)/pytest -n 2 --dist loadfile $(CORE) $(ARGS)

# The quick tests on another PyTorch, in an environment of its own: make test-torch TORCH=2.11.0, or 2.15.0. Their builds bring
# gigabytes of CUDA with them and run without a GPU.
TORCH ?= 2.11.0
OTHER := .venv-torch-$(TORCH)
test-torch:
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/pip install torch==$(TORCH)
	sed 's/^torch==.*/torch==$(TORCH)/' requirements-dev.txt > $(OTHER)/requirements.txt
	$(OTHER)/bin/pip install -r $(OTHER)/requirements.txt
	$(OTHER)/bin/pip install --no-build-isolation --no-deps -e .
	$(OTHER)/bin/pytest $(QUICK) $(ARGS)

# The I/O engines against real and faulty kernels, once under each sanitizer. Needs a C++ compiler only.
test-csrc: build/csrc-tests-address,undefined build/csrc-tests-thread
	build/csrc-tests-address,undefined
	build/csrc-tests-thread

build/csrc-tests-%: $(CSRC_TESTED) $(wildcard csrc/*/*.hpp)
	mkdir -p build
	$(CXX) -std=c++20 -O1 -g -Wall -Wextra -Wno-missing-field-initializers -Werror -fsanitize=$* -fno-sanitize-recover=all -pthread -Icsrc $(CSRC_TESTED) -o $@

# All 27 placements of states, in each type and mode, on one rank and two, bit by bit and byte by byte: five minutes.
tiers: setup
	$(BIN)/pytest -n 2 --dist load -m tiers tests $(ARGS)

# Further cases of what the tests show: half an hour, much of it tests/device, with 200 runs under drawn delays.
thorough: setup
	$(BIN)/pytest -n 2 --dist loadfile -m "thorough and not gpu" $(ARGS)
	$(BIN)/pytest -n 2 --dist loadfile -m thorough tests/device $(ARGS)

zoo: setup
	$(BIN)/pytest -m zoo tests/zoo $(ARGS)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The pages of docs/ as a site in build/docs. A link that leads nowhere is an error. Draws the import graph anew.
docs: $(DOCS_INSTALLED)
	$(BIN)/python docs/import_graph.py
	$(BIN)/zensical build --strict --clean

$(DOCS_INSTALLED): requirements-docs.txt $(INSTALLED)
	$(BIN)/pip install -r requirements-docs.txt
	touch $@

bench: setup
ifeq ($(BENCHMARKS),)
	@echo "no benchmarks yet: there is no script in benchmarks/"
else
	set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script $(ARGS); done
endif

# Keeps the virtual environment: remove $(VENV) by hand to start over.
clean:
	rm -rf build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
