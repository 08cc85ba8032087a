"""Opening of a measured run by all ranks, and the error if a rank does not join."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Ranks

from netbottleneck.report import Run

pytest.importorskip("torch")

OF_A_SET = """
import netbottleneck
import torch
import horovod.torch as hvd

hvd.init()
some = hvd.add_process_set(range(hvd.size() - 1))


def trained(steps, lr, **options):
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=lr), [("weight", weight)], **options)
    for _ in range(steps):
        optimizer.zero_grad()
        (weight * (1 + hvd.rank())).sum().backward()
        optimizer.step()
    return weight.tolist()


if some.included():
    mean = sum(range(1, hvd.size())) / (hvd.size() - 1)
    assert trained(2, 1.0, process_set=some) == [-2 * mean] * 3
    print("of a set", flush=True)
else:
    hvd.barrier()  # it has no optimizer of that set, and comes when the others are through
if some.included():
    hvd.barrier()
assert trained(4, 2.0) == [-4.0 * (hvd.size() + 1)] * 3
hvd.shutdown()
"""


# One rank sends nothing, but its timeline gets events.
@pytest.mark.parametrize("size", [2, 3])
def test_only_an_optimizer_of_all_ranks_opens_a_measured_run(warm_ranks: Ranks, tmp_path: Path, size: int) -> None:
    env = {
        "NETBOTTLENECK": "1",
        "NETBOTTLENECK_DIR": str(tmp_path / "run"),
        "NETBOTTLENECK_TRANSPORT": "tcp",
        "NETBOTTLENECK_START_STEP": "0",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "HOROVOD_TIMELINE": "DYNAMIC",
    }
    for result in warm_ranks(size, OF_A_SET, env):
        assert result.stdout.count("of a set") == (result.rank < size - 1)
    steps = Run(tmp_path / "run").trace.steps
    assert [sum(step.rank == rank for step in steps) for rank in range(size)] == [4] * size


LATE = """
from dataclasses import replace
import netbottleneck
import torch
import horovod.torch as hvd
from netbottleneck.runtime import job

hvd.init()
started = job.current()
started.settings = replace(started.settings, start_timeout_s=5.0)  # from here on: the start itself may take longer
weight = torch.nn.Parameter(torch.zeros(3))
if hvd.rank() != 1:
    try:
        hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    except TimeoutError as error:
        assert isinstance(error, hvd.HorovodInternalError)
        print("late:", error.peer, error, flush=True)
assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="after").tolist() == [hvd.size()] * 2
hvd.shutdown()
"""


@pytest.mark.parametrize("strict", [False, True])
def test_a_rank_that_does_not_join_a_measured_run_is_named_in_time(
    warm_ranks: Ranks, tmp_path: Path, strict: bool
) -> None:
    env = {"NETBOTTLENECK": "1", "NETBOTTLENECK_DIR": str(tmp_path / "run"), "NETBOTTLENECK_TRANSPORT": "tcp"}
    for result in warm_ranks(3, LATE, {**env, "NETBOTTLENECK_STRICT": str(int(strict))}):
        output = result.stdout if strict else result.stderr
        if result.rank == 1:
            assert "late" not in output
            continue
        assert ("late: 1 " in result.stdout) == strict
        assert ("the training is left alone" in result.stderr) != strict
        assert "not all ranks did within 5 s (NETBOTTLENECK_START_TIMEOUT_S)" in output
        assert "Ranks that have not submitted it: 1." in output
        assert "unset NETBOTTLENECK" in output
