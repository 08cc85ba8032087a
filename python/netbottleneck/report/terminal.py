"""The report in a terminal, and its twin report.txt: 80 columns, no colour asked for where none is wanted."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from netbottleneck.analysis.findings import Findings, Parts
from netbottleneck.analysis.layers import Layer
from netbottleneck.analysis.usage import HostUse
from netbottleneck.analysis.verdict import Verdict
from netbottleneck.report.words import MEANING, beyond_the_link, costs, sentences, travels, warnings, why_not_probed
from netbottleneck.trace.model import PSEUDO
from netbottleneck.units import gbit, ms, nbytes, percent

WIDTH = 80
TOP_LAYERS = 8


def make_table(*columns: str) -> Table:
    """Return a table of no row; all columns but the first are numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        table.add_column(column, justify="right", overflow="fold")
    return table


def put_row(table: Table, *cells: str) -> None:
    """Add cells as they are: a name is no markup."""
    table.add_row(*map(Text, cells))


def _split_table(findings: Findings) -> tuple[str, Table]:
    table = make_table("", *findings.parts)
    step = {name: parts.step_ns for name, parts in findings.parts.items()}

    def row(label: str, attribute: str) -> None:
        cells = []
        for name, parts in findings.parts.items():
            ns = getattr(parts, attribute)
            cells.append(f"{ms(ns)} {ns / step[name] * 100:3.0f} %" if step[name] else "-")
        put_row(table, label, *cells)

    row("compute", "compute_ns")
    row("  hidden communication in it", "hidden_ns")
    row("exposed communication", "exposed_ns")
    row("waiting for other ranks to agree", "wait_ns")
    row("other", "other_ns")
    row("step", "step_ns")
    if any(parts.skew_ns > 0 for parts in findings.parts.values()):
        row("exposed or waiting for a late rank", "skew_ns")
    return f"Where a step goes: mean of the middle half of the steps ({findings.label})", table


def _bar(parts: Parts, width: int = 60) -> Text:
    """A step to scale: # compute, = hidden, ! exposed, . waiting, - other."""
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


def _bandwidth_table(findings: Findings) -> tuple[str, Table]:
    link = findings.link_bps
    rated = "" if findings.trace.network else ", by its interface's rating"
    title = f"Achieved, busbw one way ({findings.label}); " + (
        f"the link is {gbit(link)}{rated}" if link else "link unknown"
    )
    table = make_table("transport", "in transfer", "p10-p90", "over the step", *(("of link",) if link else ()))
    for name, found in findings.achieved.items():
        cells = [
            gbit(found.active_bps),
            f"{found.p10_bps / 1e9:.2f}-{found.p90_bps / 1e9:.2f}",
            gbit(found.average_bps),
        ]
        if link:
            cells.append(f"{percent(found.active_bps / link)}, {percent(found.average_bps / link)}")
        put_row(table, name, *cells)
    return title, table


def _probe_line(findings: Findings) -> str:
    can = findings.achievable
    if can is None:
        return f"Achievable: not probed ({why_not_probed(findings)})."
    points = ", ".join(f"{count}: {gbit(rate)}" for count, rate in can.points)
    return f"Achievable by streams ({findings.label}, probe over {can.transport}): {points}."


def _number(ns: float) -> str:
    """Ms without the unit."""
    return ms(ns).removesuffix(" ms")


def _transport_table(findings: Findings) -> tuple[str, Table]:
    table = make_table("transport", "step", "p10-p90 ms", "steps/blocks", "difference, 95 %")
    pairs = {pair.other: pair for pair in findings.comparisons}
    for name, time in findings.times.items():
        pair = pairs.get(name)
        if pair is None:
            difference = ""
        elif findings.handicapped:
            difference = "withheld"
        else:
            ns = pair.difference_ns
            interval = f" ({_number(ns.low)} to {_number(ns.high)})" if pair.enough else " (no interval)"
            difference = ms(ns.value) + interval
        spread = f"{_number(time.p10_ns)}-{_number(time.p90_ns)}"
        put_row(table, name, ms(time.median_ns), spread, f"{time.steps}/{time.blocks}", difference)
    meant = "; ".join(f"{name}: {MEANING[name]}" for name in findings.times if name in PSEUDO)
    title = f"Transports in turn, difference to {findings.base} paired by block ({findings.label})"
    return title + (f". {meant[0].upper()}{meant[1:]}" if meant else ""), table


