"""Verdicts on jobs unlike plain data parallelism: few calls, groups, receives, micro-batches, short records."""

import re
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scenarios"))

from scenario.job import MIB, MS, Clockwork, Job, connected_of, trace_of

from netbottleneck.analysis import findings, intervals, traffic, usage, verdict
from netbottleneck.analysis.rule_facts import Predicted
from netbottleneck.report import caveats, html, summary, text, what_if
from netbottleneck.trace.model import Collective, NcclOperation, Network, Probe, TransportInfo
from netbottleneck.trace.transports import NULL, STOCK
from netbottleneck.units import ms, percent
from netbottleneck.whatif import fit, questions
from netbottleneck.whatif.sweeps import savings


def judged(trace, hosts=()):
    """The findings of a trace, and the verdict on them and on what the engine predicts."""
    found = findings.find(trace)
    return found, verdict.decide(found, savings(found.trace, found.base, found.full_link_bps), hosts)


def rule(decided, cause):
    return next(one for one in decided.evidence if one.cause == cause)


def by_script(trace, **changes):
    """The trace with all operations as calls of the script."""
    calls = tuple(replace(one, phase="backward", bucket=None, **changes) for one in trace.collectives)
    return replace(trace, buckets=(), collectives=calls)


class Averaging(Clockwork):
    """A job whose ranks train alone, and send in every `every`-th step."""

    every = 8

    def step(self, arm, block, level):
        alone = self.index % self.every != 0
        super().step(NULL if alone else arm, block, level)
        self.steps[-self.job.ranks :] = [replace(step, arm=arm) for step in self.steps[-self.job.ranks :]]


@pytest.mark.parametrize("every", [2, 3, 8])
def test_a_job_that_sends_in_every_nth_step_is_judged_by_the_mean_of_all(every):
    job = Job(blocks=1, block_steps=97, jitter=0.004, buckets=(40 * MIB, 40 * MIB), link_bps=1e9, flow_bps=1e9)
    work = Averaging(job, 0)
    work.every = every
    work.run()
    found, decided = judged(replace(trace_of(job), steps=tuple(work.steps), collectives=tuple(work.collectives)))
    whole_ms = 80 * MIB * 8 / 1e9 * 1e3  # of transfer in a step that sends
    assert decided.code == "LINK_LIMITED"
    saved_ms = rule(decided, "link").saving.value / MS
    assert saved_ms == pytest.approx((whole_ms - 30) / every, rel=0.05)  # half of the backward hides transfers
    rate, step_ms = found.achieved[STOCK], found.whole.step_ns / MS
    assert rate.average_bps == pytest.approx(80 * MIB * 8 / every / step_ms * 1e3, rel=0.05)


@pytest.mark.parametrize("every", [2, 4])
def test_all_that_is_said_of_the_step_of_a_job_that_sends_in_every_nth_step_is_of_its_mean(every):
    job = Job(blocks=3, block_steps=20, jitter=0.004, buckets=(8 * MIB, 4 * MIB), link_bps=1e9)
    work = Averaging(job, 0)
    work.every = every
    work.run()
    trace = replace(trace_of(job), steps=tuple(work.steps), collectives=tuple(work.collectives))
    found, decided = judged(trace)
    step_ns = found.parts[STOCK].step_ns
    factor, measured = found.scaling[STOCK], questions.job(trace, STOCK).measured_ns
    assert factor.tn_ns == measured.value == pytest.approx(step_ns, rel=1e-3)
    parts = found.parts[STOCK]
    assert factor.factor == pytest.approx(1 - (parts.exposed_ns + parts.wait_ns) / step_ns, rel=1e-3)
    assert measured.low <= measured.value <= measured.high
    shown = " ".join(text.text(found, decided).split())
    assert "Parts of a step: mean of all steps (measured)" in shown
    assert "transport mean step p10-p90 ms" in shown
    assert shown.count(f"stock {ms(step_ns)} ") == 1
    assert html.split(found).title.endswith("mean of all steps)")
    silent = replace(found, parts={**found.parts, NULL: parts})
    assert silent.averaged == "all steps of stock, and the middle half of the others"


