"""One rank of the checks of training loops: runs the named ones in order and prints "ok NAME" after each.

Each check trains a model under netbottleneck.profile, and a copy of it without: as DDP over gloo, or with gradients
averaged over gloo by hand. Both must end alike. They compute in float64, because a product's last bits depend on where
its operands lie, and the bound is far below what a single gradient that is left out, or counted twice, makes of it.
"""

from __future__ import annotations

import copy
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training_loops import BOUND, STEPS, Branches, network, sgd

import netbottleneck

Loop = Callable[[Any, torch.optim.Optimizer, Callable[[], None]], None]
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def profiled(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    name = f"run.{len(PROFILED)}"
    PROFILED.append(name)
    # By argument: the environment's variable would measure the models to compare with, too.
    return netbottleneck.profile(model, optimizer, transport=os.environ["E2E_TRANSPORT"], streams=2, directory=name)


PROFILED: list[str] = []


def equal(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """The same state here in both, and the same parameters on both ranks."""
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert b.isfinite().all(), name
        worst = float((a.double() - b.double()).abs().max() / b.abs().max().clamp(min=1))
        assert worst <= BOUND, (name, worst)
    for name, parameter in one.named_parameters():
        bits = parameter.detach().double().contiguous()
        theirs = [torch.empty_like(bits) for _ in range(2)]
        dist.all_gather(theirs, bits)
        assert torch.equal(*theirs), name


def average(model: torch.nn.Module) -> None:
    """Average gradients by hand; one that only other ranks have counts as zeros."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    for parameter in [parameter for parameter, somewhere in zip(parameters, used, strict=True) if somewhere]:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        flat = (gradient / 2).contiguous().reshape(-1)
        dist.all_reduce(flat)
        parameter.grad = flat.reshape(gradient.shape).contiguous(memory_format=_format(gradient))


def _format(tensor: torch.Tensor) -> torch.memory_format:
    channels_last = tensor.dim() == 4 and not tensor.is_contiguous()
    return torch.channels_last if channels_last else torch.contiguous_format


def plain(model: torch.nn.Module, loop: Loop, optimizer: Callable[[Any], torch.optim.Optimizer] = sgd) -> None:
    """Compare a plain module under profile with gradients that are averaged by hand after each backward pass."""
    reference = copy.deepcopy(model)
    torch.manual_seed(dist.get_rank())
    loop(reference, optimizer(reference), lambda: average(reference))
    chosen = optimizer(model)
    torch.manual_seed(dist.get_rank())
    with profiled(model, chosen):
        loop(model, chosen, lambda: None)
    equal(model, reference)


def wrapped(
    model: torch.nn.Module, loop: Loop, optimizer: Callable[[Any], torch.optim.Optimizer] = sgd, **options: Any
) -> None:
    """Compare a DDP model under profile with the same without; the optimizer is made before DDP wraps."""
    twin = copy.deepcopy(model)
    second = optimizer(twin)
    reference = DistributedDataParallel(twin, **options)
    torch.manual_seed(dist.get_rank())
    loop(reference, second, lambda: None)
    chosen = optimizer(model)
    ours = DistributedDataParallel(model, **options)
    torch.manual_seed(dist.get_rank())
    with profiled(ours, chosen):
        loop(ours, chosen, lambda: None)
    equal(model, twin)


def simple(model: Any, optimizer: torch.optim.Optimizer, averaged: Callable[[], None]) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        averaged()
        optimizer.step()


@check
def gradients_set_to_none() -> None:
    plain(network(), simple)
    wrapped(network(), simple)


@check
def gradients_set_to_zero() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, averaged: Callable[[], None]) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            model(torch.randn(4, 6)).square().mean().backward()
            averaged()
            optimizer.step()

    plain(network(), loop)
    wrapped(network(), loop)


@check
def options_of_ddp() -> None:
    wrapped(network(), simple, gradient_as_bucket_view=True)
    wrapped(network(), simple, static_graph=True)
    wrapped(network(), simple, find_unused_parameters=True)
    wrapped(network(), simple, bucket_cap_mb=1)


class WithUnused(Branches):
    """One more layer, which is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.never = torch.nn.Linear(5, 3)


def skipping(model: Any, optimizer: torch.optim.Optimizer, averaged: Callable[[], None]) -> None:
    """Each rank takes a branch of its own, another one each step."""
    inner = getattr(model, "module", model)
    for step in range(STEPS):
        inner.take = ["left", "right", "both"][(step + dist.get_rank()) % 3]
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        averaged()
        optimizer.step()


@check
def a_rank_skips_a_parameter() -> None:
    model = WithUnused()
    del model.never
    plain(model, skipping)
    model = WithUnused()
    del model.never
    wrapped(model, skipping, find_unused_parameters=True)


@check
def a_parameter_is_never_used() -> None:
    plain(WithUnused(), simple)


@check
def a_parameter_is_never_used_in_ddp() -> None:
    # DDP leaves its gradient None: weight decay and momentum do not touch it.
    wrapped(WithUnused(), simple, find_unused_parameters=True)


@check
def a_parameter_is_shared() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.inward = torch.nn.Linear(6, 6)
            self.outward = torch.nn.Linear(6, 6)
            self.outward.weight = self.inward.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outward(self.inward(x))

    plain(Tied(), simple)
    wrapped(Tied(), simple)


@check
def two_backward_passes_a_step() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, averaged: Callable[[], None]) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.randint(-3, 4, (4, 6)).to(torch.float64)).sum().backward()
                averaged()
            optimizer.step()

    plain(network(), loop)
    wrapped(network(), loop)


