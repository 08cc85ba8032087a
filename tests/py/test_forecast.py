"""Forecasts: recover the cost of a run, follow the network, and are refused without data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from netbottleneck.analysis.comparisons import Estimate, widened
from netbottleneck.trace import model as tr
from netbottleneck.trace.model import Network, Trace, TransportInfo, decode, encode
from netbottleneck.trace.transports import Arm
from netbottleneck.whatif import forecast
from netbottleneck.whatif.cost import Cost, Link
from netbottleneck.whatif.fit import Service, fit, fit_operations
from netbottleneck.whatif.forecast import FULL_USE, Forecast, Wire
from netbottleneck.whatif.plan import Plan, ReplaySchedule, as_trace, replay_schedule
from netbottleneck.whatif.simulate import simulate, workload

STORED = Path(__file__).parents[2] / "benchmarks" / "traces" / "resnet50-2gbit-500mbit.jsonl.gz"
MS = 1_000_000
MB = 1_000_000


def played(
    sizes: tuple[int, ...] = (1 * MB, 24 * MB, 3 * MB, 9 * MB, 2 * MB, 16 * MB), gap_ms: int = 20
) -> ReplaySchedule:
    """A gradient every `gap_ms`, each sent alone, 5 ms of forward pass before and 2 ms of optimizer after."""
    ready = tuple((at, (5 + gap_ms * (at + 1)) * MS) for at in range(len(sizes)))
    tensors = tuple((f"t{at}", size) for at, size in enumerate(sizes))
    return ReplaySchedule("made", tensors, ready, 5 * MS, 2 * MS, tuple((at,) for at in range(len(sizes))))


def run_of(
    what: ReplaySchedule, cost: Cost, wire: Wire, *, ranks: int = 2, in_flight: int = 1, steps: int = 9
) -> Trace:
    """The trace of a run of `what` at that cost, over one transport."""
    load = workload(as_trace(what))
    made = simulate(load, Plan.explicit(what.buckets, in_flight), cost, workers=ranks, steps=steps)
    verified = {"one_flow": {"measured_bps": wire.one_flow_bps}, "many_flows": {"measured_bps": wire.many_flows_bps}}
    flows = () if wire.flow_bps is None else (wire.flow_bps,)
    network = Network("made up", wire.link_bps, flows, verified)
    info = TransportInfo("tcp", streams_open=16, streams_used=4, streams_asked=0)
    (rank,) = made.ranks
    return replace(
        made,
        origin="measured",
        arms=(Arm("tcp"),),
        network=network,
        ranks=(replace(rank, transports=(info,)),),
        steps=tuple(replace(step, arm=Arm("tcp")) for step in made.steps),
        collectives=tuple(replace(one, arm=Arm("tcp")) for one in made.collectives),
    )


HERE = Wire(2e9, 5e8, 4.78e8, 1.9e9)
COST = Cost(alpha_ns=100_000, link=Link(1.8e9), launch_ns=50_000)


def step_of(made: Forecast, arm: str = "tcp") -> float:
    found = made.transports[arm].step_ns
    assert found is not None, made.transports[arm].why
    return found.value


@pytest.mark.parametrize(("in_flight", "alpha_ns"), [(1, 100_000), (2, 0)])
def test_a_forecast_recovers_the_cost_that_made_the_run(in_flight: int, alpha_ns: int) -> None:
    made = replace(COST, alpha_ns=alpha_ns)
    source = run_of(played(), made, HERE, in_flight=in_flight)
    other = played((12 * MB, 2 * MB, 30 * MB, 8 * MB), 10)
    there = Wire(1e9, 2.5e8, 2.39e8, 9.5e8)
    predicted = forecast.make(source, other, 2, there, ["tcp"])
    real = run_of(other, replace(made, link=Link(0.9e9)), there, in_flight=in_flight)
    assert step_of(predicted) == pytest.approx(real.steps[1].duration_ns, rel=0.001)


def test_operations_that_share_a_link_are_distinguished_from_queued_ones() -> None:
    alike = played((8 * MB,) * 6)  # none overtakes another
    for in_flight in (1, 2, 3):
        found = fit(run_of(alike, replace(COST, alpha_ns=0, launch_ns=0), HERE, in_flight=in_flight))
        assert found.in_flight == in_flight
        assert found.cost.link.rate_bps == pytest.approx(1.8e9, rel=0.01)


def test_two_operations_of_a_step_do_not_show_that_they_share_a_link() -> None:
    """The second one, a small one behind a large one, is faster than its bytes: an idle link lets a burst pass."""
    wire = Wire(5e8, 5e8, 4.8e8, 4.8e8)
    two = run_of(played((1052672, 263168), 4), Cost(alpha_ns=0, link=Link(5e8)), wire)
    last = {max(one.done_ns or 0 for one in two.collectives if one.step == step.index) for step in two.steps}
    faster = tuple(
        replace(one, done_ns=(one.done_ns or 0) - 1.5 * MS) if one.done_ns in last else one for one in two.collectives
    )
    found = fit(replace(two, collectives=faster))
    assert found.in_flight == 1
    assert found.cost.alpha_ns == 0
    assert found.cost.link.rate_bps == pytest.approx(5.4e8, rel=0.05)


def test_a_line_is_no_steeper_than_the_network_and_meets_each_step() -> None:
    # Large ones look fast and small ones slow: a link of 0.9 ns a byte, if the network did not say 1 ns.
    sizes, took = (4 * MB, 8 * MB, 16 * MB), (5e6, 8.6e6, 15.8e6)
    rows = [Service(step, size, ns, None) for step in range(9) for size, ns in zip(sizes, took, strict=True)]
    assert fit_operations(rows, None, 0.0)[:2] == pytest.approx((1.4e6, 0.9))
    fixed_ns, byte_ns, why, _ = fit_operations(rows, None, 1.0)
    assert byte_ns == 1.0
    assert 3 * fixed_ns + byte_ns * sum(sizes) == pytest.approx(sum(took))
    assert not why
    # All together were faster than that network: it was measured wrongly.
    assert fit_operations(rows, None, 2.0)[:2] == pytest.approx((0.0, sum(took) / sum(sizes)))


def test_a_forecast_survives_json() -> None:
    predicted = forecast.make(run_of(played(), COST, HERE), played(), 2, HERE, ["tcp", "null", "stock"], cell="here")
    assert decode(Forecast, json.loads(encode(predicted))) == predicted


def test_free_arms_take_the_single_step_and_unknown_ones_are_refused() -> None:
    predicted = forecast.make(run_of(played(), COST, HERE), played(), 2, HERE, ["tcp", "bare", "null", "stock"])
    assert set(predicted.transports) == {"tcp", "null", "stock", FULL_USE}
    assert step_of(predicted, "null") == predicted.transports["tcp"].single_ns == 127 * MS
    assert predicted.transports["stock"].step_ns is None
    assert "no all-reduce over stock" in predicted.transports["stock"].why


@pytest.mark.parametrize(
    ("change", "rate_bps"),
    [
        ({}, 1.8e9),
        ({"many_flows_bps": 0.95e9}, 0.9e9),
        ({"one_flow_bps": None, "link_bps": 4e9}, 3.6e9),  # what was not measured is taken from the caps
    ],
)
def test_a_forecast_scales_by_the_same_share_of_the_network(change: dict[str, Any], rate_bps: float) -> None:
    predicted = forecast.make(run_of(played(), COST, HERE), played(), 2, replace(HERE, **change), ["tcp"])
    assert predicted.transports["tcp"].rate_bps == pytest.approx(rate_bps, rel=0.001)


def test_the_interval_includes_a_run_without_the_losses_of_the_fitted_run() -> None:
    source = run_of(played(), replace(COST, link=Link(0.8 * 1.9e9)), HERE)
    step = forecast.make(source, played(), 2, HERE, ["tcp"]).transports["tcp"].step_ns
    nothing_lost = run_of(played(), replace(COST, link=Link(1.9e9)), HERE).steps[1].duration_ns
    assert step is not None
    assert step.value == pytest.approx(source.steps[1].duration_ns, rel=0.001)
    assert step.low == pytest.approx(nothing_lost, rel=0.01)


def ends_of(
    source: Trace, wire: Wire, what: ReplaySchedule | None = None, ranks: int = 2
) -> tuple[float, float, float]:
    """Distances of a forecast's interval below and above its value, and the value."""
    found = forecast.make(source, what or played(), ranks, wire, ["tcp"]).transports["tcp"]
    assert found.step_ns is not None, found.why
    assert found.scaling is not None
    assert found.scaling.low == pytest.approx(found.single_ns / found.step_ns.high)
    assert found.scaling.high == pytest.approx(found.single_ns / found.step_ns.low)
    return found.step_ns.value - found.step_ns.low, found.step_ns.high - found.step_ns.value, found.step_ns.value


