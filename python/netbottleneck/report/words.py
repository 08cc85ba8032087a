"""The findings in sentences. Each number is labelled measured or predicted; what is not known is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from netbottleneck.analysis.findings import STOCK, Findings
from netbottleneck.analysis.stats import Costs, Travel
from netbottleneck.analysis.verdict import best_gain, handicap_sentence, own_cost, stock_is_as_good
from netbottleneck.trace.model import BARE, NATIVE, NULL, PSEUDO, SINGLE, Rank, Trace, TransportInfo
from netbottleneck.units import gbit, ms, nbytes, percent, short, streams

# A rank that makes the others wait less than this part of the step is not named.
LATE_SHARE_MIN = 0.01
# What stands in a list of transports and is none.
MEANING: Mapping[str, str] = {BARE: "the untouched script", SINGLE: "one rank alone", NULL: "nothing moves"}


def sentences(findings: Findings) -> list[str]:
    """What a report opens with."""
    base = findings.base
    if base is None:
        return ["No step could be split: only the untouched script was recorded, or nothing."]
    parts = findings.parts[base]
    untouched = findings.times.get(BARE) if base == STOCK else None
    step_ns = parts.step_ns if untouched is None else untouched.median_ns
    if parts.operations == 0 and findings.trace.size > 1:
        found = [f"Your step takes {ms(step_ns)}; none of its communication was recorded ({findings.label})."]
    else:
        found = [f"Of your {ms(step_ns)} step, {ms(parts.exposed_ns)} is exposed communication ({findings.label})."]
    found += _bandwidth(findings, base)
    predicted = findings.predicted_full_use_ns
    if predicted is not None and predicted < parts.step_ns:
        found.append(f"At full use the step would be {ms(predicted)} at most (predicted).")
    found += _comparison(findings)
    cost = own_cost(findings)
    found += [cost] if cost else []
    if findings.late_ns:
        rank = max(findings.late_ns, key=lambda r: findings.late_ns[r])
        if findings.late_ns[rank] >= LATE_SHARE_MIN * parts.step_ns:
            found.append(f"Rank {rank} makes the others wait {ms(findings.late_ns[rank])} ({findings.label}).")
    return found


def _bandwidth(findings: Findings, base: str) -> list[str]:
    did, can = findings.achieved.get(base), findings.achievable
    if did is None:
        return []
    moved = f"The {base} path moved data at {gbit(did.active_bps)} in transfer, {gbit(did.average_bps)} over the step"
    label = findings.label
    if can is None:
        return [f"{moved} ({label})."]
    return [f"{moved} ({label}); these hosts can do {gbit(can.best[1])} with {streams(can.best[0])} ({label})."]


def why_not_probed(findings: Findings) -> str:
    """Why nothing is known of what other numbers of streams would reach."""
    infos = [i for rank in findings.trace.ranks for i in rank.transports if i.name in NATIVE]
    if findings.trace.origin != "measured":
        return "a simulated run has no probe"
    if not infos:
        names = [name for name in findings.trace.transports if name not in PSEUDO]
        return f"transport {', '.join(names) or 'none'} only"
    return _why_no_probe_ran(infos)


def _why_no_probe_ran(infos: Sequence[TransportInfo]) -> str:
    if all(i.shm == "on" for i in infos):
        return "the ranks of one host shared memory; with NETBOTTLENECK_SHM=0 they use the network"
    fixed = sorted({i.streams_asked for i in infos if i.streams_asked})
    if fixed:
        return f"streams fixed by NETBOTTLENECK_STREAMS={', '.join(map(str, fixed))}"
    if all(i.streams_asked == 0 for i in infos):
        return "no transfer was large enough"
    return "the record does not tell why"


def costs(findings: Findings) -> list[str]:
    """What a step, a byte and an addition cost, a line for each transport that measured it."""
    return [
        f"Costs over {name} ({findings.label}): a step {short(c.step_ns)}, a byte on the wire {short(c.byte_ns)}, "
        f"a byte added {short(c.added_ns)}{_levels(c)}."
        for name, c in findings.costs.items()
    ]


def _levels(c: Costs) -> str:
    if c.levels_ns is None or c.levels_byte_ns is None:
        return ""
    return f", two levels {short(c.levels_ns)} and {short(c.levels_byte_ns)} a byte beside the wire"


def beyond_the_link(findings: Findings) -> list[str]:
    """Why data moved faster than the link, where the link's cap tells."""
    link_bps, burst_bytes = findings.link_bps, findings.link_burst_bytes
    faster = [name for name, found in findings.achieved.items() if link_bps and found.active_bps > link_bps]
    if not faster or burst_bytes is None:
        return []
    names = " and ".join(faster)
    return [f"Faster than the link ({names}): its cap lets {nbytes(burst_bytes)} through at once after a pause."]


def travels(findings: Findings) -> list[str]:
    """How all-reduces travelled, by size, a line for each transport whose record tells."""
    return [
        f"All-reduces over {name} ({findings.label}): {', '.join(map(_travel, found))}."
        for name, found in findings.travels.items()
    ]


def _travel(one: Travel) -> str:
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


def _about_rank(rank: Rank, origin: str) -> list[str]:
    found = []
    if rank.steps_unfinished:
        found.append(f"rank {rank.rank}: {rank.steps_unfinished} step(s) began and never ended; left out.")
    if rank.events_dropped:
        found.append(f"rank {rank.rank}: {rank.events_dropped} event(s) dropped; its numbers may be too low.")
    if rank.error:
        found.append(f"rank {rank.rank} failed: {rank.error}")
    elif not rank.finished and origin == "measured":
        found.append(f"rank {rank.rank} did not end in good order.")
    if rank.clock.method in ("wall", "none") and rank.rank != 0:
        found.append(f"rank {rank.rank}: its clock was laid on rank 0's by its wall time, or not at all.")
    return found


def _faults(trace: Trace) -> list[str]:
    """What went wrong while the job ran; lanes that one rank lost to another stand together."""
    found = []
    lost: dict[tuple[int, str], list[str]] = {}
    for f in trace.faults:
        peers = ", ".join(map(str, f.peers)) or "?"
        if f.kind == "lane_lost":
            lost.setdefault((f.rank, peers), []).append("?" if f.lane is None else str(f.lane))
        else:
            found.append(f"rank {f.rank}: {f.kind.replace('_', ' ')}, rank {peers}")
    for (rank, peer), lanes in lost.items():
        several = len(lanes) > 1
        found.append(
            f"rank {rank}: lane{'s' * several} {', '.join(lanes)} to rank {peer} {'were' if several else 'was'} lost; "
            f"{'their' if several else 'its'} segments went over the others."
        )
    return found


def warnings(findings: Findings) -> list[str]:
    """What a reader must know before believing the rest."""
    trace = findings.trace
    found = [sentence for sentence in [handicap_sentence(findings)] if sentence]
    if NULL in findings.times:
        found.append("null moved nothing: the training of this run is not valid.")
    for rank in trace.ranks:
        found += _about_rank(rank, trace.origin)
    missing = sorted(set(range(trace.size)) - {rank.rank for rank in trace.ranks})
    if missing:
        found.append(f"no record of rank {', '.join(map(str, missing))}.")
    found += _faults(trace)
    for pair in findings.comparisons:
        if not pair.enough:
            found.append(f"comparison with {pair.other}: {pair.pairs} pair of blocks is too few.")
    return [*found, *trace.notes]
