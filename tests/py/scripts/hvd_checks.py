"""One rank of the Horovod checks: runs the named ones in order and prints "ok NAME" after each."""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import tracemalloc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from named_checks import check, main

import netbottleneck
import netbottleneck.torch as hvd

REDUCED = [
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def raises(kind: type[BaseException], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        call()


def same_everywhere(tensor: torch.Tensor) -> None:
    everyone = hvd.allgather(tensor.detach().reshape(1, -1).contiguous())
    assert all(torch.equal(row, everyone[0]) for row in everyone)


@check
def who_is_who() -> None:
    assert (hvd.rank(), hvd.size()) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_initialized()
    assert hvd.is_homogeneous()
    assert not hvd.nccl_built()
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert hvd.mpi_built()
    assert not hvd.mpi_enabled()
    raises(ValueError, "was not started by mpirun", hvd.mpi_threads_supported)


@check
def init_and_shutdown_repeat() -> None:
    hvd.init()
    for number in range(30):
        hvd.shutdown()
        assert not hvd.is_initialized()
        raises(ValueError, "has not been initialized", hvd.rank)
        assert hvd.synchronize(0) is None
        hvd.init()
        assert hvd.allreduce(torch.tensor([number]), op=hvd.Sum).item() == number * hvd.size()


@check
def allreduce_is_exact_in_every_type() -> None:
    for dtype, dims in itertools.product(REDUCED, range(4)):
        tensor = torch.arange(3**dims).reshape([3] * dims).to(dtype)
        kept = tensor.clone()
        total = hvd.allreduce(tensor, op=hvd.Sum)
        assert torch.equal(tensor, kept)
        assert total.dtype == dtype
        assert torch.equal(total, tensor * hvd.size())
        assert torch.equal(hvd.allreduce(tensor), tensor)
        inplace = tensor.clone()
        assert hvd.allreduce_(inplace, op=hvd.Sum) is inplace
        assert torch.equal(inplace, tensor * hvd.size())


@check
def reductions_other_than_sums() -> None:
    mine = torch.tensor([hvd.rank(), -hvd.rank(), 2], dtype=torch.int64)
    last = hvd.size() - 1
    assert hvd.allreduce(mine, op=hvd.Max).tolist() == [last, 0, 2]
    assert hvd.allreduce(mine, op=hvd.Min).tolist() == [0, -last, 2]
    assert hvd.allreduce(mine, op=hvd.Product).tolist() == [0, 0, 2 ** hvd.size()]
    raises(ValueError, "floating-point", lambda: hvd.allreduce(mine, op=hvd.Adasum))
    raises(ValueError, "op=9", lambda: hvd.allreduce(mine, op=9))


@check
def factors_may_be_zero() -> None:
    for dtype in (torch.float32, torch.float16, torch.int32):
        mine = torch.tensor([3, -4, 5], dtype=dtype)
        for factors in ((0.0, 1.0), (1.0, 0.0), (-0.0, 2.0)):
            scales = dict(zip(("prescale_factor", "postscale_factor"), factors, strict=True))
            for op in (hvd.Sum, hvd.Average):
                assert hvd.allreduce(mine, op=op, **scales).tolist() == [0, 0, 0]
            assert not hvd.reducescatter(mine.repeat(hvd.size()), op=hvd.Sum, **scales).any()


@check
def the_average_of_integers_is_exact() -> None:
    least = (2**60 + 3) // hvd.size()
    mine = torch.tensor([least] * hvd.size(), dtype=torch.int64)
    assert hvd.allreduce(mine, op=hvd.Average).tolist() == mine.tolist()
    assert hvd.reducescatter(mine, op=hvd.Average).tolist() == [least]
    assert netbottleneck.allreduce(mine.numpy(), op=hvd.Average).tolist() == mine.tolist()
    below = torch.tensor([-1 if hvd.rank() == 0 else 0], dtype=torch.int32)
    assert hvd.allreduce(below, op=hvd.Average).tolist() == [-1 if hvd.size() == 1 else 0]


@check
def scaling_truncates_integers() -> None:
    mine = torch.tensor([5, -5, 7], dtype=torch.int32)
    assert hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5).tolist() == [
        2 * hvd.size(),
        -2 * hvd.size(),
        3 * hvd.size(),
    ]
    assert hvd.allreduce(mine, op=hvd.Sum, postscale_factor=0.25).tolist() == [
        int(value * hvd.size() * 0.25) for value in (5, -5, 7)
    ]
    odd = torch.tensor([2 * hvd.rank() + 1], dtype=torch.int64)  # the sum is size squared
    assert hvd.allreduce(odd).item() == hvd.size()


@check
def average_is_deprecated() -> None:
    one = torch.ones(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert hvd.allreduce(one, average=False).tolist() == [hvd.size()] * 2
        assert hvd.allreduce_(one.clone(), True).tolist() == [1, 1]
    assert {item.category for item in caught} == {DeprecationWarning}
    raises(ValueError, "not both", lambda: hvd.allreduce(one, average=True, op=hvd.Sum))
    assert hvd.allreduce_(one.clone(), None, "by position", hvd.Sum).tolist() == [hvd.size()] * 2


@check
def handles_are_numbers_and_operations_are_asynchronous() -> None:
    handles = [hvd.allreduce_async(torch.full((17,), float(i)), name=f"t{i}", op=hvd.Sum) for i in range(15)]
    assert all(isinstance(handle, int) for handle in handles)
    hvd.allreduce(torch.ones(1))
    for i, handle in enumerate(handles):
        while not hvd.poll(handle):
            pass
        assert hvd.synchronize(handle).tolist() == [float(i * hvd.size())] * 17
        assert hvd.synchronize(handle) is None


@check
def order_does_not_matter() -> None:
    names = [f"tensor {i}" for i in range(20)]
    if hvd.rank() == 0:
        names.reverse()
    handles = {name: hvd.allreduce_async(torch.full((3,), float(len(name))), name=name) for name in names}
    for name, handle in sorted(handles.items()):
        assert hvd.synchronize(handle).tolist() == [float(len(name))] * 3


@check
def a_name_in_use_is_refused_at_once() -> None:
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(3), name="twice", op=hvd.Sum)
        raises(ValueError, "twice", lambda: hvd.allreduce_async(torch.ones(3), name="twice", op=hvd.Sum))
    hvd.barrier()
    if hvd.rank() > 0:
        handle = hvd.allreduce_async(torch.ones(3), name="twice", op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 3


@check
def mismatches_fail_on_all_ranks_and_the_job_continues() -> None:
    one = torch.ones(4 + hvd.rank())
    raises(hvd.HorovodInternalError, "length", lambda: hvd.allreduce(one, name="length"))
    kind = torch.float32 if hvd.rank() else torch.int32
    raises(hvd.HorovodInternalError, "kind", lambda: hvd.allreduce(torch.ones(4, dtype=kind), name="kind"))
    op = hvd.Sum if hvd.rank() else hvd.Max
    raises(hvd.HorovodInternalError, "reduction", lambda: hvd.allreduce(torch.ones(4), name="reduction", op=op))
    raises(hvd.HorovodInternalError, "root", lambda: hvd.broadcast(torch.ones(4), min(hvd.rank(), 1), name="root"))
    raises(hvd.HorovodInternalError, "adasum", lambda: hvd.allreduce(one, name="adasum", op=hvd.Adasum))
    assert hvd.allreduce(torch.ones(4), name="length", op=hvd.Sum).tolist() == [hvd.size()] * 4


@check
def a_value_that_is_no_tensor_is_refused() -> None:
    required = "a tensor is required, not float: pass torch.as_tensor"
    for call in (hvd.allreduce, hvd.allreduce_async_, hvd.allgather, hvd.alltoall, hvd.reducescatter):
        raises(TypeError, required, functools.partial(call, 1.0))
    raises(TypeError, required, lambda: hvd.broadcast(1.0, 0))
    raises(TypeError, required, lambda: hvd.grouped_allgather([torch.ones(1), 1.0]))
    raises(ValueError, "compression='fp16'", lambda: hvd.allreduce(torch.ones(1), compression="fp16"))


@check
def arguments_of_a_distributed_optimizer_are_checked_when_it_is_made() -> None:
    weight = torch.nn.Parameter(torch.ones(1))

    def make(**options: Any) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), **options)

    raises(ValueError, "compression='fp16': a class with", lambda: make(compression="fp16"))
    for factor in (0.0, math.nan, math.inf, "2"):
        message = f"gradient_predivide_factor={factor!r}: a finite number other than 0 is required"
        raises(ValueError, message, functools.partial(make, gradient_predivide_factor=factor))
    for passes in (0, 1.5, math.nan, "2"):
        message = f"backward_passes_per_step={passes!r}: a whole number, at least 1, is required"
        raises(ValueError, message, functools.partial(make, backward_passes_per_step=passes))
    assert make(backward_passes_per_step=2.0).backward_passes_per_step == 2
    for op in (hvd.Average, hvd.Adasum):
        made = make(op=op)
        raises(
            ValueError, "this SGD is a DistributedOptimizer already", functools.partial(hvd.DistributedOptimizer, made)
        )


