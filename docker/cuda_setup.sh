#!/usr/bin/env bash
# Sets up the image of docker/cuda.Dockerfile: Python, the core with its device code, and torch with CUDA and NCCL.
# usage: docker/cuda_setup.sh [--print]   --print: only prints the commands
set -euo pipefail
cd "$(dirname "$0")/.."

run() {
    if [ "${print:-}" = 1 ]; then
        printf '%s\n' "$*"
    else
        "$@"
    fi
}
print=0
[ "${1:-}" != --print ] || print=1

run apt-get update
run apt-get install -y --no-install-recommends python3 python3-venv ca-certificates
run tools/setup_env.sh run
# If the set-up installed a torch for CPUs, the same version from PyPI brings CUDA and NCCL.
if [ "$print" = 1 ] || ! .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
    version=$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("torch").partition("+")[0])' 2>/dev/null || echo VERSION)
    run .venv/bin/pip uninstall -y torch
    run .venv/bin/pip install --no-cache-dir "torch==$version"
fi
run apt-get clean
