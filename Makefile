# `make demo` and `make test` need nothing but Python 3.11 or newer and make: they set up .venv themselves, once.
PYTHON ?= python3
BIN := .venv/bin
# The demo's downloads and caches stay under this folder.
export HF_HOME ?= $(CURDIR)/.cache/huggingface
export MPLCONFIGDIR ?= $(CURDIR)/.cache/matplotlib

.PHONY: venv docs demo demo-c4 demo-t5 demo-vit demo-vlm browser test test-fast test-runs test-slow test-all test-long test-hub test-serving \
	test-slurm test-image newest models plans coverage mutants same check fix ratchet lock

# More arguments for the recipe: make demo ARGS="--max_steps 100"
ARGS =

venv: .venv/recipes

demo: .venv/recipes
	$(BIN)/accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \
		recipes/chess.py --config recipes/configs/chess/laptop.yaml $(ARGS)

demo-c4: .venv/recipes
	$(BIN)/accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \
		recipes/c4.py --config recipes/configs/c4/laptop.yaml $(ARGS)

demo-t5: .venv/recipes
	$(BIN)/accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \
		recipes/t5.py --config recipes/configs/t5/laptop.yaml $(ARGS)

demo-vit: .venv/recipes
	$(BIN)/accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \
		recipes/vit.py --config recipes/configs/vit/laptop.yaml $(ARGS)

demo-vlm: .venv/recipes
	$(BIN)/python data/fashion/questions.py make outputs/demo-vlm
	$(BIN)/accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \
		recipes/sft_vlm.py --config recipes/configs/sft_vlm/laptop.yaml $(ARGS)
	$(BIN)/python data/fashion/questions.py ask outputs/demo-vlm

# Two files at a time, in the order of tests/conftest.py: the ranks of a run wait for each other half of the time.
PARALLEL := --numprocesses 2 --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/python -m pytest $(PARALLEL)

test: .venv/dev
	$(PYTEST) -m "not slow and not long and not hub and not slurm and not image"

# For the inner loop of an editor: the tests that start no runs.
FAST := args arguments attention checkpoint chess_rules configs core data engine errors layout metrics \
	metrics_of_texts models optim recipe report requeue rows upstream weights
test-fast: .venv/dev
	$(BIN)/python -m pytest -q -m "not slow and not long" $(FAST:%=tests/test_%.py)

# Between these and `make test`, 3 minutes on two idle cores: a forked run of each recipe, a launched one, FSDP2, FSDP1 and DDP, and
# a stream that is killed and goes on.
RUNS := c4:killed_and_resumed_is_as_if_it_had_not_been chess:it_learns conversations:a_run_is_compared_with_its_export \
	distill:prompts_alone equivalence:one_trajectory[fsdp1] grpo:presets_run kto:the_reference_of_adapters sft_vlm:adapters \
	t5:a_reader_sees_it_learn template:pairs_of_texts_with_several_labels vit:it_says_what_it_does
test-runs: .venv/dev
	$(PYTEST) $(foreach test,$(RUNS),"tests/test_$(subst :,.py::test_,$(test))")

# A browser looks at the site; as root it is installed, else that test is skipped where there is none.
browser:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v chromium >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends chromium >/dev/null; fi

test-slow: .venv/dev
	$(PYTEST) -m "slow and not long"

# `make test` and `make test-slow` in one go, as in CI: the tests of a file share its runs.
test-all: .venv/dev
	$(PYTEST) -m "not long and not hub and not slurm and not image"

# The demos to their end, compared with the README's results; each kind of compilation; a whole ablation; plans of deep models;
# benchmarks and how the site looks; and repetitions of slow tests for another operator, with one rank killed, or under all
# configs. Takes an hour.
test-long: .venv/dev browser
	$(BIN)/python -m pytest -m long

# Downloads from olah, a Hub server from PyPI. It has an environment of its own, because it pins other versions.
test-hub: .venv/dev
	@test -x .venv/olah/bin/olah-cli || $(PYTHON) -m venv .venv/olah
	@.venv/olah/bin/pip install --quiet olah==0.5.4
	$(BIN)/python -m pytest -m hub

# Reads exports by transformers 4 and by the library of llama.cpp's converter, in an environment that hides ours behind other
# versions. pip says that others want a newer huggingface_hub.
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
test-serving: .venv/dev
	@test -x .venv/serving/bin/pip || $(BIN)/python -m venv .venv/serving
	@echo "import site; site.addsitedir('$$($(BIN)/python $(PURELIB))')" >"$$(.venv/serving/bin/python $(PURELIB))/ours.pth"
	@.venv/serving/bin/pip install --quiet -r requirements-serving.txt
	$(BIN)/python -m pytest tests/test_serving.py

