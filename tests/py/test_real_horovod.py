"""An installed Horovod: measured, and its all-reduces moved by us. The tests use a double."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import Ranks

pytest.importorskip("torch")

from netbottleneck.report import Run

HERE = Path(__file__).parent
SCRIPT = HERE / "scripts" / "horovod_script.py"
STEPS, TENSORS = 6, 6  # of the script: updates and gradients
METRICS, OTHER_SETS = 1, 1  # its other all-reduces a step, of all ranks and of this one alone
ENV = {
    "PYTHONPATH": str(HERE / "doubles"),
    "NETBOTTLENECK_TIMEOUT_S": "60",
    "NETBOTTLENECK_START_STEP": "0",
    "NETBOTTLENECK_BLOCK_STEPS": "1",
}


def ran(warm_ranks: Ranks, folder: Path, way: str, env: Mapping[str, str]) -> dict[str, int]:
    """Run the script, which checks its weights; return the number of library calls by kind."""
    double = folder / "double"
    double.mkdir()
    results = warm_ranks(2, SCRIPT, {**ENV, **env, "WAY": way, "HOROVOD_DOUBLE": str(double)})
    first, second = (
        [line for line in result.stdout.splitlines() if line.startswith(("ended ", "library "))] for result in results
    )
    assert first == second
    assert len(first) == 2, results
    return {name: int(times) for name, times in re.findall(r"(\w+)=(\d+)", first[1])}


@pytest.mark.parametrize("way", ["attach", "import", "after"])
def test_stock_stays_horovod_and_is_timed(warm_ranks: Ranks, tmp_path: Path, way: str) -> None:
    calls = ran(warm_ranks, tmp_path, way, {"NETBOTTLENECK": "1", "NETBOTTLENECK_DIR": str(tmp_path / "run")})
    assert calls == {"allreduce": STEPS * (TENSORS + METRICS + OTHER_SETS), "broadcast": TENSORS, "reset": 1}
    trace = Run(tmp_path / "run").trace
    assert trace.arms == ("stock", "bare")
    assert [len([step for step in trace.steps if step.rank == rank]) for rank in range(2)] == [STEPS, STEPS]
    gradients = [c for c in trace.collectives if c.bucket is not None]
    assert len(gradients) == 2 * (STEPS // 2) * TENSORS  # of the other steps nothing is stamped
    for c in gradients:
        assert c.start_ns is not None
        assert c.done_ns is not None
        assert c.submit_ns <= c.start_ns <= c.done_ns, c
    assert all(len(step.grad_ready) == TENSORS for step in trace.steps if step.index > 0 and step.arm == "stock")
    assert not any(step.grad_ready for step in trace.steps if step.arm == "bare")
    assert {t.provider for rank in trace.ranks for t in rank.transports} == {"horovod 0.28.1 over gloo"}


@pytest.mark.parametrize("way", ["attach", "import"])
def test_on_request_its_all_reduces_are_moved_by_us_and_no_weight_changes(
    warm_ranks: Ranks, tmp_path: Path, way: str
) -> None:
    run = tmp_path / "run"
    env = {"NETBOTTLENECK": "1", "NETBOTTLENECK_TRANSPORT": "stock,tcp", "NETBOTTLENECK_DIR": str(run)}
    calls = ran(warm_ranks, tmp_path, way, env)
    # A B B A A B: three steps' gradients went to Horovod. A metric comes after its step, so in the arm of the next one:
    # B B A A B B.
    assert calls["allreduce"] == 3 * TENSORS + 2 * METRICS + STEPS * OTHER_SETS
    trace = Run(run).trace
    for name in ("stock", "tcp"):
        moved = [c for c in trace.collectives if c.bucket is not None and c.arm == name]
        assert len(moved) == 2 * 3 * TENSORS, name


@pytest.mark.parametrize("options", [{"GROUPED": "1"}, {"PASSES": "2"}], ids=["grouped", "two passes"])
def test_groups_and_several_passes_are_moved_alike(warm_ranks: Ranks, tmp_path: Path, options: dict[str, str]) -> None:
    env = {**options, "NETBOTTLENECK_TRANSPORT": "tcp", "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    calls = ran(warm_ranks, tmp_path, "attach", env)
    assert calls == {"allreduce": STEPS * OTHER_SETS, "broadcast": TENSORS, "reset": 1}
    assert len(Run(tmp_path / "run").trace.steps) == 2 * STEPS


CALLS = """
import os
import pytest
import torch
import horovod.torch as hvd
import netbottleneck

netbottleneck.attach()
assert netbottleneck.attach() is netbottleneck.attach()
library = hvd.mpi_ops.mpi_lib.library
hvd.init()
assert hvd.allreduce(torch.ones(2), name="before").tolist() == [1.0, 1.0]
assert library.calls == ["allreduce"]

weight = torch.nn.Parameter(torch.ones(3))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
(weight * (1 + hvd.rank())).sum().backward()
optimizer.step()
assert weight.tolist() == [-0.5] * 3
assert library.calls == ["allreduce"]

