"""Verdict: the largest saving that a rule proves for a run, or why there is none. Pure. The rules are in rules.py."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from netbottleneck.analysis import thresholds as limits
from netbottleneck.analysis.comparisons import Paired, changed_at
from netbottleneck.analysis.findings import Findings, stock_is_as_good
from netbottleneck.analysis.intervals import ONE_STEP, WARMUP_STEPS, missing_ranks, uncounted
from netbottleneck.analysis.rule_facts import (
    ALL_RECORDS,
    Facts,
    FullUse,
    Predicted,
    RuleResult,
    all_steps,
    as_good_sentence,
    handicap_sentence,
    how_longer,
    more_steps,
    same_arms,
    steps_to_decide,
)
from netbottleneck.analysis.rules import beside, full_use, judge, without_traffic
from netbottleneck.analysis.traffic import SAME_MTU, unproven, unseen
from netbottleneck.analysis.usage import NO_CONNECTIONS, Connected, HostUse
from netbottleneck.trace.model import HOOKED, NOT_TIMED, STAYS, Trace
from netbottleneck.trace.transports import BARE, NULL, STOCK, Arm
from netbottleneck.units import listed, ms, percent

CODES = (
    "TRANSPORT_LIMITED",
    "LINK_LIMITED",
    "LATENCY_LIMITED",
    "BUCKET_SIZES",
    "HOST_LIMITED",
    "STRAGGLER",
    "IMBALANCE",
    "INPUT_LIMITED",
    "OPTIMIZER_LIMITED",
    "MISCONFIGURED",
    "OTHER_TRAFFIC",
    "PACKET_LOSS",
    "NO_COMMUNICATION",
    "NOT_NETWORK",
    "DO_NOTHING",
    "INCONCLUSIVE",
)
# Of these, the causes in the network or in how the training uses it.
NETWORK_CODES = (
    "TRANSPORT_LIMITED",
    "LINK_LIMITED",
    "LATENCY_LIMITED",
    "BUCKET_SIZES",
    "MISCONFIGURED",
    "OTHER_TRAFFIC",
    "PACKET_LOSS",
)

# Of these, the causes that need other arms beside the base.
COMPARED_CODES = ("TRANSPORT_LIMITED", "HOST_LIMITED")


@dataclass(frozen=True, slots=True)
class Verdict:
    """code: one of CODES; why: the numbers behind it; next: what to do.

    evidence: the result of every rule, the largest saving first; () if no rule was evaluated. The first one that fired
    is the verdict. more: of an inconclusive one, how many further steps decide; None if that is not known. full_use:
    the step at the achievable rate, if it is known and shorter.
    """

    code: str
    why: str
    next: str
    evidence: tuple[RuleResult, ...] = ()
    more: int | None = None
    full_use: FullUse | None = None

    @property
    def of_network(self) -> bool:
        """True if the cause is in the network or in how the training uses it."""
        return self.code in NETWORK_CODES

    @property
    def secondary(self) -> tuple[RuleResult, ...]:
        """The other rules that fired."""
        return tuple(one for one in self.evidence if one.fired and one.code != self.code)

    def _repr_html_(self) -> str:
        rows = (("Verdict", self.code), ("Why", self.why), ("Next", self.next))
        return "<table>" + "".join(f"<tr><th>{k}</th><td>{escape(v)}</td></tr>" for k, v in rows) + "</table>"


# Answers without a rule: there is nothing to judge.


def _no_communication(f: Findings) -> Verdict | None:
    if f.base is None and f.trace.groups:
        why = "Steps and compute are missing: the dumps of a flight recorder have only operations."
        return Verdict("INCONCLUSIVE", why, "Measure steps: netbottleneck run SCRIPT, or profile with torch.profiler.")
    if f.trace.size < 2:
        return Verdict("NO_COMMUNICATION", "One rank: nothing is sent.", "Start two ranks or more.")
    stays = next((note for note in f.trace.notes if note.startswith(STAYS)), None)
    if f.base is None and stays is not None:
        why = f"No step with communication was recorded: {stays}."
        return Verdict("INCONCLUSIVE", why, "Leave out NETBOTTLENECK_TRANSPORT to observe this script.")
    if f.base is None or (f.parts[f.base].operations == 0 and not f.base.real):
        return (
            _no_step(f)
            or _no_counted_step(f)
            or _only_bare(f)
            or Verdict(
                "NO_COMMUNICATION",
                "No step with communication was recorded.",
                "Measure steps under stock, or another transport, for longer than one block.",
            )
        )
    return _no_operation(f, f.times[f.base].steps) if f.parts[f.base].operations == 0 else None


def _no_step(f: Findings) -> Verdict | None:
    """The verdict if no step was recorded, or if steps are left out because a file of events is missing."""
    if f.trace.lacking:
        return Verdict("INCONCLUSIVE", _sentence(f.trace.lacking), ALL_RECORDS)
    if f.trace.steps:
        return None
    why = "No step was recorded: a step ends where a torch optimizer updates weights, and the first ones are left out"
    steps = WARMUP_STEPS + limits.STEPS_MIN
    next_ = f"Set NETBOTTLENECK_START_STEP=0, and measure {steps} steps or more whose updates a torch optimizer makes."
    return Verdict("INCONCLUSIVE", f"{why} (NETBOTTLENECK_START_STEP).", next_)


def _no_counted_step(f: Findings) -> Verdict | None:
    """The verdict if steps of transports were recorded, and none of them counts."""
    why = uncounted(f.trace)
    if why == ONE_STEP:
        return Verdict("INCONCLUSIVE", f"No step counts: {why}", "Set NETBOTTLENECK_BLOCK_STEPS=9.")
    return _too_few(f"No step counts: {why}", limits.STEPS_MIN) if why else None


def _only_bare(f: Findings) -> Verdict | None:
    """The verdict if all recorded steps are those of the untouched script, in an observing run that was too short."""
    blocks = Counter((step.rank, step.block) for step in f.trace.steps)
    if not blocks or STOCK not in f.trace.arms or any(step.arm != BARE for step in f.trace.steps):
        return None
    why = "Only steps of the untouched script were recorded (bare), without their communication."
    return _too_few(why, max(blocks.values()) + limits.STEPS_MIN)


def _too_few(why: str, more: int) -> Verdict:
    """The verdict if a run has too few steps."""
    return Verdict("INCONCLUSIVE", why, f"Measure {more} more steps or more.", more=more)


def _no_operation(f: Findings, steps: int) -> Verdict:
    """The verdict if several ranks recorded steps, and no operation in them."""
    untimed = next((note for note in f.trace.notes if NOT_TIMED in note), None)
    if untimed is not None:
        return Verdict(
            "NO_COMMUNICATION",
            f"No operation could be timed in {steps} steps. {untimed}",
            "Measure a run without that communication hook.",
        )
    found = f"{f.trace.size} ranks, and no operation in {steps} steps."
    if f.not_recorded:
        return Verdict("INCONCLUSIVE", f"{found} {f.not_recorded}", "Record all that communicates, and report again.")
    return Verdict(
        "NO_COMMUNICATION",
        found,
        "Check whether the model is wrapped (DDP or DistributedOptimizer), or gradients are skipped.",
    )


def _too_little(f: Findings) -> Verdict | None:
    assert f.base is not None
    steps = f.times[f.base].steps
    if steps >= limits.STEPS_MIN:
        return None
    why = f"{steps} steps were counted; a verdict needs at least {limits.STEPS_MIN}."
    return _too_few(why, limits.STEPS_MIN - steps)


def _providers(f: Findings) -> Verdict | None:
    """The verdict if the ranks differ in the provider of the base's transport."""
    assert f.base is not None
    name = f.base.transport
    providers: dict[str, list[int]] = {}
    for rank in f.trace.ranks:
        for info in rank.transports:
            if info.provider and info.name == name:
                providers.setdefault(info.provider, []).append(rank.rank)
    if len(providers) < 2:
        return None
    by_rank = "; ".join(f"{provider}: rank {listed(ranks)}" for provider, ranks in providers.items())
    return Verdict("MISCONFIGURED", f"Ranks differ in {name}'s provider ({by_rank}).", _one_provider(f.base))


