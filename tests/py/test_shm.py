"""Ranks of one host that share memory: sums equal those over the network, and every wait on a lost rank ends."""

from __future__ import annotations

import json
import re
import signal
import time
from typing import Any

import pytest
from conftest import RANKS_LIMIT_S, RankResult, Ranks

from netbottleneck import bench
from netbottleneck.config import settings
from test_faults import QUICK, failure, survivors
from test_faults import SCRIPT as FAULTS

SHARED = {**QUICK, "NETBOTTLENECK_SHM": "1"}
IN_ARENA = """
import sys
import time
import netbottleneck as nb
from netbottleneck.runtime import job
core = job.core()
comm = job.start().comm
arena = core.Arena(64 << 20)
comm.map(arena)
def go():
    comm.submit("big", core.ALLREDUCE, arena, core.FLOAT32).wait()
go()
go()
print("reducing", flush=True)
began = time.monotonic()
try:
    while True:
        began = time.monotonic()
        go()
except nb.HorovodInternalError as error:
    print("failed", type(error).__name__, error.peer, began, time.monotonic(), error, flush=True)
print("staged", comm.info()["shm_staged_bytes"], "of", comm.info()["shm_bytes"], flush=True)
"""
TRAIN = """
import hashlib
import json
import os
import torch
import netbottleneck.torch as hvd
from netbottleneck.runtime import job
torch.set_num_threads(1)
for shm in ("0", "1"):
    os.environ["NETBOTTLENECK_SHM"] = shm
    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    torch.manual_seed(2 + hvd.rank())
    for step in range(8):
        optimizer.zero_grad()
        model(torch.randn(16, 300)).square().mean().backward()
        optimizer.step()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    info = job.current().comm.info()
    print("record", json.dumps([digest, info["shm"], info["shm_bytes"], info["shm_staged_bytes"], info["bytes_out"]]))
    hvd.shutdown()
"""


def marked_output(results: list[RankResult], number: int = 0) -> list[Any]:
    """Return each rank's output after "record", for the first or a later occurrence."""
    return [json.loads(re.findall(r"^record (.*)$", result.stdout, re.MULTILINE)[number]) for result in results]


@pytest.mark.parametrize(("size", "victim"), [(2, 1), (3, 0)])
@pytest.mark.parametrize("where", ["arena", "elsewhere"])
def test_a_rank_killed_in_a_sum_is_named_by_all_others(plain_ranks: Ranks, size: int, victim: int, where: str) -> None:
    job = plain_ranks.start(size, IN_ARENA if where == "arena" else FAULTS, ["reduce"], SHARED)
    for result in survivors(job, victim):
        if where == "arena":
            staged, whole = map(int, re.findall(r"^staged (\d+) of (\d+)$", result.stdout, re.MULTILINE)[0])
            assert staged < whole  # the last ones went straight into the others' memory


@pytest.mark.parametrize("where", ["arena", "elsewhere"])
def test_a_stopped_rank_is_named_and_exits_when_it_continues(plain_ranks: Ranks, where: str) -> None:
    job = plain_ranks.start(
        2, IN_ARENA if where == "arena" else FAULTS, ["reduce"], {**SHARED, "NETBOTTLENECK_TIMEOUT_S": "2"}
    )
    for rank in range(2):
        job.wait_for_line(rank, "reducing")
    job.kill(1, signal.SIGSTOP)
    deadline = time.monotonic() + RANKS_LIMIT_S
    while job.processes[0].poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    code = job.processes[0].poll()
    job.kill(1, signal.SIGCONT)
    first, second = job.wait(check=False)
    assert code == 0, job.describe()
    error, peer, _, _, message = failure(first)
    assert (error, peer) in [("DeadlineError", 1), ("PeerError", 1)]
    assert "rank 1" in message
    assert failure(second)[1] == 1  # rank 0 reported which rank was silent
    assert second.code == 0


def test_training_in_shared_memory_ends_with_the_same_weights(warm_ranks: Ranks) -> None:
    pytest.importorskip("torch")
    results = warm_ranks(2, TRAIN, QUICK)
    (network, apart, *_), (network_too, *_) = marked_output(results)
    assert apart.startswith("off")
    assert network == network_too
    for digest, shm, moved, staged, by_network in marked_output(results, 1):
        assert digest == network
        assert shm == "on"
        assert 0 < staged < moved  # the first step is before the arena is settled
        assert by_network == 0


def test_ranks_on_two_hosts_that_must_share_memory_are_refused(plain_ranks: Ranks) -> None:
    job = plain_ranks.start(2, FAULTS, ["reduce"], lambda rank: {**SHARED, "NETBOTTLENECK_HOST_ID": f"host {rank}"})
    for result in job.wait(check=False):
        assert result.code == 1
        assert "NETBOTTLENECK_SHM=1" in result.stderr
        assert "ranks 0 and 1 are on different hosts" in result.stderr


def test_the_benchmark_reports_whether_memory_was_shared() -> None:
    found = bench.bench(transports=["tcp"], streams=[1], sizes=[400_003, 3_000_000], iterations=2, shm="auto,0")
    assert [row["shm"] for row in found.rows] == ["on", "off: rank 0 disables it (NETBOTTLENECK_SHM=0)"] * 2
    assert found.wrong == 0
    assert [line.split()[0] for line in found.table().splitlines()[2:]] == ["tcp+shm", "tcp"] * 2
    assert all((row["wire_bits_per_s"] == 0) == (row["shm"] == "on") for row in found.rows)


def test_the_variable_is_checked() -> None:
    assert settings(environ={}).shm == "auto"
    with pytest.raises(ValueError, match="NETBOTTLENECK_SHM=yes: must be auto, 0 or 1"):
        settings(environ={"NETBOTTLENECK_SHM": "yes"})
