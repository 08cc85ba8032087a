"""Contention of operations with compute: recovered from a run, applied once, and unknown without data."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from netbottleneck.trace import model as tr
from netbottleneck.trace.model import Collective, Network, Parameter, Rank, Step, Trace
from netbottleneck.trace.transports import Arm
from netbottleneck.whatif import forecast, questions, sweeps
from netbottleneck.whatif.cost import Cost, Link
from netbottleneck.whatif.fit import contention, fit
from netbottleneck.whatif.forecast import Wire
from netbottleneck.whatif.plan import Plan, replay_schedule
from netbottleneck.whatif.simulate import simulate

STORED = Path(__file__).parents[2] / "benchmarks" / "traces" / "resnet50-2gbit-500mbit.jsonl.gz"
MS, MB = 1_000_000, 1_000_000
SIZES = (4 * MB, 24 * MB, 9 * MB, 12 * MB, 2 * MB, 16 * MB)
EACH = Plan.explicit([(index,) for index in reversed(range(len(SIZES)))])
FORWARD, GAP, UPDATE = 30 * MS, 20 * MS, 5 * MS
ALONE = FORWARD + GAP * len(SIZES) + UPDATE
WIRE = Wire(2e9, 5e8, 4.78e8, 1.9e9)


def alone(ranks: int, steps: int, wobble: Callable[[], int]) -> Trace:
    """Steps without communication: a gradient about every 20 ms."""
    rows = []
    for rank in range(ranks):
        begin = 0
        for index in range(steps):
            ready, at = [], begin + FORWARD
            for tensor in reversed(range(len(SIZES))):
                at += GAP + wobble()
                ready.append((tensor, at))
            forward, update = ((begin, begin + FORWARD),), ((at, at + UPDATE),)
            end = at + UPDATE
            rows.append(
                Step(
                    rank, index, 0, Arm("null"), begin, end, forward=forward, optimizer=update, grad_ready=tuple(ready)
                )
            )
            begin = end
    tensors = tuple(Parameter(f"t{index}", size, "float32") for index, size in enumerate(SIZES))
    hosts = tuple(Rank(rank, host_id=f"host{rank}") for rank in range(ranks))
    return Trace("made", ranks, (Arm("null"),), ranks=hosts, parameters=tensors, steps=tuple(rows))


def moved(step: Step, at: int, index: int, block: int, name: str) -> Step:
    """The step at another place in the run, over another transport."""
    by = at - step.begin_ns
    pairs = {what: tuple((a + by, b + by) for a, b in getattr(step, what)) for what in ("forward", "optimizer")}
    ready = tuple((tensor, when + by) for tensor, when in step.grad_ready)
    waits = tuple((key, a + by, b + by) for key, a, b in step.waits)
    place = {"index": index, "block": block, "arm": Arm(name), "begin_ns": at, "end_ns": step.end_ns + by}
    return replace(step, grad_ready=ready, waits=waits, **pairs, **place)  # type: ignore[arg-type]


def in_turn(cost: Cost, *, blocks: int = 5, block_steps: int = 5, wobble: Callable[[], int] = lambda: 0) -> Trace:
    """A run whose blocks alternate between no communication and all communication at a cost."""
    nothing = alone(2, blocks * block_steps, wobble)
    made = simulate(alone(2, blocks * block_steps, wobble), EACH, cost, steps=blocks * block_steps)
    steps: list[Step] = []
    operations: list[Collective] = []
    now = 0
    for block in range(2 * blocks):
        name, source = ("tcp", made) if block % 2 else ("null", nothing)
        for place in range(block_steps):
            number, index = block // 2 * block_steps + place, block * block_steps + place
            own = [step for step in source.steps if step.index == number]
            by = now - min(step.begin_ns for step in own)
            steps += [moved(step, step.begin_ns + by, index, block, name) for step in own]
            for one in source.collectives:
                if one.step == number:
                    times = {
                        what: getattr(one, what) + by for what in ("submit_ns", "agreed_ns", "start_ns", "done_ns")
                    }
                    operations.append(replace(one, arm=Arm("tcp"), step=index, round=index, **times))
            now += max(step.end_ns for step in own) - min(step.begin_ns for step in own) + MS
    verified = {"one_flow": {"measured_bps": WIRE.one_flow_bps}, "many_flows": {"measured_bps": WIRE.many_flows_bps}}
    network = Network("made up", WIRE.link_bps, (5e8,), verified)
    return replace(
        nothing,
        arms=(Arm("null"), Arm("tcp")),
        network=network,
        buckets=made.buckets,
        steps=tuple(steps),
        collectives=tuple(operations),
    )


def lengths(trace: Trace, name: str) -> list[int]:
    return [step.duration_ns for step in trace.steps if step.arm == name]


@pytest.mark.parametrize("slower", [1.0, 1.1, 1.5, 2.5])
def test_a_fit_recovers_the_contention_that_made_the_run(slower: float) -> None:
    run = in_turn(Cost(link=Link(3e9), contention=slower))
    found = fit(run, "tcp")
    assert found.cost.contention == pytest.approx(slower, abs=1e-4)
    assert found.contention is not None
    assert (found.contention.low, found.contention.high) == pytest.approx((slower, slower), abs=1e-4)
    assert any("times as long while an operation is in flight" in note for note in found.notes)


@pytest.mark.parametrize("slower", [1.0, 1.3])
def test_the_interval_covers_the_contention_if_compute_varies(slower: float) -> None:
    draw = random.Random(3)
    run = in_turn(Cost(link=Link(3e9), contention=slower), blocks=8, wobble=lambda: draw.randrange(-MS, MS))
    found, note = contention(run, "tcp")
    assert found is not None
    assert found.low <= slower <= found.high
    assert found.high - found.low < 0.2
    assert found.value == pytest.approx(slower, abs=0.05)
    assert "5 pairs" in note or "8 pairs" in note


@pytest.mark.parametrize("bps", [1e9, 3e9, 2e10])
def test_contention_is_applied_once(bps: float) -> None:
    """The simulation reproduces the run; without communication it gives the steps of the null arm."""
    run = in_turn(Cost(link=Link(bps), contention=1.4))
    job = questions.job(run, "tcp")
    now, free = (questions.answer(job, ask(job)).step_s for ask in (sweeps.now, sweeps.free))
    assert now is not None
    assert free is not None
    assert 1e9 * now.value == pytest.approx(statistics.median(lengths(run, "tcp")), rel=1e-5)
    assert 1e9 * free.value == pytest.approx(ALONE, rel=1e-5)
    assert job.alone_ns == pytest.approx(ALONE, rel=1e-5)
    again = simulate(run, EACH, fit(run, "tcp").cost, transport="tcp")
    assert statistics.median(lengths(again, "tcp")) == pytest.approx(statistics.median(lengths(run, "tcp")), rel=1e-5)


def test_an_answer_about_another_link_holds_for_a_run_over_it() -> None:
    job = questions.job(in_turn(Cost(link=Link(1e9), contention=1.4)), "tcp")
    there = in_turn(Cost(link=Link(5e9), contention=1.4))
    (faster,) = sweeps.answers(job, sweeps.links(job, [5e9]))
    assert faster.step_s is not None
    assert 1e9 * faster.step_s.value == pytest.approx(statistics.median(lengths(there, "tcp")), rel=1e-5)


def test_contention_widens_the_interval_and_is_noted() -> None:
    draw = random.Random(5)
    job = questions.job(in_turn(Cost(link=Link(3e9), contention=1.4), wobble=lambda: draw.randrange(-MS, MS)), "tcp")
    free = questions.answer(job, sweeps.free(job))
    assert free.interval
    assert free.step_s is not None
    assert free.step_s.low < free.step_s.value < free.step_s.high
    (faster,) = sweeps.answers(job, sweeps.links(job, [2e10]))
    (known,) = sweeps.answers(replace(job, at_ends=()), sweeps.links(job, [2e10]))
    assert faster.step_s is not None
    assert known.step_s is not None
    assert faster.step_s.value == known.step_s.value
    assert faster.step_s.high - faster.step_s.low > known.step_s.high - known.step_s.low
    least = sweeps.least_link(job, 0.8)
    assert least.value is not None
    assert least.value.low < least.value.value < least.value.high
    assert any("times as long while an operation is in flight" in note for note in job.notes)


def test_a_forecast_uses_the_contention_of_its_source_and_notes_it() -> None:
    run = in_turn(Cost(link=Link(1.9e9), contention=1.4))
    predicted = forecast.make(run, replay_schedule(run, EACH), 2, WIRE, ["tcp"])
    found = predicted.transports["tcp"].step_ns
    assert found is not None
    assert found.value == pytest.approx(statistics.median(lengths(run, "tcp")), rel=1e-4)
    assert any("times as long while an operation is in flight" in note for note in predicted.notes)


def test_unknown_contention_is_1_with_a_note() -> None:
    whole = in_turn(Cost(link=Link(3e9), contention=1.4))
    run = replace(whole, steps=tuple(step for step in whole.steps if step.arm == "tcp"))
    assert fit(run, "tcp").cost.contention == 1.0
    assert fit(run, "tcp").contention is None
    assert any("the arm null" in note for note in fit(run, "tcp").notes)
    one_pair = replace(whole, steps=tuple(step for step in whole.steps if step.block < 2))
    assert contention(one_pair, "tcp")[0] is None
    nothing_beside = in_turn(Cost(link=Link(1e13), contention=1.4))
    found, why = contention(nothing_beside, "tcp")
    assert found is None
    assert "of compute overlaps an operation" in why
    stored = fit(tr.read(STORED), "ofi")
    assert (stored.cost.contention, stored.contention) == (1.0, None)


def test_contention_is_unknown_if_compute_varies_too_much() -> None:
    draw = random.Random(11)
    run = in_turn(Cost(link=Link(2e10)), blocks=3, block_steps=3, wobble=lambda: draw.randrange(-15 * MS, 15 * MS))
    found, why = contention(run, "tcp")
    assert found is None
    assert "is too wide" in why
