"""Table of the rounds of several benchmark runs of one case, by size and path, with the errors found in them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from judge import Figure, ratio
from peers.iperf import IPERF

from netbottleneck.bench import Results
from netbottleneck.bench.paths import COMPARISONS

# Paths that send nothing over the counted interfaces, or more than an all-reduce needs.
_NOT_COUNTED = (*COMPARISONS, *IPERF, "mpi-shm")


class Table:
    """The rounds so far: one value per round for each size and path, aligned between paths."""

    def __init__(self, counted: bool = True) -> None:
        self.notes: dict[str, str] = {}
        self.rows: list[Mapping[str, Any]] = []
        self._counted = counted
        self._rounds: dict[int, int] = defaultdict(int)
        self._values: dict[tuple[int, str, str], list[float]] = defaultdict(list)
        self._broken: dict[tuple[int, str], str] = {}
        self._ranks = 2

    def add(self, found: Results) -> None:
        """Add the rows of one more run."""
        self.rows += found.rows
        for note in found.notes:
            name, _, why = note.partition(" left out: ")
            self.notes[name] = why
        for size in {row["bytes"] for row in found.rows}:
            self._rounds[size] += max(len(row["rounds"]["time_s"]) for row in found.rows if row["bytes"] == size)
        for row in found.rows:
            self._take(row)

    def _take(self, row: Mapping[str, Any]) -> None:
        size, name, rounds = row["bytes"], path_name(row), row["rounds"]
        self._ranks = row["ranks"]
        for what in ("time_s", "busy_s"):
            self._values[size, name, what] += rounds[what]
        if row["wrong"]:
            self._broken[size, name] = f"{row['wrong']} elements of {name} were wrong"
        least = min(rounds["sent_bytes"], default=0)
        if self._counted and row["transport"] not in _NOT_COUNTED and least < row["owed_bytes"]:
            self._broken[size, name] = (
                f"the interfaces sent {least} bytes for {name}, which must send {row['owed_bytes']}"
            )

    def series(self, size: int, name: str, what: str = "time_s") -> list[float] | None:
        """Return a path's rounds; None if it was not in every run."""
        found = self._values.get((size, name, what), [])
        return found if found and len(found) == self._rounds[size] else None

    def rounds(self, size: int) -> int:
        """Return the number of rounds of a size."""
        return self._rounds[size]

    def broken(self, size: int, names: Sequence[str]) -> str:
        """Return the error of any of these paths; "" if there is none."""
        return "; ".join(self._broken[size, name] for name in names if (size, name) in self._broken)

    def why_not(self, size: int, names: Sequence[str]) -> str:
        """Return why one of these paths has no rounds; "" if all have."""
        for name in names:
            if self.series(size, name) is None:
                return f"{name}: {self.notes.get(name.removesuffix(' x4'), 'not measured in every run')}"
        return ""

    def values(self, size: int, what: str, series: Mapping[str, Sequence[float]]) -> str:
        """Return the values that a ratio compares: medians as busbw or µs, or means of busy seconds per 10^9 bytes."""
        parts = []
        for name, rounds in series.items():
            middle = statistics.median(rounds)
            if what != "time_s":
                parts.append(f"{name} {sum(rounds) / len(rounds) / size * 1e9:.2f} s/GB")
            elif size < 10**5:
                parts.append(f"{name} {1e6 * middle:.0f} µs")
            else:
                moved = 2 * (self._ranks - 1) / self._ranks * size
                parts.append(f"{name} {8e-9 * moved / middle:.2f} Gbit/s")
        return ", ".join(parts)


def path_name(row: Mapping[str, Any]) -> str:
    """Return a path's name, with its number of streams if that is fixed."""
    name, lanes = str(row["transport"]), row["streams"]
    return f"{name} x{lanes}" if name in ("tcp", "ofi") and lanes != "auto" else name


def against(table: Table, size: int, ours: str, needed: Sequence[str], bar: float, **more: Any) -> Figure:
    """Return the figure of a path against the best of others, in time, or in `what` by means.

    needed: without any of these it was not run. also: who counts where it is there. constant: seconds, in place of
    others. label: what it is called.
    """
    what: str = more.get("what", "time_s")
    constant: float | None = more.get("constant")
    label: str = more.get("label", f"{ours} {megabytes(size)} against {', '.join(needed)}")
    why = table.why_not(size, [ours, *needed])
    mine = table.series(size, ours, what)
    if why or mine is None:
        return Figure(label, bar, reason=why or "not measured")
    others = [*needed, *(name for name in more.get("also", ()) if table.series(size, name, what) is not None)]
    theirs = {name: table.series(size, name, what) or [] for name in others}
    if constant is not None:
        theirs["constant"] = [constant] * len(mine)
    estimate = ratio(mine, theirs, means=what != "time_s")
    note = table.values(size, what, {ours: mine, **theirs})
    return Figure(label, bar, estimate, len(mine), note, broken=table.broken(size, [ours, *others]))


def megabytes(size: int) -> str:
    """64000000: "64 MB"."""
    return f"{size / 1e6:g} MB" if size >= 10**6 else f"{size / 1024:g} KiB"