def _one_provider(arm: Arm) -> str:
    """What gives all ranks the same provider of an arm's transport."""
    if arm.own_path:
        return "Start all ranks with the same backend of init_process_group, or with the same Horovod."
    return "Install the same NCCL for all ranks." if arm.over_nccl else "Set NETBOTTLENECK_PROVIDER."


# The verdict.


def _nothing(facts: Facts, evidence: tuple[RuleResult, ...]) -> Verdict:
    """The verdict if no rule fired."""
    f = facts.f
    assert f.share is not None
    share = f.share
    lost = f"{percent(share.value)} of the step ({percent(share.low)} to {percent(share.high)})"
    typical = f.parts_ns["idle"].value / max(facts.step_ns, 1)
    if not share.low <= typical <= share.high and percent(typical) != percent(share.value):
        # The other sentences are about the middle half.
        lost = f"{percent(typical)} of the typical step, and {lost.replace('the step', 'all steps together')}"
    doubt = next((one for one in evidence if one.uncertain), None)
    if doubt is not None:
        why = f"{doubt.cause[0].upper()}{doubt.cause[1:]} may cost {doubt.share}"
        why += f", but the interval includes {percent(limits.GAIN_MIN)} ({doubt.rests})."
        return Verdict("INCONCLUSIVE", why, f"{doubt.needs}{_rest(facts, evidence)}", evidence, doubt.more)
    rest = share
    if _once(f) and f.moving_share is not None:
        rest, lost = f.moving_share, f"{percent(typical)} of the typical step"
    if max(rest.high, typical) < limits.NETWORK_SHARE_MIN:
        return _small(facts, evidence, lost)
    as_good = stock_is_as_good(f) and not facts.missing
    return _as_good(facts, evidence) if as_good else _unexplained(facts, evidence, lost)


