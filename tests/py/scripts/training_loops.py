"""Common training loops, written once for every way to move gradients.

A loop gets a Way and returns how many updates of the weights it made. ddp_loops.py and hvd_loops.py run each loop as
plain DDP over gloo, and their own way. The weights must end alike, and the record must hold a step for each update.
They compute in float64, because a product's last bits depend on where its operands lie, and the bound is far below what
a single gradient that is left out, or counted twice, makes of it. Autocast's loops compute with integers, exactly.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from netbottleneck.trace.ring_file import EVENTS, read_ring

STEPS = 5
BOUND = 1e-10
LOOPS: dict[str, Loop] = {}


class Way:
    """Plain DDP over gloo, and the interface of any other way."""

    def __init__(self, model: torch.nn.Module, passes: int = 1, **options: Any) -> None:
        self.passes = passes
        self.model: Any = DistributedDataParallel(model, **options)
        self.optimizer: Any = sgd(model)

    def adding(self, part: int) -> AbstractContextManager[Any]:
        """Context of backward pass `part` of several for one update."""
        return nullcontext() if part == self.passes - 1 else self.model.no_sync()

    def reduced(self) -> None:
        """Finish the reduction of gradients before the script reads them."""

    def updating(self) -> AbstractContextManager[Any]:
        """Context of the update after such a reduction."""
        return nullcontext()

    def folder(self) -> Path:
        """End the run; return its folder."""
        raise NotImplementedError


Loop = Callable[[Way], int]


class Setting:
    """How a loop's model is made: the model, and DDP's arguments."""

    def __init__(self, model: Callable[[], torch.nn.Module], ddp_only: bool = False, **options: Any) -> None:
        self.model = model
        self.ddp_only = ddp_only
        self.options = options


SETTINGS: dict[str, list[Setting]] = {}


def loop(*settings: Setting) -> Callable[[Loop], Loop]:
    def add(function: Loop) -> Loop:
        LOOPS[function.__name__] = function
        SETTINGS[function.__name__] = list(settings) or [Setting(network)]
        return function

    return add


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0078125, momentum=0.5, weight_decay=0.25)


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 700), torch.nn.ReLU(), torch.nn.Linear(700, 500), torch.nn.Linear(500, 3)
    )


def whole_numbers() -> torch.nn.Module:
    """Weights with exact products and sums in autocast's arithmetic."""
    made = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))
    return made


def compiled() -> torch.nn.Module:
    module: Any = torch.compile(network(), backend="aot_eager")
    return module  # type: ignore[no-any-return]


class Branches(torch.nn.Module):
    """The layer to use is set before each pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = torch.nn.Linear(6, 5)
        self.left = torch.nn.Linear(5, 3)
        self.right = torch.nn.Linear(5, 3)
        self.take = "both"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.take == "both":
            return self.left(x) + self.right(x)
        return self.left(x) if self.take == "left" else self.right(x)


class Again(torch.nn.Module):
    """Computes the activations of its inner layers twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = network()
        self.last = torch.nn.Linear(3, 3)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        again: torch.Tensor = checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)
        return self.last(again)


