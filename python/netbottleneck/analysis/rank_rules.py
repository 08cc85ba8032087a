"""Rules about the ranks' own time: who is late, what differs at random, input, and the optimizer. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from netbottleneck.analysis import thresholds as limits
from netbottleneck.analysis.arrivals import Lateness
from netbottleneck.analysis.comparisons import Estimate
from netbottleneck.analysis.findings import Findings
from netbottleneck.analysis.rule_facts import (
    INSIDE_STEPS,
    MORE_STEPS,
    Facts,
    RuleResult,
    clock_text,
    share_of,
    within_step,
)
from netbottleneck.units import ms, percent


def _unsure_wait(facts: Facts, saving: Estimate) -> str:
    """Why a wait between ranks may not be judged; "" if it may, or is too short to count."""
    f = facts.f
    if saving.value <= limits.GAIN_MIN * facts.step_ns:
        return ""
    if saving.value < f.clock_error_ns:
        return clock_text(f)
    if f.handicap is not None and f.handicapped and saving.value <= f.handicap.difference_ns.value:
        return f"our own measuring adds {ms(f.handicap.difference_ns.value)} to a step, and may cause this wait"
    return ""


def _clock_error_ns(f: Findings) -> float:
    """Error of a wait between ranks by their clocks; 0 if no clock was compared: such a wait is not judged at all."""
    return f.clock_error_ns if math.isfinite(f.clock_error_ns) else 0.0


def _beside_clocks(saving: Estimate, error_ns: float, step_ns: float) -> Estimate:
    """A saving of a wait between ranks whose clocks differ by at most error_ns, in a step of step_ns."""
    low = min(saving.low, max(0.0, saving.low - error_ns))
    return within_step(replace(saving, low=low, high=saving.high + error_ns), step_ns)


# Where to look for what takes longer on a rank, by phase.
PLACES = {
    "input": "{its} data loader and disk",
    "compute": "{its} clock speed and cores, what else runs there",
    "optimizer": "{its} clock speed and cores, what else runs there",
    "evaluation": "what {its} evaluation does",
    "checkpoint": "where {its} checkpoints go",
    "other": "what {its} code does outside of forward, backward and optimizer",
}


# A loader with workers fetches while its rank waits for a late one, so its own time does not show.
AHEAD = " The others' data loaders may fetch while these wait: if they are nearly as slow, a step saves less."
AS_SLOW = " If the others' loaders are nearly as slow: more data loader workers on all ranks."


def _longer_phases(late: Lateness) -> list[str]:
    """The phases that take longer on the late ranks, the largest first; [] if they do not explain half of the wait."""
    by_size = sorted(late.longer, key=lambda phase: -late.longer[phase])
    found = [phase for phase in by_size if late.longer[phase] > late.persistent_ns.value / 4]
    explained = sum(late.longer[phase] for phase in found)
    return found if 2 * explained > late.persistent_ns.value else []


def _longer(late: Lateness, phases: Sequence[str]) -> str:
    """Sentence, with a space before it: what takes longer on the late ranks; "" if nothing is known."""
    if not phases:
        return ""
    names = ["other code" if phase == "other" else phase for phase in phases]
    whose = f"The {names[0]} of {'these' if late.several else 'its'} ranks" if late.ranks[1:] else f"Its {names[0]}"
    its = "their" if late.ranks[1:] else "its"
    rest = [f"{its} {name} {ms(late.longer[phase])}" for name, phase in zip(names[1:], phases[1:], strict=True)]
    longer = ", ".join([f"{ms(late.longer[phases[0]])} longer than on the other ranks", *rest])
    return f" {whose} takes {longer}.{AHEAD if 'input' in phases else ''}"


def _hidden(late: Lateness, saving: Estimate, wait: Estimate) -> str:
    """Sentence, with a space before it, on transfers that the work of late ranks hides; "" if none."""
    if saving.value >= limits.HIDDEN_LESS * wait.value:
        return ""
    shorter = share_of(saving, late.step_ns)
    return f" If they were on time, transfers would outlast the work, and the step would be {shorter} shorter."


def _look(f: Findings, late: Lateness, phases: Sequence[str]) -> str:
    """Advice where to look for what makes ranks late."""
    names = ", ".join(dict.fromkeys(r.hostname for r in f.trace.ranks if r.rank in late.ranks and r.hostname))
    whose = f"the hosts of {late.who}" if late.several else f"{late.who}'s host"
    where = late.who if late.hosts else f"{whose}{f' ({names})' if names else ''}"
    its = "their" if late.several else "its"
    look = ", ".join(dict.fromkeys(PLACES[phase].format(its=its) for phase in phases or ("compute",)))
    return f"Look at {where}: {look}.{AS_SLOW if 'input' in phases else ''}"


def straggler(facts: Facts) -> RuleResult:
    """Some ranks, or all ranks of some hosts, arrive last, step after step."""
    f, late = facts.f, facts.f.lateness
    if late is None:
        return facts.evidence("straggler", "STRAGGLER", rests=facts.no_lateness)
    if late.straggler is None:
        return facts.evidence("straggler", "STRAGGLER", rests=late.no_straggler)
    error_ns = _clock_error_ns(f)
    unsure = _unsure_wait(facts, late.persistent_ns)
    saving, waited = (_beside_clocks(ns, error_ns, late.step_ns) for ns in (late.saved_ns, late.persistent_ns))
    phases = _longer_phases(late)
    return facts.evidence(
        "straggler",
        "STRAGGLER",
        late.step_ns,
        applies=not unsure,
        saving=saving,
        source=f.label,
        rests=unsure or f"{f.label}: last by rank test over {late.counted}",
        why=f"{late.waited} ({ms(waited.low)} to {ms(waited.high)}) a step, step after step ({late.counted}; chance "
        f"{late.chance:.0e}).{_longer(late, phases)}{_hidden(late, saving, waited)}",
        next=_look(f, late, phases),
        at_most="input" in phases,
        **facts.more_steps(late.saved_ns, error_ns),
    )


def _random_wait(facts: Facts, late: Lateness) -> tuple[Estimate, dict[str, Any]]:
    """The saving of imbalance, and `needs` and `more` of its rule.

    What equal ranks surely save is their difference at the last operation of a step. A wait inside a step counts up to
    the upper end alone: it may be for communication that ends later on one rank, and more steps do not tell.
    """
    jitter, error_ns = late.jitter_ns, _clock_error_ns(facts.f)
    low = 0.0 if _unsure_wait(facts, jitter) else jitter.low
    short = limits.IMBALANCE_STEPS_MIN - late.steps  # of fewer steps, it may be a straggler
    saving = replace(late.even_ns, low=min(low, 0.0) if short > 0 else low)
    needs = facts.more_steps(jitter, error_ns)
    if short > 0:
        needs = {"needs": MORE_STEPS, "more": short * len(facts.f.trace.arms)}
    elif jitter.value <= limits.GAIN_MIN * facts.step_ns:
        needs = {"needs": INSIDE_STEPS}
    return _beside_clocks(saving, error_ns, late.step_ns), needs


EVEN_STEPS = "Make the ranks' steps equally long: batches of equal cost, cores of their own, no other processes."
# Advice by what the late rank does in the steps in which it is late.
RARE_NEXT = {
    "checkpoint": "Write checkpoints in the background (torch.distributed.checkpoint.async_save), less often, or on "
    "all ranks at once.",
    "evaluation": "Evaluate on all ranks, less often, or in another job.",
    "input": "Look at what a late rank does before its forward: its data loader and disk, or other code there.",
}


def imbalance(facts: Facts) -> RuleResult:
    """Steps of the ranks differ at random: each waits for whichever is last."""
    f, late = facts.f, facts.f.lateness
    if late is None:
        return facts.evidence("imbalance", "IMBALANCE", rests=facts.no_lateness)
    unsure, (saving, needs) = _unsure_wait(facts, late.random_ns), _random_wait(facts, late)
    inside_ns = late.even_ns.value - late.jitter_ns.value
    inside = f", {ms(inside_ns)} of it evens out within the step" if ms(inside_ns) != ms(0) else ""
    wait = late.random_ns
    each = f"{ms(wait.value)} ({ms(wait.low)} to {ms(wait.high)})"
    if late.last is not None:
        what = "The ranks' steps differ in length, too." if late.rare is None else late.rare.why
        less = share_of(saving, late.step_ns)
        why = f"{what} Without that, and with {late.who} as late as now, a step would be {less} shorter."
    elif late.rare is not None:
        why = f"{late.rare.why} The others wait: {each} in the mean of all steps.{_hidden(late, saving, wait)}"
    else:
        why = f"The ranks' steps differ in length, and each waits for the last: {each} a step. "
        why += f"No rank is last persistently.{_hidden(late, saving, wait)}"
    return facts.evidence(
        "imbalance",
        "IMBALANCE",
        late.step_ns,
        applies=not unsure,
        saving=saving,
        source=f.label,
        rests=unsure or f"{f.label}: waiting for the last rank{inside}, {late.steps} steps{late.without}",
        why=why,
        next=EVEN_STEPS if late.rare is None else RARE_NEXT.get(late.rare.cause, f"{late.rare.look}{EVEN_STEPS}"),
        **needs,
    )


def _part_of_step(part: Estimate, step_ns: float) -> Estimate:
    """A part of a step, which is neither negative nor longer than the step, as a saving."""
    saving = within_step(part, step_ns)
    return replace(saving, low=max(0.0, saving.low))


def before_forward(facts: Facts) -> RuleResult:
    """Time passes before the forward, in most steps or in single ones: input."""
    f, part, rare = facts.f, facts.f.parts_ns["input"], facts.f.input_delays
    if facts.not_recorded:  # another model may train before this one's forward
        return facts.evidence("input", "INPUT_LIMITED", rests=f"not known: {facts.not_recorded}")
    if rare is not None and rare.mean_ns.value > part.value:
        part, step_ns = rare.mean_ns, rare.rest_ns + rare.mean_ns.value
        where, whole = "in the mean of all steps", f"{ms(step_ns)} of the mean step"
        how = ", more in single steps than in most"
    else:
        step_ns, where, whole, how = facts.step_ns, "of the step", ms(facts.step_ns), ""
    saving = _part_of_step(part, step_ns)
    value, low, high = (percent(end / step_ns) for end in (saving.value, saving.low, saving.high))
    return facts.evidence(
        "input",
        "INPUT_LIMITED",
        step_ns,
        applies=saving.value >= limits.INPUT_SHARE * step_ns,
        saving=saving,
        source=f.label,
        rests=f"{f.label}: {value} {where}",
        why=f"{ms(saving.value)} of {whole} pass before the forward{how} ({low} to {high} of the step): a step saves "
        "that at most.",
        next="Look at what runs before the forward passes, those of micro-batches too. For input: more data loader "
        "workers, or prefetching. Logging counts there as well.",
        at_most=True,
        **facts.more_steps(part),
    )


def optimizer(facts: Facts) -> RuleResult:
    """The optimizer takes a large part of the step."""
    part = facts.f.parts_ns["optimizer"]
    saving = _part_of_step(part, facts.step_ns)
    return facts.evidence(
        "optimizer",
        "OPTIMIZER_LIMITED",
        applies=saving.value >= limits.OPTIMIZER_SHARE * facts.step_ns,
        saving=saving,
        source=facts.f.label,
        rests=f"{facts.f.label}: {percent(saving.value / facts.step_ns)} of the step",
        why=f"The optimizer takes {ms(saving.value)} of {ms(facts.step_ns)} ({percent(saving.low / facts.step_ns)} to "
        f"{percent(saving.high / facts.step_ns)} of the step): a step saves that at most.",
        at_most=True,
        next="A fused or multi-tensor optimizer (foreach=True, fused=True), or updates of larger batches.",
        **facts.more_steps(part),
    )
