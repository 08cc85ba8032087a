"""The what-if engine: equal to a simple reference, monotone, complete, with an ordinary trace as output."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles.simoracle import Oracle, RankStep
from netbottleneck.analysis.intervals import split_steps
from netbottleneck.trace import model as tr
from netbottleneck.trace.model import Parameter, Rank, Step, Trace
from netbottleneck.trace.transports import Arm
from netbottleneck.whatif.cost import ALGORITHMS, Cost, Link, Table
from netbottleneck.whatif.plan import RULES, Plan
from netbottleneck.whatif.simulate import simulate, workload

STORED = Path(__file__).parents[2] / "benchmarks" / "traces" / "resnet50-2gbit-500mbit.jsonl.gz"


def step_of(rank: int, index: int, begin: int, spec: RankStep, blocked: int) -> Step:
    """A recorded step, blocked for a while before its update."""
    at = begin + spec.head
    ready = []
    for tensor, ns in spec.gaps:
        at += ns
        ready.append((tensor, at))
    at += spec.post
    waits = ((0, at, at + blocked),) if blocked else ()
    # If a rank never waited, its update marks the place of the wait.
    optimizer = ((at + blocked, at + blocked + spec.tail),)
    forward = ((begin, begin + spec.head),)
    end = at + blocked + spec.tail
    return Step(
        rank,
        index,
        0,
        Arm("tcp"),
        begin,
        end,
        forward=forward,
        optimizer=optimizer,
        grad_ready=tuple(ready),
        waits=waits,
    )


def trace_of(ranks: list[list[RankStep]], sizes: list[int], kinds: list[str], blocked: int = 7) -> Trace:
    steps = []
    for rank, specs in enumerate(ranks):
        # The first of a block does not count: one more.
        begin = 0
        for index, spec in enumerate([specs[0], *specs]):
            step = step_of(rank, index, begin, spec, blocked)
            steps.append(step)
            begin = step.end_ns
    parameters = tuple(Parameter(f"t{i}", size, kind) for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True)))
    return Trace(
        "made",
        len(ranks),
        (Arm("tcp"),),
        ranks=tuple(map(Rank, range(len(ranks)))),
        parameters=parameters,
        steps=tuple(steps),
    )


@st.composite
def works(draw: st.DrawFn) -> tuple[list[list[RankStep]], list[int], list[str]]:
    tensors, ranks, steps = draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    times = st.integers(0, 60)

    def rank_step() -> RankStep:
        order = draw(st.permutations(range(tensors)))
        return RankStep(draw(times), [(t, draw(times)) for t in order], draw(times), draw(times))

    sizes = draw(st.lists(st.integers(0, 400), min_size=tensors, max_size=tensors))
    kinds = draw(st.lists(st.sampled_from(["float32", "float16"]), min_size=tensors, max_size=tensors))
    return [[rank_step() for _ in range(steps)] for _ in range(ranks)], sizes, kinds


@st.composite
def plans(draw: st.DrawFn, tensors: int) -> Plan:
    flying = draw(st.integers(1, 3))
    rule = draw(st.sampled_from(RULES))
    if rule == "explicit":
        order = draw(st.permutations(range(tensors)))
        cut = draw(st.integers(1, tensors))
        return Plan.explicit([b for b in (order[:cut], order[cut:]) if b], flying)
    limit, cycle = draw(st.integers(1, 900)), draw(st.integers(1, 120))
    return Plan(rule, fusion_bytes=limit, cycle_ns=cycle, first_bytes=draw(st.integers(1, 300)), in_flight=flying)


prices = st.floats(0, 0.4, allow_subnormal=False)


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    table = Table((10.0, 100.0, 300.0), (5.0, 9.0, 40.0), draw(st.booleans()))
    return Cost(
        algorithm=draw(st.sampled_from(ALGORITHMS)),
        alpha_ns=draw(st.floats(0, 9)),
        host_alpha_ns=draw(st.floats(0, 5)),
        link=Link(draw(st.floats(1e10, 1e12)), draw(st.integers(1, 4)), draw(st.none() | st.floats(5e9, 1e11))),
        ranks_per_host=draw(st.integers(1, 4)),
        host_bps=draw(st.none() | st.floats(1e10, 1e12)),
        add=draw(prices | st.just(table)),
        copy_byte_ns=draw(prices),
        launch_ns=draw(st.floats(0, 40)),
        fixed_ns=draw(st.floats(0, 20)),
        pipelined=draw(st.booleans()),
        ratio=draw(st.sampled_from([1.0, 2.0, 3.5])),
        encode_byte_ns=draw(prices),
        decode_byte_ns=draw(prices),
        contention=draw(st.sampled_from([1.0, 1.25, 2.0])),
        whole_sums=draw(st.booleans()),
    )


def outcome(found: Trace) -> list[tuple[int | None, int, int | None, int | None, int | None]]:
    return [(c.step, c.tensor_bytes, c.agreed_ns, c.start_ns, c.done_ns) for c in found.collectives if c.rank == 0]


def test_the_untouched_script_waits_from_its_last_gradient_to_its_update_whichever_tensor_is_last() -> None:
    for last in (0, 1):
        ready = ((1 - last, 100), (last, 200))
        step = Step(0, 0, 0, Arm("bare"), 0, 300, forward=((0, 50),), optimizer=((260, 290),), grad_ready=ready)
        run = Trace(
            *("made", 1, (Arm("bare"),)),
            ranks=(Rank(0),),
            parameters=tuple(Parameter(f"t{i}", 4, "float32") for i in range(2)),
            steps=(step, replace(step, index=1)),
        )
        draw = workload(run).draws[0]
        assert (draw.order, draw.compute_ns, int(draw.work_ns.sum())) == ([1 - last, last], 200, 240)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_a_reference_simulator_with_steps_of_one_ns_agrees(data: st.DataObject) -> None:
    ranks, sizes, kinds = data.draw(works())
    plan, cost = data.draw(plans(len(sizes))), data.draw(costs())
    expected = Oracle(ranks, sizes, kinds, plan, cost, len(ranks)).run()
    found = simulate(trace_of(ranks, sizes, kinds), plan, cost)
    assert outcome(found) == [(op.step, op.nbytes, op.agreed, op.start, op.done) for op in expected.ops]
    for rank, ends in enumerate(expected.ends):
        assert [step.end_ns for step in found.steps if step.rank == rank] == ends


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_step_sends_all_bytes_once_in_order(data: st.DataObject) -> None:
    ranks, sizes, kinds = data.draw(works())
    plan, cost = data.draw(plans(len(sizes))), data.draw(costs())
    found = simulate(trace_of(ranks, sizes, kinds), plan, cost, workers=data.draw(st.integers(1, 40)), steps=3)
    for rank in found.ranks:
        for index in range(3):
            own = [c for c in found.collectives if (c.rank, c.step) == (rank.rank, index)]
            assert sum(c.tensor_bytes for c in own) == sum(sizes)
    for c in found.collectives:
        times = (c.submit_ns, c.agreed_ns, c.start_ns, c.done_ns)
        assert all(isinstance(at, int) for at in times)
        assert list(times) == sorted(at for at in times if at is not None)
    for step in found.steps:
        assert step.begin_ns <= step.end_ns
        assert all(step.begin_ns <= at <= step.end_ns for _, at in step.grad_ready)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.floats(1.0, 50.0))
def test_a_faster_link_never_makes_a_step_longer_if_operations_are_sequential(data: st.DataObject, more: float) -> None:
    ranks, sizes, kinds = data.draw(works())
    plan = replace(data.draw(plans(len(sizes))), in_flight=1)
    # With contention less communication can move a rank's work to a moment that suits the rule less.
    cost = replace(data.draw(costs()), contention=1.0)
    load = workload(trace_of(ranks, sizes, kinds))
    slow = simulate(load, plan, cost)
    lane_bps = None if cost.link.lane_bps is None else cost.link.lane_bps * more
    fast = simulate(load, plan, replace(cost, link=replace(cost.link, bps=cost.link.bps * more, lane_bps=lane_bps)))
    last = {c.step for c in slow.collectives}
    for index in sorted(s for s in last if s is not None):
        ends = [max(s.end_ns for s in found.steps if s.index == index) for found in (slow, fast)]
        assert ends[1] <= ends[0]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_free_communication_leaves_the_compute(data: st.DataObject) -> None:
    ranks, sizes, kinds = data.draw(works())
    plan = data.draw(plans(len(sizes)).filter(lambda p: p.rule != "horovod"))
    found = simulate(trace_of(ranks, sizes, kinds), plan, Cost.free(), workers=1)
    begin = 0
    for at, step in enumerate(found.steps):
        turn = at // math.lcm(len(ranks[0]), len(ranks))
        spec = ranks[(at + turn) % len(ranks)][at % len(ranks[0])]
        begin += spec.head + sum(ns for _, ns in spec.gaps) + spec.post + spec.tail
        assert step.end_ns == begin


def test_blocked_time_is_excluded_from_compute() -> None:
    spec = RankStep(100, [(1, 10), (0, 20)], 5, 30)
    free = [
        simulate(trace_of([[spec]] * 2, [8, 8], ["f"] * 2, blocked), Plan.ddp(), Cost.free()) for blocked in (0, 900)
    ]
    assert free[0] == free[1]
    assert [step.duration_ns for step in free[0].steps] == [165, 165]


def test_a_gradient_that_never_is_ready_is_sent_at_the_wait() -> None:
    spec = RankStep(100, [(1, 10)], 5, 30)
    found = simulate(trace_of([[spec]] * 2, [8, 24], ["f"] * 2), Plan.explicit([(1,), (0,)]), Cost(link=Link(8e9)))
    assert [(c.bucket, c.submit_ns) for c in found.collectives if c.rank == 0] == [(0, 110), (1, 115)]


def from_begin(change: dict[str, Any], begin_ns: int) -> dict[str, Any]:
    """The same change, with the last two values of each row (for gradients: the last) relative to the step's begin."""
    keep = {"grad_ready": 1, "waits": 1}
    return {
        name: tuple((*row[: keep.get(name, 0)], *(at + begin_ns for at in row[keep.get(name, 0) :])) for row in rows)
        for name, rows in change.items()
    }


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": ((160, 400),)},  # ends in the next step
        {"optimizer": ((350, 400),)},  # is all of it there
        {"optimizer": ((160, 150),)},  # ends before it begins
        {"forward": ((-90, 100),)},  # began in the step before
        {"forward": ((0, 900),)},
        {"grad_ready": ((0, -50), (1, 900))},
        {"waits": ((0, 120, 900),)},
    ],
)
def test_marks_outside_of_their_step_are_clamped_to_it(change: dict[str, Any]) -> None:
    trace = trace_of([[RankStep(100, [(1, 10), (0, 20)], 5, 30)] * 2] * 2, [8, 8], ["f"] * 2)
    steps = tuple(replace(step, **from_begin(change, step.begin_ns)) for step in trace.steps)
    found = simulate(replace(trace, steps=steps), Plan.ddp(), Cost(link=Link(8e9)))
    assert len(found.steps) == 4
    for step in found.steps:
        marks = [at for pair in (*step.forward, *step.optimizer) for at in pair] + [at for _, at in step.grad_ready]
        assert all(step.begin_ns <= at <= step.end_ns for at in marks)
        assert sorted(index for index, _ in step.grad_ready) == [0, 1]


