#!/usr/bin/env bash
# Fuzzes what parses bytes of a peer: each tests/c/fuzz/fuzz_*.c for SECONDS (20), from seeds that this script makes.
# usage: fuzz.sh [SECONDS] [NAME]     77: clang or its libFuzzer is not there
#        fuzz.sh --probe              only says whether they are there
set -uo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-20}
only=${2:-}
folder=build/fuzz
python=.venv/bin/python
[ -x "$python" ] || python=python3

clang=${CLANG:-}
for name in clang clang-19 clang-18 clang-17 clang-16 clang-15 clang-14; do
    [ -n "$clang" ] || ! command -v "$name" >/dev/null || clang=$name
done
mkdir -p "$folder"
printf 'int LLVMFuzzerTestOneInput(const unsigned char *d, unsigned long n) { return (int)(d == 0 && n > 9); }\n' \
    >"$folder/probe.c"
if [ -z "$clang" ] || ! "$clang" -fsanitize=fuzzer,address "$folder/probe.c" -o "$folder/probe" 2>/dev/null; then
    echo "not fuzzed: clang with libFuzzer is not there (Debian: clang libclang-rt-14-dev)"
    exit 77
fi
[ "$seconds" != --probe ] || exit 0

mapfile -t flags < <("$python" tools/cbuild.py flags | grep -v '^-W')
mapfile -t sources < <("$python" tools/cbuild.py sources | grep -v -e csrc/py/ -e csrc/lab/)
flags+=('-D__builtin_cpu_supports(feature)=0') # clang 14 does not know every name; no kernel is fuzzed
sanitize=(-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined)

