"""Trains a small model on the CPU or on the device of tests/cuda/torch_device.cpp; prints a digest of its weights.

Arguments: how, and where (cpu, fakecuda). Ways of training: hvd, hvd-fp16, hvd-strided (weights that are not in row
order), hvd-streams, hvd-strided-streams, ddp, ddp-streams. Others: calls, nb-calls and nb-few (they compare calls on
the device with those on the CPU), nb-refusal (a backend named for the CPU alone).
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
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import netbottleneck.torch as hvd

STEPS = 5
# Torch's later names, and its earlier ones.
gather_whole = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_whole = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


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
    module.is_current_stream_capturing = lambda: False
    module.current_stream = lambda device=None: types.SimpleNamespace(synchronize=_drained)
    module.stream = lambda address: _current(nb_torch_device, address)
    torch._register_device_module("fakecuda", module)
    warnings.filterwarnings("ignore", message="Set seed for")
    return nb_torch_device


DRAINED: list[None] = []  # one for each wait for the device


def _drained() -> None:
    """Wait for the current stream, as synchronize of a stream of torch.cuda does."""
    torch.zeros(1, device="fakecuda").cpu()
    DRAINED.append(None)


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


class WholeKernel(torch.nn.Conv2d):
    """A convolution of images of the kernel's size, as a matrix product: the test device has no convolution."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return one value for each image and output channel."""
        return functional.linear(images.flatten(1), self.weight.flatten(1), self.bias)


def strided_model_on(where: str) -> torch.nn.Module:
    """Return the same model on every rank. Its weights are transposed, or channels_last."""
    torch.manual_seed(0)
    wide = torch.nn.Linear(37, 6 * 7 * 7)
    wide.weight = torch.nn.Parameter(torch.randn(37, 6 * 7 * 7).div(10).t())
    model = torch.nn.Sequential(wide, torch.nn.Tanh(), torch.nn.Unflatten(1, (6, 7, 7)), WholeKernel(6, 5, 7))
    model = model.to(where, memory_format=torch.channels_last)
    assert [parameter.is_contiguous() for parameter in model.parameters()] == [False, True, False, True]
    return model


def loss_of(model: torch.nn.Module, where: str, step: int, rank: int) -> torch.Tensor:
    """Return the loss of a batch that differs by step and rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    batch = torch.randn(16, 37, generator=generator).to(where)
    wanted = torch.randn(16, 5, generator=generator).to(where)
    return functional.mse_loss(model(batch), wanted)


def refuse(*_: object) -> None:
    """Stand in for a copy in host memory."""
    raise AssertionError("a tensor travelled through a host copy")


def digest(model: torch.nn.Module) -> str:
    """Return a hash of all weights."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().numpy().tobytes())
    return found.hexdigest()


@contextlib.contextmanager
def without_host_copies() -> Iterator[None]:
    """Refuse copies of tensors in host memory."""
    plain = torch.Tensor.cpu
    torch.Tensor.cpu = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.Tensor.cpu = plain  # type: ignore[method-assign]


def train_hvd(
    model: torch.nn.Module, where: str, around: Callable[[Callable[[], None]], None], compression: Any
) -> torch.nn.Module:
    """Train with DistributedOptimizer. around: runs the forward and backward passes of a step."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    named = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=named, compression=compression)
    with without_host_copies():
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            around(lambda at=step: loss_of(model, where, at, hvd.rank()).backward())  # type: ignore[misc]
            optimizer.step()
    return model


def train_ddp(where: str, around: Callable[[Callable[[], None]], None]) -> torch.nn.Module:
    """Train with DDP over the backend nb. around: runs the forward and backward passes of a step."""
    model = model_on(where)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(dist.get_rank())  # DDP begins with rank 0's weights
    whole = DistributedDataParallel(model, bucket_cap_mb=0.1)  # several buckets
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        around(lambda at=step: loss_of(whole, where, at, dist.get_rank()).backward())  # type: ignore[misc]
        optimizer.step()
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


TYPES = (torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.float64)
OTHERS = (torch.bool, torch.int16, torch.float8_e4m3fn)  # the engine does not reduce them
LARGE = 1_500_000  # several windows


def horovods(where: str) -> list[torch.Tensor]:
    """Call Horovod's collectives on tensors of the device."""
    rank, size = hvd.rank(), hvd.size()
    results: list[Any] = []
    for dtype in TYPES:
        few = numbers(9, where, dtype, rank)
        results += [hvd.allreduce(few, op=op) for op in (hvd.Sum, hvd.Average, hvd.Max, hvd.Product)]
        results += hvd.grouped_allreduce([few, few[:4]], op=hvd.Sum)
        scattered = numbers(2 * size + 1, where, dtype, rank)
        results += [hvd.reducescatter(scattered, op=hvd.Sum), *hvd.grouped_reducescatter([scattered, few], op=hvd.Sum)]
    for dtype in (*TYPES, torch.bool, torch.int16, torch.complex64):
        ragged = numbers(3 * rank + 3, where, dtype, rank).view(rank + 1, 3)
        results += [hvd.allgather(ragged), *hvd.grouped_allgather([ragged, numbers(4, where, dtype, rank)])]
        results += [hvd.broadcast(numbers(5, where, dtype, rank), size - 1), hvd.allgather(ragged.sum())]
        rows = numbers(2 * size * (size + rank), where, dtype, rank).view(-1, 2)
        results += [hvd.alltoall(rows[: 2 * size]), *hvd.alltoall(rows, [at + rank for at in range(1, size)] + [1])]
    large = numbers(LARGE, where, of=rank)
    results += [hvd.allgather(large), hvd.reducescatter(large), hvd.alltoall(large), hvd.broadcast(large, 0)]
    assert hvd.allreduce_(large, op=hvd.Sum) is large
    assert hvd.broadcast_(few, 0) is few
    empty = torch.zeros(0, 2, device=where)
    results += [large, few, hvd.allgather(empty), hvd.alltoall(empty, [0] * size)[0], hvd.broadcast(empty, 0)]
    thin = torch.zeros(3, 0, device=where)  # torch gives it strides that are not those of its shape
    results += [hvd.allreduce(thin), hvd.allgather(thin), hvd.broadcast(thin, 0), hvd.allreduce_(thin)]
    results += hvd.grouped_allreduce([thin, few], op=hvd.Sum)
    turned = numbers(12, where, of=rank).view(3, 4).t()
    hvd.broadcast_parameters({"turned": turned, "few": results[0], "scalar": results[0].sum()}, size - 1)
    return [*results, turned]


