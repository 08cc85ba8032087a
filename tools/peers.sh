#!/usr/bin/env bash
# Installs the programs that the benchmark stands beside, as far as they can be had here, and says what is missing.
# usage: tools/peers.sh      with root: apt-get; APT=0: install nothing
set -euo pipefail
cd "$(dirname "$0")/.."

missing() {
    command -v mpirun >/dev/null || echo openmpi-bin
    command -v mpicc >/dev/null && echo '#include <mpi.h>' | mpicc -E -x c /dev/stdin >/dev/null 2>&1 || echo libopenmpi-dev
    command -v iperf3 >/dev/null || echo iperf3
    PATH=$PATH:/usr/sbin:/sbin command -v tc >/dev/null || echo iproute2
}

packages=$(missing | xargs)
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
