"""The findings in sentences, and the report for the terminal and report.txt."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from netbottleneck.analysis import usage
from netbottleneck.analysis.bandwidth import Achieved
from netbottleneck.analysis.comparisons import Costs, Estimate, Travel
from netbottleneck.analysis.findings import Findings, Parts, best_gain, stock_is_as_good
from netbottleneck.analysis.intervals import Layer, device_error_ns, uncounted
from netbottleneck.analysis.joins import Join, unfinished
from netbottleneck.analysis.nccl import NcclMean, nccl_label
from netbottleneck.analysis.rule_facts import RuleResult, own_cost
from netbottleneck.analysis.thresholds import GAIN_MIN
from netbottleneck.analysis.traffic import ArmLink
from netbottleneck.analysis.usage import NO_CONNECTIONS, Connected, ConnectionUse, HostUse, packet_loss, total_of
from netbottleneck.analysis.verdict import Verdict
from netbottleneck.report import caveats
from netbottleneck.trace.files import printable
from netbottleneck.trace.model import TransportInfo
from netbottleneck.trace.transports import BARE, MEANING, NATIVE, PSEUDO, Arm
from netbottleneck.units import gbit, listed, ms, nbytes, percent, short, spread, streams

# Findings in sentences. Each number is labelled measured or predicted; unknown values are left out.

# Waiting for a rank is named only if it is at least this part of the step.
LATE_SHARE_MIN = 0.01
# The mean of recorded steps is named if it is longer than the usual step by this part, and what is this part of either.
LONGER, LONGER_PART = 0.2, 0.1
# Of fewer steps, the first one may be longer for a reason of its own.
LONGER_STEPS_MIN = 20
# Waiting for negotiation below this part of exposed communication and waiting is not named beside it.
NEGLIGIBLE_SHARE = 0.01


def sentences(findings: Findings, verdict: Verdict | None = None) -> list[str]:
    """Opening sentences of a report. verdict: adds the step that it predicts."""
    base = findings.base
    if base is None and findings.trace.groups:
        return unfinished(findings.trace, findings.joins)
    if base is None:
        return [no_split(findings)]
    parts = findings.parts[base]
    if parts.operations == 0 and findings.trace.size > 1:
        texts = [f"Your step takes {ms(parts.step_ns)}; none of its communication was recorded ({findings.label})."]
    else:
        exposed = f"{ms(parts.exposed_ns)} is exposed communication ({findings.label})."
        texts = [f"Of your {ms(parts.step_ns)} step, {exposed}"]
    texts += _apart(findings, parts) + _single_steps(findings, parts)
    texts += _bandwidth(findings, base)
    if verdict is not None and verdict.full_use is not None:
        texts.append(f"At full use the step would be {ms(verdict.full_use.step_ns)} (predicted).")
    texts += _comparison(findings)
    return texts + [one for one in (own_cost(findings), _late(findings, parts)) if one]


def _late(findings: Findings, parts: Parts) -> str:
    """Who makes the others wait, step after step, and what they wait more in single steps; "" if it is negligible."""
    late = findings.lateness
    if late is None or late.straggler is None:
        return ""
    waited_ns, others_ns = late.persistent_ns.value, late.random_ns.value
    if waited_ns < max(LATE_SHARE_MIN * parts.step_ns, findings.clock_error_ns):
        return ""
    more = f"; for whichever rank is last in a step, {ms(others_ns)} more" if others_ns > waited_ns else ""
    return f"{late.waited}{more} ({findings.label})."


def _unrecorded_ns(parts: Parts) -> float:
    return parts.other_ns - parts.input_ns - parts.evaluation_ns - parts.checkpoint_ns


def _apart(findings: Findings, parts: Parts) -> list[str]:
    """The parts of the usual step of which no verdict is made, where they are large."""
    of_step = {
        "evaluation": parts.evaluation_ns,
        "checkpoints": parts.checkpoint_ns,
        "other code": _unrecorded_ns(parts),
    }
    large = {name: ns for name, ns in of_step.items() if ns >= LONGER_PART * parts.step_ns}
    return [f"{ms(ns)} of the step go to {name} ({findings.label})." for name, ns in large.items()]


def _single_steps(findings: Findings, usual: Parts) -> list[str]:
    """What single steps add to the usual one, as a checkpoint in every tenth step does."""
    whole, mean_ns = findings.whole, findings.mean_ns
    few = whole is None or whole.steps < LONGER_STEPS_MIN * findings.trace.size
    if whole is None or few or mean_ns <= (1 + LONGER) * usual.step_ns:
        return []
    longer_ns = {
        "checkpoints": whole.checkpoint_ns - usual.checkpoint_ns,
        "evaluation": whole.evaluation_ns - usual.evaluation_ns,
        "input": whole.input_ns - usual.input_ns,
        "compute": whole.compute_ns - usual.compute_ns,
        "exposed communication": whole.exposed_ns + whole.wait_ns - usual.exposed_ns - usual.wait_ns,
        "other code": _unrecorded_ns(whole) - _unrecorded_ns(usual),
    }
    most = sorted(longer_ns, key=lambda name: -longer_ns[name])
    most = [name for name in most if longer_ns[name] >= LONGER_PART * whole.step_ns]
    waits = 2 * (whole.skew_ns - usual.skew_ns) >= longer_ns["exposed communication"]
    of_it = {"exposed communication": " (most of it waiting for the slowest rank)" if waits else ""}
    more = ", ".join(f"{ms(longer_ns[name])} more {name}{of_it.get(name, '')}" for name in most)
    in_part = any(rank.run_steps for rank in findings.trace.ranks)
    steps = "the steps recorded in detail" if in_part else "all recorded steps"
    mean = f"the mean of {steps} is {ms(mean_ns)}" + (f", with {more}" if most else "")
    longer = mean_ns - whole.step_ns >= LONGER_PART * mean_ns
    bare = f". Most of that is in steps of the untouched script ({BARE}), whose parts are not known" if longer else ""
    return [f"Single steps are much longer: {mean} ({findings.label}){bare}."]


def no_split(findings: Findings) -> str:
    """Sentence: why no step of a run has parts."""
    why = uncounted(findings.trace) or "the run has no step, or only steps of the untouched script."
    return f"No step could be split: {why}"


def _bandwidth(findings: Findings, base: Arm) -> list[str]:
    achieved, achievable = findings.achieved.get(base), findings.achievable
    if achieved is None:
        return []
    rates = f"{gbit(achieved.active_bps)} in transfer, {gbit(achieved.average_bps)} over the step"
    moved = f"The {base} path moved data at {rates}"
    label = findings.label
    if achievable is None:
        return [f"{moved} ({label})."]
    can = next((f"{gbit(bps)} with {streams(n)}" for n, bps in achievable.points if bps > achieved.active_bps), None)
    if achievable.bps > achieved.active_bps:
        can = f"{gbit(achievable.bps)} {achievable.how}"
    if can is None:
        return [f"{moved} ({label}); a probe of these hosts found nothing faster ({label})."]
    return [f"{moved} ({label}); these hosts can do {can} ({label})."]


def why_not_probed(findings: Findings) -> str:
    """Reason why the rates of other stream counts are unknown."""
    infos = [i for rank in findings.trace.ranks for i in rank.transports if i.name in NATIVE]
    if findings.trace.origin != "measured":
        return "a simulated run has no probe"
    if not infos:
        names = [name for name in findings.trace.arms if name not in PSEUDO]
        return f"transport {', '.join(names) or 'none'} only"
    return _why_no_probe_ran(infos)


def _why_no_probe_ran(infos: Sequence[TransportInfo]) -> str:
    if all(i.shm == "on" for i in infos):
        return "the ranks of one host shared memory; with NETBOTTLENECK_SHM=0 they use the network"
    fixed = sorted({i.streams_asked for i in infos if i.streams_asked})
    if fixed:
        return f"streams fixed by NETBOTTLENECK_STREAMS={', '.join(map(str, fixed))}"
    if all(i.streams_asked == 0 for i in infos):
        return "no transfer was large enough, and smaller ones took less than 10 s"
    return "the record gives no reason"


def costs(findings: Findings) -> list[str]:
    """Cost of a step, of a byte and of an addition: one line for each transport that measured it."""
    return [
        f"Costs over {name} ({findings.label}): a step {short(c.step_ns)}, a byte on the wire {short(c.byte_ns)}, "
        f"a byte added {short(c.added_ns)}{_levels(c)}."
        for name, c in findings.costs.items()
    ]


def _levels(c: Costs) -> str:
    if c.levels_ns is None or c.levels_byte_ns is None:
        return ""
    return f", two levels add {short(c.levels_ns)} and {short(c.levels_byte_ns)} a byte"


def link_text(findings: Findings) -> str:
    """The base's link with its rate, and the busbw at which it is full if that is another; "" if it is not known."""
    name = "the link" if len({link.bps for link in findings.links.values()}) < 2 else f"the link of {findings.base}"
    rate, full = (None if bps is None else gbit(bps) for bps in (findings.link_bps, findings.full_link_bps))
    return "" if rate is None else f"{name}, {rate}" if rate == full else f"{name}, {rate}, full at a busbw of {full}"