@pytest.mark.parametrize(
    ("algorithm", "ranks_per_host", "workers", "wire_bytes"),
    [
        ("ring", 1, 4, 6000),  # 2 x 3/4
        ("ring", 2, 4, 3000),  # what leaves a host, halved
        ("two_level", 2, 4, 2000),  # 2 x 1/2 leaves a host
        ("two_level", 4, 8, 1000),
        ("ring", 4, 4, 0),
        ("ring", 8, 4, 0),
        ("ring", 8, 2, 0),
    ],
)
def test_wire_bytes_are_per_rank_if_several_share_a_host(
    algorithm: str, ranks_per_host: int, workers: int, wire_bytes: int
) -> None:
    spec = RankStep(0, [(0, 10)], 0, 0)
    cost = Cost(algorithm, link=Link(8e9), ranks_per_host=ranks_per_host)
    found = simulate(trace_of([[spec]] * 4, [4000], ["f"]), Plan.ddp(), cost, workers=workers)
    assert {c.wire_bytes for c in found.collectives} == {wire_bytes}
    hosts = {rank.rank: rank.host_id for rank in found.ranks}
    assert all(host == f"host{rank // min(ranks_per_host, workers)}" for rank, host in hosts.items())


def test_a_fused_operation_was_submitted_when_its_last_tensor_was_ready_on_that_rank() -> None:
    # Both are ready everywhere at 60 and 50: tensor 0 arrives first, though rank 0 had it last.
    ranks = [[RankStep(0, [(1, 10), (0, 10)], 0, 0)], [RankStep(0, [(0, 50), (1, 10)], 0, 0)]]
    plan = Plan("horovod", fusion_bytes=1000, cycle_ns=100)
    found = simulate(trace_of(ranks, [8, 8], ["f"] * 2), plan, Cost(link=Link(8e9)))
    assert [(c.rank, c.submit_ns, c.tensor_bytes) for c in found.collectives] == [(0, 20, 16), (1, 60, 16)]


