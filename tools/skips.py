"""Reads tests/skips.txt: the allowed skips, their reasons, and where a reason is not accepted."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from pathlib import Path

SKIPS = Path(__file__).resolve().parents[1] / "tests" / "skips.txt"
# Where a reason may not be accepted: in continuous integration (the variable CI), and in pytest's runs with --only.
PLACES = ("CI", "peers", "frameworks", "nccl")


def listed() -> list[tuple[str, str, str]]:
    """Return the rows as (glob over tests, part of the skip's reason, where it is not accepted or "").

    Raises ValueError for an invalid row.
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


def may_skip(name: str, message: str, places: Collection[str]) -> bool:
    """Return True if a test (such as c/test_lanes or py/test_lab.py::test_x) may be skipped for this reason there."""
    return any(
        fnmatch.fnmatchcase(name, glob) and reason in message and place not in places
        for glob, reason, place in listed()
    )
