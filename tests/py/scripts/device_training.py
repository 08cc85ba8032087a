"""Trains a small model on the CPU or on the device of tests/cuda/torch_device.cpp; prints a digest of its weights.

Arguments: how (hvd, streams, calls) and where (cpu, fakecuda).
"""

import contextlib
import hashlib
import itertools
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

import netbottleneck.torch as hvd
from netbottleneck.torch import handles

STEPS = 5


def open_device() -> Any:
    """Make torch know the device. The driver is the library that NETBOTTLENECK_CUDA_LIBRARY names."""
    sys.path.insert(0, os.environ["DEVICE_FOLDER"])
    import nb_torch_device

    module: Any = types.ModuleType("torch.fakecuda")
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.ExternalStream = lambda address, device=None: address
    module.stream = lambda address: _current(nb_torch_device, address)
    torch._register_device_module("fakecuda", module)
    warnings.filterwarnings("ignore", message="Set seed for")
    return nb_torch_device


@contextlib.contextmanager
def _current(device: Any, stream: int) -> Iterator[None]:
    """Make a stream the current one, as torch.cuda.stream does."""
    before = device.use_stream(stream)
    try:
        yield
    finally:
        device.use_stream(before)


def model_on(where: str) -> torch.nn.Module:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    sizes = (37, 300, 300, 5)
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2]).to(where)


def loss_of(model: torch.nn.Module, where: str, step: int, rank: int) -> torch.Tensor:
    """Return the loss of a batch that differs by step and rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    batch = torch.randn(16, 37, generator=generator).to(where)
    wanted = torch.randn(16, 5, generator=generator).to(where)
    return functional.mse_loss(model(batch), wanted)


def refuse(*_: object) -> None:
    """Stand in for the path through a copy in host memory."""
    raise AssertionError("a gradient travelled through a host copy")


def digest(model: torch.nn.Module) -> str:
    """Return a hash of all weights."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def train_hvd(where: str, around: Callable[[Callable[[], None]], None]) -> torch.nn.Module:
    """Train with DistributedOptimizer. around: runs the forward and backward passes of a step."""
    model = model_on(where)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    plain, handles.Memory.__init__ = handles.Memory.__init__, refuse  # type: ignore[method-assign,assignment]
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        around(lambda at=step: loss_of(model, where, at, hvd.rank()).backward())  # type: ignore[misc]
        optimizer.step()
    handles.Memory.__init__ = plain  # type: ignore[method-assign]
    return model


def on_streams(device: Any) -> Callable[[Callable[[], None]], None]:
    """Return a function that runs passes on a stream of their own, as a user of CUDA streams does."""
    if device is None:
        return lambda work: work()
    others = [device.new_stream(), device.new_stream()]

    def run(work: Callable[[], None]) -> None:
        others.reverse()
        usual = device.use_stream(others[0])
        device.wait_stream(others[0], usual)
        work()
        device.wait_stream(usual, others[0])
        device.use_stream(usual)

    return run


def check_calls(where: str) -> None:
    """Call Horovod's collectives on tensors of the device."""
    rank, size = hvd.rank(), hvd.size()
    ones = torch.ones(5, device=where) * (rank + 1)
    total = float(sum(range(1, size + 1)))
    assert hvd.allreduce(ones, op=hvd.Sum).tolist() == [total] * 5
    assert hvd.allreduce(ones, op=hvd.Sum).device.type == where
    assert [t.tolist() for t in hvd.grouped_allreduce([ones, ones], op=hvd.Sum)] == [[total] * 5] * 2
    assert hvd.broadcast(ones, 1).tolist() == [2.0] * 5
    assert hvd.allgather(torch.ones(rank + 1, device=where)).tolist() == [1.0] * int(total)
    exchanged, _ = hvd.alltoall(ones[: 2 * size], torch.tensor([2] * size) if size == 2 else None)
    assert exchanged.device.type == where
    scattered = hvd.reducescatter(torch.ones(2 * size, device=where), op=hvd.Sum)
    assert scattered.tolist() == [float(size)] * 2
    assert hvd.allreduce_(ones, op=hvd.Sum) is ones
    assert ones.tolist() == [total] * 5


def main() -> None:
    """Run one way of training."""
    how, where = sys.argv[1:]
    device = open_device() if where != "cpu" else None
    hvd.init()
    if how == "calls":
        check_calls(where)
        print("right", flush=True)
    else:
        around = on_streams(device) if how == "streams" else lambda work: work()
        print(digest(train_hvd(where, around)), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