class Alternating(Clockwork):
    """A job whose even steps send the first half of its buckets, and whose odd steps the other half."""

    def step(self, arm, block, level):
        whole, half = self.job, len(self.job.buckets) // 2
        first = half * (self.index % 2)
        self.job = replace(whole, buckets=whole.buckets[first : first + half])
        steps, calls = len(self.steps), len(self.collectives)
        super().step(arm, block, level)
        self.job = whole
        for at in range(steps, len(self.steps)):
            ready = tuple((index + first, ns) for index, ns in self.steps[at].grad_ready)
            self.steps[at] = replace(self.steps[at], grad_ready=ready)
        for at in range(calls, len(self.collectives)):
            one = self.collectives[at]
            self.collectives[at] = replace(one, key=one.key + first, bucket=one.bucket + first)


class Pausing(Averaging):
    """A job that does not send in every `every`-th step."""

    def step(self, arm, block, level):
        silent = self.index % self.every == 0
        Clockwork.step(self, NULL if silent else arm, block, level)
        self.steps[-self.job.ranks :] = [replace(step, arm=arm) for step in self.steps[-self.job.ranks :]]


def run_of(job, kind, **fields):
    """The trace of a job whose steps are those of a kind of clockwork."""
    work = kind(job, 0)
    vars(work).update(fields)
    work.run()
    return replace(trace_of(job), steps=tuple(work.steps), collectives=tuple(work.collectives))


@pytest.mark.parametrize(("kind", "fields"), [(Alternating, {}), (Pausing, {"every": 3})])
def test_nothing_is_predicted_if_the_steps_do_not_send_the_same(kind, fields):
    job = Job(blocks=3, jitter=0.01, buckets=(2 * MIB, 1 * MIB, 8 * MIB, 8 * MIB), link_bps=1e9)
    trace, free = (run_of(replace(job, link_bps=bps), kind, **fields) for bps in (1e9, 1e15))
    predicted = savings(trace, STOCK, 1e9)
    assert (dict(predicted.savings_ns), predicted.refused[:15]) == ({}, "no prediction: ")
    assert predicted.refused.endswith(" of the steps do not send all gradients")
    assert what_if.curve(findings.find(trace)).missing == predicted.refused
    assert any("do not send all gradients: simulated steps do" in note for note in questions.job(trace, STOCK).notes)
    _, decided = judged(trace)
    truth = sum(s.duration_ns for s in trace.steps) / len(trace.steps) - sum(s.duration_ns for s in free.steps) / len(
        free.steps
    )
    saved = rule(decided, "link").saving
    assert decided.code == "LINK_LIMITED"
    assert saved.low <= truth <= saved.high


def test_a_seldom_silent_step_or_a_new_set_of_buckets_leaves_the_prediction():
    job = Job(blocks=1, block_steps=31, buckets=(4 * MIB, 4 * MIB, 8 * MIB, 8 * MIB), link_bps=1e9)
    assert savings(run_of(job, Pausing, every=10), STOCK, 1e9).savings_ns["link"].value > 0
    trace = trace_of(job)
    others = tuple(replace(one, name=f"new/{place}") for place, one in enumerate(trace.buckets))
    later = tuple(replace(c, bucket=c.bucket + 4) if c.step > 15 else c for c in trace.collectives)
    rebuilt = replace(trace, buckets=(*trace.buckets, *others), collectives=later)
    assert savings(rebuilt, STOCK, 1e9).savings_ns["link"].value > 0


def test_arms_of_a_job_that_sends_in_every_fourth_step_differ_by_the_mean_of_their_steps():
    job = Job(arms=("stock", "tcp"), blocks=10, block_steps=13, jitter=0.004, buckets=(40 * MIB, 40 * MIB))
    job = replace(job, link_bps=2e9, flow_bps=1e9, streams=2)
    work = Averaging(job, 0)
    work.every = 4
    work.run()
    found, decided = judged(replace(trace_of(job), steps=tuple(work.steps), collectives=tuple(work.collectives)))
    (pair,) = found.comparisons
    saved_ms = 80 * MIB * 8 * (1 / 1e9 - 1 / 2e9) * 1e3 / 4
    assert decided.code == "TRANSPORT_LIMITED"
    assert -pair.difference_ns.high <= saved_ms * MS <= -pair.difference_ns.low


