#!/usr/bin/env bash
# The C core for aarch64: built with every warning an error, then the C tests of kernels, schedules, lanes and the record,
# under qemu. Fails where something is missing for that, and names it.
# usage: cross.sh             build and test
#        cross.sh --probe     only prints Debian's names of what is missing; fails where something is
set -uo pipefail
cd "$(dirname "$0")/.."

system=aarch64-linux-gnu
folder=build/cross
tests=(test_reduce test_sched test_lanes test_ring)

missing() {
    local emulator=
    for name in qemu-aarch64 qemu-aarch64-static; do
        [ -n "$emulator" ] || ! command -v "$name" >/dev/null || emulator=$name
    done
    command -v $system-gcc >/dev/null || { echo gcc-aarch64-linux-gnu libc6-dev-arm64-cross; [ -n "$emulator" ] || echo qemu-user; return; }
    mkdir -p "$folder"
    printf '#include <math.h>\n#include <stdio.h>\nint main(int n, char **s) { return s[0] == 0 || puts("") < 0 || sin(n) == 2; }\n' \
        >"$folder/probe.c"
    $system-gcc "$folder/probe.c" -o "$folder/probe" -lm 2>/dev/null || { echo libc6-dev-arm64-cross; rm -f "$folder/probe"; }
    if [ -z "$emulator" ]; then
        echo qemu-user
    elif [ -f "$folder/probe" ] && ! "$emulator" -L /usr/$system "$folder/probe" >/dev/null; then
        echo qemu-user
    fi
}

lacking=$(missing | xargs)
if [ "${1:-}" = --probe ]; then
    [ -z "$lacking" ] || echo "$lacking"
    [ -z "$lacking" ]
    exit
fi
if [ -n "$lacking" ]; then
    echo "not cross-built: missing: $lacking (Debian's names; tools/setup_env.sh ci installs them)"
    exit 1
fi
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" tools/ctest.py --flavour aarch64 --filter "${tests[@]}"
