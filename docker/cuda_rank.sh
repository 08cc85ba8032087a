#!/usr/bin/env bash
# One rank of docker/compose.yaml: a training with NCCL's events in the report. Any arguments replace the script.
# usage: docker/cuda_rank.sh [--print] [SCRIPT ARGUMENTS…]   --print: only prints the command and its environment
set -euo pipefail
cd "$(dirname "$0")/.."

print=0
if [ "${1:-}" = --print ]; then
    print=1
    shift
fi
for name in RANK WORLD_SIZE MASTER_ADDR MASTER_PORT; do
    if [ -z "${!name:-}" ]; then
        echo "cuda_rank: $name is not set: start the ranks with docker compose -f docker/compose.yaml up" >&2
        exit 2
    fi
done
export LOCAL_RANK=${LOCAL_RANK:-0}
# Each container is a host of its own to NCCL, also where several share a GPU: all messages go over the network.
export NCCL_HOSTID=${NCCL_HOSTID:-rank$RANK}
export NETBOTTLENECK=1
export NETBOTTLENECK_NCCL_EVENTS=${NETBOTTLENECK_NCCL_EVENTS:-1}
export NETBOTTLENECK_DIR=${NETBOTTLENECK_DIR:-/runs/cuda}
[ $# -gt 0 ] || set -- benchmarks/examples/cuda_ddp.py
if [ "$print" = 1 ]; then
    printf '%s\n' "RANK=$RANK WORLD_SIZE=$WORLD_SIZE NCCL_HOSTID=$NCCL_HOSTID .venv/bin/python $*"
    exit 0
fi
exec .venv/bin/python "$@"
