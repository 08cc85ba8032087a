"""One rank that trains with the backend "nb": runs the named checks and prints "ok NAME" after each.

The reference is training with gloo, in a group of the same ranks in the same process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import netbottleneck.torch  # noqa: F401

CHECKS: dict[str, Callable[[], None]] = {}
STEPS = 4


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


class Net(torch.nn.Module):
    """Two branches, one of which may be unused; buffers that DDP synchronises."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 33)
        self.norm = torch.nn.BatchNorm1d(33)
        self.other = torch.nn.Linear(16, 33)
        self.last = torch.nn.Linear(33, 5)

    def forward(self, x: torch.Tensor, other: bool = False) -> torch.Tensor:
        hidden = self.norm(self.first(x))
        return self.last(torch.relu(hidden + self.other(x) if other else hidden))  # type: ignore[no-any-return]


def inputs(step: int) -> torch.Tensor:
    """Return a batch, different on each rank."""
    torch.manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 16)


def trained(group: Any, prepare: Callable[[Any], None] | None = None, **options: Any) -> list[torch.Tensor]:
    """Return the state of a DDP model after some steps."""
    torch.manual_seed(dist.get_rank())  # DDP makes them alike
    model = Net()
    ddp = DistributedDataParallel(model, process_group=group, **{"bucket_cap_mb": 0.001, **options})
    if prepare is not None:
        prepare(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    uneven = options.get("find_unused_parameters", False)
    for step in range(STEPS):
        optimizer.zero_grad()
        other = not uneven or (step + dist.get_rank()) % 2 == 0
        if step == 1:
            with ddp.no_sync():
                ddp(inputs(step + 50), other).square().mean().backward()
        ddp(inputs(step), other).square().mean().backward()
        optimizer.step()
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def alike(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Compare exactly on two ranks; with more ranks the order of additions may differ."""
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        if dist.get_world_size() <= 2:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def compare(prepare: Callable[[Any], None] | None = None, **options: Any) -> None:
    ours = trained(None, prepare, **options)
    alike(ours, trained(dist.new_group(backend="gloo"), prepare, **options))
    everybody = [torch.zeros_like(ours[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, ours[0])
    assert all(torch.equal(one, ours[0]) for one in everybody)


@check
def ddp_trains_as_with_gloo() -> None:
    compare()
    compare(gradient_as_bucket_view=True)
    compare(static_graph=True)
    compare(find_unused_parameters=True)


@check
def hooks_of_ddp_work() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    compare(lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook))
    compare(lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook))


@check
def a_hook_that_waits_inside_a_callback_works() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    def compress(ddp: Any) -> None:
        state = powerSGD_hook.PowerSGDState(ddp.process_group, 1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    # One bucket: the callbacks of several begin their operations in any order, which is too much for gloo.
    ours = trained(None, compress, bucket_cap_mb=25)
    theirs = trained(dist.new_group(backend="gloo"), compress, bucket_cap_mb=25)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@check
def sparse_gradients_are_added() -> None:
    def trained_rows(group: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 1))
        ddp = DistributedDataParallel(model, process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(2):
            optimizer.zero_grad()
            ddp(torch.tensor([dist.get_rank(), step, 7])).sum().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    alike(trained_rows(None), trained_rows(dist.new_group(backend="gloo")))


@check
def functional_collectives_work() -> None:
    import torch.distributed._functional_collectives as functional

    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    total = functional.all_reduce(torch.ones(3) * (rank + 1), "sum", group)
    assert total.tolist() == [size * (size + 1) / 2] * 3
    line = functional.all_gather_tensor(torch.tensor([float(rank)]), 0, group)
    assert line.tolist() == [float(other) for other in range(size)]
    part = functional.reduce_scatter_tensor(torch.ones(size), "sum", 0, group)
    assert part.tolist() == [float(size)]
    came = functional.all_to_all_single(torch.full((size,), float(rank)), None, None, group)
    assert came.tolist() == [float(other) for other in range(size)]


def sharded(group: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.ReLU(), torch.nn.Linear(33, 5))
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int = 0) -> None:
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        optimizer.step()


def whole(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]  # type: ignore[operator]


@check
def fsdp_trains_as_with_gloo() -> None:
    results = []
    for group in (None, dist.new_group(backend="gloo")):
        model, optimizer = sharded(group)
        steps(model, optimizer)
        results.append(whole(model))
    alike(*results)


@check
def a_checkpoint_comes_back() -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def states(model: Any, optimizer: Any) -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    model, optimizer = sharded(None)
    steps(model, optimizer)
    folder = Path(os.environ["CHECKPOINT"])
    dcp.save(states(model, optimizer), checkpoint_id=folder / "now")
    kept = whole(model)
    later = dcp.async_save(states(model, optimizer), checkpoint_id=folder / "later")
    later.result(timeout=100)  # type: ignore[union-attr]
    steps(model, optimizer, 10)
    trained_on = whole(model)
    for name in ("now", "later"):
        torch.manual_seed(77)
        fresh, its_optimizer = sharded(None)
        state = states(fresh, its_optimizer)
        dcp.load(state, checkpoint_id=folder / name)
        set_state_dict(fresh, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert all(torch.equal(one, other) for one, other in zip(whole(fresh), kept, strict=True))
        steps(fresh, its_optimizer, 10)
        assert all(torch.equal(one, other) for one, other in zip(whole(fresh), trained_on, strict=True))


def main() -> None:
    dist.init_process_group("cpu:nb", timeout=timedelta(seconds=60))
    for name in sys.argv[1:]:
        CHECKS[name]()
        print("ok", name)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
