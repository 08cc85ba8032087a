"""Questions and answers of the what-if engine: against closed forms, the paper's numbers, and each other."""

from __future__ import annotations

import csv
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netbottleneck.analysis import arrivals, findings
from netbottleneck.analysis.comparisons import Estimate
from netbottleneck.report import what_if
from netbottleneck.report.html import Curve
from netbottleneck.trace import layer_log, ring_reader
from netbottleneck.trace import model as tr
from netbottleneck.trace.layer_log import LayerLog
from netbottleneck.trace.model import Trace
from netbottleneck.trace.transports import Arm
from netbottleneck.whatif import compat2020, fit, questions, sweeps
from netbottleneck.whatif.cost import Cost, Link, Table
from netbottleneck.whatif.plan import Plan
from netbottleneck.whatif.questions import Job
from netbottleneck.whatif.simulate import simulate
from netbottleneck.whatif.sweeps import Codec
from ringwriter import FakeRun

sys.path.insert(0, str(Path(__file__).parents[1] / "scenarios"))

from scenario.job import Job as SimulatedJob
from scenario.job import trace_of

TRACE = Path(__file__).parents[2] / "benchmarks" / "traces" / "resnet50-2gbit-500mbit.jsonl.gz"
MS = 1_000_000
# 30 ms of forward, then ten gradients of 2 MB, 2 ms apart.
LOG = LayerLog("ten", ((0.002, 2_000_000),) * 10, 0.050)
ALONE_S = 0.050
FREE = Codec()


def made(cost: Cost | None = None, log: LayerLog = LOG, plan: Plan | None = None, workers: int = 4) -> Job:
    job = questions.job(layer_log.to_trace(log), plan=plan or Plan.explicit([range(10)]), cost=cost or Cost())
    return replace(job, workers=workers)


def step_s(job: Job, setting: questions.Setting) -> float:
    found = questions.answer(job, setting).step_s
    assert found is not None
    return found.value


def grid_s(job: Job, workers: int, bps: float, ratio: float = 1.0, codec: Codec = FREE) -> float:
    (setting,) = sweeps.grid(job, [workers], [bps], [ratio], codec)
    return step_s(job, setting)


@pytest.mark.parametrize(("workers", "bps", "ratio"), [(2, 1e9, 1.0), (7, 2.5e9, 1.0), (64, 1e10, 4.0), (1, 1e9, 1.0)])
def test_one_bucket_takes_the_ring_time_after_the_last_gradient(workers: int, bps: float, ratio: float) -> None:
    job = made()
    want = ALONE_S + 2 * (workers - 1) / workers * 8 * LOG.bytes / bps / ratio
    assert job.alone_ns == ALONE_S * 1e9
    assert grid_s(job, workers, bps, ratio) == pytest.approx(want, abs=1e-6)
    (found,) = sweeps.answers(job, sweeps.grid(job, [workers], [bps], [ratio], FREE))
    cell = questions.prediction(job, found)
    assert (cell.model, cell.workers, cell.link_bps, cell.compression) == ("ten", workers, bps, ratio)
    assert cell.scaling_factor == pytest.approx(ALONE_S / want, abs=1e-6)
    assert cell.overhead_s == pytest.approx(want - ALONE_S, abs=1e-6)
    assert (cell.compute_end_s, cell.buckets) == (pytest.approx(ALONE_S), 1)
    assert (found.label, found.interval) == ("predicted", False)


def test_codec_time_is_proportional_to_bytes_and_needs_compression() -> None:
    job = made()
    free, counted = grid_s(job, 4, 1e9, 4.0), grid_s(job, 4, 1e9, 4.0, Codec(1.0, 0.5))
    assert counted - free == pytest.approx(1.5e-9 * LOG.bytes, rel=0.01)
    assert grid_s(job, 4, 1e9, 1.0, Codec(1.0, 0.5)) == grid_s(job, 4, 1e9)


def test_communication_that_takes_no_time_is_the_step_of_one_worker() -> None:
    job = made(Cost(alpha_ns=1e6, link=Link(1e9)))
    found = questions.answer(job, sweeps.free(job))
    assert found.step_s is not None
    assert found.scaling is not None
    assert (found.step_s.value, found.scaling.value) == (ALONE_S, 1.0)