def _as_good(facts: Facts, evidence: tuple[RuleResult, ...]) -> Verdict:
    """The verdict if no rule fired, and surely no other transport gains enough."""
    f = facts.f
    base, good, moving = f.base or STOCK, as_good_sentence(f).strip(), f.parts_ns["moving"].value
    if moving < limits.NETWORK_SHARE_MIN * facts.step_ns or not _is_link_unknown(facts):
        return Verdict("DO_NOTHING", good, f"Do nothing: keep {base}.", evidence)
    why = f"{good} But {_part_of_moving(facts, moving)}, is left, and whether the link is full is not known."
    return Verdict("INCONCLUSIVE", why, f"Keep {base}. {LINK_SPEED}", evidence)


def _part_of_moving(facts: Facts, ns: float) -> str:
    """A part of what is exposed or waits after the last rank arrived, as text."""
    what = "exposed communication and waiting after the last rank arrived"
    return f"{ms(ns)} of {what}, {percent(ns / facts.step_ns)} of the step"


# What a rule of these explains of exposed transfer is its saving alone. Others in NETWORK_CODES explain all of it.
PARTIAL_CODES = ("BUCKET_SIZES", "LATENCY_LIMITED", "PACKET_LOSS", "OTHER_TRAFFIC")


def _rest(facts: Facts, evidence: Sequence[RuleResult]) -> str:
    """How much transfer is exposed beside the causes that fired, and how to find why; "" if these explain it.

    Also "" if it is little, or not known, or if what tells more was measured.
    """
    f, moving, fired = facts.f, facts.f.parts_ns["moving"].value, [one for one in evidence if one.fired]
    if any(one.code in (*NETWORK_CODES, *COMPARED_CODES) and one.code not in PARTIAL_CODES for one in fired):
        return ""
    saved = sum(one.saving.high for one in fired if one.saving is not None and one.code in PARTIAL_CODES)
    how = _missing(facts) if not f.comparisons else LINK_SPEED if _is_link_unknown(facts) else ""
    if f.lateness is None or not how or moving - saved < limits.NETWORK_SHARE_MIN * facts.step_ns:
        return ""
    return f" No rule explains {_part_of_moving(facts, moving - saved)}. {how}"


