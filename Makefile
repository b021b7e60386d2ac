# One word per chore. `make serve` and `make test` do all the set-up that they need.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
ARGS ?=
WORKERS ?= 2

.PHONY: setup serve chat test check-plugins check-scheduling check-overload check-structured check-accuracy bench-cpu bench-peers lint format types docs bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml scripts/install.py
	$(PYTHON) -m venv $(VENV)
	$(RUN) scripts/install.py
	touch $(STAMP)

serve: setup
	$(RUN) -m core serve +preset=chat $(ARGS)

chat: setup
	$(RUN) -m core chat +preset=chat $(ARGS)

test: setup
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check-plugins: setup
	$(RUN) -m core.lab.check_plugins $(ARGS)

check-scheduling: setup
	$(RUN) -m core.lab.check_scheduling $(ARGS)

check-overload: setup
	$(RUN) -m core.lab.overload $(ARGS)

check-structured: setup
	$(RUN) -m core.lab.check_structured $(ARGS)

check-accuracy: setup
	$(RUN) -m core.lab.check_accuracy $(ARGS)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports

types: setup
	$(VENV)/bin/mypy

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: setup
	$(RUN) -m core.docs

bench: setup
	$(RUN) -m core bench +preset=chat $(ARGS)

bench-cpu: setup
	$(RUN) -m core.lab.bench_cpu $(ARGS)

bench-peers: setup
	$(RUN) -m core.lab.bench_peers $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info
