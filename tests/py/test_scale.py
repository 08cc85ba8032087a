"""Cost of more ranks: the schedule bounds the connections for any number of ranks; the model."""

from __future__ import annotations

import importlib
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import RANKS_LIMIT_S

from netbottleneck import _core

LANES = 4
LIMIT_S = RANKS_LIMIT_S


def on_ranks(size: int, work: Callable[[int], Any]) -> list[Any]:
    """Run work on every rank concurrently, in threads."""
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
    return results


def connected() -> int:
    """Return the number of ends of this process's established TCP connections."""
    return sum(c.status == psutil.CONN_ESTABLISHED for c in psutil.Process().net_connections("tcp"))


@pytest.mark.parametrize("size", [2, 5, 9])
def test_connections_are_bounded_by_lanes_and_neighbours(size: int) -> None:
    before = connected()
    listener = _core.Listener(ifname="lo")

    def open_rank(rank: int) -> _core.Comm:
        door: dict[str, Any] = {"listener": listener} if rank == 0 else {"address": listener.address}
        return _core.Comm(
            rank, size, secret=b"sixteen bytes...", ifname="lo", streams=LANES, shm="0", timeout_s=LIMIT_S, **door
        )

    comms = on_ranks(size, open_rank)
    listener.close()
    control = 2 * (size - 1)
    ring = LANES * 2 * 2 * (size if size > 2 else 1)  # a connection each way, and both ends of it
    assert connected() - before == control + ring
    for count in (1, 1 << 10, 1 << 20):

        def reduce(rank: int, count: int = count) -> None:
            data = np.ones(count, np.float32)
            comms[rank].submit(f"sum {count}", _core.ALLREDUCE, data, _core.FLOAT32).wait()
            assert (data == size).all()

        on_ranks(size, reduce)
    # Recursive doubling adds at most a partner a step, and one where ranks are no power of two.
    partners = 2 + math.ceil(math.log2(size)) + 1
    assert connected() - before <= control + size * LANES * 2 * partners
    on_ranks(size, lambda rank: comms[rank].close())


def test_predictions_follow_the_formulas_and_name_the_best() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    try:
        scale = importlib.import_module("scale")
    finally:
        del sys.path[0]
    link = scale.Link(1e-3, 1e6)
    assert scale.ring_s(link, 4, 1e6) == pytest.approx(6 * (1e-3 + 0.25))
    assert scale.doubling_s(link, 4, 1e6) == pytest.approx(2 * (1e-3 + 1))
    assert scale.halving_s(link, 4, 1e6) == pytest.approx(4e-3 + 1.5)
    assert scale.doubling_s(link, 5, 1e6) == pytest.approx((2 + 2) * (1e-3 + 1))  # the fifth hands its line on
    assert scale.halving_s(link, 5, 1e6) == pytest.approx(4e-3 + 1.5 + 2 * (1e-3 + 1))
    best = [each["best"] for each in scale.predicted(scale.Link(1e-3, 1e8), 1024)]
    assert best == ["recursive doubling", "halving and doubling", "halving and doubling"]
    assert scale.predicted(scale.Link(1e-6, 1e6), 1000)[-1]["best"] == "ring"
    assert scale.fitted(2e-4, 2e-4 + scale.LARGE / 1e8) == scale.Link(1e-4, pytest.approx(1e8))
