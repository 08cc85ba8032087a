"""Chain of claims: a fixed sequence of claims, each with the verdict and the numbers of this study.

Pure: facts in, sentences out. Every number has a label: measured, estimated (no step of one rank was measured), or
predicted. A claim without measurements says so; nothing replaces the missing numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from netbottleneck.analysis.comparisons import Estimate, Paired
from netbottleneck.analysis.thresholds import PAIRS_MIN
from netbottleneck.study.evidence import facts, values
from netbottleneck.study.evidence.facts import budgets
from netbottleneck.study.evidence.values import INFLATION, STOCK, ArmFacts, CellFacts, Outlook, with_distinct_models
from netbottleneck.trace.transports import Arm
from netbottleneck.units import gbit, nbytes, percent, streams

# Claims about the model: inflation of its compute, and equality of its results.

Statement = tuple[str, Sequence[str], Sequence[str]]  # verdict, lines, missing
Row = tuple[CellFacts, Paired]


def _line(cell: CellFacts, what: str, pair: Paired) -> str:
    change = values.percent_change(values.minus_one(pair.ratio))
    return f"{cell.key}: {what}: {change}, {pair.pairs} pairs of blocks (measured)"


def _largest_change(rows: Sequence[Row], what: str) -> str:
    """Name the largest of some changes, and whether its interval includes zero."""
    change = values.minus_one(max((pair.ratio for _, pair in rows), key=lambda one: one.value))
    doubt = ", an interval that includes 0" if change.low <= 0 <= change.high else ""
    return f"{what} {values.percent_change(change)}{doubt}"


def _unknown(hooks: Sequence[Row], traffic: Sequence[Row], timed: str) -> list[str]:
    found = [] if hooks else ["the cost of hooks: a cell of the job inflation"]
    if not traffic:
        found.append("the cost of traffic to compute: the arms null and another, with real compute")
    return [*found, *([f"compute is a timed wait, which traffic cannot slow down, in {timed}"] if timed else [])]


def inflation(cells: Sequence[CellFacts]) -> Statement:
    """Return the cost of hooks, and separately what concurrent traffic costs the compute."""
    hooks = [(cell, cell.hooks) for cell in cells if cell.hooks is not None]
    traffic = [(cell, pair) for cell in cells if cell.compute == "real" for pair in cell.contention]
    lines = [_line(cell, "hooks alone, null against bare", pair) for cell, pair in hooks]
    lines += [_line(cell, f"traffic of {pair.other}, against null", pair) for cell, pair in traffic]
    missing = _unknown(hooks, traffic, values.join_names(cell.key for cell in cells if cell.compute == "timed"))
    parts = [_largest_change(hooks, "hooks alone")] if hooks else []
    if traffic:
        parts.append(_largest_change(traffic, "traffic in addition"))
    if not parts:
        return "Compute inflation was not measured.", lines, missing
    return f"Largest change of forward and backward: {'; '.join(parts)} (measured).", lines, missing


def _training_results(cell: CellFacts) -> str:
    what = "weights" if cell.compute == "real" else "sums"
    parts = [
        f"{what} equal on all ranks, bit for bit" if cell.equal_weights else f"{what.upper()} DIFFER BETWEEN RANKS"
    ]
    if cell.same_as_stock is not None:
        parts.append("equal to stock alone" if cell.same_as_stock else "NOT EQUAL TO STOCK ALONE")
    if cell.accuracy is not None:
        alone = cell.accuracy_stock_alone
        parts.append(f"accuracy {cell.accuracy:.3f}" + (f", stock alone {alone:.3f}" if alone is not None else ""))
    return f"{cell.key}: {', '.join(parts)} (measured)"


def training_results(cells: Sequence[CellFacts]) -> Statement:
    """Return whether all ranks hold equal weights, whether they equal those of stock alone, and the accuracy.

    A replay trains nothing: its sums are compared, but it is not counted.
    """
    known = [cell for cell in cells if cell.equal_weights is not None]
    trained = [cell for cell in known if cell.compute == "real"]
    lines = [_training_results(cell) for cell in known]
    compared = [cell for cell in trained if cell.same_as_stock is not None]
    missing = [] if compared else ["a run over stock alone"]
    if not trained:
        missing = ["a cell that trains: the job digits" if known else "no cell records its weights"]
    if differ := _differing(known):
        return differ, lines, missing
    if not trained:
        return "The results of training were not compared.", lines, missing
    verdict = f"The results of training are bit-identical on all ranks in {len(trained)} of {len(trained)} cells"
    if compared:
        verdict += f", and equal to stock alone in {len(compared)} of {len(compared)} compared cells"
    return f"{verdict} (measured).", lines, missing


def _differing(cells: Sequence[CellFacts]) -> str:
    """Name the cells whose results differ, between ranks or from stock alone; "" if there are none."""
    bad = [cell for cell in cells if not cell.equal_weights or cell.same_as_stock is False]
    jobs = {"real": "The results of training", "timed": "The sums of a replay"}
    named = {what: values.join_names(cell.key for cell in bad if cell.compute == kind) for kind, what in jobs.items()}
    return " ".join(f"{what} differ in {of} (measured)." for what, of in named.items() if of)


# Claims about time: scaling factors, the link speed that is enough, stock compared with other transports.

# A factor has stopped growing at a link if every faster link increases it by at most this part.
GROWTH_MIN = 0.03
# A job scales well from this scaling factor on.
GOOD_SCALING = 0.9

Series = tuple[tuple[float, CellFacts], ...]


def base(cell: CellFacts) -> ArmFacts | None:
    """Return the arm that represents a cell: stock, else the first that moves bytes."""
    return cell.arms.get(STOCK) or next(iter(cell.transports), None)


def link_bps(cell: CellFacts) -> float | None:
    """Return the requested link speed; without a cap, the measured rate of many flows together."""
    return cell.link_bps or cell.many_flows_bps


def scaling(cells: Sequence[CellFacts]) -> Statement:
    """Report the scaling factor of every arm."""
    rows = [(cell, arm) for cell in cells for arm in cell.transports if arm.scaling is not None]
    if not rows:
        moved = any(Arm(arm.name).real for cell in cells for arm in cell.transports)
        lacks = "pairs of blocks with null, or steps of one rank" if moved else "no cell has an arm that moves bytes"
        return "Scaling factors were not measured.", (), (lacks,)
    lines = [
        f"{cell.key}, {arm.name}: {values.factor(arm.scaling)}, step {values.time(arm.step_ns)} ({values.label(cell)})"
        for cell, arm in rows
        if arm.scaling is not None
    ]
    missing = [f"{key}: T_1 is an estimate, the step less exposed communication" for key in _estimated(cells)]
    return _scaling(cells) or "The scaling factor of stock was not measured.", lines, missing


def _scaling(cells: Sequence[CellFacts]) -> str:
    """Give the smallest and the largest factor among the cells' base arms; "" if none is known."""
    of_base = [(one.scaling.value, cell, one.name) for cell in cells if (one := base(cell)) and one.scaling]
    if not of_base:
        return ""
    low, high = min(of_base, key=lambda row: row[0]), max(of_base, key=lambda row: row[0])
    named = values.join_names(name for _, _, name in of_base)
    where = f"is {low[0]:.2f} ({low[1].key}"
    if len(of_base) > 1:
        where = f"lies between {low[0]:.2f} ({low[1].key}) and {high[0]:.2f} ({high[1].key}) ({len(of_base)} cells"
    bad = "scales badly" if low[0] < GOOD_SCALING else "scales well"
    return f"The job {bad}: the scaling factor of {named} {where}; {_label((low[1], high[1]))})."