def _exceeds(link: ArmLink | None, found: Achieved) -> bool:
    """True if an arm moved data faster than its link."""
    return link is not None and link.used(found)[0] > 1


def beyond_the_link(findings: Findings) -> list[str]:
    """Explanation of a transfer rate above the link's, if the link's cap explains it."""
    burst_bytes = findings.link_burst_bytes
    faster = [name for name, found in findings.achieved.items() if _exceeds(findings.links.get(name), found)]
    if not faster or burst_bytes is None:
        return []
    names = " and ".join(faster)
    return [f"{names} moved data faster than the link: after a pause its cap passes a burst of {nbytes(burst_bytes)}."]


def algorithms(findings: Findings) -> list[str]:
    """All-reduce algorithms by size: one line for each transport that recorded them."""
    return [
        f"All-reduces over {name} ({findings.label}): {', '.join(map(_algorithm, found))}."
        for name, found in findings.travels.items()
    ]


def _algorithm(one: Travel) -> str:
    least, most = nbytes(one.least_bytes), nbytes(one.most_bytes)
    name = one.algorithm.removesuffix(" all-reduce").replace("two_level", "two levels")
    return f"{name} {least} x{one.operations}" if least == most else f"{name} {least} to {most} x{one.operations}"


def _comparison(findings: Findings) -> list[str]:
    pair = best_gain(findings)
    if pair is not None:
        gain = pair.gain
        return [
            f"With {pair.other} the step is {percent(gain.value)} shorter, {percent(gain.low)} to {percent(gain.high)} "
            f"({findings.label})."
        ]
    if stock_is_as_good(findings):
        tried = ", ".join(p.other for p in findings.comparisons if p.enough)
        return [f"The {findings.base} path is as good as {tried} ({findings.label})."]
    return []


