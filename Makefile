# `make demo` and `make test` install everything that they need into .venv, on a
# machine with Python 3.11, pip, make and gcc; CI runs `make check` and
# `make test-easydel`.

.PHONY: demo demo-multihost test check static lint types contract breaking docs \
        newest wheel-test deploy-test bench soak release audit matrix test-easydel sweep-easydel test-gcs format proto lock clean

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EASYDEL_VENV := build/easydel/venv
CONTRACT := proto/storesvc_proto

# The first one that runs: the shim of a version manager may have no Python behind it.
PYTHON = $(firstword $(foreach name,python3.11 python3,$(shell $(name) -c \
  'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
pip = $(PYTHON) -m pip --python $(1)/bin/python

# A caller's settings must not affect the virtual environments. Without bytecode, each
# process of the tests would compile all that it imports.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE PIP_USER PIP_TARGET PIP_PREFIX
export PIP_DISABLE_PIP_VERSION_CHECK := 1

demo: $(INSTALLED)
	$(BIN)/storectl demo

# Four processes, an emulated bucket, two servers: two minutes.
demo-multihost: $(INSTALLED)
	$(BIN)/python -m tests.demo.multihost

# All but what is marked as slow, with a fifth of Hypothesis's examples, newly drawn each
# time; `make soak` tries all. Three at a time, since much of it waits.
test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses=3 -m "not slow"

# Each test runs once, if not in `make soak` only; the README's command is the last.
check: static wheel-test deploy-test test

# Runs no tests of the code.
static: lint types contract breaking docs

# --- Setting up ---------------------------------------------------------------

$(VENV)/.locked: requirements/dev.lock
$(EASYDEL_VENV)/.locked: requirements/easydel.lock

# Recreated when the lock changes, so that no package stays that it no longer names.
# pip runs from outside, because Debian's Python creates environments without it.
$(VENV)/.locked $(EASYDEL_VENV)/.locked: SHELL := /bin/bash
$(VENV)/.locked $(EASYDEL_VENV)/.locked: .SHELLFLAGS := -o pipefail -c
$(VENV)/.locked $(EASYDEL_VENV)/.locked:
	@test -n "$(PYTHON)" || { echo "storesvc needs Python 3.11 or newer: no" \
	  "python3.11 and no such python3 is on the PATH." >&2; exit 1; }
	@echo "Installing the pinned dependencies into $(@D): once, about 700 MB, two to" \
	  "five minutes."
	@$(PYTHON) -m venv --clear --without-pip $(@D)
	@$(call pip,$(@D)) install --no-deps --require-hashes -r $< | awk \
	  -v total="$$(grep -c == $<)" -v name="$(@D)" '{ line = "" } \
	  /^(Collecting|Processing)/ && ++count % 20 == 0 { line = count " of " total " packages found" } \
	  /^Installing/ { line = "all downloaded; installing them takes a minute" } \
	  line { print "  " name ": " line; fflush() }'
	@touch $@

# Only the tests of tables of models need torch: transformers is their oracle. It is no
# part of the lock, since each platform has another build of it, and takes half a minute.
$(EASYDEL_VENV)/.torch: $(EASYDEL_VENV)/.locked
	@$(call pip,$(@D)) install --quiet torch==2.13.0
	@touch $@

$(EASYDEL_VENV)/.installed: $(EASYDEL_VENV)/.torch
$(INSTALLED) $(EASYDEL_VENV)/.installed: %/.installed: %/.locked pyproject.toml
	@$(call pip,$*) install --quiet --no-deps --no-build-isolation --editable .
	@echo "  $*: installed"
	@touch $@

# The environment of `make wheel-test`.
newest: $(INSTALLED)
	@$(BIN)/python -m tests.release.matrix install newest

# --- Checking -----------------------------------------------------------------

lint: $(INSTALLED)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports --no-logo

types: $(INSTALLED)
	$(BIN)/mypy

contract: $(INSTALLED)
	$(BIN)/buf lint proto
	@rm -rf build/contract && mkdir -p build/contract
	@proto/generate.sh build/contract $(CURDIR)/$(BIN)/python 2>build/contract.log \
	  || { cat build/contract.log >&2; exit 1; }
	@diff -r -x __init__.py -x py.typed -x __pycache__ \
	  build/contract/storesvc_proto $(CONTRACT) \
	  || { echo "$(CONTRACT) is not what proto/storesvc says: run 'make proto'." >&2; \
	       exit 1; }

# Against the last release: anything unreleased may still change.
breaking: $(INSTALLED)
	@tag=$$(git describe --tags --abbrev=0 2>/dev/null) || { \
	  echo "No release is tagged yet: nothing for the contract to break."; exit 0; }; \
	rm -rf build/released && mkdir -p build/released \
	&& git archive "$$tag" proto | tar -x -C build/released \
	&& $(BIN)/buf breaking proto --against build/released/proto

# The documentation site, as files in build/docs. A link that leads nowhere, a page that
# is not in the navigation, an error reason without a remedy, and a word whose page a
# search does not find fail.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	$(BIN)/python -m pytest --numprocesses=0 --quiet tests/repo/test_search.py

# Runs the slow tests, but not the sweeps of `make soak`, against the wheel that users
# install, with the newest releases of all dependencies for the newest Python of this
# machine, and from a folder without the sources, so that no path leads back to the
# checkout. The wheel must have the same files as the checkout, which `make test` tests.
wheel-test: $(INSTALLED)
	$(BIN)/python -m tests.release.matrix slow newest

# All of a release but the tag and the upload, in build/release/dist: sdist, wheel, their
# checksums, an SBOM, and the statement of what they were built from. URL is the address of
# the repository, of the remote "origin" by default.
#   make release URL=https://HOST/OWNER/NAME
RELEASE_VENV := build/release/venv
$(RELEASE_VENV)/.installed: requirements/release.lock $(INSTALLED)
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(@D)
	@$(BIN)/uv pip install --quiet --python $(@D)/bin/python --require-hashes -r $<
	@touch $@

release: $(RELEASE_VENV)/.installed
	@git diff --quiet HEAD || { echo "make release needs a checkout without changes:" \
	  "commit them first." >&2; exit 1; }
	@rm -rf build/release/dist
	@$(RELEASE_VENV)/bin/python -m tests.release.artefacts build/release/dist $(URL)

# Looks up the locked dependencies of the images in the database of vulnerabilities.
audit: $(RELEASE_VENV)/.installed
	@$(RELEASE_VENV)/bin/python -m tests.release.audit requirements/server.lock requirements/training.lock

# The quick suite in each supported environment: see tests/release/matrix.py.
matrix: $(INSTALLED)
	$(BIN)/python -m tests.release.matrix $(ROWS)

# Checks deploy/ without a cluster and without an image registry: its files, their
# rendering by kubectl, and the install lines of the image, for which pip needs its
# package index.
deploy-test: $(INSTALLED)
	@command -v kubectl >/dev/null || { echo "make deploy-test needs kubectl, for its" \
	  "kustomize: install Debian's kubernetes-client, or any newer one." >&2; exit 1; }
	@command -v promtool >/dev/null || { echo "make deploy-test needs Prometheus:" \
	  "install Debian's prometheus, or any newer one." >&2; exit 1; }
	$(BIN)/yamllint --strict --config-file deploy/.yamllint.yaml deploy
	$(BIN)/hadolint deploy/Dockerfile
	$(BIN)/python -m pytest --override-ini addopts=--import-mode=importlib \
	  --numprocesses=2 tests/deploy

# Compares with Orbax and others: every benchmark on tmpfs, lm on disk too, in two
# hours. `python -m benchmarks NAME` runs one. EasyDeL takes part if
# `make test-easydel` has created its environment, torch if it is installed.
bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.scale --assert
	$(BIN)/python -m benchmarks.speed

# Faults of a machine at every point of a store's work: an hour, as root for the parts
# that mount a disk. SOAK names parts; by default, all run, after the cases and examples
# of tests of which `make check` runs some.
soak: $(INSTALLED)
	$(if $(SOAK),,STORESVC_SUITE=full $(BIN)/python -m pytest --numprocesses=3 \
	  -m "soak or hypothesis")
	$(BIN)/python -m soak $(SOAK)

# With the real easydel, the jax and flax that it pins, and the oldest releases of all else
# that pyproject.toml and easydel allow: first the quick tests of easydel's states and
# helpers, then the tests of other code that works on jax's objects or depends much on the
# versions of packages. Importing easydel changes a process (flags of jax, the recursion
# limit), so each half runs in its own process. Of the files of the second half that work on
# jax's objects, one in SHARE runs, newly drawn each time: `make test` has run them all.
#   make test-easydel SHARE=1
test-easydel: EASYDEL_PYTEST := $(EASYDEL_VENV)/bin/python -m pytest --numprocesses=3
test-easydel: USES_JAX := (import|from) (jax|flax|optax)|storesvc_client\.(_pytree|trees|easydel)
test-easydel: ON_JAX := $(addprefix tests/,client loop orbax pytree restore save trees)
test-easydel: ON_VERSIONS := $(addprefix tests/,export storage)
test-easydel: SHARE := 3
test-easydel: $(EASYDEL_VENV)/.installed
	$(EASYDEL_PYTEST) -m "not slow" tests/easydel
	$(EASYDEL_PYTEST) -m "not slow" $(ON_VERSIONS) \
	  $$(grep -rlE --include='test_*.py' '^ *$(USES_JAX)' $(ON_JAX) | \
	    awk 'BEGIN { srand() } { print rand(), $$0 }' | sort | \
	    awk 'NR % $(SHARE) == 1 % $(SHARE) { print $$2 }')

# The slow tests of EasyDeL's states, then every class of its registry, saved by one process
# and restored by its class in another, on another mesh: half an hour. CI takes a class of
# each sixth task.
#   make sweep-easydel CLASSES=Llama
sweep-easydel: $(EASYDEL_VENV)/.installed
	$(if $(CLASSES),,$(EASYDEL_VENV)/bin/python -m pytest -m slow tests/easydel)
	XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu \
	  $(EASYDEL_VENV)/bin/python -W ignore -m tests.easydel.sweep '$(CLASSES)'

# Stores in a real bucket instead of the emulator, below a prefix of their own that is
# deleted at the end, with Application Default Credentials. Costs some cents and takes
# ten minutes.
#   make test-gcs BUCKET=gs://my-bucket
test-gcs: $(INSTALLED)
	@test -n "$(BUCKET)" || { echo "expected a bucket to work in, got none: make" \
	  "test-gcs BUCKET=gs://my-bucket" >&2; exit 1; }
	STORESVC_TEST_BUCKET=$(BUCKET) $(BIN)/python -m pytest -n 0 -o timeout=1800 \
	  -o faulthandler_timeout=0 tests/storage/test_bucket.py \
	  tests/storage/test_gcs_store.py tests/server/test_store_model.py -k "Gcs or gcs"

# --- Changing -----------------------------------------------------------------

format: $(INSTALLED)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

proto: $(INSTALLED)
	@rm -f $(CONTRACT)/v1/*_pb2*
	proto/generate.sh proto $(CURDIR)/$(BIN)/python

# Keeps every pin that still fits; delete a lock first to renew all of its pins.
LOCKS := dev wheel server training release
LOCK_dev := pyproject.toml --all-extras --group dev
# Locks of the images in deploy/: at the versions that the tests run with.
TESTED_PINS := --constraint requirements/dev.lock
LOCK_wheel := --group wheel $(TESTED_PINS)
LOCK_release := --group release
LOCK_server := pyproject.toml --extra server --extra auth --extra otel --extra gcs --extra s3 $(TESTED_PINS)
LOCK_training := $(LOCK_server) --extra jax
lock:
	@test -x $(BIN)/uv || { echo "Run 'make test' first: it installs uv." >&2; exit 1; }
	@$(foreach lock,$(LOCKS),$(BIN)/uv pip compile $(LOCK_$(lock)) \
	  --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	  --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links \
	  --custom-compile-command "make lock" --quiet \
	  --output-file requirements/$(lock).lock &&) true
	@$(BIN)/python -m tests.release.matrix lock easydel-3.11

clean:
	rm -rf build $(VENV) .*_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
