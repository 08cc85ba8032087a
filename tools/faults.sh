#!/usr/bin/env bash
# Runs the faults matrix of tests/faults. Arguments go to tests/faults/run.py.
# usage: tools/faults.sh [ARGUMENT…]
set -euo pipefail
cd "$(dirname "$0")/.."

[ -x .venv/bin/python ] || {
    echo "faults: no .venv here: run 'make setup' first" >&2
    exit 1
}
exec .venv/bin/python tests/faults/run.py "$@"
