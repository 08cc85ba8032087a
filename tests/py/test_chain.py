"""The chain of claims: verdicts follow from the cells, and unmeasured values are not reported."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cellmaker
from netbottleneck.analysis.comparisons import Estimate
from netbottleneck.report import Run
from netbottleneck.study.evidence import chain, facts
from netbottleneck.study.evidence.values import COMPUTED, ArmFacts, CellFacts, Cpu, ForecastFacts, Nic, Outlook, Parts

MS = cellmaker.MS
about = cellmaker.about


class Made(Run):
    """A run in memory."""

    def __init__(self, trace):
        self.path, self._folder, self.trace = Path("/nowhere"), None, trace


def cell(key, arms, link_bps=2e9, job="replay", **how):
    run = Made(cellmaker.trace(arms, link_bps=link_bps, **how))
    return facts.cell_facts(run, facts.CellDescription(key, "made", job, f"{link_bps / 1e9:g}gbit"))


def steps(*cells):
    return {step.name: step for step in chain.chain(cells)}


def test_claims_without_measurements_say_so():
    found = chain.chain([])
    assert len(found) == len(chain.CLAIMS)
    assert all(step.missing and not step.lines for step in found)
    assert not [step.verdict for step in found if any(mark.isdigit() for mark in step.verdict)]


def test_a_factor_stops_growing_at_the_slowest_link_with_no_later_gain():
    cells = [
        cell("1", {"stock": 300, "ofi": 200}, 1e9),
        cell("2", {"stock": 100, "ofi": 50}),
        cell("4", {"stock": 99, "ofi": 10}, 4e9),
    ]
    found = steps(*cells)["bandwidth"]
    assert (
        "stops growing with the link at 2.00 Gbit/s for made on 2 ranks at 0.50 Gbit/s a flow (measured"
        in found.verdict
    )
    stock, ofi = found.lines
    assert "stock: 1.00 Gbit/s 0.250, 2.00 Gbit/s 0.500, 4.00 Gbit/s 0.503: stops growing at 2.00 Gbit/s" in stock
    assert "ofi" in ofi
    assert ofi.endswith("still grows")
    assert "each job ran at one link speed." in steps(cells[0])["bandwidth"].verdict
    apart = steps(cells[0], replace(cells[1], flow_bps=(1.0,)))["bandwidth"]
    assert apart.verdict.endswith("each job ran at one link speed for each cap on its flows.")
    assert apart.missing == ("cells of one model, number of ranks and cap on flows at two or more link speeds",)


def test_a_factor_that_still_grows_is_reported():
    found = steps(cell("1", {"stock": 300}, 1e9), cell("2", {"stock": 100}))["bandwidth"]
    assert found.verdict.startswith("Stock's scaling factor still grows for made on 2 ranks at 0.50 Gbit/s a flow (")


def test_growth_by_estimated_factors_is_not_called_measured():
    measured, estimated = cell("1", {"stock": 300}, 1e9), cell("2", {"stock": 100}, alone_ms=0)
    assert "(estimated; growth" in steps(measured, estimated)["bandwidth"].verdict


def test_scaling_and_transports_have_intervals():
    found = steps(cell("one", {"stock": 100, "ofi": 20}))
    assert found["scaling"].verdict == "The job scales badly: the scaling factor of stock is 0.50 (one; measured)."
    assert "one, ofi: 0.833 (0.833 to 0.833), step 120 ms (120 to 120) (measured)" in found["scaling"].lines
    assert (
        "shortens the step in 1 of 1 comparisons, by its whole interval; at best the step is 1.67 times (1.67 to 1.67)"
        in found["transports"].verdict
    )
    estimated = steps(cell("two", {"stock": 100}, alone_ms=0))["scaling"]
    assert "(estimated)" in estimated.lines[0]
    assert estimated.verdict.endswith("(two; estimated).")
    assert "two: T_1 is an estimate" in estimated.missing[0]


def test_a_job_without_a_scaling_factor_of_stock_is_reported():
    one = cell("one", {"stock": 100, "ofi": 20})
    arms = {name: replace(arm, scaling=None) if name == "stock" else arm for name, arm in one.arms.items()}
    found = steps(replace(one, arms=arms))
    assert found["scaling"].verdict == "The scaling factor of stock was not measured."
    assert len(found["scaling"].lines) == 1


def test_hooks_and_traffic_are_separate_and_timed_compute_is_excluded():
    real = cell(
        "real",
        {"bare": 0, "null": 0, "stock": 50},
        job="inflation",
        computed={"null": 1.02, "stock": 1.122},
        beside_ms=(0, 0),
    )
    found = steps(real)["compute"]
    assert "hooks alone +2.0 % (+2.0 to +2.0);" in found.verdict
    assert "traffic in addition +10.0 % (+10.0 to +10.0) (measured)" in found.verdict
    timed = steps(cell("timed", {"null": 0, "stock": 50}))["compute"]
    assert timed.verdict == "Compute inflation was not measured."
    assert "compute is a timed wait, which traffic cannot slow down, in timed" in timed.missing


@pytest.mark.parametrize(
    ("equal", "same", "verdict"),
    [
        (
            True,
            True,
            "The results of training are bit-identical on all ranks in 1 of 1 cells, "
            "and equal to stock alone in 1 of 1",
        ),
        (True, None, "The results of training are bit-identical on all ranks in 1 of 1 cells (measured)."),
        (True, False, "The results of training differ in one (measured)."),
        (False, None, "The results of training differ in one (measured)."),
    ],
)
def test_differing_training_results_are_reported(equal, same, verdict):
    one = replace(cell("one", {"stock": 100}, job="digits"), equal_weights=equal, same_as_stock=same, accuracy=0.96)
    found = steps(one)["harm"]
    assert found.verdict.startswith(verdict)
    assert "accuracy 0.960" in found.lines[0]
    assert bool(found.missing) == (same is None)


def test_average_and_active_rates_are_both_reported():
    one = cell("one", {"stock": 100})
    stock = replace(
        one.arms["stock"],
        nic=Nic("eth0", 3e8, 2e8, 5e8, 4e8),
        cpu=Cpu({"user": 0.1, "idle": 0.9}, 0.3),
        sent_segments=1000.0,
        retransmitted_segments=10.0,
    )
    full = {"full_use": ForecastFacts(Estimate(125 * MS, 120 * MS, 130 * MS), about(0.8))}
    found = steps(replace(one, arms={"stock": stock}, forecast=full))
    assert (
        "As little as 20 % of the link is used while operations are in flight, 10 % on average" in found["nic"].verdict
    )
    assert "at full use it would average 0.32 Gbit/s (16 %) (predicted)" in found["nic"].lines[0]
    assert "at most 1.00 % (measured)" in found["nic"].lines[1]
    assert "at most 10.0 % of all cores (one, stock; measured)" in found["cpu"].verdict


def test_the_bound_and_the_part_reached_are_reported():
    full = {"full_use": ForecastFacts(Estimate(110 * MS, 105 * MS, 130 * MS), about(0.9))}
    one = replace(cell("one", {"stock": 100, "ofi": 5}), forecast=full, link_burst_bytes=None)
    found = steps(one)["full use"]
    assert "stock reaches as little as 55 % of the bound at full use of the link" in found.verdict
    assert "at full use 0.900 (0.891 to 0.909) (predicted before the run); stock 0.500" in found.lines[0]
    assert found.lines[1] == "one, ofi: the measured step is shorter than its bound"
    assert found.verdict.endswith("measured over predicted).")
    bursts = replace(one, link_burst_bytes=1_000_000, tensor_bytes=2 << 20)
    found = steps(bursts)["full use"]
    why = (
        "the measured step is shorter than its bound, which assumes the link's rate alone: "
        "after a pause its cap passes a burst of 976.6 KiB, of 2.0 MiB a step"
    )
    assert found.lines[1] == f"one, ofi: {why}"
    assert found.verdict.endswith(f" There {why}.")


def test_compression_is_reported_at_the_achieved_rate_and_at_full_use():
    outlook = Outlook(
        "stock", 0.9, ratio=about(5.5), full_use_ratio=Estimate(1, 1, 1), at_full_use=None, enough_bps=about(2e10)
    )
    one = replace(cell("one", {"stock": 100}), outlook=outlook)
    found = steps(one)["compression"]
    assert "at most 1.0x compression is needed" in found.verdict
    assert "at the achieved rate, up to 5.5x" in found.verdict
    none = replace(outlook, ratio=None, ratio_why="at most 71.0 % is reached", full_use_ratio=None)
    assert (
        "no compression is enough at stock's achieved rate: at most 71.0 %"
        in steps(replace(one, outlook=none))["compression"].lines[0]
    )


def test_predictions_are_compared_with_measurements():
    predictions = {
        "stock": ForecastFacts(about(210 * MS)),
        "ofi": ForecastFacts(about(120 * MS)),
        "tcp": ForecastFacts(why="no fit"),
    }
    one = replace(cell("one", {"stock": 100, "ofi": 20, "tcp": 30}), forecast=predictions)
    held = facts.forecast_record([one])
    assert held.median == pytest.approx(0.025)
    assert (held.worst.arm, held.within(0.04), held.exposed) == ("stock", 1, 1)
    found = steps(one)["prediction"]
    assert "Of 2 steps that were predicted before they ran, the median error is 2.5 %, the worst 5.0 %" in found.verdict
    assert "one, tcp: refused: no fit" in found.missing
    assert "one, ofi: predicted 120 ms (119 to 121), measured 120 ms (120 to 120): +0.0 %" in found.lines


def test_the_loss_is_split_into_its_causes():
    one = cell("one", {"stock": 100, "ofi": 20}, computed={"stock": 1.1})
    stock, _ = facts.budgets([one])
    assert stock.loss == pytest.approx(1 - 100 / 209)
    assert stock.exposed == pytest.approx(100 / 209)
    assert stock.inflation == pytest.approx(9 / 209)
    assert (stock.host_internal, stock.waiting, stock.notes) == (0, 0, ())
    assert stock.other == pytest.approx(0)
    assert (
        "The largest loss of stock is 52 % of the step (one); the largest part of it, 48 %, is exposed network"
        in steps(one)["budget"].verdict
    )


@pytest.mark.parametrize(("ranks_per_host", "why"), [(1, False), (2, True)])
def test_a_step_shorter_than_its_bound_is_explained(ranks_per_host, why):
    one = cell("4", {"stock": 100, "tcp": 20}, size=4)
    assert one.outlook is not None
    assert one.outlook.full_use is not None
    one = replace(
        one, ranks_per_host=ranks_per_host, outlook=replace(one.outlook, full_use_ns=Estimate(1e12, 1e12, 1e12))
    )
    above = [line for line in steps(one)["full use"].lines if "shorter than its bound" in line]
    assert len(above) == 2
    assert all(("two levels send less between hosts" in line) == why for line in above)


def test_the_loss_inside_a_host_is_separate_if_it_was_measured():
    inside = replace(cell("8", {"stock": 30}, size=4), ranks_per_host=4)
    across = replace(cell("16", {"stock": 100}, size=8), ranks_per_host=4)
    by_key = {one.key: one for one in facts.budgets([inside, across])}
    assert (by_key["8"].host_internal, by_key["8"].exposed) == (pytest.approx(30 / 130), 0)
    assert by_key["16"].host_internal == pytest.approx(30 / 200)
    assert by_key["16"].exposed == pytest.approx(70 / 200)
    (alone,) = facts.budgets([across])
    assert alone.host_internal == 0
    assert alone.notes == (facts.NOT_APART,)


def test_a_gain_over_a_stock_that_our_hooks_slow_is_withheld():
    slowed = cell("slowed", {"bare": 20, "stock": 60, "tcp": 10}, job="digits")
    alone = steps(slowed)["transports"]
    assert alone.verdict == "Stock was compared with no other transport whose gain may be reported."
    assert (alone.lines, len(alone.missing)) == ((), 1)
    assert alone.missing[0].startswith("slowed: Our hooks slow the stock path by 33 %, so no gain is reported")
    both = steps(slowed, cell("one", {"stock": 100, "ofi": 20}))["transports"]
    assert "in 1 of 1 comparisons" in both.verdict
    assert [line.partition(":")[0] for line in both.lines] == ["one"]
    assert both.missing == alone.missing


def test_replays_are_not_counted_as_training():
    replayed = replace(cell("replayed", {"stock": 100}), equal_weights=True)
    trained = replace(cell("trained", {"stock": 100}, job="digits"), equal_weights=True)
    found = steps(replayed, trained)["harm"]
    assert found.verdict.startswith("The results of training are bit-identical on all ranks in 1 of 1 cells (")
    assert len(found.lines) == 2
    alone = steps(replayed)["harm"]
    assert alone.verdict == "The results of training were not compared."
    assert alone.missing == ("a cell that trains: the job digits",)
    differ = replace(replayed, equal_weights=False)
    assert steps(differ, trained)["harm"].verdict == "The sums of a replay differ in replayed (measured)."


@pytest.mark.parametrize(
    ("busy", "busiest", "verdict"),
    [
        (0.1, 0.3, "The CPUs are not the limit: at most 10.0 % of all cores (one, stock; measured)."),
        (0.1, 0.97, "One core is full (97 %, one, stock), and may be the limit: at most 10.0 % of all cores (one, "),
        (0.6, 0.97, "The CPUs are busy, and may be the limit: at most 60 % of all cores (one, stock; measured)."),
    ],
)
def test_a_full_core_may_be_the_limit(busy, busiest, verdict):
    one = cell("one", {"stock": 100})
    arms = {"stock": replace(one.arms["stock"], cpu=Cpu({"user": busy, "idle": 1 - busy}, busiest))}
    assert steps(replace(one, arms=arms))["cpu"].verdict.startswith(verdict)


def test_cells_in_which_no_compression_is_enough_are_named():
    outlook = Outlook("stock", 0.9, ratio=about(5.5), full_use_ratio=about(1.5))
    never = replace(
        outlook, ratio=None, ratio_why="at most 70 %", full_use_ratio=None, full_use_ratio_why="at most 80 % is reached"
    )
    a, b = (replace(cell(key, {"stock": 100}), outlook=one) for key, one in (("a", outlook), ("b", never)))
    verdict = steps(a, b)["compression"].verdict
    assert "at most 1.5x compression is needed for a scaling factor of 0.9 (a; no ratio is enough in b)" in verdict
    assert "at the achieved rate, up to 5.5x (a; no ratio is enough in b); predicted." in verdict
    assert steps(b)["compression"].verdict == "No compression gives a scaling factor of 0.9 (predicted)."


def test_a_comparison_over_too_few_pairs_is_named():
    few = replace(cell("a", {"stock": 100}), few_pairs={"tcp": 2})
    found = steps(few)["transports"]
    assert found.verdict == "Stock was compared with no other transport whose gain may be reported."
    assert found.missing == ("a, tcp: too few pairs of blocks: 2; a claim needs 3: more rounds",)


def test_a_ratio_that_was_refused_is_not_known():
    outlook = Outlook("stock", 0.9, ratio=about(5.5), full_use_ratio=about(1.5))
    never = Outlook("stock", 0.9, ratio_why="at most 70 % is reached")
    why = "refused to extrapolate a poor fit: only 4 operations"
    poor = Outlook("stock", 0.9, ratio_why=why, ratio_refused=True, full_use_ratio_why=why, full_use_ratio_refused=True)
    a, b, c = (
        replace(cell(key, {"stock": 100}), outlook=one) for key, one in zip("abc", (outlook, never, poor), strict=True)
    )
    found = steps(c)["compression"]
    assert found.verdict == "The compression needed is not known."
    assert found.lines[0].startswith(f"c, for 0.9: not known at stock's achieved rate: {why}; not known at full use of")
    assert found.missing == (
        f"c: not known at stock's achieved rate: {why}",
        f"c: not known at full use of the link: {why}",
    )
    assert steps(b, c)["compression"].verdict == "No compression gives a scaling factor of 0.9 in b (predicted)."
    verdict = steps(a, b, c)["compression"].verdict
    assert "1.5x compression is needed for a scaling factor of 0.9 (a; not known in c); at the ach" in verdict
    assert "at the achieved rate, up to 5.5x (a; no ratio is enough in b; not known in c); predicted." in verdict


def test_numbers_from_an_estimated_t_1_are_estimates():
    one = cell("one", {"stock": 100}, alone_ms=0)
    found = steps(one)
    assert found["budget"].verdict.endswith("is exposed network communication (estimated).")
    assert found["full use"].lines[0].endswith("of the bound (estimated)")


lengths = st.floats(0, 1e9, allow_nan=False)
baselines = st.sampled_from(["one rank alone", COMPUTED])


@settings(max_examples=200, deadline=None)
@given(
    st.tuples(lengths, lengths, lengths, lengths), st.floats(1, 1e9), st.floats(0.01, 1.2), baselines, st.integers(1, 2)
)
def test_the_budget_adds_up(lengths_ns, single_ns, factor, baseline, ranks_per_host):
    compute_ns, exposed_ns, wait_ns, other_ns = lengths_ns
    step_ns = max(sum(lengths_ns), 1.0)
    parts = Parts(step_ns, compute_ns, 0, exposed_ns, wait_ns, other_ns, exposed_ns)
    arm = ArmFacts("stock", about(step_ns), 9, (), scaling=about(factor), parts=parts)
    whole = CellFacts("k", "m", "replay", 4, "n", baseline=baseline, single_ns=about(single_ns), arms={"stock": arm})
    found = facts.budget(replace(whole, ranks_per_host=ranks_per_host), arm)
    assert found.host_internal + found.inflation + found.exposed + found.other == pytest.approx(found.loss, abs=1e-6)
    assert found.loss == 1 - factor


def test_a_factor_that_was_not_measured_does_not_grow():
    cells = [cell("1", {"stock": 300}, 1e9), cell("2", {"stock": 100})]
    unknown = [replace(one, arms={name: replace(arm, scaling=None) for name, arm in one.arms.items()}) for one in cells]
    found = steps(*unknown)
    assert found["bandwidth"].verdict.startswith("Stock's scaling factor was not measured at two link speeds")
    assert not found["bandwidth"].lines
    assert found["scaling"].missing == ("pairs of blocks with null, or steps of one rank",)