@check
def a_model_whose_type_changes_under_its_optimizer_is_named() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    model.double()
    message = "was of type torch.float32 when its optimizer was made (or netbottleneck.profile called), and is of torch"

    def step() -> None:
        model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        optimizer.step()

    raises(RuntimeError, message, step)


@check
def what_cannot_travel_is_refused() -> None:
    raises(ValueError, "contiguous", lambda: hvd.allreduce(torch.ones(4, 4).t()))
    raises(ValueError, "contiguous", lambda: hvd.allreduce_(torch.ones(4, 4)[:, 1]))
    raises(ValueError, "torch.bool is not supported", lambda: hvd.allreduce(torch.ones(4, dtype=torch.bool)))
    raises(ValueError, "torch.complex64 is not supported", lambda: hvd.allreduce(torch.ones(4, dtype=torch.complex64)))
    raises(ValueError, "meta", lambda: hvd.allreduce(torch.ones(4, device="meta")))
    raises(ValueError, f"root_rank={hvd.size()}", lambda: hvd.broadcast(torch.ones(4), hvd.size()))


@check
def types_of_one_byte_that_numpy_lacks_are_moved() -> None:
    size, rank = hvd.size(), hvd.rank()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        mine = torch.tensor([[rank + 1.0, -2.0]] * size).to(dtype)
        ranks = [[[other + 1.0, -2.0]] * size for other in range(size)]
        assert hvd.broadcast(mine, size - 1).float().tolist() == ranks[-1]
        assert hvd.allgather(mine).float().tolist() == [row for rows in ranks for row in rows]
        found = hvd.alltoall(mine)
        assert found.dtype == dtype
        assert found.float().tolist() == [rows[0] for rows in ranks]
        assert hvd.broadcast(mine[0, 0], 0).float().item() == 1.0
        hvd.broadcast_parameters({"scale": mine, "empty": mine[:0]}, 0)
        assert mine.float().tolist() == ranks[0]
        for op in (hvd.Sum, hvd.Average, hvd.Adasum):
            raises(ValueError, f"{dtype} is not supported", functools.partial(hvd.allreduce, mine, op=op))
        raises(ValueError, f"{dtype} is not supported", functools.partial(hvd.reducescatter, mine))
    raises(ValueError, "complex32 is not supported", lambda: hvd.broadcast(torch.ones(2, dtype=torch.complex32), 0))