def test_operations_that_end_at_time_0_take_no_time() -> None:
    at_once = tr.Step(0, 0, 0, Arm("tcp"), 0, 10, grad_ready=((0, 0),))
    operation = tr.Collective(0, Arm("tcp"), 1, 0, submit_ns=0, tensor_bytes=4, step=0, start_ns=0, done_ns=0)
    found = questions.outcome(Trace("made", 1, (Arm("tcp"),), steps=(at_once,), collectives=(operation,)))
    assert (found.step_ns, found.compute_end_ns, found.communication_end_ns, found.communication_ns) == (10, 0, 0, 0)


def test_ideal_overlap_is_the_longer_of_compute_and_communication() -> None:
    for bps, want in ((1e9, 1.5 * 8 * LOG.bytes / 1e9), (1e11, ALONE_S)):
        job = made(Cost(link=Link(bps)))
        found = sweeps.ideal_overlap(job, questions.answer(job, sweeps.now(job)))
        assert found.step_s is not None
        assert found.step_s.value == pytest.approx(want, abs=1e-6)


def test_smaller_buckets_overlap_more() -> None:
    job = made(Cost(link=Link(4e9)))
    one, many = sweeps.answers(job, sweeps.fusions(job, [100 << 20, 1 << 20]))
    assert one.outcome is not None
    assert many.outcome is not None
    assert many.outcome.step_ns < one.outcome.step_ns
    assert many.outcome.buckets == 10
    often, seldom = sweeps.answers(job, sweeps.cycles(job, [MS, 40 * MS]))
    assert often.outcome is not None
    assert seldom.outcome is not None
    assert often.outcome.buckets > seldom.outcome.buckets


def test_ranks_on_a_host_share_its_link_in_two_levels() -> None:
    job = made(Cost(link=Link(1e9)), workers=16)
    alone, shared = sweeps.answers(job, sweeps.ranks_per_host(job, [1, 8, 32]))
    assert alone.step_s is not None
    assert shared.step_s is not None
    assert alone.step_s.value == pytest.approx(ALONE_S + 2 * 15 / 16 * 8 * LOG.bytes / 1e9, abs=1e-6)
    assert shared.step_s.value == pytest.approx(ALONE_S + 2 * 1 / 2 * 8 * LOG.bytes / 1e9, abs=1e-6)
    assert ["a host is assumed to take no time" in " ".join(one.notes) for one in (alone, shared)] == [False, True]


def test_rows_of_several_ranks_per_host_say_that_the_inside_of_a_host_is_free() -> None:
    for host_bps, free in ((None, True), (5e10, False)):
        job = made(Cost("two_level", link=Link(1e9), ranks_per_host=8, host_bps=host_bps), workers=16)
        asked = [sweeps.workers(job, [4]), sweeps.links(job, [1e9]), sweeps.fusions(job, [1 << 20])]
        asked += [sweeps.cycles(job, [MS]), sweeps.grid(job, [4], [1e9], [1.0], FREE)]
        for (setting,) in asked:
            notes = " ".join(questions.answer(job, setting).notes)
            assert ("inside a host is assumed to take no time" in notes) == free


def test_combined_errors_do_not_make_a_step_shorter_than_its_compute() -> None:
    job = made(Cost(link=Link(1e10)))
    ends = [questions.IntervalEnd(source, job) for source in ("one", "two", "two")]
    step, factor = questions.estimates(job, 60e6, ends, [51e6, 51e6, 90e6])
    assert (step.low, step.value, step.high) == (ALONE_S, 0.060, 0.090)
    assert (factor.low, factor.value, factor.high) == (5 / 9, 5 / 6, 1.0)


def test_an_interval_holds_the_value_and_is_as_wide_as_the_fits_residuals() -> None:
    job = made(Cost(link=Link(1e9), residual=(-0.1, 0.2)))
    found = questions.answer(job, sweeps.now(job))
    assert found.step_s is not None
    assert found.scaling is not None
    over = found.step_s.value - ALONE_S
    assert found.step_s.low - ALONE_S == pytest.approx(0.9 * over, rel=0.01)
    assert found.step_s.high - ALONE_S == pytest.approx(1.2 * over, rel=0.01)
    assert found.scaling.low < found.scaling.value < found.scaling.high
    assert found.interval