# The report: 80 columns, colour only if the terminal supports it.

WIDTH = 80
TOP_LAYERS = 8


def make_table(*columns: str) -> Table:
    """Return an empty table; all columns but the first are numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        table.add_column(column, justify="right", overflow="fold")
    return table


def put_row(table: Table, *cells: str) -> None:
    """Add cells without interpreting markup in them."""
    table.add_row(*map(Text, cells))


def waiting_for_the_slowest(parts: Parts, size: int) -> str:
    """Sentence: the part of exposed communication and waiting that is due to the slowest rank; "" if negligible."""
    idle_ns = parts.exposed_ns + parts.wait_ns
    if size < 2 or parts.skew_ns < LATE_SHARE_MIN * parts.step_ns or parts.skew_ns <= 0:
        return ""
    what = (
        "exposed communication" if parts.wait_ns < NEGLIGIBLE_SHARE * idle_ns else "exposed communication and waiting"
    )
    return f"{bare_ms(parts.skew_ns)} of {ms(idle_ns)} of {what} is waiting for the slowest rank."


# A part of a part of the step has a row from this share of the step on.
ROW_SHARE = 0.005


def _split_table(findings: Findings) -> tuple[str, Table]:
    table = make_table("", *findings.parts)
    step = {name: parts.step_ns for name, parts in findings.parts.items()}

    def row(label: str, attribute: str) -> None:
        cells = []
        for name, parts in findings.parts.items():
            ns = getattr(parts, attribute)
            cells.append(f"{ms(ns)} {ns / step[name] * 100:3.0f} %" if step[name] else "-")
        put_row(table, label, *cells)

    def row_if_any(label: str, attribute: str) -> None:
        if any(getattr(parts, attribute) >= ROW_SHARE * parts.step_ns > 0 for parts in findings.parts.values()):
            row(label, attribute)

    row("compute", "compute_ns")
    row_if_any("  of it optimizer", "optimizer_ns")
    row("  of it hidden communication", "hidden_ns")
    row("exposed communication", "exposed_ns")
    row("waiting for negotiation", "wait_ns")
    row("other", "other_ns")
    for what in ("input", "evaluation", "checkpoint"):
        row_if_any(f"  of it {what}", f"{what}_ns")
    row("step", "step_ns")
    if any(parts.skew_ns > 0 for parts in findings.parts.values()):
        row("waiting for the slowest rank", "skew_ns")
    row_if_any("our own work between steps", "own_ns")
    return f"Parts of a step: mean of {findings.averaged} ({findings.label})", table


def _bar(parts: Parts, width: int = 60) -> Text:
    """A step drawn to scale: # compute, = hidden, ! exposed, . waiting, - other."""
    pieces = (
        ("#", "green", parts.compute_ns - parts.hidden_ns),
        ("=", "cyan", parts.hidden_ns),
        ("!", "red", parts.exposed_ns),
        (".", "yellow", parts.wait_ns),
        ("-", "bright_black", parts.other_ns),
    )
    text = Text()
    done = reached = 0
    for mark, style, ns in pieces:
        reached += int(ns)
        cells = round(width * reached / parts.step_ns) - done if parts.step_ns else 0
        text.append(mark * cells, style=style)
        done += cells
    return text


