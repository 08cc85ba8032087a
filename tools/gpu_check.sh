#!/usr/bin/env bash
# Runs benchmarks/gpu_check.py with a Python whose torch has CUDA: PYTHON, else python3, else .venv's. Needs no network.
# Without one it runs .venv's, which says what is absent (exit code 77).
# usage: tools/gpu_check.sh [ARGUMENTS of gpu_check.py]
set -euo pipefail
cd "$(dirname "$0")/.."

has_cuda() { "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }

place=build/gpu_check
for python in ${PYTHON:-python3} .venv/bin/python; do
    has_cuda "$python" || continue
    if [ "$python" != .venv/bin/python ]; then
        wheel=$(find dist -name 'netbottleneck-*.whl' 2>/dev/null | sort | tail -n 1)
        echo "gpu-check: $("$python" --version), ${wheel:-built here} in $place"
        rm -rf "$place"
        "$python" -m pip install -q --disable-pip-version-check --no-input --no-index --no-deps --no-build-isolation \
            --target "$place" "${wheel:-.}"
        export PYTHONPATH=$PWD/$place${PYTHONPATH:+:$PYTHONPATH}
    fi
    exec "$python" benchmarks/gpu_check.py "$@"
done
exec "$([ -x .venv/bin/python ] && echo .venv/bin/python || echo "${PYTHON:-python3}")" benchmarks/gpu_check.py "$@"