def test_a_poor_fit_refuses_to_extrapolate_and_a_good_one_adds_a_note() -> None:
    seen = {"link": Link(1e9), "residual": (-0.1, 0.1), "fitted_bytes": (1000, 5000), "fitted_size": 4}
    predicted = questions.answer(made(Cost(**seen)), sweeps.now(made(Cost(**seen))))
    assert predicted.step_s is not None
    assert "20000000 to 20000000 bytes, measured 1000 to 5000" in predicted.notes[0]
    job = made(Cost(**seen, poor="two operations alone"))
    refused = questions.answer(job, sweeps.now(job))
    assert (refused.step_s, refused.scaling) == (None, None)
    assert "refused to extrapolate a poor fit: two operations alone" in refused.refused
    least = sweeps.least_link(job, 0.5)
    assert least.value is None
    assert "refused to extrapolate a poor fit" in least.reason
    assert least.refused
    with pytest.raises(ValueError, match="two operations alone"):
        questions.prediction(job, refused)


def test_compressed_operations_smaller_than_those_measured_have_a_note_and_keep_their_latency() -> None:
    size = 20_000_000
    cost = Cost(link=Link(1e9), residual=(-0.1, 0.1), fitted_bytes=(size, size), fitted_size=4, alpha_ns=MS)
    job = made(cost)
    same, fewer, fewest = sweeps.answers(job, sweeps.compression(job, [1.0, 10.0, 1e6], FREE))
    assert not any("extrapolated" in note for note in same.notes)
    seen = f"operations of 2000000 to 2000000 bytes, compressed, measured {size} to {size}: the fitted line is"
    assert any(note.startswith(seen) for note in fewer.notes)
    latency_ns = 2 * (4 - 1) * MS
    assert fewest.outcome is not None
    assert fewest.outcome.communication_ns >= latency_ns
    unknown = "the latency of an operation is not known, and is left out"
    assert unknown not in fewer.notes
    without = replace(job, cost=replace(cost, alpha_ns=0.0))
    (found,) = sweeps.answers(without, sweeps.compression(without, [10.0], FREE))
    assert unknown in found.notes
    poor = replace(job, cost=replace(cost, poor="two operations alone"))
    (refused,) = sweeps.answers(poor, sweeps.compression(poor, [10.0], FREE))
    assert "refused to extrapolate a poor fit" in refused.refused


def test_combined_errors_do_not_make_a_value_negative() -> None:
    job = made(Cost())
    ends = [questions.IntervalEnd(source, job) for source in ("residual", "line", "contention")]
    assert questions.interval(1.0, ends, [0.2, 0.1, 1.3]) == Estimate(1.0, 0.0, pytest.approx(1.3))
    _, factor = questions.estimates(job, 1e9, ends, [1e11, 1e11, 1e9])
    assert factor.low == 0


def reached(job: Job, setting: questions.Setting) -> float:
    found = questions.answer(job, setting).scaling
    assert found is not None
    return found.value


@pytest.mark.parametrize("target", [0.3, 0.6, 0.95])
def test_the_least_link_ratio_and_lanes_reach_the_target_and_a_little_less_does_not(target: float) -> None:
    job = replace(made(Cost(link=Link(2e8))), lane_bps=1.3e9)
    link = sweeps.least_link(job, target).value
    assert link is not None
    (above, below) = sweeps.links(job, [link.value, 0.99 * link.value])
    assert reached(job, above) >= target > reached(job, below)
    # The closed form: step = T_1 + 1.5 * 8 S / bps.
    assert link.value == pytest.approx(12 * LOG.bytes / (ALONE_S / target - ALONE_S), rel=0.01)
    ratio = sweeps.least_compression(job, target, FREE).value
    assert ratio is not None
    (above, below) = sweeps.compression(job, [ratio.value, 0.99 * ratio.value], FREE)
    assert reached(job, above) >= target > reached(job, below)
    lanes = sweeps.least_lanes(job, target, None).value
    assert lanes is not None
    assert lanes.value == math.ceil(link.value / 1.3e9 - 0.01)


