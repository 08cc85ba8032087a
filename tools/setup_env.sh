#!/usr/bin/env bash
# Sets up a clone: system packages, .venv, pinned requirements, torch, libfabric's headers, the C build.
# usage: tools/setup_env.sh [run|dev|ci]   run: for make study and make build; dev: for tests and checks too (default);
#                                          ci: for the other parts of .ci/run (mpirun, iperf3, clang with libFuzzer,
#                                          valgrind, another CPU)
#        tools/setup_env.sh --packages     only prints Debian's names of packages that the levels run and dev may install
#   APT=0           install no system packages
#   PYTHON=python3  the Python that .venv is made from
# Quick if nothing has changed: each part leaves a stamp with a hash of its inputs.
set -euo pipefail
cd "$(dirname "$0")/.."

level=${1:-dev}
packages=$level
case $level in
    run | dev) ;;
    ci) level=dev ;;
    --packages) ;;
    *) echo "usage: tools/setup_env.sh [run|dev|ci|--packages]" >&2; exit 2 ;;
esac

venv=.venv
stamps=build/stamps
log=build/setup.log
torch_least=2.3

fact() { printf 'set-up: %s\n' "$*"; }
fail() {
    printf 'set-up: %s\n' "$*" >&2
    exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }

# Runs a command with its output in build/setup.log; on failure, shows the lines that mention errors, or the last lines.
quietly() {
    local from
    from=$(($(wc -l <"$log") + 1))
    if ! "$@" >>"$log" 2>&1 </dev/null; then
        {
            tail -n "+$from" "$log" | grep -E '(error|ERROR|E):' | head -n 15 || tail -n 15 "$log"
            echo "complete output: $log"
        } >&2
        return 1
    fi
}

hash_of() { { readlink -f $venv/bin/python; find "$@" -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum; } | sha256sum | cut -d' ' -f1; }
is_done() { [ -f "$stamps/$1" ] && [ "$(cat "$stamps/$1")" = "$2" ]; }
is_made() { printf '%s\n' "$2" >"$stamps/$1"; }

find_python() {
    local name
    for name in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11; do
        if have "$name" && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    return 1
}

# Debian's names of the packages that a level may install: needed for a build; useful for a run or a test. The level ci also
# installs the programs that .ci/run compares with (tools/peers.sh installs them for a user), fuzzes with, checks memory with
# and emulates with.
needed=(gcc libc6-dev make python3 python3-venv python3-dev)
useful=(iproute2 libfabric-dev g++)

# True if a package of these lists, or its replacement, is missing.
lacks() {
    case $1 in
        # shellcheck disable=SC2086 # CC may have several words, such as "ccache gcc"
        gcc) ! have ${CC:-gcc} ;;
        # shellcheck disable=SC2086
        libc6-dev) ! have ${CC:-gcc} || ! echo '#include <stdio.h>' | ${CC:-gcc} -E - >/dev/null 2>&1 ;;
        make) ! have make ;;
        python3) [ -z "$python" ] ;;
        python3-venv) [ -z "$python" ] || { [ ! -x $venv/bin/python ] && ! "$python" -c 'import ensurepip, venv' 2>/dev/null; } ;;
        python3-dev)
            [ -z "$python" ] || ! [ -f "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]
            ;;
        g++) ! have g++ ;;
        iproute2) ! have_in_sbin ip || ! have_in_sbin tc ;;
        libfabric-dev) [ -z "$(fabric_headers)" ] || ! ldconfig_knows libfabric.so.1 ;;
        *) fail "no test for the package $1" ;;
    esac
}
have_in_sbin() { (PATH=$PATH:/usr/sbin:/sbin && have "$1"); }
missing_of() {
    local package
    for package in "$@"; do
        ! lacks "$package" || echo "$package"
    done
}
missing_needed() { missing_of "${needed[@]}"; }
missing_useful() {
    missing_of "${useful[@]}"
    [ "$packages" = ci ] || return 0
    tools/peers.sh --probe || true
    tools/fuzz.sh --probe >/dev/null || echo clang "$(clang_runtime)"
    tools/cross.sh --probe || true
    have valgrind || echo valgrind
}
# libFuzzer has its own package, named after the version of the package clang.
clang_runtime() {
    local version
    version=$(apt-cache depends clang 2>/dev/null | sed -n 's/.*Depends: clang-\([0-9][0-9]*\)$/\1/p' | head -n 1)
    echo "libclang-rt-${version:-14}-dev"
}
ldconfig_knows() { { ldconfig -p 2>/dev/null || /sbin/ldconfig -p 2>/dev/null || true; } | grep -q -F "$1"; }
fabric_headers() {
    local place places=(/usr/include /usr/local/include build/libfabric/usr/include)
    [ -z "${NETBOTTLENECK_LIBFABRIC_INCLUDE:-}" ] || places=("$NETBOTTLENECK_LIBFABRIC_INCLUDE")
    for place in "${places[@]}"; do
        if [ -f "$place/rdma/fabric.h" ]; then
            echo "$place"
            return
        fi
    done
}

