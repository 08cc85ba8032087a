"""One rank of the checks of DistributedOptimizer: training on all ranks equals training on all data at once."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from named_checks import check, main
from torch.nn import functional as F

import netbottleneck.torch as hvd


def raises(kind: type[BaseException], message: str) -> Any:
    return pytest.raises(kind, match=re.escape(message))


def whole(*shape: int, seed: int) -> torch.Tensor:
    """Small integers, the same on every rank, with exact sums."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


class Net(torch.nn.Module):
    """Parameters that are small, large enough for a direct gradient, shared, channels-last, and never used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.wide = torch.nn.Linear(3, 40000, bias=False)
        self.back = torch.nn.Linear(40000, 4)
        self.shared = torch.nn.Linear(4, 4)
        self.unused = torch.nn.Linear(5, 5)
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        for number, parameter in enumerate(self.parameters()):
            with torch.no_grad():
                parameter.copy_(whole(*parameter.shape, seed=number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.back(self.wide(self.conv(x).amax((2, 3)))) * 2**-12
        return self.shared(self.shared(x)) * self.scale


def batch(step: int, rank: int) -> torch.Tensor:
    return whole(2, 2, 3, 3, seed=100 * step + rank)


def expected(model: Net, steps: int, op: int = hvd.Average, passes: int = 1) -> None:
    """Train a copy of the model on the batches of all ranks, one after the other."""
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-10, momentum=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(hvd.size()):
            for each in range(passes):
                model(batch(step * passes + each, rank)).sum().backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif op == hvd.Average:
                parameter.grad /= hvd.size()
        optimizer.step()


def close(model: Net, other: Net) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        everyone = hvd.allgather(mine.detach().reshape(1, -1).contiguous())
        assert all(torch.equal(row, everyone[0]) for row in everyone), name


def train(model: Net, optimizer: Any, steps: int, set_to_none: bool = True, passes: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for each in range(passes):
            model(batch(step * passes + each, hvd.rank())).sum().backward()
        optimizer.step()


def wrapped(model: Net, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-10, momentum=0.5)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


def trains(steps: int = 4, set_to_none: bool = True, passes: int = 1, op: int = hvd.Average, **options: Any) -> None:
    model, other = Net(), Net()
    optimizer = wrapped(model, backward_passes_per_step=passes, op=op, **options)
    train(model, optimizer, steps, set_to_none, passes)
    expected(other, steps, op, passes)
    close(model, other)


@check
def equals_training_on_all_data() -> None:
    trains()


@check
def gradients_are_kept_or_forgotten() -> None:
    trains(set_to_none=False)


@check
def a_rank_that_joins_before_its_first_step_trains_on() -> None:
    model, other, last = Net(), Net(), hvd.size() - 1
    optimizer = wrapped(model)
    if hvd.rank() < last:
        for rank in range(last):
            other(batch(0, rank)).sum().backward()
        train(model, optimizer, 2)
        optimizer.zero_grad()
        model.load_state_dict(Net().state_dict())
        model(batch(0, hvd.rank())).sum().backward()
        optimizer.synchronize()
        for mine, wanted in zip(model.parameters(), other.parameters(), strict=True):
            assert mine.grad is not None
            everyones = torch.zeros_like(mine) if wanted.grad is None else wanted.grad / hvd.size()
            torch.testing.assert_close(mine.grad, everyones, rtol=1e-5, atol=1e-5)
    hvd.join()
    model.load_state_dict(Net().state_dict())
    optimizer.state.clear()
    optimizer.zero_grad()
    with optimizer.skip_synchronize():
        optimizer.step()
    other = Net()
    train(model, optimizer, 3)
    expected(other, 3)
    close(model, other)


@check
def sums_instead_of_averages() -> None:
    trains(op=hvd.Sum, steps=3)


@check
def several_passes_a_step() -> None:
    trains(passes=3)


@check
def groups_are_numbers_or_lists() -> None:
    trains(steps=2, num_groups=2)
    trains(steps=2, groups=0)
    model = Net()
    groups = [list(model.conv.parameters()), model.back.parameters()]
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), groups=groups)


@check
def predivided() -> None:
    trains(gradient_predivide_factor=2.0)


@check
def compressed_on_the_slow_path() -> None:
    class Double(hvd.Compression.none):  # type: ignore[misc, name-defined]
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return tensor.double(), tensor.dtype

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            return tensor.to(ctx)

    trains(compression=Double)
    trains(compression=Double, passes=2)
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), compression=hvd.Compression.fp16, op=hvd.Sum
    )
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert model.weight.tolist() == [[1.0 - hvd.size()] * 4]


@check
def class_and_state_are_the_base_optimizers() -> None:
    model = Net()
    base = torch.optim.Adam(model.parameters(), lr=0.5)
    schedule_before = torch.optim.lr_scheduler.StepLR(base, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(base, named_parameters=model.named_parameters())
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    train(model, optimizer, 1)
    schedule.step()
    assert abs(optimizer.param_groups[0]["lr"] - 0.05) < 1e-9
    del schedule_before
    saved = copy.deepcopy(optimizer.state_dict())
    assert len(saved["state"]) == len(list(model.parameters()))
    optimizer.load_state_dict(saved)
    train(model, optimizer, 1)
    same = hvd.allgather_object({k: v.tolist() for k, v in model.state_dict().items() if v.numel() < 100})
    assert same[0] == same[hvd.rank()]
    assert set(optimizer._parameter_names.values()) == {name for name, _ in model.named_parameters()}


@check
def hooks_of_the_user_run_once_a_step_also_after_a_state_was_loaded() -> None:
    model = Net()
    optimizer = wrapped(model)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    for _ in range(2):
        called.clear()
        train(model, optimizer, 1)
        assert called == ["before", "after"]
        optimizer.load_state_dict(optimizer.state_dict())


@check
def a_loaded_state_begins_the_step_again() -> None:
    for options in ({}, {"compression": hvd.Compression.fp16}):
        weight = torch.nn.Parameter(torch.zeros(4))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), backward_passes_per_step=4, **options)
        for step, passes in enumerate((2, 4)):  # after four, gradients are in flight
            for _ in range(passes):
                weight.sum().backward()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
            for _ in range(4):
                weight.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert weight.tolist() == [-4.0 * (step + 1)] * 4


@check
def clipping_between_synchronize_and_step() -> None:
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.full((1, 4), float(hvd.rank()))) * 64).sum().backward()
        optimizer.synchronize()
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[32.0 * (hvd.size() - 1)] * 4]
        model.weight.grad.clamp_(max=1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with optimizer.skip_synchronize():
                optimizer.step()
    assert model.weight.tolist() == [[-3.0] * 4]


@check
def misuse_raises() -> None:
    model = Net()
    optimizer = wrapped(model)
    model(batch(0, hvd.rank())).sum().backward()
    with raises(AssertionError, "zero_grad() was called after loss.backward()"):
        optimizer.zero_grad()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    (own,) = (w for w in caught if "optimizer.step() called without optimizer.skip_synchronize()" in str(w.message))
    assert own.filename == __file__
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    with raises(ValueError, "leaves out 1 parameters"):
        hvd.DistributedOptimizer(base, named[1:])
    with raises(ValueError, "unique names"):
        hvd.DistributedOptimizer(base, [("same", p) for _, p in named])
    with raises(ValueError, "pairs"):
        hvd.DistributedOptimizer(base, list(model.parameters()))
    with raises(ValueError, "gradient_predivide_factor"):
        hvd.DistributedOptimizer(base, named, op=hvd.Sum, gradient_predivide_factor=2.0)
    with raises(ValueError, "at least 1"):
        hvd.DistributedOptimizer(base, named, backward_passes_per_step=0)
    weight = named[0][1]
    for groups in ("x", -1, 1.5, [1], [weight], [[weight], 2]):
        for argument in ("groups", "num_groups"):
            with raises(ValueError, "must be a whole number, at least 0, or a list of lists of tensors"):
                hvd.DistributedOptimizer(base, named, **{argument: groups})
    with raises(ValueError, "groups must consist of tensors"):
        hvd.DistributedOptimizer(base, named, groups=[["x"]])
    with raises(ValueError, "a tensor may be in groups only once"):
        hvd.DistributedOptimizer(base, named, groups=[[weight], [weight]])
    strange = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with raises(ValueError, "torch.complex64"):
        hvd.DistributedOptimizer(torch.optim.SGD([strange], lr=0.1))


@check
def a_parameter_that_ranks_train_apart_is_named_once() -> None:
    for added in (False, True):
        model, more = Net(), torch.nn.Linear(4, 2)
        model.shared.weight.requires_grad_(added)
        optimizer = wrapped(model)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            train(model, optimizer, 1)
            if added:
                optimizer.add_param_group({"params": more.bias.requires_grad_(False)})
                train(model, optimizer, 1)
                assert not [one for one in seen if "train them apart" in str(one.message)]
                optimizer.add_param_group({"params": more.weight})
            model.shared.weight.requires_grad_(True)
            train(model, optimizer, 2)
        (warning,) = [str(one.message) for one in seen if "train them apart" in str(one.message)]
        named = "number 0 of group 2 (added)" if added else "shared.weight (unfrozen)"
        assert f"train them apart: {named}. To train them together" in warning, warning


@check
def one_pass_too_many() -> None:
    for options in ({}, {"op": hvd.Sum}, {"compression": hvd.Compression.fp16}):
        model = Net()
        optimizer = wrapped(model, **options)
        model(batch(0, hvd.rank())).sum().backward()
        with raises(AssertionError, "backward_passes_per_step"):
            model(batch(1, hvd.rank())).sum().backward()
        optimizer.step()
        hvd.barrier()


@check
def passes_can_change_between_steps() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.set_backward_passes_per_step(2)
    optimizer.zero_grad()
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert model.weight.tolist() == [[-3.0, -3.0]]


@check
def a_rank_that_skips_a_parameter() -> None:
    first, second = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
    parameters = [first.weight, second.weight]
    for parameter in parameters:
        torch.nn.init.zeros_(parameter)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum)
    for step in range(3):
        optimizer.zero_grad()
        chosen = first if (hvd.rank() + step) % 2 == 0 else second
        chosen(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    counts = [sum((rank + step) % 2 == which for rank in range(hvd.size()) for step in range(3)) for which in (0, 1)]
    assert [parameter[0, 0].item() for parameter in parameters] == [-float(count) for count in counts]


@check
def gradients_that_the_user_replaces() -> None:
    weight = torch.nn.Parameter(torch.zeros(8))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    for _ in range(3):
        weight.grad = torch.full((8,), 5.0)  # something of the user's own, to which backward adds
        weight.sum().backward()
        optimizer.step()
    assert weight.tolist() == [-18.0 * hvd.size()] * 8


@check
def a_closure_is_reduced_after_it_ran() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight * (hvd.rank() + 1)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert weight.tolist() == [-hvd.size() * (hvd.size() + 1) / 2] * 2


@check
def sparse_gradients_can_be_made_dense() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), op=hvd.Sum, sparse_as_dense=True)
    table(torch.tensor([hvd.rank(), 3])).sum().backward()
    optimizer.step()
    column = table.weight[:, 0].tolist()
    assert column == [-1.0 if row < hvd.size() else 0.0 for row in range(3)] + [-float(hvd.size())]


@check
def half_precision_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3).bfloat16(), torch.nn.Linear(3, 3).double())
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum)
    for _ in range(2):
        optimizer.zero_grad()
        (model[0](torch.ones(1, 3).bfloat16()).double() + model[1](torch.ones(1, 3).double())).sum().backward()
        optimizer.step()
    for parameter in model.parameters():
        assert torch.equal(parameter, torch.full_like(parameter, -2.0 * hvd.size()))


@check
def buckets_settle_on_one_order() -> None:
    first, second = torch.nn.Linear(600, 600), torch.nn.Linear(600, 600)
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0))
    gradients = optimizer._carrier.inner.gradients
    assert [bucket.parameters for bucket in gradients.buckets] == [(3, 2), (1, 0)]
    for _ in range(3):
        first(F.relu(second(torch.ones(1, 600)))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = [bucket.parameters for bucket in gradients.buckets]
    assert gradients.version == 1
    assert sorted(seen[0]) == [0, 1]
    assert hvd.allgather_object(seen) == [seen] * hvd.size()


def in_another_order(parameters: list[Any]) -> list[Any]:
    """The same parameters, in an order of each rank's own."""
    return parameters[hvd.rank() :] + parameters[: hvd.rank()]


