"""Tables and lists of docs/layout.md as values: each table by its heading and first column."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

EVERYTHING = {"everything", "everything but cli"}


@dataclass(frozen=True)
class Layout:
    """The tables and lists of the page; sets in place of lists, "*" for everything."""

    c_rooms: dict[str, set[str]]
    c_outside: dict[str, set[str]]
    python_rooms: dict[str, set[str]]
    outside: dict[str, set[str]]
    outside_lazily: dict[str, set[str]]
    foundation: set[str]
    pure_rooms: set[str]
    impure: set[str]


def quoted(text: str) -> set[str]:
    """Return the parts between backticks."""
    return set(re.findall(r"`([^`]+)`", text))


def rows(page: str, section: str, first: str) -> Iterator[list[str]]:
    """Yield the cells of each row of a section's table with this first column. Raises ValueError if it is missing."""
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = iter(text.splitlines())
    if not any(line.startswith(f"| {first} |") for line in lines):
        raise ValueError(f"no table of {first}s under {section!r}")
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def listed(cell: str) -> set[str]:
    """Return the rooms of a cell: "\u2013" is none, everything is "*"."""
    if cell in EVERYTHING:
        return {"*"}
    return {name.strip(" `") for name in cell.split(",")} - {"\u2013"}


def rooms(page: str, section: str) -> dict[str, set[str]]:
    """Return the rooms that each room of a section may use."""
    return {room: listed(may) for names, _, may in rows(page, section, "room") for room in sorted(quoted(names))}


def places(page: str, section: str, first: str) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return where each external header or package may be used, and where only inside a function."""
    anywhere: dict[str, set[str]] = {}
    lazily: dict[str, set[str]] = {}
    for names, cell in rows(page, section, first):
        always, _, inside = cell.partition("; inside a function:")
        for name in quoted(names):
            anywhere[name] = quoted(always)
            if inside:
                lazily[name] = quoted(inside)
    return anywhere, lazily


def sentence(page: str, pattern: str) -> re.Match[str]:
    """Return the match of a sentence, with line breaks as spaces. Raises ValueError if the page lacks it."""
    match = re.search(pattern, page.replace("\n", " "))
    if match is None:
        raise ValueError(f"no sentence like {pattern!r}")
    return match


def read(path: Path) -> Layout:
    """Read the page. Raises ValueError naming a missing table or sentence."""
    page = path.read_text(encoding="utf-8")
    outside, lazily = places(page, "Python", "package")
    pure = sentence(page, r"Analysis reads no ([^:]*): (.*?) may not import (.*?)\.(?: |$)")
    return Layout(
        c_rooms=rooms(page, "C"),
        c_outside=places(page, "C", "header")[0],
        python_rooms=rooms(page, "Python"),
        outside=outside,
        outside_lazily=lazily,
        foundation=quoted(sentence(page, r"Anything may use ([^.]*)\.")[1]),
        pure_rooms=quoted(pure[2]),
        impure=quoted(pure[3]),
    )
