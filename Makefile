# All that is typed to set up, try, check and test GPUlayer. `make` alone lists it.

VENV := .venv
BIN := $(VENV)/bin
SHIPPED := $(wildcard gpulayer/remote/*.py gpulayer/gpu/discovery*.py gpulayer/gpu/*_child.py gpulayer/probe.py)

# What was compiled once is kept, whatever the environment says: the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo check test test-slow faults lock audit fuzz clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' Makefile

# What is installed is what requirements/ names, each file with its hash: one that was changed on its way is refused.
# The frameworks have exact versions only (constraints.txt, which has those of all), since each system has builds of its
# own of them. `make lock` writes them anew.
# A virtual environment that no longer starts (its Python is gone) is made anew.
$(VENV)/installed: pyproject.toml requirements/run.txt
	@$(BIN)/python -c '' 2>/dev/null || { python=$$(.ci/python) && rm -rf $(VENV) && $$python -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements/run.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/developed: $(VENV)/installed requirements/dev.txt constraints.txt
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation --constraint constraints.txt \
		--editable '.[frameworks]'
	@touch $@

setup: $(VENV)/developed ## set up all that the checks and tests need
	@.ci/packages

# No inventory: the fleet is this machine alone. The bands that were fetched make the picture; a changed program leaves
# older runs beside the newest.
demo: $(VENV)/installed ## run the main job on this machine alone
	cd examples && ../$(BIN)/gpulayer plan quickstart.yaml && ../$(BIN)/gpulayer apply
	@cd examples/.gpulayer/runs && for band in 1 2 3 4 5 6; do \
		cat "$$(ls -t band-$$band-*/outputs/band-$$band.txt | head -n 1)"; done

check: setup ## ruff, mypy, the house, the workflows, what runs on hosts against Python 3.9
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_house.py tests/unit/test_dangers.py
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/vermin --quiet --no-tips --violations --target=3.9- $(SHIPPED)

test: setup ## all tests
	$(BIN)/python -m pytest -n 4

test-slow: setup ## the tests that need what takes minutes to install
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[slow]'
	$(BIN)/python -m pytest -m slow

# `FAULTS='-k mix' SEEDS=1000 MINUTES=30` plays a part of it, or more of it.
faults: setup ## the long fault suite: hundreds of seeds and rounds, real silences, half an hour of chance
	$(BIN)/python -m pytest -m long -n 2 tests/faults $(FAULTS)

lock: $(VENV)/installed ## choose the newest versions that pyproject.toml allows, and write requirements/ and constraints.txt anew
	.ci/lock

# The audit asks the advisories about exactly what is locked.
audit: $(VENV)/installed ## ask whether something that is locked has a known hole
	.ci/audit

# The readers of what others wrote, with all that breaks a promise kept in .fuzz/: add a test, then mend it.
fuzz: setup ## fuzz documents for six minutes and frames for four, guided by coverage
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[fuzz]'
	$(BIN)/python -m tests.fuzz documents -max_total_time=360
	$(BIN)/python -m tests.fuzz frames -max_total_time=240

clean: ## remove all that was made here, but no results of jobs
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .fuzz
	find gpulayer tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
