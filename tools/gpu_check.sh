#!/usr/bin/env bash
# Runs benchmarks/gpu_check.py with a Python whose torch has CUDA: PYTHON, else python3, else .venv's. Needs no network.
# Without one it runs .venv's, which says what is absent (exit code 77).
#
# For a Python other than .venv's it installs a wheel of these sources from dist/, else builds one here, which needs pip
# and setuptools 77 or later for that Python, and a C compiler. Without libfabric's headers that build has no ofi.
# usage: tools/gpu_check.sh [ARGUMENTS of gpu_check.py]
set -euo pipefail
cd "$(dirname "$0")/.."

has_cuda() { "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }

# Whether a wheel can be built without a network; says what is missing.
can_build() {
    "$1" -c 'import setuptools, sys; sys.exit(int(setuptools.__version__.split(".")[0]) < 77)' 2>/dev/null &&
        command -v ${CC:-gcc} >/dev/null && return # unquoted: CC may have several words
    echo "gpu-check: to build here, $1 needs setuptools 77 or later, and ${CC:-gcc} must be installed;" \
        "or build a wheel of these sources elsewhere (pip wheel --no-deps -w dist .) and put it into dist/" >&2
    return 1
}

# Whether the package's dependencies are there, as nothing is downloaded; says what is missing.
has_dependencies() {
    "$1" -c '
import importlib.util, re, sys, tomllib
with open("pyproject.toml", "rb") as file:
    needed = [re.match("[a-z0-9]+", each)[0] for each in tomllib.load(file)["project"]["dependencies"]]
if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
    sys.exit(f"gpu-check: {sys.executable} needs {chr(32).join(missing)}: pip install them there")'
}

place=build/gpu_check
for python in "${PYTHON:-python3}" .venv/bin/python; do
    has_cuda "$python" || continue
    has_dependencies "$python"
    if [ "$python" != .venv/bin/python ]; then
        if source=$("$python" tools/fresh_wheel.py); then
            export CHECKED_BUILD=${source##*/}
        else
            can_build "$python"
            source=.
            export CHECKED_BUILD="built here from source"
        fi
        echo "gpu-check: $("$python" --version), netbottleneck: $CHECKED_BUILD, in $place"
        rm -rf "$place"
        NETBOTTLENECK_ALLOW_NO_OFI=1 "$python" -m pip install -q --disable-pip-version-check --no-input --no-index \
            --no-deps --no-build-isolation --target "$place" "$source"
        export PYTHONPATH=$PWD/$place${PYTHONPATH:+:$PYTHONPATH}
    fi
    exec "$python" benchmarks/gpu_check.py "$@"
done
exec "$([ -x .venv/bin/python ] && echo .venv/bin/python || echo "${PYTHON:-python3}")" benchmarks/gpu_check.py "$@"