# From here on we answer: handles, names and errors are as Horovod's.
handle = hvd.allreduce_async(torch.ones(4) * hvd.rank(), name="a", op=hvd.Sum)
assert handle >= 1 << 30
assert hvd.synchronize(handle).tolist() == [1.0] * 4
assert hvd.synchronize(handle) is None
for kind in (torch.float16, torch.int32, torch.int64, torch.float64):
    assert hvd.allreduce(torch.full((3,), 2 * hvd.rank(), dtype=kind), name="b").tolist() == [1.0] * 3
with pytest.raises(ValueError, match="not supported"):
    hvd.allreduce(torch.ones(2, dtype=torch.bool))
for order in ("cd", "dc"):
    names = order if hvd.rank() else order[::-1]
    handles = {name: hvd.allreduce_async(torch.full((2,), float(ord(name))), name=name) for name in names}
    for name in "cd":
        while not hvd.poll(handles[name]):
            pass
        assert hvd.synchronize(handles[name]).tolist() == [float(ord(name))] * 2
assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]
assert hvd.allreduce(torch.empty(0), name="none").numel() == 0

if hvd.rank() == 0:
    twice = hvd.allreduce_async(torch.ones(2), name="twice")
    with pytest.raises(ValueError, match="twice"):
        hvd.allreduce_async(torch.ones(2), name="twice")
    hvd.barrier()
else:
    hvd.barrier()
    twice = hvd.allreduce_async(torch.ones(2), name="twice")
hvd.synchronize(twice)

for shapes in [((2,), (3,)), ((2, 3), (3, 2))]:
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(shapes[hvd.rank()]), name="unlike")
assert hvd.allreduce(torch.ones(2), name="again").tolist() == [1.0, 1.0]
with pytest.raises(hvd.HorovodInternalError, match="join"):
    hvd.join()
assert library.calls == ["allreduce"]
hvd.shutdown()
assert library.calls == ["allreduce", "reset"]
print("done")
"""


def test_our_results_match_horovods_and_other_calls_are_its_own(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {**ENV, "NETBOTTLENECK_DIR": "run", "HOROVOD_DOUBLE": str(tmp_path), "NETBOTTLENECK_TRANSPORT": ""}
    for result in warm_ranks(2, CALLS.replace("import netbottleneck\n", TCP), env):
        assert "done" in result.stdout


AGAIN = """
import os
import torch
import horovod.torch as hvd
import netbottleneck

netbottleneck.attach()
library = hvd.mpi_ops.mpi_lib.library
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = None
for run in range(2):
    hvd.init()
    assert hvd.allreduce(torch.ones(2), name="before").tolist() == [1.0, 1.0]
    if optimizer is None:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    (weight * (1 + hvd.rank())).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert weight.tolist() == [-1.5 * (run + 1)] * 3
    assert library.calls == ["allreduce", "reset"] * run + ["allreduce"]
    hvd.shutdown()
print("done")
"""


def test_each_init_starts_a_new_run(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {**ENV, "NETBOTTLENECK_DIR": "run", "HOROVOD_DOUBLE": str(tmp_path), "NETBOTTLENECK_TRANSPORT": ""}
    for result in warm_ranks(2, AGAIN.replace("import netbottleneck\n", TCP), env):
        assert "done" in result.stdout


TCP = 'import netbottleneck\n\nos.environ["NETBOTTLENECK_TRANSPORT"] = "tcp"\n'


OTHER_SIZE = """
import os
import torch
import horovod.torch as hvd
import netbottleneck

attached = netbottleneck.attach()
hvd.init()
hvd.broadcast_(torch.ones(1), 0, "first")
print("broadcast")
weight = torch.nn.Parameter(torch.ones(3))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
(weight * (1 + hvd.rank())).sum().backward()
optimizer.step()
assert attached.between.route is None
assert weight.tolist() == [-0.5] * 3
"""


def test_a_horovod_of_another_size_than_the_launchers_is_left_alone(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {**ENV, "HOROVOD_DOUBLE": str(tmp_path), "HOROVOD_DOUBLE_SIZE": "1"}
    for result in warm_ranks(2, OTHER_SIZE, env):
        assert result.stderr.count("Horovod has 1 ranks") == 1
        assert "(torchrun) say 2" in result.stderr
        assert "each rank trains alone" in result.stderr


BROADCAST = OTHER_SIZE.partition("weight = ")[0]


def test_a_horovod_with_one_rank_per_job_is_reported(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {**ENV, "HOROVOD_DOUBLE": str(tmp_path), "HOROVOD_DOUBLE_SIZE": "1"}
    for result in warm_ranks(2, BROADCAST, env):
        assert "broadcast" in result.stdout
        assert "each rank trains alone" in result.stderr


def test_attach_without_horovod_is_an_import_error(plain_ranks: Ranks) -> None:
    script = """
import pytest
import netbottleneck
with pytest.raises(ImportError, match="orovod"):
    netbottleneck.attach()
"""
    plain_ranks(1, script)
