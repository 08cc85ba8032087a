"""Counters of a host and its TCP connections, from the files of runtime/sampler.py, complete or cut short."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netbottleneck.trace.model import Clock
from netbottleneck.trace.ring_file import READ_ONLY

MAGIC = b"NBCOUNT\0"
SAMPLES_VERSION = 1
_HEAD = struct.Struct("<8sII")  # magic, version, offset of the first row in bytes
NET, HOST, TCP = "net", "host", "tcp"
INTERFACE_COLUMNS = frozenset({"rx_bytes", "rx_packets", "tx_bytes", "tx_packets"})  # at least, of each interface


@dataclass(frozen=True, slots=True)
class Counters:
    """One file of counters: values[i] are the columns' values at time_ns[i] of this host's monotonic clock.

    hz: the requested rate; time_ns has the actual times. Columns: "eth0:rx_bytes", "cpu3:softirq" (in ticks), "tcp:…".
    Counters of a host never decrease: one that was reset or wrapped goes on from its last value, and backwards names
    it. left_out: interfaces without columns.
    """

    hostname: str
    host_id: str
    rank: int
    hz: int
    ticks_per_s: int
    columns: tuple[str, ...]
    time_ns: NDArray[np.int64]
    values: NDArray[np.int64]
    left_out: int = 0
    backwards: tuple[str, ...] = ()

    def column(self, name: str) -> NDArray[np.int64]:
        """Return one column. Raises ValueError for an unknown name."""
        return self.values[:, self.columns.index(name)]

    def owners(self, what: str) -> tuple[str, ...]:
        """Return the owners of the columns that end in `what`: interfaces for "rx_bytes", cores for "user"."""
        return tuple(name.rpartition(":")[0] for name in self.columns if name.rpartition(":")[2] == what)

    def rising(self) -> Counters:
        """Return the counters with 0 for each increase between two readings that is negative."""
        steps = np.diff(self.values, axis=0)
        went_back = tuple(self.columns[place] for place in np.unique(np.nonzero(steps < 0)[1]))
        if not went_back:
            return self
        rest = np.cumsum(np.maximum(steps, 0), axis=0)
        values = np.concatenate([self.values[:1], self.values[:1] + rest])
        return replace(self, values=values, backwards=went_back)

    def on_rank_0(self, clock: Clock) -> Counters:
        """Return the counters on rank 0's clock. clock: that of the rank that recorded them."""
        return replace(self, time_ns=clock.to_rank_0(self.time_ns))


@dataclass(frozen=True, slots=True)
class Samples:
    """A host's counters: net: of its interfaces; host: of its cores and TCP; tcp: see connections. rank: its recorder.

    Each is None if it was not recorded."""

    rank: int
    net: Counters | None = None
    host: Counters | None = None
    tcp: Counters | None = None

    def on_rank_0(self, clock: Clock) -> Samples:
        """Return the counters on rank 0's clock, as Counters.on_rank_0."""
        moved = {kind: getattr(self, kind) for kind in (NET, HOST, TCP)}
        return replace(self, **{kind: each and each.on_rank_0(clock) for kind, each in moved.items()})


