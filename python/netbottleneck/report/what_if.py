"""Answers of the what-if engine in a terminal, sentences and a table for each kind of question; and a page's curve."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from rich.console import Console
from rich.table import Table

from netbottleneck.analysis.findings import Findings
from netbottleneck.report.html import Curve
from netbottleneck.report.text import bare_ms, make_table, put_row, screen
from netbottleneck.units import gbit, ms, nbytes, percent, streams
from netbottleneck.whatif import questions, sweeps
from netbottleneck.whatif.compat2020 import Prediction
from netbottleneck.whatif.questions import NEGLIGIBLE_GAIN, Answer, LeastValue, prediction
from netbottleneck.whatif.sweeps import Answers

__all__ = ["show"]

# Products of workers, links and ratios: scaling factors by link, or every value if there is one link.

LINKS_MAX, LINKS_WITH_INTERVALS_MAX = 5, 3
Cell = tuple[int, float, float]  # workers, compression ratio, link
Known = Mapping[Cell, Answer]  # the cells that have intervals


def _cell(row: Prediction) -> Cell:
    return row.workers, row.compression, row.link_bps


def _factor(row: Prediction, known: Known) -> str:
    text, one = percent(row.scaling_factor, digits=1), known.get(_cell(row))
    if one is None or one.scaling is None:
        return text
    return f"{text} ({100 * one.scaling.low:.1f}-{100 * one.scaling.high:.1f})"


def _time(row: Prediction, known: Known, value_s: float) -> str:
    """The step, or the overhead, which differs from it by a constant."""
    text, one = ms(value_s * 1e9), known.get(_cell(row))
    if one is None or one.step_s is None:
        return text
    low, high = (1e9 * (value_s + end - row.step_s) for end in (one.step_s.low, one.step_s.high))
    return f"{text} ({bare_ms(low)}-{bare_ms(high)})"


def _links_table(rows: Sequence[Prediction], links: Sequence[float], known: Known) -> Table:
    table = make_table("workers", "ratio", *(f"{bps / 1e9:g} Gbit/s" for bps in links))
    cells = {_cell(row): _factor(row, known) for row in rows}
    for workers, ratio in dict.fromkeys((row.workers, row.compression) for row in rows):
        put_row(table, f"{workers}", f"{ratio:g}x", *(cells.get((workers, ratio, bps), "") for bps in links))
    return table


def _one_link_table(rows: Sequence[Prediction], known: Known) -> Table:
    table = make_table("workers", "compression", "overhead", "step", "scaling factor", "buckets")
    for row in rows:
        overhead, step = (_time(row, known, value_s) for value_s in (row.overhead_s, row.step_s))
        cells = f"{row.workers}", f"{row.compression:g}x", overhead, step, _factor(row, known), f"{row.buckets}"
        put_row(table, *cells)
    return table


def tables(rows: Sequence[Prediction], known: Known = MappingProxyType({})) -> Iterator[tuple[str, Table]]:
    """Tables with their titles; the number of tables depends on the number of links. Intervals are in brackets."""
    links = sorted({row.link_bps for row in rows})
    ends = ", intervals in brackets" if known else ""
    if len(links) == 1:
        yield f"{rows[0].model} at {gbit(links[0])}{ends}", _one_link_table(rows, known)
        return
    most = LINKS_WITH_INTERVALS_MAX if known else LINKS_MAX
    for at in range(0, len(links), most):
        yield (
            f"{rows[0].model}: scaling factor by workers, compression ratio and link{ends}",
            _links_table(rows, links[at : at + most], known),
        )


def show_grid(rows: Sequence[Prediction], how: str, console: Console | None = None) -> None:
    """Print rows of one model to the terminal; how: name of the prediction's rules."""
    shown = screen(console)
    for title, table in tables(rows):
        shown.print(f"{title} (predicted: {how})", style="bold", highlight=False, markup=False)
        shown.print(table)


# Answers about a recorded run.

# More inverse answers than this are shown as a table.
LEAST_VALUES_MAX = 4
NOT_REACHABLE = {
    "least link": "no link is fast enough",
    "enough link": "no link is fast enough",
    "least compression": "no compression is enough",
    "least lanes": "no number of streams is enough",
}
NOT_NEEDED = {"least link": "no faster link is needed", "least lanes": "no more streams are needed"}


def _step(one: Answer) -> str:
    """A step with its interval and label."""
    if one.step_s is None:
        return f"refused: {one.refused}"
    step = one.step_s
    between = f", {ms(step.low * 1e9)} to {ms(step.high * 1e9)}" if one.interval else ", no interval"
    return f"{ms(step.value * 1e9)}{between} ({one.label})"