NOTHING_LOST = replace(COST, link=Link(1.9e9))


def test_the_interval_includes_the_burst_of_idle_flows() -> None:
    source = run_of(played(), replace(NOTHING_LOST, alpha_ns=0), HERE)
    below, above, value = ends_of(source, HERE)
    saved, same, _ = ends_of(source, replace(HERE, burst_bytes=250_000))
    assert saved**2 - below**2 == pytest.approx((8e9 * 250_000 / 4.78e8) ** 2, rel=1e-6)
    assert same == above
    # No step is shorter than its compute, also where several errors are combined.
    assert ends_of(source, replace(HERE, burst_bytes=1e9))[0] == pytest.approx(value - 127 * MS, abs=1)
    lossy = run_of(played(), replace(COST, link=Link(0.8 * 1.9e9)), HERE)
    saved, _, value = ends_of(lossy, replace(HERE, burst_bytes=1e9))
    assert saved == pytest.approx(value - 127 * MS, abs=1)


def test_a_rate_that_differs_from_its_caps_widens_the_interval() -> None:
    source = run_of(played(), NOTHING_LOST, HERE)
    half = replace(HERE, link_bps=1e9, flow_bps=2.5e8)
    agreed = ends_of(source, replace(half, one_flow_bps=2.39e8, many_flows_bps=0.95e9))
    lost = ends_of(source, replace(half, one_flow_bps=2.15e8, many_flows_bps=0.855e9))
    assert agreed[0] == pytest.approx(0.0, abs=2 * MS)
    assert lost[0] == pytest.approx(lost[2] - agreed[2], rel=0.05)


