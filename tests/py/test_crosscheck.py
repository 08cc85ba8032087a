"""Comparison of DDP's own times with ours."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from netbottleneck.hooks import measured_model
from netbottleneck.hooks.measured_model import Crosscheck, Pass, Sample, compared

OURS = Pass(begin_ns=52, sent_ns=250, wait_begin_ns=310, wait_end_ns=500)


def sample(**changed: int) -> Sample:
    return Sample(**{**{"begin_ns": 50, "sent_ns": 240, "end_ns": 480, "error_ns": 5}, **changed})


def test_times_between_two_of_our_timestamps_agree() -> None:
    assert compared([(sample(), OURS)]) == []


def test_only_the_clocks_error_is_tolerated() -> None:
    assert compared([(sample(begin_ns=57), OURS)]) == []
    assert compared([(sample(begin_ns=58), OURS)]) == [("the begin of the pass", 1)]


@pytest.mark.parametrize(
    ("changed", "what", "ns"),
    [
        ({"begin_ns": 60}, "the begin of the pass", 3),  # our gradients would be ready before DDP's
        ({"sent_ns": 40}, "the first bucket sent", 5),
        ({"sent_ns": 260}, "the first bucket sent", 5),
        ({"end_ns": 290}, "all buckets back", 15),
        ({"end_ns": 520}, "all buckets back", 15),
    ],
)
def test_a_time_outside_is_reported_with_its_distance(changed: dict[str, int], what: str, ns: int) -> None:
    assert compared([(sample(**changed), OURS)]) == [(what, ns)]


def test_a_pass_without_ready_times_has_no_begin_to_compare() -> None:
    assert compared([(sample(begin_ns=60), OURS._replace(begin_ns=0))]) == []


def test_the_begin_is_apart_if_it_is_so_in_most_passes() -> None:
    """DDP takes two stamps of its begin one after the other: in one pass they may be far from each other."""
    late, good = (sample(begin_ns=90), OURS), (sample(), OURS)
    assert compared([good, late, good]) == compared([late, good]) == []
    assert compared([late, good, late]) == [("the begin of the pass", 33)] * 2


class Model:
    """A DDP model that reports its last pass: begun a second ago by the wall clock, ended 1000 ns ago."""

    def __init__(self) -> None:
        self.iteration = 0

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        self.iteration += 1
        now = time.time_ns()
        ended = {f"backward_comm_time_{what}": now - 1000 for what in ("start", "end")}
        return {"iteration": self.iteration, "backward_compute_time_start": now - 10**9, **ended}


def test_a_pass_is_kept_only_if_the_clock_was_looked_at_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_model.job, "core", lambda: SimpleNamespace(now_ns=time.monotonic_ns))
    model = Model()
    hook = SimpleNamespace(count=1, last_pass=None)
    check = Crosscheck(model, hook, None)  # type: ignore[arg-type]
    kept = []
    for _ in range(5):
        now = time.monotonic_ns()
        hook.last_pass = Pass(0, now, now, now)
        check.look()
        kept.append(len(check._samples))
    assert kept == [0, 0, 1, 2, 3]  # the pass before the last one, of which the look before it is known
