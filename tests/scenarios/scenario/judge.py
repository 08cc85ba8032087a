"""Judges scenarios: the verdict about a job, its differences from the expectation, its saving against the twin."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from netbottleneck.analysis import findings, traffic, usage, verdict
from netbottleneck.analysis.intervals import counted
from netbottleneck.report import summary, text
from netbottleneck.whatif import sweeps
from scenario.cases import CASES, Case
from scenario.job import Job, connected_of, samples_of, trace_of

# What belongs to no phase of a step, at most, as a part of it.
OTHER_MAX = 0.02


@dataclass(frozen=True)
class Judged:
    """A job's findings and verdict, and the use of its hosts and connections. weights: of a training, their hash."""

    found: findings.Findings
    verdict: verdict.Verdict
    hosts: Sequence[usage.HostUse] = ()
    connected: usage.Connected = usage.NO_CONNECTIONS
    weights: str = ""

    @property
    def summary(self) -> Mapping[str, Any]:
        """Content of summary.json."""
        return summary.summary(self.found, self.verdict, self.hosts, self.connected)

    @property
    def fired(self) -> set[str]:
        """Codes of the rules that fired, and of the verdict."""
        return {self.verdict.code, *(one.code for one in self.verdict.evidence if one.fired)}


@dataclass(frozen=True)
class Result:
    """A scenario's outcome. wrong: what differs from the expectation. error: relative, of the saving. twin: or None."""

    case: Case[Any]
    got: Judged
    wrong: tuple[str, ...]
    error: float | None = None
    twin: Judged | None = None


def judge(job: Job, seed: int) -> Judged:
    """Run a job and decide, as a report does."""
    trace = trace_of(job, seed)
    found = findings.find(trace)
    return decide(found, usage.hosts(found.trace, samples_of(job, trace)), connected_of(job))


def decide(
    found: findings.Findings,
    hosts: Sequence[usage.HostUse],
    connected: usage.Connected = usage.NO_CONNECTIONS,
) -> Judged:
    """Decide, as a report does."""
    faster = {} if found.base is None else traffic.faster(found.trace, found.base, hosts, connected)
    predicted = sweeps.savings(found.trace, found.base, found.full_link_bps, faster)
    return Judged(found, verdict.decide(found, predicted, hosts, connected), hosts, connected)


def number(values: Any, path: str) -> float:
    """Return a number of summary.json by its path, such as "bandwidth.stock.active_bits_per_s".

    An entry of a list has its place as its name, or one of its values. Raises LookupError for no number.
    """
    for name in path.split("."):
        if isinstance(values, list) and not name.isdigit():
            values = {value: one for one in values for value in one.values() if isinstance(value, str)}
        values = values[int(name) if isinstance(values, list) else name]
    if not isinstance(values, int | float):
        raise LookupError(path)
    return float(values)


def _beyond(got: Judged, numbers: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    """The numbers that are not within their limits."""
    for path, (least, most) in numbers.items():
        try:
            value = number(got.summary, path)
        except (LookupError, TypeError):
            yield f"the summary has no {path}"
            continue
        if not least <= value <= most:
            yield f"{path} is {value:.6g}, not {least:.6g} to {most:.6g}"


def _differences(case: Case[Any], got: Judged) -> Iterator[str]:
    if got.verdict.code not in case.expected:
        yield f"expected {' or '.join(case.expected)}"
    for code in (*case.expected, *case.also):
        if (len(case.expected) == 1 or code in case.also) and code not in got.fired:
            yield f"{code} did not fire"
    yield from (f"{code} fired" for code in case.never if code in got.fired)
    if case.says not in got.verdict.why:
        yield f"the reason lacks {case.says!r}"
    if case.advises not in got.verdict.next:
        yield f"the advice lacks {case.advises!r}"
    if got.found.base is not None:
        parts = got.found.parts[got.found.base]
        rest = parts.other_ns - parts.input_ns - parts.evaluation_ns - parts.checkpoint_ns
        if rest > OTHER_MAX * parts.step_ns:
            yield f"other is {rest / parts.step_ns:.1%} of the step"
    yield from (f"the advice has {text!r}" for text in case.silent if text in got.verdict.next)
    yield from _beyond(got, case.numbers)


def _step_ns(judged: Judged, *, uneven: bool) -> float:
    """The mean step of the middle half, as the report has it; of all, for a cause that differs from step to step."""
    found = judged.found
    assert found.base is not None
    if not uneven:
        return found.parts_ns["step"].value
    own = [step.duration_ns for step in counted(found.trace) if step.arm == found.base]
    return sum(own) / len(own)


T = TypeVar("T")


def run(case: Case[T], seed: int, judge: Callable[[T, int], Judged]) -> Result:
    """Judge a scenario and its twin."""
    got = judge(case.job, seed)
    wrong = list(_differences(case, got))
    error = twin = None
    if case.gone is not None:
        twin = judge(case.gone, seed)
        if case.cause in twin.fired:
            wrong.append(f"twin: {case.cause} fired: {twin.verdict.why}")
        first = got.verdict.evidence[0] if got.verdict.evidence else None
        if case.saves and first is not None and first.saving is not None:
            uneven = case.cause in ("PACKET_LOSS", "IMBALANCE")
            truth = _step_ns(got, uneven=uneven) - _step_ns(twin, uneven=uneven)
            error = first.saving.value / truth - 1
    for check in case.checks:
        wrong += check(got, twin)
    if case.same is not None and not got.weights == judge(case.same, seed).weights != "":
        wrong.append("the weights differ from those of the other training")
    return Result(case, got, tuple(wrong), error, twin)


def example(name: str) -> str:
    """Return the end of the report of a scenario, from the table of its rules on. Raises KeyError for no scenario."""
    make = {make.__name__: make for make in CASES}[name]
    got = judge(make(random.Random(f"1/{name}")).job, 1)
    whole = text.text(got.found, got.verdict)
    start = whole.find("Rules: ")
    return whole[start if start >= 0 else whole.index("Verdict: ") :]
