"""One rank of the checks of SyncBatchNorm: what all ranks do together equals one process with the joined batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from named_checks import check, main

import netbottleneck.torch as hvd

ROWS = (3, 1, 2)  # of each rank's batch


def batch(rank: int, shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randn(ROWS[rank], *shape, generator=generator, dtype=torch.float64).add(3.0).to(dtype)


def joined(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.cat([batch(rank, shape, seed, dtype) for rank in range(hvd.size())])


def mine(whole: torch.Tensor) -> torch.Tensor:
    return whole.split(ROWS[: hvd.size()])[hvd.rank()]


def single(shape: tuple[int, ...], **options: Any) -> torch.nn.Module:
    kinds = {1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm2d, 4: torch.nn.BatchNorm3d}
    return kinds[len(shape)](shape[0], **options)


def alike(ours: torch.nn.Module, theirs: torch.nn.Module, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    theirs.to(dtype)
    for parameter in theirs.parameters():
        torch.nn.init.uniform_(parameter, -2, 2)
    ours.to(dtype).load_state_dict(theirs.state_dict())


def equals_single(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, steps: int = 3, **options: Any) -> None:
    close = {torch.float64: {"rtol": 1e-12, "atol": 1e-12}, torch.float32: {"rtol": 1e-5, "atol": 1e-5}}[dtype]
    ours, theirs = hvd.SyncBatchNorm(shape[0], **options), single(shape, **options)
    alike(ours, theirs, dtype)
    for step in range(steps):
        everything = joined(shape, step, dtype).requires_grad_()
        own = batch(hvd.rank(), shape, step, dtype).requires_grad_()
        gradient = joined(shape, 100 + step, dtype)
        expected, output = theirs(everything), ours(own)
        expected.backward(gradient)
        output.backward(mine(gradient))
        assert output.dtype == dtype
        torch.testing.assert_close(output, mine(expected), **close)
        torch.testing.assert_close(own.grad, mine(everything.grad), **close)
    for part, whole in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(hvd.allreduce(part.grad, op=hvd.Sum), whole.grad, **close)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()), **close)
    for buffer in ours.buffers():
        everyone = hvd.allgather(buffer.reshape(1, -1).contiguous())
        assert all(torch.equal(row, everyone[0]) for row in everyone)


@check
def any_number_of_dimensions() -> None:
    for shape in [(4,), (4, 5), (4, 3, 2), (4, 3, 2, 2)]:
        equals_single(shape)


@check
def single_precision() -> None:
    equals_single((4, 3, 2), torch.float32)


@check
def without_weight_and_bias() -> None:
    equals_single((3, 4), affine=False)


@check
def without_running_statistics_batches_count_in_evaluation_too() -> None:
    equals_single((3, 4), track_running_stats=False)
    ours, theirs = (
        hvd.SyncBatchNorm(3, track_running_stats=False).double().eval(),
        single((3, 4), track_running_stats=False),
    )
    theirs.double().eval()
    torch.testing.assert_close(ours(batch(hvd.rank(), (3, 4), 1)), mine(theirs(joined((3, 4), 1))))


@check
def cumulative_average() -> None:
    equals_single((3, 4), momentum=None)
    equals_single((3, 4), momentum=0.5, eps=0.25)


@check
def evaluation_exchanges_nothing() -> None:
    ours, theirs = hvd.SyncBatchNorm(4), single((4,))
    alike(ours, theirs, torch.float64)
    ours.eval()
    theirs.eval()
    if hvd.rank() == 0:  # alone
        assert torch.equal(ours(batch(0, (4,), 1)), theirs(batch(0, (4,), 1)))


@check
def exact_where_sums_are() -> None:
    ours, theirs = hvd.SyncBatchNorm(2, momentum=1.0), single((2,), momentum=1.0)
    alike(ours, theirs, torch.float32)
    everything = torch.tensor([[1.0, 0.0], [-1.0, 4.0]]).repeat(6, 1)[: 2 * (sum(ROWS[: hvd.size()]) // 2)]
    rows = [r for r in range(len(everything)) if r % hvd.size() == hvd.rank()]
    theirs(everything)
    ours(everything[rows])
    assert torch.equal(ours.running_mean, theirs.running_mean)
    assert torch.equal(ours.running_var, theirs.running_var)


@check
def large_means_cancel_nothing() -> None:
    ours = hvd.SyncBatchNorm(1, momentum=1.0).double()
    values = 1e8 + torch.arange(ROWS[hvd.rank()], dtype=torch.float64).reshape(-1, 1)
    ours(values)
    everything = torch.cat([torch.arange(ROWS[rank], dtype=torch.float64) for rank in range(hvd.size())])
    torch.testing.assert_close(ours.running_var, everything.var().reshape(1), rtol=1e-6, atol=0)


@check
def a_rank_without_rows_takes_part() -> None:
    ours, theirs = hvd.SyncBatchNorm(3).double(), single((3,)).double()
    everything = batch(0, (3,), 5)
    own = (everything if hvd.rank() == 0 else everything[:0]).clone().requires_grad_()
    everything.requires_grad_()
    output = ours(own)
    theirs(everything).square().sum().backward()
    output.square().sum().backward()
    assert own.grad is not None
    assert output.shape == own.shape
    if hvd.rank() == 0:
        torch.testing.assert_close(own.grad, everything.grad)
    torch.testing.assert_close(ours.running_var, theirs.running_var)


@check
def half_precision_is_calculated_in_single() -> None:
    ours, theirs = hvd.SyncBatchNorm(4), single((4, 6))
    alike(ours, theirs, torch.float32)
    everything = joined((4, 6), 2, torch.bfloat16)
    output = ours(mine(everything).clone())
    assert output.dtype == torch.bfloat16
    expected = theirs(everything.float())
    torch.testing.assert_close(output, mine(expected).to(torch.bfloat16), rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(ours.running_var, theirs.running_var)


@check
def what_cannot_be_normalised_is_refused() -> None:
    ours = hvd.SyncBatchNorm(3)
    with pytest.raises(ValueError, match="at least 2D input"):
        ours(torch.ones(3))
    rows = 1 if hvd.rank() == 0 else 0
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        ours(torch.ones(rows, 3))


@check
def under_a_distributed_optimizer() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), hvd.SyncBatchNorm(4), torch.nn.ReLU(), hvd.SyncBatchNorm(4))
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        optimizer.zero_grad()
        model(batch(hvd.rank(), (3,), step).float()).square().sum().backward()
        optimizer.step()
    for value in model.state_dict().values():
        everyone = hvd.allgather(value.double().reshape(1, -1).contiguous())
        assert all(torch.equal(row, everyone[0]) for row in everyone)


if __name__ == "__main__":
    main()