def test_an_inverse_answer_has_the_interval_of_its_fit() -> None:
    sure = sweeps.least_link(made(Cost()), 0.8)
    found = sweeps.least_link(made(Cost(residual=(-0.2, 0.5))), 0.8)
    assert sure.value is not None
    assert found.value is not None
    assert (sure.interval, found.interval) == (False, True)
    assert found.value.value == pytest.approx(sure.value.value, rel=0.01)
    assert found.value.low == pytest.approx(0.8 * sure.value.value, rel=0.01)
    assert found.value.high == pytest.approx(1.5 * sure.value.value, rel=0.01)


def test_an_unreachable_target_reports_the_best_scaling_factor() -> None:
    job = made(Cost(alpha_ns=10 * MS, link=Link(1e9)))
    least = sweeps.least_link(job, 0.9)
    assert least.value is None
    # Six steps of 10 ms after 50 ms of compute: 45.45 %, less what the fastest link takes.
    assert least.reason == "at most 45.4 % is reached"
    assert sweeps.least_link(job, 0.4).value is not None
    unknown = sweeps.least_lanes(job, 0.9, 1e9)
    assert unknown.value is None
    assert "the run has no probe" in unknown.reason


def test_a_target_that_is_reached_without_compression_needs_none() -> None:
    job, slow = made(Cost(link=Link(1e11))), Codec(10.0, 10.0)
    least = sweeps.least_compression(job, 0.9, slow)
    assert least.value is not None
    assert (least.value.low, least.value.value, least.value.high) == (1.0, 1.0, 1.0)
    # The codec takes longer than all that it could save: 50 of 52.4 ms is the best.
    unmet = sweeps.least_compression(job, 0.99, slow)
    assert (unmet.value, unmet.reason) == (None, "at most 95.4 % is reached")


def test_a_link_faster_than_the_enough_link_gains_at_most_one_percent() -> None:
    job = made(Cost(alpha_ns=MS))
    enough = sweeps.enough_link(job).value
    assert enough is not None
    endless, at, below = (grid_s(job, 4, bps) for bps in (1e13, enough.value, 0.98 * enough.value))
    assert at <= 1.01 * endless < below


speeds = st.floats(1e8, 4e11)
logs = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 40 << 20)), min_size=1, max_size=12).map(
    lambda rows: LayerLog("m", tuple((wait / 1e6, size) for wait, size in rows))
)
plans = st.sampled_from([Plan.ddp(), Plan.paper2020(), Plan.explicit([[0]])])


@settings(max_examples=60, deadline=None)
@given(logs, plans, st.integers(2, 500), speeds, st.floats(1, 50), st.sampled_from(["ring", "tree", "two_level"]))
def test_faster_links_more_lanes_and_fewer_bytes_never_make_a_step_longer(
    log: LayerLog, plan: Plan, workers: int, bps: float, times: float, algorithm: str
) -> None:
    cost = Cost(algorithm=algorithm, alpha_ns=1000.0, add=0.1, ranks_per_host=2)
    job = made(cost, log, plan, workers)
    rounding_s = 1e-6
    here = grid_s(job, workers, bps) + rounding_s
    assert grid_s(job, workers, bps * times) <= here
    assert grid_s(job, workers, bps, times) <= here
    few, many = (
        replace(sweeps.now(job), cost=replace(cost, link=Link(bps, lanes, bps / 8))) for lanes in (1, round(times))
    )
    assert step_s(job, many) <= step_s(job, few) + rounding_s


@settings(max_examples=40, deadline=None)
@given(logs, plans, st.integers(2, 400), speeds)
def test_more_workers_on_a_ring_never_make_a_step_shorter(log: LayerLog, plan: Plan, workers: int, bps: float) -> None:
    job = made(Cost(alpha_ns=1000.0), log, plan)
    assert grid_s(job, workers, bps) <= grid_s(job, workers + 50, bps) + 1e-6


@settings(max_examples=40, deadline=None)
@given(logs, st.sampled_from([0.2, 0.5, 0.8, 0.99]))
def test_every_inverse_answer_reaches_its_target_when_simulated(log: LayerLog, target: float) -> None:
    job = made(Cost(), log, Plan.ddp())
    longest_s = job.alone_ns / 1e9 / target
    least = sweeps.least_link(job, target)
    if least.value is None:
        assert grid_s(job, 4, sweeps.LINK_BPS[1]) > longest_s
        assert "is reached" in least.reason
    else:
        assert grid_s(job, 4, least.value.value) <= longest_s + 1e-9