def read_samples(path: Path | str, last_bytes: int | None = None) -> Counters:
    """Read one file of counters; an incomplete last row is dropped. last_bytes: read only the rows at its end.

    Raises FileNotFoundError, and ValueError naming the file if it is another format or version, or damaged.
    """
    with open(path, "rb", opener=lambda name, _: os.open(name, READ_ONLY)) as file:
        raw = file.read(_HEAD.size)
        if len(raw) < _HEAD.size or not raw.startswith(MAGIC):
            raise ValueError(f"{path}: not a file of counters")
        _, version, first = _HEAD.unpack(raw)
        if version != SAMPLES_VERSION:
            raise ValueError(
                f"{path}: counters of version {version}; this netbottleneck reads version {SAMPLES_VERSION}"
            )
        try:
            about: dict[str, Any] = json.loads(file.read(max(0, first - _HEAD.size)))
            columns = tuple(about["columns"])
            width = 8 * len(columns)
            there = max(0, os.fstat(file.fileno()).st_size - first) // width * width
            left_out = 0 if last_bytes is None else max(0, there - last_bytes // width * width)
            file.seek(first + left_out)
            rows = np.frombuffer(file.read(there - left_out), "<i8")
            rows = rows.reshape(-1, len(columns)).astype(np.int64)
            head = {name: about[name] for name in ("hostname", "host_id", "rank", "hz", "ticks_per_s")}
            head["left_out"] = int(about.get("left_out", 0))
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise ValueError(f"{path}: damaged head: {error}") from error
    return Counters(**head, columns=columns[1:], time_ns=rows[:, 0], values=rows[:, 1:])


def of_run(run_dir: Path | str, last_bytes: int | None = None) -> tuple[Samples, ...]:
    """Return the recorded counters of a run's hosts, by rank; may be empty. last_bytes: as read_samples.

    A file that cannot be read is left out; `unreadable` names it.
    """
    samples: dict[int, dict[str, Counters]] = {}
    for kind, path in _counter_files(run_dir):
        with contextlib.suppress(OSError, ValueError):
            counters = _whole_samples(kind, path, last_bytes)
            if len(counters.time_ns):
                samples.setdefault(counters.rank, {})[kind] = counters if kind == TCP else counters.rising()
    return tuple(Samples(rank, **samples[rank]) for rank in sorted(samples))


def _whole_samples(kind: str, path: Path, last_bytes: int | None) -> Counters:
    """Read one file of counters as read_samples. Raises ValueError naming the file for one without all columns."""
    counters = read_samples(path, last_bytes)
    named = set(counters.columns)
    needed = set(CONNECTION_COLUMNS)
    if kind != TCP:  # each interface has the same columns, and each core
        owners = [name.rpartition(":") for name in counters.columns if kind == NET or name.startswith("cpu")]
        whats = {what for _, _, what in owners} | (INTERFACE_COLUMNS if kind == NET else set())
        needed = {f"{owner}:{what}" for owner, _, _ in owners for what in whats}
    if needed - named:
        raise ValueError(f"{path}: damaged head: no column {min(needed - named)}")
    return counters


def _counter_files(run_dir: Path | str) -> list[tuple[str, Path]]:
    ranks = Path(run_dir) / "ranks"
    return [(kind, path) for kind in (NET, HOST, TCP) for path in sorted(ranks.glob(f"*.{kind}.counters"))]


def unreadable(run_dir: Path | str) -> tuple[str, ...]:
    """Return a note for each file of counters of a run that of_run leaves out."""
    notes = []
    for kind, path in _counter_files(run_dir):
        try:
            _whole_samples(kind, path, 0)
        except (OSError, ValueError) as error:
            notes.append(f"left out: {error}")
    return tuple(notes)


# TCP connections, from the rows of a host's counters "tcp", one for each connection and reading.

End = tuple[str, int]  # address and port
_ENDS = ("local_high", "local_low", "local_port", "remote_high", "remote_low", "remote_port")
CONNECTION_COLUMNS = ("rank", "inode", *_ENDS)  # what tells one from another
READINGS = (
    *("acked_bytes", "received_bytes", "sent_bytes", "sent_segments", "resent_segments", "busy_us"),
    *("receiver_limited_us", "buffer_limited_us", "rtt_us", "least_rtt_us", "delivery_bytes_per_s", "app_limited"),
    *("window_segments", "segment_bytes", "path_mtu_bytes", "peer_window_bytes", "unread_bytes", "queued_bytes"),
)
_WRAPPING = ("sent_segments", "resent_segments")  # counters of 32 bits in the kernel


@dataclass(frozen=True, slots=True)
class Connection:
    """A TCP connection as one end recorded it: readings[name][i] is the kernel's value at time_ns[i].

    rank: whose process has the socket open. readings: by the names of READINGS; NaN: a value that the kernel or the
    file does not have, or that was not measured. Since the connection opened: acked_bytes (sent, and acknowledged by
    the peer), received_bytes, sent_bytes (with those sent again), sent_segments and resent_segments (with data),
    busy_us (data was waiting or in flight), and of that receiver_limited_us (the peer's window was full) and
    buffer_limited_us (the send buffer was full of data in flight). At the reading: rtt_us (smoothed), least_rtt_us,
    delivery_bytes_per_s (latest), app_limited (1: the program limited that rate), window_segments (congestion window)
    of segment_bytes, path_mtu_bytes (the largest packet that passes, as far as the kernel knows), peer_window_bytes
    (what the peer accepts), unread_bytes (received, not read by the program), queued_bytes (written, not acknowledged).
    """

    rank: int
    local: End
    remote: End
    time_ns: NDArray[np.int64]
    readings: Mapping[str, NDArray[np.float64]]


def _address(high: int, low: int) -> str:
    """Return an address from the signed halves of its IPv6 form; one of IPv4 as such."""
    whole = ipaddress.IPv6Address((high & (1 << 64) - 1) << 64 | low & (1 << 64) - 1)
    return str(whole.ipv4_mapped or whole)


def _readings(counters: Counters, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    found = dict.fromkeys(READINGS, np.full(len(rows), np.nan))
    for column in set(READINGS).intersection(counters.columns):
        values = counters.column(column)[rows].astype(float)
        values[values < 0] = np.nan
        if column in _WRAPPING:
            values += np.cumsum(np.diff(values, prepend=values[:1]) < 0) * 2.0**32
        found[column] = values
    return found


def connections(counters: Counters) -> tuple[Connection, ...]:
    """Return the connections of a file of counters "tcp". Raises ValueError if it does not name the connections."""
    if not set(CONNECTION_COLUMNS) <= set(counters.columns):
        raise ValueError(f"rank {counters.rank}: TCP connections without a column of {', '.join(CONNECTION_COLUMNS)}")
    keys = np.stack([counters.column(name) for name in CONNECTION_COLUMNS], axis=1)
    each, which = np.unique(keys, axis=0, return_inverse=True)
    found = []
    for number, (rank, _, *ends) in enumerate(each.tolist()):
        rows = np.flatnonzero(which.ravel() == number)
        local, remote = ((_address(*end[:2]), end[2]) for end in (ends[:3], ends[3:]))
        found.append(Connection(rank, local, remote, counters.time_ns[rows], _readings(counters, rows)))
    return tuple(found)
