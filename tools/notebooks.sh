#!/usr/bin/env bash
# Executes every notebook of benchmarks/notebooks into build/notebooks.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p build/notebooks
for notebook in benchmarks/notebooks/*.ipynb; do
    echo "$notebook"
    .venv/bin/python - "$notebook" <<'PY'
import pathlib
import sys

import nbclient
import nbformat

path = pathlib.Path(sys.argv[1])
book = nbformat.read(path, as_version=4)
nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()
nbformat.write(book, pathlib.Path("build/notebooks") / path.name)
PY
done