def _top(layers: Sequence[Layer]) -> list[Layer]:
    return sorted(layers, key=lambda layer: (-layer.exposed_ns, -layer.backward_ns, layer.name))[:TOP_LAYERS]


def _layer_table(findings: Findings) -> tuple[str, Table]:
    table = make_table("layer", "gradients", "forward", "backward", "exposed")
    for layer in _top(findings.layers):
        forward = "-" if layer.forward_ns is None else ms(layer.forward_ns)
        put_row(table, layer.name, nbytes(layer.bytes), forward, ms(layer.backward_ns), ms(layer.exposed_ns))
    left = len(findings.layers) - TOP_LAYERS
    if left > 0:
        rest = sum(layer.exposed_ns for layer in findings.layers) - sum(x.exposed_ns for x in _top(findings.layers))
        put_row(table, f"{left} more", "", "", "", ms(rest))
    return f"Layers under {findings.base} (exposed: {findings.label} per bucket, attributed by bytes)", table


def link_rates(findings: Findings) -> str:
    """The rate of the link of the arms that moved data; of each arm, if they differ; "" if it is not known."""
    links = findings.links
    rates = {name: gbit(links[name].bps) for name in findings.achieved if name in links}
    if len(set(rates.values())) < 2:
        return next(iter(rates.values()), "")
    return ", ".join(f"{rate} for {name}" for name, rate in rates.items())


def bandwidth_table(findings: Findings) -> tuple[str, Table]:
    """Achieved bandwidth by transport, with the title of the table."""
    links, link = findings.links, link_rates(findings)
    rated = "" if findings.trace.network else ", as its interface states or as declared"
    title = f"Achieved, busbw one way ({findings.label}); " + (f"the link is {link}{rated}" if link else "link unknown")
    table = make_table("transport", "in transfer", "p10-p90", "over the step", *(("of link",) if link else ()))
    for name, found in findings.achieved.items():
        cells = [
            gbit(found.active_bps),
            spread(found.p10_bps, found.p90_bps, found.active_bps),
            gbit(found.average_bps),
        ]
        if link:
            cells.append(", ".join(map(percent, links[name].used(found))) if name in links else "-")
        put_row(table, name, *cells)
    return title, table