@pytest.fixture(scope="module")
def stored() -> Trace:
    return tr.read(TRACE)


def test_the_model_of_the_stored_run_predicts_both_transports(stored: Trace) -> None:
    """The prediction uses only the operations of stock and the probe; ofi ran in the same run."""
    job, other = questions.job(stored, "stock"), questions.job(stored, "ofi")
    assert job.measured_ns is not None
    assert other.measured_ns is not None
    assert step_s(job, sweeps.now(job)) == pytest.approx(job.measured_ns.value / 1e9, rel=0.02)
    assert step_s(other, sweeps.now(other)) == pytest.approx(other.measured_ns.value / 1e9, rel=0.02)
    (achievable,) = sweeps.achievable(job)
    assert step_s(job, achievable) == pytest.approx(other.measured_ns.value / 1e9, rel=0.03)
    alone = [step.duration_ns for step in stored.steps if step.arm == "single"]
    assert job.alone_ns == pytest.approx(statistics.median(alone), rel=0.02)


def test_least_lanes_of_the_stored_run_agree_with_its_probe(stored: Trace) -> None:
    job = questions.job(stored, "stock")
    assert job.lane_bps == pytest.approx(0.48e9, rel=0.02)
    lanes = sweeps.least_lanes(job, 0.71, 2e9).value
    assert lanes is not None
    assert lanes.value == 4
    assert sweeps.least_lanes(job, 0.9, 2e9).value is None


def test_ranks_of_one_host_are_modelled_with_a_host_each(stored: Trace) -> None:
    one = replace(stored, ranks=tuple(replace(rank, host_id="here") for rank in stored.ranks))
    job, apart = questions.job(one, "stock"), questions.job(stored, "stock")
    assert any("all ranks shared a host" in note for note in job.notes)
    assert not any("all ranks shared a host" in note for note in apart.notes)
    assert [step_s(job, setting) for setting in sweeps.links(job, [1e9, 1e10])] == [
        step_s(apart, setting) for setting in sweeps.links(apart, [1e9, 1e10])
    ]


@pytest.fixture
def known(tmp_path: Path) -> Trace:
    run = FakeRun(tmp_path / "known", transports=("stock",), blocks=1, block_steps=11, late_ms={1: 60})
    return ring_reader.load(run.write())


def test_a_run_that_lacks_a_rank_is_refused_because_waiting_for_it_is_no_cost(known: Trace) -> None:
    with pytest.raises(ValueError, match="no record of rank 1: waiting for the last rank cannot be told"):
        questions.job(replace(known.of_rank(0), size=2), "stock")
    assert "no record of rank 1" in sweeps.savings(replace(known.of_rank(0), size=2), Arm("stock"), None).refused


def test_other_buckets_are_no_remedy_where_the_simulation_misses_the_step_by_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buckets = (8 << 20, 16 << 20)
    trace = trace_of(SimulatedJob(forward_ms=20, backward_ms=150, buckets=buckets, tensors=16, link_bps=6e9))
    sure = sweeps.savings(trace, Arm("stock"), None)
    assert sure.savings_ns["buckets"].low > 0.05 * 190e6
    monkeypatch.setattr(questions, "misfit_ns", lambda _: sure.savings_ns["buckets"].value)
    unsure = sweeps.savings(trace, Arm("stock"), None)
    assert "buckets" not in unsure.savings_ns
    assert unsure.no_buckets.startswith("no prediction: another size may save ")
    assert {*unsure.savings_ns, "buckets"} == {*sure.savings_ns}