@check
def parts_of_very_different_size_are_gathered_without_much_padding() -> None:
    size, rank = hvd.size(), hvd.rank()
    rows = [700_000 if at == 1 else 3 * at for at in range(size)]  # of rank 0: none
    for dtype in (torch.float32, torch.bool, torch.float8_e4m3fn):
        found = hvd.allgather(torch.full((rows[rank], 2), rank % 2).to(dtype))
        assert found.dtype == dtype
        assert found.float().tolist() == [[at % 2] * 2 for at, count in enumerate(rows) for _ in range(count)]
    tracemalloc.start()
    gathered = hvd.allgather_object(bytes(4_000_000) if rank == 1 else rank)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert gathered == [bytes(4_000_000) if at == 1 else at for at in range(size)]
    # on the sender five copies: the object, its pickle, the part, the bytes and the result; not size copies more
    assert size == 2 or peak < 6 * 4_000_000, peak


@check
def groups_travel_as_one() -> None:
    tensors = [torch.full((i, 2), float(i)) for i in range(5)] + [
        torch.arange(3),
        torch.tensor(7, dtype=torch.bfloat16),
    ]
    results = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    assert isinstance(results, list)
    for tensor, result in zip(tensors, results, strict=True):
        assert torch.equal(result, tensor * hvd.size())
    outputs = hvd.synchronize(hvd.grouped_allreduce_async(tensors, name="group"))
    assert isinstance(outputs, tuple)
    assert all(torch.equal(a, b) for a, b in zip(outputs, tensors, strict=True))
    many = [torch.full((1,), float(i)) for i in range(1200)]
    inplace = hvd.grouped_allreduce_(many, op=hvd.Sum)
    assert all(a is b for a, b in zip(inplace, many, strict=True))
    assert [t.item() for t in many] == [float(i * hvd.size()) for i in range(1200)]


