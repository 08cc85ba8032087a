"""Tensors of the Horovod API during and after a call: they keep torch's own memory."""

from __future__ import annotations

import pytest
from conftest import Ranks

pytest.importorskip("torch")

RESIZED = """
import numpy as np
import torch
import netbottleneck.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool):
    ones = lambda: torch.ones(4, dtype=dtype)
    made = [torch.full((4,), rank + 1).to(dtype), ones(), hvd.alltoall(ones()), ones()]
    hvd.broadcast_(made[0], 0)
    assert torch.equal(made[0], ones())
    joined = hvd.allgather(made[1])
    assert torch.equal(joined, torch.ones(4 * size, dtype=dtype))
    made += [joined, hvd.broadcast(ones(), 0)]
    if dtype != torch.bool:
        hvd.allreduce_(made[3], op=hvd.Sum)
        assert (made[3] == size).all()
        made += [hvd.allreduce(ones(), op=hvd.Sum), hvd.reducescatter(ones(), op=hvd.Sum)]
        made += hvd.grouped_allreduce([ones(), ones()], op=hvd.Sum)
        assert all((each == size).all() for each in made[-4:])
    for each in made:
        each.resize_(100)
model = torch.nn.Linear(3, 3)
hvd.broadcast_parameters(model.state_dict(), 0)
for parameter in model.parameters():
    parameter.untyped_storage().resize_(0)
    parameter.untyped_storage().resize_(64)
array = np.ones(5, np.float32)
hvd.allreduce_(torch.from_numpy(array), op=hvd.Sum)
assert (array == size).all()
whole = torch.ones(10)
hvd.allreduce_(whole[2:7], op=hvd.Sum)
assert whole.tolist() == [1] * 2 + [size] * 5 + [1] * 3
first = torch.ones(4)
lazy = first._lazy_clone()
hvd.allreduce_(first, op=hvd.Sum)
assert (first == size).all() and (lazy == 1).all(), (first, lazy)
shared = torch.ones(4).share_memory_()
hvd.allreduce_(shared, op=hvd.Sum)
assert (shared == size).all()
try:
    hvd.allreduce_(torch.ones(4, dtype=torch.complex64).conj())
except ValueError as error:
    print("raised:", error)
hvd.shutdown()
print("done")
"""


def test_tensors_can_be_resized_after_a_call(warm_ranks: Ranks) -> None:
    for result in warm_ranks(2, RESIZED, {}):
        assert "raised: a conjugated or negated view is not supported" in result.stdout, result.stdout
        assert "done" in result.stdout


VIEWS = """
import torch
import netbottleneck.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
PARTS, EACH = 4, 1000


def one_by_one(parts):
    handles = [hvd.allreduce_async_(part, op=hvd.Sum) for part in parts]
    for handle in handles:
        hvd.synchronize(handle)


def each_after_a_write(parts):
    # Each part is written while the parts before it are under way.
    handles = []
    for part in parts:
        part.copy_(part.clone())
        handles.append(hvd.allreduce_async_(part, op=hvd.Sum))
    for handle in handles:
        hvd.synchronize(handle).mul_(1)


def broadcast(parts):
    for part in parts:
        part.mul_(size * (size + 1) / 2 / (rank + 1) if rank == 1 else 0)
    for handle in [hvd.broadcast_async_(part, 1) for part in parts]:
        hvd.synchronize(handle)


for exported in (False, True):
    for run in (lambda parts: hvd.grouped_allreduce_(parts, op=hvd.Sum), one_by_one, each_after_a_write, broadcast):
        flat = torch.arange(PARTS * EACH, dtype=torch.float32) * (rank + 1)
        wanted = torch.arange(PARTS * EACH, dtype=torch.float32) * size * (size + 1) / 2
        array = flat.numpy() if exported else None
        address = flat.data_ptr()
        run(list(flat.split(EACH)))
        assert torch.equal(flat, wanted), flat
        assert flat.data_ptr() == address
        if exported:
            assert (array == wanted.numpy()).all(), array
        else:
            flat.untyped_storage().resize_(0)

# Operations that only read may share a tensor.
flat = torch.ones(EACH)
address = flat.data_ptr()
handles = [hvd.allgather_async(flat), hvd.allgather_async(flat[1:]), hvd.allgather_async(flat)]
for handle, skipped in zip(reversed(handles), (0, 1, 0)):
    assert torch.equal(hvd.synchronize(handle), torch.ones(size * (EACH - skipped)))
assert flat.data_ptr() == address
hvd.shutdown()
print("done")
"""