class Segments(torch.nn.Module):
    """Computes the activations of each of its layers twice, in backward passes inside the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in self.layers.children():
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def inputs() -> torch.Tensor:
    return torch.randn(4, 6)


def loss_of(way: Way) -> torch.Tensor:
    loss: torch.Tensor = way.model(inputs()).square().mean()
    return loss


@loop(
    Setting(network),
    Setting(network, ddp_only=True, gradient_as_bucket_view=True),
    Setting(network, ddp_only=True, static_graph=True),
    Setting(network, ddp_only=True, find_unused_parameters=True),
    Setting(network, ddp_only=True, bucket_cap_mb=1),
    Setting(lambda: Again(False)),
    Setting(lambda: Again(True)),
    Setting(lambda: Again(False), ddp_only=True, static_graph=True),
    Setting(Segments, ddp_only=True, bucket_cap_mb=0.01),
)
def gradients_are_set_to_none(way: Way) -> int:
    for _ in range(STEPS):
        way.optimizer.zero_grad(set_to_none=True)
        loss_of(way).backward()
        way.optimizer.step()
    return STEPS


@loop(Setting(network), Setting(network, ddp_only=True, gradient_as_bucket_view=True))
def gradients_are_set_to_zero(way: Way) -> int:
    for _ in range(STEPS):
        way.optimizer.zero_grad(set_to_none=False)
        loss_of(way).backward()
        way.optimizer.step()
    return STEPS


@loop()
def gradients_are_clipped(way: Way) -> int:
    for _ in range(STEPS):
        way.optimizer.zero_grad()
        loss_of(way).backward()
        way.reduced()
        torch.nn.utils.clip_grad_norm_(way.model.parameters(), 0.05)
        with way.updating():
            way.optimizer.step()
    return STEPS


@loop()
def one_rank_has_an_infinite_gradient(way: Way) -> int:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        way.optimizer.zero_grad()
        loss = loss_of(way)
        if step == 2 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        way.reduced()
        scaler.unscale_(way.optimizer)
        torch.nn.utils.clip_grad_norm_(way.model.parameters(), 0.05)
        with way.updating():
            scaler.step(way.optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    return STEPS - 1


@loop(Setting(whole_numbers))
def autocast_computes_in_bfloat16(way: Way) -> int:
    for _ in range(STEPS):
        way.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = way.model(torch.randint(-1, 2, (4, 6)).float())
        assert found.dtype == torch.bfloat16
        found.float().sum().backward()
        way.optimizer.step()
    return STEPS


@loop(
    Setting(network, passes=3),
    Setting(network, ddp_only=True, passes=3, gradient_as_bucket_view=True),
)
def gradients_of_three_passes_add_up(way: Way) -> int:
    for _ in range(STEPS):
        way.optimizer.zero_grad()
        for part in range(3):
            with way.adding(part):
                loss_of(way).backward()
        way.optimizer.step()
    return STEPS


@loop(Setting(Branches, find_unused_parameters=True))
def each_rank_leaves_out_a_layer(way: Way) -> int:
    inner = getattr(way.model, "module", way.model)
    for step in range(STEPS):
        inner.take = ["left", "right", "both"][(step + dist.get_rank()) % 3]
        way.optimizer.zero_grad()
        loss_of(way).backward()
        way.optimizer.step()
    return STEPS


@loop()
def the_model_is_compiled(way: Way) -> int:
    whole, way.model = way.model, torch.compile(way.model, backend="aot_eager")
    done = gradients_are_set_to_none(way)
    way.model = whole
    return done


@loop(Setting(compiled))
def what_is_wrapped_was_compiled(way: Way) -> int:
    return gradients_are_set_to_none(way)


@loop()
def a_closure_computes_the_gradients(way: Way) -> int:
    for _ in range(STEPS):
        batch = inputs()

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            way.optimizer.zero_grad()
            loss: torch.Tensor = way.model(batch).square().mean()
            loss.backward()
            return loss

        way.optimizer.step(closure)
    return STEPS


@loop()
def a_schedule_changes_the_learning_rate(way: Way) -> int:
    schedule = torch.optim.lr_scheduler.StepLR(way.optimizer, 2, 0.5)
    done = 0
    for _ in range(2):
        done += gradients_are_set_to_zero(way)
        schedule.step()
        way.model.eval()
        with torch.no_grad():
            way.model(inputs())
        way.model.train()
    return done


def equal(ours: torch.nn.Module, reference: torch.nn.Module, exactly: bool) -> None:
    """Check that both have the same state here, and both ranks too."""
    for (name, a), b in zip(ours.state_dict().items(), reference.state_dict().values(), strict=True):
        assert b.isfinite().all(), name
        worst = float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1))
        assert worst <= (0 if exactly else BOUND), (name, worst)
        bits = a.detach().double().contiguous()
        theirs = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
        dist.all_gather(theirs, bits)
        assert all(torch.equal(bits, each) for each in theirs), name


def steps_in(folder: Path) -> int:
    """Return the number of steps in this rank's ring."""
    ring = read_ring(folder / "ranks" / f"{dist.get_rank()}.train.ring")
    return int((ring.events["kind"] == EVENTS["STEP_END"]).sum())


def run(argument: str, way: Callable[..., Way], ddp: bool) -> None:
    """Run one loop in its settings, or one half of them (LOOP/0, LOOP/1), and compare with plain DDP."""
    name, _, half = argument.partition("/")
    for setting in SETTINGS[name][int(half) :: 2] if half else SETTINGS[name]:
        if setting.ddp_only and not ddp:
            continue
        twin, model = setting.model(), setting.model()
        torch.manual_seed(dist.get_rank())
        LOOPS[name](Way(twin, **setting.options))
        mine = way(model, **setting.options)
        torch.manual_seed(dist.get_rank())
        updates = LOOPS[name](mine)
        folder = mine.folder()
        equal(model, twin, setting.model is whole_numbers)
        assert steps_in(folder) == updates, (setting.options, steps_in(folder), updates)


def main(way: Callable[..., Way], *, ddp: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    for name in sys.argv[1:]:
        try:
            run(name, way, ddp)
        except AssertionError:
            traceback.print_exc()  # the same on both ranks, so that they can go on
            print("failed", name)
        else:
            print("ok", name)
    dist.barrier()
    dist.destroy_process_group()