def test_nothing_is_predicted_where_the_simulation_misses_the_step_by_far(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of(SimulatedJob(link_bps=2e9))
    assert sweeps.savings(trace, Arm("stock"), 2e9).savings_ns["link"].value > 0
    assert what_if.curve(findings.find(trace)).points
    monkeypatch.setattr(questions, "misfit_ns", lambda _: 60e6)
    found = sweeps.savings(trace, Arm("stock"), 2e9)
    assert (dict(found.savings_ns), found.refused) == ({}, "no prediction: the simulated step is off by 60.0 ms")
    assert what_if.curve(findings.find(trace)) == Curve(missing=found.refused)


def test_an_answer_of_a_model_that_misses_the_step_by_far_is_one_of_a_poor_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of(SimulatedJob(link_bps=2e9))
    good = questions.job(trace, "stock")
    assert (good.misfit, questions.answer(good, sweeps.now(good)).label) == ("", "predicted")
    monkeypatch.setattr(questions, "misfit_ns", lambda _: 60e6)
    job = questions.job(trace, "stock")
    assert job.notes[0].startswith("the fit is poor: the simulated step is off by 60.0 ms, more than 20 % of ")
    labels = [one.label for one in sweeps.answers(job, [sweeps.now(job), sweeps.free(job), *sweeps.links(job, [1e9])])]
    assert {*labels, sweeps.enough_link(job).label} == {"predicted from a poor fit"}


def test_the_misfit_is_that_of_the_recorded_plan_whatever_plan_is_asked_about() -> None:
    trace = trace_of(SimulatedJob(link_bps=2e9))
    slow = questions.job(trace, "stock", plan=Plan.horovod(cycle_ns=10**9))
    assert questions.misfit(slow) != ""
    assert slow.misfit == ""


def test_the_step_of_one_worker_is_that_of_all_ranks(known: Trace) -> None:
    found = findings.find(known).scaling[Arm("stock")]
    job = questions.job(known, "stock")
    assert job.alone_ns == pytest.approx(found.t1_ns, rel=0.01)
    other = {0: 1, 1: 0}
    swapped = replace(
        known,
        steps=tuple(replace(step, rank=other[step.rank]) for step in known.steps),
        collectives=tuple(replace(one, rank=other[one.rank]) for one in known.collectives),
    )
    assert questions.job(swapped, "stock").alone_ns == pytest.approx(job.alone_ns, rel=0.01)


@pytest.mark.parametrize("off_ms", [20, -20, 80])
def test_uncertain_clocks_are_aligned_before_a_cost_is_fitted(known: Trace, off_ms: int) -> None:
    wrong = arrivals._moved(known, 1, off_ms * MS, 0)
    ranks = tuple(replace(rank, clock=tr.Clock("wall")) if rank.rank else rank for rank in wrong.ranks)
    job, right = questions.job(replace(wrong, ranks=ranks), "stock"), questions.job(known, "stock")
    assert step_s(job, sweeps.now(job)) == pytest.approx(step_s(right, sweeps.now(right)), rel=0.01)


def test_a_step_that_reduces_its_buckets_twice_has_a_remark(known: Trace) -> None:
    assert not any("reduces its buckets" in note for note in questions.job(known, "stock").notes)
    pairs = {
        rank: list(zip(own[0::2], own[1::2], strict=False))
        for rank in (0, 1)
        for own in [[step for step in known.steps if step.rank == rank]]
    }
    steps = [
        replace(
            second,
            index=second.index // 2,
            begin_ns=first.begin_ns,
            forward=first.forward + second.forward,
            grad_ready=first.grad_ready + second.grad_ready,
            waits=first.waits + second.waits,
            modules=(),
        )
        for own in pairs.values()
        for first, second in own
    ]
    indices = {step.index for step in steps}
    moved = [replace(one, step=(one.step or 0) // 2) for one in known.collectives]
    twice = replace(known, steps=tuple(steps), collectives=tuple(one for one in moved if one.step in indices))
    assert any("reduces its buckets 2 times" in note for note in questions.job(twice, "stock").notes)


def test_waits_for_calls_of_the_script_stay_and_are_named(known: Trace) -> None:
    call = replace(known.collectives[0], key=99, phase="other", bucket=None)
    waiting = tuple(replace(step, waits=((99, step.begin_ns, step.begin_ns + 2_500_000),)) for step in known.steps)
    found = questions.job(replace(known, steps=waiting, collectives=(*known.collectives, call)), "stock")
    assert found.notes[0].startswith("waiting for the script's own calls (2.50 ms a step) stays as recorded")
    assert not any("own calls" in note for note in questions.job(known, "stock").notes)


def test_a_run_of_100_000_workers_takes_no_more_memory_than_one_of_two(stored: Trace) -> None:
    job = questions.job(stored, "stock")
    few, many = (simulate(job.load, job.plan, job.cost, workers=count, steps=15) for count in (3, 100_000))
    assert (len(few.steps), len(few.collectives)) == (len(many.steps), len(many.collectives))
    times = [step_s(job, setting) for setting in sweeps.workers(job, [2, 100, 100_000])]
    assert times == sorted(times)


STEPS_S = {"resnet50": 0.12808580219559176, "resnet101": 0.19200599479476405, "vgg16": 0.19452352295080985}


def test_the_engine_with_the_papers_rules_matches_the_papers_simulator(paper1: Path) -> None:
    vectors = layer_log.read_table(paper1 / "inputs" / "cuda_vec_add.log")
    table = Table(tuple(map(float, vectors.bytes)), tuple(1e9 * s for s in vectors.seconds), clamped=True)
    cost = Cost(add=table, pipelined=False, whole_sums=True)
    for model, whole_s in STEPS_S.items():
        read = layer_log.read(paper1 / "inputs" / f"{model}.bk.log")
        log = LayerLog(model, read.tensors, whole_s)
        job = made(cost, log, Plan.paper2020())
        grid = compat2020.Grid((16, 64), (1e9, 1e10, 1e11), (1.0, 10.0))
        found = sweeps.answers(job, sweeps.grid(job, grid.workers, grid.link_bps, grid.compression, FREE))
        for one, want in zip(found, compat2020.sweep(log, vectors, whole_s, grid), strict=True):
            assert one.scaling is not None
            assert one.scaling.value == pytest.approx(want.scaling_factor, abs=2e-4)


def test_trees_between_two_servers_bound_the_papers_measurements(paper1: Path) -> None:
    read = layer_log.read(paper1 / "inputs" / "resnet50.bk.log")
    log = LayerLog("resnet50", read.tensors, STEPS_S["resnet50"])
    figures = (paper1 / "paper_figures.csv").read_text(encoding="utf-8").splitlines()
    measured = {
        row["x"]: float(row["value"]) / 100
        for row in csv.DictReader(figures)
        if row["figure"] == "3" and row["series"].startswith("2 x") and row["value"]
    }
    tree = made(Cost(algorithm="tree", ranks_per_host=8), log, Plan.paper2020(), 16)
    ring = made(Cost(), log, Plan.paper2020(), 16)
    assert (measured["1 Gbps"], measured["10 Gbps"]) == (0.132, 0.684)
    for x, bps in (("1 Gbps", 1e9), ("10 Gbps", 1e10)):
        (bound,), (flat,) = (sweeps.answers(job, sweeps.grid(job, [16], [bps], [1.0], FREE)) for job in (tree, ring))
        assert bound.scaling is not None
        assert flat.scaling is not None
        assert flat.scaling.value < measured[x] <= bound.scaling.value


@pytest.mark.parametrize(("bps", "flat"), [(100_000_000, False), (1_000_000_000, True)])
def test_a_full_link_bounds_the_cost_of_a_byte(bps: int, flat: bool) -> None:
    """The operations of a step take as long as their bytes need on a link of 100 Mbit/s, each nearly as long as all."""
    arm, ranks = Arm("tcp"), (tr.Rank(0, host_id="a"), tr.Rank(1, host_id="b"))
    took_ms = {400_000: 55, 800_000: 65, 1_200_000: 75, 900_000: 65}
    length = sum(took_ms.values()) * MS
    steps, operations = [], []
    for rank, index in ((rank, index) for rank in (0, 1) for index in range(20)):
        at = index * length
        steps.append(tr.Step(rank, index, 0, arm, at, at + length))
        for key, (size, ms) in enumerate(took_ms.items()):
            operations.append(
                tr.Collective(rank, arm, key, index, at, size, step=index, start_ns=at, done_ns=at + ms * MS)
            )
            at += ms * MS
    trace = Trace("r", 2, (arm,), ranks=ranks, steps=tuple(steps), collectives=tuple(operations))
    found = fit.fit(replace(trace, network=tr.Network("a lab", bps)))
    rates = [cost.link.bps for cost in (found.cost, *found.others)]
    assert len(rates) == 3
    assert (max(rates) > 1.3 * 100_000_000) == flat
