"""A training loop as a framework runs it, with doubles of the framework. LOOP: the loop, see main.

Each rank writes its weights to OUT. Batches are accumulated, two a step. FIRST: netbottleneck is imported first, so
that the variables of the environment take effect when DDP is built.
"""

from __future__ import annotations

import os
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


def stand_in(name: str, **members: Any) -> None:
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:length]), types.ModuleType(".".join(parts[:length])))
    vars(sys.modules[name]).update(members)


class Wrapped:
    """An optimizer around another one, as in Accelerate."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


class Loop:
    """Two micro-batches a step, the first inside no_sync."""

    def __init__(self) -> None:
        torch.manual_seed(dist.get_rank())
        self.plain = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.ReLU(), torch.nn.Linear(30, 4))
        self.model = DistributedDataParallel(self.plain)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def gradients(self) -> None:
        self.optimizer.zero_grad()
        for last in (False, True):
            with nullcontext() if last else self.model.no_sync():
                self.model(torch.randn(4, 8)).square().mean().backward()

    def steps(self) -> None:
        for _ in range(STEPS):
            self.gradients()
            self.optimizer.step()


def lightning(loop: Loop) -> None:
    stand_in("lightning.pytorch", Callback=object)
    from netbottleneck.callbacks import LightningCallback

    callback = LightningCallback()
    trainer = SimpleNamespace(strategy=SimpleNamespace(model=loop.model), optimizers=[Wrapped(loop.optimizer)])
    callback.on_train_start(trainer, loop.plain)

    def closure() -> float:
        loop.gradients()
        callback.on_before_optimizer_step(trainer, loop.plain, loop.optimizer)
        return 0.0

    for _ in range(STEPS):
        loop.optimizer.step(closure)
    callback.on_train_end(trainer, loop.plain)
    callback.on_train_end(trainer, loop.plain)


def transformers(loop: Loop) -> None:
    stand_in("transformers", TrainerCallback=object)
    from netbottleneck.callbacks import TransformersCallback

    callback = TransformersCallback()
    callback.on_train_begin(None, None, None, model=loop.plain, optimizer=Wrapped(loop.optimizer), lr_scheduler=None)
    loop.steps()
    callback.on_train_end(None, None, None, model=loop.plain)


def accelerate(loop: Loop) -> None:
    stand_in("accelerate")
    from netbottleneck.callbacks import accelerate

    with accelerate(loop.model, Wrapped(Wrapped(loop.optimizer))):
        loop.steps()


def refused(loop: Loop) -> None:
    from netbottleneck.callbacks import LightningCallback, accelerate

    for model, optimizers in [(loop.plain, [loop.optimizer]), (loop.model, [loop.optimizer] * 2)]:
        trainer = SimpleNamespace(strategy=SimpleNamespace(model=model), optimizers=optimizers)
        try:
            LightningCallback().on_train_start(trainer, loop.plain)
        except ValueError as error:
            print("refused:", error)
    try:
        with accelerate(loop.model, loop.optimizer) as run:
            loop.gradients()
            raise KeyError("mine")
    except KeyError:
        print("left with", run.session.error)


def failing(loop: Loop) -> None:
    stand_in("lightning.pytorch", Callback=object)
    stand_in("accelerate")
    refused(loop)


def main() -> None:
    torch.set_num_threads(1)
    if os.environ.get("FIRST"):
        import netbottleneck  # noqa: F401
    dist.init_process_group("gloo")
    loop = Loop()
    {
        "lightning": lightning,
        "transformers": transformers,
        "accelerate": accelerate,
        "failing": failing,
    }[os.environ["LOOP"]](loop)
    state = b"".join(tensor.numpy().tobytes() for tensor in loop.plain.state_dict().values())
    (Path(os.environ["OUT"]) / f"{dist.get_rank()}.weights").write_bytes(state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