@check
def gradients_are_replaced() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, averaged: Callable[[], None]) -> None:
        for step in range(STEPS):
            if step % 2:  # by foreign memory, small and large, before the backward pass
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
            else:
                optimizer.zero_grad(set_to_none=False)
            model(torch.randn(4, 6)).square().mean().backward()
            averaged()
            for parameter in model.parameters():  # and after it
                parameter.grad = parameter.grad * 0.5
            optimizer.step()

    plain(network(), loop)
    wrapped(network(), loop)


@check
def gradients_are_clipped() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, averaged: Callable[[], None]) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            averaged()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    plain(network(), loop)
    wrapped(network(), loop)


@check
def gradients_accumulate_without_sync() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, _averaged: Callable[[], None]) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            for part in range(3):
                with model.no_sync() if part < 2 else nullcontext():
                    model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()

    wrapped(network(), loop)


@check
def evaluation_lies_between_steps() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, averaged: Callable[[], None]) -> None:
        for _ in range(STEPS):
            simple_step(model, optimizer, averaged)
            model.eval()
            with torch.no_grad():
                model(torch.randn(4, 6))
            model.train()

    norm = torch.nn.Sequential(network(), torch.nn.BatchNorm1d(3))
    wrapped(norm, loop)
    plain(network(), loop)


def simple_step(model: Any, optimizer: torch.optim.Optimizer, averaged: Callable[[], None]) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    averaged()
    optimizer.step()


@check
def the_step_calls_a_closure() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, averaged: Callable[[], None]) -> None:
        for _ in range(STEPS):
            inputs = torch.randn(4, 6)

            def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                loss.backward()
                averaged()
                return loss

            optimizer.step(closure)

    plain(network(), loop)
    wrapped(network(), loop)


@check
def parameters_are_bfloat16() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, averaged: Callable[[], None]) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randint(-3, 4, (4, 6)).bfloat16()).sum().backward()
            averaged()
            optimizer.step()

    plain(network().bfloat16(), loop)


@check
def a_parameter_lies_channels_last() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, averaged: Callable[[], None]) -> None:
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            inputs = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
            model(inputs).square().mean().backward()
            averaged()
            optimizer.step()

    def made() -> torch.nn.Module:
        torch.manual_seed(4)
        layers = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 200, 3), torch.nn.Conv2d(200, 60, 1))
        layers.append(torch.nn.Conv2d(60, 200, 3))
        return layers.to(memory_format=torch.channels_last)

    plain(made(), loop)
    wrapped(made(), loop)


