# One toolkit from recipe to running job. Each target is one call of the command line.
TARGET ?= cpu-mamba
SQSHFORGE := .venv/bin/sqshforge
SET ?=
PLATFORM ?=
# Read by the commands themselves.
export ENGINE OFFLINE MAX_JOBS
# Read by the tests of fresh systems and of images.
export SYSTEMS USERS IMAGES
settings = $(foreach one,$(SET),--set '$(subst ','\'',$(one))') $(platform)
platform = $(if $(PLATFORM),--platform '$(PLATFORM)')

.DEFAULT_GOAL := help
.PHONY: help quickstart dev try check test test-without-processes test-toolkit test-training test-root test-enroot test-cluster test-distros test-torch22 test-composer test-composer-image test-xla test-images test-stages test-arm image sqsh smoke-test lock constraints vendor lint launchers reference docs bench doctor clean setup setup-test

help:  ## list the targets, one per line
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-19s %s\n", $$1, $$2}' Makefile

quickstart:  ## fresh machine: set up, build cpu-mamba, pack it, smoke-test it
	@since=$$(date +%s) && ./setup.sh quickstart && $(SQSHFORGE) quickstart --since $$since

dev:  ## set up only .venv, with torch, linters and this checkout; installs no packages but python3-venv, certificates
	@./setup.sh dev

try: dev  ## train a tiny model from the working tree, without an image: FLAGS="--num_steps=100"
	@rm -rf build/try
	@.venv/bin/python -m training.mamba_fsdp --model_name=mamba-tiny --seq_length=128 --batch_size=8 \
	    --num_steps=20 --report_interval=5 --learning_rate=3e-3 --save_ckpt_path=build/try \
	    --dataset_path="text:training/**/*.py" $(FLAGS)

check: dev  ## lint, types, and the fast tests that start no process: two minutes
	@# In parallel, because each leaves processors idle for a while.
	@$(MAKE) --no-print-directory -j 2 lint test-without-processes

test-without-processes: dev
	.venv/bin/pytest -n 2 --dist worksteal -m 'not processes and not slow'

test: setup-test  ## fresh machine: set up and run all tests except the heavy ones
	@# The second half also runs if the first has failures.
	@$(MAKE) --no-print-directory test-toolkit; first=$$?; \
	$(MAKE) --no-print-directory test-training && exit $$first

test-toolkit: setup-test  ## the first half of make test: sqshforge, the launchers, docs and benchmarks
	.venv/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore=tests/training

test-training: setup-test  ## the second half of make test: training
	.venv/bin/pytest -n 3 --dist worksteal tests/training

test-root:  ## as root: run the tests that make test leaves out for ordinary users
	@[ -x .venv/bin/pytest ] || { echo "error: .venv is missing; make test makes it" >&2; exit 3; }
	@# Files that root writes here are given to the owner of the checkout.
	.venv/bin/python -m pytest -m root -n 2 --dist loadfile --no-loadscope-reorder; \
	code=$$?; find . -user root -exec chown -h --reference=Makefile {} +; exit $$code

test-enroot: setup-test  ## run the tests that need the real enroot, which must be on the PATH
	.venv/bin/python -m pytest -m enroot tests tests/cluster

test-cluster: setup-test  ## run every launcher on a real Slurm of two nodes, with nodes lost, networks cut, disks filled
	@./setup.sh composer
	.venv/bin/pytest -n 2 --dist worksteal tests/cluster

test-distros: setup-test  ## try the first commands on fresh Debian and Ubuntu systems (SYSTEMS="debian-13 ...", USERS="root user")
	.venv/bin/python -m pytest -v tests/distros

test-torch22:  ## run the tests of training/ on torch 2.2.2, in .venv22; reports what is left out
	@./setup.sh torch22
	.venv22/bin/python -m pytest -p tests.support.without_library --without=transformers -n 3 --dist worksteal tests/training

test-composer:  ## run the tests of training.mamba_composer on Composer and its torch, in .venvcomposer
	@./setup.sh composer
	.venvcomposer/bin/python -m pytest -n 2 --dist loadfile tests/composer

test-composer-image:  ## run the same on the versions of the composer-mamba image, in .venvcomposer-image
	@./setup.sh composer-image
	.venvcomposer-image/bin/python -m pytest -n 2 --dist loadfile tests/composer

test-xla:  ## run the Neuron backend on torch-xla's CPU device, in .venvxla
	@./setup.sh xla
	.venvxla/bin/python -m pytest -n 2 tests/xla

test-images: setup-test  ## build, pack and try the heavy targets on stand-ins for vendors' base images (IMAGES="llama-fsdp cuda13-mamba")
	.venv/bin/pytest tests/images$(if $(IMAGES),/test_targets.py)

test-stages: setup-test  ## as root: run each build step that needs a vendor's server, with dummies for its files
	.venv/bin/python -m pytest tests/stages

test-arm: setup-test  ## as root: build, pack and try cpu-mamba for Arm, emulated by qemu-user-static
	.venv/bin/pytest -s tests/arm

image: setup  ## build TARGET's image (ENGINE=docker|buildah, OFFLINE=1, SET="NAME=VALUE", PLATFORM=linux/arm64)
	@$(SQSHFORGE) build '$(TARGET)' $(settings)

sqsh: setup  ## pack TARGET to build/TARGET.sqsh, building first if needed
	@$(SQSHFORGE) pack '$(TARGET)' $(settings)

smoke-test: setup  ## test TARGET's image from inside
	@$(SQSHFORGE) smoke-test '$(TARGET)' $(settings)

lock: setup  ## resolve the pins of every recipe again, or only TARGET's
	@$(SQSHFORGE) lock $(if $(filter file,$(origin TARGET)),,'$(TARGET)') $(platform)

constraints: setup  ## resolve again the versions of the packages in .venv and the other environments
	@.venv/bin/python -m sqshforge.venv lock

vendor: setup  ## collect everything that building TARGET needs, for OFFLINE=1
	@$(SQSHFORGE) vendor '$(TARGET)' $(settings)

lint: dev  ## ruff, mypy, import rules, shellcheck, hadolint, the lists of hot files
	.venv/bin/ruff check . && .venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo --no-cache
	.venv/bin/shellcheck setup.sh .ci/run docs/start/*.sh launch/*.sbatch sqshforge/run/*.conf
	.venv/bin/pytest -q tests/toolkit/build/test_dockerfile.py -k hadolint
	@# Whether the lists of hot files still match the images in build/.
	@for list in recipes/hot/*.txt; do \
	    image=build/$$(basename $$list .txt).sqsh; \
	    if [ -e $$image ]; then $(SQSHFORGE) trace $$image --list $$list --check || exit; \
	    else echo "$$list: not checked, as $$image is not there"; fi; \
	done

launchers: dev  ## write launch/*.sbatch from launch/template/
	.venv/bin/python -m sqshforge.launchers

reference: dev  ## write the pages of docs/reference/ that are generated from the code
	.venv/bin/python -m reference

docs: dev  ## build the site of docs/ to build/site, strictly: a broken link fails
	@# Otherwise mkdocs-material prints a warning about its successor.
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

bench: setup-test  ## after make sqsh, as root on a quiet machine: measure what must be fast; writes benchmarks/results/
	.venv/bin/python -m benchmarks

doctor:  ## report what is missing on this machine and how to fix it; installs nothing
	@./setup.sh doctor

clean:  ## remove build/ (images stay in their engine)
	rm -rf build

setup:
	@./setup.sh quickstart

setup-test:
	@./setup.sh test