PATHS: list[dict[str, Any]] = [
    {},
    {"op": hvd.Sum},
    {"op": hvd.Max},
    {"op": hvd.Adasum},
    {"sparse_as_dense": True},
    {"compression": hvd.Compression.fp16},
    {"backward_passes_per_step": 2},
]


@check
def gradients_match_by_name_whatever_the_order_of_the_parameters() -> None:
    for options in PATHS:
        for of_same_size in (True, False):
            sizes = [4] * 5 if of_same_size else [2, 70_000, 3, 2, 5]
            weights = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
            named = [(f"weight{index}", weight) for index, weight in enumerate(weights)]
            base = torch.optim.SGD(in_another_order(weights), lr=1.0)
            optimizer = hvd.DistributedOptimizer(base, in_another_order(named[::-1]), **options)
            passes, op = options.get("backward_passes_per_step", 1), options.get("op", hvd.Average)
            for _ in range(3):
                optimizer.zero_grad()
                for _ in range(passes):
                    sum(((index + 1) * weight).sum() for index, weight in enumerate(weights)).backward()
                optimizer.step()
            for index, weight in enumerate(weights):
                total = -3.0 * (index + 1) * passes * (hvd.size() if op == hvd.Sum else 1)
                if op == hvd.Adasum:
                    torch.testing.assert_close(weight, torch.full_like(weight, total), rtol=1e-5, atol=0)
                else:
                    assert torch.equal(weight, torch.full_like(weight, total)), (options, index)