def _probe_line(findings: Findings) -> str:
    achievable = findings.achievable
    if achievable is None:
        return f"Achievable: not probed ({why_not_probed(findings)})."
    points = ", ".join(f"{count}: {gbit(rate)}" for count, rate in achievable.points)
    return f"Achievable by streams ({findings.label}, probe over {achievable.transport}): {points}."


def bare_ms(ns: float) -> str:
    """Milliseconds without the unit."""
    return ms(ns).removesuffix(" ms")


@dataclass(frozen=True, slots=True)
class Difference:
    """A paired difference of an arm's step to the base's. enough: its interval is known."""

    ns: Estimate
    enough: bool
    withheld: bool = False


def differences(findings: Findings) -> dict[Arm, Difference]:
    """The differences to the base, by arm. That of the untouched script is our own cost with the other sign."""
    found = {
        pair.other: Difference(pair.difference_ns, pair.enough, findings.handicapped) for pair in findings.comparisons
    }
    own = findings.handicap
    if own is not None:
        cost = own.difference_ns
        found[BARE] = Difference(Estimate(-cost.value, -cost.high, -cost.low), own.enough)
    return found


def _transport_table(findings: Findings) -> tuple[str, Table]:
    compared = ("difference, 95 %",) if findings.base is not None else ()
    table = make_table("transport", "mean step" if findings.mixed else "step", "p10-p90 ms", "steps/blocks", *compared)
    pairs = differences(findings)
    for name, time in findings.times.items():
        pair = pairs.get(name)
        if pair is None:
            difference = ""
        elif pair.withheld:
            difference = "withheld"
        else:
            interval = f" ({bare_ms(pair.ns.low)} to {bare_ms(pair.ns.high)})" if pair.enough else " (no interval)"
            difference = ms(pair.ns.value) + interval
        spread = f"{bare_ms(time.p10_ns)}-{bare_ms(time.p90_ns)}"
        cells = (name, ms(findings.typical_ns(time)), spread, f"{time.steps}/{time.blocks}")
        put_row(table, *cells, *([difference] if compared else []))
    meant = "; ".join(f"{name}: {MEANING[name]}" for name in findings.times if name in PSEUDO)
    pairing = f", difference to {findings.base} paired by block" if compared else ""
    title = f"Step by transport{pairing} ({findings.label})"
    return title + (f". {meant[0].upper()}{meant[1:]}" if meant else ""), table


NO_SCALING = "Scaling factor: not estimated, as not all communication of a step is in this record."


def _scaling_table(findings: Findings) -> tuple[str, Table]:
    table = make_table("transport", "T_1 / T_n", "T_1", "", f"T_{findings.trace.size}")
    for name, s in findings.scaling.items():
        put_row(table, name, f"{s.factor:.2f}", ms(s.t1_ns), s.how, ms(s.tn_ns))
    return "Scaling factor", table


def _print_table(console: Console, title: str, table: Table) -> None:
    console.print(title, style="bold", highlight=False, markup=False)
    console.print(table)


def _hosts_table(hosts: Sequence[HostUse], links: Mapping[Arm, ArmLink]) -> tuple[str, Table]:
    """Each host's busiest interface, or all of its links, average and active, and its cores."""
    table = make_table("host", "transport", "way", "active", "average", "CPU", "busiest", "TCP resent")
    for host in hosts:
        first = host.busiest
        link = None if first == usage.LOOPBACK else links.get(host.arm)
        if not host.interfaces:  # its record is missing
            put_row(table, f"{host.rank} -", host.arm, "-", "-", "-", *core_cells(host), retransmitted(host))
        for number, use in enumerate(use for use in host.interfaces if use.interface == first):
            cells = [
                "-" if bps is None else f"{bps / 1e9:.2f}" + (f" {100 * bps / link.bps:.0f}%" if link else "")
                for bps in (use.active_bps, use.average_bps)
            ]
            rest = ["", "", ""] if number else [*core_cells(host), retransmitted(host)]
            put_row(table, f"{host.rank} {first}" if not number else "", host.arm, use.way, *cells, *rest)
    return "Interfaces in Gbit/s with headers, and cores (measured by the kernel's counters)", table