nvcc_here() { command -v "${NVCC-nvcc}" || { [ -z "${NVCC+set}" ] && command -v /usr/local/cuda/bin/nvcc; } || true; }

words() { tr ' ' '\n' | sort -u | xargs; }

system_packages() {
    local missing lacking
    missing=$({ missing_needed; missing_useful; } | words)
    [ -n "$missing" ] || return 0
    if [ "${APT:-1}" = 0 ]; then
        fact "missing: $missing (APT=0: not installed)"
    elif ! have apt-get; then
        fact "missing, and no apt-get here: $missing (Debian's names)"
    elif [ "$(id -u)" != 0 ]; then
        fact "missing: $missing. With root: apt-get install $missing"
    else
        fact "installing with apt-get: $missing"
        export DEBIAN_FRONTEND=noninteractive
        quietly apt-get update -q || fact "apt-get update failed: going on with the lists that are here"
        missing=$({ missing_needed; missing_useful; } | words) # the new lists may know other names
        # If installing all at once fails, install one by one, so that an unavailable package does not affect the others.
        # shellcheck disable=SC2086
        if ! quietly apt-get install -y -q --no-install-recommends $missing; then
            local package
            for package in $missing; do
                quietly apt-get install -y -q --no-install-recommends "$package" || fact "not installed: $package"
            done
        fi
    fi
    [ -n "$python" ] || python=$(find_python) || python=
    lacking=$(missing_needed | words)
    [ -z "$lacking" ] || fail "cannot go on without: $lacking"
    lacking=$(missing_useful | words)
    case " $lacking " in *" iproute2 "*) fact "without iproute2 the lab runs on loopback, without caps" ;; esac
    case " $lacking " in *openmpi* | *" iperf3 "*) fact "without Open MPI and iperf3 the tests that need peers fail in CI" ;; esac
    case " $lacking " in *" clang "*) fact "without clang and its libFuzzer the fuzzing fails" ;; esac
    case " $lacking " in *" valgrind "*) fact "without valgrind make sanitize fails in CI" ;; esac
    case " $lacking " in *arm64* | *aarch64* | *qemu*) fact "without a compiler and an emulator for aarch64 make cross fails" ;; esac
}

