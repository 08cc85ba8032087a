"""Reads tests/skips.txt: every skip that a test may make, why, and where that reason does not count."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from pathlib import Path

SKIPS = Path(__file__).resolve().parents[1] / "tests" / "skips.txt"
# Where a reason may not count: in continuous integration (the variable CI), and in pytest's runs with --only.
PLACES = ("CI", "peers", "frameworks")


def listed() -> list[tuple[str, str, str]]:
    """Return the rows as (glob over tests, part of what the skip says, where it does not count or "").

    Raises ValueError for a row of another form.
    """
    rows = []
    for number, line in enumerate(SKIPS.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        glob, reason, place, *more = *(part.strip() for part in line.split("|")), ""
        if not glob or not reason or len(more) > 1 or (place and place not in PLACES):
            raise ValueError(f"{SKIPS}:{number}: not `test | why` or `test | why | {' or '.join(PLACES)}`: {line}")
        rows.append((glob, reason, place))
    return rows


def may_skip(name: str, said: str, places: Collection[str]) -> bool:
    """Tell whether a test (as in c/test_pair or py/test_lab.py::test_x) may be skipped with these words there."""
    return any(
        fnmatch.fnmatchcase(name, glob) and reason in said and place not in places for glob, reason, place in listed()
    )
