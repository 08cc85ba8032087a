#!/usr/bin/env bash
# Fuzzes the parsers of peer data: each tests/c/fuzz/fuzz_*.c for SECONDS (20), one on each processor, from the inputs in
# tests/c/fuzz/corpus/NAME and those of earlier runs.
# usage: fuzz.sh [SECONDS] [NAME]     exit code 77: clang or its libFuzzer is not installed
#        fuzz.sh --probe              only checks whether they are installed
#        fuzz.sh --keep [NAME]        rebuilds the corpora: the fewest inputs that reach the same code
set -uo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-20}
only=${2:-}
folder=build/fuzz
corpora=tests/c/fuzz/corpus
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
    echo "not fuzzed: clang with libFuzzer is not installed (Debian: clang libclang-rt-14-dev)"
    exit 77
fi
[ "$seconds" != --probe ] || exit 0

mapfile -t flags < <("$python" tools/cbuild.py flags | grep -v '^-W')
mapfile -t sources < <("$python" tools/cbuild.py sources)
flags+=('-D__builtin_cpu_supports(feature)=0') # clang 14 does not know every name; no kernel is fuzzed
sanitize=(-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined)

jobs=$(nproc)

# parallel FUNCTION ARGUMENT…: calls the function once for each argument, in as many processes as there are processors.
parallel() {
    local call=$1 argument running=0 failed=0
    shift
    for argument; do
        if [ "$running" -lt "$jobs" ]; then running=$((running + 1)); else wait -n || failed=1; fi
        "$call" "$argument" &
    done
    for ((; running > 0; running--)); do wait -n || failed=1; done
    return $failed
}

object_of() { echo "$folder/${1//\//_}.o"; }
compile() { "$clang" "${flags[@]}" "${sanitize[@]}" -fsanitize=fuzzer-no-link -c "$1" -o "$(object_of "$1")"; }

build() {
    local objects=() source
    parallel compile "${sources[@]}" || return 1
    for source in "${sources[@]}"; do objects+=("$(object_of "$source")"); done
    rm -f "$folder/core.a"
    ar rcs "$folder/core.a" "${objects[@]}"
}

keep() {
    local name=$1 kept=$folder/kept/$1
    rm -rf "$kept"
    mkdir -p "$kept"
    "$folder/$name" -set_cover_merge=1 -max_len=512 "$kept" "$corpora/$name" "$folder/found/$name" >"$folder/$name.log" 2>&1 || return 1
    rm -rf "${corpora:?}/$name"
    mv "$kept" "$corpora/$name"
    echo "PASS $name: $(find "$corpora/$name" -type f | wc -l) inputs, $(du -sb "$corpora/$name" | cut -f1) bytes"
}

fuzz() {
    local name=$1 log=$folder/$1.log
    local wrapped=()
    [ "$name" != fuzz_ofi ] || wrapped=(-Wl,--wrap=nb_ofi_lib_open) # it has a libfabric of its own
    "$clang" "${flags[@]}" "${sanitize[@]}" -fsanitize=fuzzer "tests/c/fuzz/$name.c" "$folder/core.a" -o "$folder/$name" \
        "${wrapped[@]}" -pthread -ldl -lm || return 1
    mkdir -p "$folder/found/$name"
    [ "$seconds" != --keep ] || { keep "$name"; return; }
    # Limits: 10 s per input (hang), 2 GiB (leak). A peer may request more memory than available: malloc returns NULL.
    if ASAN_OPTIONS=allocator_may_return_null=1:max_allocation_size_mb=256 "$folder/$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=4096 -verbosity=1 \
        -artifact_prefix="$folder/" "$folder/found/$name" "$corpora/$name" >"$log" 2>&1 </dev/null; then
        echo "PASS $name: $(grep -o 'Done [0-9]* runs' "$log")"
        return 0
    fi
    tail -40 "$log"
    echo "FAIL $name (see $log)"
    return 1
}

build || exit 1
names=()
for source in tests/c/fuzz/fuzz_*.c; do
    name=$(basename "$source" .c)
    [ -n "$only" ] && [ "$only" != "$name" ] || names+=("$name")
done
parallel fuzz "${names[@]}" | tee "$folder/outcomes"
passed=$(grep -c '^PASS ' "$folder/outcomes")
failed=$((${#names[@]} - passed))
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