# Jobs under three real Slurms of two nodes each, which the tests start and stop on this machine: a job waits half of the time.
# Needs root.
test-slurm: .venv/dev
	@missing=; for program in slurmctld slurmd sbatch munged; do \
		PATH="$$PATH:/usr/sbin" command -v $$program >/dev/null || missing=1; done; \
	if [ "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends \
			slurmctld slurmd slurm-client munge >/dev/null; fi
	$(BIN)/python -m pytest --numprocesses 3 --dist loadgroup -m slurm tests/test_slurm.py

# Builds the container image on a Debian that it makes, and trains in it. Needs root, the network, and 8 GB in .cache/image, which stay.
test-image: .venv/dev
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! { command -v buildah && command -v debootstrap; } >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends \
			buildah debootstrap >/dev/null; fi
	$(BIN)/python -m pytest -m image

# The tests with the newest releases of all libraries, in .cache/newest, whatever requirements.txt pins; ends with a list of
# versions and failures. Some of them: make newest ARGS="tests/test_dpo.py".
NEWEST := .cache/newest/bin
newest:
	@test -x $(NEWEST)/pip || $(PYTHON) -m venv .cache/newest
	@sed '/^[#-]/d; s/==.*//' requirements.txt requirements-dev.txt >.cache/newest/names.txt
	@$(NEWEST)/pip install --quiet --upgrade uv
	@$(NEWEST)/uv pip install --quiet --python $(NEWEST)/python --torch-backend $(if $(HAS_GPU),auto,cpu) --upgrade -r .cache/newest/names.txt || \
		$(NEWEST)/pip install $(QUIET) --upgrade --upgrade-strategy eager -r .cache/newest/names.txt
	@$(NEWEST)/pip install --quiet --no-deps -e .
	$(NEWEST)/python tests/newest.py $(or $(ARGS),$(PARALLEL) -m "not (long or hub or slurm or image)")

# The table of models: trains a tiny model of each architecture, writes docs/models.md, and fails if a cell is red. Some of them:
# make models ARGS="Mixtral GPT-2".
models: .venv/dev
	$(BIN)/python tests/models_table.py $(ARGS)

# Figures of `plan` in presets and on pages: simulates commands that are new, or with ARGS=--again all of them (an hour).
plans: .venv/dev
	$(BIN)/python benchmarks/plans.py $(ARGS)

# The documentation as a site in .cache/site, without the network; a warning is an error.
docs: .venv/dev
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs -d .cache/doctrees . .cache/site
	@echo "Open .cache/site/index.html"

# Lines that no test of `make test` runs, in launched and forked processes too. Takes twice as long as `make test`.
coverage: export COVERAGE_FILE = $(CURDIR)/.cache/coverage/data
coverage: .venv/dev
	@rm -rf .cache/coverage && mkdir -p .cache/coverage
	-$(BIN)/coverage run -m pytest -q $(PARALLEL) -m "not slow and not long and not hub and not slurm and not image"
	@$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# Plants small faults in the core, and prints those that no test notices: make mutants ARGS="--number 200 --seed 0" takes hours.
mutants: .venv/dev
	@test -d .venv/mutants || $(BIN)/pip install --quiet --target .venv/mutants cosmic-ray==8.7.0
	$(BIN)/python tests/mutants.py $(ARGS)

# Compares what this tree reads and trains with another commit, bit for bit (5 minutes of one core); ends with an error if anything
# differs. Some of its cases: make same BASE=main ARGS="sft mixture".
BASE = main
same: .venv/dev
	$(BIN)/python tests/same.py $(BASE) $(ARGS)

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/codespell
	$(BIN)/shellcheck .ci/run .ci/notes slurm/*.sh
	$(BIN)/hadolint Dockerfile

fix: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Writes lower numbers into tests/ratchet.json, whose sizes may only fall.
ratchet: .venv/dev
	$(BIN)/python tests/ratchet.py

# Locks requirements.txt for the container image: all packages for Linux on x86-64, each with its version and hashes. Locked
# versions stay where requirements.txt allows; delete requirements.lock first to get the newest of all.
lock: .venv/dev
	UV_CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/uv pip compile --quiet --generate-hashes --no-annotate --python-version 3.11 \
		--python-platform x86_64-manylinux_2_28 --no-emit-package accelerate-recipes --output-file requirements.lock requirements.txt

# Without an NVIDIA GPU, PyTorch comes from its index for CPUs: a tenth of the download. make HAS_GPU=yes takes that for CUDA.
HAS_GPU := $(shell command -v nvidia-smi)
# A person sees the progress; a log does not need it.
QUIET = $$([ -t 1 ] || echo --quiet)

# Each of these files stands for an installed requirements file, which is installed again only when it changes.
.venv/recipes: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, this is $$($(PYTHON) --version); try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || { echo "On Debian or Ubuntu: sudo apt-get install python3-venv"; exit 1; }
	@echo "Setting up .venv, once: a few minutes, 3 GB on disk, with CUDA 6 GB"
	@torch=$$(grep '^torch==' requirements.txt); \
	if [ "$$torch" ] && [ -z "$(HAS_GPU)$$PIP_NO_INDEX" ] && [ "$$(uname)" = Linux ]; then \
		$(BIN)/pip install --quiet "$$(grep '^uv==' requirements-dev.txt)" && \
		$(BIN)/uv pip install --python $(BIN)/python --torch-backend cpu "$$torch" || \
		echo "The index with PyTorch for CPUs cannot be reached: taking what pip finds, which may bring CUDA"; \
	fi
	@$(BIN)/pip install $(QUIET) -r requirements.txt
	@touch $@

.venv/dev: .venv/recipes requirements-dev.txt
	@$(BIN)/pip install $(QUIET) -r requirements-dev.txt
	@touch $@