@check
def broadcast_is_of_every_type() -> None:
    for dtype in [*REDUCED, torch.int16, torch.bool, torch.complex64]:
        for root in range(hvd.size()):
            tensor = torch.arange(6).reshape(2, 3).to(dtype) * hvd.rank()
            result = hvd.broadcast(tensor, root)
            assert torch.equal(result, torch.arange(6).reshape(2, 3).to(dtype) * root)
            assert torch.equal(tensor, torch.arange(6).reshape(2, 3).to(dtype) * hvd.rank())
            assert hvd.broadcast_(tensor, root) is tensor
            assert torch.equal(tensor, result)


@check
def allgather_joins_what_differs_in_length() -> None:
    for dtype in [*REDUCED, torch.int16, torch.bool]:
        mine = torch.full((hvd.rank() + 1, 2), hvd.rank()).to(dtype)
        result = hvd.allgather(mine)
        assert result.dtype == dtype
        expected = torch.cat([torch.full((r + 1, 2), r) for r in range(hvd.size())]).to(dtype)
        assert torch.equal(result, expected)
    none = hvd.allgather(torch.zeros(0 if hvd.rank() else 2, 3))
    assert none.shape == (2, 3)
    raises(hvd.HorovodInternalError, "differ", lambda: hvd.allgather(torch.zeros(2, 3 + hvd.rank())))
    handle = hvd.allgather_async(torch.tensor([hvd.rank()]))
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).tolist() == list(range(hvd.size()))


@check
def handles_may_be_synchronized_in_another_order_on_each_rank() -> None:
    size, rank = hvd.size(), hvd.rank()
    starts: list[Callable[[int], int]] = [
        lambda i: hvd.allgather_async(torch.full((i + 1, 2), float(rank)), name=f"gather{i}"),
        lambda i: hvd.alltoall_async(torch.full((size,), float(rank)), name=f"all{i}"),
        lambda i: hvd.allreduce_async(torch.full((5,), 2.0), name=f"adasum{i}", op=hvd.Adasum),
        lambda i: hvd.grouped_allgather_async([torch.full((1,), float(rank))] * 2, name=f"group{i}"),
    ]
    gathered = [float(other) for other in range(size)]
    handles = [start(i) for start in starts for i in range(2)]
    if rank == 0:  # waits within a call, where the others wait for handles
        assert hvd.allreduce(torch.ones(2), name="between", op=hvd.Sum).tolist() == [float(size)] * 2
    order = list(range(len(handles)))
    found = {i: hvd.synchronize(handles[i]) for i in (order if rank % 2 else order[::-1])}
    if rank != 0:
        assert hvd.allreduce(torch.ones(2), name="between", op=hvd.Sum).tolist() == [float(size)] * 2
    assert [found[i].tolist() for i in (0, 1)] == [[[o, o] for o in gathered for _ in range(n)] for n in (1, 2)]
    assert [found[i][0].tolist() for i in (2, 3)] == [gathered] * 2
    assert [found[i].tolist() for i in (4, 5)] == [[2.0] * 5] * 2
    assert [[part.tolist() for part in found[i]] for i in (6, 7)] == [[gathered] * 2] * 2


@check
def a_failure_that_poll_has_met_is_raised_by_synchronize() -> None:
    handle = hvd.allgather_async(torch.zeros(2, 3 + hvd.rank()))
    while not hvd.poll(handle):
        pass
    assert hvd.poll(handle)
    raises(hvd.HorovodInternalError, "differ", lambda: hvd.synchronize(handle))


@check
def names_may_be_long_and_alike_in_their_beginning() -> None:
    names = [f"model.{'layers.' * 20}Ü{number}.weight" for number in range(3)]
    handles = [hvd.allreduce_async(torch.full((2,), float(i)), name=name, op=hvd.Sum) for i, name in enumerate(names)]
    for i, handle in enumerate(handles):
        assert hvd.synchronize(handle).tolist() == [float(i * hvd.size())] * 2
    gathered = hvd.allgather(torch.full((1 + hvd.rank(),), 1.0), name=names[0])
    assert gathered.sum().item() == sum(range(1, hvd.size() + 1))
    ones = [torch.ones(1)] * 1000
    for name in names:
        assert [len(tensor) for tensor in hvd.grouped_allgather(ones, name=name)] == [hvd.size()] * 1000
    state = {name: torch.full((2,), float(hvd.rank() + i)) for i, name in enumerate(names)}
    hvd.broadcast_parameters(state, root_rank=0)
    assert [tensor.tolist() for tensor in state.values()] == [[float(i)] * 2 for i in range(3)]