build() {
    local objects=() object source
    for source in "${sources[@]}"; do
        object=$folder/${source//\//_}.o
        objects+=("$object")
        "$clang" "${flags[@]}" "${sanitize[@]}" -fsanitize=fuzzer-no-link -c "$source" -o "$object" || return 1
    done
    rm -f "$folder/core.a"
    ar rcs "$folder/core.a" "${objects[@]}"
}

# Bytes as \x.. for printf: 8 zero bytes are "z 8".
z() { printf '\\x00%.0s' $(seq "$1"); }
seed() { printf "$3" >"$folder/seeds/$1/$2"; }

seeds() {
    mkdir -p "$folder"/seeds/{fuzz_control,fuzz_lanes,fuzz_bootstrap,fuzz_shm,fuzz_ofi}
    seed fuzz_control submit "\\x00\\x01\\x98\\x00\\x01$(z 151)"
    seed fuzz_control group "\\x00\\x10\\x0c\\x00\\x05$(z 3)\\x00$(z 3)\\x01$(z 3)"
    seed fuzz_control stand_in "\\x01\\x0f\\x98\\x00\\x77$(z 7)\\x40$(z 143)"
    seed fuzz_control mask "\\x00\\x02\\x08\\x00\\x01$(z 7)"
    seed fuzz_control ping "\\x00\\x05\\x08\\x00$(z 8)\\x09\\x00\\x00"
    seed fuzz_control go "\\x01\\x03\\x18\\x00\\x01$(z 7)\\x01$(z 7)\\x01$(z 7)"
    seed fuzz_control go_twice "\\x01\\x03\\x30\\x00\\x01$(z 7)\\x02$(z 15)\\x02$(z 7)\\x03$(z 15)"
    seed fuzz_control refuse "\\x01\\x04\\xe8\\x01\\x01$(z 487)"
    seed fuzz_control left "\\x01\\x0a\\x04\\x00\\x02$(z 3)\\x09\\x00\\x00"
    seed fuzz_control probe "\\x01\\x0b\\x18\\x00\\x01$(z 7)\\x01$(z 7)\\x00\\x10$(z 6)"
    seed fuzz_control notice "\\x01\\x0d\\x05\\x00hello"
    seed fuzz_control abort "\\x01\\x08\\xe8\\x01\\xfb\\xff\\xff\\xff$(z 484)"
    seed fuzz_lanes segment "\\x00\\x00\\x38\\x01$(z 3)\\x20$(z 3)\\x01$(z 7)\\x00$(z 3)\\x01\\x00$(z 2)$(z 32)"
    seed fuzz_lanes message "\\x00\\x00\\x1a\\x02$(z 3)\\x02$(z 19)ab"
    seed fuzz_lanes staged "\\x00\\x01\\x01\\x01\\x00\\x01\\x00\\x00\\x01\\x00\\x01\\x57$(z 2)\\x40$(z 3)\\x02$(z 7)\\x04$(z 3)\\x02$(z 67)"
    seed fuzz_lanes greeting "\\x41\\x00\\x1a\\x02$(z 3)\\x02$(z 19)ab"
    seed fuzz_lanes address "\\x02\\x0c$(z 7)127.0.0.1:1"
    seed fuzz_ofi region "\\x00\\x01\\x03\\x00\\x00\\x1e\\x00\\x01$(z 7)\\x77$(z 15)\\x07\\x00"
    seed fuzz_ofi grants "\\x01\\x02\\x03\\x00\\x00\\x2e\\x00\\x02\\x01$(z 6)\\x01$(z 15)\\x0c$(z 7)\\x01$(z 3)\\x07\\x00"
    seed fuzz_ofi arrivals "\\x00\\x03\\x03\\x00\\x03\\x00\\x05\\x04\\x00\\x03$(z 2)\\x02\\x09\\x00$(z 8)\\x07\\x00\\x01\\x04\\x00abcd"
    seed fuzz_ofi told "\\x01\\x00\\x03\\x00\\x03\\x00\\x00\\x11\\x01$(z 16)\\x06\\x01\\x02\\x07\\x00"
    seed fuzz_bootstrap raw "\\x00NBBOOT\\r\\n\\x01$(z 3)\\x01$(z 3)\\x02$(z 3)\\x05$(z 35)1/tcp$(z 251)"
    seed fuzz_bootstrap proves "\\x01\\x01$(z 3)\\x02$(z 3)\\x05$(z 3)1/tcp"
    seed fuzz_bootstrap guest "\\x02\\x00\\xfb\\xff\\xff\\xff$(z 36)why"
    seed fuzz_bootstrap gather "\\x03\\x01$(z 7)\\x18$(z 31)\\x02$(z 15)"
    seed fuzz_bootstrap gathered "\\x04\\x01$(z 7)\\x18$(z 55)\\x02$(z 15)"
    # Three operations; then slot and step of the peer's: a line as it should be, and its counters.
    seed fuzz_shm direct "\\x00$(z 3)\\x00\\x03\\x00\\x00\\x00\\x01\\x00\\x06\\x01\\x01\\x03\\x00\\x00\\x00\\x01\\x00\\x06\\x01"
    seed fuzz_shm staged "\\x00\\x08\\x09\\x18\\x00\\x04\\x00\\x00\\x01\\x00\\x0c\\x01\\x00\\x12\\x01\\x00\\x18\\x01\\x00\\x06\\x01"
    seed fuzz_shm slot "\\x00$(z 3)\\x00\\x02\\x01\\x01$(z 7)\\x00\\x10$(z 22)\\x00\\x00\\x01"
    seed fuzz_shm arena "\\x01\\x01\\x00\\x00\\x20\\x01\\x00$(z 16)\\xff\\x1f$(z 6)"
    seed fuzz_shm meeting "\\x02\\x00\\x02\\x06\\x03"
    seed fuzz_shm pipe "\\x03\\x01\\x10\\x00\\x00\\x00\\x08\\x00\\x00\\x0d\\x01\\xff$(z 7)"
    seed fuzz_bootstrap clock "\\x05\\x03$(z 15)\\x03$(z 15)"
}

fuzz() {
    local name=$1 log=$folder/$1.log
    local wrapped=()
    [ "$name" != fuzz_ofi ] || wrapped=(-Wl,--wrap=nb_ofi_lib_open) # it has a libfabric of its own
    "$clang" "${flags[@]}" "${sanitize[@]}" -fsanitize=fuzzer "tests/c/fuzz/$name.c" "$folder/core.a" -o "$folder/$name" \
        "${wrapped[@]}" -pthread -ldl -lm || return 1
    mkdir -p "$folder/found/$name" "$folder/seeds/$name"
    # Limits: a run of 10 s is a hang, 2 GiB are a leak. What a peer asks for may be more memory than there is: NULL.
    if ASAN_OPTIONS=allocator_may_return_null=1:max_allocation_size_mb=256 "$folder/$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=4096 -verbosity=1 \
        -artifact_prefix="$folder/" "$folder/found/$name" "$folder/seeds/$name" >"$log" 2>&1 </dev/null; then
        echo "PASS $name: $(grep -o 'Done [0-9]* runs' "$log")"
        return 0
    fi
    tail -40 "$log"
    echo "FAIL $name (see $log)"
    return 1
}

build || exit 1
seeds
passed=0
failed=0
for source in tests/c/fuzz/fuzz_*.c; do
    name=$(basename "$source" .c)
    [ -z "$only" ] || [ "$only" = "$name" ] || continue
    if fuzz "$name"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
