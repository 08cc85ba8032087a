#!/usr/bin/env bash
# The C tests under the address and undefined-behaviour sanitizers, then under the thread sanitizer.
set -uo pipefail
cd "$(dirname "$0")/.."

failed=0
for flavour in asan tsan; do
    .venv/bin/python tools/ctest.py --flavour "$flavour" || failed=1
done
exit $failed
