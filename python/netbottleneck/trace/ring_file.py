"""The format of a ring file, as csrc/trace/ring.h writes it: readable while it is written, and after a kill."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netbottleneck.trace.run_steps import RunSteps

# Name of each event kind, as in csrc/trace/event.h without NB_EV_.
_EVENTS = (
    "NONE STEP_BEGIN STEP_END FORWARD_BEGIN FORWARD_END GRAD_READY OPTIMIZER_BEGIN "
    "OPTIMIZER_END WAIT_BEGIN WAIT_END OP_SUBMIT OP_AGREED OP_START OP_FIRST_BYTE OP_DONE "
    "OP_LANE CLOCK PROBE STALL PEER_LOST LANE_LOST COSTS OP_NAME OP_READY OP_PACK NCCL_COMM "
    "NCCL_TASK NCCL_KERNEL NCCL_STEP GRADS_READY CHECKPOINT_BEGIN CHECKPOINT_END "
    "DEVICE_CLOCK "
)
EVENTS: Mapping[str, int] = MappingProxyType({name: number for number, name in enumerate(_EVENTS.split())})
# Events that count for all later steps.
LASTING = ("CLOCK", "PROBE", "COSTS", "STALL", "PEER_LOST", "LANE_LOST", "NCCL_COMM", "DEVICE_CLOCK")

RING_MAGIC = b"NBRING1\0"
RING_VERSION = 4
# That can be read. Version 1 has no GRADS_READY; version 2 has no phases and ranks in OP_SUBMIT, no mark of evaluation
# in FORWARD_BEGIN, and no checkpoints; version 3 keeps only the first events.
RING_VERSIONS = (1, 2, 3, RING_VERSION)
WRAPS = 4  # the first version that keeps the last events, too
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
        ("once", "<u8"),
        ("lasting", "<u8"),
    ]
)
EVENT = np.dtype(
    [("time_ns", "<i8"), ("kind", "<u4"), ("step", "<u4"), ("key", "<u8")] + [(name, "<u8") for name in "abcde"]
)
# In a slot: kind + KIND x the times that the slot was written before.
KIND, TIMES = 1 << 8, 1 << 24
# Behind the last slot, of a file that is full: the steps of the whole run.
RUN = np.dtype([("changes", "<u8"), ("rows", "<u8"), ("stride", "<u8")])
STEPS = np.dtype([("first", "<u4"), ("count", "<u4"), ("total_ns", "<u8"), ("longest_ns", "<u8"), ("waited_ns", "<u8")])
STEPS_MOST = 1024
READ_ONLY = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in the place of a file is no file, and does not block
COUNT_MOST = 1 << 48  # events of a file, far beyond what one can have
READS = 10  # of rows that change meanwhile
# The rest of the first page keeps lasting events that come later than the first ones.
LASTING_MOST = 60
LASTING_AT = RING_HEADER_BYTES - LASTING_MOST * EVENT.itemsize


@dataclass(frozen=True, slots=True)
class Slots:
    """Events of a ring file that is perhaps being written, by their numbers: as they were taken, from 0 on.

    events: those that the file still has. lasting: later ones that are never overwritten. Kind 0: not filled.
    """

    head: Any
    numbers: NDArray[np.int64]
    events: NDArray[Any]
    lasting: NDArray[Any]

    @property
    def taken(self) -> int:
        """Number of events so far."""
        return int(self.head["taken"])

    @property
    def overwritten(self) -> int:
        """Number of events that the file does not have any more, or never had."""
        return max(0, self.taken - int(self.head["capacity"]))


def _page(fd: int, name: object) -> tuple[Any, bytes]:
    """Return the header and the first page. Raises ValueError naming the file."""
    raw = os.pread(fd, RING_HEADER_BYTES, 0)
    if len(raw) < RING_HEADER_BYTES or raw[:8] != RING_MAGIC:
        raise ValueError(f"{name}: not a ring file")
    head = np.frombuffer(raw, HEADER, 1)[0]
    if head["version"] not in RING_VERSIONS or head["event_bytes"] != EVENT.itemsize:
        raise ValueError(f"{name}: ring version {head['version']}; this netbottleneck reads versions {RING_VERSIONS}")
    if not head["once"] <= head["capacity"] <= COUNT_MOST or head["taken"] > COUNT_MOST:
        numbers = ", ".join(f"{key} {head[key]}" for key in ("capacity", "once", "taken"))
        raise ValueError(f"{name}: its header is damaged ({numbers})")
    return head, raw


def _read(fd: int, first: int, end: int) -> NDArray[Any]:
    """Return the slots in [first, end), as far as the file has them."""
    want, parts = max(0, end - first) * EVENT.itemsize, []
    at = RING_HEADER_BYTES + first * EVENT.itemsize
    while want and (part := os.pread(fd, want, at)):  # at most 2 GiB at once
        parts.append(part)
        want, at = want - len(part), at + len(part)
    raw = b"".join(parts)
    return np.frombuffer(raw, EVENT, len(raw) // EVENT.itemsize)


def _settled(fd: int, first: int, end: int, closed: bool) -> NDArray[Any]:
    """Return a copy of the slots in [first, end).

    A writer fills the kind of a slot last. What had it in a first read is complete in a second one.
    """
    found = _read(fd, first, end)
    if closed:
        return found.copy()
    again = _read(fd, first, end)[: len(found)].copy()
    again["kind"] = np.where(again["kind"] == found["kind"][: len(again)], again["kind"], 0)
    return again


def _ranges(head: Any, begin: int, end: int) -> list[tuple[int, int]]:
    """Return the numbers in [begin, end) that a file still has, as ranges that are contiguous in the file."""
    taken, capacity = int(head["taken"]), int(head["capacity"])
    if taken <= capacity or head["version"] < WRAPS:
        return [(begin, min(taken, capacity, end))]
    once = int(head["once"])
    around = capacity - once
    oldest = taken - around
    turn = taken - (taken - once) % around  # the number in the first slot that is overwritten
    parts = [(0, once), (oldest, turn), (turn, taken)]
    return [(max(begin, first), min(end, last)) for first, last in parts if max(begin, first) < min(end, last)]


def slots_of(fd: int, name: object, begin: int = 0, end: int | None = None) -> Slots:
    """Return the events with numbers in [begin, end) of an open file. Raises as read_slots."""
    head, raw = _page(fd, name)
    once, around = int(head["once"]), max(1, int(head["capacity"]) - int(head["once"]))
    numbers, events = [np.empty(0, np.int64)], [np.empty(0, EVENT)]
    for first, last in _ranges(head, begin, int(head["taken"]) if end is None else end):
        times = 0 if first < once or head["version"] < WRAPS else (first - once) // around
        found = _settled(fd, first - times * around, last - times * around, bool(head["closed"]))
        if head["version"] >= WRAPS:
            found["kind"] = np.where(found["kind"] // KIND == times % TIMES, found["kind"] % KIND, 0)
        numbers.append(np.arange(first, first + len(found)))
        events.append(found)
    all_numbers, all_events = np.concatenate(numbers), np.concatenate(events)
    lasting = np.empty(0, EVENT)
    if head["version"] >= WRAPS:
        # An event that was overwritten meanwhile may be torn: its number was taken before.
        now, raw = _page(fd, name)
        kept = (all_numbers < once) | (all_numbers >= int(now["taken"]) - around)
        all_numbers, all_events = all_numbers[kept], all_events[kept]
        lasting = np.frombuffer(raw, EVENT, LASTING_MOST, LASTING_AT)
    return Slots(head, all_numbers, all_events, lasting)


def read_slots(path: Path | str, begin: int = 0, end: int | None = None) -> Slots:
    """Return the events with numbers in [begin, end) of a ring file.

    Raises ValueError naming the file if it is not a ring, or of another version."""
    fd = os.open(path, READ_ONLY)
    try:
        return slots_of(fd, path, begin, end)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Ring:
    """Content of a ring file: events in order of time. dropped: events that were not completed.

    gap: the steps, from the first to the last, of which events are missing, because the file did not keep them;
    the last is None if it kept no later one. overwritten: the number of these events. steps: with a gap, rows of STEPS
    about all steps of the run.
    """

    rank: int
    pid: int
    opened_mono_ns: int
    opened_wall_ns: int
    closed: bool
    dropped: int
    events: NDArray[Any]
    gap: tuple[int, int | None] | None = None
    overwritten: int = 0
    steps: tuple[RunSteps, ...] = ()


def ring_of(head: Any, filled: NDArray[Any], dropped: int) -> Ring:
    """Return a ring with these events of it, in order of time."""
    events = _each_ready(filled)
    return Ring(
        int(head["rank"]),
        int(head["pid"]),
        int(head["opened_mono_ns"]),
        int(head["opened_wall_ns"]),
        bool(head["closed"]),
        dropped,
        events[np.argsort(events["time_ns"], kind="stable")],
    )


def read_ring(path: Path | str) -> Ring:
    """Read one ring file, complete or cut short. Raises as read_slots."""
    slots = read_slots(path)
    filled, lasting = slots.events["kind"] != 0, slots.lasting["kind"] != 0
    dropped = slots.taken - slots.overwritten - int(filled.sum())
    ring = ring_of(slots.head, np.concatenate([slots.lasting[lasting], slots.events[filled]]), dropped)
    gap = _gap(slots)
    return replace(ring, gap=gap, overwritten=slots.overwritten, steps=run_steps(path) if gap else ())


def run_steps(path: Path | str) -> tuple[RunSteps, ...]:
    """Return how long the steps of the whole run took, of a full file; () if it has no such rows. Raises OSError."""
    fd = os.open(path, READ_ONLY)
    try:
        head, _ = _page(fd, path)
        at, size = (
            RING_HEADER_BYTES + int(head["capacity"]) * EVENT.itemsize,
            RUN.itemsize + STEPS_MOST * STEPS.itemsize,
        )
        for _ in range(READS if head["version"] >= WRAPS else 0):
            raw, after = os.pread(fd, size, at), os.pread(fd, RUN.itemsize, at)
            if len(raw) < size or len(after) < RUN.itemsize:
                return ()
            run = np.frombuffer(raw, RUN, 1)[0]
            if run["changes"] % 2 == 0 and run["changes"] == np.frombuffer(after, RUN, 1)[0]["changes"]:
                rows = np.frombuffer(raw, STEPS, min(int(run["rows"]), STEPS_MOST), RUN.itemsize)
                return tuple(RunSteps(*row) for row in rows.tolist())
        return ()
    finally:
        os.close(fd)


def _gap(slots: Slots) -> tuple[int, int | None] | None:
    """Return Ring.gap of all events of a file."""
    if not slots.overwritten:
        return None
    wraps = slots.head["version"] >= WRAPS
    filled = slots.events["kind"] != 0
    first = filled & (slots.numbers < slots.head["once"]) if wraps else filled
    steps = slots.events["step"]
    later = steps[filled & ~first]
    return int(steps[first].max(initial=0)), int(later[0]) if len(later) else None


def _each_ready(events: NDArray[Any]) -> NDArray[Any]:
    """Return events with each GRADS_READY replaced by a GRAD_READY for every parameter in it."""
    packed = events["kind"] == EVENTS["GRADS_READY"]
    if not packed.any():
        return events
    together = events[packed]
    offsets = np.stack([together[name] for name in "abcde"], axis=1).view("<u4")  # (events, 10)
    row, at = offsets.nonzero()
    single = np.zeros(len(row), EVENT)
    single["time_ns"] = together["time_ns"][row] + offsets[row, at]
    single["kind"] = EVENTS["GRAD_READY"]
    single["step"] = together["step"][row]
    single["key"] = together["key"][row] + at.astype("u8")
    return np.concatenate([events[~packed], single])
