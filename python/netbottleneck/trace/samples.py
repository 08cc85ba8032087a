"""A host's counters as sampler.py wrote them: read whole or cut short, as values."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"NBCOUNT\0"
VERSION = 1
_HEAD = struct.Struct("<8sII")  # magic, version, bytes until the first row
NET, HOST = "net", "host"


@dataclass(frozen=True, slots=True)
class Counters:
    """One file: values[i] are the columns' at time_ns[i], of this host's monotonic clock. Counters only ever rise.

    hz: as asked for; the times are as they were. Columns: "eth0:rx_bytes", "cpu3:softirq" (in ticks), "tcp:…".
    """

    hostname: str
    host_id: str
    rank: int
    hz: int
    ticks_per_s: int
    columns: tuple[str, ...]
    time_ns: NDArray[np.int64]
    values: NDArray[np.int64]

    def column(self, name: str) -> NDArray[np.int64]:
        """Return one column. Raises ValueError for a name that is none."""
        return self.values[:, self.columns.index(name)]

    def owners(self, what: str) -> tuple[str, ...]:
        """Return whose columns end in `what`: interfaces for "rx_bytes", cores for "user"."""
        return tuple(name.rpartition(":")[0] for name in self.columns if name.rpartition(":")[2] == what)

    def on_clock(self, offset_ns: int) -> Counters:
        """Return them on a clock that is `offset_ns` behind this host's, such as rank 0's: see trace.Clock."""
        return replace(self, time_ns=self.time_ns - offset_ns)


@dataclass(frozen=True, slots=True)
class Samples:
    """A host's counters: of its interfaces, and of its cores and TCP. rank: the one that had them recorded."""

    rank: int
    net: Counters | None = None
    host: Counters | None = None

    def on_clock(self, offset_ns: int) -> Samples:
        """As Counters.on_clock."""
        net = None if self.net is None else self.net.on_clock(offset_ns)
        return replace(self, net=net, host=None if self.host is None else self.host.on_clock(offset_ns))


def read(path: Path | str) -> Counters:
    """Read one file; a row that was cut off is left out.

    Raises FileNotFoundError; ValueError naming the file when it is none of ours, damaged, or of another version.
    """
    raw = Path(path).read_bytes()
    if len(raw) < _HEAD.size or not raw.startswith(MAGIC):
        raise ValueError(f"{path}: not a file of counters")
    _, version, first = _HEAD.unpack_from(raw)
    if version != VERSION:
        raise ValueError(f"{path}: counters of version {version}; this netbottleneck reads version {VERSION}")
    try:
        about: dict[str, Any] = json.loads(raw[_HEAD.size : first])
        columns = tuple(about["columns"])
        width = 8 * len(columns)
        rows = np.frombuffer(raw, "<i8", max(0, len(raw) - first) // width * len(columns), min(first, len(raw)))
        rows = rows.reshape(-1, len(columns)).astype(np.int64)
        told = {name: about[name] for name in ("hostname", "host_id", "rank", "hz", "ticks_per_s")}
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{path}: damaged head: {error}") from error
    return Counters(**told, columns=columns[1:], time_ns=rows[:, 0], values=rows[:, 1:])


def of_run(run_dir: Path | str) -> tuple[Samples, ...]:
    """Return what was recorded of each host of a run, by rank; nothing where nothing was. Raises ValueError as read."""
    ranks = Path(run_dir) / "ranks"
    found: dict[int, dict[str, Counters]] = {}
    for kind in (NET, HOST):
        for path in ranks.glob(f"*.{kind}.counters"):
            counters = read(path)
            if len(counters.time_ns):
                found.setdefault(counters.rank, {})[kind] = counters
    return tuple(Samples(rank, **found[rank]) for rank in sorted(found))
