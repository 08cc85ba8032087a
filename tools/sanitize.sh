#!/usr/bin/env bash
# Runs the C tests under the address and undefined-behaviour sanitizers, then under the thread sanitizer, those of the NCCL
# plugins under valgrind, then the fuzzers briefly. Without valgrind or clang these are skipped with a message; in CI that
# is a failure.
set -uo pipefail
cd "$(dirname "$0")/.."

failed=0
for flavour in asan tsan; do
    .venv/bin/python tools/ctest.py --flavour "$flavour" || failed=1
done
unless_skipped() {
    local code=0
    "$@" || code=$?
    [ "$code" = 0 ] || { [ "$code" = 77 ] && [ -z "${CI:-}" ]; } || failed=1
}
unless_skipped .venv/bin/python tools/ctest.py --flavour valgrind
unless_skipped tools/fuzz.sh 12
exit $failed
