"""Results of a benchmark: samples to rows of numbers, and rows as a table in text and HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis.intervals import bus_factor

VERSION = 1
_COLUMNS = (
    ("transport", "", 13),
    ("streams", "", 10),
    ("size", "(B)", 11),
    ("count", "(elements)", 11),
    ("type", "", 9),
    ("redop", "", 8),
    ("time", "(us)", 11),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("busbw", "(Gbit/s)", 9),
    ("wire", "(Gbit/s)", 9),
    ("cpu", "(s/GB)", 8),
    ("#wrong", "", 7),
)


@dataclass(frozen=True)
class Samples:
    """One path at one size: values[rank, round] of (time_ns, cpu_ns, wire_bytes, payload_bytes, wrong, busy_ns).

    wire: wire_bytes count what hosts sent through their interfaces; if False, all traffic of the loopback.
    payload_bytes: -1 if not known. inner: all-reduces of a round. busy_ns: summed over all CPUs of the machine.
    """

    values: NDArray[np.int64]
    count: int
    itemsize: int
    wire: bool
    inner: int = 1

    def row(self) -> dict[str, Any]:
        """Return the numbers of a row. The time of an iteration is that of its slowest rank.

        algbw = bytes / median time, busbw = algbw × 2(n−1)/n (nccl-tests, doc/PERFORMANCE.md). wire_bits_per_s: bits
        sent in one direction by a host (on loopback: a rank) during the iterations, over their time. cpu_s_per_gb: CPU
        time of all threads of all ranks per 10^9 bytes of the tensor. `rounds`: one value per round.
        """
        ranks, rounds, _ = self.values.shape
        nbytes = self.count * self.itemsize
        times = self.values[:, :, 0].max(axis=0) / 1e9 / self.inner
        busy = self.values[:, :, 5].max(axis=0) / 1e9 / self.inner
        p10, median, p90 = (float(x) for x in np.quantile(times, (0.1, 0.5, 0.9)))
        algbw = nbytes / median
        spent = float(self.values[:, :, 1].sum()) / 1e9 / self.inner
        return {
            "bytes": nbytes,
            "count": self.count,
            "time_s": {"median": median, "p10": p10, "p90": p90, "n": rounds},
            "algbw_bytes_per_s": algbw,
            "busbw_bytes_per_s": algbw * bus_factor("allreduce", ranks),
            "wire_bits_per_s": self._wire(float(times.sum())),
            "cpu_s_per_gb": spent / (nbytes * rounds / 1e9) if nbytes else None,
            "wrong": int(self.values[:, :, 4].sum()),
            "rounds": {"time_s": times.tolist(), "busy_s": busy.tolist(), "sent_bytes": self._sent()},
        }

    def _sent(self) -> list[int]:
        """Return wire bytes per all-reduce, over all hosts, for each round; on loopback every rank counts the same."""
        sent = self.values[:, :, 2]
        return [int(n) // self.inner for n in (sent.sum(axis=0) if self.wire else sent.max(axis=0))]

    def _wire(self, seconds: float) -> float | None:
        sent = self.values[:, :, 2 if self.wire else 3]
        if (sent < 0).any():
            return None
        # Only one rank per host counts the interface's bytes.
        sources = int((sent.sum(axis=1) > 0).sum()) or 1
        return 8 * float(sent.sum()) / sources / self.inner / seconds


def heading() -> str:
    """Return the head of the table: names and units."""
    names = "".join(name.rjust(width) for name, _, width in _COLUMNS)
    units = "".join(unit.rjust(width) for _, unit, width in _COLUMNS)
    return f"#{names[1:]}\n#{units[1:]}"


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a row's cells as text."""
    wire, cpu = row["wire_bits_per_s"], row["cpu_s_per_gb"]
    lanes = str(row["streams"])
    if lanes == "auto" and row.get("streams_used"):
        lanes = f"auto ({row['streams_used']})"
    shm = str(row.get("shm"))
    return (
        str(row["transport"]) + ("+shm" if shm.startswith("on") else ""),
        lanes if shm != "on" else "-",
        str(row["bytes"]),
        str(row["count"]),
        str(row["dtype"]),
        str(row["redop"]),
        f"{1e6 * row['time_s']['median']:.1f}",
        f"{row['algbw_bytes_per_s'] / 1e9:.3f}",
        f"{row['busbw_bytes_per_s'] / 1e9:.3f}",
        f"{8 * row['busbw_bytes_per_s'] / 1e9:.2f}",
        "-" if wire is None else f"{wire / 1e9:.2f}",
        "-" if cpu is None else f"{cpu:.2f}",
        str(row["wrong"]),
    )


def line(row: Mapping[str, Any]) -> str:
    """Return a row of the table."""
    return "".join(cell.rjust(width) for cell, (_, _, width) in zip(cells(row), _COLUMNS, strict=True))


@dataclass
class Results:
    """A benchmark: `head` describes the environment, `rows` have the numbers, `notes` the paths left out."""

    head: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """The number of wrong elements over all iterations and ranks."""
        return sum(int(row["wrong"]) for row in self.rows)

    @property
    def probe(self) -> dict[str, list[tuple[int, float]]]:
        """By transport: (lanes, bits a second one way), as measured for streams=auto."""
        found: dict[str, list[tuple[int, float]]] = {}
        for row in self.rows:
            if row.get("probe"):
                found[row["transport"]] = [(lanes, 8e9 * moved / ns) for lanes, moved, ns in row["probe"] if ns]
        return found

    def row(self, transport: str, streams: int | str | None = None, nbytes: int | None = None) -> dict[str, Any]:
        """Return the last row of a transport, of the given streams and size if not None. Raises KeyError."""
        for row in reversed(self.rows):
            if row["transport"] == transport and streams in (None, row["streams"]) and nbytes in (None, row["bytes"]):
                return dict(row)
        raise KeyError(f"no row of {transport}, streams {streams}, {nbytes} bytes")

    def table(self) -> str:
        """Return the table as text."""
        return "\n".join([heading(), *map(line, self.rows), *(f"# {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        return {"version": VERSION, **self.head, "notes": self.notes, "rows": self.rows}

    def write(self, path: Path | str) -> None:
        """Write the JSON file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    def _repr_html_(self) -> str:
        head = [f"{name} {unit}".strip() for name, unit, _ in _COLUMNS]
        body = "".join(_html_row("td", cells(row)) for row in self.rows)
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<table>{_html_row('th', head)}{body}</table>{notes}"


def _html_row(tag: str, texts: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts) + "</tr>"