def gradients(where: str) -> list[torch.Tensor]:
    """Differentiate through Horovod's collectives and SyncBatchNorm on the device."""
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(rank)
    leaf = numbers(4 * size, where, of=rank).view(-1, 2).requires_grad_()
    batch = torch.randn(4 + rank, 3, 5).to(where).requires_grad_()
    norm = hvd.SyncBatchNorm(3).to(where)
    weights = torch.randn(5).to(where)
    for made in (hvd.allgather(leaf), hvd.broadcast(leaf, 0), hvd.alltoall(leaf), hvd.reducescatter(leaf)):
        (made * numbers(2, where, of=0)).sum().backward()
    found = norm(batch)
    (found * weights).sum().backward()
    values = [leaf, batch, *norm.parameters()]
    return [*(value.grad for value in values if value.grad is not None), found.detach(), *norm.buffers()]


def compare_calls(where: str, exact: bool = True) -> dict[str, int]:
    """Compare Horovod's calls on the device with those on the CPU; return the number of elements, by kind of call.

    None of them copies to the host. exact False: a GPU computes what depends on its own arithmetic almost as the CPU
    does. Raises AssertionError if an element differs.
    """
    compared = {}
    for call in (horovods, gradients):
        expected = call("cpu")
        with without_host_copies():
            results = call(where)
        for found, wanted in zip(results, expected, strict=True):
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            if exact or call is horovods:
                assert torch.equal(found.cpu(), wanted), (call, found, wanted)
            else:
                torch.testing.assert_close(found.cpu(), wanted)
        compared[call.__name__] = sum(tensor.numel() for tensor in expected)
    return compared


def check_calls(where: str, device: Any) -> None:
    """Compare Horovod's calls on the device with those on the CPU, in the ways of compare_calls and others."""
    import pytest

    compare_calls(where)
    sums = [hvd.allreduce(numbers(5, at, torch.bfloat16, hvd.rank()), op=hvd.Adasum) for at in ("cpu", where)]
    assert sums[0].tolist() == sums[1].tolist()  # computed on the host
    check_handles(where, device)
    if hvd.size() > 1:
        place = where if hvd.rank() else "cpu"
        with pytest.raises(hvd.HorovodInternalError, match=r"allgather.*: rank 0 has it on cpu, rank \d on cuda"):
            hvd.allgather(torch.ones(6, device=place), name="values")


def check_handles(where: str, device: Any) -> None:
    """Begin operations behind what a stream holds, poll them on another one, and wait for them on a third."""
    size = hvd.size()
    begins, polls, waits = (device.new_stream() for _ in range(3))
    usual = device.use_stream(waits)
    starts = (hvd.allgather_async, hvd.reducescatter_async, hvd.allreduce_async)
    for turn, start in itertools.product(range(20), starts):
        device.use_stream(begins)
        tensor = torch.zeros(size, device=where)
        tensor += hvd.rank() + turn
        handle = start(tensor)
        device.use_stream(polls)
        while turn % 2 and not hvd.poll(handle):
            pass
        device.use_stream(waits)
        parts = [float(rank + turn) for rank in range(size)]
        mean = [sum(parts) / size]
        expected = {starts[0]: [part for part in parts for _ in range(size)], starts[1]: mean, starts[2]: mean * size}
        assert hvd.synchronize(handle).tolist() == expected[start]
    device.use_stream(usual)
    tensor = torch.ones(5, device=where)
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
    tensor.set_(torch.full((5,), 7.0, device=where))  # type: ignore[call-overload]
    assert hvd.synchronize(handle).tolist() == [size] * 5


