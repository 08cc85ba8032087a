"""One rank of loops that touch their gradients: by our DistributedOptimizer, and by one that does as Horovod's.

Horovod 0.28.1 (horovod/torch/optimizer.py) submits `p.grad` in a hook of the AccumulateGrad node and reduces in place.
Its `synchronize()` then calls `p.grad.set_(that tensor)`. What follows for a script:

    what the script does                              what `p.grad` is after synchronize() or step()
    nothing, or keeps a reference                     the same tensor, with the average
    changes or replaces it in a post-accumulate hook  the average of what the hooks left
    changes or replaces it between two passes         the average of what the passes left and added
    replaces it after the last pass                   the script's tensor, set to the average of what was taken
    sets it without a backward pass                   the same tensor, with the average
    leaves it out                                     zeros, averaged, in a tensor of its own
    lets two parameters have one tensor               that tensor, with the average
    deletes it after the last pass                    an error
    changes it in place after the last pass           not defined: it races with the reduction
    gives its tensor other memory after the last pass not defined under Horovod; here the average of what was taken
"""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from named_checks import check, run_named

import netbottleneck.torch as hvd
from netbottleneck.torch.gradients import OnAccumulated

SIZES = (2, 128, 129, 5000, 1 << 16, (1 << 16) + 3)  # up to 512 bytes, below 256 KiB, and from there on
STEPS = 3

GROUP: list[Any] = []  # gloo alone: init_process_group would load torch's compiler
Parameters = list[torch.nn.Parameter]
Loop = Callable[[Parameters, Any, list[torch.Tensor]], None]


class Emulated:
    """Horovod's optimizer over plain gloo. All-reduces run as late as possible, in sequence."""

    def __init__(self, parameters: Parameters, passes: int) -> None:
        self._parameters = parameters
        self._passes = passes
        self._left = dict.fromkeys(parameters, passes)
        self._taken: dict[torch.nn.Parameter, Any] = {}
        self._base = torch.optim.SGD(parameters, lr=0.125, momentum=0.5)
        self._hooks = [OnAccumulated(p, lambda *_, p=p: self._ready(p)) for p in parameters]
        self.zero_grad = self._base.zero_grad

    def _ready(self, parameter: torch.nn.Parameter) -> None:
        self._left[parameter] -= 1
        if self._left[parameter] == 0:
            self._taken[parameter] = parameter.grad

    def synchronize(self) -> None:
        for parameter in self._parameters:
            if parameter not in self._taken:
                if parameter.grad is None:
                    parameter.grad = parameter.data.new(parameter.size()).zero_()
                self._taken[parameter] = parameter.grad
        for parameter in self._parameters:
            GROUP[0].allreduce([self._taken[parameter]]).wait()
            self._taken[parameter].div_(hvd.size())
        for parameter, taken in self._taken.items():
            self._left[parameter] = self._passes
            parameter.grad.set_(taken)  # type: ignore[union-attr]
        self._taken.clear()

    def skip_synchronize(self) -> AbstractContextManager[Any]:
        self.synchronize = lambda: None  # type: ignore[method-assign]
        return nullcontext()

    def step(self) -> None:
        self.synchronize()
        self.__dict__.pop("synchronize", None)
        self._base.step()


def distributed(parameters: Parameters, passes: int) -> Any:
    base = torch.optim.SGD(parameters, lr=0.125, momentum=0.5)
    return hvd.DistributedOptimizer(base, backward_passes_per_step=passes)


def parameters_of(rank: int, sizes: tuple[int, ...] = SIZES) -> Parameters:
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    torch.manual_seed(1 + rank)
    return made


def loss_of(parameters: Parameters) -> torch.Tensor:
    return sum(((p * torch.randn_like(p)) ** 2).sum() for p in parameters)  # type: ignore[return-value]


def state(parameters: Parameters) -> list[torch.Tensor]:
    return [t.detach().clone() for p in parameters for t in (p, p.grad) if t is not None]


def alike(loop: Loop, passes: int = 1, sizes: tuple[int, ...] = SIZES) -> None:
    """Run a loop both ways; its notes, weights and gradients must be equal bit for bit."""
    found: list[list[torch.Tensor]] = []
    for ours in (True, False):
        parameters = parameters_of(hvd.rank(), sizes)
        optimizer = (distributed if ours else Emulated)(parameters, passes)
        seen: list[torch.Tensor] = []
        loop(parameters, optimizer, seen)
        found.append([*[each.detach().clone() for each in seen], *state(parameters)])
    mine, theirs = found
    assert len(mine) == len(theirs) > len(SIZES)
    for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert one.shape == other.shape, index
        assert one.stride() == other.stride(), index
        assert torch.equal(one, other), (index, one, other)


def steps(
    parameters: Parameters,
    optimizer: Any,
    seen: list[torch.Tensor],
    between: Callable[[torch.nn.Parameter], None] = lambda _: None,
    **zero: bool,
) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad(**zero)
        loss_of(parameters).backward()
        for parameter in parameters:
            between(parameter)
        optimizer.step()
        seen += state(parameters)


@check
def kept_gradients_never_change() -> None:
    def loop(parameters: Parameters, optimizer: Any, seen: list[torch.Tensor]) -> None:
        at_backward: list[torch.Tensor] = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(parameters).backward()
            at_backward += [p.grad for p in parameters if p.grad is not None]
            optimizer.step()
            assert [p.grad is g for p, g in zip(parameters, at_backward[-len(SIZES) :], strict=True)] == [True] * 6
        seen += at_backward

    alike(loop)


