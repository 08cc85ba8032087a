"""One rank of overhead.py: python overhead_rank.py WHAT COUNT FOLDER [HOROVOD]. Its last line of output is JSON.

HOROVOD: the variables that horovodrun would set, as JSON. Variants in this process alternate, in a random order for
each round that is the same on all ranks. Variants in separate processes alternate by lines on stdin.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peers.hvd import not_installed
from torch.nn.parallel import DistributedDataParallel

import netbottleneck
import netbottleneck.torch as hvd
from netbottleneck.bench import models
from netbottleneck.hooks.ddp import attach
from netbottleneck.runtime import job
from netbottleneck.runtime.session import open_session
from netbottleneck.torch.gradients import Gradients

PARAMETERS = 400
WARM_ROUNDS = 10  # buckets settle in the first ones
BUCKET_BYTES = 64  # of small buckets: 16 of the parameters each
RING_EVENTS = 1 << 18  # large enough for the events of all rounds
WARM_CALLS, LATENCY_CALLS = 3, 15  # in sequence, per round
WARM_STEPS = 2
BLOCK_STEPS = 6
IMAGES = 2  # a batch of the pinned model, 32 x 32

Times = dict[str, list[float]]


class Way(NamedTuple):
    """A variant: `begin` runs up to the backward pass and returns the loss, `end` runs after it."""

    begin: Callable[[], torch.Tensor]
    end: Callable[[], Any]


class Tiny(torch.nn.Module):
    """PARAMETERS parameters of one element each."""

    def __init__(self) -> None:
        super().__init__()
        self.each = torch.nn.ParameterList([torch.ones(1) for _ in range(PARAMETERS)])
        self.one = torch.ones(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([p * x for p in self.each]).sum()


def way(model: torch.nn.Module, end: Callable[[], Any] = lambda: None) -> Way:
    """Return a variant that runs a model's forward pass, with the same zero_grad for all variants."""
    one = torch.ones(1)

    def begin() -> torch.Tensor:
        model.zero_grad()
        loss: torch.Tensor = model(one)
        return loss

    return Way(begin, end)


def plain() -> Way:
    return way(Tiny())


def empty() -> Way:
    """An empty Python hook on each parameter."""
    model = Tiny()

    def nothing(_parameter: torch.Tensor) -> None:
        return

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(nothing)
    return way(model)


def ours() -> Way:
    """The Horovod API of this package, over its default transport."""
    return by_optimizer(hvd)


def by_optimizer(api: Any) -> Way:
    model = Tiny()
    optimizer = api.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    return way(model, optimizer.synchronize)


def measured(folder: Path) -> Way:
    """The Horovod API with a timestamp for each gradient, as in a measured run."""
    model = Tiny()
    recorder = job.core().Recorder(str(folder / f"{hvd.rank()}.ring"), RING_EVENTS, hvd.rank())
    gradients = Gradients(model.named_parameters(), recorder=recorder, label="measured")
    gradients.target(job.current().comm)

    def end() -> None:
        gradients.flush()
        gradients.wait()

    return way(model, end)


def ddp(**options: Any) -> Way:
    return way(DistributedDataParallel(Tiny(), **options))


def observed(folder: Path, **options: Any) -> Way:
    """DDP with timestamps for each gradient and bucket, sent by DDP's own group."""
    model = DistributedDataParallel(Tiny(), **options)
    settings = netbottleneck.config.settings({"transports": "stock", "directory": str(folder), "strict": "1"})
    session = open_session(settings, arms=("stock",), directory=str(folder), model="tiny")
    attach(model, session=session)
    return way(model)


def horovod(variables: Mapping[str, str]) -> Any:
    """Start Horovod itself, and return its module."""
    why = not_installed()
    if why:
        raise SystemExit(why)
    os.environ.update(variables)
    real: Any = importlib.import_module("horovod.torch")
    real.init()
    if real.size() != hvd.size():
        raise SystemExit(f"Horovod has {real.size()} ranks")
    return real


def open_gloo(folder: Path) -> None:
    """Create a gloo group for DDP, independent of the job's rendezvous."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=hvd.rank(), world_size=hvd.size())


def hooks(ways: Mapping[str, Way], rounds: int) -> Times:
    """Return by variant this thread's CPU time of each backward pass, ns per gradient."""
    times: Times = {name: [] for name in ways}
    order = list(ways)
    gc.disable()
    for round_ in range(-WARM_ROUNDS, rounds):
        random.Random(round_).shuffle(order)
        for name in order:
            loss = ways[name].begin()
            began = time.thread_time_ns()
            loss.backward()
            took = time.thread_time_ns() - began
            ways[name].end()
            if round_ >= 0:
                times[name].append(took / PARAMETERS)
        gc.collect(0)
    return times