def _recorded_step(answers: Answers) -> Iterator[str]:
    now, was = answers.of("now"), answers.job.measured_ns
    if was is not None:
        name = f" of {answers.job.transport}" if answers.job.transport else ""
        yield f"The step{name} took {ms(was.value)}, {ms(was.low)} to {ms(was.high)} (measured)."
    if now is not None and now.step_s is not None:
        off = (
            f", {percent(now.step_s.value * 1e9 / was.value - 1, digits=1, signed=True)} from the measured step"
            if was is not None
            else ""
        )
        yield f"The model of this run predicts {_step(now)}{off}."


def _amount(one: LeastValue, value: float) -> str:
    if math.isinf(value):
        return "above the search range"
    if one.question.endswith("link"):
        return gbit(value)
    if one.question == "least lanes":
        return streams(round(value))
    return "no compression" if value == 1 else f"{value:.3g}x compression"


def _interval(one: LeastValue) -> str:
    if one.value is None or not one.interval:
        return ""
    return f"{_amount(one, one.value.low)} to {_amount(one, one.value.high)}"


def _where(one: LeastValue) -> str:
    hosts = "" if one.ranks_per_host == 1 else f", {one.ranks_per_host} ranks per host"
    return f"{one.workers} workers{hosts}" + ("" if one.link_bps is None else f", {one.link_bps / 1e9:g} Gbit/s")


def _least_sentence(one: LeastValue) -> str:
    """An inverse answer in a sentence."""
    if one.reached:
        return f"{_where(one)}: {one.aim} is {one.reason}: {NOT_NEEDED[one.question]} ({one.label})."
    if one.value is None:
        why = "not answered" if one.refused else NOT_REACHABLE[one.question]
        return f"{_where(one)}, {one.aim}: {why}: {one.reason}."
    amount, between = _amount(one, one.value.value), _interval(one) or "no interval"
    if one.question == "enough link":
        return f"{_where(one)}: a link faster than {amount}, {between}, does not help: {one.aim} ({one.label})."
    how = {"least link": ", fully used", "least compression": " at the achieved rate"}.get(one.question, "")
    return f"{_where(one)}: {one.aim} needs {amount}{how}, {between} ({one.label})."


def _least_table(answers: Answers) -> Table:
    """Table of inverse answers, used if they are too many for sentences."""
    ended = any(one.interval for one in answers.least_values)
    table = make_table("setting", "target", "required", *(["interval"] if ended else []))
    for one in answers.least_values:
        amount = one.reason if one.value is None else _amount(one, one.value.value)
        aim = (
            f"a gain of at most {percent(NEGLIGIBLE_GAIN, digits=0)} by a faster link"
            if one.question == "enough link"
            else one.aim
        )
        put_row(table, _where(one), aim, amount, *([_interval(one)] if ended else []))
    return table


def sentences(answers: Answers) -> list[str]:
    """The answers in sentences; each number is labelled measured or predicted."""
    texts = list(_recorded_step(answers))
    for question, opening in (
        ("chosen", "With {what}"),
        ("achievable", "At {what}"),
        ("full use", "With {what}"),
        ("overlap", "With {what}"),
        ("free", "With {what}"),
    ):
        one = answers.of(question)
        if one is not None:
            what = opening.format(what=one.setting.title)
            texts.append(f"{what}, the step would be {_step(one)}.")
    return [
        *texts,
        *(map(_least_sentence, answers.least_values) if len(answers.least_values) <= LEAST_VALUES_MAX else []),
    ]


def _step_cells(one: Answer, ended: bool) -> list[str]:
    if one.step_s is None or one.scaling is None:
        return ["refused"]
    step, factor = one.step_s, one.scaling
    cells = [ms(step.value * 1e9), percent(factor.value, digits=1)]
    if ended:
        cells.insert(1, f"{bare_ms(step.low * 1e9)}-{bare_ms(step.high * 1e9)} ms" if one.interval else "")
        cells.append(f"{100 * factor.low:.1f}-{100 * factor.high:.1f} %" if one.interval else "")
    return cells


def _table(rows: Sequence[Answer]) -> Table:
    """One row for each answer; intervals if any answer has one."""
    ended = any(one.interval and one.step_s is not None for one in rows)
    columns = ["step", "interval", "scaling factor", "interval"] if ended else ["step", "scaling factor"]
    table = make_table("", *columns)
    for one in rows:
        cells = _step_cells(one, ended)
        put_row(table, one.setting.title, *cells, *[""] * (len(columns) - len(cells)))
    return table


def _tables(answers: Answers) -> Iterator[tuple[str, Table, Sequence[str]]]:
    """Tables with their titles, which say how well their numbers are known, and with the remarks about their rows."""
    told = set(remarks(answers))
    for title, rows in answers.tables:
        own = list(_grid_tables(answers, rows)) or ([(title, _table(rows))] if rows else [])
        about, plan = _remarks_of(rows, told), _assumed(answers.job, rows)
        for number, (over, table) in enumerate(own, 1):
            yield f"{over}{plan} ({least_certain(rows)})", table, about if number == len(own) else ()
    if len(answers.least_values) > LEAST_VALUES_MAX:
        yield f"Required values ({least_certain(answers.least_values)})", _least_table(answers), ()