# Only the headers, without root: enough to build, because the library is loaded at run time.
libfabric_headers() {
    [ -z "$(fabric_headers)" ] || return 0
    if [ "${APT:-1}" != 0 ] && have apt-get && have dpkg; then
        local where=build/libfabric
        rm -rf $where
        mkdir -p $where
        if (cd $where && quietly_here apt-get download libfabric-dev && dpkg -x libfabric-dev_*.deb . && rm -f ./*.deb); then
            fact "libfabric's headers unpacked into $where"
            ldconfig_knows libfabric.so.1 || fact "libfabric1 is missing: ofi is built, and will not load until it is there"
            return 0
        fi
    fi
    fact "ofi left out: install libfabric-dev"
}
quietly_here() { "$@" >/dev/null 2>&1 </dev/null; }

virtual_environment() {
    if [ -x $venv/bin/python ] && $venv/bin/python -c 'import pip' 2>/dev/null; then return 0; fi
    rm -rf $venv $stamps/*
    if ! quietly "$python" -m venv $venv; then
        rm -rf $venv
        fail "$python cannot make $venv: install python3-venv"
    fi
    fact "$venv made from $("$python" -V)"
}

requirements() {
    local hash
    hash=$(hash_of requirements)
    if is_done requirements-dev "$hash" || is_done "requirements-$level" "$hash"; then return 0; fi
    fact "installing requirements/$level.txt"
    quietly $venv/bin/python -m pip install -q --disable-pip-version-check --no-input \
        -c requirements/constraints.txt -r "requirements/$level.txt" || fail "pip could not install requirements/$level.txt"
    is_made "requirements-$level" "$hash"
}

# Prints the folder from which a Python imports torch, if torch is new enough, without importing it.
torch_folder() {
    "$1" - "$torch_least" <<'PY' 2>/dev/null
import importlib.metadata, importlib.util, pathlib, sys
found = importlib.util.find_spec("torch")
version = importlib.metadata.version("torch") if found and found.origin else "0"
least = [int(part) for part in sys.argv[1].split(".")]
if [int(part) for part in version.split("+")[0].split(".")[:2]] < least:
    sys.exit(1)
print(pathlib.Path(found.origin).parent.parent, version)
PY
}

torch() {
    local found base link
    if found=$(torch_folder $venv/bin/python); then return 0; fi
    link=$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch_of_base.pth
    base=$("$venv/bin/python" -c 'import sys; print(*sys.version_info[:2])')
    if found=$(torch_folder "$python") && [ "$("$python" -c 'import sys; print(*sys.version_info[:2])')" = "$base" ]; then
        printf '%s\n' "${found% *}" >"$link"
        fact "torch ${found##* } is there already: $venv uses it"
        return 0
    fi
    fact "installing $(grep -v '^#' requirements/torch.txt)"
    quietly $venv/bin/python -m pip install -q --disable-pip-version-check --no-input \
        -c requirements/constraints.txt -r requirements/torch.txt ||
        fact "torch could not be installed: what needs no torch works (bench, report)"
}

# The editable install runs once; later calls compile only changed files.
c_build() {
    local setup hash
    setup=$(hash_of setup.py pyproject.toml python/netbottleneck/_version.py)-$PWD # a copy has its own
    hash=$setup-$(hash_of tools/cbuild.py csrc)-$(fabric_headers)-$(nvcc_here)-${CC:-}
    if is_done build "$hash" && [ -f python/netbottleneck/_core.abi3.so ]; then return 0; fi
    export NETBOTTLENECK_WERROR=${NETBOTTLENECK_WERROR-1}
    if is_done editable "$setup" && $venv/bin/python -c 'import importlib.metadata as m; m.version("netbottleneck")' 2>/dev/null; then
        quietly $venv/bin/python setup.py -q build_ext --inplace || fail "the C core does not build: see above"
    else
        quietly $venv/bin/python -m pip install -q --disable-pip-version-check --no-input --no-build-isolation --no-deps -e . ||
            fail "the C core does not build: see above"
        is_made editable "$setup"
    fi
    $venv/bin/python -c 'import netbottleneck._core' || fail "the C core was built and does not load"
    is_made build "$hash"
    fact "C core built$([ -n "$(fabric_headers)" ] && echo ", with ofi" || echo "; ofi left out: install libfabric-dev")"
}

if [ "$level" = --packages ]; then
    printf '%s\n' "${needed[@]}" "${useful[@]}"
    exit
fi
mkdir -p "$stamps"
: >"$log"
python=$(find_python) || python=
system_packages
libfabric_headers
virtual_environment
requirements
torch
c_build
fact "ready: $($venv/bin/python -V), torch $($venv/bin/python -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || echo none), $venv"