@check
def tensors_of_the_host_stay_there_under_another_default_device() -> None:
    inputs = [torch.arange(2.0), torch.arange(hvd.size()), torch.ones(2, dtype=torch.bfloat16)]
    with torch.device("meta"):
        outputs = [hvd.allreduce(inputs[0], op=hvd.Sum), *hvd.alltoall(inputs[1], [1] * hvd.size())]
        outputs.append(hvd.allgather(inputs[2]))
    assert {tensor.device.type for tensor in outputs} == {"cpu"}


@check
def gradients_flow_through() -> None:
    leaf = torch.arange(4.0, requires_grad=True)
    hvd.allreduce(leaf, op=hvd.Sum).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [hvd.size()] * 4
    leaf.grad = None
    sum(t.sum() for t in hvd.grouped_allreduce([leaf, leaf * 2], op=hvd.Average)).backward()  # type: ignore[union-attr]
    assert leaf.grad.tolist() == [3.0] * 4
    leaf.grad = None
    hvd.broadcast(leaf, 0).sum().backward()
    assert leaf.grad.tolist() == [1.0 if hvd.rank() == 0 else 0.0] * 4
    leaf.grad = None
    (hvd.allgather(leaf) * torch.arange(4.0 * hvd.size())).sum().backward()
    assert leaf.grad.tolist() == [4.0 * hvd.rank() + i for i in range(4)]


@check
def compression_by_class() -> None:
    tensor = torch.arange(4.0)
    result = hvd.allreduce(tensor, compression=hvd.Compression.fp16, op=hvd.Sum)
    assert result.dtype == torch.float32
    assert torch.equal(result, tensor * hvd.size())
    assert hvd.Compression.fp16.compress(tensor)[0].dtype == torch.float16
    whole = torch.arange(4)
    assert hvd.Compression.fp16.compress(whole)[0].dtype == torch.int64


@check
def objects_travel() -> None:
    thing = {"rank": hvd.rank(), "call": lambda x: x + 1}
    got = hvd.broadcast_object(thing, root_rank=hvd.size() - 1)
    assert got["rank"] == hvd.size() - 1
    assert got["call"](1) == 2
    assert hvd.allgather_object("x" * hvd.rank()) == ["x" * r for r in range(hvd.size())]


@check
def parameters_are_broadcast_in_place() -> None:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(5, 2))
    model[0].to(memory_format=torch.channels_last)
    before = [p.data_ptr() for p in model.parameters()]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert [p.data_ptr() for p in model.parameters()] == before
    for value in model.state_dict().values():
        same_everywhere(value.double())
    for params in (list(model.named_parameters()), list(model.parameters())):
        hvd.broadcast_parameters(params, root_rank=hvd.size() - 1)
    raises(ValueError, "invalid params", lambda: hvd.broadcast_parameters(7, 0))


@check
def optimizer_state_is_the_roots() -> None:
    makers: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: torch.optim.SGD(p, lr=0.1 * (1 + hvd.rank()), momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.1 * (1 + hvd.rank()), amsgrad=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1 * (1 + hvd.rank())),
    ]
    for make in makers:
        model = torch.nn.Linear(3, 2)
        optimizer = make(model.parameters())
        kept = [p.clone() for p in model.parameters()]
        if hvd.rank() == 0:
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        else:
            assert all(torch.equal(p, k) for p, k in zip(model.parameters(), kept, strict=True))
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        states = hvd.allgather_object(optimizer.state_dict())
        assert repr(states[0]) == repr(states[hvd.rank()])
        assert states[0]["state"]
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert type(optimizer.param_groups[0]["lr"]) is float
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    if hvd.size() > 1:
        for fuller in (0, 1):  # the rank that has state of both parameters
            model = torch.nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            model(torch.ones(1, 3)).sum().backward()
            if hvd.rank() != fuller:
                model.bias.grad = None
            optimizer.step()
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            assert optimizer.state[model.weight]["momentum_buffer"].tolist() == [[1.0] * 3] * 2
            assert ("momentum_buffer" in optimizer.state[model.bias]) == (fuller == 0)
    fresh = torch.optim.Adam(torch.nn.Linear(3, 2).parameters())
    hvd.broadcast_optimizer_state(fresh, root_rank=0)  # makes it by a step, where no rank has any
    assert [int(state["step"]) for state in fresh.state.values()] == [1, 1]
    lbfgs = torch.optim.LBFGS(torch.nn.Linear(3, 2).parameters())
    raises(ValueError, "LBFGS", lambda: hvd.broadcast_optimizer_state(lbfgs, 0))


if __name__ == "__main__":
    main()
