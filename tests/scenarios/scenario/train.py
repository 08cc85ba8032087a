"""A training whose compute is sleep, with the causes that its arguments name: `train.py JSON`.

layers, kib, ms, steps: number of layers, their weights, their backward and the training. sizes: KiB of each layer,
instead. parts: tensors of so many KiB in each layer. bucket_kib: of DDP (a layer's). wrap: ddp, fsdp or horovod. spin:
compute is busy. core: of this machine, for all ranks. jitter: standard deviation of compute, as a part; even: all ranks
take the mean. input_ms, optimizer_ms, second_ms: before the forward, in the optimizer and in a second one. evaluate_ms,
save_ms: an evaluation and a checkpoint in each 10th step. accumulate: passes in a step. forward_mib: an all-reduce in
the forward. norm_kib: statistics of all ranks. Of rank slow_rank alone: sleep_ms in the backward, slower (a factor on
compute), late_input_ms, late_optimizer_ms. contention: a factor on compute while the host sends. counts: a folder for
what each rank counts in a step, in ms: begin (a moment), input (until the forward), slowed (by contention), ready (the
moment of its last gradient). uneven: how far input_ms and sleep_ms may be off in a step, as a part. learn: gradients
depend on the rank, the step and the weights. weights: a file for the hash of the weights at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import netbottleneck  # noqa: F401 - measures, as its variables say

OPTIONS: dict[str, Any] = json.loads(sys.argv[1])
RANK = int(os.environ["RANK"])
LEVEL = [1.0]
COUNTS: list[dict[str, float]] = [{}]
SLICE_MS = 1.0
# Bytes in a slice from which on a host sends: control messages are fewer.
SENDS_BYTES = 8192
SLOW = OPTIONS.get("slow_rank") == RANK
DRAW = torch.Generator().manual_seed(1000 * OPTIONS["seed"] + RANK)

UNEVEN = [1.0]


def own(name: str) -> float:
    """Return an option that is for the slow rank alone."""
    return OPTIONS.get(name, 0.0) if SLOW else 0.0


def levels() -> list[float]:
    """Return the factor on compute of each step: of this rank, or with `even` the mean over the ranks."""
    ranks = range(int(os.environ["WORLD_SIZE"])) if OPTIONS.get("even") else (RANK,)
    draws = [random.Random(f"{OPTIONS['seed']}/{rank}") for rank in ranks]
    jitter = OPTIONS.get("jitter", 0.0)
    drawn = ([max(0.1, 1 + jitter * draw.gauss(0, 1)) for draw in draws] for _ in range(OPTIONS["steps"]))
    return [sum(each) / len(each) for each in drawn]


def sent() -> int:
    """Return the bytes that this host has sent."""
    with open("/proc/thread-self/net/dev", encoding="ascii") as lines:
        found = [line.partition(":") for line in lines if ":" in line]
    return sum(int(values.split()[8]) for name, _, values in found if name.strip() != "lo")


def contended(ms: float, factor: float) -> None:
    """Take this time in slices, each of which is longer by this factor if the host sends."""
    until, before = time.perf_counter(), sent()
    while ms > 0:
        part_ms, ms = min(ms, SLICE_MS), ms - SLICE_MS
        until += part_ms / 1e3
        time.sleep(max(0.0, until - time.perf_counter()))
        now = sent()
        if now - before > SENDS_BYTES:
            more_ms = (factor - 1) * part_ms
            until += more_ms / 1e3
            COUNTS[-1]["slowed"] = COUNTS[-1].get("slowed", 0.0) + more_ms
        before = now
    time.sleep(max(0.0, until - time.perf_counter()))


def work(ms: float) -> None:
    """Take this time: asleep, or busy with `spin`."""
    if "contention" in OPTIONS:
        contended(ms * LEVEL[0], OPTIONS["contention"])
        return
    if not OPTIONS.get("spin"):
        time.sleep(ms * LEVEL[0] / 1e3)
        return
    until = time.thread_time() + ms * LEVEL[0] / 1e3
    while time.thread_time() < until:
        sum(range(100))


class Timed(torch.autograd.Function):
    """The identity, whose forward and backward take time."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, forward_ms: float, backward_ms: float) -> torch.Tensor:
        """Return the values after a while."""
        ctx.ms = backward_ms
        work(forward_ms)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient after a while."""
        work(ctx.ms)
        COUNTS[-1]["ready"] = time.time() * 1e3
        return gradient, None, None


class Layer(nn.Module):
    """Tensors of `kib` KiB in a layer that takes time."""

    def __init__(self, kib: int, ms: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(kib * 256) for _ in range(OPTIONS.get("parts", 1)))
        self.factors = torch.rand(kib * 256, generator=DRAW) if OPTIONS.get("learn") else 1.0
        self.ms = ms

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Add the mean of each tensor, with this rank's factors."""
        values = values + sum((weight * self.factors).mean() for weight in self.weights)
        return Timed.apply(values, self.ms / 2, self.ms + UNEVEN[0] * own("sleep_ms") / OPTIONS["layers"])


class Reduced(torch.autograd.Function):
    """The sum over all ranks, of the values and of their gradients."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the values."""
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum of the gradients."""
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Shared(nn.Module):
    """Sums `forward_mib` MiB over all ranks in the forward pass."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.values = torch.zeros(mib << 18)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values."""
        dist.all_reduce(self.values)
        return values