def test_costs_per_operation_and_per_byte_are_separated_by_size() -> None:
    # Operations of one size are off alike, as no line has it.
    off = {1 * MB: 1.2, 2 * MB: 0.9, 3 * MB: 1.1, 9 * MB: 0.97, 16 * MB: 1.02, 24 * MB: 0.99}
    exact = run_of(played(), replace(NOTHING_LOST, alpha_ns=500_000), HERE)
    exact = replace(exact, network=Network("made up", 2e9, (5e8,)))

    def stretched(one: Any) -> int:
        return int((one.start_ns or 0) + off[one.tensor_bytes] * ((one.done_ns or 0) - (one.start_ns or 0)))

    rows = tuple(replace(one, done_ns=stretched(one)) for one in exact.collectives)
    scattered = replace(exact, collectives=rows)
    small = played((100_000,) * 40, 1)
    known, loose = (fit(run, "tcp") for run in (exact, scattered))
    totals = [
        [other.fixed_ns * 6 + 8 * 55 * MB / other.link.bps * 1e9 for other in one.others] for one in (known, loose)
    ]
    for one, total in zip((known, loose), totals, strict=True):
        assert total == pytest.approx([one.cost.fixed_ns * 6 + 8 * 55 * MB / one.cost.link.bps * 1e9] * 2, rel=1e-3)
    assert known.others[0].fixed_ns == pytest.approx(known.others[1].fixed_ns, rel=0.01)
    assert loose.others[0].fixed_ns < loose.cost.fixed_ns < loose.others[1].fixed_ns
    caps = replace(HERE, many_flows_bps=None, one_flow_bps=None)
    sure, unsure = (ends_of(run, caps, small) for run in (exact, scattered))
    assert unsure[1] > 3 * sure[1]
    assert unsure[1] > 0.5 * 40 * (loose.others[1].fixed_ns - loose.cost.fixed_ns)