@check
def sparse_gradients_match_by_name_whatever_the_order_of_the_parameters() -> None:
    tables = [torch.nn.Embedding(4, 2, sparse=index != 1) for index in range(3)]
    weights = [table.weight for table in tables]
    for weight in weights:
        torch.nn.init.zeros_(weight)
    named = [(f"{index}.weight", weight) for index, weight in enumerate(weights)]
    base = torch.optim.SGD(in_another_order(weights), lr=1.0)
    optimizer = hvd.DistributedOptimizer(base, named, op=hvd.Sum)
    for _ in range(3):
        optimizer.zero_grad()
        sum(table(torch.tensor([index])).sum() * (index + 1) for index, table in enumerate(tables)).backward()
        optimizer.step()
    for index, weight in enumerate(weights):
        wanted = torch.zeros(4, 2)
        wanted[index] = -3.0 * (index + 1) * hvd.size()
        assert torch.equal(weight, wanted), index


@check
def buckets_hold_the_same_names_and_follow_the_backward_pass() -> None:
    layers = torch.nn.Sequential(*[torch.nn.Linear(600, 600, bias=False) for _ in range(3)])
    base = torch.optim.SGD(in_another_order(list(layers.parameters())), lr=0.0)
    optimizer = hvd.DistributedOptimizer(base, layers.named_parameters())
    gradients = optimizer._carrier.inner.gradients
    for _ in range(2):
        layers(torch.ones(1, 600)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = [[gradients.names[index] for index in bucket.parameters] for bucket in gradients.buckets]
    assert seen == [["2.weight"], ["1.weight", "0.weight"]]
    assert hvd.allgather_object(seen) == [seen] * hvd.size()


@check
def different_parameters_are_named_on_every_rank() -> None:
    last = hvd.size() - 1
    own = "b" if hvd.rank() < last else "c"
    missing = rf"only rank 0 has b \[2\]; only rank {last} has c \[2\]$"
    for options in ({}, {"sparse_as_dense": True}, {"gradient_predivide_factor": 2.0}):
        a, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, other], lr=1.0), [("a", a), (own, other)], **options)
        (a.sum() + other.sum()).backward()
        with pytest.raises(ValueError, match=missing):
            optimizer.step()
        assert other.tolist() == [0.0, 0.0]
    shapes = torch.nn.Parameter(torch.zeros(2 if hvd.rank() < last else 3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([shapes], lr=1.0))
    shapes.sum().backward()
    with raises(ValueError, f"only rank 0 has parameter 0 [2]; only rank {last} has parameter 0 [3]"):
        optimizer.step()


if __name__ == "__main__":
    main()
