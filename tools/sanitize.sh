#!/usr/bin/env bash
# Runs the C tests under the address and undefined-behaviour sanitizers, then under the thread sanitizer, then the fuzzers
# briefly. Without clang the fuzzers are skipped with a message; in CI that is a failure.
set -uo pipefail
cd "$(dirname "$0")/.."

failed=0
for flavour in asan tsan; do
    .venv/bin/python tools/ctest.py --flavour "$flavour" || failed=1
done
fuzzed=0
tools/fuzz.sh 12 || fuzzed=$?
[ "$fuzzed" = 0 ] || { [ "$fuzzed" = 77 ] && [ -z "${CI:-}" ]; } || failed=1
exit $failed
