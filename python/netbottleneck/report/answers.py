"""Answers of the what-if engine in a terminal: plain words first, then a table for each kind of question."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from netbottleneck.report.predicted import tables as matrices
from netbottleneck.report.terminal import WIDTH, make_table, put_row
from netbottleneck.units import gbit, ms, streams
from netbottleneck.whatif.inverse import NOTHING, Least
from netbottleneck.whatif.questions import Answer, prediction
from netbottleneck.whatif.sweeps import Told

# More inverse answers than this are a table.
LEASTS_MAX = 4
NONE = {
    "least link": "no link is fast enough",
    "enough link": "no link is fast enough",
    "least compression": "no compression is enough",
    "least lanes": "no number of streams is enough",
}


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _step(one: Answer) -> str:
    """A step with its interval and label."""
    if one.step_s is None:
        return f"refused: {one.refused}"
    step = one.step_s
    between = f", {ms(step.low * 1e9)} to {ms(step.high * 1e9)}" if one.interval else ", no interval"
    return f"{ms(step.value * 1e9)}{between} ({one.label})"


def _now(told: Told) -> Iterator[str]:
    now, was = told.of("now"), told.job.measured_ns
    if was is not None:
        name = f" of {told.job.transport}" if told.job.transport else ""
        yield f"The step{name} took {ms(was.value)}, {ms(was.low)} to {ms(was.high)} (measured)."
    if now is not None and now.step_s is not None:
        off = f", {100 * (now.step_s.value * 1e9 / was.value - 1):+.1f} % off" if was is not None else ""
        yield f"The model of this run makes it {_step(now)}{off}."


def _amount(one: Least, value: float) -> str:
    if math.isinf(value):
        return "more than was looked for"
    if one.question.endswith("link"):
        return gbit(value)
    if one.question == "least lanes":
        return streams(round(value))
    return "no compression" if value == 1 else f"{value:.3g}x fewer bytes"


def _interval(one: Least) -> str:
    if one.value is None or not one.interval:
        return ""
    return f"{_amount(one, one.value.low)} to {_amount(one, one.value.high)}"


def _at(one: Least) -> str:
    hosts = "" if one.ranks_per_host == 1 else f", {one.ranks_per_host} on a host"
    return f"{one.workers} workers{hosts}" + ("" if one.link_bps is None else f", {one.link_bps / 1e9:g} Gbit/s")


def _least(one: Least) -> str:
    """An inverse answer in a sentence."""
    if one.value is None:
        return f"{_at(one)}, {one.aim}: {NONE[one.question]}: {one.reason}."
    amount, between = _amount(one, one.value.value), _interval(one) or "no interval"
    if one.question == "enough link":
        return f"{_at(one)}: a link faster than {amount}, {between}, buys nothing: {one.aim} (predicted)."
    how = {"least link": ", fully used", "least compression": " over the link as it was used"}.get(one.question, "")
    return f"{_at(one)}: {one.aim} needs {amount}{how}, {between} (predicted)."


def _least_table(told: Told) -> Table:
    """Inverse answers that are too many for sentences."""
    ended = any(one.interval for one in told.leasts)
    table = make_table("of", "for", "it takes", *(["interval"] if ended else []))
    for one in told.leasts:
        amount = one.reason if one.value is None else _amount(one, one.value.value)
        aim = f"no more than {100 * NOTHING:g} % by a faster link" if one.question == "enough link" else one.aim
        put_row(table, _at(one), aim, amount, *([_interval(one)] if ended else []))
    return table


def sentences(told: Told) -> list[str]:
    """The answers in plain words; each number is labelled measured or predicted."""
    found = list(_now(told))
    for question, words in (
        ("achievable", "At {what}"),
        ("full use", "With {what}"),
        ("overlap", "With {what}"),
        ("free", "With {what}"),
    ):
        one = told.of(question)
        if one is not None:
            what = words.format(what=one.setting.words)
            found.append(f"{what}, the step would be {_step(one)}.")
    return [*found, *(map(_least, told.leasts) if len(told.leasts) <= LEASTS_MAX else [])]


def _bare(seconds: float) -> str:
    """Ms without the unit."""
    return ms(seconds * 1e9).removesuffix(" ms")


def _cells(one: Answer, ended: bool) -> list[str]:
    if one.step_s is None or one.scaling is None:
        return ["refused"]
    step, factor = one.step_s, one.scaling
    cells = [ms(step.value * 1e9), _percent(factor.value)]
    if ended:
        cells.insert(1, f"{_bare(step.low)}-{_bare(step.high)} ms" if one.interval else "")
        cells.append(f"{100 * factor.low:.1f}-{100 * factor.high:.1f} %" if one.interval else "")
    return cells


def _table(rows: Sequence[Answer]) -> Table:
    """A row each; intervals where there are any."""
    ended = any(one.interval and one.step_s is not None for one in rows)
    columns = ["step", "interval", "scaling factor", "interval"] if ended else ["step", "scaling factor"]
    table = make_table("", *columns)
    for one in rows:
        cells = _cells(one, ended)
        put_row(table, one.setting.words, *cells, *[""] * (len(columns) - len(cells)))
    return table


def _tables(told: Told) -> Iterator[tuple[str, Table]]:
    for title, rows in told.tables:
        whole = [one for one in rows if one.setting.question == "grid" and not one.refused]
        if len(whole) == len(rows) > 1:
            hosts = whole[0].setting.cost.ranks_per_host
            for over, table in matrices([prediction(told.job, one) for one in whole]):
                yield over + (f", {hosts} ranks on a host" if hosts > 1 else ""), table
        elif rows:
            yield title, _table(rows)
    if len(told.leasts) > LEASTS_MAX:
        yield "What it takes", _least_table(told)


def remarks(told: Told) -> list[str]:
    """What to know before believing a number; of those that differ in their numbers alone, the first."""
    rows = [one for _, own in told.tables for one in own]
    refused: dict[str, list[str]] = {}
    for one in rows:
        if one.refused:
            refused.setdefault(one.refused.partition("; asked for")[0], []).append(one.setting.words)
    notes = [note for one in rows for note in one.notes]
    kinds: dict[str, str] = {}
    for note in (*told.job.notes, *told.missing, *notes):
        kinds.setdefault(re.sub(r"\d[\d.]*", "0", note), note)
    return [*kinds.values(), *(f"{why}. Not answered: {', '.join(words)}" for why, words in refused.items())]


def show(told: Told, console: Console | None = None) -> None:
    """Print the answers to the terminal."""
    screen = console or Console(force_jupyter=False)
    screen.width = min(screen.width, WIDTH) if screen.is_terminal else WIDTH
    for line in sentences(told):
        screen.print(line, highlight=False, markup=False)
    for remark in remarks(told):
        screen.print(f"! {remark}", style="yellow", highlight=False, markup=False)
    for title, table in _tables(told):
        screen.print()
        screen.print(f"{title} (predicted)", style="bold", highlight=False, markup=False)
        screen.print(table)
