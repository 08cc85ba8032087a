"""What the rules see of a run, and what a rule results in. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from netbottleneck.analysis import thresholds as limits
from netbottleneck.analysis.arrivals import BY_OPERATIONS, transfer_error_ns
from netbottleneck.analysis.comparisons import Estimate, Paired
from netbottleneck.analysis.findings import Findings, stock_is_as_good
from netbottleneck.analysis.traffic import Unseen, unequal_mtus
from netbottleneck.analysis.usage import LOOPBACK, NO_CONNECTIONS, Connected, HostUse, packet_loss
from netbottleneck.trace.model import TransportInfo
from netbottleneck.trace.transports import SINGLE, Arm
from netbottleneck.units import ms, percent


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the what-if engine predicts a step of the base to save, in ns, by the cause that is removed.

    refused: why there is no prediction, "" if there is. buckets: the plan of the saving named buckets; no_buckets: why
    there is none. costs: sentence about the time of an operation and the rate of its bytes, "" if they are not known.
    """

    savings_ns: Mapping[str, Estimate] = field(default_factory=dict)
    refused: str = ""
    buckets: str = ""
    no_buckets: str = "no plan to compare"
    costs: str = ""


@dataclass(frozen=True, slots=True)
class RuleResult:
    """The result of one rule.

    cause: as text; code: of the verdict if it is the largest. applies: its condition holds, so `saving` counts.
    saving: ns that a step would save without the cause, None if not known. limit_ns: the least saving that counts.
    step_ns: the step that the saving is a part of; rest_ns: if that is the mean of all steps, what this has beside the
    saving, so that each end of the saving has its own step.
    source: "measured" if the saving is a measured time alone, else "predicted". rests: how the saving is known, or why
    there is none. needs: the measurement that decides, if the saving is uncertain; more: its number of further steps,
    None if that is not known. at_most: `saving` is a part of the step that no remedy removes as a whole.
    """

    cause: str
    code: str
    applies: bool = False
    saving: Estimate | None = None
    limit_ns: float = 0.0
    step_ns: float = 0.0
    rest_ns: float | None = None
    source: str = "predicted"
    rests: str = ""
    why: str = ""
    next: str = ""
    needs: str = ""
    more: int | None = None
    at_most: bool = False

    @property
    def fired(self) -> bool:
        """True if the saving is surely above the limit."""
        return self.applies and self.saving is not None and self.saving.low > self.limit_ns

    @property
    def uncertain(self) -> bool:
        """True if the saving is probably above the limit, but not surely."""
        return self.applies and not self.fired and self.saving is not None and self.saving.value > self.limit_ns

    @property
    def margin(self) -> float | None:
        """How far the saving is surely above the limit, as a part of the step; negative below it. None if not known."""
        known = self.applies and self.saving is not None and self.step_ns > 0
        return (self.saving.low - self.limit_ns) / self.step_ns if known and self.saving is not None else None

    @property
    def share(self) -> str:
        """The saving as text, with its part of the step: a saving that counts surely has no end below GAIN_MIN."""
        return "" if self.saving is None else share_of(self.saving, self.step_ns, self.rest_ns)


@dataclass(frozen=True, slots=True)
class FullUse:
    """The predicted step of the base if its transfers ran at the achievable rate, and what the prediction rests on."""

    step_ns: float
    how: str


def within_step(saving: Estimate, step_ns: float) -> Estimate:
    """A saving of at most the step that it is a part of."""
    return Estimate(*(min(end, step_ns) for end in (saving.value, saving.low, saving.high)))


def share_of(saving: Estimate, step_ns: float, rest_ns: float | None = None) -> str:
    """A saving as text, with its part of the step. step_ns, rest_ns: as in RuleResult."""
    ends = (saving.value, saving.low, saving.high)
    steps = [step_ns if rest_ns is None else rest_ns + end for end in ends]
    value, low, high = (percent(end / step) for end, step in zip(ends, steps, strict=True))
    return f"{ms(saving.value)}, {value} of the step ({low} to {high})"


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


