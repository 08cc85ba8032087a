"""Verdict: measured numbers to a code, a reason and a next step; INCONCLUSIVE if the data do not suffice. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from netbottleneck.analysis.comparisons import Paired
from netbottleneck.analysis.findings import Findings
from netbottleneck.trace.model import NOT_RECORDED, NOT_TIMED
from netbottleneck.trace.transports import STOCK, Arm
from netbottleneck.units import gbit, ms, percent, streams

# Exposed communication and waiting below this part of the step: the network is not the bottleneck.
NETWORK_SHARE_MIN = 0.10
# STRAGGLER above this: waiting for the slowest rank, as a part of exposed communication and waiting.
STRAGGLER_SHARE = 0.50
# LINK_LIMITED from this: achieved rate in transfer, over the link's rate.
LINK_UTILISATION = 0.80
# TRANSPORT_LIMITED from this: rate of the probe, over the achieved rate.
PROBE_RATIO = 1.30
# LATENCY_LIMITED above this: part of transfer time that does not depend on size.
LATENCY_SHARE = 0.50
# HOST_LIMITED from this: part of a machine's cores that its ranks keep busy over the whole step.
CORES_BUSY = 0.90
# INPUT_LIMITED from this: time before the first forward, as a part of the step.
INPUT_SHARE = 0.30
# A smaller gain does not count.
GAIN_MIN = 0.03
# Fewest steps for a verdict, over all ranks.
STEPS_MIN = 5

CODES = (
    "NOT_NETWORK",
    "TRANSPORT_LIMITED",
    "LINK_LIMITED",
    "LATENCY_LIMITED",
    "HOST_LIMITED",
    "STRAGGLER",
    "INPUT_LIMITED",
    "MISCONFIGURED",
    "NO_COMMUNICATION",
    "DO_NOTHING",
    "INCONCLUSIVE",
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """code: one of CODES; why: the numbers behind it; next: what to do."""

    code: str
    why: str
    next: str

    def _repr_html_(self) -> str:
        rows = (("Verdict", self.code), ("Why", self.why), ("Next", self.next))
        return "<table>" + "".join(f"<tr><th>{k}</th><td>{escape(v)}</td></tr>" for k, v in rows) + "</table>"


def own_cost(findings: Findings) -> str | None:
    """Sentence: cost of our measuring on the stock path, against the untouched script in the same run."""
    pair = findings.handicap
    if pair is None or not pair.enough:
        return None
    ratio, more = pair.ratio, pair.difference_ns
    return (
        f"Our measuring changes the step by {percent(ratio.value - 1, signed=True)} ({ms(more.value)}) against the "
        f"untouched script; 95 % interval {percent(ratio.low - 1, signed=True)} to "
        f"{percent(ratio.high - 1, signed=True)}, {pair.pairs} pairs of blocks ({findings.label})."
    )


def handicap_sentence(findings: Findings) -> str | None:
    """Sentence: gains are withheld because our hooks slow the stock path; None if that does not apply."""
    pair = findings.handicap
    if pair is None or not findings.handicapped or not findings.comparisons:
        return None
    ratio = pair.ratio
    return (
        f"Our hooks slow the stock path by {percent(ratio.value - 1)}, so no gain is reported (against the untouched "
        f"script; 95 % interval {percent(ratio.low - 1)} to {percent(ratio.high - 1)}, {pair.pairs} pairs of blocks)."
    )


def wins(pair: Paired) -> bool:
    """True if the other arm is faster: its interval excludes zero and its gain is at least GAIN_MIN."""
    return pair.enough and pair.difference_ns.high < 0 and pair.gain.value >= GAIN_MIN


def best_gain(findings: Findings) -> Paired | None:
    """The comparison with the largest gain that may be reported; None if there is none."""
    if findings.handicapped:
        return None
    return max((p for p in findings.comparisons if wins(p)), key=lambda p: p.gain.value, default=None)


def stock_is_as_good(findings: Findings) -> bool:
    """True if other arms were compared with enough pairs, and none gains GAIN_MIN or more."""
    tried = [p for p in findings.comparisons if p.enough]
    return bool(tried) and not findings.handicapped and all(p.gain.value < GAIN_MIN for p in tried)


def _keep(findings: Findings) -> str:
    """Sentence about the arms that were compared."""
    if not stock_is_as_good(findings):
        return ""
    tried = "; ".join(
        f"{p.other} {percent(p.gain.value)} ({percent(p.gain.low)} to {percent(p.gain.high)})"
        for p in findings.comparisons
        if p.enough
    )
    return f" The {findings.base} path is as good as what was tried (gain of {tried})."


def _no_communication(f: Findings) -> Verdict | None:
    if f.trace.size < 2:
        return Verdict("NO_COMMUNICATION", "One rank: nothing is sent.", "Start two ranks or more.")
    if f.base is None or (f.parts[f.base].operations == 0 and not f.base.real):
        return Verdict(
            "NO_COMMUNICATION",
            "No step with communication was recorded.",
            "Measure steps under stock, or another transport, for longer than one block.",
        )
    untimed = next((note for note in f.trace.notes if NOT_TIMED in note), None)
    if f.parts[f.base].operations == 0 and untimed is not None:
        return Verdict(
            "NO_COMMUNICATION",
            f"No operation could be timed in {f.parts[f.base].steps} steps. {untimed}",
            "Measure a run without that communication hook.",
        )
    if f.parts[f.base].operations == 0:
        return Verdict(
            "NO_COMMUNICATION",
            f"{f.trace.size} ranks, and no operation in {f.parts[f.base].steps} steps.",
            "Check whether the model is wrapped (DDP or DistributedOptimizer), or gradients are skipped.",
        )
    return None


def _too_little(f: Findings) -> Verdict | None:
    assert f.base is not None
    steps = f.times[f.base].steps
    if steps >= STEPS_MIN:
        return None
    return Verdict(
        "INCONCLUSIVE",
        f"{steps} steps were counted; a verdict needs at least {STEPS_MIN}.",
        "Measure more steps (NETBOTTLENECK_END_STEP).",
    )


def _misconfigured(f: Findings) -> Verdict | None:
    kinds: dict[str, dict[str, list[int]]] = {}
    for rank in f.trace.ranks:
        for info in rank.transports:
            if info.provider:
                kinds.setdefault(info.name, {}).setdefault(info.provider, []).append(rank.rank)
    for name, providers in kinds.items():
        if len(providers) > 1:
            by_rank = "; ".join(f"{provider}: rank {', '.join(map(str, r))}" for provider, r in providers.items())
            return Verdict(
                "MISCONFIGURED", f"Ranks differ in {name}'s provider ({by_rank}).", "Set NETBOTTLENECK_PROVIDER."
            )
    return None


def _not_network(f: Findings) -> Verdict | None:
    assert f.base is not None
    assert f.share is not None
    parts, share = f.parts[f.base], f.share
    lost = f"{percent(share.value)} of the step ({percent(share.low)} to {percent(share.high)})"
    unknown = next((note for note in f.trace.notes if NOT_RECORDED in note), None)
    if share.high < NETWORK_SHARE_MIN and unknown is not None:
        return Verdict(
            "INCONCLUSIVE",
            f"The recorded communication is {lost}. {unknown}",
            "Measure the other model in a separate run: netbottleneck.attach.",
        )
    if share.high < NETWORK_SHARE_MIN:
        if parts.input_ns >= INPUT_SHARE * parts.step_ns:
            return Verdict(
                "INPUT_LIMITED",
                f"{ms(parts.input_ns)} of {ms(parts.step_ns)} pass before the forward; communication costs {lost}.",
                "More data loader workers, or prefetching.",
            )
        return Verdict(
            "NOT_NETWORK",
            f"Exposed communication and waiting are {lost}, below {percent(NETWORK_SHARE_MIN)}.{_keep(f)}",
            "Do nothing about the network: a faster one could save no more than that.",
        )
    if share.low < NETWORK_SHARE_MIN:
        return Verdict(
            "INCONCLUSIVE",
            f"Exposed communication and waiting are {lost}: the interval includes {percent(NETWORK_SHARE_MIN)}.",
            "Measure more steps, on hosts that do nothing else.",
        )
    return None


def _straggler(f: Findings) -> Verdict | None:
    assert f.base is not None
    parts = f.parts[f.base]
    idle = parts.exposed_ns + parts.wait_ns
    if not f.late_ns or parts.skew_ns <= STRAGGLER_SHARE * idle:
        return None
    slow = max(f.late_ns, key=lambda rank: f.late_ns[rank])
    return Verdict(
        "STRAGGLER",
        f"{ms(parts.skew_ns)} of {ms(idle)} of exposed communication and waiting is waiting for the slowest rank; "
        f"rank {slow} makes the others wait {ms(f.late_ns[slow])} a step.",
        f"Look at rank {slow}'s host: its input, its clock speed, what else runs there.",
    )


def _paired(f: Findings) -> Verdict | None:
    pair = best_gain(f)
    if pair is None:
        return None
    gain, saved = pair.gain, pair.difference_ns
    return Verdict(
        "TRANSPORT_LIMITED",
        f"{f.label.capitalize()}: {pair.other} makes the step {ms(-saved.value)} shorter "
        f"({ms(-saved.high)} to {ms(-saved.low)}), "
        f"{percent(gain.value)} ({percent(gain.low)} to {percent(gain.high)}), over {pair.pairs} pairs of blocks.",
        f"NETBOTTLENECK_TRANSPORT={pair.other}{_streams_hint(f, pair.other)}",
    )


def _streams_hint(f: Findings, arm: Arm) -> str:
    used = [i.streams_used for r in f.trace.ranks for i in r.transports if i.name == arm.transport and i.streams_used]
    return f" NETBOTTLENECK_STREAMS={max(used)}" if used else ""


def _link(f: Findings) -> Verdict | None:
    assert f.base is not None
    did = f.achieved.get(f.base)
    if did is None:
        return None
    if f.link_bps:
        limit, what = f.link_bps, "link"
    elif f.achievable and len(f.achievable.points) > 1:
        limit, what = f.achievable.best[1], "best of the probe (the link's speed is not known)"
    else:
        return None
    if did.active_bps < LINK_UTILISATION * limit:
        return None
    return Verdict(
        "LINK_LIMITED",
        f"In transfer {gbit(did.active_bps)} of {gbit(limit)}, {percent(did.active_bps / limit)} of the {what}; "
        f"averaged over the step {percent(did.average_bps / limit)}.{_keep(f)}",
        "Send less (larger batches, smaller gradients) or get a faster link; another transport cannot help.",
    )


def _probe(f: Findings) -> Verdict | None:
    assert f.base is not None
    did, can = f.achieved.get(f.base), f.achievable
    if did is None or can is None or stock_is_as_good(f) or can.best[1] < PROBE_RATIO * did.active_bps:
        return None
    count, rate = can.best
    withheld = handicap_sentence(f)
    return Verdict(
        "TRANSPORT_LIMITED",
        f"The {f.base} path moved data at {gbit(did.active_bps)}; a probe with {streams(count)} reached {gbit(rate)}, "
        f"{rate / did.active_bps:.1f} times as much." + (f" {withheld}" if withheld else ""),
        f"Measure the difference: NETBOTTLENECK_TRANSPORT={f.base},{can.transport} NETBOTTLENECK_STREAMS={count}",
    )


def _latency(f: Findings) -> Verdict | None:
    if f.latency_share is None or f.latency_share <= LATENCY_SHARE:
        return None
    return Verdict(
        "LATENCY_LIMITED",
        f"{percent(f.latency_share)} of transfer time does not depend on size (least squares).{_keep(f)}",
        "Fewer, larger operations: larger buckets.",
    )


def _host(f: Findings) -> Verdict | None:
    if f.cores_busy is None or f.cores_busy < CORES_BUSY:
        return None
    return Verdict(
        "HOST_LIMITED",
        f"The ranks of one machine keep {percent(f.cores_busy)} of its cores busy over the whole step, also while "
        f"communication is exposed.{_keep(f)}",
        "Give the ranks more cores, or fewer threads to the model.",
    )


def _do_nothing(f: Findings) -> Verdict | None:
    if not stock_is_as_good(f):
        return None
    return Verdict("DO_NOTHING", _keep(f).strip(), f"Do nothing: keep {f.base or STOCK}.")


RULES: tuple[Callable[[Findings], Verdict | None], ...] = (
    _no_communication,
    _too_little,
    _misconfigured,
    _not_network,
    _straggler,
    _paired,
    _link,
    _probe,
    _latency,
    _host,
    _do_nothing,
)


def decide(findings: Findings) -> Verdict:
    """The verdict of the first rule that applies; INCONCLUSIVE if none does."""
    for rule in RULES:
        verdict = rule(findings)
        if verdict is not None:
            return verdict
    withheld = handicap_sentence(findings)
    return Verdict(
        "INCONCLUSIVE",
        "No rule explains what is exposed." + (f" {withheld}" if withheld else ""),
        "Measure with NETBOTTLENECK_TRANSPORT=stock,tcp and NETBOTTLENECK_STREAMS=auto for a probe and a comparison.",
    )