def test_more_workers_wait_for_the_slowest_recorded_step_and_memory_stays() -> None:
    specs = [RankStep(0, [(0, ns)], 0, 0) for ns in (100, 110, 120, 200)]
    load = workload(trace_of([specs, specs], [8], ["f"]))
    lengths = [
        max(s.duration_ns for s in simulate(load, Plan.ddp(), Cost.free(), workers=n, steps=8).steps)
        for n in (3, 100_000)
    ]
    assert lengths[1] == 200
    many = simulate(load, Plan.ddp(), Cost.free(), workers=100_000, steps=8)
    assert [step.duration_ns for step in many.steps] == [200] * 8
    assert {c.rank for c in many.collectives} == {0}
    assert many.size == 100_000
    few = simulate(load, Plan.ddp(), Cost.free(), workers=3, steps=8)
    assert sum(s.duration_ns for s in few.steps) < 1600
    assert any("drawn from 8 recorded steps" in note for note in many.notes)


def test_a_simulated_rank_is_typical_of_all_ranks() -> None:
    ranks = [[RankStep(0, [(0, ns + at)], 0, 0) for at in range(20)] for ns in (100, 200, 300)]
    load = workload(trace_of(ranks, [8], ["f"]))
    alone = simulate(load, Plan.ddp(), Cost.free(), workers=1, steps=21).steps
    lengths = [step.duration_ns // 100 for step in alone]
    assert [lengths.count(one) for one in (1, 2, 3)] == [7, 7, 7]


def test_a_step_with_a_pause_that_is_too_long_for_the_engine_is_left_out() -> None:
    specs = [RankStep(0, [(0, ns)], 0, 0) for ns in (100, 110, 1001 * 10**9, 120)]
    load = workload(trace_of([specs, specs], [8], ["f"]))
    assert [draws[0].compute_ns for draws in load.steps] == [100, 110, 120]
    only = workload(trace_of([specs[2:3]] * 2, [8], ["f"]))
    with pytest.raises(ValueError, match="an invalid work time"):
        simulate(only, Plan.ddp(), Cost.free())


def test_the_output_is_an_ordinary_trace(tmp_path: Path) -> None:
    spec = RankStep(100, [(1, 100), (0, 100)], 0, 50)
    found = simulate(trace_of([[spec]] * 2, [4000, 1000], ["f"] * 2), Plan.ddp(1000, 500), Cost(link=Link(8e9)))
    tr.write(found, tmp_path / "simulated.jsonl.gz")
    assert tr.read(tmp_path / "simulated.jsonl.gz") == found
    assert found.origin == "simulated"
    (_, split, _), *_ = split_steps(found, warmup=0)
    # Two ranks, a byte a ns: 1000 from 200 on, then 4000.
    assert (split.step_ns, split.compute_ns, split.hidden_ns, split.exposed_ns) == (5250, 350, 100, 4900)
    assert Plan.of(found).buckets == ((1,), (0,))


def test_buckets_that_ddp_made_for_its_first_step_are_not_of_the_plan() -> None:
    spec = RankStep(100, [(1, 100), (0, 100)], 0, 50)
    found = simulate(trace_of([[spec] * 3] * 2, [4000, 1000], ["f"] * 2), Plan.ddp(1000, 500), Cost(link=Link(8e9)))
    first = min(step.index for step in found.steps)
    whole = tr.Bucket("ddp/0:5000", 1, 5000, "float32", ())
    operations = [
        replace(c, bucket=len(found.buckets)) if c.step == first else c
        for c in (*found.collectives, replace(found.collectives[0], bucket=len(found.buckets), step=None))
    ]
    started = replace(found, buckets=(*found.buckets, whole), collectives=tuple(operations))
    assert Plan.of(started).buckets == ((1,), (0,))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"workers": 0}, "at least 1"),
        ({"steps": 0}, "at least 1"),
        ({"plan": Plan.explicit([(5,)])}, "tensor 5"),
        ({"transport": "ofi"}, "over ofi"),
        ({"cost": Cost(link=Link(1e-3))}, "would take over"),
    ],
)
def test_invalid_arguments_are_refused(change: dict[str, object], what: str) -> None:
    trace = trace_of([[RankStep(1, [(0, 1)], 1, 1)]] * 2, [8], ["f"])
    arguments: dict[str, object] = {"plan": Plan.ddp(), "cost": Cost.free()} | change
    plan, cost = arguments.pop("plan"), arguments.pop("cost")
    with pytest.raises(ValueError, match=what):
        simulate(trace, plan, cost, **arguments)  # type: ignore[arg-type]


