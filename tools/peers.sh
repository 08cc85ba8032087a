#!/usr/bin/env bash
# Installs the programs that the benchmark compares with, as far as they are available, and names missing ones.
# usage: tools/peers.sh      as root: uses apt-get; APT=0: does not
#        tools/peers.sh --probe   only prints Debian's names of missing packages; fails if there are any
#   HOROVOD=0   do not build Horovod (takes some minutes, once)
#   ONECCL=0    do not download oneCCL (50 MB)
set -euo pipefail
cd "$(dirname "$0")/.."

missing() {
    command -v mpirun >/dev/null || echo openmpi-bin
    command -v mpicc >/dev/null && echo '#include <mpi.h>' | mpicc -E -x c /dev/stdin >/dev/null 2>&1 || echo libopenmpi-dev
    command -v iperf3 >/dev/null || echo iperf3
    PATH=$PATH:/usr/sbin:/sbin command -v tc >/dev/null || echo iproute2
}

packages=$(missing | xargs)
if [ "${1:-}" = --probe ]; then
    [ -z "$packages" ] || echo "$packages"
    [ -z "$packages" ]
    exit
fi
if [ -n "$packages" ] && [ "${APT:-1}" != 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    mkdir -p build
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q >build/peers.log 2>&1 || true
    for package in $packages; do
        apt-get install -y -q --no-install-recommends "$package" >>build/peers.log 2>&1 || true
    done
fi
for package in $(missing); do
    echo "peers: $package is missing (Debian's name): what needs it is left out"
done

# MPICH comes as a wheel, in .venv. Horovod's last release requires C++14, but torch's headers need a later standard: it is
# built from its source with that line changed, over Gloo and, if Open MPI's headers are installed, over MPI, in a separate
# folder that only the benchmark uses.
venv=.venv
quietly() { mkdir -p build && "$@" >>build/peers.log 2>&1 </dev/null; }
pip() { quietly "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
horovod=0.28.1
place=build/peers/horovod

# PATH without .venv/bin, which has MPICH's compilers.
elsewhere() { env PATH="$(tr : '\n' <<<"$PATH" | grep -vxF "$PWD/$venv/bin" | paste -sd :)" "$@"; }
open_mpi() { elsewhere sh -c 'mpicxx --showme:version' 2>/dev/null | grep -q 'Open MPI'; }
over_mpi() { grep -qs 'libmpi\.so\.40' $place/horovod/torch/mpi_lib_v2*.so; }
horovod_done() { [ -d $place ] && { over_mpi || ! open_mpi; }; }

build_horovod() {
    local work tool mpi=HOROVOD_WITHOUT_MPI=1
    open_mpi && mpi=HOROVOD_WITH_MPI=1
    for tool in cmake c++ make; do
        command -v "$tool" >/dev/null || { echo "$tool is not installed"; return 1; }
    done
    "$venv/bin/python" -c 'import torch' 2>/dev/null || { echo "torch is not installed"; return 1; }
    echo "peers: building Horovod $horovod from its source, which takes some minutes" >&2
    work=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$work'" RETURN
    pip download --no-deps --no-build-isolation --no-binary :all: -d "$work" "horovod==$horovod" &&
        tar -xzf "$work/horovod-$horovod.tar.gz" -C "$work" &&
        sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' \
            "$work/horovod-$horovod/CMakeLists.txt" "$work/horovod-$horovod/horovod/torch/CMakeLists.txt" &&
        quietly elsewhere env -C "$work/horovod-$horovod" HOROVOD_WITH_GLOO=1 "$mpi" HOROVOD_WITH_PYTORCH=1 \
            HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 MAKEFLAGS="-j$(nproc)" \
            "$PWD/$venv/bin/python" setup.py -q bdist_wheel -d "$work/wheel" &&
        pip install -q --no-deps --target "$work/made" "$work"/wheel/*.whl cloudpickle &&
        mkdir -p "$(dirname $place)" && rm -rf $place && mv "$work/made" $place ||
        { echo "it could not be built: build/peers.log"; return 1; }
}

# oneCCL's wheels, the last version that needs only libfabric, in a separate folder too.
oneccl=2021.14.1
ccl_place=build/peers/oneccl
fetch_oneccl() {
    rm -rf $ccl_place
    pip install -q --no-deps --ignore-installed --prefix $ccl_place "oneccl-cpu==$oneccl" "oneccl-cpu-devel==$oneccl"
}

if [ -x "$venv/bin/python" ]; then
    if [ ! -f $ccl_place/lib/libccl.so ] && [ "${ONECCL:-1}" != 0 ]; then
        fetch_oneccl || echo "peers: oneCCL's wheels are missing: what needs them is left out"
    fi
    [ -x "$venv/bin/mpivars" ] || pip install -q mpich || echo "peers: the wheel mpich is missing: what needs it is left out"
    if [ "${HOROVOD:-1}" != 0 ] && ! horovod_done && ! "$venv/bin/python" -c 'import horovod.torch' 2>/dev/null; then
        if ! why=$(build_horovod); then
            echo "peers: Horovod could not be built ($why): what needs it is left out"
        elif ! over_mpi; then
            echo "peers: Open MPI's C++ compiler is missing (Debian: libopenmpi-dev): Horovod is built over Gloo alone"
        fi
    fi
fi