NCCL_TITLE = "NCCL's operations: kernel, and parts of the network time (measured by NCCL's profiler)"
NCCL_COLUMNS = ("kernel", "network", "wire", "peer", "GPU", "not split")
TOP_OPERATIONS = 8


def nccl_cells(mean: NcclMean) -> tuple[str, ...]:
    """The columns of NCCL_COLUMNS for one bucket or function."""
    parts = (mean.wire_ns, mean.peer_wait_ns, mean.gpu_wait_ns, mean.unknown_ns)
    shares = [percent(ns / mean.network_ns) if mean.network_ns else "-" for ns in parts]
    return ("-" if mean.kernel_ns is None else ms(mean.kernel_ns), ms(mean.network_ns), *shares)


JOINS_TITLE = "Operations of the process groups (measured by the flight recorder)"
JOIN_COLUMNS = ("group", "numbers", "size", "times", "not over", "not joined")


def join_rows(joins: Sequence[Join]) -> list[tuple[str, ...]]:
    """An operation with the columns of JOIN_COLUMNS, for each group, place in the script and size; open ones first."""
    alike: dict[tuple[str, str, int | None], list[Join]] = {}
    for one in joins:
        alike.setdefault((one.name, f"{one.group.name} {one.group.description}".strip(), one.bytes), []).append(one)
    rows = []
    for (name, group, size), own in alike.items():
        numbers = f"{own[0].number}" if len(own) == 1 else f"{own[0].number} to {own[-1].number}"
        waiting = [sum(bool(one.waiting) for one in own), sum(bool(one.missing) for one in own)]
        shown = "-" if size is None else nbytes(size)
        rows.append((name, group, numbers, shown, str(len(own)), *(str(count or "-") for count in waiting)))
    return sorted(rows, key=lambda row: row[-2:] == ("-", "-"))


def _nccl_table(findings: Findings) -> tuple[str, Table]:
    """The operations with the longest network time."""
    table = make_table("operation", *NCCL_COLUMNS)
    for mean in findings.nccl[:TOP_OPERATIONS]:
        label = nccl_label(mean, findings.nccl)
        put_row(table, f"{label} {nbytes(mean.bytes)} x{mean.operations}", *nccl_cells(mean))
    return NCCL_TITLE, table


CONNECTIONS_TITLE = "TCP connections: what limits them while data wait (measured by the kernel)"
CONNECTION_COLUMNS = ("sent", "resent", "RTT ms", "Gbit/s", "window", "buffer")
TOP_CONNECTIONS = 3  # of an arm
# A connection has a row if the receive window or the send buffer limits it for this part of its busy time.
LIMITED_MIN = 0.05


def _connection_cells(end: ConnectionUse) -> tuple[str, ...]:
    shares = (end.of_busy(end.receiver_s), end.of_busy(end.buffer_s))
    return (
        nbytes(end.sent_bytes),
        "-" if end.resent_share is None else percent(end.resent_share, digits=2),
        "-" if end.rtt_s is None else bare_ms(end.rtt_s * 1e9),
        "-" if end.delivery_bps is None else f"{end.delivery_bps / 1e9:.2f}",
        *("-" if share is None else f"{100 * share:.0f}%" for share in shares),
    )


def connection_rows(connected: Connected) -> list[tuple[str, ...]]:
    """Name and CONNECTION_COLUMNS: of each arm the worst connections, then all. A name is "arm rank:port to peer"."""
    rows = []
    for arm in dict.fromkeys(end.arm for end in connected.ends):
        ends = [end for end in connected.ends if end.arm == arm]
        worst = sorted(ends, key=lambda end: (not end.lossy, -end.limited_share, -(end.resent_share or 0.0)))
        for end in worst[:TOP_CONNECTIONS]:
            if end.lossy or end.limited_share >= LIMITED_MIN:
                peer = end.remote[0] if end.peer is None else str(end.peer)
                rows.append((f"{arm} {end.rank}:{end.local[1]} to {peer}", *_connection_cells(end)))
        rows.append((f"{arm}, all {len(ends)}", *_connection_cells(total_of(ends))))
    return rows


