"""Faults of the machine: no descriptors, a full disk, a clock that jumps."""

from __future__ import annotations

import struct
import time

from matrix.cell import DETECTED_WITHIN_S, Cell, Fault
from matrix.job import Absent, Broken

JUMPS_S = (3600, -7200, 86400 * 400)


def descriptors(cell: Cell) -> str:
    """Open files in a rank until it has no descriptor left."""
    job = cell.job()
    job.start()
    at = time.monotonic()
    job.call(cell.victim, "limit 100")
    if not job.call(cell.victim, "open"):
        raise Broken("no file could be opened: this cell showed nothing")
    job.more_rounds(2)
    return cell.right(job, at)


def disk(cell: Cell) -> str:
    """Fill the disk of the timeline and of temporary files."""
    if not cell.machine.own_files:
        raise Absent(f"no file systems of our own on this machine: {cell.machine.private}")
    folder = cell.machine.root() / "tmp"
    cell.defer(lambda: [path.unlink(missing_ok=True) for path in folder.glob("fault-*")])
    job = cell.job({"NETBOTTLENECK_TIMELINE": "/tmp/fault-timeline.json"})
    job.start()
    at = time.monotonic()
    if not job.call(cell.victim, "fill /tmp/fault-filler"):
        raise Broken("the disk was full before: this cell showed nothing")
    job.more_rounds(2)
    outcome = cell.right(job, at)
    for path in folder.glob("fault-*"):
        path.unlink()
    return outcome


def clock(cell: Cell) -> str:
    """Set a rank's real-time clock forward and back."""
    shim = cell.machine.compiled("clock.c", "-shared", "-fPIC", "-ldl")
    job = cell.job()
    offset = job.folder / "offset"
    offset.write_bytes(struct.pack("q", 0))
    job.start(*range(job.size - 1), under_way=False)
    job.start_one(cell.victim, {"LD_PRELOAD": str(shim), "FAULTS_CLOCK": str(offset)})
    job.wait_for_rounds(2)
    at = time.monotonic()
    for jump in JUMPS_S:
        with offset.open("r+b") as file:
            file.write(struct.pack("q", jump))
        clock_s = job.call(cell.victim, "time")
        if abs(clock_s - time.time() - jump) > 60:
            raise Broken(f"the rank's clock did not jump by {jump} s: this cell showed nothing")
        job.more_rounds(2)
    return cell.right(job, at)


ROWS = [
    Fault("descriptors", "a rank's own code opens all its descriptors", "sums right", descriptors, DETECTED_WITHIN_S),
    Fault("disk-full", "the disk of the timeline is full", "sums right", disk, DETECTED_WITHIN_S),
    Fault("clock-set", "a rank's real-time clock is set forward and back", "sums right", clock, DETECTED_WITHIN_S),
]
