#!/usr/bin/env bash
# Builds the documentation into build/docs. Broken links and all other warnings are errors.
#   PYTHON=.venv/bin/python   the Python that has requirements/dev.txt
set -euo pipefail
cd "$(dirname "$0")/.."

exec "${PYTHON:-.venv/bin/python}" -m sphinx -n -W --keep-going -q -b html -d build/doctrees docs build/docs
