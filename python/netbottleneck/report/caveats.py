"""Caveats: what a reader needs to know before the rest of a report, one line each."""

from __future__ import annotations

from netbottleneck.analysis.arrivals import BY_OPERATIONS, UNSURE_METHODS
from netbottleneck.analysis.bandwidth import stream_changes
from netbottleneck.analysis.changes import CHANGE_VALUES
from netbottleneck.analysis.comparisons import changed_at
from netbottleneck.analysis.findings import Findings
from netbottleneck.analysis.intervals import missing_ranks
from netbottleneck.analysis.rule_facts import handicap_sentence
from netbottleneck.trace.files import printable
from netbottleneck.trace.heartbeats import JUMPED
from netbottleneck.trace.model import NAMED_RANKS, Rank, Trace
from netbottleneck.trace.transports import NULL
from netbottleneck.units import listed, ms, percent


def failure(rank: Rank) -> str:
    """The error of a rank that failed, on one line."""
    error = " ".join(printable(rank.error or "").split()).removesuffix(":")
    interrupted = error == KeyboardInterrupt.__name__
    return f"rank {rank.rank} was interrupted" if interrupted else f"rank {rank.rank} failed: {error}"


def _about_rank(rank: Rank, trace: Trace) -> list[str]:
    found = []
    if rank.steps_unfinished and not trace.in_progress:
        found.append(f"rank {rank.rank}: {rank.steps_unfinished} step(s) began and did not end; they are left out.")
    if rank.events_dropped:
        found.append(f"rank {rank.rank}: {rank.events_dropped} event(s) dropped; its numbers may be too low.")
    if rank.error:
        found.append(failure(rank))
    elif rank.finished and any(other.error for other in trace.ranks):
        how = "it reached its end, called sys.exit or shutdown(), or elastic training restarted its job"
        found.append(f"rank {rank.rank} ended without an uncaught exception: {how}.")
    elif not rank.finished and trace.origin == "measured" and not trace.in_progress:
        found.append(f"rank {rank.rank} did not finish cleanly.")
    return found + _about_clock(rank)


def _about_clock(rank: Rank) -> list[str]:
    found = []
    if rank.clock.method == JUMPED:
        found.append(f"rank {rank.rank}: its clock jumped against rank 0's: what compares their times is not judged.")
    elif rank.clock.method in UNSURE_METHODS and rank.rank != 0:
        found.append(f"rank {rank.rank}: its clock is not synchronised: cross-rank waits may be wrong by milliseconds.")
    if rank.clock.method == BY_OPERATIONS:
        error = ms(rank.clock.error_ns or 0)
        found.append(f"rank {rank.rank}: its clock is aligned by its operations: cross-rank waits are within {error}.")
    return found


def _faults(trace: Trace) -> list[str]:
    """Failures during the run. Lanes that one rank lost to the same peer form one entry."""
    found = []
    lost: dict[tuple[int, str], list[str]] = {}
    for f in trace.faults:
        peers = listed(f.peers) or "?"
        if f.kind == "lane_lost":
            lost.setdefault((f.rank, peers), []).append("?" if f.lane is None else str(f.lane))
        else:
            named = [f"rank {peers}"] if f.peers or not f.others else []
            named += [f"{f.others} rank{'s' * (f.others > 1)} above {NAMED_RANKS - 1}"] if f.others else []
            found.append(f"rank {f.rank}: {f.kind.replace('_', ' ')}, {' and '.join(named)}")
    for (rank, peer), lanes in lost.items():
        several = len(lanes) > 1
        found.append(
            f"rank {rank}: lane{'s' * several} {', '.join(lanes)} to rank {peer} {'were' if several else 'was'} lost; "
            f"{'their' if several else 'its'} segments went over the other lanes."
        )
    return found


def _changes(findings: Findings) -> list[str]:
    """The last change of the step time, and those of the streams, which may be its cause."""
    trace = findings.trace
    changed = changed_at(trace)
    found = []
    for one in stream_changes(trace).values():
        effect = ""
        if changed is not None and changed.before - CHANGE_VALUES <= one.step <= changed.step + CHANGE_VALUES:
            effect = f", and the median of the step time by {percent(changed.factor - 1, signed=True)}"
            changed = None
        later = f"; NETBOTTLENECK_STREAMS={one.after} records the later one alone" if trace.of_script else ""
        pairs = [pair for pair in findings.comparisons if one.transport in (pair.base.transport, pair.other.transport)]
        side = "before" if any(pair.until == one.step for pair in pairs) else "after"
        compared = f" Comparisons with {one.transport} are of the steps {side}." if pairs else ""
        found.append(
            f"a probe changed the streams of {one.transport} from {one.before} to {one.after} at step {one.step}"
            f"{effect}: this report has both states{later}.{compared}"
        )
    if changed is not None:
        later = f"; NETBOTTLENECK_START_STEP={changed.step} records the later one alone" if trace.of_script else ""
        found.append(f"{changed.words}: this report has both states{later}.")
    return found


def _slowed(findings: Findings) -> str:
    """The cost of our measuring where it is surely too large, and no gain depends on it; "" else."""
    pair = findings.handicap
    if pair is None or not findings.handicapped:
        return ""
    return (
        f"Our hooks slow the stock path by {percent(pair.ratio.value - 1)}: the untouched script's steps are shorter."
    )


def warnings(findings: Findings) -> list[str]:
    """Caveats that a reader needs before the rest."""
    trace = findings.trace
    found = [sentence for sentence in [handicap_sentence(findings) or _slowed(findings)] if sentence]
    if NULL in findings.times:
        found.append("the arm null moves no bytes: the training of this run is not valid.")
    if trace.in_progress:
        found.append(f"in progress: {len({step.index for step in trace.steps})} steps so far.")
    for rank in trace.ranks:
        found += _about_rank(rank, trace)
    missing = missing_ranks(trace)
    if missing:
        found.append(f"no record of rank {listed(missing)}.")
    else:
        found += [f"{ranks}." for ranks in findings.unheard.values()]
    found += _faults(trace)
    found += _changes(findings)
    for pair in findings.comparisons:
        if not pair.enough:
            found.append(f"comparison with {pair.other}: {pair.pairs} pair(s) of blocks, too few for an interval.")
        elif pair.note:
            found.append(f"comparison with {pair.other}: {pair.note}.")
    if findings.handicap is not None and findings.handicap.note:
        found.append(f"comparison with {findings.handicap.base}: {findings.handicap.note}.")
    return [*found, *trace.notes]
