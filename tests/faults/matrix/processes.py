"""Faults of processes: a rank is killed, stopped for a while or for good, or leaves a forked child."""

from __future__ import annotations

import signal
import time

from matrix.cell import DETECTED_WITHIN_S, SILENT, SILENT_S, SLACK, Cell, Fault
from matrix.job import Broken

STOPPED_S = 1.2
PATIENT_S = 3.0  # the time limit of a silent peer where one is stopped for less: a lane may be silent for a quarter


def kill(cell: Cell, rank: int, forked: bool = False) -> str:
    """Kill a rank. forked: a forked child of it lives on with every descriptor it inherited."""
    job = cell.job()
    job.start()
    if forked:
        job.children.append(job.call(rank, "fork"))
        job.more_rounds(1)
    killed = job.signal(rank, signal.SIGKILL)
    outcome = cell.named(job, killed, {rank}, {rank})
    for child in job.children:
        if not alive(child):
            raise Broken("the child did not live on: this cell showed nothing")
    return outcome


def alive(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def stop(cell: Cell, rank: int) -> str:
    """Stop a rank until all others have failed. Once continued it must fail and end by itself."""
    job = cell.job({"NETBOTTLENECK_TIMEOUT_S": str(SILENT_S)})
    job.start()
    at = job.signal(rank, signal.SIGSTOP)
    cell.defer(lambda: job.signal(rank, signal.SIGCONT))
    outcome = cell.named(job, at, {rank}, {rank}, SILENT)
    job.signal(rank, signal.SIGCONT)
    job.wait_for(str(rank), "failed")
    cell.ended(job, [str(rank)])
    return outcome


def stop_and_continue(cell: Cell) -> str:
    """Stop a rank for longer than a lane may be silent, and for less than a peer may."""
    job = cell.job({"NETBOTTLENECK_TIMEOUT_S": str(PATIENT_S), "NETBOTTLENECK_STREAMS": "3"})
    job.start()
    at = job.signal(cell.victim, signal.SIGSTOP)
    cell.defer(lambda: job.signal(cell.victim, signal.SIGCONT))
    time.sleep(STOPPED_S)  # the fault itself
    job.signal(cell.victim, signal.SIGCONT)
    outcome = cell.right(job, at)
    lost = [job.wait_for(name, "right")["info"]["lanes_lost"] for name in job.processes]
    if any(lost):
        raise Broken(f"lanes were lost: {lost}")
    return outcome


def forked_child(cell: Cell) -> str:
    """Go on while a forked child of each rank lives."""
    job = cell.job()
    job.start()
    for rank in range(job.size):
        job.children.append(job.call(rank, "fork"))
    return cell.right(job, time.monotonic())


ROWS = [
    Fault("kill", "a rank is killed", "error names the peer", lambda cell: kill(cell, cell.victim), DETECTED_WITHIN_S),
    Fault("kill-0", "the coordinator is killed", "error names the peer", lambda cell: kill(cell, 0), DETECTED_WITHIN_S),
    Fault(
        "kill-forked",
        "a rank is killed, and a child that it forked lives on",
        "error names the peer",
        lambda cell: kill(cell, cell.victim, forked=True),
        DETECTED_WITHIN_S,
    ),
    Fault("forked", "each rank forks a child that lives on", "sums right", forked_child, DETECTED_WITHIN_S),
    Fault(
        "stop",
        "a rank is stopped for good",
        "error names the peer",
        lambda cell: stop(cell, cell.victim),
        SILENT_S * SLACK + 0.5,
    ),
    Fault(
        "stop-0",
        "the coordinator is stopped for good",
        "error names the peer",
        lambda cell: stop(cell, 0),
        SILENT_S * SLACK + 0.5,
    ),
    Fault(
        "stop-continue",
        f"a rank is stopped for {STOPPED_S:g} s of the {PATIENT_S:g} s that a peer may be silent",
        "sums right, no lane lost",
        stop_and_continue,
        STOPPED_S + DETECTED_WITHIN_S,
    ),
]
