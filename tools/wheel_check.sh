#!/usr/bin/env bash
# Builds a wheel from a source distribution of this tree and installs it in a clean environment outside it, as a user does:
# the study, the report and a notebook must run there. Every other Python here must load its C module. Everything is in a temporary folder (below TMPDIR), which is removed at the end.
set -euo pipefail
cd "$(dirname "$0")/.."

root=$PWD
dev=$root/.venv/bin
place=$(mktemp -d "${TMPDIR:-/tmp}/netbottleneck wheel.XXXXXX") # the space is meant
trap 'rm -rf "$place"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# step NAME COMMAND…: shows a command's output only if it fails. Inside such a function errexit is off: chain with &&.
step() {
    local name=$1 began=$SECONDS
    shift
    if ! "$@" >"$place/log" 2>&1 </dev/null; then
        cat "$place/log"
        echo "FAIL $name: $*"
        echo "0 passed, 1 failed"
        exit 1
    fi
    echo "PASS $name ($((SECONDS - began)) s)"
}

# The headers that a set-up without root unpacks are not in the distribution.
build() {
    local fabric=${NETBOTTLENECK_LIBFABRIC_INCLUDE-$("$dev/python" tools/cbuild.py ofi)}
    "$dev/python" setup.py -q sdist -d "$place/sdist" &&
        NETBOTTLENECK_LIBFABRIC_INCLUDE=$fabric NETBOTTLENECK_WERROR=${NETBOTTLENECK_WERROR-1} "$dev/python" -m pip wheel -q \
            --no-input --no-deps --no-build-isolation -w "$place/wheel" "$place"/sdist/*.tar.gz
}

# The wheel must have every file of the package, and no other file of the tree. The source distribution must not have the
# Makefile, as it has none of the scripts that the targets call.
contents() {
    "$dev/python" - "$wheel" "$place"/sdist/*.tar.gz <<'PY'
import pathlib
import sys
import tarfile
import zipfile

wheel = pathlib.Path(sys.argv[1])
assert "-cp311-abi3-" in wheel.name, wheel.name
package = pathlib.Path("python")
left_out = {".pyc", ".new"}
tree = {p.relative_to(package).as_posix() for p in (package / "netbottleneck").rglob("*") if p.is_file()}
tree = {name for name in tree if pathlib.PurePath(name).suffix not in left_out}
packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
assert tree == packed, f"missing: {sorted(tree - packed)}; not of this tree: {sorted(packed - tree)}"
assert any(name.endswith(".dist-info/licenses/LICENSE") for name in zipfile.ZipFile(wheel).namelist())
sources = {name.partition("/")[2] for name in tarfile.open(sys.argv[2]).getnames()}
assert "tools/cbuild.py" in sources
assert "Makefile" not in sources
PY
}

install() {
    "$dev/python" -m venv "$place/venv" &&
        "$place/venv/bin/python" -m pip install -q --no-compile --disable-pip-version-check --no-input -c requirements/constraints.txt \
            -r requirements/torch.txt "$wheel[study,notebook]"
}

# From here on the tree is out of reach: another folder, another home, no variables of ours or Python's.
outside() {
    local name unset=(-u PYTHONPATH -u PYTHONHOME -u VIRTUAL_ENV)
    for name in $(compgen -v NETBOTTLENECK_ || true); do unset+=(-u "$name"); done
    (cd "$place/home" && env "${unset[@]}" HOME="$place/home" PATH="$place/venv/bin:$PATH" "$@")
}

is_ours() {
    outside python - "$place/venv" <<'PY'
import sys

import netbottleneck
from netbottleneck import _core

for module in (netbottleneck, _core):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
assert "ofi" in _core.transports(), _core.transports()
PY
}

# Each other Python from 3.11 on that is installed here, without the packages that the rest needs.
other_pythons() {
    local python
    mkdir "$place/unpacked" && "$dev/python" -m zipfile -e "$wheel" "$place/unpacked" || return 1
    for python in python3.{11..19}; do
        "$python" -V || continue # pyenv has commands for Pythons that are not chosen
        "$python" - "$place/unpacked/netbottleneck" <<'PY' || return 1
import sys
import types

package = types.ModuleType("netbottleneck")  # without __init__.py, which needs NumPy
package.__path__ = sys.argv[1:]
sys.modules["netbottleneck"] = package

from netbottleneck import _core

assert _core.now_ns() > 0 and "tcp" in _core.transports()
PY
    done
}

study() {
    local short=(--ranks 2 --networks 2gbit/500mbit --rounds 2)
    outside netbottleneck study --quick "${short[@]}" --directory "$place/study"
}

# The report of each run of the study, again, from its folder.
report() {
    local run
    outside python - "$place/study" >"$place/runs" <<'PY' || return 1
import json
import pathlib
import sys

folder = pathlib.Path(sys.argv[1])
study = json.loads((folder / "study.json").read_text())
assert not study.get("failure"), study["failure"]
assert {job["job"] for job in study["jobs"]} == {"digits", "replay", "inflation"}, study["jobs"]
assert (folder / "report.html").exists() and len(list((folder / "figures").glob("*.svg"))) == 8
for job in study["jobs"]:
    assert {"stock", "ofi"} <= set(job["steps"]), job["steps"]
    if job["job"] != "inflation":
        print(folder / job["folder"])
PY
    while read -r run; do
        outside netbottleneck report "$run" >"$place/report" || return 1
        grep -q '^Verdict: ' "$place/report" && grep -q ' ofi ' "$place/report" || { cat "$place/report" && return 1; }
    done <"$place/runs"
}

notebook() {
    cp benchmarks/notebooks/00_*.ipynb "$place/home/" && outside python - <<'PY'
import pathlib
import sys

import nbclient
import nbformat

(path,) = pathlib.Path().glob("*.ipynb")
book = nbformat.read(path, as_version=4)
book.cells.insert(0, nbformat.v4.new_code_cell("import netbottleneck; print(netbottleneck.__file__)"))
nbclient.NotebookClient(book, timeout=100, kernel_name="python3").execute()
outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
assert outputs[0].text.startswith(sys.prefix), outputs[0].text
shown = [kind for output in outputs for kind in output.get("data", {})]
assert shown.count("image/png") == 1 and shown.count("text/html") == 1, shown
PY
}

mkdir "$place/wheel" "$place/home"
step "build" build
wheel=$(echo "$place"/wheel/*.whl)
step "contents of $(basename "$wheel")" contents
step "abi3audit" "$dev/abi3audit" --strict --assume-minimum-abi3 3.11 "$wheel"
step "load with every Python" other_pythons
step "install, with study and notebook" install
step "import, with ofi" is_ours
step "study --quick" study
step "report" report
step "notebook" notebook
echo "9 passed, 0 failed"