def _unexplained(facts: Facts, evidence: tuple[RuleResult, ...], lost: str) -> Verdict:
    """The verdict if no rule explains how much of the step is lost.

    MTUs that differ are one only where all that was compared is decided.
    """
    f = facts.f
    withheld = handicap_sentence(f) or _sentence(facts.missing or facts.apart) or facts.lost
    withheld = f" {withheld}" if withheld else ""
    close = _close_comparison(f)
    if close is not None:
        gain = f"{percent(close.gain.value)} ({percent(close.gain.low)} to {percent(close.gain.high)})"
        why = f"The gain of {close.other} is {gain} over {close.pairs} pairs of blocks, and the interval includes "
        why += f"{percent(limits.GAIN_MIN)}."
        return Verdict(
            "INCONCLUSIVE",
            f"Exposed communication and waiting are {lost}. {why}{withheld}",
            more_steps(f, close),
            evidence,
            steps_to_decide(f, close),
        )
    why = f"Exposed communication and waiting are {lost}, and no rule explains them.{withheld}"
    if facts.missing:
        return Verdict("INCONCLUSIVE", why, _whole_record(f), evidence)
    if facts.unequal_mtus and all(pair.enough for pair in f.comparisons):
        why += f" {_sentence(facts.unequal_mtus)}"
        return Verdict("MISCONFIGURED", why, f"{SAME_MTU} Then measure again.", evidence)
    few = _few_late(f)
    if few is not None:
        return Verdict(
            "INCONCLUSIVE", f"{why} {few[0]}", f"Measure {few[1]} more steps ({how_longer(f)}).", evidence, few[1]
        )
    if f.parts_ns["idle"].value < limits.NETWORK_SHARE_MIN * facts.step_ns:
        return Verdict("INCONCLUSIVE", f"{why} Single steps hold most of it.", SINGLE_STEPS, evidence)
    return Verdict("INCONCLUSIVE", why, *_unmeasured(facts, evidence))


def _few_late(f: Findings) -> tuple[str, int] | None:
    """(sentence on steps in which a rank is late by much more, the steps to add), if they are too few to be judged.

    None if they do not hold most of what is exposed.
    """
    late, whole = f.lateness, f.whole
    if late is None or whole is None or not late.left_out or 2 * whole.skew_ns < whole.exposed_ns + whole.wait_ns:
        return None
    more = math.ceil(all_steps(f) * (limits.DELAYED_STEPS_MIN / late.left_out - 1))
    often = f"In {late.left_out} of {late.left_out + late.steps} steps a rank is late by much more than usual"
    return f"{often}, too few steps to find a cause.", more


def _once(f: Findings) -> bool:
    """Return True if a rank that is late in one step alone holds most of what is exposed."""
    return f.lateness is not None and f.lateness.left_out == 1 and _few_late(f) is not None


def _small(facts: Facts, evidence: tuple[RuleResult, ...], lost: str) -> Verdict:
    """The verdict if no rule fired and communication, as far as it is recorded, is small."""
    f, unknown = facts.f, facts.not_recorded
    few = _few_late(f) if _once(f) else None
    if facts.missing:
        why = f"The recorded communication is {lost}. {_sentence(facts.missing)}"
        return Verdict("INCONCLUSIVE", why, _whole_record(f), evidence)
    if unknown:
        return Verdict(
            "INCONCLUSIVE",
            f"The recorded communication is {lost}. {unknown}",
            "Measure the other model in a separate run: netbottleneck.attach.",
            evidence,
        )
    return Verdict(
        "NOT_NETWORK",
        f"Exposed communication and waiting are {lost}, below {percent(limits.NETWORK_SHARE_MIN)}."
        f"{'' if few is None else f' {few[0]}'}{as_good_sentence(f)}",
        f"Do nothing about the network{_bound(f)}.",
        evidence,
    )


def _whole_record(f: Findings) -> str:
    """What to do so that waiting for the last rank can be told from transfer."""
    return SAME_STEPS if f.not_matched and not missing_ranks(f.trace) else ALL_RECORDS


def _sentence(reason: str) -> str:
    """A reason of a rule as a sentence; "" for none."""
    return f"{reason[0].upper()}{reason[1:]}." if reason else ""


def _close_comparison(f: Findings) -> Paired | None:
    """The comparison whose gain may be large enough, and may not; None if there is none, or gains are withheld."""
    undecided = [pair for pair in f.comparisons if pair.enough and pair.gain.low <= limits.GAIN_MIN <= pair.gain.high]
    return None if f.handicapped else max(undecided, key=lambda pair: pair.gain.high, default=None)


def _bound(f: Findings) -> str:
    """What no communication would save: measured, or a remark that the share leaves out compute beside traffic."""
    if f.headroom is not None and f.headroom.enough:
        gain = f.headroom.gain
        return f": without communication the step would be {percent(gain.value)} shorter ({f.label})"
    compare = f" (compare with {NULL})" if f.trace.buckets else ""  # without gradients of ours nothing can be left out
    return f": its share does not include compute that traffic slows{compare}"


def _unmeasured(facts: Facts, evidence: tuple[RuleResult, ...]) -> tuple[str, tuple[RuleResult, ...], int | None]:
    """The first measurement that this run does not have, the evidence, and the steps of that measurement if known."""
    f = facts.f
    short = next((pair for pair in f.comparisons if not pair.enough), None)
    if short is not None:
        return more_steps(f, short), evidence, steps_to_decide(f, short)
    return _missing(facts), evidence, None