def as_good_sentence(findings: Findings) -> str:
    """Sentence about the arms that were compared."""
    if not stock_is_as_good(findings):
        return ""
    tried = "; ".join(
        f"{p.other} {percent(p.gain.value)} ({percent(p.gain.low)} to {percent(p.gain.high)})"
        for p in findings.comparisons
        if p.enough
    )
    return f" The {findings.base} path is as good as what was tried (gain of {tried})."


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules see: the numbers of a run, the engine's predictions, and the use of its hosts and connections.

    unseen: bytes on an interface that no recorded operation of the base explains; None if they are not known.
    unproven: a rated interface that the base may not use; None without one.
    """

    f: Findings
    base: Arm
    predicted: Predicted
    hosts: Sequence[HostUse]
    unseen: Unseen | None = None
    connected: Connected = NO_CONNECTIONS
    unproven: TransportInfo | None = None

    @property
    def step_ns(self) -> float:
        """Ns of the mean step of the base."""
        return self.f.parts_ns["step"].value

    @property
    def moving(self) -> Estimate:
        """Ns a step of exposed communication and waiting after the last rank arrived.

        Without that of lost packets and of operations within hosts. Receives are in its high end alone: they may be
        waiting for the sender.
        """
        f = self.f
        found = f.delays.usual_ns if self.lost and f.delays is not None else f.parts_ns["moving"]
        apart_ns = f.received_ns + f.within_ns
        ends = (found.value - apart_ns, found.low - apart_ns, found.high - f.within_ns)
        return Estimate(*(max(0.0, end) for end in ends))

    @property
    def apart(self) -> str:
        """What most of the exposed communication is, if no rule is about it; "" else."""
        f, half = self.f, self.f.parts_ns["idle"].value / 2
        if f.received_ns > half:
            return f"{ms(f.received_ns)} is in receives, where waiting for the sender cannot be told from transfer"
        return f"{ms(f.within_ns)} is in operations between ranks of one host" if f.within_ns > half else ""

    @property
    def lost(self) -> str:
        """Sentence: the packet loss of base; "" if there is none."""
        return packet_loss(self.connected, self.base)

    @property
    def delays_unknown(self) -> str:
        """Why lost packets may delay typical steps; "" if they do not."""
        return f"packets are lost, and {UNKNOWN_DELAYS}" if self.lost and self.f.delays is None else ""

    @property
    def coarse_clocks(self) -> bool:
        """True if the ranks' clocks may differ by too much of the time in transfer.

        Clocks that are aligned by operations are exact enough.
        """
        f, parts = self.f, self.f.parts[self.base]
        if f.achieved.get(self.base) is None or parts.transfer_ns <= 0:
            return False
        aligned = any(rank.clock.method == BY_OPERATIONS for rank in f.trace.ranks)
        error_ns = transfer_error_ns(f.trace) if aligned else f.clock_error_ns
        return error_ns * parts.operations > limits.CLOCK_SHARE * parts.transfer_ns

    @property
    def missing(self) -> str:
        """Why waiting for the last rank cannot be told from transfer; "" if it can."""
        ranks = self.f.unheard.get(self.base, "")
        if ranks:
            return f"{ranks}: waiting for the last rank cannot be told from transfer"
        return self.f.not_matched.rstrip(".")

    @property
    def no_lateness(self) -> str:
        """Why the lateness of the ranks is not known, where it is not."""
        return self.missing or "no step was recorded by all ranks"

    @property
    def link_unproven(self) -> str:
        """Why the stated speed of the link may be of an interface that the base does not use; "" if it is not."""
        return "" if self.unproven is None else carrier_text(self.unproven.interface or "", self.base)

    @property
    def unequal_mtus(self) -> str:
        """How the MTUs of the base's interfaces differ between the hosts; "" if they do not."""
        return unequal_mtus(self.f.trace, self.base, self.hosts)

    @property
    def link_bps(self) -> float | None:
        """The speed of the link that the base uses in bits a second; None if it is not known."""
        return None if self.link_unproven else self.f.link_bps

    @property
    def others(self) -> Unseen | None:
        """Unseen bytes that are surely a large part of the interface's, at a rate that can matter; None if not."""
        more = self.unseen
        if more is None or more.surely < limits.OTHER_TRAFFIC:
            return None
        least_bps = limits.OTHER_TRAFFIC_RATE * (self.speed_of(more) or limits.SLOWEST_LINK_BPS)
        return more if more.unseen_bps >= least_bps else None

    def speed_of(self, more: Unseen) -> float | None:
        """The speed of the interface of unseen bytes in bits a second; None if it is not known."""
        return None if more.interface == LOOPBACK else more.link_bps or self.link_bps

    @property
    def transfer_unknown(self) -> str:
        """Why the rate in transfer is not known; "" if it is."""
        if self.missing:
            return self.missing
        return clock_text(self.f) if self.coarse_clocks else ""

    @property
    def rates_known(self) -> str:
        """Why rates may not be judged; "" if they may."""
        if self.transfer_unknown:
            return self.transfer_unknown
        more = self.others
        if more is not None:
            return f"unseen: {percent(more.part)} of {more.interface}'s bytes are of no recorded operation"
        return self.not_recorded

    @property
    def not_recorded(self) -> str:
        """The note on communication that is not in the record; "" if there is none."""
        return self.f.not_recorded

    def evidence(self, cause: str, code: str, step_ns: float | None = None, **fields: object) -> RuleResult:
        """Return the result of a rule, with the limits of this run. step_ns: which the saving is of, if another."""
        step = self.step_ns if step_ns is None else step_ns
        return RuleResult(cause, code, limit_ns=limits.GAIN_MIN * step, step_ns=step, **fields)  # type: ignore[arg-type]

    def evidence_of_mean(self, cause: str, code: str, rest_ns: float, saving: Estimate, **fields: object) -> RuleResult:
        """Return the result of a rule whose saving is of the mean of all steps. rest_ns: as in RuleResult.

        The saving counts from GAIN_MIN of the mean step that it gives: s >= GAIN_MIN (rest + s).
        """
        found = self.evidence(cause, code, rest_ns + saving.value, saving=saving, **fields)
        return replace(found, rest_ns=rest_ns, limit_ns=limits.GAIN_MIN / (1 - limits.GAIN_MIN) * rest_ns)

    def bounded(self, saving: Estimate) -> tuple[Estimate, str]:
        """A predicted saving of the network, and if steps without traffic bound it, a note on that, else "".

        The bound is what these steps save, as far as measured, and the exposed time of the script's own calls. No
        saving is above the exposed communication and waiting of the step.
        """
        pair, idle = self.f.headroom, self.f.parts_ns["idle"]
        ends = (min(saving.value, idle.value), min(saving.low, idle.value), min(saving.high, idle.high))
        saving = within_step(Estimate(*ends), self.step_ns)
        if pair is None or not pair.enough:
            return saving, ""
        less, script_ns = pair.difference_ns, self.f.script_ns
        most = [max(0.0, script_ns - end) for end in (less.value, less.high, less.low)]
        if saving.value <= most[0] and saving.low <= most[1] and saving.high <= most[2]:
            return saving, ""
        ends = (saving.value, saving.low, saving.high)
        note = f"; at most the {ms(most[0])} that steps without traffic save ({self.f.label}: {pair.pairs} pairs)"
        return Estimate(*map(min, ends, most)), note

    def more_steps(self, saving: Estimate, error_ns: float = 0.0) -> dict[str, Any]:
        """`needs` and `more` of a rule: the steps after which the interval of a saving leaves out the limit.

        The interval's width falls as 1/sqrt(n). error_ns: an error beside the interval, which more steps do not reduce.
        """
        reach = saving.value - error_ns - limits.GAIN_MIN * self.step_ns
        if not 0 < reach < saving.value - saving.low < math.inf:
            return {"needs": MORE_STEPS}
        more = math.ceil(all_steps(self.f) * (((saving.value - saving.low) / reach) ** 2 - 1))
        text = f"Measure {more} more steps ({how_longer(self.f)}), on hosts that do nothing else."
        return {"needs": _too_many(self.f, more, "saving") or text, "more": more}

    def share(self, saving: Estimate) -> str:
        """A saving as text, with its part of the typical step."""
        return share_of(saving, self.step_ns)