def test_the_limit_of_time_is_that_of_an_operation_and_not_of_a_step() -> None:
    trace = trace_of([[RankStep(1, [(1, 1), (0, 1)], 1, 1)]] * 2, [600, 600], ["f", "f"])
    cost = Cost(link=Link(8))  # a byte a second
    (step,) = simulate(trace, Plan.explicit([(1,), (0,)]), cost, steps=1).steps[:1]
    assert step.duration_ns > 1200 * 10**9
    with pytest.raises(ValueError, match="an operation of 1200 bytes among 2 ranks would take over 1000 s"):
        simulate(trace, Plan.explicit([(0, 1)]), cost, steps=1)


def test_an_incomplete_trace_is_refused() -> None:
    trace = trace_of([[RankStep(1, [(0, 1)], 1, 1)]] * 2, [8], ["f"])
    with pytest.raises(ValueError, match="does not describe its tensors"):
        simulate(replace(trace, parameters=()), Plan.ddp(), Cost.free())
    with pytest.raises(ValueError, match="does not record when gradients were ready"):
        simulate(replace(trace, steps=()), Plan.ddp(), Cost.free())
    with pytest.raises(ValueError, match="recorded by all ranks"):
        simulate(replace(trace, steps=tuple(s for s in trace.steps if s.rank == s.index % 2)), Plan.ddp(), Cost.free())


