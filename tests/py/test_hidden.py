"""What a step saves if work was shorter, which hides transfers: against the same job without the cause."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from netbottleneck.analysis import findings, verdict

sys.path.insert(0, str(Path(__file__).parents[1] / "scenarios"))

from scenario.job import MS, Job, trace_of


def step_ns(job):
    return float(np.mean([step.end_ns - step.begin_ns for step in trace_of(replace(job, arms=("stock",))).steps]))


def host_rule(found):
    return next(one for one in verdict.decide(found).evidence if one.code == "HOST_LIMITED")


@pytest.mark.parametrize(("gbps", "hidden"), [(20.0, False), (4.0, False), (2.0, True), (1.0, True)])
def test_compute_slowed_by_traffic_saves_no_more_than_transfers_leave(gbps, hidden):
    """Beside slow transfers, which the lost time hides in part, or wholly."""
    job = Job(arms=("stock", "null"), blocks=6, contention=1.4, flow_bps=gbps * 1e9, link_bps=gbps * 1e9, noise=0.0)
    found = findings.find(trace_of(job))
    truth, slowed = step_ns(job) - step_ns(replace(job, contention=1.0)), found.slowed.difference_ns.value
    rule = host_rule(found)
    assert rule.saving.value == pytest.approx(truth, rel=0.03, abs=0.1 * MS)
    assert hidden == (truth < 0.9 * slowed)
    assert (rule.source == "predicted") == hidden
    assert ("Transfers that this work hides would show." in rule.why) == hidden


def test_without_the_operations_of_all_ranks_compute_saves_what_it_loses():
    """The operations of some ranks alone do not tell which transfers the lost time hides."""
    trace = trace_of(Job(arms=("stock", "null"), blocks=6, contention=1.4, flow_bps=2e9, link_bps=2e9, noise=0.0))
    own = findings.find(replace(trace, collectives=tuple(replace(one, ranks=2) for one in trace.collectives)))
    assert own.undisturbed is None
    assert host_rule(own).saving == own.slowed.difference_ns


@pytest.mark.parametrize(("gbps", "hidden"), [(10.0, False), (1.0, True), (0.6, True)])
@pytest.mark.parametrize(
    ("cause", "removed"),
    [({"jitter": 0.05}, {"jitter": 0.0}), ({"sleeps_ms": {0: 40.0}, "every": 5}, {"sleeps_ms": {}})],
    ids=["jitter", "a rank sleeps in every fifth step"],
)
def test_imbalance_saves_no_more_than_transfers_leave(cause, removed, gbps, hidden):
    job = Job(ranks=3, blocks=40, block_steps=13, noise=0.0, flow_bps=gbps * 1e9, link_bps=gbps * 1e9, **cause)
    found = findings.find(trace_of(job))
    truth, late = step_ns(job) - step_ns(replace(job, **removed)), found.lateness
    rule = next(one for one in verdict.decide(found).evidence if one.code == "IMBALANCE")
    assert late.jitter_ns.value == pytest.approx(truth, rel=0.08, abs=0.3 * MS)
    assert rule.saving.value <= truth + 1 * MS
    assert hidden == (late.even_ns.value < 0.95 * late.random_ns.value)
    assert hidden == ("transfers would outlast the work" in rule.why)
