"""The trace format: the values that a run, measured or simulated, is made of, and their file.

Left of this module everything is live; right of it everything is a pure function of a Trace. Times are integer ns of
rank 0's monotonic clock; None means that the source does not know, never an estimate.
"""

from __future__ import annotations

import gzip
import io
import json
import types
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from netbottleneck.trace import json_codec

VERSION = 1
FORMAT = "netbottleneck-trace"

# Transports that are no transport: the untouched script, one rank alone, nothing moves.
BARE, SINGLE, NULL = "bare", "single", "null"
PSEUDO = (BARE, SINGLE, NULL)
# Transports whose streams are ours.
NATIVE = ("tcp", "ofi")
# What a note says of a run whose gradients travel by a hook that cannot be timed.
NOT_TIMED = "its buckets are not timed"
# And of one in which something communicates that no record has.
NOT_RECORDED = "what it communicates is not in this record"
# The tables of a trace whose rows belong to one rank each.
BY_RANK = ("ranks", "steps", "collectives", "faults")

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trainable tensor; its place in Trace.parameters is its index."""

    name: str
    bytes: int
    dtype: str
    bucket: int | None = None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that travel together; `parameters` are indices."""

    name: str
    key: int
    bytes: int
    dtype: str
    parameters: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Probe:
    """What `lanes` network streams reached: `bytes` a rank, one way, in `ns`."""

    lanes: int
    bytes: int
    ns: int

    @property
    def bits_per_s(self) -> float:
        return 8e9 * self.bytes / self.ns if self.ns > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TransportInfo:
    """A transport as one rank had it.

    streams_asked: 0: auto. link_bps: of `interface`. shm: "on", "on: " and ranks, or "off: " and why. cpu: pinned to.
    costs: ns of a step, a byte on the wire, a byte added, of two levels, a byte there; empty where not measured."""

    name: str
    provider: str | None = None
    streams_open: int | None = None
    streams_used: int | None = None
    bytes_out: int | None = None
    bytes_in: int | None = None
    streams_asked: int | None = None
    interface: str | None = None
    link_bps: int | None = None
    shm: str | None = None
    cpu: int | None = None
    probe: tuple[Probe, ...] = ()
    costs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Clock:
    """How a rank's clock was laid on rank 0's.

    method: "rank 0", "heartbeat", "same clock", "wall" or "none"; offset_ns: this clock minus rank 0's; error_ns: half
    the round trip, None where it is not known."""

    method: str = "none"
    offset_ns: int = 0
    error_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Rank:
    """A process of the run, and what of its record is missing. cores: those it may run on."""

    rank: int
    hostname: str = ""
    host_id: str = ""
    pid: int = 0
    finished: bool = False
    error: str | None = None
    clock: Clock = Clock()
    steps_unfinished: int = 0
    events_dropped: int = 0
    cores: tuple[int, ...] = ()
    transports: tuple[TransportInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer update on one rank.

    forward, optimizer: intervals; modules: (module index, begin, end) of sampled steps; grad_ready: (parameter index,
    ns) in order of time; waits: (key of the operation or 0, begin, end) in which the training thread was blocked;
    cpu_ns: processor time of all threads of the process."""

    rank: int
    index: int
    block: int
    transport: str
    begin_ns: int
    end_ns: int
    plan: str | None = None
    sampled: bool = False
    forward: tuple[Interval, ...] = ()
    optimizer: tuple[Interval, ...] = ()
    modules: tuple[tuple[int, int, int], ...] = ()
    grad_ready: tuple[tuple[int, int], ...] = ()
    waits: tuple[tuple[int, int, int], ...] = ()
    cpu_ns: int | None = None

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass(frozen=True, slots=True)
class Collective:
    """One operation on one rank. lanes: (lane, bytes sent, bytes received); step: None outside steps; bucket: index."""

    rank: int
    transport: str
    key: int
    round: int
    submit_ns: int
    tensor_bytes: int
    name: str = ""
    step: int | None = None
    comm: int = 0
    kind: str = "allreduce"
    dtype: str = "float32"
    priority: int = 0
    part: int = 0
    parts: int = 1
    phase: str = "reduce"
    bucket: int | None = None
    device: int = 0
    algorithm: str | None = None
    wire_bytes: int | None = None
    agreed_ns: int | None = None
    start_ns: int | None = None
    first_byte_ns: int | None = None
    done_ns: int | None = None
    error: int = 0
    lanes: tuple[tuple[int, int, int], ...] | None = None

    @property
    def finished(self) -> bool:
        return self.start_ns is not None and self.done_ns is not None and self.error == 0

    @property
    def match(self) -> tuple[str, int, int, int]:
        """What is equal on all ranks of one operation."""
        return self.transport, self.comm, self.key, self.round


@dataclass(frozen=True, slots=True)
class Fault:
    """kind: "stall", "peer_lost" or "lane_lost"; peers: the missing or lost ranks."""

    rank: int
    kind: str
    time_ns: int
    peers: tuple[int, ...] = ()
    key: int = 0
    lane: int | None = None
    waited_ns: int = 0
    code: int = 0


@dataclass(frozen=True, slots=True)
class Network:
    """The network that the run was given. how: in words; link_bps: nominal; verified: what a measurement found."""

    how: str = ""
    link_bps: float | None = None
    flow_bps: tuple[float, ...] = ()
    verified: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """A run. origin: "measured" or "simulated"; epoch_wall_ns: wall clock at time 0."""

    id: str
    size: int
    transports: tuple[str, ...]
    origin: str = "measured"
    command: tuple[str, ...] = ()
    model: str = ""
    started_wall_ns: int = 0
    epoch_wall_ns: int = 0
    notes: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    network: Network | None = None
    ranks: tuple[Rank, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    steps: tuple[Step, ...] = ()
    collectives: tuple[Collective, ...] = ()
    faults: tuple[Fault, ...] = ()

    def of_rank(self, rank: int) -> Trace:
        """The same run as one rank recorded it."""
        own: dict[str, Any] = {name: tuple(row for row in getattr(self, name) if row.rank == rank) for name in BY_RANK}
        return replace(self, **own)


def merge(parts: Iterable[Trace]) -> Trace:
    """The run of which `parts` are the ranks. Raises ValueError for none, or for parts of different runs."""
    all_parts = list(parts)
    if not all_parts:
        raise ValueError("no trace to merge")
    first = all_parts[0]
    if any((part.id, part.size) != (first.id, first.size) for part in all_parts):
        raise ValueError(f"traces of different runs: {', '.join(sorted({part.id for part in all_parts}))}")
    rows: dict[str, Any] = {name: tuple(row for part in all_parts for row in getattr(part, name)) for name in BY_RANK}
    return replace(first, **rows)


# Each line of the file after the first is one row: {"step": {...}}.
_ROWS: Mapping[str, tuple[str, type]] = types.MappingProxyType(
    {
        "rank": ("ranks", Rank),
        "parameter": ("parameters", Parameter),
        "bucket": ("buckets", Bucket),
        "step": ("steps", Step),
        "collective": ("collectives", Collective),
        "fault": ("faults", Fault),
    }
)


def _lines(trace: Trace) -> Iterator[str]:
    tables = {attribute for attribute, _ in _ROWS.values()}
    head = {k: v for k, v in json_codec.shallow(trace).items() if k not in tables}
    yield json_codec.dump({"format": FORMAT, "version": VERSION} | head)
    for kind, (attribute, _) in _ROWS.items():
        for row in getattr(trace, attribute):
            yield json_codec.dump({kind: row})


def write(trace: Trace, path: Path | str) -> None:
    """Writes gzipped JSON lines; the same trace makes the same bytes."""
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
        packed.writelines(line.encode() + b"\n" for line in _lines(trace))


def read(path: Path | str) -> Trace:
    """Reads what `write` wrote.

    Raises FileNotFoundError; ValueError naming file and line for another format or version, or what is damaged."""
    number = 0
    try:
        with gzip.open(path, "rb") as packed, io.TextIOWrapper(packed, encoding="utf-8") as text:
            head = json.loads(text.readline() or "null")
            if not isinstance(head, dict) or head.get("format") != FORMAT:
                raise ValueError("not a netbottleneck trace")
            if head.get("version") != VERSION:
                raise ValueError(f"trace version {head.get('version')!r}; this netbottleneck reads version {VERSION}")
            rows: dict[str, list[Any]] = {attribute: [] for attribute, _ in _ROWS.values()}
            for line in text:
                number += 1
                ((kind, value),) = json.loads(line).items()
                if kind in _ROWS:
                    attribute, record = _ROWS[kind]
                    rows[attribute].append(json_codec.build(record, value))
            whole: Trace = replace(json_codec.build(Trace, head), **{k: tuple(v) for k, v in rows.items()})
            return whole
    except (ValueError, TypeError, AttributeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}, line {number + 1}: {error}") from error
