#!/usr/bin/env bash
# All tests: C, then Python. With --full the full matrices too. Both run even where the first fails.
set -uo pipefail
cd "$(dirname "$0")/.."

pytest_args=()
if [ "${1:-}" = --full ]; then
    pytest_args=(--full -o faulthandler_timeout=360)
fi
failed=0
.venv/bin/python tools/ctest.py || failed=1
.venv/bin/python -m pytest -q tests/py "${pytest_args[@]}" </dev/null || failed=1
exit $failed
