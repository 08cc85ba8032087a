#!/usr/bin/env bash
# All static checks: format, clang-tidy, ruff, mypy, stub, lizard, file sizes, layers, binary, docs. All of them run; the last line
# names those that failed.
set -uo pipefail
cd "$(dirname "$0")/.."

bin=$PWD/.venv/bin
failed=()

check() {
    local name=$1
    shift
    printf '%s\n' "-- $name"
    "$@" </dev/null || failed+=("$name")
}

python_files() { find python tests tools benchmarks docs setup.py -name '*.py' -print 2>/dev/null; }
c_format() { find csrc tests/c tests/cuda tests/nccl \( -name "*.[ch]" -o -name "*.[ch]pp" -o -name "*.cu" \) -print0 | xargs -0 -r "$bin/clang-format" --dry-run -Werror; }
ruff_format() { python_files | xargs -r "$bin/ruff" format -q --check; }
ruff_check() { python_files | xargs -r "$bin/ruff" check -q; }
# ruff checks the number of parameters of Python functions, because Horovod's signatures are longer than our limit.
# The types of the C module against the built module. Alone, because it would read the whole package otherwise.
stub() {
    local alone=build/lint/stub
    mkdir -p $alone/netbottleneck && : >$alone/netbottleneck/__init__.pyi &&
        cp python/netbottleneck/_core.pyi $alone/netbottleneck/ &&
        MYPYPATH=$alone PYTHONPATH=python "$bin/stubtest" --concise netbottleneck._core
}
lizard_c() { "$bin/lizard" -w -l c -L 60 -C 15 -a 6 -W tools/lizard_allow.txt csrc; }
lizard_python() { "$bin/lizard" -w -l python -L 60 -C 15 python; }

check clang-format c_format
check clang-tidy "$bin/python" tools/tidy.py
check ruff ruff_check
check ruff-format ruff_format
check mypy "$bin/mypy"
check stub stub
check lizard-c lizard_c
check lizard-python lizard_python
check sizes "$bin/python" tools/check_size.py
check layers "$bin/python" tools/check_layers.py
check binary "$bin/python" tools/check_binary.py
check docs env PYTHON="$bin/python" tools/docs.sh

if [ ${#failed[@]} -gt 0 ]; then
    echo "lint: failed: ${failed[*]}"
    exit 1
fi
echo "lint: ok"