def test_parts_of_a_tensor_are_reduced_without_moving_it(warm_ranks: Ranks) -> None:
    for result in warm_ranks(2, VIEWS, {}):
        assert "done" in result.stdout


MOVED = """
import sys
import torch
import netbottleneck.torch as hvd

COUNT = 300_000
CHANGES = {
    "data": lambda tensor: setattr(tensor, "data", torch.full((COUNT,), 7.0)),
    "set": lambda tensor: tensor.set_(torch.full((COUNT,), 7.0)),
    "written": lambda tensor: tensor.fill_(7.0),
    "grown": lambda tensor: tensor.untyped_storage().resize_(8 * COUNT),
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
    "emptied": lambda tensor: tensor.set_(),
}
hvd.init()
STARTS = (
    (lambda tensor: hvd.allreduce_async_(tensor, op=hvd.Sum), 3.0),
    (lambda tensor: hvd.broadcast_async_(tensor, 1), 2.0),
)


def exported(tensor):
    tensor.numpy()  # from then on it cannot be resized
    return tensor


MADE = {
    "whole": lambda: torch.full((COUNT,), 1.0 + hvd.rank()),
    "view": lambda: torch.full((COUNT + 10,), 1.0 + hvd.rank())[5:-5],
    "exported": lambda: exported(torch.full((COUNT,), 1.0 + hvd.rank())),
}
IN_PLACE = ("written", "grown", "freed")  # refused or not defined for exported memory
for what, how, start, wanted in [(w, h, s, n) for w in MADE for h in CHANGES for s, n in STARTS]:
    change = CHANGES[how]
    if what != "exported" or how not in IN_PLACE:
        tensor = MADE[what]()
        handle = start(tensor)
        change(tensor)
        fill = [torch.full((COUNT,), 777.0) for _ in range(4)]  # takes what was freed
        try:
            hvd.synchronize(handle)
            assert (tensor[:COUNT] == wanted).all(), (what, how, tensor)
        except RuntimeError as error:
            assert how == "emptied", (what, how, error)
            print("raised:", error)
        assert all((each == 777.0).all() for each in fill), how
hvd.shutdown()
print("done")
"""


@pytest.mark.parametrize("transport", ["tcp", "ofi"])
@pytest.mark.parametrize("shared", ["0", "1"])
def test_a_tensor_whose_memory_is_replaced_in_flight_gets_the_result_too(
    warm_ranks: Ranks, transport: str, shared: str
) -> None:
    env = {"NETBOTTLENECK_TRANSPORT": transport, "NETBOTTLENECK_SHM": shared}
    for result in warm_ranks(2, MOVED, env):
        assert result.stdout.count("raised: a tensor of shape [300000] changed its shape") == 6, result.stdout
        assert "done" in result.stdout


INSIDE = """
import torch
import netbottleneck.torch as hvd

hvd.init()
COUNT, BEFORE = 300_000, 10
weight = torch.nn.Parameter(torch.zeros(COUNT))


def inside(parameter):
    # A gradient inside its storage that is not a view of another tensor.
    storage = torch.full((COUNT + BEFORE,), -5.0).untyped_storage()
    gradient = torch.empty(0).set_(storage, BEFORE, (COUNT,), (1,))
    parameter.grad = gradient.copy_(parameter.grad)


weight.register_post_accumulate_grad_hook(inside)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0))
for _ in range(3):
    weight.grad = None
    (weight * (1.0 + hvd.rank())).sum().backward()
    optimizer.synchronize()
    assert (weight.grad == 1.5).all(), weight.grad
    assert (weight.grad.as_strided((BEFORE,), (1,), 0) == -5.0).all()
hvd.shutdown()
print("done")
"""


def test_a_gradient_inside_a_larger_storage_is_summed_in_place(warm_ranks: Ranks) -> None:
    for result in warm_ranks(2, INSIDE, {"NETBOTTLENECK_TRANSPORT": "tcp"}):
        assert "done" in result.stdout
