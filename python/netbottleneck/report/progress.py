"""The display of a run in progress: one line, and a frame of the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from netbottleneck.analysis import usage
from netbottleneck.analysis.findings import Findings, Parts
from netbottleneck.analysis.usage import HostUse, Use
from netbottleneck.analysis.verdict import Verdict
from netbottleneck.report.text import bandwidth_table, core_cells, make_table, put_row, retransmitted, saving_text
from netbottleneck.trace.files import printable
from netbottleneck.trace.model import Trace, TransportInfo
from netbottleneck.trace.transports import PSEUDO, Arm
from netbottleneck.units import gbit, ms, percent, streams

TOP_ROWS = 8


def step_parts(parts: Parts) -> dict[str, float]:
    """The parts of a step by name, in ns; their sum is the step. Exposed communication is transfer plus waiting.

    waiting: before the last rank submitted the same operation.
    """
    own = {
        "compute": parts.compute_ns - parts.optimizer_ns,
        "transfer": parts.exposed_ns + parts.wait_ns - parts.skew_ns,
        "waiting": parts.skew_ns,
        "optimizer": parts.optimizer_ns,
        "input": parts.input_ns,
    }
    return {**own, "other": parts.step_ns - sum(own.values())}


def duration(seconds: float) -> str:
    """A time as text: 45 s, 12 min, 3.5 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def missing_text(findings: Findings, verdict: Verdict, window: int) -> str:
    """What an inconclusive verdict still needs: steps and time where known; "" for another one. window: 0: no limit."""
    if verdict.code != "INCONCLUSIVE":
        return ""
    if verdict.more is None:
        return verdict.next
    times = findings.times.values()
    steps = sum(time.steps for time in times)
    mean_ns = sum(findings.typical_ns(time) * time.steps for time in times) / max(steps, 1)
    have = sum(time.steps + time.blocks for time in times)
    text = f"{verdict.more} more steps" + (f" (about {duration(verdict.more * mean_ns / 1e9)})" if steps else "")
    return text + (f", in a window of {have + verdict.more} steps" if 0 < window < have + verdict.more else "")


def line(findings: Findings, verdict: Verdict, window: int, ended: bool = False) -> str:
    """One line: the last step, the verdict or what it still needs, and the parts of the step, the largest first.

    ended: no step will come.
    """
    last = max((step.index for step in findings.trace.steps), default=None)
    yet = "" if ended else " yet"
    if last is None or findings.base is None:
        return f"no step could be split{yet}"
    parts = findings.parts[findings.base]
    shares = sorted(step_parts(parts).items(), key=lambda part: -part[1])
    split = ", ".join(f"{name} {100 * ns / max(parts.step_ns, 1):.0f} %" for name, ns in shares)
    missing = missing_text(findings, verdict, window)
    doubt = next((f" (perhaps {one.code})" for one in verdict.evidence if one.uncertain), "")
    state = f"no verdict{yet}{doubt}, {missing[:1].lower()}{missing[1:]}" if missing else verdict.code
    return f"step {last}: {state}; {findings.base} {ms(parts.step_ns)}: {split}"


def verdict_line(verdict: Verdict) -> str:
    """The verdict and what it rests on."""
    first = verdict.evidence[0] if verdict.evidence else None
    if first is None or not first.fired or first.saving is None:
        return f"{verdict.code}: {verdict.why}"
    return f"{verdict.code}: {first.cause} costs {saving_text(first)} a step; rests on: {first.rests}"


def _head_lines(trace: Trace, state: Sequence[str]) -> list[str]:
    machines = len({rank.machine for rank in trace.ranks})
    begins, ends = [step.begin_ns for step in trace.steps], [step.end_ns for step in trace.steps]
    about = [state[0], f"{trace.size} ranks", f"{machines} host{'s' * (machines != 1)}", trace.model]
    lines = [f"Run {trace.id}: {', '.join(part for part in about if part)}"]
    if ends:
        indices = [step.index for step in trace.steps]
        since_s = (trace.epoch_wall_ns + max(ends) - trace.started_wall_ns) / 1e9
        since = f", {duration(since_s)} after the start" if trace.epoch_wall_ns else ""
        span = f"steps {min(indices)} to {max(indices)} ({duration((max(ends) - min(begins)) / 1e9)})"
        lines.append(f"Step {max(indices)}{since}; window: {span}")
    infos = {info.name: info for rank in trace.ranks for info in rank.transports}
    lines.append("Arms: " + ", ".join(_arm_text(arm, infos.get(arm.transport)) for arm in trace.arms))
    return lines


def _arm_text(arm: Arm, info: TransportInfo | None) -> str:
    known = [] if info is None else [info.provider, info.streams_used and streams(info.streams_used)]
    details = ", ".join(str(part) for part in known if part) if arm not in PSEUDO else ""
    return f"{arm} ({details})" if details else arm