def latency(api: Any) -> None:
    """For each line on stdin, print the median seconds of LATENCY_CALLS 4-byte all-reduces in sequence."""
    value = torch.ones(1)
    for _ in sys.stdin:
        took = []
        for call in range(-WARM_CALLS, LATENCY_CALLS):
            began = time.perf_counter()
            api.allreduce(value, name="latency")
            if call >= 0:
                took.append(time.perf_counter() - began)
        print(statistics.median(took), flush=True)


def starts(count: int) -> Times:
    """Return the seconds of each init with a first all-reduce, and of each shutdown, all on one port."""
    times: Times = {"init": [], "shutdown": []}
    for _ in range(count):
        began = time.perf_counter()
        hvd.init()
        hvd.allreduce(torch.ones(1), name="first")
        up = time.perf_counter()
        hvd.shutdown()
        times["init"].append(up - began)
        times["shutdown"].append(time.perf_counter() - up)
    return times


class Pinned:
    """A fixed model, batch and optimizer, with this process pinned to one core."""

    def __init__(self) -> None:
        place = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {place[hvd.rank() % len(place)]})
        torch.manual_seed(1)
        self.model = models.build("resnet50", classes=10, width=0.5, small=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.images = torch.randn(IMAGES, 3, 32, 32)
        self.classes = torch.randint(0, 10, (IMAGES,))

    def steps(self, count: int) -> float:
        """Return the median seconds of `count` steps."""
        took = []
        for _ in range(count):
            began = time.perf_counter()
            self.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.model(self.images), self.classes).backward()
            self.optimizer.step()
            took.append(time.perf_counter() - began)
        return statistics.median(took)


def ddp_hooks(rounds: int, folder: Path) -> Times:
    """Return the result of `hooks` for a plain model, and DDP models of one and of many buckets, bare and observed."""
    small = {"bucket_cap_mb": BUCKET_BYTES / (1 << 20)}
    ways = {"plain": plain(), "ddp": ddp(), "ddp, small buckets": ddp(**small)}
    ways["observed"] = observed(folder / "one")
    ways["observed, small buckets"] = observed(folder / "many", **small)
    return hooks(ways, rounds)


def observing(steps: int, folder: Path) -> Times:
    """Return the seconds of the steps of an observed DDP model: observed steps, and untouched ones."""
    pinned = Pinned()
    pinned.model = DistributedDataParallel(pinned.model)
    where = str(folder / "run")
    settings = netbottleneck.config.settings(
        {"transports": "stock", "directory": where, "start_step": "0", "strict": "1"}
    )
    session = open_session(settings, arms=("stock", "bare"), directory=where, model="pinned")
    attach(pinned.model, pinned.optimizer, session=session)
    times: Times = {"bare": [], "stock": []}
    pinned.steps(2 * WARM_STEPS)
    while min(map(len, times.values())) < steps:
        arm, block = session.arm, session.blocks.at(session.step)[0]
        took = []
        while session.blocks.at(session.step)[0] == block:
            took.append(pinned.steps(1))
        if len(took) == session.blocks.length:  # a complete block
            times[arm].append(statistics.median(took[1:]))
    least = min(map(len, times.values()))
    return {arm: values[:least] for arm, values in times.items()}


def inflation(pairs: int, folder: Path) -> Times:
    """Return the seconds of a step by block: bare (no hook), and measured over `null`."""
    pinned, times = Pinned(), Times(bare=[], measured=[])

    def bare() -> float:
        pinned.steps(WARM_STEPS)
        hvd.barrier()
        return pinned.steps(BLOCK_STEPS)

    def measured_block(number: int) -> float:
        where = str(folder / f"run{number}")
        settings = netbottleneck.config.settings({"transports": "null", "directory": where, "start_step": "0"})
        session = open_session(settings, directory=where, model="pinned")
        with netbottleneck.profile(pinned.model, pinned.optimizer, session=session):
            pinned.steps(WARM_STEPS)
            hvd.barrier()
            seconds = pinned.steps(BLOCK_STEPS)
        session.close()
        return seconds

    pinned.steps(2 * WARM_STEPS)
    for pair in range(pairs):
        order = ("bare", "measured") if pair % 2 else ("measured", "bare")
        for name in order:
            times[name].append(bare() if name == "bare" else measured_block(pair))
    return times


def main() -> None:
    what, count, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    if what == "starts":
        found = starts(count)
    else:
        hvd.init()
        real = horovod(json.loads(sys.argv[4])) if len(sys.argv) > 4 else None
        if what in ("ddp", "observe"):
            open_gloo(folder)
            found = (ddp_hooks if what == "ddp" else observing)(count, folder)
        elif what == "inflation":
            found = inflation(count, folder)
        elif what == "latency":
            latency(hvd if real is None else real)
            found = {}
        else:
            ways = {"plain": plain(), "empty": empty(), "ours": ours(), "measured": measured(folder)}
            if real is None:
                open_gloo(folder)
            ways |= {"ddp": ddp()} if real is None else {"horovod": by_optimizer(real)}
            found = hooks(ways, count)
        hvd.barrier()
        if real is not None:
            real.shutdown()
        hvd.shutdown()
    print(json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
