# `make demo` and `make test` need nothing but Python 3.11 or newer and make: they set up .venv themselves, once.
PYTHON ?= python3
BIN := .venv/bin
# What the demo downloads or caches stays under this folder.
export HF_HOME ?= $(CURDIR)/.cache/huggingface
export MPLCONFIGDIR ?= $(CURDIR)/.cache/matplotlib

.PHONY: demo demo-c4 demo-t5 test test-slow check fix

demo: .venv/recipes
	$(BIN)/accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \
		recipes/chess.py --config recipes/configs/chess/laptop.yaml

demo-c4: .venv/recipes
	$(BIN)/accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \
		recipes/c4.py --config recipes/configs/c4/laptop.yaml

demo-t5: .venv/recipes
	$(BIN)/accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \
		recipes/t5.py --config recipes/configs/t5/laptop.yaml

test: .venv/dev
	$(BIN)/python -m pytest -m "not slow"

test-slow: .venv/dev
	$(BIN)/python -m pytest -m slow

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

fix: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Each stands for a requirements file that was installed: installed again only when the file changes.
.venv/recipes: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, this is $$($(PYTHON) --version); try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || { echo "On Debian or Ubuntu: sudo apt-get install python3-venv"; exit 1; }
	@echo "Setting up .venv (once; downloads PyTorch)"
	@$(BIN)/pip install --quiet -r requirements.txt
	@touch $@

.venv/dev: .venv/recipes requirements-dev.txt
	@$(BIN)/pip install --quiet -r requirements-dev.txt
	@touch $@
