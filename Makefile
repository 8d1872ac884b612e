# `make demo` runs the main job, `make test` passes the tests; each does its own set-up, once.
PYTHON ?= python3
# A CUDA build works as well; the tested one is the CPU build.
TORCH ?= torch==2.13.0
BIN := .venv/bin
NATIVE := CMakeLists.txt $(wildcard native/*/*.cpp native/*/*.h native/*/*.inl native/include/hyper_mpmd/*.h)
PIP := $(BIN)/python -m pip --disable-pip-version-check
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: setup demo demo-ffn test test-slow native-test lint format bench clean

setup: .venv/built

.venv/dependencies: requirements.txt
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet $(TORCH)
	$(PIP) install --quiet -r requirements.txt
	touch $@

.venv/built: .venv/dependencies pyproject.toml $(NATIVE)
	$(PIP) install --quiet --no-build-isolation --no-deps --editable .
	touch $@

# Two ranks train a small language model; then what their cores did in one step.
STEPS ?= 500
demo: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node=2 examples/train_byte_lm.py --steps $(STEPS) --timeline $(if $(TEXT),--text $(TEXT))

# One feed-forward under O0, O1 and in plain torch.
demo-ffn: setup
	$(BIN)/python examples/demo.py $(if $(TEXT),--text $(TEXT))

# Every benchmark takes --rounds and --json; make bench ROUNDS=25 for steadier figures.
ROUNDS ?= 5
bench: setup
	for file in $$(grep -l __main__ benchmarks/*.py); do $(BIN)/python $$file --rounds $(ROUNDS) || exit 1; done

test: setup native-test
	$(BIN)/python -m pytest -m "not slow"

# The torch-free core and its tests, plain and under the sanitizers (these at -O1: quick to build, fast enough to run).
NATIVE_BUILDS := native: asan:-DHYPER_MPMD_SANITIZE=address,undefined tsan:-DHYPER_MPMD_SANITIZE=thread
CMAKE_CONFIGURE := $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DHYPER_MPMD_TESTS=ON
native-test: .venv/dependencies
	for build in $(NATIVE_BUILDS); do \
	  $(CMAKE_CONFIGURE) -B build/$${build%%:*} $${build#*:} && \
	  $(BIN)/cmake --build build/$${build%%:*} && \
	  $(BIN)/ctest --test-dir build/$${build%%:*} --output-on-failure --timeout 120 || exit 1; \
	done

test-slow: setup
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(filter-out CMakeLists.txt,$(NATIVE))

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(filter-out CMakeLists.txt,$(NATIVE))

clean:
	rm -rf build dist .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
