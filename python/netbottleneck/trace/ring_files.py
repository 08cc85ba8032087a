"""The ring file, as csrc/trace/ring.h writes it: read with numpy, also after its writer was killed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

RING_MAGIC = b"NBRING1\0"
RING_VERSION = 1
RING_HEADER_BYTES = 4096
HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("event_bytes", "<u4"),
        ("capacity", "<u8"),
        ("rank", "<u4"),
        ("pid", "<u4"),
        ("opened_mono_ns", "<i8"),
        ("opened_wall_ns", "<i8"),
        ("taken", "<u8"),
        ("closed", "<u8"),
    ]
)
EVENT = np.dtype(
    [("time_ns", "<i8"), ("kind", "<u4"), ("step", "<u4"), ("key", "<u8")] + [(name, "<u8") for name in "abcde"]
)


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring file's content: events in order of time; `dropped`: did not fit, or were cut off by the writer's death."""

    rank: int
    pid: int
    opened_mono_ns: int
    opened_wall_ns: int
    closed: bool
    dropped: int
    events: NDArray[Any]


def read_ring(path: Path | str) -> Ring:
    """Reads one ring file, whole or cut short.

    Raises ValueError naming the file when it is no ring, or one of another version."""
    raw = Path(path).read_bytes()
    if len(raw) < RING_HEADER_BYTES or raw[:8] != RING_MAGIC:
        raise ValueError(f"{path}: not a ring file")
    head = np.frombuffer(raw, HEADER, 1)[0]
    if head["version"] != RING_VERSION or head["event_bytes"] != EVENT.itemsize:
        raise ValueError(f"{path}: ring version {head['version']}; this netbottleneck reads version {RING_VERSION}")
    there = (len(raw) - RING_HEADER_BYTES) // EVENT.itemsize
    taken = int(head["taken"])
    events = np.frombuffer(raw, EVENT, min(taken, int(head["capacity"]), there), RING_HEADER_BYTES)
    events = events[events["kind"] != 0]
    return Ring(
        int(head["rank"]),
        int(head["pid"]),
        int(head["opened_mono_ns"]),
        int(head["opened_wall_ns"]),
        bool(head["closed"]),
        taken - len(events),
        events[np.argsort(events["time_ns"], kind="stable")],
    )
