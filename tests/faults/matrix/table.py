"""The outcomes as text: one line each, the table, and the page of the documentation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import skips
from matrix.cell import Fault, Outcome

PAGE = """# Injected faults

`make faults` runs this matrix; `tests/faults/run.py --write` generates this page. Each row is a
fault, injected during all-reduces and broadcasts. `shm` is `tcp` with memory shared between the
ranks of a host; with 4 ranks and a link it is two hosts of two ranks.

Every result is compared bit for bit. A cell shows the time until every surviving rank has raised
its error. If the job continues, it shows the longest pause between two rounds of operations. After
each cell the run checks for leftovers: processes, sockets, shared mappings, threads, and files in
`/tmp` and `/dev/shm`. One exception: libfabric 1.17's `net` provider does not close a connection
whose handshake was in progress when its endpoint was closed. The end of the process closes it.

"""


def judged(outcome: Outcome) -> Outcome:
    """Return an outcome, failed if it is not applicable for a reason that tests/skips.txt does not accept here."""
    if outcome.verdict != "not applicable":
        return outcome
    if skips.may_skip(f"faults/{outcome.name}", outcome.details, ["CI"] if os.environ.get("CI") else []):
        return outcome
    return replace(outcome, verdict="failed", details=f"not listed in tests/skips.txt: {outcome.details}")


def seconds(outcome: Outcome) -> str:
    return "" if outcome.seconds is None else f"{outcome.seconds:.2f} s"


def line(outcome: Outcome) -> str:
    """Return an outcome as a line."""
    left = f"; left behind: {outcome.left}" if outcome.left else ""
    return f"{outcome.verdict:14} {outcome.name:34} {seconds(outcome):>8}  {outcome.details}{left}"


def short(outcome: Outcome) -> str:
    if outcome.verdict == "passed":
        return seconds(outcome) or "passed"
    return "n/a" if outcome.verdict == "not applicable" else "FAILED"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the matrix: a row for each fault, a column for each network and number of ranks."""
    columns = list(dict.fromkeys((outcome.network, outcome.size) for outcome in outcomes))
    cells = {(each.fault, each.network, each.size): short(each) for each in outcomes}
    lines = [f"{'':28}" + "".join(f"{network} {size}".rjust(10) for network, size in columns)]
    for name in dict.fromkeys(outcome.fault for outcome in outcomes):
        row = [cells.get((name, *column), "").rjust(10) for column in columns]
        lines.append(f"{name:28}" + "".join(row))
    absent = sum(outcome.verdict == "not applicable" for outcome in outcomes)
    return "\n".join(["", *lines, "", f"not applicable (n/a): {absent}"])


def page(rows: Sequence[Fault], outcomes: Sequence[Outcome]) -> str:
    """Return the page of the documentation."""
    columns = list(dict.fromkeys((outcome.network, outcome.size) for outcome in outcomes))
    cells = {(each.fault, each.network, each.size): short(each) for each in outcomes}
    heads = [f"{network}, {size} ranks" for network, size in columns]
    lines = [f"| fault | required outcome | {' | '.join(heads)} |", "| --- " * (2 + len(heads)) + "|"]
    for row in rows:
        bound = "" if row.within_s is None else f", within {row.within_s:g} s"
        results = " | ".join(cells.get((row.name, *column), "") for column in columns)
        lines.append(f"| {row.title} | {row.expects}{bound} | {results} |")
    absent = dict.fromkeys(
        f"* {each.fault}, {each.network}, {each.size} ranks: {each.details}"
        for each in outcomes
        if each.verdict == "not applicable"
    )
    absent_lines = ["", "Not applicable:", "", *absent] if absent else []
    return PAGE + "\n".join([*lines, *absent_lines, "", totals(outcomes)]) + "\n"


def totals(outcomes: Sequence[Outcome]) -> str:
    """Return the last line."""
    count = [sum(outcome.verdict == verdict for outcome in outcomes) for verdict in ("passed", "failed")]
    return f"{count[0]} passed, {count[1]} failed"
