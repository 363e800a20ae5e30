# Ring to DDP. `make lab` is all a learner needs; every target first makes .venv ready (tools/prepare.py).
# Works with GNU make 3.81, and in a folder whose path has spaces: paths here are relative, and console scripts
# are started as modules.
.DEFAULT_GOAL := help
.PHONY: help lab test notebooks exercises bench html lint clean ready

export PYTHON
unexport PYTHONPATH PYTHONHOME
# Each of the many processes would compile the course anew.
unexport PYTHONDONTWRITEBYTECODE
RUN = PATH="$$(pwd)/.venv/bin:$$PATH" exec .venv/bin/python
THREADS = OMP_NUM_THREADS=1

help:
	@echo 'make lab        open the course in JupyterLab (installs it first)     LAB_ARGS=--no-browser'
	@echo 'make test       run all tests                                         TEST_ARGS="-k setup"'
	@echo 'make notebooks  make notebooks/, solutions/, exercises/ from source/'
	@echo 'make exercises  only exercises/ and the solutions they come from'
	@echo 'make html       the executed course as pages to read: html/index.html'
	@echo 'make bench      how fast a cell becomes four ranks, next to torchrun'
	@echo 'make lint       check format and style                                make lint FIX=1 mends them'
	@echo 'make clean      remove what was made here: .venv, html, artifacts, runs, caches'
	@echo
	@echo 'PYTHON=/path/to/python3.12 chooses the Python for .venv.'

ready:
	@for p in "$$PYTHON" python3 python3.13 python3.12 python3.11 python; do \
	  if [ -n "$$p" ] && "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null; then \
	    exec "$$p" tools/prepare.py; \
	  fi; \
	done; \
	echo 'Python 3.11, 3.12 or 3.13 is needed, and none was found: get one from python.org, your package' \
	  'manager or conda.' >&2; exit 1

lab: ready
	@$(RUN) -m jupyterlab --ServerApp.root_dir=. --ServerApp.ip=127.0.0.1 \
	  --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(LAB_ARGS)

test: ready
	@$(THREADS) $(RUN) -m pytest -n 3 --no-loadscope-reorder $(TEST_ARGS)

notebooks: ready
	@$(RUN) -m tools.notebooks

exercises: ready
	@$(RUN) -m tools.notebooks --only solutions exercises

html: ready
	@$(THREADS) $(RUN) -m tools.html

bench: ready
	@$(RUN) -m course_lib.cli bench launch

lint: ready
	@.venv/bin/python -m ruff check $(if $(FIX),--fix) .
	@.venv/bin/python -m ruff format $(if $(FIX),,--check) .

clean:
	rm -rf .venv html artifacts runs .ruff_cache ring_to_ddp.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
