"""Several hosts with several ranks: sums are exact, cross the wire once per host, and all ranks name a lost one."""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import RANKS_LIMIT_S, Ranks

from netbottleneck import bench
from netbottleneck.lab import LabError
from netbottleneck.trace import ring_reader
from test_faults import QUICK, failure, survivors
from test_faults import SCRIPT as FAULTS
from test_shm import IN_ARENA, marked_output

DDP = Path(__file__).parent / "scripts" / "e2e_ddp.py"
SUMS = """
import json
import netbottleneck as nb
from netbottleneck.runtime import job
from netbottleneck.runtime.ops import Sum
import numpy as np
comm = job.start().comm
wrong = 0
for count in (0, 1, 4095, 4097, 100_003, 3_000_001):
    for dtype in (np.float32, np.int64, np.uint8):
        given = (np.arange(count) % 7 + comm.rank).astype(dtype)
        found = nb.allreduce(given, op=Sum, name=f"{count} {np.dtype(dtype)}")
        wanted = (np.arange(count) % 7) * comm.size + comm.size * (comm.size - 1) // 2
        wrong += int((found != wanted.astype(dtype)).sum())
info = comm.info()
print("record", json.dumps([wrong, info["shm"], info["shm_bytes"], info["bytes_out"]]))
"""


def hosts(letters: str, **more: str) -> object:
    """Return the environment by rank, with one letter for each host."""
    always = {**QUICK, "NETBOTTLENECK_SHM": "1", "NETBOTTLENECK_ALGORITHM": "two_level", **more}
    return lambda rank: {**always, "NETBOTTLENECK_HOST_ID": letters[rank]}


# "aab": hosts of different sizes; "aabbcc": more than two hosts of several ranks, each as of "aabb".
@pytest.mark.parametrize("where", [pytest.param("aabb", marks=pytest.mark.full), "aab", "aabbcc"])
def test_sums_are_exact_and_memory_is_shared_on_each_host(plain_ranks: Ranks, where: str) -> None:
    answers = marked_output(plain_ranks(len(where), SUMS, hosts(where)))
    here = Counter(where)
    for host, (wrong, shm, shared, by_network) in zip(where, answers, strict=True):
        assert wrong == 0
        assert shm == f"on: {here[host]} rank{'s' if here[host] > 1 else ''} of this host"
        assert (shared > 0) == (here[host] > 1)
        assert by_network > 0


def test_the_record_names_it_and_what_crossed_the_wire(warm_ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    env = {
        "NETBOTTLENECK_START_STEP": "0",
        "NETBOTTLENECK_BLOCK_STEPS": "3",
        "NETBOTTLENECK_TRANSPORT": "tcp",
        "NETBOTTLENECK_STREAMS": "2",
        "NETBOTTLENECK_DIR": str(tmp_path / "run"),
        "E2E_IMPORT": "before",
        "E2E_OUT": str(tmp_path),
    }
    warm_ranks(3, DDP, hosts("aab", **env))
    assert len({(tmp_path / f"{rank}.weights").read_bytes() for rank in range(3)}) == 1
    sums = [c for c in ring_reader.load(tmp_path / "run").collectives if c.algorithm == "two_level"]
    owed = sum(c.tensor_bytes for c in sums) // 3
    assert owed > 0
    assert sum(c.wire_bytes or 0 for c in sums) == 2 * owed  # 2(h - 1) of it, of all ranks of all hosts
    by_lane = Counter[int]()
    for one in sums:
        by_lane.update({lane: sent for lane, sent, _ in one.lanes or ()})
    assert by_lane[64] > 0
    assert sum(by_lane.values()) - by_lane[64] == 2 * owed


# The coordinator, another rank of its host, and one of the other host; each memory on both hosts.
@pytest.mark.parametrize(
    ("victim", "where"),
    [
        *((0, "elsewhere"), (1, "arena"), (3, "arena"), (3, "elsewhere")),
        *(pytest.param(*cell, marks=pytest.mark.full) for cell in ((0, "arena"), (1, "elsewhere"))),
    ],
)
def test_a_rank_killed_in_a_sum_is_named_by_all_others(plain_ranks: Ranks, victim: int, where: str) -> None:
    job = plain_ranks.start(4, IN_ARENA if where == "arena" else FAULTS, ["reduce"], hosts("aabb"))
    survivors(job, victim)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_stopped_rank_is_named_by_all_others(plain_ranks: Ranks, victim: int) -> None:
    job = plain_ranks.start(4, IN_ARENA, [], hosts("aabb", NETBOTTLENECK_TIMEOUT_S="2"))
    for rank in range(4):
        job.wait_for_line(rank, "reducing")
    job.kill(victim, signal.SIGSTOP)
    others = [rank for rank in range(4) if rank != victim]
    deadline = time.monotonic() + RANKS_LIMIT_S
    while any(job.processes[rank].poll() is None for rank in others) and time.monotonic() < deadline:
        time.sleep(0.02)
    codes = [job.processes[rank].poll() for rank in others]
    job.kill(victim, signal.SIGCONT)
    results = job.wait(check=False)
    assert codes == [0, 0, 0], job.describe()
    for rank in others:
        error, peer, _, _, message = failure(results[rank])
        assert (error, peer) in [("DeadlineError", victim), ("PeerError", victim)]
        assert f"rank {victim}" in message


def test_a_benchmark_of_two_hosts_puts_each_byte_on_the_wire_once_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 4_000_000
    links = {"ranks": 4, "ranks_per_host": 2, "lab": "2gbit/500mbit"}
    try:
        found = bench.bench(**links, transports=["tcp"], streams=[2], sizes=[size], iterations=2, shm="auto,0")
    except LabError as error:
        pytest.skip(f"no network namespaces on this machine: {error}")
    if "namespaces" not in found.head["lab"]["how"]:
        pytest.skip(f"no network namespaces on this machine: {found.head['lab']['why']}")
    two, flat = found.rows
    assert found.wrong == 0
    assert (two["shm"], flat["shm"]) == ("on: 2 ranks of this host", "off: rank 0 disables it (NETBOTTLENECK_SHM=0)")
    assert [line.split()[0] for line in found.table().splitlines()[2:]] == ["tcp+shm", "tcp"]
    monkeypatch.setenv("NETBOTTLENECK_ALGORITHM", "ring")
    ring = bench.bench(**links, transports=["tcp"], streams=[2], sizes=[size], iterations=2, shm="0")
    # Of both hosts, headers included: 2(h - 1) times the size, where a ring of n ranks sends 2(n - 1)/n on each link.
    assert all(2 * size <= sent < 2.5 * size for sent in two["rounds"]["sent_bytes"])
    assert all(3 * size <= sent for sent in ring.rows[0]["rounds"]["sent_bytes"])