def test_memory_does_not_grow_with_the_workers() -> None:
    draws = [RankStep(10**6, [(t, 400_000) for t in reversed(range(398))], 0, 10**6)] * 2
    load = workload(trace_of([draws], [3_379_000] * 398, ["float32"] * 398))
    plan, cost = Plan.explicit([(t,) for t in range(398)]), Cost(link=Link(1e11))
    peaks = []
    for workers in (10, 10, 100_000):
        tracemalloc.start()
        found = simulate(load, plan, cost, workers=workers)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(found.collectives) == 2 * 398
    assert peaks[2] < 1.05 * peaks[1]


def test_the_stored_run_is_read() -> None:
    trace = tr.read(STORED)
    found = simulate(trace, Plan.of(trace, "ofi"), Cost(link=Link(1.9e9)), transport="ofi")
    assert len(found.steps) == 36
    assert found.arms == ("ofi",)


def test_a_wait_for_a_call_of_the_script_stays_in_the_simulated_step() -> None:
    step = Step(
        rank=0,
        index=0,
        block=0,
        arm=Arm("stock"),
        begin_ns=0,
        end_ns=100,
        forward=((20, 50),),
        optimizer=((0, 10), (80, 95)),
        grad_ready=((0, 60),),
        waits=((9, 25, 45), (0, 60, 80)),
    )
    call = tr.Collective(0, Arm("stock"), 9, 0, 25, 800, step=0, phase="forward", start_ns=25, done_ns=45)
    run = Trace(
        id="t",
        size=1,
        arms=(Arm("stock"),),
        ranks=(Rank(0),),
        parameters=(Parameter("w", 8, "float32"),),
        steps=(step,),
        collectives=(call,),
    )
    (draw,) = workload(run).draws
    assert draw.compute_ns == 60
    assert int(draw.work_ns.sum()) == 100 - 20  # without the wait for the gradient alone
    without = replace(run, collectives=())
    assert int(workload(without).draws[0].work_ns.sum()) == 100 - 20 - 20