@check
def activations_are_computed_again() -> None:
    class Again(torch.nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.inner = network()
            self.reentrant = reentrant

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)
            return out

    for reentrant in (True, False):
        plain(Again(reentrant), simple)
        wrapped(Again(reentrant), simple)


@check
def outputs_are_of_any_type() -> None:
    class Answer:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class Model(Branches):
        def forward(self, x: torch.Tensor) -> Any:
            return Answer(super().forward(x))

    def loop(model: Any, optimizer: torch.optim.Optimizer, averaged: Callable[[], None]) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).value.square().mean().backward()
            averaged()
            optimizer.step()

    plain(Model(), loop)


@check
def another_method_than_forward_is_called() -> None:
    class Model(Branches):
        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return self(x).square().mean() if self.take == "forward" else self.left(self.first(x)).square().sum()

    def loop(model: Any, optimizer: torch.optim.Optimizer, averaged: Callable[[], None]) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model.loss(torch.randn(4, 6)).backward()
            averaged()
            optimizer.step()

    plain(Model(), loop)


@check
def two_models_have_one_optimizer() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, averaged: Callable[[], None]) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model[1](model[0](torch.randn(4, 6))).square().mean().backward()
            averaged()
            optimizer.step()

    torch.manual_seed(1)
    plain(torch.nn.ModuleList([torch.nn.Linear(6, 8), torch.nn.Linear(8, 2)]), loop)


@check
def ddp_goes_on_by_itself_after_the_block() -> None:
    model = network()
    twin = copy.deepcopy(model)
    second, chosen = sgd(twin), sgd(model)
    reference, ours = DistributedDataParallel(twin), DistributedDataParallel(model)
    torch.manual_seed(dist.get_rank())
    simple(reference, second, lambda: None)
    simple(reference, second, lambda: None)
    torch.manual_seed(dist.get_rank())
    with profiled(ours, chosen):
        simple(ours, chosen, lambda: None)
    simple(ours, chosen, lambda: None)
    equal(model, twin)


@check
def a_plain_model_is_let_go_after_the_block() -> None:
    model = network()
    chosen = sgd(model)
    with profiled(model, chosen):
        simple(model, chosen, lambda: None)
    model(torch.full((1, 6), float(dist.get_rank()))).sum().backward()
    alone = copy.deepcopy(model)
    alone.zero_grad()
    chosen.zero_grad()
    for each in (alone, model):
        each(torch.full((1, 6), float(dist.get_rank()))).sum().backward()
    for mine, plain_one in zip(model.parameters(), alone.parameters(), strict=True):
        assert (mine.grad - plain_one.grad).abs().max() <= BOUND


@check
def two_ddp_models_are_measured_one_in_the_other() -> None:
    def train(models: list[Any], optimizers: list[torch.optim.Optimizer]) -> None:
        torch.manual_seed(dist.get_rank())
        for _ in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            models[1](models[0](torch.randn(4, 6))).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()

    torch.manual_seed(1)
    inner = [torch.nn.Linear(6, 8), torch.nn.Linear(8, 2)]
    twins = copy.deepcopy(inner)
    train([DistributedDataParallel(twin) for twin in twins], [sgd(twin) for twin in twins])
    chosen = [sgd(model) for model in inner]
    ours = [DistributedDataParallel(model) for model in inner]
    with profiled(ours[0], chosen[0]), profiled(ours[1], chosen[1]):
        train(ours, chosen)
    for model, twin in zip(inner, twins, strict=True):
        equal(model, twin)


@check
def arms_take_turns() -> None:
    assert os.environ["E2E_TRANSPORT"] == "stock,tcp"
    wrapped(network(), simple)
    wrapped(
        WithUnused(),
        skipping,
        find_unused_parameters=True,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
    )


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    for name in sys.argv[1:]:
        try:
            CHECKS[name]()
        except AssertionError:
            traceback.print_exc()  # the same on both ranks, so that they can go on
            print("failed", name)
        else:
            print("ok", name)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
