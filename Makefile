# make demo   train the demo model over two to four partitions, as suits the machine
# make quick  the tests that start no process, no browser and no ranks: what to run while working
# make test   lint, types and all tests
# make cover  all tests once more, for the lines that none of them runs
# make compat all tests on the oldest and newest torch and Python, each in .venv-compat; all of them, with a summary at
#             the end. It fails if one failed or its Python is not installed: make compat PYTHONS=3.11
# make lint   lint and types alone
# make lint-js  lint the JavaScript of the page with biome, which npm installs into node_modules
# make fuzz   the fuzzers, with other cases than the few of make test: make fuzz CASES=10000 ONLY=engine
# make bench  the benchmarks, against peers in a virtual environment of their own; writes docs/benchmarks.md.
#             Some of them, or fewer rounds: make bench BENCH="cpu_step spans --brief"
# make clients  programs written for the peers on the shims, and Lightning around a pipeline: what pip can install, or CLIENTS="torchgpipe dlio"
# make docs   the documentation as a site, in build/site
# make pictures  the pictures of the documents; those of the page need Chromium and chromedriver
# make clean  remove everything these commands made
#
# Each of them installs what it needs into .venv, once. To use another build of torch:
#   make test TORCH="torch==2.9.1 --index-url https://download.pytorch.org/whl/cu128"

PYTHON ?= python3
TORCH  ?= torch==2.13.0
# Of tests at a time: most wait for processes, ranks or a browser, so that four keep two cores busy.
JOBS   ?= 4
CASES  ?= 1000
# Of make compat; CPU builds of torch: make compat INDEX="--index-url https://download.pytorch.org/whl/cpu"
PYTHONS ?= 3.11 3.13
TORCHES ?= 2.6.0 2.13.0 2.15.0
INDEX  ?=
ONLY   ?=
BENCH  ?=
CLIENTS ?=

VENV   := .venv
BIN    := $(VENV)/bin
PEERS  := .venv-peers
BIOME  := node_modules/.bin/biome

# Tests start many processes; none of them should have to compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo quick test collected cover compat lint lint-js fuzz bench clients docs pictures clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/pipesight demo

quick: $(VENV)/.developed
	$(BIN)/pytest --quick -n $(JOBS) --dist worksteal

# Some tests hold a stop-watch against the report. What fails beside other tests runs once more, with the machine to itself.
ONCE_MORE = { echo "what failed, once more:"; $(BIN)/pytest -rs --last-failed --last-failed-no-failures none -m

# The files that have tests to run alone: to collect all of them again takes as long as some of these tests.
ALONE = $(shell grep -rl --include="*.py" "mark\.alone" tests)

test: $(VENV)/.developed
	@$(MAKE) --no-print-directory -j2 lint collected
	$(BIN)/pytest -rs -n $(JOBS) --dist worksteal --cache-clear -m "not alone" || $(ONCE_MORE) "not alone"; }
	$(BIN)/pytest -rs --cache-clear -m alone $(ALONE) || $(ONCE_MORE) alone $(ALONE); }

# What pytest makes of assertions is compiled while types are checked, and not by each of the processes that then begin.
collected: $(VENV)/.developed
	@$(BIN)/pytest --collect-only -qq > /dev/null || true

cover: $(VENV)/.developed
	$(BIN)/coverage erase
	-$(BIN)/coverage run -m pytest -n $(JOBS) --dist worksteal --timeout 0 -m "not alone"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage html --quiet
	$(BIN)/coverage report --skip-covered --sort=miss
	@echo "open build/coverage/index.html"

COMPAT := $(foreach python,$(PYTHONS),$(foreach torch,$(TORCHES),compat-$(python)-$(torch)))
compat:
	@wrong=0; summary=; for job in $(COMPAT); do \
		if $(MAKE) --no-print-directory $$job; then found=passed; \
		else wrong=1; python=$${job#compat-}; python=python$${python%%-*}; \
			if command -v $$python > /dev/null; then found=FAILED; else found="NOT RUN, $$python is not installed"; fi; \
		fi; \
		summary="$$summary$$job: $$found\n"; \
	done; printf "\n$$summary"; exit $$wrong

# compat-3.11-2.6.0: Python 3.11 with torch 2.6.0, in .venv-compat/3.11-2.6.0
compat-%:
	@set -e; python=python$(firstword $(subst -, ,$*)); bin=.venv-compat/$*/bin; \
	if ! command -v $$python > /dev/null; then echo "$@: $$python is not installed" >&2; exit 1; fi; \
	if [ ! -e $$bin/../.developed ]; then \
		$$python -m venv .venv-compat/$*; \
		$$bin/pip install --quiet --disable-pip-version-check torch==$(lastword $(subst -, ,$*)) $(INDEX); \
		$$bin/pip install --quiet --disable-pip-version-check --editable ".[dev]" \
			--editable shims/torchgpipe --editable shims/dftracer --editable shims/nvdlfw_inspect; \
		touch $$bin/../.developed; \
	fi; \
	echo "$@"; \
	$$bin/pytest -rs -n $(JOBS) --dist worksteal -m "not alone"; \
	$$bin/pytest -rs -m alone

lint: $(VENV)/.developed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@if [ -x $(BIOME) ]; then $(BIOME) check --error-on-warnings .; \
	else echo "JavaScript not linted: \`make lint-js\` installs biome, if npm is there"; fi

lint-js: $(BIOME)
	$(BIOME) check --error-on-warnings .

fuzz: $(VENV)/.developed
	FUZZ_CASES=$(CASES) $(BIN)/pytest --timeout 0 tests/fuzz -k "$(ONLY)"

bench: $(VENV)/.developed $(PEERS)/.installed
	$(BIN)/python -m benchmarks --peers $(PEERS)/bin/python --json docs/benchmarks.json $(BENCH)
	$(BIN)/python -m benchmarks page

clients: $(VENV)/.developed
	$(BIN)/python -m benchmarks.clients $(CLIENTS)

# Warnings are errors: a dead link, a page that no menu leads to, a docstring that cannot be read.
docs: $(VENV)/.documented
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open build/site/index.html"

pictures: $(VENV)/.developed
	$(BIN)/python docs/pictures/draw.py
	$(BIN)/python docs/pictures/take.py

clean:
	rm -rf $(VENV) $(PEERS) .venv-compat .coverage* build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis node_modules

$(BIOME):
	npm install --silent --no-save --no-package-lock --no-audit --no-fund --prefix . @biomejs/biome@2.6.7

# torch comes first and by itself, so that the package's own `torch>=2.6` finds it there.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch, this may take minutes"
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

# timm alone: it asks for torchvision, which asks for a torch of one version, and models do not need it.
$(VENV)/.developed: $(VENV)/.installed shims/torchgpipe/pyproject.toml shims/dftracer/pyproject.toml shims/nvdlfw_inspect/pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]" \
		--editable shims/torchgpipe --editable shims/dftracer --editable shims/nvdlfw_inspect
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps timm
	touch $@

$(VENV)/.documented: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[docs]"
	touch $@

# torchgpipe is sdist-only and builds with the setuptools of its day.
$(PEERS)/.installed:
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check "setuptools<81" wheel numpy
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation torchgpipe==0.0.7
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check dftracer==2.2.0 viztracer==1.1.1 nvdlfw-inspect==0.2.2
	touch $@