def _assumed(job: questions.Job, rows: Sequence[Answer]) -> str:
    """The fusion that a table of a layer log assumes, as it records none; "" for a run, and for a table of plans."""
    if job.fit is not None or any(one.setting.plan != job.plan for one in rows):
        return ""
    size, cycle = nbytes(job.plan.fusion_bytes), ms(job.plan.cycle_ns)
    words = {
        "explicit": "its own buckets",
        "ddp": f"DDP's buckets of {size}",
        "horovod": f"Horovod's fusion, at most {size} every {cycle}",
        "paper2020": f"the 2020 paper's fusion, {size} or {cycle}",
    }
    return f"; plan: {words[job.plan.rule]}"


def _grid_tables(answers: Answers, rows: Sequence[Answer]) -> Iterator[tuple[str, Table]]:
    """Tables of a product of workers, links and ratios; nothing for other rows."""
    whole = [one for one in rows if one.setting.question == "grid" and not one.refused]
    if len(whole) == len(rows) > 1:
        cost = whole[0].setting.cost
        cells = [prediction(answers.job, one) for one in whole]
        known = {_cell(row): one for row, one in zip(cells, whole, strict=True) if one.interval}
        for over, table in tables(cells, known):
            yield over + (f", {sweeps.per_host(cost)}" if cost.ranks_per_host > 1 else ""), table


def least_certain(rows: Sequence[Answer | LeastValue]) -> str:
    """The label of a table or a picture: that of its least certain number."""
    poor = any(one.label == questions.POORLY_PREDICTED for one in rows)
    return questions.POORLY_PREDICTED if poor else questions.PREDICTED


def remarks(answers: Answers) -> list[str]:
    """Caveats of all answers."""
    return list(dict.fromkeys((*answers.job.notes, *answers.missing)))


def _remarks_of(rows: Sequence[Answer], told: set[str]) -> list[str]:
    """Caveats of the rows of a table, without those in `told`, to which they are added.

    Of remarks that differ only in their numbers, the first is kept.
    """
    kinds: dict[str, str] = {}
    for note in (note for one in rows for note in one.notes):
        kinds.setdefault(re.sub(r"\d[\d.]*", "0", note), note)
    found = [note for note in kinds.values() if not any(line.startswith(note) for line in told)]
    told.update(found)
    refused: dict[str, list[str]] = {}
    for one in rows:
        if one.refused:
            refused.setdefault(one.refused.partition("; requested:")[0], []).append(one.setting.title)
    return [*found, *(f"{why}. Not answered: {', '.join(titles)}" for why, titles in refused.items())]


def _print_remarks(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(f"! {line}", style="yellow", highlight=False, markup=False)


def show(answers: Answers, console: Console | None = None) -> None:
    """Print the answers to the terminal; remarks about a table follow it."""
    shown = screen(console)
    for line in sentences(answers):
        shown.print(line, highlight=False, markup=False)
    _print_remarks(shown, remarks(answers))
    for title, table, about in _tables(answers):
        shown.print()
        shown.print(title, style="bold", highlight=False, markup=False)
        shown.print(table)
        _print_remarks(shown, about)


# The curve of a page: the step by rate of a fully used link.

# Rates, as multiples of the achieved one.
CURVE_FACTORS = tuple(2.0 ** (power / 2) for power in range(-4, 13))


def curve(findings: Findings) -> Curve:
    """Predict the base's step over links slower and faster than the achieved rate."""
    if findings.base is None:
        return Curve(missing="no step could be split")
    try:
        job = questions.job(findings.trace, findings.base)
    except ValueError as error:
        return Curve(missing=str(error))
    why = questions.refusal(job) or job.misfit
    if why:
        return Curve(missing=f"no prediction: {why}")
    rate_bps = job.cost.link.rate_bps
    if not math.isfinite(rate_bps):
        return Curve(missing="no prediction: the time of an operation does not depend on its size")
    speeds = [rate_bps * factor for factor in CURVE_FACTORS]
    answers = sweeps.answers(job, list(sweeps.links(job, speeds)))
    steps = [(bps, one.step_s) for bps, one in zip(speeds, answers, strict=True)]
    points = [(bps, 1e9 * s.value, 1e9 * s.low, 1e9 * s.high) for bps, s in steps if s is not None]
    if not points:
        return Curve(missing=next(one.refused for one in answers))
    free, was = questions.answer(job, sweeps.free(job)).step_s, job.measured_ns
    return Curve(
        tuple(points),
        None if was is None else (rate_bps, was.value, was.low, was.high),
        None if free is None else 1e9 * free.value,
    )
