# Two commands do all set-up on a fresh Debian or Ubuntu machine with make and Python 3.10 or newer:
#   make demo    the main job, told as a story, on simulated GPUs
#   make test    the tests
# Nothing is installed outside .venv, but for Debian packages where they are missing and this runs as root: python3-venv,
# and for the tests Slurm and munge where no Slurm is set up, Node.js and npm. No service is started by that.

# The system's own where it is new enough: the tests start servers as other users, who cannot run what is below /root.
PYTHON ?= $(shell /usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
    && echo /usr/bin/python3 || echo python3)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := PYTHON=$(PYTHON) .ci/venv $(VENV)
# Arguments for pytest, as in: make test T='tests/test_sizes.py -k decimals'
T ?=
# Files of tests run side by side, more of them than cores: most of their time they wait for other processes.
WORKERS ?= 3

.PHONY: help demo test test-slurm-trixie lint bench clean

help:
	@sed -n 's/^#   make/make/p' Makefile
	@echo 'make lint    ruff, mypy, import-linter'
	@echo 'make test-slurm-trixie   the tests on a real Slurm, on that of Debian trixie; as root, with debootstrap'
	@echo 'make bench   the benchmarks whose figures stand in docs/'
	@echo 'make clean   remove what these made'

demo: $(VENV)/.has-demo
	@[ "$$(id -u)" != 0 ] || .ci/slurm-packages
	@$(BIN)/gres-mig demo

# With GRES_MIG_CI=1 a skipped test fails (tests/no_skips.py); otherwise pytest names what it skipped at its end.
test: lint
	@.ci/slurm-packages
	@.ci/hub-proxy $(VENV)
	@$(BIN)/python -m pytest -p tests.no_skips -n $(WORKERS) --dist loadfile $(T)

# Its venv is there for its pip only: the tests run in one of their own, under .trixie, which `make clean` leaves there.
test-slurm-trixie: $(VENV)/.has-demo
	@VENV=$(VENV) .ci/slurm-trixie $(T)

lint: $(VENV)/.has-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: $(VENV)/.has-bench
	$(BIN)/python bench/placement.py
	$(BIN)/python bench/latency.py
	$(BIN)/python bench/slurm.py
	$(BIN)/python bench/jupyter.py

# One stamp for each set of packages: a second run installs nothing until pyproject.toml changes.
$(VENV)/.has-%: pyproject.toml .ci/venv
	@$(INSTALL) $*

clean:
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