def connection_lines(connected: Connected) -> list[str]:
    """Sentences: the worst packet loss of each arm, and the connections that were not recorded."""
    losses = (packet_loss(connected, arm) for arm in dict.fromkeys(end.arm for end in connected.ends))
    found = [line for line in losses if line]
    if connected.left_out:
        found.append(f"{connected.left_out} connections with the fewest bytes were not recorded.")
    if connected.missing:
        found.append(f"Connections of rank {listed(connected.missing)}'s host were not recorded.")
    return found


def core_cells(host: HostUse) -> tuple[str, str]:
    """The busy share of a host's cores, and of its busiest core; "-" if not known."""
    if host.cores is None:
        return "-", "-"
    idle = host.cores.mean["idle"] + host.cores.mean["iowait"]
    return percent(1 - idle), percent(host.cores.busiest_share)


def retransmitted(host: HostUse) -> str:
    """The share of a host's TCP segments that were sent again; "-" if not known."""
    if not host.sent_segments or host.retransmitted_segments is None:
        return "-"
    return percent(host.retransmitted_segments / host.sent_segments, digits=2)


def saving_text(one: RuleResult) -> str:
    """The saving of a rule with its interval; "-" if its condition does not hold."""
    if not one.applies or one.saving is None:
        return "-"
    return ("at most " if one.at_most else "") + interval_text(one.saving)


def interval_text(value: Estimate) -> str:
    """A time with its interval."""
    return f"{ms(value.value)} ({bare_ms(value.low)} to {bare_ms(value.high)})"


def margin_text(one: RuleResult) -> str:
    """How far the saving is surely above the limit."""
    return "-" if one.margin is None else percent(one.margin, signed=True)


def fired_text(one: RuleResult) -> str:
    """Whether a rule fired."""
    return "yes" if one.fired else "perhaps" if one.uncertain else "no"


def _evidence_table(verdict: Verdict) -> tuple[str, Table]:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, justify in (("cause", "left"), ("counts", "left"), ("saving, 95 %", "right"), ("margin", "right")):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    table.add_column("rests on", overflow="fold")
    for one in verdict.evidence:
        put_row(table, one.cause, fired_text(one), saving_text(one), margin_text(one), one.rests)
    title = f"Rules: what a step would save; one counts if it is surely above {percent(GAIN_MIN)} of the step"
    return title, table


def secondary(verdict: Verdict) -> str:
    """The causes beside the verdict, with their savings; "" if there is none."""
    return ", ".join(f"{one.cause} ({saving_text(one)})" for one in verdict.secondary)


def _print_connections(console: Console, connected: Connected) -> None:
    table = make_table("connection", *CONNECTION_COLUMNS)
    for row in connection_rows(connected):
        put_row(table, *row)
    if connected.ends:
        _print_table(console, CONNECTIONS_TITLE, table)
    for line in connection_lines(connected):
        console.print(line, highlight=False, markup=False)


def render(
    findings: Findings,
    verdict: Verdict,
    console: Console,
    hosts: Sequence[HostUse] = (),
    connected: Connected = NO_CONNECTIONS,
) -> None:
    """Print the report."""
    trace = findings.trace
    console.print(" ".join(sentences(findings, verdict)), style="bold", highlight=False, markup=False)
    console.print()
    about = [
        f"{trace.size} rank{'s' if trace.size != 1 else ''}",
        trace.model,
        trace.network.how if trace.network else "",
        trace.origin,
    ]
    error_ns = device_error_ns(trace)
    if error_ns is not None:
        about.append(f"times of the GPUs, within {short(error_ns)} of the hosts' clocks")
    console.print(f"Run {trace.id}: {', '.join(part for part in about if part)}.", highlight=False, markup=False)
    for warning in caveats.warnings(findings):
        console.print(f"! {warning}", style="yellow", highlight=False, markup=False)
    console.print()
    if findings.base is not None:
        for name, parts in findings.parts.items():
            console.print(Text(f"{name:>8} ").append(_bar(parts)))
        console.print("         # compute  = with hidden communication  ! exposed  . waiting  - other", highlight=False)
        console.print()
        _print_table(console, *_split_table(findings))
        waiting = waiting_for_the_slowest(findings.parts[findings.base], trace.size)
        if waiting:
            console.print(f"{waiting}\n", highlight=False, markup=False)
        if findings.layers:
            _print_table(console, *_layer_table(findings))
        if findings.achieved:
            _print_table(console, *bandwidth_table(findings))
        if findings.nccl:
            _print_table(console, *_nccl_table(findings))
        if hosts:
            _print_table(console, *_hosts_table(usage.by_link(findings.trace, hosts), findings.links))
        _print_connections(console, connected)
        for line in (*beyond_the_link(findings), _probe_line(findings), *costs(findings), *algorithms(findings)):
            console.print(line, highlight=False, markup=False)
        console.print()
    _print_runs(console, findings)
    _print_verdict(console, verdict)