def _scaling_table(findings: Findings) -> tuple[str, Table]:
    table = make_table("transport", "T_1 / T_n", "T_1", "", f"T_{findings.trace.size}")
    for name, s in findings.scaling.items():
        put_row(table, name, f"{s.factor:.2f}", ms(s.t1_ns), s.how, ms(s.tn_ns))
    return "Scaling factor", table


def _print_table(console: Console, title: str, table: Table) -> None:
    console.print(title, style="bold", highlight=False, markup=False)
    console.print(table)


def _hosts_table(hosts: Sequence[HostUse], link_bps: float | None) -> tuple[str, Table]:
    """The busiest interface of each host, average beside active, and its cores."""
    table = make_table("host", "transport", "way", "active", "average", "CPU", "busiest", "TCP again")
    for host in hosts:
        first = host.interfaces[0].interface if host.interfaces else ""
        for number, use in enumerate(use for use in host.interfaces if use.interface == first):
            cells = [
                "-" if bps is None else f"{bps / 1e9:.2f}" + (f" {100 * bps / link_bps:.0f}%" if link_bps else "")
                for bps in (use.active_bps, use.average_bps)
            ]
            rest = ["", "", ""] if number else [*_core_cells(host), _again(host)]
            put_row(table, f"{host.rank} {first}" if not number else "", host.transport, use.way, *cells, *rest)
    return "Interfaces in Gbit/s, headers and all, and cores: measured by the kernel's counters", table


def _core_cells(host: HostUse) -> tuple[str, str]:
    if host.cores is None:
        return "-", "-"
    idle = host.cores.mean["idle"] + host.cores.mean["iowait"]
    return percent(1 - idle), percent(host.cores.busiest_share)


def _again(host: HostUse) -> str:
    if not host.sent_segments or host.retransmitted_segments is None:
        return "-"
    return f"{100 * host.retransmitted_segments / host.sent_segments:.2f} %"


def render(findings: Findings, verdict: Verdict, console: Console, hosts: Sequence[HostUse] = ()) -> None:
    """Prints the report."""
    trace = findings.trace
    console.print(" ".join(sentences(findings)), style="bold", highlight=False, markup=False)
    console.print()
    about = [f"{trace.size} ranks", trace.model, trace.network.how if trace.network else "", trace.origin]
    console.print(f"Run {trace.id}: {', '.join(word for word in about if word)}.", highlight=False, markup=False)
    for warning in warnings(findings):
        console.print(f"! {warning}", style="yellow", highlight=False, markup=False)
    console.print()
    if findings.base is not None:
        for name, parts in findings.parts.items():
            console.print(Text(f"{name:>8} ").append(_bar(parts)))
        console.print("         # compute  = with hidden communication  ! exposed  . waiting  - other", highlight=False)
        console.print()
        _print_table(console, *_split_table(findings))
        if findings.layers:
            _print_table(console, *_layer_table(findings))
        if findings.achieved:
            _print_table(console, *_bandwidth_table(findings))
        if hosts:
            _print_table(console, *_hosts_table(hosts, findings.link_bps))
        for line in (*beyond_the_link(findings), _probe_line(findings), *costs(findings), *travels(findings)):
            console.print(line, highlight=False, markup=False)
        console.print()
    if findings.times:
        _print_table(console, *_transport_table(findings))
    if findings.scaling:
        _print_table(console, *_scaling_table(findings))
    for label, words in (("Verdict", verdict.code), ("Why", verdict.why), ("Next", verdict.next)):
        console.print(Text(f"{label}: ", style="bold").append(words, style="not bold"))


def text(findings: Findings, verdict: Verdict, hosts: Sequence[HostUse] = ()) -> str:
    """The report as report.txt holds it: plain, no trailing blanks."""
    buffer = io.StringIO()
    console = Console(
        file=buffer, width=WIDTH, color_system=None, force_terminal=False, force_jupyter=False, legacy_windows=False
    )
    render(findings, verdict, console, hosts)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def show(
    findings: Findings,
    verdict: Verdict,
    console: Console | None = None,
    hosts: Sequence[HostUse] = (),
    page: Path | None = None,
) -> None:
    """Prints to the terminal, at most WIDTH columns; NO_COLOR and pipes are seen to by rich. page: named at the end."""
    screen = console or Console(force_jupyter=False)
    screen.width = min(screen.width, WIDTH) if screen.is_terminal else WIDTH
    render(findings, verdict, screen, hosts)
    if page is not None:
        screen.print(f"Report: {page}", highlight=False, markup=False, soft_wrap=True)
