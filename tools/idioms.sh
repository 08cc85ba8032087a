#!/usr/bin/env bash
# Tests the comparison, then runs the idioms of tests/idioms, by default with .venv's torch. Arguments go to
# tests/idioms/run.py.
# usage: [TORCH=2.x.y] tools/idioms.sh [ARGUMENT…]
#   TORCH   a version of torch, in a separate environment .venv-torch-2.x.y, which is created if it is missing. Except for
#           version 2.13, torch's wheels include CUDA's libraries: 3 GB to download, 6 GB on disk. No GPU is needed.
set -euo pipefail
cd "$(dirname "$0")/.."

fact() { printf 'idioms: %s\n' "$1" >&2; }
fail() {
    fact "$1"
    exit 1
}

# torch before 2.3 was built for numpy 1.
numpy_for() {
    case $1 in
    2.[0-2].*) echo 'numpy<2' ;;
    *) echo numpy ;;
    esac
}

environment() {
    local version=$1 where=$2
    if [ -x "$where/bin/python" ] && "$where/bin/python" -c 'import torch' 2>/dev/null; then return 0; fi
    fact "making $where with torch $version"
    rm -rf "$where"
    .venv/bin/python -m venv "$where" || fail "cannot make $where: install python3-venv"
    echo '*' >"$where/.gitignore"
    "$where/bin/python" -m pip install -q --disable-pip-version-check --no-input \
        "torch==$version" "$(numpy_for "$version")" cloudpickle Jinja2 psutil rich ||
        fail "TORCH=$version: pip could not install it; 'pip index versions torch' lists what there is"
}

[ -x .venv/bin/python ] || fail "no .venv here: run 'make setup' first"
python=.venv/bin/python
if [ -n "${TORCH:-}" ]; then
    [[ $TORCH =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || fail "TORCH=$TORCH: must be a version such as 2.4.1"
    python=.venv-torch-$TORCH/bin/python
    environment "$TORCH" "${python%/bin/python}"
fi
fact "torch $($python -c 'import torch; print(torch.__version__)')"
.venv/bin/python -m pytest -q -p no:xdist tests/idioms/test_compare.py || fail "the comparison itself fails its tests"
exec "$python" tests/idioms/run.py "$@"