def numbers(count: int, where: str, dtype: torch.dtype = torch.float32, of: int | None = None) -> torch.Tensor:
    """Return small integers that differ from rank to rank."""
    seed = dist.get_rank() if of is None else of
    return ((torch.arange(count) * (seed + 3) + seed) % 5).to(dtype).to(where)


def reductions(where: str) -> list[torch.Tensor]:
    """Reduce on the device in all ways."""
    ops = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)
    cases = [(9, dtype, op) for op in ops for dtype in TYPES]
    cases += [(count, torch.float32, dist.ReduceOp.SUM) for count in (1, 0, LARGE)]
    cases += [(9, torch.int16, dist.ReduceOp.SUM), (LARGE, torch.int32, dist.ReduceOp.BXOR)]
    results = [numbers(count, where, dtype) for count, dtype, _ in cases]
    for tensor, (_, _, op) in zip(results, cases, strict=True):
        dist.all_reduce(tensor, op)
    turned = numbers(12, where).reshape(3, 4).t()
    dist.all_reduce(turned)
    some = [numbers(5, where), numbers(7, where, torch.int64), numbers(0, where), numbers(3, where)]
    dist.group.WORLD.allreduce_coalesced(some).wait()  # type: ignore[union-attr]
    at_root, last = numbers(40, where), dist.get_world_size() - 1
    dist.reduce(at_root, last)
    scattered = [torch.zeros(4, dtype=dtype, device=where) for dtype in (torch.float32, torch.int16)]
    whole = numbers(4 * dist.get_world_size(), where)
    scatter_whole(scattered[0], whole)
    dist.reduce_scatter(scattered[1], list(whole.to(torch.int16).split(4)), dist.ReduceOp.BOR)
    return [*results, turned, *some, *scattered, whole, *([at_root] if dist.get_rank() == last else [])]


def moves(where: str) -> list[torch.Tensor]:
    """Move tensors on the device in all ways."""
    size, rank = dist.get_world_size(), dist.get_rank()
    results: list[torch.Tensor] = []
    for count, dtype in [(6, dtype) for dtype in (*TYPES, *OTHERS)] + [(LARGE, torch.float32), (0, torch.float32)]:
        mine = numbers(count, where, dtype)
        parts = [torch.zeros_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine)
        spread = mine.clone()
        dist.broadcast(spread, size - 1)
        results += [*parts, spread]
    line = torch.zeros(3 * size, device=where)
    gather_whole(line, numbers(3, where))
    even = torch.zeros(2 * size, 3, device=where)
    dist.all_to_all_single(even, numbers(6 * size, where).reshape(2 * size, 3))
    counts = [(rank + other) % 3 for other in range(size)]
    uneven = torch.zeros(sum(counts), 2, device=where)
    dist.all_to_all_single(uneven, numbers(2 * sum(counts), where).reshape(sum(counts), 2), counts, counts)
    listed = [torch.zeros(other + 1, device=where) for other in range(size)]
    dist.all_to_all(listed, [numbers(rank + 1, where) + other for other in range(size)])
    at_root = [torch.zeros(5, device=where) for _ in range(size)] if rank == 0 else None
    dist.gather(numbers(5, where), at_root, 0)
    into = torch.zeros(2, 4, device=where).t()
    given = [numbers(8, where).reshape(4, 2) + other for other in range(size)] if rank == size - 1 else None
    dist.scatter(into, given, size - 1)
    return [*results, line, even, uneven, *listed, *(at_root or []), into]


def messages(where: str) -> list[torch.Tensor]:
    """Send tensors on the device around, more than there are names for, and receive them in another order."""
    size, rank = dist.get_world_size(), dist.get_rank()
    after, before = (rank + 1) % size, (rank - 1) % size
    sent = [dist.isend(numbers(at % 7, where) + at, after, tag=at % 2) for at in range(40)]
    came = [torch.zeros(at % 7, device=where) for at in range(40)]
    received = [dist.irecv(came[at], before, tag=at % 2) for at in (*range(1, 40, 2), *range(0, 40, 2))]
    for work in (*reversed(received), *sent):
        assert work is not None
        assert work.wait()
    return came