@check
def gradients_are_zeroed_or_forgotten() -> None:
    for none in (True, False):
        alike(lambda p, o, seen, none=none: steps(p, o, seen, set_to_none=none))  # type: ignore[misc]


@check
def gradients_are_saved_and_copied_alone() -> None:
    parameters = parameters_of(hvd.rank())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(parameters).backward()
        optimizer.step()
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        assert gradient.untyped_storage().nbytes() == gradient.nbytes
        file = io.BytesIO()
        torch.save(gradient, file)
        assert file.tell() < gradient.nbytes + 4096
        assert torch.equal(copy.deepcopy(gradient), gradient)
        gradient.detach_().resize_(gradient.numel() + 1)


@check
def gradients_are_replaced_on_their_way() -> None:
    def replace(parameter: torch.nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clone() * 0.5

    for none in (True, False):
        alike(lambda p, o, seen, none=none: steps(p, o, seen, replace, set_to_none=none))  # type: ignore[misc]


@check
def a_deleted_gradient_is_an_error() -> None:
    for make, message in ((distributed, "gradient of parameter 3 was deleted"), (Emulated, "set_")):
        parameters = parameters_of(hvd.rank())
        optimizer = make(parameters, 1)
        loss_of(parameters).backward()
        parameters[3].grad = None
        with pytest.raises((AttributeError, RuntimeError), match=message):
            optimizer.synchronize()
        if make is distributed:
            optimizer.zero_grad()
            steps(parameters, optimizer, [])


@check
def gradients_are_clipped_between_synchronize_and_step() -> None:
    def loop(parameters: Parameters, optimizer: Any, seen: list[torch.Tensor]) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(parameters).backward()
            optimizer.synchronize()
            seen += state(parameters)
            seen.append(torch.nn.utils.clip_grad_norm_(parameters, 0.5))
            with optimizer.skip_synchronize():
                optimizer.step()
            seen += state(parameters)

    alike(loop)


@check
def gradients_of_several_passes_are_edited_between_them() -> None:
    def loop(parameters: Parameters, optimizer: Any, seen: list[torch.Tensor]) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            for part in range(3):
                loss_of(parameters).backward()
                for index, parameter in enumerate(parameters):
                    assert parameter.grad is not None
                    if part < 2 and index % 3 == 0:
                        parameter.grad.mul_(0.25)
                    elif part < 2 and index % 3 == 1:
                        parameter.grad = parameter.grad.clone().clamp_(-1, 1)
            optimizer.step()
            seen += state(parameters)

    alike(loop, passes=3)


@check
def gradients_are_changed_by_the_scripts_own_hooks() -> None:
    def clamp(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.5, 0.5)

    def replace(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5

    def move(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data * 0.5

    for hook in (clamp, replace, move):

        def loop(parameters: Parameters, optimizer: Any, seen: list[torch.Tensor], hook: Any = hook) -> None:
            steps(parameters, optimizer, seen)
            for parameter in parameters:  # after the optimizer has its own
                parameter.register_post_accumulate_grad_hook(hook)
            steps(parameters, optimizer, seen)

        alike(loop)


@check
def two_parameters_have_one_gradient() -> None:
    def loop(parameters: Parameters, optimizer: Any, seen: list[torch.Tensor]) -> None:
        pairs = list(zip(parameters[: len(SIZES)], parameters[len(SIZES) :], strict=True))
        for _ in range(STEPS):
            for one, other in pairs:
                one.grad = other.grad = torch.zeros_like(one)
            loss_of(parameters).backward()
            optimizer.step()
            assert all(one.grad is other.grad for one, other in pairs)
            seen += state(parameters)

    alike(loop, sizes=SIZES * 2)


@check
def gradients_lie_in_one_buffer() -> None:
    def loop(parameters: Parameters, optimizer: Any, seen: list[torch.Tensor]) -> None:
        flat = torch.zeros(sum(SIZES))
        for parameter, part in zip(parameters, flat.split(list(SIZES)), strict=True):
            parameter.grad = part
        for _ in range(STEPS):
            flat.zero_()
            loss_of(parameters).backward()
            optimizer.step()
            seen.append(flat.clone())

    alike(loop)


@check
def gradients_are_set_or_missing() -> None:
    def loop(parameters: Parameters, optimizer: Any, seen: list[torch.Tensor]) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            used = [p for i, p in enumerate(parameters) if (i + hvd.rank() + step) % 3]
            loss_of(used).backward()
            optimizer.step()
            seen += state(parameters)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        set_by_hand = [parameter.grad for parameter in parameters]
        optimizer.step()
        assert all(p.grad is g for p, g in zip(parameters, set_by_hand, strict=True))

    alike(loop)


@check
def weights_are_tied() -> None:
    def loop(parameters: Parameters, optimizer: Any, seen: list[torch.Tensor]) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            sum((p * p.tanh() * torch.randn_like(p)).sum() + p.sum() for p in parameters).backward()  # type: ignore[union-attr]
            optimizer.step()
            seen += state(parameters)

    alike(loop)


if __name__ == "__main__":
    hvd.init()
    store = dist.FileStore(str(Path(os.environ["MEET"]) / "gloo"), hvd.size())
    GROUP.append(dist.ProcessGroupGloo(store, hvd.rank(), hvd.size(), timedelta(seconds=100)))
    run_named()
    hvd.barrier()
    hvd.shutdown()
