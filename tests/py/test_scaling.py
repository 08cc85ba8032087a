"""Interval algebra against a raster, the parts of a step, layers, bandwidth, paired comparisons."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netbottleneck.analysis import bandwidth, comparisons, findings, intervals
from netbottleneck.report import Run
from netbottleneck.trace import ring_reader
from netbottleneck.trace.model import Collective, Probe, Rank, Step, Trace, TransportInfo
from netbottleneck.trace.transports import STOCK, Arm
from netbottleneck.whatif import fit
from netbottleneck.whatif.cost import Link
from ringwriter import MS, FakeRun

SIZE = 60
pairs = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=12)


def raster(some_pairs):
    cells = np.zeros(SIZE, bool)
    for begin, end in some_pairs:
        cells[begin:end] = True
    return cells


def painted(interval_set):
    assert (interval_set[:, 1] > interval_set[:, 0]).all()
    assert (interval_set[1:, 0] >= interval_set[:-1, 1]).all()
    return raster(interval_set.tolist())


@settings(max_examples=300, deadline=None)
@given(pairs, pairs)
def test_intervals_agree_with_a_raster(a, b):
    left, right = intervals.intervals(a), intervals.intervals(b)
    assert (painted(left) == raster(a)).all()
    assert (painted(intervals.union(left, right)) == (raster(a) | raster(b))).all()
    assert (painted(intervals.intersection(left, right)) == (raster(a) & raster(b))).all()
    assert (painted(intervals.subtraction(left, right)) == (raster(a) & ~raster(b))).all()
    assert intervals.total(left) == raster(a).sum()


def one_step(**fields):
    return Step(**({"rank": 0, "index": 1, "block": 0, "arm": Arm("stock"), "begin_ns": 0, "end_ns": 100} | fields))


def operation(start, done, **fields):
    known = {"rank": 0, "arm": Arm("stock"), "key": start, "round": 1, "submit_ns": start, "tensor_bytes": 8}
    return Collective(**(known | {"start_ns": start, "done_ns": done, "step": 1} | fields))


def split_of(step, *operations, size=1):
    trace = Trace(id="t", size=size, arms=(Arm("stock"),), steps=(step,), collectives=operations)
    ((_, found, exposed),) = intervals.split_steps(trace, warmup=0)
    return found, exposed


def test_a_step_is_split_by_hand():
    step = one_step(
        forward=((10, 30),),
        grad_ready=((1, 40), (0, 60)),
        waits=((0, 60, 85),),
        optimizer=((88, 98),),
    )
    found, exposed = split_of(step, operation(45, 70), operation(62, 80, submit_ns=55), operation(83, 84, submit_ns=82))
    assert found.compute_ns == 60
    assert found.communication_ns == 36
    assert found.hidden_ns == 15
    assert found.exposed_ns == 21
    assert found.wait_ns == 1
    assert found.input_ns == 10
    assert found.other_ns == 100 - 60 - 21 - 1
    assert [ns for _, ns in exposed] == [10, 10, 1]


def test_our_own_work_lies_between_two_steps_that_follow_each_other():
    def at(index, begin_ns):
        moved = one_step(forward=((10, 30),), grad_ready=((0, 60),), optimizer=((88, 98),))
        parts = {"forward": ((begin_ns + 10, begin_ns + 30),), "grad_ready": ((0, begin_ns + 60),)}
        parts["optimizer"] = ((begin_ns + 88, begin_ns + 98),)
        return replace(moved, index=index, begin_ns=begin_ns, end_ns=begin_ns + 100, **parts)

    steps = (at(1, 0), at(2, 107), at(4, 400))  # step 3 was not recorded
    trace = Trace(id="t", size=1, arms=(Arm("stock"),), steps=steps, collectives=())
    found = [split for _, split, _ in intervals.split_steps(trace, warmup=0)]
    assert [split.own_ns for split in found] == [0, 7, 0]
    assert [split.step_ns for split in found] == [100, 100, 100]


def test_a_call_of_the_script_in_the_forward_is_communication_and_not_compute():
    step = one_step(
        forward=((10, 40),),
        grad_ready=((0, 60),),
        waits=((18, 20, 30), (0, 60, 70)),
        optimizer=((0, 5), (70, 90)),
    )
    found, exposed = split_of(step, operation(18, 29, phase="forward", tensor_bytes=800), operation(60, 69))
    assert found.phases() == {
        "compute": 10 + 10 + 20,
        "exposed": 9 + 9,
        "optimizer": 5 + 20,
        "input": 5,
        "evaluation": 0,
        "checkpoint": 0,
        "other": 1 + 1 + 10,  # from the end of an operation to the end of the wait for it, and after the optimizer
    }
    assert [ns for _, ns in exposed] == [9, 9]
    assert found.tensor_bytes == 808


def test_evaluation_lasts_from_its_first_pass_to_its_last_and_input_leaves_it_out():
    step = one_step(
        evaluation=((10, 12), (15, 20), (70, 75)),
        forward=((40, 50),),
        grad_ready=((0, 60),),
        waits=((16, 16, 18),),
        checkpoints=((24, 30),),
        optimizer=((60, 62),),
    )
    found, _ = split_of(step, operation(16, 18, phase="other"))
    assert found.phases() == {
        "compute": 20,
        "exposed": 2,
        "optimizer": 2,
        "input": 10 + 4 + 10,
        "evaluation": 8 + 5,
        "checkpoint": 6,
        "other": 8 + 25,
    }


def test_input_is_the_time_before_each_forward_of_a_step_in_which_nothing_else_is_recorded():
    step = one_step(
        forward=((10, 15), (30, 35), (60, 65)),
        grad_ready=((0, 20), (0, 40), (0, 70)),
        waits=((28, 27, 29), (51, 51, 54), (0, 55, 57)),
        evaluation=((41, 43),),
        checkpoints=((44, 46),),
        optimizer=((47, 49), (75, 80)),
    )
    by_script = operation(51, 54, phase="other")
    queued = operation(28, 29, submit_ns=27, phase="other")
    found, _ = split_of(step, by_script, queued)
    assert found.phases() == {
        "compute": 10 + 10 + 10,
        "exposed": 3 + 2,
        "optimizer": 2 + 5,
        "input": 10 + (10 - 2) + (20 - 2 - 2 - 2 - 3 - 2),
        "evaluation": 2,
        "checkpoint": 2,
        "other": (57 - 55) + (75 - 70) + (100 - 80),
    }
    assert sum(found.phases().values()) == found.step_ns


def test_time_between_two_forward_passes_without_a_gradient_is_not_input():
    found, _ = split_of(one_step(forward=((10, 20), (30, 40), (70, 80)), grad_ready=((0, 60), (0, 90))))
    assert found.input_ns == 10 + 10
    assert found.other_ns == 10 + 10 + 10 + 10


def test_bytes_of_the_script_do_not_count_as_those_of_another_transport():
    step = one_step(arm=Arm("tcp"), grad_ready=((0, 60),), forward=((0, 30),))
    own = operation(60, 80, arm=Arm("tcp"), wire_bytes=8)
    beside = operation(10, 20, arm=Arm("tcp"), phase="other", tensor_bytes=800)
    found, _ = split_of(step, own, beside, size=2)
    assert (found.tensor_bytes, found.wire_bytes, found.operations) == (8, 8, 2)


def test_a_call_of_some_ranks_counts_the_bytes_of_its_group():
    step = one_step(grad_ready=((0, 60),), forward=((0, 30),))
    found, _ = split_of(step, operation(60, 80, phase="other", ranks=2, tensor_bytes=800), size=8)
    assert found.bus_bytes == 800


def test_time_blocked_is_not_compute():
    step = one_step(forward=((0, 20),), grad_ready=((0, 60),), waits=((0, 30, 45),))
    found, _ = split_of(step, operation(25, 50))
    assert (found.compute_ns, found.hidden_ns, found.exposed_ns) == (45, 10, 15)


def test_each_backward_pass_ends_with_its_last_gradient():
    step = one_step(forward=((0, 10), (40, 50)), grad_ready=((1, 20), (0, 30), (1, 60), (0, 70)))
    assert intervals.backward_intervals(step) == [(10, 30), (50, 70)]
    assert intervals.backward_times(step) == [(1, 10), (0, 10), (1, 10), (0, 10)]


def test_communication_is_cut_to_its_step_and_counts_in_both():
    first, second = one_step(grad_ready=((0, 50),)), one_step(index=2, begin_ns=100, end_ns=200, grad_ready=((0, 150),))
    trace = Trace("t", 1, (Arm("stock"),), steps=(first, second), collectives=(operation(60, 130),))
    splits = [found for _, found, _ in intervals.split_steps(trace, warmup=0)]
    assert [s.communication_ns for s in splits] == [40, 30]
    assert [s.hidden_ns for s in splits] == [0, 30]
    assert [s.operations for s in splits] == [1, 0]


def test_the_untouched_script_is_never_split():
    step = one_step(arm=Arm("bare"), forward=((0, 10),), optimizer=((50, 60),))
    assert intervals.split_steps(Trace("t", 1, (Arm("bare"),), steps=(step,)), warmup=0) == []


def test_unfinished_and_failed_operations_take_no_time():
    found, _ = split_of(one_step(grad_ready=((0, 10),)), operation(20, None), operation(30, 40, error=-5))
    assert (found.communication_ns, found.operations) == (0, 0)


def test_waiting_for_the_last_rank_is_separate_from_transfer():
    steps = tuple(one_step(rank=rank, forward=((0, 10),), grad_ready=((0, 20 + 30 * rank),)) for rank in (0, 1))
    operations = tuple(operation(20 + 30 * rank, 80, rank=rank, key=7) for rank in (0, 1))
    trace = Trace("t", 2, (Arm("stock"),), steps=steps, collectives=operations)
    early, late = (found for _, found, _ in intervals.split_steps(trace, warmup=0))
    assert (early.exposed_ns, early.skew_ns, early.late_ns, early.transfer_ns) == (60, 30, {1: 30}, 30)
    assert (late.exposed_ns, late.skew_ns, late.late_ns, late.transfer_ns) == (30, 0, {}, 30)


span = st.tuples(st.integers(-20, 120), st.integers(-20, 120))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(span, max_size=2),
    st.lists(span, max_size=2),
    st.lists(st.integers(0, 100), max_size=6),
    st.lists(span, max_size=3),
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 30), st.integers(0, 60)), max_size=5),
)
def test_the_parts_add_up_to_the_step(forward, optimizer, ready, waits, operations):
    step = one_step(
        forward=tuple(forward),
        optimizer=tuple(optimizer),
        grad_ready=tuple((i, at) for i, at in enumerate(sorted(ready))),
        waits=tuple((0, begin, end) for begin, end in waits),
    )
    rows = [operation(s + q, s + q + d, submit_ns=s, key=i) for i, (s, q, d) in enumerate(operations)]
    trace = Trace("t", 1, (Arm("stock"),), steps=(step,), collectives=tuple(rows))
    for _, s, exposed in intervals.split_steps(trace, warmup=0):
        parts = (s.compute_ns, s.exposed_ns, s.wait_ns, s.other_ns)
        assert min(parts) >= 0
        assert sum(parts) == s.step_ns == 100
        assert s.hidden_ns + s.exposed_ns == s.communication_ns
        assert s.hidden_ns <= s.compute_ns
        assert sum(ns for _, ns in exposed) == s.exposed_ns


@pytest.fixture
def run(tmp_path):
    return ring_reader.load(FakeRun(tmp_path, blocks=9).write())


def test_layers_sum_to_the_exposed_time_of_the_step(run):
    found = findings.find(run)
    assert sum(x.exposed_ns for x in found.layers) == pytest.approx(found.parts["stock"].exposed_ns, rel=1e-9)
    assert [x.name for x in found.layers] == ["conv1", "layer1", "fc"]
    by_name = {x.name: x for x in found.layers}
    assert by_name["layer1"].backward_ns == 7 * MS
    assert by_name["conv1"].backward_ns == 8 * MS
    assert by_name["fc"].forward_ns == 2 * MS
    assert by_name["layer1"].exposed_ns / by_name["conv1"].exposed_ns == pytest.approx((6 << 20) / ((1 << 20) + 1024))


def typical_of(*lengths):
    split, _ = split_of(one_step(forward=((0, 10),)))
    splits = [replace(split, index=index, step_ns=ns) for index, ns in enumerate(lengths)]
    return tuple(one.step_ns for one in intervals.typical(splits, lambda one: one))


def test_typical_steps_are_the_middle_half_by_length_or_all_if_few():
    assert typical_of(5, 1, 9) == (5, 1, 9)
    assert typical_of(9, 1, 4, 5, 6) == (4, 5, 6)
    assert typical_of(1, 1, 1, 9) == (1, 1, 1)


def test_typical_steps_have_all_their_ranks_so_a_rank_that_waits_counts_as_often_as_one_that_does_not():
    split, _ = split_of(one_step(forward=((0, 10),)))
    splits = [
        replace(split, rank=rank, index=index, step_ns=1000 + 10 * index + ns, skew_ns=skew)
        for index in range(8)
        for rank, ns, skew in ((0, (-1) ** index * 30, 0), (1, 0, 100))
    ]
    middle = intervals.typical(splits, lambda one: one)
    assert sum(one.rank for one in middle) == len(middle) / 2
    assert np.mean([one.skew_ns for one in middle]) == 50


def test_transports_keep_their_order(run):
    assert list(findings.find(replace(run, arms=(Arm("ofi"), Arm("bare"), Arm("stock")))).parts) == ["ofi", "stock"]


def test_forward_times_come_from_sampled_steps_even_if_these_are_not_counted(run):
    first = {b: min(s.index for s in run.steps if s.block == b) for b in range(9)}
    steps = tuple(replace(s, modules=s.modules if s.index == first[s.block] else ()) for s in run.steps)
    assert {s.block for s in steps if s.modules and s.arm == "stock"}
    assert [x.forward_ns for x in findings.find(replace(run, steps=steps)).layers] == [2 * MS] * 3


def test_operations_without_a_layer_have_a_separate_row(run):
    own = tuple(replace(c, bucket=None) if c.bucket == 1 else c for c in run.collectives)
    found = findings.find(replace(run, collectives=own))
    assert found.layers[-1].name == intervals.NO_LAYER
    assert sum(x.exposed_ns for x in found.layers) == pytest.approx(found.parts["stock"].exposed_ns, rel=1e-9)


def test_calls_of_the_script_have_a_row_for_each_phase(run):
    phases = {0: "forward", 1: "backward", 2: "other"}
    calls = tuple(
        replace(c, bucket=None, phase=phases[c.bucket]) if c.bucket in phases and c.arm == "stock" else c
        for c in run.collectives
    )
    found = findings.find(replace(run, collectives=calls))
    rows = {x.name: x.exposed_ns for x in found.layers if x.name.startswith("(")}
    assert set(rows) <= {"(calls in forward)", "(calls in backward)", "(other calls)"}
    assert max(rows.values()) > 0
    assert sum(x.exposed_ns for x in found.layers) == pytest.approx(found.parts["stock"].exposed_ns, rel=1e-9)


def test_bandwidth_is_bytes_over_transfer_and_over_the_step(run):
    found = findings.find(run).achieved["stock"]
    nbytes = (9 << 20) + 1024
    assert found.active_bps == pytest.approx(8e9 * nbytes / (158 * MS))
    splits = [s for _, s, _ in intervals.split_steps(run) if s.arm == "stock"]
    assert found.average_bps == pytest.approx(8e9 * nbytes * len(splits) / sum(s.step_ns for s in splits))
    assert found.wire_bps is None
    assert findings.find(run).achieved["ofi"].wire_bps == pytest.approx(8e9 * nbytes / (40 * MS))


@pytest.mark.parametrize(
    ("kind", "size", "factor"),
    [
        ("allreduce", 2, 1.0),
        ("allreduce", 8, 1.75),
        ("allgather", 4, 0.75),
        ("reducescatter", 4, 0.75),
        ("alltoall", 4, 0.75),
        ("gather", 8, 0.875),
        ("scatter", 8, 0.875),
        ("broadcast", 4, 1.0),
        ("reduce", 4, 1.0),
        ("barrier", 4, 0.0),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(kind, size, factor):
    assert bandwidth.bus_factor(kind, size) == factor


def test_the_achievable_rate_uses_the_fewest_streams():
    probe = (Probe(1, 10, 8), Probe(2, 20, 8), Probe(4, 97, 8), Probe(8, 99, 8), Probe(16, 100, 8))
    ranks = (Rank(0, transports=(TransportInfo("tcp", probe=probe),)),)
    trace = Trace("t", 1, (Arm("tcp"),), ranks=ranks)
    found = bandwidth.achievable_bandwidth(trace)
    assert found.best == (8, 99e9)  # as the engine chooses: csrc/engine/lane_search.c
    assert fit.achievable(trace, Arm("stock")) == fit.achievable(trace, Arm("tcp")) == Link(99e9, 8)
    assert fit.achievable(trace).rate_bps == found.best[1]
    assert [count for count, _ in found.points] == [1, 2, 4, 8, 16]
    assert bandwidth.achievable_bandwidth(Trace("t", 1, (Arm("tcp"),))) is None


def test_costs_are_of_the_transports_that_measured_them():
    measured = [(30_000.0, 0.4, 0.05), (50_000.0, 0.4, 0.07), (20_000.0, 0.4, 0.06)]
    ranks = tuple(
        Rank(number, transports=(TransportInfo("tcp", costs=costs), TransportInfo("stock")))
        for number, costs in enumerate(measured)
    )
    found = comparisons.costs(Trace("t", 3, (Arm("tcp"), Arm("stock")), ranks=ranks))
    assert found == {"tcp": comparisons.Costs(30_000.0, 0.4, 0.06)}


def test_algorithms_are_listed_by_size_for_one_rank():
    sizes = {"recursive doubling": (4, 16384), "ring all-reduce": (1 << 20, 1 << 22, 1 << 20), None: (7,)}
    rows = tuple(
        Collective(rank, Arm("tcp"), 1, 0, 0, size, algorithm=name)
        for rank in range(2)
        for name, some in reversed(sizes.items())
        for size in some
    )
    cast = Collective(0, Arm("tcp"), 1, 0, 0, 99, kind="broadcast", algorithm="chain broadcast")
    found = comparisons.travels(Trace("t", 2, (Arm("tcp"),), ranks=(Rank(0), Rank(1)), collectives=(*rows, cast)))
    assert found == {
        "tcp": (
            comparisons.Travel("recursive doubling", 4, 16384, 2),
            comparisons.Travel("ring all-reduce", 1 << 20, 1 << 22, 3),
        )
    }


A, B = Arm("a"), Arm("b")


def blocks_of(*blocks):
    """A trace of blocks, each (transport, lengths of its steps)."""
    steps, now, index = [], 0, 0
    for block, (transport, lengths) in enumerate(blocks):
        for length in lengths:
            steps += [Step(rank, index, block, Arm(transport), now, now + length) for rank in (0, 1)]
            now, index = now + length, index + 1
    return Trace("t", 2, tuple(dict.fromkeys(name for name, _ in blocks)), steps=tuple(steps))


def test_the_first_step_of_each_block_is_not_counted():
    trace = blocks_of(("a", [900, 10, 10]), ("b", [900, 20, 20]))
    assert {b: t.tolist() for b, t in comparisons.step_times(trace, "a").items()} == {0: [10, 10]}
    assert {b: t.tolist() for b, t in comparisons.step_times(trace, "b").items()} == {1: [20, 20]}


def test_neighbouring_blocks_are_paired_once_each_across_third_transports():
    rows = [("bare", [1, 1]), ("a", [1, 100]), ("b", [1, 80])] * 3
    found = comparisons.compare(blocks_of(*rows), A, B)
    assert found.pairs == 3
    ends = found.difference_ns.value, found.difference_ns.low, found.difference_ns.high
    assert ends == pytest.approx((-20, -20, -20))
    assert found.ratio.value == pytest.approx(0.8)
    assert found.gain.value == pytest.approx(0.2)
    assert comparisons.compare(blocks_of(("a", [1, 2])), A, B) is None
    assert not comparisons.compare(blocks_of(("a", [1, 2]), ("b", [1, 2])), A, B).enough


def test_a_common_drift_is_not_a_difference():
    random = np.random.default_rng(1)
    rows = []
    for pair in range(6):
        names = ("a", "b") if pair % 2 == 0 else ("b", "a")
        rows += [(name, [1, *(10_000 * (1 + pair) + random.integers(0, 100, 8))]) for name in names]
    found = comparisons.compare(blocks_of(*rows), A, B)
    assert found.difference_ns.low <= 0 <= found.difference_ns.high
    assert found.difference_ns.high - found.difference_ns.low < 200


def uneven_pairs(pairs, steps, of_a, of_b):
    """Steps of `a`, of 1000, and of `b`, of 940. of_a, of_b: by (block, step), what single ones take longer."""
    random, rows = np.random.default_rng(1), []
    for block in range(pairs):
        for name, usual, more in (("a", 1000, of_a), ("b", 940, of_b)):
            lengths = usual + random.integers(-2, 3, steps)
            rows.append((name, [1, *(int(own) + more.get((block, at), 0) for at, own in enumerate(lengths))]))
    return comparisons.compare(blocks_of(*rows), A, B)


EVERY_FIFTH = {(block, at): 2000 for block in range(6) for at in range(block % 5, 20, 5)}


def test_an_arm_with_many_long_steps_is_compared_by_mean_steps():
    slower, faster = uneven_pairs(6, 20, {}, EVERY_FIFTH), uneven_pairs(6, 20, EVERY_FIFTH, {})
    assert slower.gain.high < -0.3
    assert slower.ratio.value == pytest.approx(1.34, abs=0.01)
    assert slower.difference_ns.value == pytest.approx(340, abs=5)
    assert faster.ratio.value == pytest.approx(940 / 1400, abs=0.01)
    assert faster.base_ns == pytest.approx(1400, abs=5)
    assert all(found.note.startswith("by mean steps") for found in (slower, faster))
    both = uneven_pairs(6, 20, EVERY_FIFTH, {place: 1880 for place in EVERY_FIFTH})
    assert both.ratio.value == pytest.approx(0.94, abs=0.001)
    assert both.note == ""


@pytest.mark.parametrize("pairs", [4, 10])
def test_a_single_long_step_changes_no_comparison(pairs):
    plain = uneven_pairs(pairs, 10, {}, {})
    assert plain.gain.low > 0.05
    for stalls in (({(1, 3): 200_000}, {}), ({}, {(1, 3): 200_000})):
        found = uneven_pairs(pairs, 10, *stalls)
        assert (found.gain.value, found.note) == (pytest.approx(plain.gain.value, abs=1e-3), "")
        assert found.gain.low > 0.05


def test_a_few_long_steps_leave_a_comparison_undecided_on_their_side():
    few = {(0, 3): 10_000, (2, 7): 10_000}
    slower, faster = uneven_pairs(4, 10, {}, few), uneven_pairs(4, 10, few, {})
    assert slower.gain.low < 0 < slower.gain.value < slower.gain.high < 0.07
    assert 0.05 < faster.gain.low < faster.gain.value < 0.07 < faster.gain.high
    assert slower.note == faster.note == "single steps are much longer: the interval includes that of mean steps"
    assert slower.more_pairs(0.03) > 4


def test_a_comparison_is_the_same_each_time(run):
    assert comparisons.compare(run, STOCK, Arm("ofi")) == comparisons.compare(run, STOCK, Arm("ofi"))


def test_scaling_is_measured_if_one_rank_ran_alone(tmp_path):
    run = ring_reader.load(FakeRun(tmp_path, transports=("single", "bare", "stock"), blocks=6).write())
    found = findings.find(run).scaling["stock"]
    assert (found.how, found.t1_ns) == ("measured", pytest.approx(33.2 * MS, abs=MS))
    assert found.factor == found.t1_ns / found.tn_ns


def test_a_run_of_one_rank_has_no_scaling_factor(tmp_path):
    run = Run(FakeRun(tmp_path, blocks=3, size=1).write())
    assert run.findings.times
    assert run.findings.scaling == run.summary["scaling"] == {}
    assert not any("caling factor" in shown for shown in (run.text, run.html))


def test_scaling_is_estimated_without_a_single_rank_run(run):
    found = findings.find(run).scaling["stock"]
    assert found.how == "estimated from compute"
    assert found.t1_ns == pytest.approx(32.2 * MS, abs=MS)


def test_the_step_of_one_rank_is_estimated_without_exposed_and_wait():
    # Computes for 60, waits for 10 for an operation that has not started, and sends for 20 of the other 40.
    rows = []
    for index in range(4):
        begin = 100 * index
        step = one_step(index=index, begin_ns=begin, end_ns=begin + 100, grad_ready=((0, begin + 60),))
        rows.append((step, operation(begin + 70, begin + 90, submit_ns=begin + 60, step=index, key=index)))
    trace = Trace(
        "t", 2, ("stock",), steps=tuple(step for step, _ in rows), collectives=tuple(sent for _, sent in rows)
    )
    splits = [split for _, split, _ in intervals.split_steps(trace)]
    assert {(split.exposed_ns, split.wait_ns) for split in splits} == {(20, 10)}
    found = comparisons.scaling_factor(trace, "stock", splits)
    assert found == comparisons.Scaling(0.7, 70.0, 100.0, "estimated from compute")
    assert comparisons.scaling_factor(trace, "ofi", splits) is None
    assert comparisons.scaling_factor(trace, "stock", ()) is None


@pytest.mark.parametrize(("constant", "slope", "share"), [(0, 2, 0.0), (100_000, 1, 0.994), (1000, 1, 0.606)])
def test_the_share_of_latency_is_fitted(constant, slope, share):
    sizes = [100, 200, 400, 800, 1600] * 2
    rows, now = [], 0
    for size in sizes:
        rows.append(operation(now, now + constant + slope * size + (size == 0), tensor_bytes=size))
        now += 10**6
    found = comparisons.latency_share(rows)
    assert found.value == pytest.approx(share, abs=0.02)
    assert found.low <= found.value <= found.high


def test_the_interval_of_the_share_of_latency_has_the_error_of_the_fit():
    """Times in proportion to the size, with noise: the share is 0, and its interval says that it may be."""
    draw = random.Random(2)
    rows = []
    for step in range(30):
        for place, size in enumerate((1000, 2500)):
            begin = (2 * step + place) * 10**6
            took = round(size * draw.uniform(50, 150))
            rows.append(operation(begin, begin + took, tensor_bytes=size, step=step, key=place))
    found = comparisons.latency_share(rows)
    assert found.low == 0.0
    assert found.high > 0.1


def test_operations_that_seldom_run_alone_give_no_share_of_latency():
    """Two overlap in most steps. In one of four the larger is short, and alone."""
    rows = []
    for step in range(40):
        begin = step * 10**6
        quick = step % 4 == 0
        rows.append(operation(begin, begin + 10_000, tensor_bytes=1000, step=step, key=0))
        at = begin + (20_000 if quick else 5000)
        rows.append(operation(at, at + (12_000 if quick else 40_000), tensor_bytes=4000, step=step, key=1))
    assert comparisons.latency_share(rows) is None


@pytest.mark.parametrize("slope", [0, -1])
def test_times_that_do_not_grow_with_size_give_no_share_of_latency(slope):
    sizes = [100, 200, 400, 800, 1600] * 2
    rows = [
        operation(place * 10**6, place * 10**6 + 10_000 + slope * size, tensor_bytes=size)
        for place, size in enumerate(sizes)
    ]
    assert comparisons.latency_share(rows) is None


def test_an_operation_of_a_group_has_a_last_rank():
    def entries(*ranks, of):
        rows = tuple(operation(10, 20, key=1, rank=rank, submit_ns=rank, ranks=of) for rank in ranks)
        return list(intervals.last_entries(Trace("t", 8, ("stock",), collectives=rows)).values())

    assert entries(1, 3, 5, 7, of=4) == [(7, 7)]
    assert entries(1, 3, 5, of=4) == []  # a rank is missing
    assert entries(*range(8), of=4) == []  # two groups with the same key
    assert entries(1, 3, 5, 7, of=None) == []
    assert entries(*range(8), of=None) == [(7, 7)]


def test_waiting_for_the_last_rank_is_no_latency():
    rows, last = [], {}
    for place, size in enumerate([100, 200, 400, 800, 1600] * 2):
        begin, waited = place * 10**6, 5000 + 3000 * (place % 3)
        rows.append(operation(begin, begin + waited + 1000 + size, tensor_bytes=size))
        last[rows[-1].match] = (begin + waited, 1)
    assert comparisons.latency_share(rows, last).value == pytest.approx(1000 / 1620, abs=0.001)
    assert comparisons.latency_share(rows).value > 0.9


def test_no_latency_is_fitted_to_too_little():
    rows = [operation(i * 10, i * 10 + 5, tensor_bytes=8) for i in range(20)]
    assert comparisons.latency_share(rows) is None
    assert comparisons.latency_share(rows[:3]) is None
