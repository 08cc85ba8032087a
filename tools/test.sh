#!/usr/bin/env bash
# Runs tests. All requested groups run, even if one fails.
# usage: tools/test.sh              all tests but the full matrices: C, then Python
#        tools/test.sh full         all tests and the full matrices
#        tools/test.sh matrices     only the full matrices, and the C tests with many seeds
#        tools/test.sh peers        the tests that need peers (tools/peers.sh), frameworks (requirements/frameworks.txt)
#                                   or NCCL's own library (requirements/nccl.txt)
set -uo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
failed=0
run() { "$@" </dev/null || failed=1; }
seeds() { run $python tools/ctest.py --filter test_cuda_engine --seeds 1000; }
# The files of tests are shared out among processes: much of a test is waiting.
tests() { run $python -m pytest -q --numprocesses auto --maxprocesses 4 --dist loadfile "$@"; }
files_of() { grep -l "mark\.$1" tests/py/test_*.py; } # others have no test with this mark
# Programs that launch ranks themselves run one after another.
marked() { mapfile -t files < <(files_of "$1") && run $python -m pytest -q --only "$1" "${files[@]}"; }

# Installs requirements/NAME.txt in build/NAME: in .venv it would change other tests, as by other versions of packages.
apart() {
    local place=build/$1 file=requirements/$1.txt
    cmp -s "$file" "$place/installed" && return
    rm -rf "$place"
    if ! $python -m pip install -q --disable-pip-version-check --no-input --no-deps --target "$place" -r "$file" \
        >"$place.log" 2>&1; then
        tail -n 15 "$place.log"
        return 1
    fi
    cp "$file" "$place/installed"
}

case ${1:-} in
    "") run $python tools/ctest.py && tests tests/py ;;
    full) run $python tools/ctest.py && seeds && tests --full tests/py ;;
    matrices) seeds && mapfile -t files < <(files_of full) && tests --only full "${files[@]}" ;;
    peers)
        run env HOROVOD="${HOROVOD:-0}" tools/peers.sh
        marked peers
        for name in frameworks nccl; do
            run apart $name
            PYTHONPATH=$PWD/build/$name marked $name
        done
        ;;
    *) echo "usage: tools/test.sh [full|matrices|peers]" >&2; exit 2 ;;
esac
exit $failed