NOTHING_SAVED = Estimate(0.0, 0.0, 0.0)
UNKNOWN_DELAYS = "most steps may be delayed, so single delayed ones cannot be told"
MORE_STEPS = "Measure more steps, on hosts that do nothing else."
INSIDE_STEPS = (
    "Look in trace.json.gz for the rank that is late at each operation of a step: more steps do not tell why."
)
SAME_ARMS = f"Measure longer with the same arms: at least {limits.PAIRS_MIN} blocks of each."
ALL_RECORDS = "Copy the records of all ranks into the run folder, and report again."


def same_arms(f: Findings) -> str:
    """What gives a comparison of the arms that this run measured."""
    return ALL_RECORDS if f.trace.lacking else SAME_ARMS


def how_longer(f: Findings) -> str:
    """What a user changes so that a run has more steps. Only a study records one rank alone."""
    return "--rounds of the study" if SINGLE in f.trace.arms else "a longer training"


def all_steps(f: Findings) -> int:
    """The steps of all arms."""
    return sum(time.steps + time.blocks for time in f.times.values())


def _too_many(f: Findings, more: int, what: str) -> str:
    """Say that a run like this cannot decide whether a saving or difference counts; "" if `more` steps can."""
    if more <= limits.LONGER_MAX * all_steps(f):
        return ""
    times = f"over {limits.LONGER_MAX} times those of this run"
    return f"Nothing more: the {what} is too near the limit to be decided here. It needs {more} more steps, {times}."


def clock_text(f: Findings) -> str:
    """Say how far the ranks' clocks may differ."""
    if math.isinf(f.clock_error_ns):
        return "the clocks of the ranks were not compared"
    return f"clocks may differ by {ms(f.clock_error_ns)}"


def carrier_text(interface: str, arm: Arm) -> str:
    """Say that an arm may not use an interface, and how to know it."""
    return f"no bytes on {interface} show that {arm} uses it (NETBOTTLENECK_MONITOR_HZ=10)"


def steps_to_decide(f: Findings, pair: Paired) -> int:
    """Number of further steps, of all arms, that decide a comparison."""
    cycle = sum(round(time.steps / max(time.blocks, 1)) + 1 for time in f.times.values())
    return max(pair.more_pairs(limits.GAIN_MIN), 1) * cycle


def more_steps(f: Findings, pair: Paired) -> str:
    """The run that decides a comparison."""
    more = steps_to_decide(f, pair)
    ask = f"Measure {more} more steps with the same arms ({how_longer(f)}): the interval is then narrow enough."
    return (_too_many(f, more, "difference") if pair.enough else "") or ask
