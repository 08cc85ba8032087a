"""Compares the torch.distributed backend "nb" with gloo, alternating in the same processes.

Starts the ranks itself, on this machine. Each row is a ratio of medians over the blocks of the slowest rank, with a
95 % interval by the paired bootstrap; above 1, nb takes less time.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BACKENDS = ("nb", "gloo")
Step = Callable[[], None]


def mlp(width: int, depth: int) -> torch.nn.Module:
    layers = [module for _ in range(depth) for module in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers)


def training_step(model: Any, width: int) -> Step:
    """Return a step of SGD on one random batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(16, width)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def ddp_step(group: Any, width: int, depth: int) -> Step:
    torch.manual_seed(1)
    return training_step(DistributedDataParallel(mlp(width, depth), process_group=group), width)


def fsdp_step(group: Any, width: int, depth: int) -> Step:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = mlp(width, depth)
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return training_step(model, width)


def sum_step(group: Any, count: int) -> Step:
    value = torch.ones(count)
    return lambda: dist.all_reduce(value, dist.ReduceOp.MAX, group=group)


def gather_step(group: Any, count: int) -> Step:
    mine = torch.ones(count)
    line = torch.zeros(count * dist.get_world_size())
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    return lambda: gather(line, mine, group=group)


def message_step(group: Any, count: int) -> Step:
    value = torch.ones(count)

    def step() -> None:
        if dist.get_rank() < 2:
            for sender in (0, 1):
                (dist.send if dist.get_rank() == sender else dist.recv)(value, 1 - dist.get_rank(), group=group)

    return step


CASES: dict[str, tuple[Callable[[Any], Step], int]] = {  # the step, and steps per block
    "DDP step, MLP 3 x 128 (0.2 MB)": (lambda group: ddp_step(group, 128, 3), 40),
    "DDP step, MLP 4 x 512 (4.2 MB)": (lambda group: ddp_step(group, 512, 4), 10),
    "DDP step, MLP 4 x 1536 (38 MB)": (lambda group: ddp_step(group, 1536, 4), 2),
    "FSDP2 step, MLP 4 x 512": (lambda group: fsdp_step(group, 512, 4), 5),
    "all_reduce 4 B": (lambda group: sum_step(group, 1), 200),
    "all_reduce 256 KiB": (lambda group: sum_step(group, 1 << 16), 40),
    "all_reduce 16 MiB": (lambda group: sum_step(group, 1 << 22), 2),
    "all_gather_single 256 KiB": (lambda group: gather_step(group, 1 << 16), 40),
    "send and receive back 4 B": (lambda group: message_step(group, 1), 100),
    "send and receive back 4 MiB": (lambda group: message_step(group, 1 << 20), 5),
}


def rank_main(only: str, blocks: int) -> None:
    """Measure on one rank; rank 0 prints the seconds of a step by case and backend, one value per block."""
    import netbottleneck.torch  # noqa: F401

    dist.init_process_group("nb")
    groups = {"nb": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    found: dict[str, dict[str, list[float]]] = {}
    for name, (make, count) in CASES.items():
        if only not in name:
            continue
        steps = {backend: make(groups[backend]) for backend in BACKENDS}
        times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        for block in range(-2, blocks):
            for backend in BACKENDS[:: 1 if block % 2 else -1]:
                dist.barrier(groups["gloo"])
                began = time.perf_counter()
                for _ in range(count):
                    steps[backend]()
                times[backend].append((time.perf_counter() - began) / count)
        slowest = torch.tensor([times[backend][2:] for backend in BACKENDS], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=groups["gloo"])
        found[name] = dict(zip(BACKENDS, slowest.tolist(), strict=True))
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def started(ranks: int, arguments: list[str], shm: str) -> str:
    """Run the ranks; return the output of rank 0."""
    processes = []
    port = free_port()
    for rank in range(ranks):
        place = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        values = {**os.environ, "OMP_NUM_THREADS": "1", "NETBOTTLENECK_SHM": shm}
        values |= {name: str(value) for name, value in place.items()}
        command = [sys.executable, __file__, "--rank-of-it", *arguments]
        output = subprocess.PIPE if rank == 0 else None
        processes.append(subprocess.Popen(command, env=values, stdout=output, text=True))
    try:
        printed, _ = processes[0].communicate(timeout=280)
        codes = [process.wait(timeout=30) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise SystemExit(f"ranks exited with {codes}")
    return printed.splitlines()[-1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Return gloo's median over nb's, with its interval."""
    pairs = np.array([ours, theirs])
    picks = np.random.default_rng(1).integers(0, pairs.shape[1], (2000, pairs.shape[1]))
    medians = np.median(pairs[:, picks], axis=2)
    low, high = np.percentile(medians[1] / medians[0], [2.5, 97.5])
    return statistics.median(theirs) / statistics.median(ours), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--shm", default="auto", choices=("auto", "0"), help="0: ranks of one host use the network")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-of-it", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of_it:
        rank_main(args.only, args.blocks)
        return
    arguments = ["--only", args.only, "--blocks", str(args.blocks)]
    found = json.loads(started(args.ranks, arguments, args.shm))
    print(f"{args.ranks} ranks, one machine, shm={args.shm}, {args.blocks} blocks; ms a step, medians")
    print(f"{'':34}{'nb':>10}{'gloo':>10}   gloo / nb")
    for name, times in found.items():
        middle, low, high = ratio(times["nb"], times["gloo"])
        ours, theirs = (1e3 * statistics.median(times[backend]) for backend in BACKENDS)
        print(f"{name:34}{ours:10.3f}{theirs:10.3f}   {middle:.2f} ({low:.2f} to {high:.2f})")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