class SyncNorm(nn.Module):
    """Normalises by statistics of all ranks, `norm_kib` KiB of them, as SyncBatchNorm does on GPUs."""

    def __init__(self, kib: int) -> None:
        super().__init__()
        self.channels = kib * 256

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values without their mean over all ranks, and with it: as they are."""
        mean = Reduced.apply(values.expand(self.channels)).mean() / dist.get_world_size()
        return values - mean + mean.detach()


class Slow(torch.optim.SGD):
    """An optimizer that takes time."""

    def __init__(self, parameters: Any, ms: float) -> None:
        self.ms = ms
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        """Update after a while."""
        work(self.ms)
        return super().step(closure)


class Disk(io.BytesIO):
    """A disk whose first write takes time."""

    ms = 0.0

    def write(self, values: Any) -> int:
        """Write after a while."""
        work(self.ms)
        self.ms = 0.0
        return super().write(values)


def layers() -> list[nn.Module]:
    """Return the model's layers."""
    made: list[nn.Module] = [Shared(OPTIONS["forward_mib"])] if "forward_mib" in OPTIONS else []
    for kib in OPTIONS.get("sizes", [OPTIONS["kib"]] * OPTIONS["layers"]):
        made.append(Layer(kib, OPTIONS["ms"]))
        if "norm_kib" in OPTIONS:
            made.append(SyncNorm(OPTIONS["norm_kib"]))
    return made


def wrapped(model: nn.Sequential) -> nn.Module:
    """Return the model as its gradients travel."""
    if OPTIONS.get("wrap") == "fsdp":
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)
    if OPTIONS.get("wrap") == "horovod":
        return model
    return DistributedDataParallel(model, bucket_cap_mb=OPTIONS.get("bucket_kib", OPTIONS["kib"]) / 1024)


def optimizers(model: nn.Module) -> list[Any]:
    """Return the optimizers: one for most weights, and one for the last layer's."""
    first_ms = OPTIONS.get("optimizer_ms", 0.0) + own("late_optimizer_ms")
    if OPTIONS.get("wrap") == "horovod":
        import netbottleneck.torch as hvd

        return [hvd.DistributedOptimizer(Slow(model.parameters(), first_ms), model.named_parameters())]
    *most, last = model.parameters()
    return [Slow(most, first_ms), Slow([last], OPTIONS.get("second_ms", 0.0))]


def start() -> None:
    """Join the other ranks."""
    if "core" in OPTIONS:
        os.sched_setaffinity(0, {OPTIONS["core"]})
    torch.set_num_threads(1)
    if OPTIONS.get("wrap") == "horovod":
        import netbottleneck.torch as hvd

        hvd.init()
    else:
        dist.init_process_group("gloo")


def end() -> None:
    """Leave the other ranks."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    else:
        import netbottleneck.torch as hvd

        hvd.shutdown()


def passes(model: nn.Module, count: int) -> None:
    """Run the forward and backward passes of a step."""
    for number in range(count):
        alone = number < count - 1 and isinstance(model, DistributedDataParallel)
        with model.no_sync() if alone else contextlib.nullcontext():
            loss(model).backward()


def loss(model: nn.Module) -> torch.Tensor:
    """Return what a step makes smaller: of data of this rank, if the model learns."""
    if not OPTIONS.get("learn"):
        return model(torch.ones(1, requires_grad=True)).sum()
    return model(torch.randn(1, generator=DRAW).requires_grad_()).square().sum()


def look(model: nn.Module, step: int) -> None:
    """Evaluate and save, in each 10th step."""
    if "evaluate_ms" in OPTIONS and step % 10 == 9:
        model.eval()
        with torch.no_grad():
            model(torch.ones(1))
            work(OPTIONS["evaluate_ms"])
        model.train()
    if "save_ms" in OPTIONS and step % 10 == 9:
        disk = Disk()
        disk.ms = OPTIONS["save_ms"]
        torch.save(model.state_dict(), disk)


def main() -> None:
    """Train for the requested number of steps."""
    start()
    model = wrapped(nn.Sequential(*layers()))
    updates = optimizers(model)
    draw = random.Random(f"{OPTIONS['seed']} uneven")  # the same on all ranks
    for step, level in enumerate(levels()):
        pace = OPTIONS.get("slower", 1.0) if SLOW else 1.0
        LEVEL[0] = pace * level
        UNEVEN[0] = 1 + OPTIONS.get("uneven", 0.0) * draw.uniform(-1, 1)
        begin = time.perf_counter()
        COUNTS[-1]["begin"] = time.time() * 1e3
        work(UNEVEN[0] * OPTIONS.get("input_ms", 0.0) + own("late_input_ms"))
        model.zero_grad()
        COUNTS[-1]["input"] = (time.perf_counter() - begin) * 1e3
        passes(model, OPTIONS.get("accumulate", 1))
        for optimizer in updates:
            optimizer.step()
        look(model, step)
        COUNTS.append({})
    end()
    if "counts" in OPTIONS:
        (Path(OPTIONS["counts"]) / str(RANK)).write_text(json.dumps(COUNTS), encoding="utf-8")
    if "weights" in OPTIONS and RANK == 0:
        values = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
        Path(OPTIONS["weights"]).write_text(hashlib.sha256(values).hexdigest(), encoding="ascii")


if __name__ == "__main__":
    main()
