"""Arrivals: clocks that operations align, a persistent straggler, and ranks of equal speed."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from netbottleneck import units
from netbottleneck.analysis import arrivals, bandwidth, comparisons, findings, rule_facts, verdict
from netbottleneck.analysis.intervals import split_steps
from netbottleneck.analysis.thresholds import CHANCE_MAX
from netbottleneck.trace.model import Clock, Collective, NcclKernel, NcclOperation, NcclStep
from netbottleneck.trace.transports import STOCK

sys.path.insert(0, str(Path(__file__).parents[1] / "scenarios"))

from scenario.job import MIB, MS, Job, trace_of

APART = Job(buckets=(MIB,) * 3, jitter=0.004, clock_ms={1: 12.0}, blocks=1)


def clock(trace, rank=1):
    return next(one.clock for one in trace.ranks if one.rank == rank)


@pytest.mark.parametrize("ahead_ms", [-40.0, 3.0, 12.0])
def test_operations_align_a_clock_that_was_not_compared(ahead_ms):
    trace = arrivals.aligned(trace_of(replace(APART, clock_ms={1: ahead_ms})))
    found = clock(trace)
    assert found.method == arrivals.BY_OPERATIONS
    assert abs(found.offset_ns - ahead_ms * MS) <= found.error_ns < 2 * MS
    begins = {rank: [step.begin_ns for step in trace.steps if step.rank == rank] for rank in (0, 1)}
    assert max(abs(a - b) for a, b in zip(*begins.values(), strict=True)) <= found.error_ns + MS


def test_nccls_times_are_aligned_with_those_of_their_rank():
    kernel, step = (
        NcclKernel(0, 7, 8, 30 * MS, 40 * MS),
        NcclStep(True, 0, 1, 0, MIB, (10 * MS, 20 * MS, 30 * MS, 40 * MS)),
    )
    plain = NcclOperation(
        0, 5, 0, 2, "AllReduce", "float32", MIB, 9 * MS, called_ns=8 * MS, kernel=(kernel,), network=(step,)
    )
    early = replace(plain, called_ns=None)
    rows = (plain, early, replace(plain, rank=1), replace(early, rank=1))
    trace = arrivals.aligned(replace(trace_of(APART), nccl=rows))
    by = clock(trace).offset_ns
    assert by != 0
    assert trace.nccl[:2] == rows[:2]
    for found, before in zip(trace.nccl[2:], rows[2:], strict=True):
        assert found.submit_ns == before.submit_ns - by
        assert found.called_ns == (None if before.called_ns is None else before.called_ns - by)
        assert found.network[0].times_ns == tuple(at - by for at in step.times_ns)
        # The GPU has a clock of its own.
        assert found.kernel == (NcclKernel(0, 7, 8, 30 * MS - by, 40 * MS - by),)


def test_what_a_watchdog_noticed_is_aligned_with_the_operation():
    plain = trace_of(APART)
    rows = [replace(one, start_seen_ns=one.start_ns + MS, done_seen_ns=one.done_ns + MS) for one in plain.collectives]
    trace = arrivals.aligned(replace(plain, collectives=tuple(rows)))
    assert clock(trace).offset_ns != 0
    for one in trace.collectives:
        assert (one.start_seen_ns - one.start_ns, one.done_seen_ns - one.done_ns) == (MS, MS)


def test_a_clock_that_was_compared_is_left_alone():
    trace = trace_of(replace(APART, clock_ms={}))
    assert arrivals.aligned(trace) is trace
    assert arrivals.clock_error_ns(trace) == 0


def test_a_clock_without_operations_has_no_bound():
    trace = replace(trace_of(APART), collectives=())
    assert arrivals.aligned(trace) is trace
    assert arrivals.clock_error_ns(trace) == math.inf


def beside(trace, kind, ranks=None):
    """The trace with an operation of another kind in each step, shorter than the others: rank 0 ends it 9 ms early."""
    gradients = [one for one in trace.collectives if one.bucket == 0]
    others = [
        replace(one, key=99, kind=kind, ranks=ranks, bucket=None, phase="other", start_ns=at, submit_ns=at, done_ns=at)
        for one in gradients
        for at in [one.submit_ns - (0 if one.rank else 9 * MS)]
    ]
    return replace(trace, collectives=(*trace.collectives, *others))


@pytest.mark.parametrize("phase", ["reduce", "other"])
@pytest.mark.parametrize("kind", ["broadcast", "reduce", "gather", "scatter", "send", "recv", "other"])
def test_operations_that_a_rank_may_end_before_others_begin_do_not_align_clocks(kind, phase):
    plain = trace_of(APART)
    trace = beside(plain, kind)
    trace = replace(trace, collectives=tuple(replace(one, phase=phase) for one in trace.collectives))
    assert clock(arrivals.aligned(trace)) == clock(arrivals.aligned(plain))
    alone = replace(trace, collectives=tuple(one for one in trace.collectives if one.kind == kind))
    assert arrivals.aligned(alone) is alone


@pytest.mark.parametrize("kind", ["allgather", "reducescatter", "alltoall", "barrier"])
def test_operations_that_wait_for_every_rank_align_clocks(kind):
    plain = trace_of(APART)
    trace = replace(plain, collectives=tuple(replace(one, kind=kind, phase="other") for one in plain.collectives))
    assert clock(arrivals.aligned(trace)) == clock(arrivals.aligned(plain))


def test_an_operation_of_some_ranks_does_not_align_clocks():
    plain = trace_of(replace(APART, ranks=3, clock_ms={1: 12.0, 2: 5.0}))
    assert clock(arrivals.aligned(beside(plain, "allreduce", 2))) == clock(arrivals.aligned(plain))


def heartbeat(trace, rank, error_ns):
    clock = Clock("heartbeat", 0, error_ns)
    return replace(trace, ranks=tuple(replace(one, clock=clock) if one.rank == rank else one for one in trace.ranks))


def test_a_clock_whose_error_is_not_known_is_not_exact():
    unknown = heartbeat(trace_of(replace(APART, clock_ms={})), 1, None)
    assert arrivals.clock_error_ns(unknown) == math.inf
    assert clock(arrivals.aligned(unknown)).method == arrivals.BY_OPERATIONS
    assert arrivals.clock_error_ns(heartbeat(unknown, 1, 2000)) == 2000


def test_one_aligned_clock_does_not_make_the_others_exact():
    for error_ns, coarse in ((1000, False), (10**9, True)):
        found = findings.find(heartbeat(trace_of(replace(APART, ranks=3, clock_ms={1: 12.0, 2: 0.0})), 2, error_ns))
        assert clock(found.trace).method == arrivals.BY_OPERATIONS
        assert rule_facts.Facts(found, found.base, rule_facts.Predicted(), ()).coarse_clocks == coarse


def test_a_simulated_run_has_one_clock():
    trace = replace(trace_of(APART), origin="simulated")
    assert arrivals.aligned(trace) is trace
    assert arrivals.clock_error_ns(trace) == 0


def test_the_error_of_two_clocks_is_the_sum_of_the_two_largest():
    trace = trace_of(Job(ranks=3, blocks=1))
    ranks = tuple(replace(one, clock=Clock("heartbeat", 0, 1000 * one.rank)) for one in trace.ranks)
    assert arrivals.clock_error_ns(replace(trace, ranks=ranks)) == 3000


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_of_equal_speed_are_not_stragglers(ranks):
    random = np.random.default_rng(ranks)
    runs = [random.normal(size=(40, ranks)) for _ in range(2000)]
    alarms = sum(arrivals._chance(arrivals._places(run)) <= CHANCE_MAX for run in runs)
    assert alarms <= 8


@pytest.mark.parametrize("steps", [14, 30, 80])
def test_ranks_of_equal_speed_whose_steps_resemble_their_neighbours_are_not_stragglers(steps):
    random = np.random.default_rng(steps)
    alarms = 0
    for _ in range(500):
        values = random.normal(size=(steps + 20, 8))
        for index in range(1, len(values)):
            values[index] += 0.8 * values[index - 1]
        alarms += arrivals._chance(arrivals._places(values[20:])) <= CHANCE_MAX
    assert alarms <= 6


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_that_is_late_for_a_while_is_not_persistently_late(ranks):
    arrived = np.random.default_rng(1).normal(size=(40, ranks))
    arrived[:12, 0] += 50
    assert arrivals._chance(arrivals._places(arrived)) > CHANCE_MAX
    arrived[:, 0] += 50
    assert arrivals._chance(arrivals._places(arrived)) <= CHANCE_MAX


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_no_change_of_equal_ranks_makes_one_a_straggler(ranks, rho):
    random = np.random.default_rng(ranks)
    alarms = 0
    for _ in range(400):
        values = random.normal(size=(80, ranks))
        for index in range(1, len(values)):
            values[index] += rho * values[index - 1]
        alarms += arrivals._later(values[20:], [])[0] > 0
    assert alarms <= 1


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_that_begins_to_be_late_is_late_from_there_on(ranks):
    arrived = np.random.default_rng(2).normal(size=(85, ranks))
    arrived[55:, 0] += 50
    since, late, _ = arrivals._later(arrived, [])
    assert abs(since - 55) <= 2
    assert late == [[0]]
    ended = np.concatenate([arrived[55:], arrived[:55]])  # late in the first 30 of 85 steps, and no longer
    assert arrivals._later(ended, [])[0] == 0


def test_ranks_that_arrive_together_share_a_place():
    assert arrivals._places(np.array([[5.0, 5.0, 1.0]])).tolist() == [[1.5, 1.5, 0.0]]


def test_the_wait_for_a_straggler_is_apart_from_jitter():
    found = findings.find(trace_of(Job(ranks=4, jitter=0.02, sleeps_ms={2: 40.0})))
    late = found.lateness
    assert late.straggler == 2
    assert late.persistent_ns.value == pytest.approx(40 * MS, rel=0.06)
    assert late.longer["compute"] == pytest.approx(40 * MS, rel=0.06)
    assert 0 < late.jitter_ns.value < 5 * MS


HOSTS = Job(ranks=8, ranks_per_host=4, jitter=0.01, block_steps=20)
SLOW_HOST = replace(HOSTS, slower=dict.fromkeys(range(4, 8), 1.15))


def test_a_host_whose_ranks_are_all_late_is_a_straggler():
    found = findings.find(trace_of(SLOW_HOST))
    late, judged = found.lateness, verdict.decide(found)
    assert late.ranks == (4, 5, 6, 7)
    assert late.straggler in late.ranks
    assert late.persistent_ns.value == pytest.approx(0.15 * 90 * MS, rel=0.06)
    assert late.longer["compute"] == pytest.approx(0.15 * 90 * MS, rel=0.06)
    assert 0 < late.jitter_ns.value < 3 * MS
    assert judged.code == "STRAGGLER"
    assert judged.why.startswith("Host host1 (ranks 4 to 7) makes the others wait ")
    assert "The compute of its ranks takes " in judged.why
    assert judged.next.startswith("Look at host host1 (ranks 4 to 7): its clock speed")


def test_ranks_of_several_hosts_that_are_all_late_are_stragglers():
    slow_ms = 0.2 * 90
    for ranks_per_host, slow, why, advice in (
        (1, (2, 5), "Ranks 2, 5 make the others wait ", "Look at the hosts of ranks 2, 5 (host2, host5): their clock"),
        (
            2,
            (2, 3, 6, 7),
            "Hosts host1 (ranks 2, 3), host3 (ranks 6, 7) make the others wait ",
            "Look at hosts host1 (ranks 2, 3), host3 (ranks 6, 7): their clock speed",
        ),
    ):
        job = replace(HOSTS, ranks_per_host=ranks_per_host, slower=dict.fromkeys(slow, 1.2))
        found = findings.find(trace_of(job))
        judged = verdict.decide(found)
        assert found.lateness.ranks == slow
        assert found.lateness.persistent_ns.value == pytest.approx(slow_ms * MS, rel=0.08)
        assert (judged.code, judged.why[: len(why)], judged.next[: len(advice)]) == ("STRAGGLER", why, advice)
        assert "The compute of these ranks takes " in judged.why


def test_a_slow_rank_beside_others_of_its_host_is_the_straggler_alone():
    for ranks_per_host in (4, 2):
        job = replace(HOSTS, ranks_per_host=ranks_per_host, slower={5: 1.15})
        judged = verdict.decide(findings.find(trace_of(job)))
        assert judged.code == "STRAGGLER"
        assert judged.why.startswith("Rank 5 makes the others wait ")


def test_a_host_that_is_hardly_late_does_not_hide_a_slow_rank_of_another():
    job = replace(HOSTS, blocks=4, slower=dict.fromkeys(range(4), 1.01) | {5: 1.15})
    trace = trace_of(job)
    late = findings.find(trace).lateness
    assert late.ranks == (5,)
    alone = replace(trace, ranks=tuple(replace(r, host_id=str(r.rank)) for r in trace.ranks))
    assert findings.find(alone).lateness.persistent_ns == late.persistent_ns


def test_equal_hosts_with_random_steps_are_not_balanced():
    found = findings.find(trace_of(replace(HOSTS, jitter=0.1)))
    assert (found.lateness.last, found.lateness.ranks) == (None, ())
    assert verdict.decide(found).code == "IMBALANCE"


def test_a_host_is_not_told_where_a_rank_recorded_none():
    trace = trace_of(SLOW_HOST)
    unknown = replace(trace, ranks=(replace(trace.ranks[0], host_id=""), *trace.ranks[1:]))
    assert not findings.find(unknown).lateness.hosts


def test_hosts_whose_ranks_are_late_together_at_random_are_not_stragglers():
    hosts = [[0, 1, 2, 3], [4, 5, 6, 7]]
    random = np.random.default_rng(4)
    runs = [random.normal(size=(40, 2)).repeat(4, axis=1) + random.normal(size=(40, 8)) / 10 for _ in range(2000)]
    alarms = sum(len(arrivals._late(run, hosts)[0]) > 0 for run in runs)
    assert alarms <= 8
    late = [run + np.repeat([0, 2], 4) for run in runs[:100]]
    assert sum(arrivals._late(run, hosts)[0] == [hosts[1]] for run in late) >= 90


def test_a_rank_that_is_not_late_is_not_named_beside_one_that_is():
    random = np.random.default_rng(5)
    each = [[rank] for rank in range(8)]
    runs = [random.normal(size=(40, 8)) for _ in range(2000)]
    for late in ([3], [3, 6], [1, 3, 6]):
        delays = np.isin(np.arange(8), late) * 1.5
        found = [sorted(own[0] for own in arrivals._late(run + delays, each)[0]) for run in runs]
        assert sum(bool(set(ranks) - set(late)) for ranks in found) <= 8
        assert sum(ranks == late for ranks in found) >= 0.97 * len(runs)


def test_at_most_half_of_the_ranks_are_late():
    arrived = np.random.default_rng(6).normal(size=(40, 5)) + np.array([9, 9, 9, 0, 0])
    assert len(arrivals._late(arrived, [[rank] for rank in range(5)])[0]) <= 2


@pytest.mark.parametrize(
    ("ranks", "hosts", "waited"),
    [
        ((2,), (), "Rank 2 makes"),
        ((2, 5), (), "Ranks 2, 5 make"),
        ((4, 5, 6), (("h1", (4, 5, 6)),), "Host h1 (ranks 4 to 6) makes"),
        ((1, 2), (("h1", (1, 2)),), "Host h1 (ranks 1, 2) makes"),
        ((0, 2, 5), (("", (0, 2, 5)),), "The host of ranks 0, 2, 5 makes"),
        ((1, 2, 4, 5), (("h1", (1, 2)), ("h2", (4, 5))), "Hosts h1 (ranks 1, 2), h2 (ranks 4, 5) make"),
        ((1, 2, 4, 5), (("", (1, 2)), ("h2", (4, 5))), "The hosts of ranks 1, 2, 4, 5 make"),
    ],
)
def test_a_straggler_is_named_by_its_ranks(ranks, hosts, waited):
    late = replace(findings.find(trace_of(Job(blocks=1))).lateness, last=2, ranks=ranks, hosts=hosts)
    assert late.waited.startswith(f"{waited} the others wait ")


def test_a_rank_whose_communication_ends_later_is_not_a_straggler():
    job = Job(sleeps_ms={1: 40.0}, jitter=0.004)
    late = findings.find(trace_of(job)).lateness
    assert (late.straggler, late.no_straggler) == (1, "")
    assert late.own_ns == pytest.approx(40 * MS, rel=0.06)
    follows = replace(late, own_ns=1 * MS)
    assert (follows.last, follows.straggler) == (1, None)
    assert follows.no_straggler.endswith("and not by its own work: its communication ends later")
    found = verdict.decide(replace(findings.find(trace_of(job)), lateness=follows))
    assert "STRAGGLER" not in {one.code for one in found.evidence if one.fired}


def test_few_long_steps_do_not_hide_the_others():
    job = Job(ranks=4, jitter=0.05, blocks=2, block_steps=40)
    plain = findings.find(trace_of(job)).lateness
    late = findings.find(trace_of(replace(job, sleeps_ms={2: 5000.0}, every=60))).lateness
    assert (late.left_out, late.steps, late.rare) == (1, plain.steps - 1, None)
    assert late.jitter_ns.value == pytest.approx(plain.jitter_ns.value, rel=0.1)


def test_late_steps_that_are_too_few_ask_for_more_steps():
    """Not for another transport: most of what is exposed is the wait for a rank."""
    job = Job(blocks=2, block_steps=40, link_bps=2e10, flow_bps=2e10, saves_ms={0: 900.0}, every=20)
    found = findings.find(trace_of(job))
    assert found.lateness.left_out == 4
    decided = verdict.decide(replace(found, share=comparisons.Estimate(0.12, 0.06, 0.18)))
    assert decided.code == "INCONCLUSIVE"
    assert "In 4 of 78 steps a rank is late by much more than usual, too few steps to find a cause." in decided.why
    assert decided.next == f"Measure {decided.more} more steps (a longer training)."
    assert 0 < decided.more < 80


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_is_late_now_and_then_is_named_with_what_it_does(ranks):
    job = Job(ranks=ranks, jitter=0.01, blocks=2, block_steps=40, every=5)
    for spent, cause in (
        (job.saves_ms, ""),
        ({"saves_ms": {0: 300.0}}, "checkpoint"),
        ({"input_of_ms": {ranks - 1: 300.0}}, "input"),
        ({"sleeps_ms": {1: 300.0}}, ""),
    ):
        late = findings.find(trace_of(replace(job, **spent))).lateness
        assert late.last is None
        if not spent:
            assert late.rare is None
            continue
        (rank,) = next(iter(spent.values()))
        assert (late.rare.rank, late.rare.times, late.rare.count, late.rare.cause) == (rank, 16, 16, cause)
        assert late.jitter_ns.value == pytest.approx(300 * MS / 5, rel=0.1)
        assert 0 < late.jitter_ns.low < late.jitter_ns.high


@pytest.mark.parametrize("ranks", [2, 4])
def test_long_steps_of_one_rank_do_not_hide_that_another_is_always_late(ranks):
    job = Job(ranks=ranks, slower={1: 1.05}, saves_ms={0: 300.0}, every=10, blocks=12, block_steps=10)
    late = findings.find(trace_of(job)).lateness
    assert (late.straggler, late.rare.rank) == (1, 0)
    assert late.own_ns == pytest.approx(0.05 * (job.forward_ms + job.backward_ms) * MS, rel=0.05)


def test_input_saves_at_most_its_time_on_the_rank_where_it_takes_longest():
    job = Job(ranks=2, input_ms=2, input_of_ms={1: 50.0}, every=5, block_steps=40)
    found = findings.find(trace_of(job))
    assert found.input_delays.mean_ns.value == pytest.approx(50 * MS / 5, rel=0.1)
    rule = next(one for one in verdict.decide(found).evidence if one.code == "INPUT_LIMITED")
    assert rule.saving == found.input_delays.mean_ns


def test_a_straggler_is_told_with_every_phase_that_takes_much_longer():
    found = findings.find(trace_of(Job(ranks=2, input_of_ms={1: 30.0}, saves_ms={1: 20.0}, sleeps_ms={1: 3.0})))
    judged = verdict.decide(found)
    assert judged.code == "STRAGGLER"
    longer = found.lateness.longer
    assert f" Its input takes {units.ms(longer['input'])} longer than on the other ranks" in judged.why
    assert f", its checkpoint {units.ms(longer['checkpoint'])}. The others' data loaders may fetch" in judged.why
    assert "its data loader and disk, where its checkpoints go. If the others' loaders" in judged.next
    other = replace(found.lateness, longer=dict.fromkeys(longer, 0.0) | {"other": found.lateness.persistent_ns.value})
    judged = verdict.decide(replace(found, lateness=other))
    assert " Its other code takes " in judged.why
    assert judged.next.endswith("what its code does outside of forward, backward and optimizer.")


def test_what_the_input_of_a_straggler_takes_longer_is_not_counted_twice():
    found = findings.find(trace_of(Job(ranks=2, input_ms=2, input_of_ms={1: 50.0}, block_steps=40)))
    assert found.parts_ns["input"].value == pytest.approx(2 * MS, rel=0.1)
    assert found.lateness.persistent_ns.value == pytest.approx(50 * MS, rel=0.05)


@pytest.mark.parametrize(("times", "count", "ranks"), [(16, 16, 4), (5, 10, 4), (9, 40, 8), (60, 100, 2), (1, 9, 8)])
def test_the_chance_of_so_many_events_is_bounded(times, count, ranks):
    each = [math.comb(count, k) * (ranks - 1) ** (count - k) / ranks**count for k in range(times, count + 1)]
    bound = arrivals._so_many(times, count, 1 / ranks)
    assert sum(each) <= bound * (1 + 1e-12)
    assert bound <= min(1.0, 10 * sum(each))


def test_long_steps_of_any_rank_name_none():
    plain = trace_of(Job(ranks=4, jitter=0.01, blocks=2, block_steps=40))
    random = np.random.default_rng(1)
    late = random.normal(size=(60, 4)) + 100 * np.eye(4)[random.integers(0, 4, 60)] * (np.arange(60) % 6 == 0)[:, None]
    split = split_steps(plain)[0][1]
    found = arrivals._rare(late, [dict.fromkeys(range(4), split)] * 60)
    assert (found.count, found.rank) == (10, None)
    assert found.why == "In 10 of 60 steps a rank is late by much more than usual, now one, now another."
    assert found.look == ""


@pytest.mark.parametrize("ranks", [2, 4])
def test_without_long_steps_a_step_is_shorter_by_the_whole_delay_whoever_has_it(ranks):
    random = np.random.default_rng(1)
    last = np.eye(ranks)[random.integers(0, ranks, 60)]
    late = random.normal(size=(60, ranks)) + 100 * last * (np.arange(60) % 6 == 0)[:, None]
    split = split_steps(trace_of(Job(ranks=ranks)))[0][1]
    steps = [{rank: replace(split, skew_ns=1000) for rank in range(ranks)}] * 60
    found = arrivals._rare(late, steps)
    assert (found.count, found.rank, found.cause) == (10, None, "")
    _, jitter = arrivals._saved(late, [], found, steps)
    assert jitter[::6] == pytest.approx(np.full(10, 100.0), rel=0.05)


def test_long_steps_of_any_rank_are_told_with_what_takes_longer_in_them():
    random = np.random.default_rng(1)
    last = np.eye(4, dtype=bool)[random.integers(0, 4, 60)] & (np.arange(60) % 6 == 0)[:, None]
    split = split_steps(trace_of(Job(ranks=4)))[0][1]
    steps = [{r: replace(split, input_ns=90 if late else 0) for r, late in enumerate(row)} for row in last]
    found = arrivals._rare(random.normal(size=(60, 4)) + 100 * last, steps)
    assert (found.count, found.rank, found.cause) == (10, None, "input")
    assert found.why.endswith("usual, now one, now another: more time passes before its forward then.")


def test_a_rank_that_is_late_each_time_too_few_times_may_be_so_by_chance():
    split = split_steps(trace_of(Job(blocks=2, block_steps=40)))[0][1]
    late = np.random.default_rng(1).normal(size=(60, 2)) + np.outer(np.arange(60) % 7 == 6, [0, 100])
    found = arrivals._rare(late, [dict.fromkeys(range(2), split)] * 60)
    assert (found.count, found.rank, found.perhaps) == (8, None, 1)
    assert found.why.endswith("by much more than usual, each time rank 1, which may be chance with so few steps.")
    assert found.look.startswith("Look at what rank 1 does")


def with_calls(trace, length_ms, wait_ms=None, phase="other"):
    """The trace, and in each step a call of the script from its begin on, for which the training waits from wait_ms on.

    wait_ms: of the step; None: never.
    """
    length = round(length_ms * MS)
    calls = [
        Collective(
            rank=step.rank,
            arm=step.arm,
            key=99,
            round=step.index,
            submit_ns=step.begin_ns,
            start_ns=step.begin_ns,
            done_ns=step.begin_ns + length,
            tensor_bytes=MIB,
            name=f"{phase}/allreduce",
            phase=phase,
            step=step.index,
        )
        for step in trace.steps
    ]
    if wait_ms is None:
        return replace(trace, collectives=(*trace.collectives, *calls))
    since = round(wait_ms * MS)
    steps = [
        replace(step, waits=(*step.waits, (99, step.begin_ns + since, step.begin_ns + max(length, since + 1))))
        for step in trace.steps
    ]
    return replace(trace, steps=tuple(steps), collectives=(*trace.collectives, *calls))


def split_of_step_5(trace):
    (found,) = (split for step, split, _ in split_steps(trace) if (step.rank, step.index) == (0, 5))
    assert sum(found.phases().values()) == found.step_ns
    return found


@pytest.mark.parametrize(("wait_ms", "felt_ms"), [(None, 0), (0, 40), (10, 30), (45, 0)])
def test_a_call_of_the_script_is_exposed_while_the_training_waits_for_it(wait_ms, felt_ms):
    trace = trace_of(Job(input_ms=50.0))
    plain, found = split_of_step_5(trace), split_of_step_5(with_calls(trace, 40, wait_ms))
    assert plain.input_ns == pytest.approx(50 * MS, rel=0.01)
    assert found.exposed_ns == plain.exposed_ns + felt_ms * MS
    assert found.input_ns == pytest.approx(plain.input_ns - felt_ms * MS, abs=2)


def test_a_call_in_a_backward_pass_that_nothing_waits_for_is_exposed():
    """DDP itself waits for what a communication hook sends, and that wait is not recorded."""
    trace = trace_of(Job(input_ms=50.0))
    found = split_of_step_5(with_calls(trace, 40, phase="backward"))
    assert found.exposed_ns == split_of_step_5(trace).exposed_ns + 40 * MS


def test_all_time_of_a_call_counts_where_waits_are_not_recorded():
    trace = trace_of(Job(input_ms=50.0))
    found = split_of_step_5(replace(with_calls(trace, 40), recorder="torch.profiler"))
    assert found.exposed_ns == split_of_step_5(trace).exposed_ns + 40 * MS


def test_a_gradient_whose_end_is_stamped_after_a_pause_is_done_with_its_step():
    plain = trace_of(Job())
    late = next(c for c in plain.collectives if (c.rank, c.step, c.bucket) == (0, 5, 3))
    others = (c for c in plain.collectives if c is not late)
    paused = replace(plain, collectives=(*others, replace(late, done_ns=(late.done_ns or 0) + 12_000 * MS)))
    for step, split, _ in split_steps(paused):
        assert split.transfer_ns <= step.duration_ns
    rates = [findings.find(trace).achieved[STOCK] for trace in (plain, paused)]
    assert rates[1].active_bps == pytest.approx(rates[0].active_bps, rel=0.05)


def test_the_rate_over_the_step_is_of_all_bytes_whatever_moved_them():
    plain = trace_of(Job(arms=("stock", "tcp"), blocks=4))
    for arm in ("stock", "tcp"):
        before, after = (findings.find(run).achieved[arm] for run in (plain, with_calls(plain, 0.4, 0)))
        assert after.average_bps == pytest.approx(before.average_bps * (11 + 1) / 11)
        assert (after.active_bps == before.active_bps) is (arm == "tcp")


def stepwise(works_ms, steps=30):
    """A run of operations that block both ranks: by operation, the ms that each rank computes before it, then 1 ms.

    works_ms: of all steps, or a function of the step's index.
    """
    plain = trace_of(Job(buckets=(MIB,), blocks=1, block_steps=steps + 1))
    kept, operations = [], []
    for index in range(steps + 1):
        at = begin = index * 1000 * MS
        forward = {0: [], 1: []}
        for key, works in enumerate(works_ms(index) if callable(works_ms) else works_ms):
            entered = [at + work * MS for work in works]
            for rank, submit in enumerate(entered):
                forward[rank].append((at, submit))
                first = replace(plain.collectives[0], key=key, round=index, rank=rank, step=index)
                times = {"submit_ns": submit, "agreed_ns": submit, "start_ns": submit, "first_byte_ns": None}
                operations.append(replace(first, **times, done_ns=max(entered) + MS))
            at = max(entered) + MS
        for rank in (0, 1):
            step = next(step for step in plain.steps if step.rank == rank)
            times = {"begin_ns": begin, "end_ns": at, "forward": tuple(forward[rank]), "grad_ready": (), "waits": ()}
            kept.append(replace(step, index=index, block=0, optimizer=(), modules=(), **times))
    return replace(plain, steps=tuple(kept), collectives=tuple(operations))


def test_a_rank_that_begins_to_be_late_is_the_straggler_of_the_steps_from_there_on():
    random = np.random.default_rng(3)
    noise = random.uniform(-2, 2, (200, 2))
    trace = stepwise(lambda step: ((20 + noise[step, 0], 20 + noise[step, 1] + 15 * (step > 55)),), steps=85)
    found = findings.find(trace)
    late = found.lateness
    assert (late.straggler, late.since, late.steps) == (1, 56, 30)
    assert late.persistent_ns.value == pytest.approx(15 * MS, rel=0.06)
    decided = verdict.decide(found)
    assert decided.code == "STRAGGLER"
    assert "(30 steps, from step 56 on; chance" in decided.why


def test_waits_that_alternate_inside_a_step_are_named_and_not_sure():
    found = findings.find(stepwise([(20, 40), (40, 20), (30, 30)]))
    assert found.parts[found.base].skew_ns == 20 * MS
    row = next(one for one in verdict.decide(found).evidence if one.code == "IMBALANCE")
    assert (row.saving.value, row.saving.low) == (20 * MS, 0)
    assert row.rests == "measured: waiting for the last rank, 20.0 ms of it evens out within the step, 30 steps"
    assert row.uncertain
    judged = verdict.decide(found)
    assert judged.code == "INCONCLUSIVE"
    assert judged.why.startswith("Imbalance may cost 20.0 ms, ")
    assert "trace.json.gz" in judged.next


def test_a_straggler_that_is_late_at_every_operation_is_no_imbalance():
    found = findings.find(stepwise([(20, 40), (20, 40), (20, 40)]))
    row = next(one for one in verdict.decide(found).evidence if one.code == "IMBALANCE")
    assert row.saving.value == 0
    assert verdict.decide(found).code == "STRAGGLER"


def with_barriers(works_ms, place, waits=True):
    """stepwise, where the operation at `place` is a call of the script, for which the training waits if `waits`."""
    trace = stepwise(works_ms)
    calls = {(c.rank, c.step): c for c in trace.collectives if c.key == place}
    steps = []
    for step in trace.steps:
        call = calls[step.rank, step.index]
        wait = (place, call.submit_ns, call.done_ns) if waits else (place, call.done_ns, call.done_ns + 1)
        steps.append(replace(step, waits=(wait,)))
    others = (c for c in trace.collectives if c.key != place)
    barriers = (replace(c, phase="other", kind="barrier", bucket=None) for c in calls.values())
    return replace(trace, steps=tuple(steps), collectives=(*others, *barriers))


@pytest.mark.parametrize(("works_ms", "place"), [([(20, 20), (2, 22)], 1), ([(2, 22), (20, 20)], 0)])
def test_a_rank_that_is_late_at_a_barrier_of_the_script_is_a_straggler(works_ms, place):
    found = findings.find(with_barriers(works_ms, place))
    assert found.lateness.straggler == 1
    assert found.lateness.persistent_ns.value == pytest.approx(20 * MS)
    assert verdict.decide(found).code == "STRAGGLER"


@pytest.mark.parametrize("apart", [False, True])
def test_a_rank_that_works_longer_before_each_call_of_a_sharded_model_is_a_straggler(apart):
    """All operations of FSDP2 are calls. Here one is submitted ahead, or each rank has groups of its own."""
    trace = stepwise([(20, 28), (10, 18), (20, 20)])
    steps, calls = [], []
    for step in trace.steps:
        own = [c for c in trace.collectives if (c.rank, c.step) == (step.rank, step.index)]
        own = [replace(c, key=c.key + 10 * apart * (1 + c.rank), phase="forward", kind="allgather") for c in own]
        calls += [replace(c, bucket=None) for c in own]
        if not apart:
            calls.append(replace(calls[-1], key=7, submit_ns=own[0].submit_ns, start_ns=own[0].submit_ns))
        steps.append(replace(step, waits=tuple((c.key, c.submit_ns, c.done_ns) for c in own)))
    found = findings.find(replace(trace, steps=tuple(steps), collectives=tuple(calls)))
    assert found.lateness.straggler == 1
    if not apart:  # else each group has one rank, and waits for none
        assert found.lateness.persistent_ns.value == pytest.approx(16 * MS)
        assert verdict.decide(found).code == "STRAGGLER"


def test_what_ranks_are_late_by_at_a_barrier_and_at_the_gradients_adds_up():
    late = findings.find(with_barriers([(20, 26), (2, 22)], 1)).lateness
    assert late.persistent_ns.value == pytest.approx(26 * MS)
    even = findings.find(with_barriers([(20, 40), (22, 2)], 1)).lateness
    assert even.straggler is None


def test_a_wait_for_a_rank_that_still_receives_is_for_the_network():
    """Rank 0 is done with its broadcast at once. Rank 1 has it after 50 ms, and computes for 10 ms more."""
    plain = trace_of(Job(blocks=1, block_steps=3))
    one = plain.collectives[0]
    rows = []
    for rank, (done, submit) in enumerate([(1, 20), (50, 60)]):
        call = replace(one, key=7, rank=rank, step=0, phase="forward", kind="broadcast", bucket=None)
        rows.append(replace(call, submit_ns=0, agreed_ns=0, start_ns=0, done_ns=done * MS))
        rows.append(
            replace(one, key=8, rank=rank, step=0, submit_ns=submit * MS, start_ns=submit * MS, done_ns=90 * MS)
        )
    steps = [next(step for step in plain.steps if step.rank == rank) for rank in (0, 1)]
    waits = (((7, 0, MS),), ((7, 0, 50 * MS), (8, 60 * MS, 90 * MS)))
    times = {"index": 0, "begin_ns": 0, "end_ns": 95 * MS, "forward": ((0, 2 * MS),), "grad_ready": (), "optimizer": ()}
    steps = [replace(step, **times, waits=own) for step, own in zip(steps, waits, strict=True)]
    trace = replace(plain, steps=tuple(steps), collectives=tuple(rows))
    first, second = (split for _, split, _ in split_steps(trace, 0))
    assert first.late_ns == second.late_ns == {}
    assert (first.skew_ns, second.skew_ns) == (0, 0)
    alone = replace(trace, steps=tuple(replace(step, waits=()) for step in trace.steps))
    assert [split.late_ns for _, split, _ in split_steps(alone, 0)] == [{1: 40 * MS}, {}]


def test_transfer_that_is_exposed_beside_uneven_steps_is_told_with_what_to_measure():
    job = Job(ranks=4, jitter=0.2, block_steps=40, buckets=(32 * MIB,), flow_bps=5e9, link_known=False)
    alone = findings.find(trace_of(job))
    found = verdict.decide(alone)
    assert found.code == "IMBALANCE"
    moving = alone.parts_ns["moving"].value
    assert f" No rule explains {units.ms(moving)} of exposed communication and waiting after the last " in found.next
    assert found.next.endswith(
        "NETBOTTLENECK_TRANSPORT=stock,tcp NETBOTTLENECK_STREAMS=auto: a probe and a comparison."
    )
    saved = comparisons.Estimate(0.2 * moving, 0.15 * moving, 0.25 * moving)
    buckets = verdict.decide(alone, rule_facts.Predicted({"buckets": saved}, buckets="buckets of 8.0 MiB"))
    assert "BUCKET_SIZES" in (buckets.code, *(one.code for one in buckets.secondary))
    assert (
        f" No rule explains {units.ms(moving - saved.high)} of exposed communication and waiting after " in buckets.next
    )
    few = replace(job, flow_bps=1e10, buckets=(MIB,))
    compared = replace(job, arms=("stock", "tcp"), blocks=8)
    for other in (few, compared):
        assert "No rule explains" not in verdict.decide(findings.find(trace_of(other))).next


def test_a_rank_that_waits_for_another_one_of_its_group_is_not_late_for_that():
    """Rank 1 comes 12 ms late to a call of ranks 0 and 1, and both then as late to the gradients of all four."""
    one = trace_of(Job(ranks=4)).collectives[0]
    call = replace(one, phase="forward", ranks=2, bucket=None)
    entered, released = (3, 15, 3, 3), (16, 16, 4, 4)
    rows, waits = [], {}
    for rank in range(4):
        key = rank // 2
        rows.append(replace(call, rank=rank, key=key, submit_ns=entered[rank] * MS, done_ns=released[rank] * MS))
        times = {"submit_ns": (released[rank] + 20) * MS, "done_ns": 40 * MS}
        rows.append(replace(one, rank=rank, key=9, **times))
        waits[rank] = [(key, entered[rank] * MS, released[rank] * MS), (0, times["submit_ns"], 40 * MS)]
    own = arrivals._own_work(rows, waits, 4)
    assert [ns - min(own) for ns in own] == [0, 12 * MS, 0, 0]
    # Ranks 2 and 3 wait for rank 0, if it comes last, and it was held by rank 1.
    later = [replace(c, submit_ns=c.submit_ns + MS // 2) if (c.rank, c.key) == (0, 9) else c for c in rows]
    times = {"index": 0, "begin_ns": 0, "end_ns": 41 * MS, "forward": ((0, MS),), "grad_ready": (), "optimizer": ()}
    first = {step.rank: step for step in reversed(trace_of(Job(ranks=4, blocks=1, block_steps=3)).steps)}
    steps = tuple(replace(step, **times, waits=tuple(waits[rank])) for rank, step in sorted(first.items()))
    trace = replace(trace_of(Job(ranks=4)), steps=steps, collectives=tuple(replace(c, step=0) for c in later))
    late = {split.rank: split.late_ns for _, split, _ in split_steps(trace, 0)}
    assert late[2] == late[3] == {1: 12 * MS, 0: MS // 2}


def test_a_call_for_which_no_rank_waits_is_no_place_to_be_late_at():
    assert findings.find(with_barriers([(20, 20), (2, 22)], 1, waits=False)).lateness.straggler is None


def test_a_two_level_all_reduce_counts_what_crosses_the_link():
    assert bandwidth.bus_factor("allreduce", 16, "two_level all-reduce", 2) == 1.0
    assert bandwidth.bus_factor("allreduce", 16, "ring all-reduce", 2) == 1.875
    assert bandwidth.bus_factor("allreduce", 16, "two_level all-reduce", None) == 1.875
    assert bandwidth.bus_factor("reducescatter", 16, "ring reduce-scatter") == 0.9375
    assert bandwidth.bus_factor("reducescatter", 16, "gloo's all-reduce") == 1.875
    job = Job(
        ranks=16,
        ranks_per_host=8,
        algorithm="two_level all-reduce",
        arms=("tcp",),
        link_bps=2e9,
        blocks=1,
        block_steps=4,
    )
    achieved = findings.find(trace_of(replace(job, latency_ms=0.0))).achieved["tcp"]
    assert achieved.active_bps == pytest.approx(2e9, rel=0.01)


@pytest.mark.parametrize("flow_gbps", [10.0, 2.0, 0.8])
def test_a_straggler_saves_no_more_than_transfers_leave(flow_gbps):
    """Beside slow transfers, which its work hides in part, or wholly. The truth: the same job without it."""
    job = Job(ranks=3, slower={1: 1.4}, flow_bps=flow_gbps * 1e9, link_bps=flow_gbps * 1e9, noise=0.0)

    def step_ns(of):
        return float(np.mean([step.end_ns - step.begin_ns for step in trace_of(of).steps]))

    late = findings.find(trace_of(job)).lateness
    truth = step_ns(job) - step_ns(replace(job, slower={}))
    assert late.persistent_ns.value == pytest.approx(0.4 * (job.forward_ms + job.backward_ms) * MS, rel=0.01)
    assert late.saved_ns.value == pytest.approx(truth, rel=0.02, abs=0.1 * MS)
    assert (late.saved_ns.value < 0.95 * late.persistent_ns.value) == (flow_gbps < 10)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("cause", "removed"),
    [
        ({"jitter": 0.05}, {"jitter": 0.0}),
        ({"saves_ms": {0: 50.0}, "every": 5}, {"saves_ms": {}}),
        ({"saves_ms": {1: 50.0}, "every": 5}, {"saves_ms": {}}),
    ],
    ids=["jitter", "checkpoints of another rank", "checkpoints of the straggler"],
)
def test_imbalance_beside_a_straggler_saves_what_that_one_leaves(ranks, cause, removed):
    """The truth: the same job without the cause, where the straggler is as late as before."""
    job = Job(ranks=ranks, blocks=48, block_steps=13, slower={1: 1.1}, noise=0.0, link_bps=1e11, flow_bps=1e11, **cause)

    def step_ns(of):
        return float(np.mean([step.end_ns - step.begin_ns for step in trace_of(of).steps]))

    late = findings.find(trace_of(job)).lateness
    truth = step_ns(job) - step_ns(replace(job, **removed))
    assert late.last == 1
    assert late.jitter_ns.value == pytest.approx(truth, rel=0.05, abs=0.7 * MS)
    assert truth < (2 if "jitter" in cause else 12) * MS
    assert late.random_ns.value > late.jitter_ns.value or "saves_ms" in cause
