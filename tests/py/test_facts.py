"""A cell's facts: computed from a known run, and unchanged by their file."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import cellmaker
from netbottleneck.analysis.comparisons import Estimate
from netbottleneck.analysis.usage import HostUse, Use
from netbottleneck.report import Run
from netbottleneck.study.evidence import facts, values
from netbottleneck.trace.transports import Arm
from netbottleneck.whatif import questions, sweeps

MS = cellmaker.MS
STORED = Path(__file__).parents[2] / "benchmarks" / "traces" / "resnet50-2gbit-500mbit.jsonl.gz"
ABOUT = facts.CellDescription("made-2-2gbit", "made", "replay", "2gbit/500mbit")


@dataclass
class JobOutcome:
    digests: tuple = ("a", "a")
    accuracy: float | None = 0.96

    @property
    def equal(self):
        return len(set(self.digests)) == 1


class Made(Run):
    """A run in memory."""

    def __init__(self, trace):
        self.path, self._folder, self.trace = Path("/nowhere"), None, trace


def of(arms, job="replay", known=None, **how):
    return facts.cell_facts(Made(cellmaker.trace(arms, **how)), replace(ABOUT, job=job), **(known or {}))


def test_facts_of_an_arm_are_its_step_parts_and_scaling_factor():
    cell = of({"stock": 100, "ofi": 20})
    stock = cell.arms["stock"]
    assert (cell.baseline, cell.single_ns.value) == (values.ALONE, 100 * MS)
    assert stock.step_ns == Estimate(200 * MS, 200 * MS, 200 * MS)
    assert stock.scaling.value == cell.arms["stock"].scaling.low == 0.5
    assert (stock.parts.compute_ns, stock.parts.exposed_ns, stock.parts.other_ns) == (98 * MS, 100 * MS, 2 * MS)
    assert stock.forward_backward_ns.value == 90 * MS
    assert [block for block, _ in stock.blocks] == [0, 2, 4]
    assert cell.pair("ofi").ratio.value == pytest.approx(120 / 200)
    assert (cell.one_flow_bps, cell.many_flows_bps, cell.link_burst_bytes, cell.cores) == (4.8e8, 1.9e9, 10**6, 4)
    assert (cell.tensors, cell.tensor_bytes) == (1, cellmaker.NBYTES)


def test_the_baseline_is_single_else_null_else_computed():
    idle = of({"null": 0, "stock": 100}, alone_ms=0)
    assert (idle.baseline, idle.single_ns.value) == (values.NOTHING_MOVES, 100 * MS)
    assert idle.arms["stock"].scaling.value == pytest.approx(0.5)
    assert idle.arms["null"].scaling is None
    computed = of({"stock": 100}, alone_ms=0)
    assert (computed.baseline, computed.single_ns) == (values.COMPUTED, None)
    assert computed.arms["stock"].scaling.value == pytest.approx(0.5)


def test_hooks_and_contention_are_separate_comparisons():
    for bare in (0, None):
        slower = {"bare": 1, "null": 1.02, "stock": 1.122}
        arms = {"bare": bare, "null": 0, "stock": 50}
        cell = of(arms, "inflation", computed=slower, beside_ms=(0, 0), alone_ms=0, known={"outcome": JobOutcome()})
        assert cell.hooks.ratio.value == pytest.approx(1.02)
        (contention,) = cell.contention
        assert (contention.base, contention.other) == ("null", "stock")
        assert contention.ratio.value == pytest.approx(1.1)
        assert cell.arms["stock"].forward_backward_ns.value == pytest.approx(90 * 1.122 * MS)
        assert (cell.equal_weights, cell.outlook, cell.arms["stock"].scaling) == (None, None, None)


def test_the_cost_of_hooks_is_unknown_if_the_bare_arm_moves_bytes():
    assert of({"bare": 50, "null": 0, "stock": 50}, "digits").hooks is None


def test_outcomes_of_the_ranks_are_part_of_the_facts():
    known = {"outcome": JobOutcome(), "stock_alone": JobOutcome(("b", "b"), 0.95)}
    cell = of({"stock": 100}, known=known)
    assert (cell.equal_weights, cell.same_as_stock, cell.accuracy, cell.accuracy_stock_alone) == (
        True,
        False,
        0.96,
        0.95,
    )
    assert of({"stock": 100}).equal_weights is None


def test_a_forecast_is_stored_with_its_refusals():
    one = SimpleNamespace(step_ns=cellmaker.about(1e8), scaling=(0.5, 0.4, 0.6), why="")
    refused = SimpleNamespace(step_ns=None, scaling=None, why="the fit is poor")
    known = {"forecast": SimpleNamespace(transports={"stock": one, "ofi": refused})}
    found = of({"stock": 100, "ofi": 20}, known=known).forecast
    assert found["stock"] == values.ForecastFacts(cellmaker.about(1e8), Estimate(0.5, 0.4, 0.6))
    assert found["ofi"] == values.ForecastFacts(why="the fit is poor")


def test_facts_of_the_stored_trace_survive_json(tmp_path):
    cell = facts.cell_facts(Run(STORED), ABOUT)
    assert cell.arms["stock"].scaling.value == pytest.approx(0.217, abs=0.003)
    assert cell.arms["ofi"].sent_over_model == pytest.approx(1.0, abs=0.01)
    assert 0.7 < cell.outlook.full_use.value < 0.8
    assert cell.outlook.ratio.low < cell.outlook.ratio.value < cell.outlook.ratio.high
    assert cell.outlook.at_full_use.points[0][1].value == pytest.approx(cell.outlook.full_use.value)
    values.write(tmp_path / "facts.json", cell)
    assert values.read(tmp_path / "facts.json") == cell


@pytest.mark.parametrize("part", [0.95, 1.02])
def test_the_compression_for_a_target_and_the_scaling_factors_use_the_same_step_alone(part):
    trace = Run(STORED).trace
    job = questions.job(trace, Arm("stock"))
    alone_ns = part * job.alone_ns
    outlook = facts.outlook_of(trace, Arm("stock"), 2e9, alone_ns)
    full = replace(job, cost=sweeps.with_link(job.cost, 2e9))
    for one, ratio in ((job, outlook.ratio), (full, outlook.full_use_ratio)):
        setting = next(sweeps.compression(one, [ratio.value], facts.FREE_CODEC))
        step_ns = questions.simulate_setting(one, setting).step_ns
        assert alone_ns / step_ns == pytest.approx(facts.TARGET, rel=0.01)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format":"netbottleneck-cell","version":9}', "7"])
def test_an_invalid_facts_file_is_named(tmp_path, text):
    (tmp_path / "facts.json").write_text(text)
    with pytest.raises(ValueError, match=r"facts\.json"):
        values.read(tmp_path / "facts.json")


def test_an_interval_covers_the_spread_between_blocks():
    import numpy as np

    alike = {0: np.full(5, 100.0), 1: np.full(5, 100.0)}
    apart = {0: np.full(5, 90.0), 1: np.full(5, 110.0)}
    assert values.median(alike) == Estimate(100, 100, 100)
    found = values.median(apart)
    assert (found.low, found.value, found.high) == (90, 100, 110)
    assert values.ratio(alike, apart).value == 1
    assert values.median({}) is None
    assert values.ratio(alike, {}) is None


def test_a_factor_needs_pairs_enough_for_an_interval(tmp_path):
    few = of({"null": 0, "stock": 100}, alone_ms=0, rounds=1)
    assert (few.baseline, few.arms["stock"].scaling, few.pairs) == (values.NOTHING_MOVES, None, ())
    assert facts.budgets([few]) == ()
    few = of({"stock": 100, "tcp": 50}, rounds=2)
    assert (few.pairs, few.few_pairs) == ((), {"tcp": 2})
    values.write(tmp_path / "facts.json", few)
    assert values.read(tmp_path / "facts.json") == few


def test_interfaces_count_as_one_if_the_hosts_have_several_links():
    def use(interface, way, bps):
        return Use(interface, way, bps, 2 * bps, 1, 1)

    uses = [use("nb1", "tx", 3e8), use("nb1", "rx", 1e8), use("nb0", "tx", 2e8), use("nb0", "rx", 1e8)]
    host = HostUse(0, "h", Arm("stock"), 1, 1, 100, tuple([use("lo", "tx", 9e9), *uses]))
    assert facts.nic([host]) == values.Nic("nb1", 1e8, 3e8, 2e8, 6e8)
    assert facts.nic([host.added_up()]) == values.Nic("nb0,nb1", 2e8, 5e8, 4e8, 1e9)


def test_the_links_of_a_host_add_up():
    verified = {**cellmaker.VERIFIED, "more_links": [{"measured_bps": 1e8}, {"measured_bps": 2e8}]}
    made = cellmaker.trace({"stock": 100})
    run = Made(replace(made, network=replace(made.network, verified=verified)))
    assert facts.cell_facts(run, ABOUT).many_flows_bps == 2.2e9