def _parts_table(findings: Findings) -> tuple[str, Table]:
    table = make_table("part of the step", *findings.times)
    split = {arm: step_parts(parts) for arm, parts in findings.parts.items()}
    for name in next(iter(split.values()), {}):
        cells = [
            f"{ms(split[arm][name])} {split[arm][name] / max(findings.parts[arm].step_ns, 1) * 100:3.0f} %"
            if arm in split
            else "-"
            for arm in findings.times
        ]
        put_row(table, name, *cells)
    name = "mean step" if findings.mixed else "step, median"
    put_row(table, name, *(ms(findings.typical_ns(time)) for time in findings.times.values()))
    return f"Exposed communication is transfer and waiting ({findings.label})", table


def _ranks_table(findings: Findings) -> tuple[str, Table]:
    table = make_table("rank", "host", "waits", "others wait for it", "cores used")
    late = findings.late_ns
    known = findings.lateness is not None  # else no operation of a step is common to all ranks
    ranks = sorted(findings.trace.ranks, key=lambda rank: (-late.get(rank.rank, 0.0), rank.rank))
    for rank in ranks[:TOP_ROWS]:
        used = findings.cores_used.get(rank.rank)
        own = [ms(values.get(rank.rank, 0.0)) if known else "-" for values in (findings.waiting_ns, late)]
        put_row(table, str(rank.rank), rank.hostname, *own, "-" if used is None else f"{used:.1f} of {len(rank.cores)}")
    more = len(ranks) - TOP_ROWS
    share = findings.cores_busy
    busy = "" if share is None else f"; the ranks keep {percent(share)} of the busiest host's cores busy"
    return "Waiting in a step" + (f"; {more} more ranks" if more > 0 else "") + busy, table


def _interfaces_table(findings: Findings, hosts: Sequence[HostUse]) -> tuple[str, Table]:
    """Each host's interfaces in the base's steps, and their rated speed: in transfer where known, else over steps."""
    table = make_table("interface", "out Gbit/s", "in Gbit/s", "of", "CPU", "busiest", "TCP resent")
    for host in [host for host in hosts if host.arm == findings.base][:TOP_ROWS]:
        rest = (*core_cells(host), retransmitted(host))
        for name in dict.fromkeys(use.interface for use in host.interfaces):
            rates = {use.way: _rate_text(use) for use in host.interfaces if use.interface == name}
            link = _rated(findings, host.rank, name)
            put_row(table, f"{host.hostname} {name}", rates.get("tx", "-"), rates.get("rx", "-"), link, *rest)
            rest = ("", "", "")
    return f"Interfaces under {findings.base} (measured by the kernel's counters; ~ over the step)", table


def _rated(findings: Findings, rank: int, interface: str) -> str:
    """The rate of an interface of a rank's host: its own, else that of the run's link; loopback has none."""
    infos = [info for one in findings.trace.ranks if one.rank == rank for info in one.transports]
    own = next((info.link_bps for info in infos if info.interface == interface and info.link_bps), None)
    own = None if findings.link_disproved else own
    link = own or (None if interface == usage.LOOPBACK else findings.link_bps)
    return gbit(link) if link else "not known"


def _rate_text(use: Use) -> str:
    return f"~{use.average_bps / 1e9:.2f}" if use.active_bps is None else f"{use.active_bps / 1e9:.2f}"


def frame(
    findings: Findings, verdict: Verdict, hosts: Sequence[HostUse], state: Sequence[str], window: int
) -> RenderableType:
    """One frame of a run in progress, the verdict before the tables, which a low terminal cuts.

    state: what it does, then lines about its ranks; window: 0 for no limit.
    """
    parts: list[RenderableType] = [
        Text(printable(line), overflow="fold") for line in _head_lines(findings.trace, state)
    ]
    parts += [Text(f"! {printable(line)}", style="yellow") for line in state[1:]]
    missing = missing_text(findings, verdict, window)
    for label, content in (("Verdict", verdict_line(verdict)), ("Missing", missing)):
        if content:
            parts.append(Text(f"{label}: ", style="bold").append(content, style="not bold"))
    if findings.base is None:
        return Group(*parts)
    tables = [_parts_table(findings), _ranks_table(findings)]
    if findings.achieved:
        tables.append(bandwidth_table(findings))
    if any(host.arm == findings.base and host.interfaces for host in hosts):
        tables.append(_interfaces_table(findings, usage.by_link(findings.trace, hosts)))
    for title, table in tables:
        table.show_edge = False
        parts += [Text(f"\n{title}", style="bold"), table]
    return Group(*parts)