def _missing(facts: Facts) -> str:
    """The first measurement that this run does not have, if every comparison has enough pairs."""
    f = facts.f
    others = {arm for arm in f.trace.arms if arm.real and arm != f.base}
    hooked = any(HOOKED in note for note in f.trace.notes)
    if hooked or not f.trace.buckets:  # no transport of ours can move its gradients
        return LINK_SPEED if _is_link_unknown(facts) else WITHOUT_HOOK if hooked else QUIET
    if 2 * f.script_ns > f.parts_ns["idle"].value:  # they travel over the script's own process group
        return LINK_SPEED if _is_link_unknown(facts) else CALLS
    if not others:
        return _comparison(facts)
    if others - {pair.other for pair in f.comparisons}:
        return same_arms(f)
    return QUIET if NULL in f.trace.arms else without_traffic(f)


def _comparison(facts: Facts) -> str:
    """Advice for a run of one arm: to compare it. If it is ours, the speed of the link tells more."""
    assert facts.f.base is not None
    if _is_link_unknown(facts) and not facts.f.base.own_path:
        return LINK_SPEED
    arms = ",".join(beside(facts.f, "tcp"))
    return f"Measure NETBOTTLENECK_TRANSPORT={arms} NETBOTTLENECK_STREAMS=auto: a probe and a comparison."


def _is_link_unknown(facts: Facts) -> bool:
    """Return True if there are several hosts, and the speed of their link is not known."""
    return facts.link_bps is None and len({rank.host_id for rank in facts.f.trace.ranks}) > 1


LINK_SPEED = "Measure again with NETBOTTLENECK_LINK_GBPS, the link's speed: then the link's part of this is known."
SINGLE_STEPS = (
    "Look at the longest steps in trace.json.gz, and at what happens then on the hosts and the network: lost packets, "
    "other traffic, a host that stops. Without such a cause, measure more steps."
)
SAME_STEPS = "Profile the same steps of one run on all ranks, with netbottleneck run where groups have a part of them."
WITHOUT_HOOK = "Measure a run without that communication hook: no transport takes turns with it."
CALLS = "Look at the script's own calls, which are most of this and which no transport carries: fewer, or smaller ones."
QUIET = "Measure on hosts that do nothing else, for more steps."


def _of_one_state(trace: Trace, found: Verdict) -> Verdict:
    """The verdict, which asks first for a record of one state if it is inconclusive and the step time has changed."""
    changed = changed_at(trace) if found.code == "INCONCLUSIVE" and trace.of_script else None
    if changed is None:
        return found
    alone = f"Record the state since step {changed.step} alone: NETBOTTLENECK_START_STEP={changed.step}."
    return replace(found, next=f"{alone} {found.next}")


def decide(
    findings: Findings,
    predicted: Predicted | None = None,
    hosts: Sequence[HostUse] = (),
    connected: Connected = NO_CONNECTIONS,
) -> Verdict:
    """The verdict: the rule with the largest saving that is surely above GAIN_MIN of the step.

    predicted: savings by the what-if engine, of the base; None: rules use formulas over the findings instead. hosts,
    connected: use of interfaces and connections. If no rule fired: do nothing, not the network, or inconclusive and
    what to measure.
    """
    for answer in (_no_communication, _too_little, _providers):
        verdict = answer(findings)
        if verdict is not None:
            return verdict
    assert findings.base is not None
    predicted = predicted or Predicted()
    if findings.script_ns > limits.GAIN_MIN * findings.parts_ns["step"].value:
        # The engine predicts the gradients alone: formulas over all that is exposed count the script's own calls too.
        predicted = replace(predicted, savings_ns={k: v for k, v in predicted.savings_ns.items() if k == "buckets"})
    trace, base = findings.trace, findings.base
    others, perhaps = unseen(trace, base, hosts), unproven(trace, base, hosts)
    facts = Facts(findings, base, predicted, hosts, others, connected, perhaps)
    evidence = judge(facts)
    first = evidence[0]
    if first.fired:
        found = Verdict(first.code, first.why, f"{first.next}{_rest(facts, evidence)}", evidence)
    else:
        found = _of_one_state(trace, _nothing(facts, evidence))
    return replace(found, full_use=full_use(facts))
