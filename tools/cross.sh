#!/usr/bin/env bash
# Compiles the C core for aarch64, with warnings as errors, and runs the C tests of kernels, schedules, lanes and the
# trace under qemu. Fails and names missing packages if it cannot.
# usage: cross.sh             build and test
#        cross.sh --probe     only prints Debian's names of missing packages; fails if there are any
set -uo pipefail
cd "$(dirname "$0")/.."

system=aarch64-linux-gnu
folder=build/cross
tests=(test_reduce test_ring_schedule test_lanes test_trace_ring)

# Prints Debian's names of missing packages. A compiler without headers or an emulator that does not run counts as missing.
missing() {
    local emulator
    emulator=$(command -v qemu-aarch64 || command -v qemu-aarch64-static) || echo qemu-user
    command -v $system-gcc >/dev/null || echo gcc-aarch64-linux-gnu
    mkdir -p "$folder"
    printf '#include <stdio.h>\nint main(void) {\n    return puts("") < 0;\n}\n' >"$folder/probe.c"
    if ! $system-gcc "$folder/probe.c" -o "$folder/probe" 2>/dev/null; then
        echo libc6-dev-arm64-cross
    elif [ -n "$emulator" ] && ! "$emulator" -L /usr/$system "$folder/probe" >/dev/null 2>&1; then
        echo qemu-user
    fi
}

lacking=$(missing)
if [ "${1:-}" = --probe ]; then
    [ -z "$lacking" ] || echo "$lacking"
    [ -z "$lacking" ]
    exit
fi
if [ -n "$lacking" ]; then
    echo "not cross-built: missing: ${lacking//$'\n'/ } (Debian's names; tools/setup_env.sh ci installs them)"
    exit 1
fi
python=.venv/bin/python
[ -x "$python" ] || python=python3
failed=0
# Sources that no C test links: the extension module and the lab's shim.
mapfile -t flags < <("$python" tools/cbuild.py cross-flags)
for source in csrc/py/*.c csrc/lab/*.c; do
    $system-gcc "${flags[@]}" -O2 -fPIC -c "$source" -o "$folder/object.o" || failed=1
done
"$python" tools/ctest.py --flavour aarch64 --filter "${tests[@]}" || failed=1
exit $failed