def compare_nb(where: str) -> dict[str, int]:
    """Compare the backend's calls on the device with those on the CPU; return the number of elements, by kind of call.

    Raises AssertionError if an element differs.
    """
    compared = {}
    for call in (reductions, moves, *([messages] if dist.get_world_size() > 1 else [])):
        expected, results = ([tensor.cpu() for tensor in call(place)] for place in ("cpu", where))
        for found, wanted in zip(results, expected, strict=True):
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), call
            assert torch.equal(found, wanted), (call, found, wanted)
        compared[call.__name__] = sum(tensor.numel() for tensor in expected)
    dist.barrier()
    return compared


def check_few(where: str, _: Any) -> None:
    """Compare a few of the backend's calls on the device with those on the CPU."""
    for call in (gather_parts, messages):
        for found, wanted in zip(call(where), call("cpu"), strict=True):
            assert torch.equal(found.cpu(), wanted)
    dist.barrier()


def gather_parts(where: str) -> list[torch.Tensor]:
    """Sum, and gather the sums."""
    total, parts = numbers(9, where), [torch.zeros(9, device=where) for _ in range(dist.get_world_size())]
    dist.all_reduce(total)
    dist.all_gather(parts, total)
    return [total, *parts]


def check_nb(where: str, device: Any) -> None:
    """Compare the backend's calls on the device with those on the CPU, and how they use streams."""
    import pytest

    size, rank = dist.get_world_size(), dist.get_rank()
    compare_nb(where)
    check_waits(where, device)
    alone = [dist.new_group([other]) for other in range(size)][rank]
    mine, into = numbers(4, where), torch.zeros(4, device=where)
    dist.all_reduce(mine, dist.ReduceOp.AVG, group=alone)
    dist.all_to_all_single(into, mine, group=alone)
    assert into.tolist() == mine.tolist() == numbers(4, "cpu").tolist()
    if size > 1:
        with pytest.raises(RuntimeError, match=r"gradient .*: rank 0 has it on cpu, rank \d on cuda"):
            dist.all_reduce(torch.ones(6, device=where if rank else "cpu"))


def check_refusal(where: str, _: Any) -> None:
    """Give the backend a tensor on a device for which it was not named."""
    import pytest

    assert [device.type for device in dist.group.WORLD._device_types] == ["cpu"]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=f'moves the memory of cpu in this group.* as in .*"cpu:nb,{where}:nb"'):
        dist.all_reduce(torch.ones(2, device=where))


def check_waits(where: str, device: Any) -> None:
    """Begin operations behind what a stream holds, and wait for them on another one."""
    size, rank = dist.get_world_size(), dist.get_rank()
    begins, waits = device.new_stream(), device.new_stream()
    usual = device.use_stream(waits)
    # By the engine; by the ranks, in two rounds.
    for turn, dtype in itertools.product(range(60), (torch.float32, torch.int16)):
        count = LARGE if turn < 3 else 100
        device.use_stream(begins)
        tensor = torch.zeros(count, device=where, dtype=dtype)
        tensor += rank + turn
        work = dist.all_reduce(tensor, async_op=True)
        device.use_stream(waits)
        assert work is not None
        expected = torch.full((count,), size * turn + sum(range(size)), dtype=dtype)
        if turn % 3 == 0:
            while not work.is_completed():
                pass
        elif turn % 3 == 1:
            doubled = work.get_future().then(lambda done: done.value()[0] * 2)
            assert torch.equal(doubled.wait().cpu(), 2 * expected)
            assert work.get_future().wait()[0] is tensor
        else:
            assert work.wait()
        assert torch.equal(tensor.cpu(), expected)
        assert work.is_completed()
        assert work.is_success()
    device.use_stream(usual)
    works = [dist.all_reduce(torch.ones(8, device=where), async_op=True) for _ in range(40)]
    whole = torch.futures.collect_all([work.get_future() for work in works if work is not None]).wait()
    assert [done.value()[0][0].item() for done in whole] == [float(size)] * 40


def main() -> None:
    """Run one way of training."""
    how, where = sys.argv[1:]
    device = open_device() if where != "cpu" else None
    around = on_streams(device) if how.endswith("streams") else lambda work: work()
    if how.startswith(("ddp", "nb")):
        dist.init_process_group(os.environ.get("CHECKED_BACKEND", "nb"))
        if how.startswith("nb"):
            {"nb-calls": check_nb, "nb-few": check_few, "nb-refusal": check_refusal}[how](where, device)
        print("right" if how.startswith("nb") else digest(train_ddp(where, around)), flush=True)
        dist.destroy_process_group()
        return
    hvd.init()
    if how == "calls":
        check_calls(where, device)
        print("right", flush=True)
    else:
        compression = hvd.Compression.fp16 if how == "hvd-fp16" else hvd.Compression.none
        model = strided_model_on(where) if "strided" in how else model_on(where)
        print(digest(train_hvd(model, where, around, compression)), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