def test_the_interval_includes_a_fixed_cost_that_grows_with_steps() -> None:
    source = run_of(played(), replace(NOTHING_LOST, alpha_ns=2 * MS), HERE)
    _, two, _ = ends_of(source, HERE)
    _, eight, _ = ends_of(source, HERE, ranks=8)
    # 14 steps in the place of 2, each 2 ms, of the six operations: those that are not hidden behind compute.
    assert eight > two + 12 * 2 * MS
    real = run_of(played(), replace(NOTHING_LOST, alpha_ns=2 * MS), HERE, ranks=8).steps[1].duration_ns
    _, above, value = ends_of(source, HERE, ranks=8)
    assert value < real <= value + above + 1000


def test_a_run_of_one_size_is_forecast_without_alternative_lines() -> None:
    alike = played((8 * MB,) * 6)
    source = run_of(alike, replace(NOTHING_LOST, alpha_ns=0), HERE)
    assert fit(source, "tcp").others == ()
    below, above, value = ends_of(source, HERE, alike)
    assert 0 <= below < 0.01 * value
    assert 0 <= above < 0.01 * value


def test_interval_sources_are_combined_in_quadrature() -> None:
    assert widened(5.0, []) == Estimate(5.0, 5.0, 5.0)
    assert widened(5.0, [(), (5.0,)]) == Estimate(5.0, 5.0, 5.0)
    assert widened(5.0, [(4.0, 5.5)]) == Estimate(5.0, 4.0, 5.5)
    assert widened(5.0, [(6.0, 8.0)]) == Estimate(5.0, 5.0, 8.0)
    assert widened(5.0, [(2.0, 8.0), (1.0,), ()]) == Estimate(5.0, 0.0, 8.0)


def test_networks_that_cannot_be_compared_are_refused() -> None:
    predicted = forecast.make(run_of(played(), COST, HERE), played(), 2, Wire(), ["tcp"])
    assert "the two networks cannot be compared" in predicted.transports["tcp"].why
    with pytest.raises(ValueError, match="at least 1"):
        forecast.make(run_of(played(), COST, HERE), played(), 0, HERE, ["tcp"])


def test_too_few_operations_give_no_forecast_of_other_ranks() -> None:
    source = run_of(played((4 * MB, 8 * MB)), COST, HERE, steps=3)
    predicted = forecast.make(source, played((4 * MB, 8 * MB)), 8, HERE, ["tcp"])
    assert "refused to extrapolate a poor fit: only 4 operations" in predicted.transports["tcp"].why


def test_the_stored_run_is_forecast_from_itself_and_grows_with_ranks() -> None:
    source = tr.read(STORED)
    what = replay_schedule(source, Plan.of(source, "ofi"))
    here = Wire.of(source.network)
    two, eight = (forecast.make(source, what, ranks, here, ["stock", "ofi"]) for ranks in (2, 8))
    assert step_of(two, "stock") == pytest.approx(1848e6, rel=0.01)
    assert step_of(two, "ofi") == pytest.approx(565e6, rel=0.01)
    for arm in ("stock", "ofi"):
        assert step_of(eight, arm) > 1.2 * step_of(two, arm)
        assert step_of(eight, FULL_USE) < step_of(eight, arm)
    scaling = two.transports["ofi"].scaling
    assert scaling is not None
    assert scaling.low <= scaling.value <= scaling.high


def test_the_example_of_the_page_prints_a_step_or_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "what-if.md").read_text(encoding="utf-8")
    example = page.partition("## Forecast a future run")[2].partition("```python")[2].partition("```")[0]
    exec(example.replace("RUN", str(STORED)), {})
    printed = capsys.readouterr().out
    assert "stock Estimate" in printed
    assert "tcp no forecast: no all-reduce over tcp" in printed
