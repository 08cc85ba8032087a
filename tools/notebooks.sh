#!/usr/bin/env bash
# Executes every notebook of benchmarks/notebooks into build/notebooks. --store: in its place, to store the outputs of this machine;
# what names the machine is removed.
set -euo pipefail
cd "$(dirname "$0")/.."

target=build/notebooks
[ "${1:-}" = --store ] && target=benchmarks/notebooks
mkdir -p "$target"
for notebook in benchmarks/notebooks/*.ipynb; do
    echo "$notebook"
    .venv/bin/python - "$notebook" "$target" <<'PY'
import pathlib
import sys

import nbclient
import nbformat

path, target = map(pathlib.Path, sys.argv[1:])
book = nbformat.read(path, as_version=4)
options = {"timeout": 300, "kernel_name": "python3", "record_timing": False, "coalesce_streams": True}
nbclient.NotebookClient(book, resources={"metadata": {"path": str(path.parent)}}, **options).execute()
book.metadata["language_info"] = {"name": "python"}  # without the version of this machine's Python
for output in (output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs):
    if len(output.get("data", {})) > 1:
        del output.data["text/plain"]  # the fallback of a table or a picture names objects of this process
    if "text" in output:
        output.text = output.text.replace(f"{pathlib.Path.cwd()}/", "")
nbformat.write(book, target / path.name)
PY
done
