"""Costs: invalid values are refused, and fits recover the cost of a run or report why they cannot."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from netbottleneck.analysis.intervals import counted
from netbottleneck.trace import model as tr
from netbottleneck.trace.model import Parameter, Probe, Rank, Step, Trace, TransportInfo
from netbottleneck.trace.transports import Arm
from netbottleneck.whatif import questions, sweeps
from netbottleneck.whatif.cost import UNLIMITED, Cost, Link, Table
from netbottleneck.whatif.fit import Fit, Service, bounding_lines, fit, services, step_and_sum
from netbottleneck.whatif.plan import Plan, in_flight
from netbottleneck.whatif.simulate import simulate

STORED = Path(__file__).parents[2] / "benchmarks" / "traces" / "resnet50-2gbit-500mbit.jsonl.gz"
MIB = 1 << 20
SIZES = (1 * MIB, 24 * MIB, 3 * MIB, 9 * MIB, 2 * MIB, 16 * MIB)


def compute_of(sizes: tuple[int, ...] = SIZES, ranks: int = 2, steps: int = 6) -> Trace:
    """A run of ranks that differ a little, whose gradients are ready every 5 ms."""
    rows = []
    for rank in range(ranks):
        begin = 0
        for index in range(steps + 1):
            late = 1000 * (rank + index % 3)
            ready = tuple((len(sizes) - 1 - i, begin + late + (i + 1) * 5_000_000) for i in range(len(sizes)))
            end = ready[-1][1] + 2_000_000
            rows.append(
                Step(rank, index, 0, Arm("tcp"), begin, end, forward=((begin, begin + late),), grad_ready=ready)
            )
            begin = end
    parameters = tuple(Parameter(f"t{i}", size, "float32") for i, size in enumerate(sizes))
    hosts = tuple(Rank(rank, host_id=f"host{rank}") for rank in range(ranks))
    return Trace("made", ranks, (Arm("tcp"),), ranks=hosts, parameters=parameters, steps=tuple(rows))


def each_alone(sizes: tuple[int, ...] = SIZES) -> list[tuple[int]]:
    return [(i,) for i in reversed(range(len(sizes)))]


def run_at(cost: Cost, ranks: int = 2, flying: int = 1, sizes: tuple[int, ...] = SIZES) -> Trace:
    return simulate(compute_of(sizes, ranks), Plan.explicit(each_alone(sizes), flying), cost)


def test_a_table_is_linear_and_continues_with_its_last_slope() -> None:
    table = Table((10.0, 20.0, 40.0), (5.0, 10.0, 40.0))
    assert [table.at(x) for x in (0, 10, 15, 30, 40, 60)] == [5, 5, 7.5, 25, 40, 70]
    assert replace(table, clamped=True).at(60) == 40
    assert Table((10.0,), (5.0,)).at(60) == 5
    assert table.covers(10)
    assert not table.covers(41)


def test_the_rate_of_a_link_is_limited_by_its_lanes() -> None:
    assert Link(2e9, 4, 0.4e9).rate_bps == 1.6e9
    assert Link(2e9, 8, 0.4e9).rate_bps == 2e9
    assert Link(2e9).byte_ns == 4
    assert Link(UNLIMITED).byte_ns == 0


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Link(0), "bps must be positive"),
        (lambda: Link(-1e9), "bps must be positive"),
        (lambda: Link(float("nan")), "bps must be positive"),
        (lambda: Link(1e9, 0), "lanes"),
        (lambda: Link(1e9, 1, 0), "lane_bps"),
        (lambda: Table((), ()), "as many times as sizes"),
        (lambda: Table((2.0, 1.0), (1.0, 1.0)), "must rise"),
        (lambda: Table((1.0, 2.0), (1.0, -1.0)), "must be at least 0"),
        (lambda: Cost("rng"), "algorithm must be one of"),
        (lambda: Cost(alpha_ns=-1), "alpha_ns"),
        (lambda: Cost(add=float("inf")), "add"),
        (lambda: Cost(ratio=0), "ratio"),
        (lambda: Cost(contention=0.5), "contention"),
        (lambda: Cost(ranks_per_host=0), "ranks_per_host"),
        (lambda: Cost(residual=(0.1, 0.2)), "residual"),
        (lambda: Plan("fifo"), "rule must be one of"),
        (lambda: Plan.horovod(0), "fusion_bytes"),
        (lambda: Plan.horovod(cycle_ns=0), "cycle_ns"),
        (lambda: Plan.ddp(in_flight=17), "in_flight"),
        (lambda: Plan.explicit([]), "needs buckets"),
        (lambda: Plan.explicit([(1, 2), (2,)]), "one bucket"),
    ],
)
def test_invalid_values_are_refused(make: object, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        make()  # type: ignore[operator]


def test_a_slower_cost_scales_every_operation() -> None:
    cost = Cost(alpha_ns=1e5, link=Link(1e9, 4, 2e8), add=Table((0.0, 1e9), (1e4, 1e8)), launch_ns=1e4, pipelined=False)
    spans = [
        [(c.done_ns or 0) - (c.start_ns or 0) for c in run_at(each).collectives] for each in (cost, cost.slower(1.5))
    ]
    assert all(abs(slow - 1.5 * fast) <= 4 for fast, slow in zip(*spans, strict=True))
    assert cost.slower(0.9).link.rate_bps == pytest.approx(8e8 / 0.9)
    assert cost.slower(1.3).alpha_ns == pytest.approx(1.3e5)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "flying"),
    [
        ("ring", 2, 1),
        ("ring", 4, 1),
        ("ring", 2, 2),
        ("ring", 3, 3),
        ("halving_doubling", 4, 1),
        ("direct", 2, 1),
        ("tree", 4, 2),
    ],
)
def test_a_fit_recovers_the_cost_that_made_the_run(algorithm: str, ranks: int, flying: int) -> None:
    made = Cost(algorithm, alpha_ns=120_000, link=Link(3e9), launch_ns=50_000)
    run = run_at(made, ranks, flying)
    assert in_flight(run, "tcp") == flying
    found = fit(run)
    assert found.reason == ""
    assert found.cost.algorithm == algorithm
    assert found.in_flight == flying
    # What operations share they share but for their steps, and one that waits for a place was launched before.
    exact = 1e-3 if flying == 1 else 0.05
    assert found.cost.link.rate_bps == pytest.approx(3e9, rel=exact)
    assert found.cost.launch_ns == pytest.approx(50_000, abs=1)
    if flying == 1:
        steps = {"ring": 2 * (ranks - 1), "halving_doubling": 4, "direct": 1}[algorithm]
        assert (found.cost.fixed_ns, found.cost.alpha_ns) == (pytest.approx(steps * 120_000, rel=1e-2), 0)
        assert found.error < 1e-4
    again = simulate(compute_of(ranks=ranks), Plan.of(run), found.cost)
    lengths = [statistics.fmean(s.duration_ns for s in each.steps) for each in (run, again)]
    assert lengths[1] == pytest.approx(lengths[0], rel=exact)


def test_a_fit_finds_the_ranks_of_a_host() -> None:
    made = Cost("two_level", alpha_ns=50_000, link=Link(1e9), ranks_per_host=2)
    found = fit(run_at(made, 4))
    assert (found.cost.ranks_per_host, found.cost.algorithm) == (2, "two_level")
    assert found.cost.link.rate_bps == pytest.approx(1e9, rel=1e-3)


def with_info(run: Trace, info: TransportInfo) -> Trace:
    return replace(run, ranks=tuple(replace(rank, transports=(info,)) for rank in run.ranks))


@pytest.mark.parametrize(
    ("algorithm", "workers", "ranks_per_host", "part"),
    [
        *(("ring", 4, 1, 1 / 4), ("two_level", 8, 4, 1 / 4), ("two_level", 8, 1, 1 / 8), ("tree", 8, 4, 1)),
        *(("halving_doubling", 8, 1, 1 / 2), ("halving_doubling", 6, 1, 1), ("direct", 2, 1, 1), ("ring", 1, 1, 0)),
    ],
)
@pytest.mark.parametrize(("ratio", "whole_sums"), [(1.0, False), (10.0, False), (10.0, True)])
def test_additions_beyond_the_table_are_those_that_the_engine_makes(
    algorithm: str, workers: int, ranks_per_host: int, part: float, ratio: float, whole_sums: bool
) -> None:
    largest = 8_000_000 * part / (1 if whole_sums else ratio)
    for end, beyond in ((largest - 1, True), (largest + 1, False)):
        if end < 1:
            continue
        cost = Cost(
            algorithm,
            ranks_per_host=ranks_per_host,
            add=Table((0.5, end), (1.0, 2.0)),
            ratio=ratio,
            whole_sums=whole_sums,
        )
        notes = cost.extrapolation_notes([8_000_000], workers)
        assert any(f"sums of {largest:.0f} bytes exceed the table" in note for note in notes) == beyond


def test_measured_step_costs_and_the_probe_enter_the_fit() -> None:
    run = run_at(Cost(alpha_ns=30_000, fixed_ns=200_000, link=Link(1e9)))
    probe = (Probe(1, 10**6, 16 * 10**6), Probe(2, 2 * 10**6, 16 * 10**6), Probe(4, 2 * 10**6, 16 * 10**6))
    found = fit(with_info(run, TransportInfo("tcp", probe=probe, costs=(30_000.0, 8.0, 0.25, 0.0, 0.0))))
    assert found.cost.alpha_ns == pytest.approx(30_000)
    assert found.cost.fixed_ns == pytest.approx(200_000, rel=1e-2)
    assert found.cost.add == 0.25
    assert found.achievable == Link(1e9, 2)
    assert found.nominal == Link(1e9)


@pytest.mark.parametrize("name", ["tcp", "tcp:fp16", "ofi"])
def test_measured_step_costs_are_those_of_an_arms_transport(name: str) -> None:
    info = TransportInfo("tcp", costs=(30_000.0, 8.0, 0.25, 0.0, 0.0))
    known = step_and_sum(with_info(run_at(Cost()), info), Arm.parse(name))
    assert known == ((None, 0.0) if name == "ofi" else (30_000, 0.25))


def noisy(run: Trace, most: float) -> Trace:
    draw = random.Random(7)
    rows = [
        replace(
            c, done_ns=(c.start_ns or 0) + round(((c.done_ns or 0) - (c.start_ns or 0)) * draw.uniform(1 - most, 1))
        )
        for c in run.collectives
    ]
    return replace(run, collectives=tuple(rows))


def test_a_poor_fit_is_reported_and_not_extrapolated() -> None:
    made = Cost(link=Link(1e9))
    run = run_at(made)
    found = fit(noisy(run, 0.9))
    assert "half of the operations deviate by" in found.reason
    assert found.cost.poor == found.reason
    simulate(run, Plan.of(run), found.cost)
    with pytest.raises(
        ValueError, match=r"refused to extrapolate a poor fit: half of the operations .* 64 workers, measured 2"
    ):
        simulate(run, Plan.of(run), found.cost, workers=64)
    with pytest.raises(ValueError, match=r"refused to extrapolate a poor fit: .* 57671680 to 57671680 bytes"):
        simulate(run, Plan.explicit([tuple(range(len(SIZES)))]), found.cost)


def test_totals_of_a_step_give_the_cost_of_bytes_if_operations_do_not() -> None:
    run = run_at(Cost(link=Link(1e9)))
    # Each step's first operation and its second share the link as no formula says; what they take together stays.
    late = {2: 30_000_000, 3: -20_000_000, 4: 60_000_000}
    rows = [replace(c, done_ns=(c.done_ns or 0) + late.get(c.key, 0)) for c in run.collectives]
    steps = (*run.steps, *(replace(s, index=s.index + 100, rank=s.rank) for s in run.steps))
    again = [replace(c, step=(c.step or 0) + 100, round=c.round + 100) for c in rows]
    span = max(s.end_ns for s in run.steps)
    moved = [
        replace(
            c,
            submit_ns=c.submit_ns + span,
            agreed_ns=(c.agreed_ns or 0) + span,
            start_ns=(c.start_ns or 0) + span,
            done_ns=(c.done_ns or 0) + span,
        )
        for c in again
    ]
    found = fit(replace(run, steps=steps, collectives=(*rows, *moved)))
    assert found.reason == ""
    assert found.error > 0.1
    assert "0.0 % for all operations of a step" in found.notes[1]
    assert found.cost.link.rate_bps == pytest.approx(1e9, rel=1e-3)


def of_one_size() -> Trace:
    """Operations of 1 MiB that take 8.39 ms on a link of 1 Gbit/s and 0.2 ms beside."""
    return replace(run_at(Cost(alpha_ns=1e5, link=Link(1e9)), sizes=(MIB,) * 4), network=None)


def test_an_answer_covers_both_splits_between_an_operation_and_its_bytes() -> None:
    job = questions.job(with_info(of_one_size(), TransportInfo("tcp", link_bps=10**9)))
    (setting,) = sweeps.links(job, [1e11])
    found = questions.answer(job, setting)
    assert found.step_s is not None
    assert found.scaling is not None
    assert found.step_s.high - found.step_s.value == pytest.approx(2e-4, rel=0.05)
    assert found.step_s.low == pytest.approx(found.step_s.value, rel=1e-4)
    assert found.scaling.low == pytest.approx(job.alone_ns / 1e9 / found.step_s.high)
    # As recorded, both splits take as long.
    now = questions.answer(job, sweeps.now(job)).step_s
    assert now is not None
    assert now.high - now.low < 1e-5
    # 0.5 ms after the last gradient: all of it is for the bytes, or what 0.2 ms of the operation leave.
    link = sweeps.least_link(job, job.alone_ns / (job.alone_ns + 5e5)).value
    assert link is not None
    assert (link.value, link.high) == pytest.approx((8e9 * MIB / 5e5, 8e9 * MIB / 3e5), rel=0.02)


def test_all_overlapped_has_the_interval_of_its_splits() -> None:
    run = with_info(of_one_size(), TransportInfo("tcp", link_bps=10**9))
    job = questions.job(run)
    many = Plan.explicit([(0,), (1,), (2,), (3,)])
    faster = replace(sweeps.now(job), plan=many, cost=replace(job.cost, link=Link(2.5e9)))
    found = sweeps.ideal_overlap(job, questions.answer(job, faster))
    assert found.outcome is not None
    assert found.step_s is not None
    # The bytes of four operations take 13.4 ms, and the rest of them 0 or 0.8 ms: both are less than the compute.
    assert found.step_s.low == found.step_s.value == found.step_s.high
    slower = replace(faster, cost=replace(job.cost, link=Link(5e8)))
    found = sweeps.ideal_overlap(job, questions.answer(job, slower))
    assert found.step_s is not None
    assert found.step_s.high - found.step_s.value == pytest.approx(8e-4, rel=0.05)


TIMES_MS = [
    {1: 4, 2: 2, 3: 4, 9: 2, 16: 4, 24: 2},  # no time of a byte
    {1: 2, 2: 4, 3: 2, 9: 4, 16: 2, 24: 4},  # at one end no time of a byte
]


@pytest.mark.parametrize("times_ms", TIMES_MS)
def test_other_costs_of_a_fit_take_as_long_in_total(times_ms: dict[int, int]) -> None:
    run = run_at(Cost(fixed_ns=1e6))
    took_ns = {size * MIB: ms * 1_000_000 for size, ms in times_ms.items()}
    rows = [replace(c, done_ns=(c.start_ns or 0) + took_ns[c.tensor_bytes]) for c in run.collectives]
    found = fit(replace(run, collectives=tuple(rows)))
    assert len(found.others) == 2
    costs = (found.cost, *found.others)
    assert {cost.link.bps == UNLIMITED for cost in costs} == {True, False}
    totals = [cost.fixed_ns * len(SIZES) + cost.link.byte_ns * sum(SIZES) for cost in costs]
    assert totals == pytest.approx([totals[0]] * 3)


def test_a_fit_of_one_size_or_of_few_operations_is_poor() -> None:
    one_size = of_one_size()
    assert "one size" in fit(one_size).reason
    assert "one size" in fit(with_info(one_size, TransportInfo("tcp", link_bps=10**10))).reason
    assert "one size" in fit(with_info(one_size, TransportInfo("tcp", link_bps=10**8))).reason
    full = fit(with_info(one_size, TransportInfo("tcp", link_bps=10**9)))  # bounds what an operation costs
    assert (full.reason, full.cost.fixed_ns) == ("", 0.0)
    assert full.cost.link.bps == pytest.approx(8e9 * MIB / (8 * MIB + 2e5), rel=0.01)
    (other,) = full.others
    assert other.fixed_ns == pytest.approx(2e5, rel=0.01)
    assert other.link.bps == pytest.approx(1e9, rel=0.01)
    known = with_info(one_size, TransportInfo("tcp", costs=(1e5, 8.0, 0.0, 0.0, 0.0)))
    assert fit(known).reason == ""
    assert fit(known).cost.link.rate_bps == pytest.approx(1e9, rel=1e-3)
    few = run_at(Cost(link=Link(1e9)))
    assert "only 6 operations" in fit(replace(few, collectives=tuple(c for c in few.collectives if c.step == 2))).reason


def test_a_good_fit_extrapolates_with_a_note() -> None:
    run = run_at(Cost(alpha_ns=1e5, link=Link(1e9)))
    found = simulate(run, Plan.explicit([tuple(range(len(SIZES)))]), fit(run).cost, workers=64)
    assert any("measured 1048576 to 25165824" in note for note in found.notes)
    assert any("64 workers, measured 2" in note for note in found.notes)
    assert any("the latency of a step between hosts is not known" in note for note in found.notes)
    table = replace(Cost.free(), add=Table((0.0, 1000.0), (1.0, 2.0)))
    assert any("its last slope is extrapolated" in note for note in simulate(run, Plan.of(run), table).notes)


def rows_of(times: dict[int, float], of_each: int = 4) -> list[Service]:
    """Operations by their bytes, each with the same time as the others of its size."""
    return [Service(step, nbytes, ns, None) for step in range(of_each) for nbytes, ns in times.items()]


def test_bounding_lines_of_an_exact_fit_equal_the_fit() -> None:
    rows = rows_of({nbytes: 5000 + 3.0 * nbytes for nbytes in (1000, 2000, 8000, 20_000)})
    for fixed, per_byte in bounding_lines(rows, 5000, 3.0, 0.0):
        assert (fixed, per_byte) == (pytest.approx(5000), pytest.approx(3.0))


def test_bounding_lines_have_no_negative_cost() -> None:
    rows = rows_of({nbytes: 2.0 * nbytes * (1 + nbytes / 40_000) for nbytes in (1000, 2000, 8000, 20_000)})
    assert min(fixed for fixed, _ in bounding_lines(rows, 0.0, 2.8, 0.0)) == 0.0


def test_other_operations_of_a_step_are_not_fitted() -> None:
    run = run_at(Cost(alpha_ns=120_000, link=Link(3e9), launch_ns=50_000))
    added = tuple(replace(c, kind="broadcast", key=c.key + 10_000, start_ns=c.submit_ns) for c in run.collectives)
    empty = tuple(replace(c, tensor_bytes=0, key=c.key + 20_000) for c in run.collectives)
    assert services(replace(run, collectives=run.collectives + added + empty), "tcp", 1) == services(run, "tcp", 1)


def test_operations_that_all_ranks_agreed_on_at_once_have_no_launch() -> None:
    run = run_at(Cost(alpha_ns=120_000, link=Link(3e9), launch_ns=50_000))
    for early_ns in (0, 10):  # as far as clocks err
        at_once = tuple(replace(c, agreed_ns=c.submit_ns - early_ns) for c in run.collectives)
        _, found = services(replace(run, collectives=at_once), "tcp", 1)
        assert {row.launch_ns for row in found} == {0.0}


def test_a_run_without_operations_has_no_fit() -> None:
    with pytest.raises(ValueError, match="no all-reduce over any transport"):
        fit(compute_of())
    with pytest.raises(ValueError, match="no all-reduce over ofi"):
        fit(run_at(Cost(link=Link(1e9))), "ofi")


@pytest.mark.parametrize(("transport", "flying", "mbit"), [("stock", 2, 478), ("ofi", 1, 1913)])
def test_the_stored_run_fits_and_its_steps_come_out_as_measured(transport: str, flying: int, mbit: int) -> None:
    trace = tr.read(STORED)
    found: Fit = fit(trace, transport)
    measured = statistics.median(s.duration_ns for s in counted(trace) if s.arm == transport)
    steps = simulate(trace, Plan.of(trace, transport), found.cost, transport=transport).steps
    predicted = statistics.median(s.duration_ns for s in steps)
    low, high = found.cost.residual
    print(
        f"{transport}: {found.count} operations, off by {found.error:.1%} in the middle, steps' {low:+.1%} to"
        f" {high:+.1%}; {found.cost.link.rate_bps / 1e6:.0f} Mbit/s;"
        f" step {predicted / 1e6:.1f} ms, measured {measured / 1e6:.1f}"
    )
    assert found.reason == ""
    assert found.in_flight == flying
    # What one flow and four flows were measured to reach in that lab.
    assert found.cost.link.rate_bps == pytest.approx(mbit * 1e6, rel=0.02)
    assert found.achievable is not None
    assert found.achievable.lanes == 4
    assert found.achievable.bps == pytest.approx(1.905e9, rel=1e-3)
    assert found.nominal is not None
    assert found.nominal.bps == 2e9
    assert found.error < 0.05
    assert predicted == pytest.approx(measured, rel=0.01)