def test_micro_batches_that_each_reduce_the_same_buckets_save_all_their_transfers():
    """DDP without no_sync(): four backward passes to a step."""
    job = Job(blocks=1, block_steps=124, buckets=(10 * MIB, 20 * MIB), latency_ms=0.0, jitter=0.002)
    job = replace(job, link_bps=8.2e9, flow_bps=8.2e9, backward_ms=40, optimizer_ms=0.001, input_ms=0.001)
    trace, parts = trace_of(job), defaultdict(list)
    for step in trace.steps:
        parts[step.rank, step.index // 4].append(step)
    steps = tuple(
        replace(
            own[-1],
            index=index,
            begin_ns=own[0].begin_ns,
            **{name: sum((getattr(step, name) for step in own), ()) for name in ("forward", "grad_ready", "waits")},
        )
        for (_, index), own in parts.items()
    )
    calls = tuple(replace(one, step=one.step // 4) for one in trace.collectives)
    found, decided = judged(replace(trace, steps=steps, collectives=calls))
    assert decided.code == "LINK_LIMITED"
    assert rule(decided, "link").saving.value == pytest.approx(found.parts_ns["moving"].value, rel=0.01)
    assert decided.next.startswith("Reduce gradients once a step, not 4 times (no_sync() of DDP).")


def test_operations_within_hosts_are_not_on_the_link_between_them():
    """Two hosts of four ranks: three buckets are all-reduced within each host, a small one between all ranks."""
    job = Job(ranks=8, ranks_per_host=4, blocks=1, block_steps=31, buckets=(30 * MIB,) * 3 + (MIB,))
    trace = trace_of(replace(job, link_bps=1.2e10, flow_bps=1.2e10, jitter=0.002))
    calls = tuple(
        one
        if one.bucket == 3
        else replace(
            one, phase="backward", bucket=None, ranks=4, key=one.key + 100, round=one.round * 2 + one.rank // 4
        )
        for one in trace.collectives
    )
    card = TransportInfo("stock", "gloo", interface="eth0", link_bps=3 * 10**9)
    ranks = tuple(replace(rank, transports=(card,)) for rank in trace.ranks)
    found, decided = judged(replace(trace, network=None, ranks=ranks, collectives=calls))
    assert found.link_bps == card.link_bps  # more moved within the hosts
    assert not found.trace.notes
    assert found.achieved[STOCK].average_bps == pytest.approx(8e9 * 1.75 * MIB / found.parts_ns["step"].value, rel=0.02)
    assert decided.code == "INCONCLUSIVE"
    assert "is in operations between ranks of one host." in decided.why
    assert rule(decided, "link").saving.high < 0.05 * found.parts_ns["moving"].value


def test_groups_across_hosts_fill_the_link_together():
    """Two hosts of four ranks: rank i of one host and rank i of the other reduce their gradients, as beside TP."""
    job = Job(ranks=8, ranks_per_host=4, blocks=1, block_steps=31, jitter=0.005, link_bps=1e9, flow_bps=1e9)
    trace = trace_of(job)
    calls = tuple(replace(one, ranks=2, comm=one.rank % 4) for one in trace.collectives)
    link = Network("a scenario", 4 / 1.75 * 1e9)  # a ring of two ranks sends less than one of eight
    found, decided = judged(replace(trace, network=link, collectives=calls))
    assert found.achieved[STOCK].active_bps < 0.26 * link.link_bps
    assert decided.code == "LINK_LIMITED"
    assert rule(decided, "link").rests.startswith(("99 % of the link", "100 % of the link"))


def test_all_parts_of_the_link_that_are_shown_are_of_the_bytes_on_the_interface():
    """An all-to-all of hosts with two ranks, as of expert parallelism: both send most of their bytes to other hosts."""
    job = Job(ranks=8, ranks_per_host=2, blocks=1, block_steps=31, kind="alltoall", jitter=0.005)
    found, decided = judged(trace_of(replace(job, link_bps=1e9, flow_bps=1e9)))
    assert 0.55 < found.achieved[STOCK].active_bps / found.link_bps < 0.6
    assert rule(decided, "link").rests.startswith("100 % of the link")
    assert re.search(r"stock +0.58 Gbit/s .* 100 %, ", text.text(found, decided))
    assert summary.summary(found, decided)["bandwidth"]["stock"]["active_utilization"] == pytest.approx(1, abs=0.01)
    assert ("in transfer", "0.58 Gbit/s", "100 % of the link") in html.tiles(found, decided)
    assert html.bandwidth(found).note.endswith(
        "The full width is the link, 1.00 Gbit/s, full at a busbw of 0.58 Gbit/s."
    )


def test_each_arm_has_the_link_of_its_own_interface():
    job = Job(arms=("stock", "tcp"), blocks=4, jitter=0.005, link_known=False, link_bps=1e10, flow_bps=1e9)
    found, decided = judged(trace_of(replace(job, interfaces={"stock": ("eth0", 1e9), "tcp": ("eth1", 1e10)})))
    used = summary.summary(found, decided)["bandwidth"]
    for arm, link_bps in (("stock", 1e9), ("tcp", 1e10)):
        assert used[arm]["active_utilization"] == pytest.approx(used[arm]["active_bits_per_s"] / link_bps)
    title, _ = text.bandwidth_table(found)
    assert "the link is 1.00 Gbit/s for stock, 10.0 Gbit/s for tcp, as its interface states" in title
    parts = (percent(used["tcp"][f"{over}_utilization"]) for over in ("active", "average"))
    assert "".join(f"<td>{part}</td>" for part in parts) in html.page(found, decided)


def test_a_faster_link_of_the_slow_host_shortens_transfers_that_compute_hides_too():
    job = Job(ranks=4, blocks=1, block_steps=40, jitter=0.005, link_bps=1e9, flow_bps=1e9, host_bps={2: 3e8})
    found, connected = findings.find(trace_of(job)), connected_of(job)
    usual = findings.find(trace_of(replace(job, host_bps={})))
    saved_ns = found.parts_ns["step"].value - usual.parts_ns["step"].value
    faster = traffic.faster(found.trace, STOCK, (), connected)
    predicted = savings(found.trace, STOCK, found.full_link_bps, faster)
    known, unknown = (
        rule(verdict.decide(found, engine, (), connected), "link") for engine in (predicted, Predicted(refused="no"))
    )
    assert known.saving.value == pytest.approx(saved_ns, rel=0.01)
    assert "shorter (predicted)." in known.why
    assert unknown.saving.low <= saved_ns <= unknown.saving.high


@pytest.mark.parametrize("engine", [True, False])
def test_latency_stays_in_the_step_at_full_use(engine):
    """A path of 10 Gbit/s with 12 ms of latency, which a higher rate does not remove."""
    buckets = (MIB // 2, MIB, MIB // 4, MIB // 2)
    job = Job(probe=True, buckets=buckets, latency_ms=12, link_bps=1e10, flow_bps=1e10, blocks=1, block_steps=40)
    found, decided = judged(trace_of(replace(job, jitter=0.005)))
    decided = decided if engine else verdict.decide(found, Predicted(refused="no"))
    step_ns = found.parts[STOCK].step_ns
    full_ns = step_ns if decided.full_use is None else decided.full_use.step_ns
    assert 0.99 * step_ns < full_ns <= step_ns
    assert "at most" not in " ".join(text.sentences(found, decided))


def test_few_large_operations_among_many_small_ones_are_not_latency():
    """Batch norm over all ranks: 112 small calls, and one large bucket through a flow of a tenth of the link."""
    job = Job(ranks=4, blocks=1, block_steps=31, buckets=(1024,) * 112 + (5_500_000,), latency_ms=0.05)
    trace = trace_of(replace(job, link_bps=1e10, flow_bps=1e9))
    calls = (one if one.bucket == 112 else replace(one, phase="backward", bucket=None) for one in trace.collectives)
    _, decided = judged(replace(trace, collectives=tuple(calls)))
    latency = rule(decided, "latency")
    assert (decided.code, latency.applies) == ("INCONCLUSIVE", False)
    assert latency.saving.value == pytest.approx(112 * 0.05 * MS, rel=0.15)


def test_many_small_calls_of_the_script_are_latency_that_larger_buckets_do_not_cure():
    job = Job(ranks=4, blocks=1, block_steps=41, buckets=(16384,) * 24, latency_ms=2.0, forward_ms=10, backward_ms=10)
    _, decided = judged(by_script(trace_of(job), kind="reducescatter"))
    assert decided.code == "LATENCY_LIMITED"
    assert "does not depend on size (24 operations of at most 64.0 KiB" in decided.why
    assert ": 24 operations a step." in decided.why
    assert "fully_shard on larger modules" in decided.next


def pipeline(micro_batches, transfer_ms):
    """Two stages of a pipeline: the second receives activations in its forward, the first gradients in its backward."""
    trace = trace_of(Job(blocks=1, block_steps=41, buckets=(4,), forward_ms=60, backward_ms=60, noise=0.0))
    calls, steps = [], []
    for step in trace.steps:
        first = step.rank == 0
        name, begin = ("forward", step.forward[0][0]) if first else ("backward", step.forward[0][1])
        waits = []
        for turn in range(micro_batches):
            for kind, at, long_ms in (
                ("send", begin + turn * 5 * MS, transfer_ms),
                ("recv", step.begin_ns + turn * 5 * MS, 4),
            ):
                round_, done = step.index * micro_batches + turn, at + round(long_ms * MS)
                calls.append(
                    Collective(
                        rank=step.rank,
                        arm=STOCK,
                        key={"send": 20, "recv": 30}[kind] + step.rank,
                        round=round_,
                        submit_ns=at,
                        tensor_bytes=32 * 1024,
                        name=f"{name}/{kind}",
                        step=step.index,
                        ranks=2,
                        kind=kind,
                        phase=name,
                        start_ns=at,
                        done_ns=done,
                    )
                )
                if kind == "recv":
                    waits.append((30 + step.rank, at, done))
        steps.append(replace(step, waits=tuple(waits)))
    return replace(trace, buckets=(), collectives=tuple(calls), steps=tuple(steps))


def test_waiting_in_receives_is_no_transfer():
    found, decided = judged(pipeline(20, 0.1))
    assert found.received_ns == pytest.approx(80 * MS, rel=0.01)
    assert found.parts[STOCK].transfer_ns == pytest.approx(20 * 0.1 * MS, rel=0.01)
    assert decided.code == "INCONCLUSIVE"
    assert "80.0 ms is in receives, where waiting for the sender cannot be told from transfer." in decided.why
    assert not any(one.fired for one in decided.evidence)


def test_the_saving_of_a_faster_probe_is_that_of_its_rate():
    """The probe of another transport was faster than that of the base."""
    job = Job(arms=("tcp", "ofi"), blocks=2, block_steps=20, buckets=(12 * MIB, 30 * MIB, 16 * MIB, 6 * MIB))
    trace = trace_of(replace(job, link_bps=4e9, flow_bps=1e9, streams=2, link_known=False))
    rates = {"tcp": (1e9, 2e9), "ofi": (1e9, 8e9)}
    cards = tuple(
        TransportInfo(
            name,
            name,
            streams_open=8,
            streams_used=8,
            probe=(Probe(1, round(a / 80), 100 * MS), Probe(8, round(b / 80), 100 * MS)),
        )
        for name, (a, b) in rates.items()
    )
    calls = tuple(replace(one, agreed_ns=one.submit_ns + 1000) for one in trace.collectives)
    ranks = tuple(replace(rank, transports=cards) for rank in trace.ranks)
    _, decided = judged(replace(trace, ranks=ranks, collectives=calls))
    assert decided.code == "TRANSPORT_LIMITED"
    assert "predicted from the probe" in rule(decided, "transport").rests
    assert "a probe with 8 streams reached 8.00 Gbit/s" in decided.why
    whole_ms = 64 * MIB * 8 / 2e9 * 1e3
    hidden_ms = 60 * 3 / 4  # of the backward, after the first bucket
    assert rule(decided, "transport").saving.value / MS == pytest.approx(0.75 * whole_ms, abs=hidden_ms)


def test_steps_that_a_rank_did_not_record_are_left_out():
    job = Job(blocks=1, block_steps=61, slower={1: 1.3}, jitter=0.004)
    whole = trace_of(job)
    steps = tuple(step for step in whole.steps if step.rank == 0 or step.index <= 20)
    calls = tuple(one for one in whole.collectives if one.rank == 0 or one.step <= 20)
    (all_of_it, decided), (found, of_part) = judged(whole), judged(replace(whole, steps=steps, collectives=calls))
    assert decided.code == of_part.code == "STRAGGLER"
    assert found.achieved[STOCK].active_bps == pytest.approx(all_of_it.achieved[STOCK].active_bps, rel=0.01)
    assert found.late_ns[1] == pytest.approx(all_of_it.late_ns[1], rel=0.05)
    assert "No rule explains" not in of_part.next


def test_the_root_of_a_broadcast_may_send_the_tensor_more_than_once():
    """As gloo does, to four hosts by a tree of two levels."""
    job = Job(ranks=4, blocks=1, block_steps=11, buckets=(30 * MIB, 60 * MIB), kind="broadcast", link_bps=1e9)
    trace = by_script(trace_of(job))
    moved = 10.0 * 90 * MIB

    def found(times):
        use = usage.Use("eth0", "tx", 0.0, None, times * moved, 0.0)
        return traffic.unseen(trace, STOCK, [usage.HostUse(0, "host0", STOCK, 1.0, 1.0, 10.0, (use,))])

    assert found(2) is None
    assert found(4).surely == pytest.approx(0.45, abs=0.01)


@pytest.mark.parametrize(
    ("seen", "rate_bps", "code"),
    [
        ((), None, "INCONCLUSIVE"),
        (("RING",), None, "LINK_LIMITED"),
        (("TREE",), None, "INCONCLUSIVE"),
        ((), 9e9, "LINK_LIMITED"),
    ],
)
def test_a_link_between_hosts_of_several_ranks_is_full_only_if_a_ring_or_its_counters_say_so(seen, rate_bps, code):
    """NCCL may send by levels or trees: between two hosts of four ranks 1.0 times the tensor, not 1.75 times."""
    job = Job(ranks=8, ranks_per_host=4, blocks=1, block_steps=31, buckets=(30 * MIB, 30 * MIB), algorithm="two_level")
    trace = trace_of(replace(job, link_bps=5e9, flow_bps=5e9, providers=("nccl",)))
    calls = tuple(replace(one, algorithm=None) for one in trace.collectives)
    events = tuple(NcclOperation(0, 1, 0, 8, "AllReduce", "float32", 4, 0, algorithm=name) for name in seen)
    trace = replace(trace, network=Network("a network", 1e10), collectives=calls, nccl=events)
    use = usage.Use("eth0", "tx", 0.0, rate_bps, 1.0, 0.0)
    _, decided = judged(trace, [usage.HostUse(0, "host0", STOCK, 1.0, 1.0, 10.0, (use,))])
    assert decided.code == code
    assert ("50 % at least, by levels or trees" in decided.why) == (code == "INCONCLUSIVE")
    assert decided.next.startswith("Record NCCL's algorithm") == (code == "INCONCLUSIVE")


def test_calls_of_the_script_are_no_reason_to_compare_transports():
    """They travel over the script's own process group, whatever the arm."""
    job = Job(arms=("stock", "tcp"), blocks=6, block_steps=13, buckets=(40 * MIB, 40 * MIB), link_bps=4e9, flow_bps=1e9)
    trace = trace_of(job)
    found, decided = judged(by_script(trace))
    assert found.comparisons == ()
    assert not any(one.cause == "transport" and one.applies for one in decided.evidence)
    small = [one for one in trace.collectives if one.bucket == 1]
    calls = tuple(
        replace(one, tensor_bytes=1024) if one in small else replace(one, bucket=None) for one in trace.collectives
    )
    calls = tuple(one if one.bucket is not None else replace(one, phase="backward") for one in calls)
    _, decided = judged(replace(trace_of(replace(job, arms=("stock",))), collectives=calls))
    assert (decided.code, decided.next) == ("INCONCLUSIVE", verdict.CALLS)


def test_a_run_without_a_forward_pass_says_what_its_compute_holds():
    trace = replace(trace_of(Job(blocks=1)), network=None)
    assert not any("no forward pass" in note for note in findings.find(trace).trace.notes)
    blind = replace(trace, steps=tuple(replace(step, forward=()) for step in trace.steps))
    assert any("no forward pass" in note for note in findings.find(blind).trace.notes)


class Stalling(Clockwork):
    """A job whose transfers take longer in every `every`-th step, from step 7 on."""

    every = 15
    latency_ms = 250.0

    def step(self, arm, block, level):
        usual = self.job
        if self.index % self.every == 7:
            self.job = replace(usual, latency_ms=self.latency_ms)
        super().step(arm, block, level)
        self.job = usual


def stalling(job, every, latency_ms=250.0):
    work = Stalling(job, 1)
    work.every, work.latency_ms = every, latency_ms
    work.run()
    return replace(trace_of(job), steps=tuple(work.steps), collectives=tuple(work.collectives))


@pytest.mark.parametrize("every", [15, 1000], ids=["in every 15th step", "in one step"])
def test_stalls_of_the_network_count_by_their_time(every):
    job = Job(ranks=2, blocks=1, block_steps=120, jitter=0.01)
    found, decided = judged(stalling(job, every, 250.0 if every == 15 else 7500.0))
    whole = found.whole
    assert found.share.value == pytest.approx((whole.exposed_ns + whole.wait_ns) / whole.step_ns, rel=0.01)
    assert found.share.value > 0.2
    assert decided.code == "INCONCLUSIVE"
    assert "Single steps hold most of it." in decided.why
    assert "of all steps together" in decided.why
    assert "the longest steps in trace.json.gz" in decided.next


def test_one_stall_leaves_the_verdict_on_a_full_link_as_it_is():
    job = Job(ranks=2, blocks=1, block_steps=80, link_bps=1e9, flow_bps=1e9, buckets=(40 * MIB, 40 * MIB))
    usual, stalled = (judged(stalling(job, every, 5000.0)) for every in (1000000007, 79))
    assert usual[1].code == stalled[1].code == "LINK_LIMITED"
    rates = [found.achieved[STOCK].active_bps for found, _ in (usual, stalled)]
    assert rates[1] == pytest.approx(rates[0], rel=0.02)


@pytest.mark.parametrize("ranks", [2, 8])
def test_input_that_hides_behind_the_wait_for_a_rank_costs_nothing(ranks):
    late = {0: 1 + 60 / 90}
    job = Job(ranks=ranks, slower=late, input_of_ms=dict.fromkeys(range(1, ranks), 40.0), jitter=0.005, block_steps=30)
    found, decided = judged(trace_of(job))
    assert decided.code == "STRAGGLER"
    assert not rule(decided, "input").fired
    without = findings.find(trace_of(replace(job, input_of_ms={}))).whole.step_ns
    assert found.parts_ns["input"].value == pytest.approx(found.whole.step_ns - without, abs=1 * MS)


def kept(trace, rank, steps=(), calls=()):
    """The trace with only some steps of a rank, and the operations of some; all others have theirs."""
    return replace(
        trace,
        steps=tuple(one for one in trace.steps if one.rank != rank or one.index in steps),
        collectives=tuple(one for one in trace.collectives if one.rank != rank or one.step in calls),
    )


@pytest.mark.parametrize("arm", ["stock", "tcp"])
@pytest.mark.parametrize(
    ("steps", "calls", "words"),
    [
        ((), (), "rank 3 recorded 0 of 28 steps of communication over {}"),
        (range(28), (), "rank 3 recorded 0 of 28 steps of communication over {}"),
        (range(4), range(4), "rank 3 recorded 4 of 28 steps of communication over {}, the last is step 3"),
    ],
    ids=["nothing", "no operation", "the first steps"],
)
def test_waiting_for_a_rank_with_too_few_steps_is_no_transfer(arm, steps, calls, words):
    job = Job(ranks=4, arms=(arm,), slower={3: 1.6}, probe=True, buckets=(1 * MIB, 8 * MIB, 8 * MIB, 8 * MIB))
    trace, words = trace_of(job), words.format(arm)
    assert judged(trace)[1].code == "STRAGGLER"
    part = kept(trace, 3, steps, calls)
    found, decided = judged(part)
    assert (decided.code, decided.next) == ("INCONCLUSIVE", verdict.ALL_RECORDS)
    assert f"R{words[1:]}: waiting for the last rank cannot be told from transfer" in decided.why
    assert not any(one.applies for one in decided.evidence)
    assert not found.achieved
    assert f"{words}." in caveats.warnings(found)
    with pytest.raises(ValueError, match=f"^{words}: waiting for the last rank cannot be told from the time of an op"):
        questions.job(part, arm)


def test_a_cost_is_fitted_to_operations_of_all_ranks():
    trace = trace_of(Job(ranks=4, blocks=1, block_steps=20))
    assert fit.fit(kept(trace, 3, range(20), range(9)), STOCK).count == 4 * (9 - 1)  # the first step is not counted
    with pytest.raises(ValueError, match="no all-reduce over stock that all ranks finished"):
        fit.fit(kept(trace, 3, range(20)), STOCK)
    pairs = tuple(replace(one, ranks=2, comm=one.rank // 2) for one in trace.collectives)
    assert fit.fit(replace(trace, collectives=pairs), STOCK).count > 0


@pytest.mark.parametrize(("steps", "least"), [(5, 4), (4, 0), (28, 5), (28, 27)])
def test_a_rank_that_is_a_step_behind_or_leaves_later_is_not_missing(steps, least):
    """As in a run in progress, or where a rank has no more data."""
    trace = trace_of(Job(ranks=4, blocks=1, block_steps=steps))
    assert intervals.unheard(kept(trace, 3, range(least), range(least)), STOCK) == ""


def test_ranks_that_reduce_in_groups_or_seldom_are_not_missing():
    trace = trace_of(Job(ranks=4, blocks=1, block_steps=20))
    pairs = tuple(replace(one, ranks=2, comm=one.rank // 2) for one in trace.collectives)
    assert intervals.unheard(replace(trace, collectives=pairs), STOCK) == ""
    assert intervals.unheard(replace(trace, collectives=pairs[: len(pairs) // 2]), STOCK) == ""
    seldom = run_of(Job(ranks=4, blocks=1, block_steps=20), Averaging)
    assert intervals.unheard(seldom, STOCK) == ""
    assert intervals.unheard(kept(seldom, 3), STOCK) == "rank 3 recorded 0 of 20 steps of communication over stock"


def test_without_the_record_of_a_rank_no_rate_in_transfer_is_claimed():
    trace = trace_of(Job(ranks=4, slower={3: 1.4}))
    kept = replace(
        trace,
        ranks=tuple(one for one in trace.ranks if one.rank != 3),
        steps=tuple(one for one in trace.steps if one.rank != 3),
        collectives=tuple(one for one in trace.collectives if one.rank != 3),
    )
    assert findings.find(trace).achieved
    assert not findings.find(kept).achieved


@pytest.mark.parametrize("arms", [("stock", "tcp"), ("tcp", "stock")])
def test_what_the_script_does_with_the_period_of_the_blocks_is_no_difference_of_the_arms(arms):
    """The order of the arms is mirrored after 18 steps, so the second one has two of three long steps."""
    job = Job(arms=arms, blocks=16, block_steps=9, every=12, input_of_ms={0: 300.0, 1: 300.0}, jitter=0.004)
    trace = trace_of(job)
    long = Counter(str(step.arm) for step in trace.steps if step.duration_ns > 300 * MS)
    assert long[arms[1]] >= 1.8 * long[arms[0]]
    (pair,) = findings.find(trace).comparisons
    assert pair.enough
    assert pair.gain.low < 0 < pair.gain.high
    assert abs(pair.gain.value) < 0.01