def _print_runs(console: Console, findings: Findings) -> None:
    """Print the tables over all steps, and over the operations of a run without steps."""
    if findings.joins:
        table = make_table("operation", *JOIN_COLUMNS)
        for row in join_rows(findings.joins):
            put_row(table, *row)
        _print_table(console, JOINS_TITLE, table)
    if findings.times:
        _print_table(console, *_transport_table(findings))
    if findings.scaling:
        _print_table(console, *_scaling_table(findings))
    elif findings.not_recorded:
        console.print(NO_SCALING, highlight=False, markup=False)


def _print_verdict(console: Console, verdict: Verdict) -> None:
    if verdict.evidence:
        _print_table(console, *_evidence_table(verdict))
    lines = {"Verdict": verdict.code, "Why": verdict.why, "Next": verdict.next, "Secondary": secondary(verdict)}
    for label, content in ((label, content) for label, content in lines.items() if content):
        console.print(Text(f"{label}: ", style="bold").append(content, style="not bold"))


def text(
    findings: Findings,
    verdict: Verdict,
    hosts: Sequence[HostUse] = (),
    connected: Connected = NO_CONNECTIONS,
) -> str:
    """Content of report.txt: plain, without trailing blanks."""
    return plain(lambda console: render(findings, verdict, console, hosts, connected))


def plain(draw: Callable[[Console], None]) -> str:
    """Return what `draw` prints, in WIDTH columns, without colour and trailing blanks."""
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        width=WIDTH,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
        emoji=False,
    )
    draw(console)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def screen(console: Console | None = None) -> Console:
    """Return a console, by default stdout, with at most WIDTH columns; rich handles NO_COLOR and pipes."""
    shown = console or Console(force_jupyter=False, emoji=False)
    shown.width = min(shown.width, WIDTH) if shown.is_terminal else WIDTH
    return shown


class _Unread(Console):
    """A console that ends nothing if no one reads its output."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


@contextlib.contextmanager
def beside_script() -> Iterator[Console]:
    """A console on stdout that shares no buffer with the script, so that a closed pipe does not concern the script."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if not isinstance(sys.stdout, io.TextIOWrapper):  # of a notebook, for example: its descriptor is another output
        yield _Unread(force_jupyter=False, emoji=False)
        return
    try:
        number = os.dup(sys.stdout.fileno())
    except OSError:  # no file, as where stdout is captured
        yield _Unread(force_jupyter=False, emoji=False)
        return
    with (
        contextlib.suppress(BrokenPipeError),  # of what the file still holds
        open(number, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors) as own,
    ):
        yield _Unread(file=own, force_jupyter=False, emoji=False)


def show(
    findings: Findings,
    verdict: Verdict,
    console: Console | None = None,
    hosts: Sequence[HostUse] = (),
    page: Path | None = None,
    connected: Connected = NO_CONNECTIONS,
) -> None:
    """Print the report, at most WIDTH columns; rich handles NO_COLOR and pipes. page: path printed at the end."""
    shown = screen(console)
    render(findings, verdict, shown, hosts, connected)
    if page is not None:
        show_page(shown, page)


def show_page(console: Console, page: Path) -> None:
    """Print the path of a report's page."""
    console.print(f"Report: {printable(page)}", highlight=False, markup=False, soft_wrap=True)
