"""Values of a benchmark: its request, the contents of its buffers, and its results as samples, rows and tables."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis.bandwidth import bus_factor
from netbottleneck.bench.paths import COMPARISONS, FROM_A_CHECKOUT, Opener, load_peers
from netbottleneck.config import size as parse_size
from netbottleneck.config import streams as parse_streams
from netbottleneck.trace.files import write_text
from netbottleneck.trace.transports import BENCHED

# Contents of a benchmark's buffers, and the check of a result.
#
# Inputs repeat after a prime number of elements. Data moved to a wrong place by any round number of bytes is therefore
# detected, and one period of expected values checks a buffer of any length.

PERIOD = 1_000_003
SEED = 1
REDUCTIONS = ("sum", "min", "max", "product")
_FOLD: dict[str, Callable[..., NDArray[Any]]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


@dataclass(frozen=True)
class Kind:
    """An element type: its NumPy storage type, machine epsilon (0: exact), and smallest positive value."""

    name: str
    store: np.dtype[Any]
    epsilon: float = 0.0
    tiny: float = 0.0

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.store.itemsize

    def decode(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Return values that can be compared; only bfloat16 and float16 are converted, to float32."""
        if self.name == "bfloat16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32) if self.name == "float16" else stored

    def encode(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return float values in the storage type, rounded to nearest even."""
        if self.name == "bfloat16":
            bits = values.astype(np.float32).view(np.uint32)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return values.astype(self.store)


DTYPES: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("float32", np.dtype(np.float32), 2.0**-23, 2.0**-149),
        Kind("float64", np.dtype(np.float64), 2.0**-52, 2.0**-1074),
        Kind("float16", np.dtype(np.float16), 2.0**-10, 2.0**-24),
        Kind("bfloat16", np.dtype(np.uint16), 2.0**-7, 2.0**-133),
        Kind("int8", np.dtype(np.int8)),
        Kind("int32", np.dtype(np.int32)),
        Kind("int64", np.dtype(np.int64)),
        Kind("uint8", np.dtype(np.uint8)),
    )
}


class Data:
    """Inputs of `rank` and the outputs that all ranks must have, for buffers of up to `count` elements.

    Integers are exact and wrap as two's complement. A float may differ from the exact result by ranks × epsilon × the
    sum of the magnitudes (for a product: × the magnitude). This is twice the error of any order of additions.
    """

    def __init__(self, dtype: str, op: str, rank: int, ranks: int, count: int) -> None:
        self.kind = DTYPES[dtype]
        count = min(count, PERIOD)
        exact = op in ("min", "max") or self.kind.epsilon == 0
        wide = np.longdouble if self.kind.name == "float64" else np.float64
        folded: NDArray[Any] | None = None
        size: NDArray[Any] | None = None  # the sum of the magnitudes
        for other in range(ranks):  # one after another: all ranks of a host do this
            values = self._values(op, count, np.random.default_rng([SEED, other]))
            if other == rank:
                self._input = values
            decoded = self.kind.decode(values)
            if not exact:
                decoded = decoded.astype(wide)
            folded = decoded if folded is None else _FOLD[op](folded, decoded)
            if not exact and op == "sum":
                size = np.abs(decoded) if size is None else size + np.abs(decoded)
        assert folded is not None
        self._low = self._high = folded
        if not exact:
            self._low, self._high = self._bounds(folded, np.abs(folded) if size is None else size, ranks)

    def _values(self, op: str, count: int, random: np.random.Generator) -> NDArray[Any]:
        if self.kind.epsilon == 0:
            info = np.iinfo(self.kind.store)
            return random.integers(info.min, info.max, count, dtype=self.kind.store, endpoint=True)
        low, high = (0.5, 1.5) if op == "product" else (-1.0, 1.0)
        return self.kind.encode(random.uniform(low, high, count))

    def _bounds(self, exact: NDArray[Any], size: NDArray[Any], ranks: int) -> tuple[NDArray[Any], NDArray[Any]]:
        margin = ranks * (self.kind.epsilon * size + self.kind.tiny)
        compared = np.float64 if self.kind.name == "float64" else np.float32
        return (exact - margin).astype(compared), (exact + margin).astype(compared)

    def fill(self, buffer: NDArray[Any]) -> None:
        """Fill the whole buffer with this rank's input, in the storage type."""
        for start in range(0, len(buffer), PERIOD):
            part = buffer[start : start + PERIOD]
            part[:] = self._input[: len(part)]

    def wrong(self, buffer: NDArray[Any]) -> int:
        """Return how many elements of a result are wrong."""
        count = 0
        for start in range(0, len(buffer), PERIOD):
            part = self.kind.decode(buffer[start : start + PERIOD])
            right = (part >= self._low[: len(part)]) & (part <= self._high[: len(part)])
            count += len(part) - int(np.count_nonzero(right))
        return count


# A benchmark's request: the command line's arguments as a value.

SHARING = ("auto", "0", "1")
SIZES = (10**6, 16 * 10**6, 64 * 10**6)
# Default iterations by size: (up to bytes, iterations).
ITERATIONS = ((10**6, 20), (16 * 10**6, 10), (1 << 62, 5))


@dataclass(frozen=True)
class Request:
    """All-reduces to measure. streams: lanes of each native transport, 0: auto. iterations 0: by size.

    transports: stock, native transports, names of COMPARISONS, and of the table in `peers`, a Python file or package.

    shm: values of NETBOTTLENECK_SHM (memory shared by ranks of one host), each measured; empty: the setting's value.

    exact: the user named the transports, so a missing one is an error. inner: all-reduces of a timed round, each on the
    result of the previous one. More than one needs a reduction that repeats without effect, min or max.
    """

    transports: tuple[str, ...] = BENCHED
    streams: tuple[int, ...] = (0,)
    sizes: tuple[int, ...] = SIZES
    dtype: str = "float32"
    op: str = "sum"
    iterations: int = 0
    exact: bool = False
    inner: int = 1
    shm: tuple[str, ...] = ()
    peers: str = ""

    def __post_init__(self) -> None:
        _each("transport", self.transports, (*BENCHED, *self.openers()), "" if self.peers else f". {FROM_A_CHECKOUT}")
        _each("dtype", (self.dtype,), tuple(DTYPES))
        _each("op", (self.op,), REDUCTIONS)
        if self.shm:
            _each("shm", self.shm, SHARING)
        if not self.sizes or not self.streams:
            raise ValueError("a benchmark needs at least one size and one number of streams")
        if self.iterations < 0 or min(self.sizes) < 0 or not all(0 <= n <= 64 for n in self.streams):
            raise ValueError(f"sizes {self.sizes}, streams {self.streams}, iterations {self.iterations}: out of range")
        if self.inner < 1 or (self.inner > 1 and self.op not in ("min", "max")):
            raise ValueError(f"{self.inner} all-reduces a round: at least one, and more than one of min and max only")

    def openers(self) -> Mapping[str, Opener]:
        """Return how each path beside stock and the native transports is opened, by name."""
        return {**COMPARISONS, **(load_peers(self.peers) if self.peers else {})}

    def elements(self, nbytes: int) -> int:
        """Return the number of whole elements in `nbytes`: at least one, but none for 0 bytes."""
        itemsize = DTYPES[self.dtype].itemsize
        return max(nbytes // itemsize, 1 if nbytes > 0 else 0)

    def rounds(self, nbytes: int) -> int:
        """Return how often a size is measured on each path."""
        return self.iterations or next(count for limit, count in ITERATIONS if nbytes <= limit)

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Request:
        """Return the request of a dictionary from `to_json`."""
        fields: dict[str, Any] = {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}
        return cls(**fields)


def _each(what: str, names: Sequence[str], known: Sequence[str], hint: str = "") -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {name}: must be one of {', '.join(known)}{hint}")
    if not names or len(set(names)) != len(names):
        raise ValueError(f"{what} {','.join(names) or '(none)'}: one or more, each once")


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse a list of sizes such as "1M,16M,64Mi" into bytes. Raises ValueError naming the part."""
    return tuple(_parsed(part, parse_size, "a size such as 65536, 256Ki, 1M or 64Mi") for part in text.split(","))


def parse_lanes(text: str) -> tuple[int, ...]:
    """Parse a list of lanes such as "auto" or "1,2,4,8"; auto is 0. Raises ValueError naming the part."""
    return tuple(_parsed(part, parse_streams, "auto or a number from 1 to 64") for part in text.split(","))


def _parsed(part: str, parse: Any, allowed: str) -> int:
    try:
        return int(parse(part.strip()))
    except ValueError:
        raise ValueError(f"{part!r}: must be {allowed}") from None


# Results: samples to rows of numbers, and rows as a table in text and HTML.

VERSION = 1
_COLUMNS = (
    ("transport", "", 13),
    ("streams", "", 10),
    ("size", "(B)", 11),
    ("count", "(elements)", 11),
    ("type", "", 9),
    ("redop", "", 8),
    ("time", "(us)", 11),
    ("p10-p90", "(us)", 22),
    ("runs", "", 6),
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
    """Return a row's cells as text. The time is the median of the runs; rates are of that time."""
    wire, cpu, times = row["wire_bits_per_s"], row["cpu_s_per_gb"], row["time_s"]
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
        f"{1e6 * times['median']:.1f}",
        f"{1e6 * times['p10']:.1f}-{1e6 * times['p90']:.1f}",
        str(times["n"]),
        f"{row['algbw_bytes_per_s'] / 1e9:.3f}",
        f"{row['busbw_bytes_per_s'] / 1e9:.3f}",
        f"{8 * row['busbw_bytes_per_s'] / 1e9:.2f}",
        "-" if wire is None else f"{wire / 1e9:.2f}",
        "-" if cpu is None else f"{cpu:.2f}",
        str(row["wrong"]),
    )


def line(row: Mapping[str, Any]) -> str:
    """Return a row of the table; a cell as wide as its column is still apart from the previous one."""
    return "".join(f" {cell}".rjust(width) for cell, (_, _, width) in zip(cells(row), _COLUMNS, strict=True))


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
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    def _repr_html_(self) -> str:
        head = [f"{name} {unit}".strip() for name, unit, _ in _COLUMNS]
        body = "".join(_html_row("td", cells(row)) for row in self.rows)
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<table>{_html_row('th', head)}{body}</table>{notes}"


def _html_row(tag: str, texts: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts) + "</tr>"
