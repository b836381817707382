# Every target prepares .venv by itself. `make demo` trains a small language model; `make test` runs the checks
# that hold the contract, `make test-rest` the long tail of them (`SHARE=1/4`: a quarter of it), `make test-all` both.
# PYTHON chooses the interpreter that makes .venv: `make test PYTHON=python3.12`.

PYTHON ?= python3
TORCH := torch==2.13.0
APART := torchao==0.18.0 timm==1.0.31 torchtitan==0.3.0 spmd_types==0.2.3 torch_checkpointing==0.1.1 \
	torchdata==0.11.0 tyro==1.0.17 typeguard==4.6.1 docstring_parser==0.18.0 shtab==1.13.0
BIN := .venv/bin
READY := .venv/.ready
# A worker a core; each test may start several processes of its own, of one thread each.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal

# Compiled modules are kept, whatever the environment says: each process of the tests would compile them anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-short test-rest test-all lint format bench docs tables ray verl vllm liger gguf trackers versions cuda cuda-build gpu peers clean
.DEFAULT_GOAL := test

demo: $(READY)
	$(BIN)/trueshard demo

# Two targets at a time: the tests run beside the linters, and either can fail it.
test: $(READY)
	@$(MAKE) --no-print-directory --jobs=2 lint test-short

test-short: $(READY)
	$(PYTEST) --durations-file=build/durations.txt

test-rest: $(READY)
	$(PYTEST) -m rest $(if $(SHARE),--share $(SHARE)) --durations-file=build/durations-rest.txt

test-all: test test-rest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m benchmarks

docs: $(READY)
	$(BIN)/mkdocs build --strict --site-dir build/site

tables: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/optimizer_table.py
	$(BIN)/python tests/configuration_reference.py
	$(BIN)/python tests/convert_tables.py
	$(BIN)/python tests/documents_commands.py
	$(BIN)/python tests/documents_pictures.py

# Not part of `make test-all`: each makes an environment of its own (tests/added_environment.py), and tests what needs it.
# That of vLLM is for processors, and has 3 GB.
ray verl: TESTS = tests/test_integrations_$@.py
vllm: TESTS = tests/test_rl_vllm_server.py
liger: TESTS = tests/test_train_kernels.py
gguf: TESTS = tests/test_export_push.py
ray verl vllm liger gguf: $(READY)
	$(BIN)/python tests/added_environment.py $@
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m rest $(TESTS)

trackers: $(READY)
	$(BIN)/python tests/added_environment.py $@
	build/$@/bin/python -m pytest -m "rest or not rest" tests/test_metrics_trackers.py

# Nor this: it makes an environment of several GB for each release of torch. Needs Python >= 3.11.
versions:
	$(PYTHON) tests/versions.py

# Other trainers' own tests with TrueShard under them: docs/peers.md. PEERS_SOURCES: a folder of their sources, which are
# cloned if it is not given; PEERS: which of them.
peers: $(READY)
	$(BIN)/python tests/added_environment.py $@
	build/$@/bin/python -m benchmarks.suites $(PEERS) $(if $(PEERS_SOURCES),--sources $(PEERS_SOURCES)) \
		--markdown docs/peers.md

# What only a CUDA device runs, on one that is emulated on the CPU: docs/emulated-cuda.md.
cuda: cuda-build
	$(PYTEST) -m "rest or not rest" --deselect tests/test_emulated_cuda.py::test_some_features_on_two_devices \
		tests/test_emulated_cuda.py tests/test_cuda_launchers.py tests/test_cuda_cost.py tests/test_cuda_commands.py \
		tests/test_cuda_recipes.py tests/test_gpu_session.py

# Compiled anew only where its sources or torch have changed.
cuda-build: $(READY)
	PYTHONPATH=tests $(BIN)/python -m emulated_cuda.build

# On a machine with GPUs, with the Python that has torch there; WHEELS: a folder of wheels of what it lacks; GPU: options,
# as --only NAME, --budget SECONDS, --out DIR. Called again, it goes on with what has no figures yet.
gpu:
	$(PYTHON) -m benchmarks.gpu $(if $(WHEELS),--wheels $(WHEELS)) $(GPU)

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache src/*.egg-info

# torch goes in first and alone, so that no other requirement pulls another build of it.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11, which the pinned set needs; choose another: make PYTHON=python3.12" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .
	# Apart, where only their tests look: transformers imports them if it can, and then every program prints warnings.
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --upgrade --target .venv/apart $(APART)
	touch $@