def _label(cells: Iterable[CellFacts]) -> str:
    """Return the label of what rests on the scaling factors of several cells."""
    return "estimated" if any(values.label(cell) == "estimated" for cell in cells) else "measured"


def _estimated(cells: Sequence[CellFacts]) -> Iterator[str]:
    return (cell.key for cell in cells if values.label(cell) == "estimated" and cell.transports)


def by_link(cells: Sequence[CellFacts]) -> dict[tuple[str, int, tuple[float, ...]], Series]:
    """Group cells by model, number of ranks and flow cap, sorted by link speed; groups with one link are left out."""
    found: dict[tuple[str, int, tuple[float, ...]], dict[float, CellFacts]] = defaultdict(dict)
    for cell in cells:
        bps = link_bps(cell)
        if bps is not None and cell.transports:
            found[cell.model, cell.ranks, cell.flow_bps][bps] = cell
    return {key: tuple(sorted(rows.items())) for key, rows in found.items() if len(rows) > 1}


def factors(series: Series, arm: str) -> list[tuple[float, float]]:
    """Return (link in bits a second, scaling factor) of an arm, by link."""
    return [(bps, one.scaling.value) for bps, cell in series if (one := cell.arms.get(arm)) and one.scaling]


def saturation_bps(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the slowest link beyond which the factor grows by at most GROWTH_MIN; None if it still grows."""
    for position, (bps, value) in enumerate(points[:-1]):
        if max(later for _, later in points[position + 1 :]) <= (1 + GROWTH_MIN) * value:
            return bps
    return None


def _one_link(cells: Sequence[CellFacts]) -> Statement:
    """Report that no group of cells has several link speeds, and whether one would have with one cap on flows."""
    several = by_link([replace(cell, flow_bps=()) for cell in cells])
    flows = " for each cap on its flows" if several else ""
    alike = "model, number of ranks and cap on flows" if several else "model and number of ranks"
    verdict = f"The effect of the link's bandwidth was not measured: each job ran at one link speed{flows}."
    return verdict, (), (f"cells of one {alike} at two or more link speeds",)


def bandwidth(cells: Sequence[CellFacts]) -> Statement:
    """Report where stock's factor stops growing with the link."""
    series = by_link(cells)
    if not series:
        return _one_link(cells)
    lines, stopped, growing = [], [], []
    for (model, ranks, flow), rows in series.items():
        job = f"{model} on {ranks} ranks" + (f" at {gbit(min(flow))} a flow" if flow else "")
        for arm in dict.fromkeys(arm.name for _, cell in rows for arm in cell.transports):
            points = factors(rows, arm)
            if len(points) < 2:
                continue
            end = saturation_bps(points)
            where = "still grows" if end is None else f"stops growing at {gbit(end)}"
            lines.append(f"{job}, {arm}: {', '.join(f'{gbit(bps)} {value:.3f}' for bps, value in points)}: {where}")
            if arm == STOCK:
                stopped += [f"at {gbit(end)} for {job}"] if end is not None else []
                growing += [job] if end is None else []
    return _growth(stopped, growing, _label(cell for rows in series.values() for _, cell in rows)), lines, ()


def _growth(stopped: Sequence[str], growing: Sequence[str], label: str) -> str:
    parts = [f"stops growing with the link {values.join_names(stopped)}"] if stopped else []
    parts += [f"still grows for {values.join_names(growing)}"] if growing else []
    verdict = f"Stock's scaling factor {'; it '.join(parts) or 'was not measured at two link speeds'}"
    return f"{verdict} ({label}; growth of at most {percent(GROWTH_MIN)} counts as none)."


def _compared(cells: Sequence[CellFacts]) -> tuple[list[Row], list[str]]:
    """Return the comparisons with stock whose gain may be reported, and why the gain of the others may not."""
    rows = [(cell, pair) for cell in cells for pair in cell.pairs if pair.base == STOCK and pair.enough]
    withheld = dict.fromkeys(f"{cell.key}: {cell.handicap.rstrip('.')}" for cell, _ in rows if cell.handicap)
    few = [
        f"{cell.key}, {arm}: too few pairs of blocks: {pairs}; a claim needs {PAIRS_MIN}: more rounds"
        for cell in cells
        if STOCK in cell.arms
        for arm, pairs in cell.few_pairs.items()
    ]
    return [row for row in rows if not row[0].handicap], [*withheld, *few]


def transports(cells: Sequence[CellFacts]) -> Statement:
    """Compare stock with other transports, paired by blocks; cells whose gain is withheld are only named."""
    pairs, missing = _compared(cells)
    if not pairs:
        verdict = "Stock was compared with no other transport" + (" whose gain may be reported" if missing else "")
        return f"{verdict}.", (), missing or ("pairs of blocks of stock and another transport",)
    lines = []
    for cell, pair in pairs:
        arm = cell.arms.get(pair.other)
        how = f" over {streams(arm.streams)}" if arm is not None and arm.streams else ""
        ratio = values.factor(pair.ratio)
        lines.append(f"{cell.key}: a step over {pair.other}{how} takes {ratio} of one over stock, {pair.pairs} pairs")
    faster = sum(pair.ratio.high < 1 for _, pair in pairs)
    best_cell, best = min(pairs, key=lambda row: row[1].ratio.value)
    fast, least, most = (1 / part for part in (best.ratio.value, best.ratio.high, best.ratio.low))
    verdict = (
        f"Over the same link, another transport shortens the step in {faster} of {len(pairs)} comparisons, by its "
        f"whole interval; at best the step is {fast:.2f} times ({least:.2f} to {most:.2f}) as fast as over stock "
        f"({best.other}, {best_cell.key}; measured)."
    )
    return verdict, lines, missing


# Claims about hosts: average and active rate of interfaces, use of cores.

# CPU use is low up to this part of all cores.
CPU_LOW = 0.5
# A core from this part of its time on is full, and may limit the thread on it.
CORE_FULL = 0.9


def average_at_full_use(cell: CellFacts, arm: ArmFacts) -> float | None:
    """Return the interface's average rate if the link were fully used for the same bytes a step; bits a second."""
    step_ns = full_use_ns(cell)
    return None if step_ns is None or arm.nic is None else arm.nic.average_tx_bps * arm.step_ns.value / step_ns


def step_at_full_use(cell: CellFacts) -> Estimate | None:
    """Return the step at full use of the link in ns: from the forecast, else from the run's own what-if answer."""
    forecast = cell.forecast.get("full_use")
    if forecast is not None and forecast.step_ns is not None:
        return forecast.step_ns
    return cell.outlook.full_use_ns if cell.outlook is not None else None


def full_use_ns(cell: CellFacts) -> float | None:
    """Return the step at full use of the link in ns; None if it is not known."""
    step_ns = step_at_full_use(cell)
    return None if step_ns is None else step_ns.value


def _share(bps: float, link: float | None) -> str:
    return gbit(bps) + (f" ({percent(bps / link)})" if link else "")


def _interface(cell: CellFacts, arm: ArmFacts) -> str:
    assert arm.nic is not None
    active = arm.nic.active_tx_bps
    busy = "not known, operations are too short" if active is None else _share(active, cell.link_bps)
    line = f"{cell.key}, {arm.name}: average {_share(arm.nic.average_tx_bps, cell.link_bps)}, active {busy} (measured)"
    full = average_at_full_use(cell, arm)
    return line + ("" if full is None else f"; at full use it would average {_share(full, cell.link_bps)} (predicted)")


def _retransmissions(arms: Sequence[ArmFacts]) -> list[str]:
    """Report the largest share of retransmitted TCP segments."""
    counts = [(arm.retransmitted_segments, arm.sent_segments) for arm in arms]
    shares = [again / sent for again, sent in counts if sent and again is not None]
    return [f"TCP segments retransmitted: at most {percent(max(shares), digits=2)} (measured)"] if shares else []


def _utilisation(cell: CellFacts, arm: ArmFacts | None) -> tuple[float, float, str] | None:
    """Return (active, average, arm and cell), rates as parts of the link; None if one is not known."""
    if arm is None or arm.nic is None or arm.nic.active_tx_bps is None or not cell.link_bps:
        return None
    return arm.nic.active_tx_bps / cell.link_bps, arm.nic.average_tx_bps / cell.link_bps, f"{arm.name}, {cell.key}"


def interfaces(cells: Sequence[CellFacts]) -> Statement:
    """Report what the interfaces sent: on average, and while an operation was in flight."""
    rows = [(cell, arm) for cell in cells for arm in cell.transports if arm.nic is not None]
    if not rows:
        return "The utilisation of the link was not measured.", (), ("counters of interfaces",)
    lines = [*(_interface(cell, arm) for cell, arm in rows), *_retransmissions([arm for _, arm in rows])]
    used = [one for cell in cells if (one := _utilisation(cell, base(cell))) is not None]
    if not used:
        return (
            "The utilisation of the links is not known, because their speed is not known.",
            lines,
            ("links with a cap",),
        )
    active, average, whose = min(used)
    verdict = (
        f"As little as {percent(active)} of the link is used while operations are in flight, {percent(average)} on "
        f"average ({whose}; measured). The average does not rate a transport: long compute lowers it."
    )
    return verdict, lines, ()


def processors(cells: Sequence[CellFacts]) -> Statement:
    """Report how busy the cores are."""
    rows = [(cell, arm) for cell in cells for arm in cell.arms.values() if arm.cpu is not None]
    if not rows:
        return "CPU utilisation was not measured.", (), ("counters of cores",)
    lines = []
    for cell, arm in rows:
        assert arm.cpu is not None
        kinds = ", ".join(
            f"{kind} {percent(share)}" for kind, share in arm.cpu.kinds.items() if kind != "idle" and share >= 0.01
        )
        lines.append(
            f"{cell.key}, {arm.name}: {percent(arm.cpu.busy)} of all cores ({kinds or 'idle'}), the busiest "
            f"{percent(arm.cpu.busiest)} (measured)"
        )
    used = [(arm.cpu, f"{cell.key}, {arm.name}") for cell, arm in rows if arm.cpu is not None]
    cpu, where = max(used, key=lambda row: row[0].busy)
    core, core_where = max(used, key=lambda row: row[0].busiest)
    if cpu.busy >= CPU_LOW:
        limit = "The CPUs are busy, and may be the limit"
    elif core.busiest >= CORE_FULL:
        limit = f"One core is full ({percent(core.busiest)}, {core_where}), and may be the limit"
    else:
        limit = "The CPUs are not the limit"
    return f"{limit}: at most {percent(cpu.busy)} of all cores ({where}; measured).", lines, ()


# Predicted claims: the step at full use of the link, and the compression needed.

FULL_USE = "full_use"
COMPRESSION_UNKNOWN = "The compression needed is not known."
SHORTER = "the measured step is shorter than its bound"


def bound(cell: CellFacts) -> tuple[Estimate, str] | None:
    """Return the scaling factor at full use of a cell's link and its source; None if it is not known."""
    forecast = cell.forecast.get(FULL_USE)
    if forecast is not None and forecast.scaling is not None:
        return forecast.scaling, "predicted before the run"
    own = cell.outlook.full_use if cell.outlook is not None else None
    return None if own is None else (own, "predicted from the run itself")


def parts_of_bound(cell: CellFacts) -> dict[str, float]:
    """Return by arm the part of the bound that it reached: the step at full use over the measured step."""
    full = full_use_ns(cell)
    return {} if full is None else {arm.name: full / arm.step_ns.value for arm in cell.transports}


def full_use(cells: Sequence[CellFacts]) -> Statement:
    """Compare the bound at full use with what each arm reached."""
    lines, missing, best = [], [], []
    for cell in cells:
        found = bound(cell)
        if found is None:
            if cell.transports:
                missing.append(f"{cell.key}: the speed of the link is not known, or no cost could be fitted")
            continue
        reached = parts_of_bound(cell)
        reached_by_arm = [
            f"{arm.name} {values.factor(arm.scaling)}, {percent(reached[arm.name])} of the bound ({values.label(cell)})"
            for arm in cell.transports
            if arm.scaling is not None and arm.name in reached
        ]
        lines.append(f"{cell.key}: at full use {values.factor(found[0])} ({found[1]}); {'; '.join(reached_by_arm)}")
        best += [(reached[arm.name], cell, arm.name) for arm in cell.transports if arm.name in reached]
    if not best:
        return "The bound at full use of the links is not known.", lines, missing or ("links with a known speed",)
    above = [f"{cell.key}, {arm}: {SHORTER}{_why_shorter(cell)}" for part, cell, arm in best if part > 1]
    return _reached(best), [*lines, *above], missing


def _reached(parts: Sequence[tuple[float, CellFacts, str]]) -> str:
    """Give the lowest part of the bound that arms reached (stock's, if there is stock) and the highest."""
    of_stock = [row for row in parts if row[2] == STOCK]
    least, most = min(of_stock or parts, key=lambda row: row[0]), max(parts, key=lambda row: row[0])
    why = _why_shorter(most[1]) if most[0] > 1 else ""
    sentence = (
        f"{least[2]} reaches as little as {percent(least[0])} of the bound at full use of the link "
        f"({least[1].key}); {most[2]} reaches {percent(most[0])} ({most[1].key}; measured over predicted)."
    )
    return f"{sentence} There {SHORTER}{why}." if why else sentence


def _why_shorter(cell: CellFacts) -> str:
    """Explain a step that is shorter than its bound.

    The bound assumes one ring of all ranks, as stock has, and a link rate without bursts after a pause."""
    if cell.ranks_per_host > 1:
        return ", which assumes one ring of all ranks: two levels send less between hosts"
    if cell.link_burst_bytes is None:
        return ""
    burst, whole = nbytes(cell.link_burst_bytes), nbytes(cell.tensor_bytes)
    return f", which assumes the link's rate alone: after a pause its cap passes a burst of {burst}, of {whole} a step"


@dataclass(frozen=True, slots=True)
class _Need:
    """The compression that one cell needs in one case. ratio: None if none is enough, or not known (refused): why."""

    cell: CellFacts
    where: str
    ratio: Estimate | None
    why: str
    refused: bool

    def __str__(self) -> str:
        if self.ratio is None:
            return f"{'not known' if self.refused else 'no compression is enough'} {self.where}: {self.why}"
        if self.ratio.high <= 1:
            return f"none is needed {self.where}"
        return f"{self.ratio.value:.1f}x ({self.ratio.low:.1f} to {self.ratio.high:.1f}) is needed {self.where}"


def _needs(cell: CellFacts, one: Outlook) -> tuple[_Need, _Need]:
    """Return the compression needed at the achieved rate, and at full use of the link."""
    return (
        _Need(cell, f"at {one.transport}'s achieved rate", one.ratio, one.ratio_why, one.ratio_refused),
        _Need(cell, "at full use of the link", one.full_use_ratio, one.full_use_ratio_why, one.full_use_ratio_refused),
    )


def compression(cells: Sequence[CellFacts]) -> Statement:
    """Report the least compression for a scaling factor of 0.9, and the fastest link that still helps."""
    rows = [(cell, cell.outlook) for cell in cells if cell.outlook is not None]
    if not rows:
        return COMPRESSION_UNKNOWN, (), ("a run that a cost can be fitted to",)
    needs = [_needs(cell, one) for cell, one in rows]
    lines = []
    for (cell, one), (used, full) in zip(rows, needs, strict=True):
        parts = [str(used), *([str(full)] if one.at_full_use is not None or full.refused else [])]
        if one.enough_bps is not None:
            parts.append(f"a link faster than {gbit(one.enough_bps.value)}, fully used, does not help")
        lines.append(f"{cell.key}, for {one.target:g}: {'; '.join(parts)} (predicted, without the cost of a codec)")
    missing = [f"{need.cell.key}: {need}" for pair in needs for need in pair if need.refused]
    return _compression(needs, f"a scaling factor of {rows[0][1].target:g}"), lines, missing


def _compression(needs: Sequence[tuple[_Need, _Need]], target: str) -> str:
    """Give the verdict on the compression needed."""
    used, full = (_most(own) for own in zip(*needs, strict=True))
    if full is not None:
        verdict = f"With the link fully used, at most {full[0]} compression is needed for {target} ({full[1]})"
        return verdict + (f"; at the achieved rate, up to {used[0]} ({used[1]})" if used else "") + "; predicted."
    if used is not None:
        return f"At the achieved rate, {target} needs up to {used[0]} ({used[1]}; predicted)."
    refused = any(need.refused for pair in needs for need in pair)
    beyond = _beyond([need for pair in needs for need in pair])
    if refused:
        return f"No compression gives {target} in {beyond} (predicted)." if beyond else COMPRESSION_UNKNOWN
    return f"No compression gives {target} (predicted)."


def _beyond(needs: Iterable[_Need]) -> str:
    """Name the cells in which no ratio is enough."""
    return values.join_names(need.cell.key for need in needs if need.ratio is None and need.why and not need.refused)


def _most(needs: Sequence[_Need]) -> tuple[str, str] | None:
    """Give the largest ratio needed; and its cell, with the cells in which none is enough, or in which it is not known.

    None if no ratio is known.
    """
    known = [(need.ratio.value, need.cell.key) for need in needs if need.ratio is not None]
    if not known:
        return None
    most, key = max(known, key=lambda row: row[0])
    beyond, refused = _beyond(needs), values.join_names(need.cell.key for need in needs if need.refused)
    more = [*([f"no ratio is enough in {beyond}"] if beyond else []), *([f"not known in {refused}"] if refused else [])]
    return f"{most:.1f}x", "; ".join([key, *more])


# The chain of claims.


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim. verdict: a sentence; lines: its numbers, cell by cell; missing: what was not measured."""

    name: str
    title: str
    verdict: str
    lines: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def _forecasts(cells: Sequence[CellFacts]) -> Statement:
    record = facts.forecast_record(cells)
    refused = [f"{key}, {arm}: refused: {why}" for key, arm, why in record.refused]
    if not record.forecast_errors:
        return (
            "The prediction error is not known: no cell was forecast before it ran.",
            (),
            refused or ("no cell has a forecast",),
        )
    count, worst = len(record.forecast_errors), record.worst
    verdict = (
        f"Of {count} steps that were predicted before they ran, the median error is {percent(record.median)}, the "
        f"worst {percent(abs(worst.error))} ({worst.key}, {worst.arm}); {record.within(facts.GOOD)} are within "
        f"{percent(facts.GOOD)}, {record.within(facts.FAIR)} within {percent(facts.FAIR)}; in "
        f"{record.exposed} at least {percent(facts.EXPOSED_MIN)} of the step is exposed communication."
    )
    lines = [
        f"{miss.key}, {miss.arm}: predicted {values.time(miss.predicted_ns)}, "
        f"measured {values.time(miss.measured_ns)}: {percent(miss.error, digits=1, signed=True)}"
        for miss in record.forecast_errors
    ]
    return verdict, lines, refused


def _losses(cells: Sequence[CellFacts]) -> Statement:
    found = budgets(cells)
    if not found:
        return "The loss budget is not known: no step could be split.", (), ("no arm with parts and a scaling factor",)
    first = max((one for one in found if one.arm == "stock"), default=found[0], key=lambda one: one.loss)
    names = ("exposed", "inflation", "host_internal", "other")
    named = {"exposed": "exposed network communication", "host_internal": "inside hosts"}
    largest = max(names, key=lambda name: getattr(first, name))
    label = next(values.label(cell) for cell in cells if cell.key == first.key)
    verdict = (
        f"The largest loss of {first.arm} is {percent(first.loss)} of the step ({first.key}); the largest part of it, "
        f"{percent(getattr(first, largest))}, is {named.get(largest, largest)} ({label})."
    )
    lines = [
        f"{one.key}, {one.arm}: 1 - scaling factor {one.loss:.3f} = host-internal {one.host_internal:.3f} + inflation "
        f"{one.inflation:.3f} + exposed network {one.exposed:.3f} + other {one.other:.3f} (of it waiting "
        f"{one.waiting:.3f})"
        for one in found
    ]
    return verdict, lines, tuple(dict.fromkeys(note for one in found for note in one.notes))


CLAIMS: tuple[tuple[str, str, Callable[[Sequence[CellFacts]], Statement]], ...] = (
    ("scaling", "Scaling factor", scaling),
    ("compute", "Computation", inflation),
    ("harm", "Training results", training_results),
    ("bandwidth", "Link bandwidth", bandwidth),
    ("nic", "Link utilisation", interfaces),
    ("cpu", "CPU utilisation", processors),
    ("transports", "Transport", transports),
    ("full use", "Full use of the link", full_use),
    ("compression", "Gradient compression", compression),
    ("prediction", "Prediction error", _forecasts),
    ("budget", "Loss budget", _losses),
)


def chain(cells: Sequence[CellFacts]) -> tuple[Claim, ...]:
    """Return every claim, in the order of the argument, including those without measurements."""
    found = []
    cells = with_distinct_models(cells)
    trained = [cell for cell in cells if cell.job != INFLATION]
    for name, title, state in CLAIMS:
        verdict, lines, missing = state(cells if state == inflation else trained)
        found.append(Claim(name, title, verdict, tuple(lines), tuple(missing)))
    return tuple(found)
