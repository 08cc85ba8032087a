"""Faults of connections and links: resets, lost packets, a link that is down for a while or for good."""

from __future__ import annotations

import time

from matrix.cell import DETECTED_WITHIN_S, SILENT, SILENT_S, SLACK, Cell, Fault
from matrix.job import Broken

DOWN_S = 3.0
PATIENT_S = 8.0  # the time limit of a silent peer where a link comes back


def reset_lane(cell: Cell) -> str:
    """Reset one connection of a lane."""
    job = cell.job({"NETBOTTLENECK_STREAMS": "3"})
    job.start()
    at = time.monotonic()
    cell.may_lose = job.call(cell.victim, "reset lane")
    if not cell.may_lose:
        raise Broken("there is no connection to reset: this cell showed nothing")
    return cell.right(job, at)


def reset_all(cell: Cell) -> str:
    """Reset all connections of a rank."""
    job = cell.job()
    job.start()
    at = time.monotonic()
    cell.may_lose = job.call(cell.victim, "reset all")
    if not cell.may_lose:
        raise Broken("there is no connection to reset: this cell showed nothing")
    return cell.named(job, at, {cell.victim}, set())


def culprits(cell: Cell, hosts: int) -> set[int]:
    """Return the ranks of the last host."""
    each = cell.size // hosts
    return set(range(cell.size - each, cell.size))


def blackhole(cell: Cell) -> str:
    """Lose all packets to and from the last host, with every link up."""
    place = cell.linked()
    job = cell.job({"NETBOTTLENECK_TIMEOUT_S": str(SILENT_S)}, place)
    job.start()
    at = place.blackhole(place.lab.hosts - 1)
    return cell.named(job, at, culprits(cell, place.lab.hosts), set(), SILENT)


def link_down_for_a_while(cell: Cell) -> str:
    """Set the last host's only link down, and up again within the time limit of a silent peer."""
    place = cell.linked()
    job = cell.job({"NETBOTTLENECK_TIMEOUT_S": str(PATIENT_S)}, place)
    job.start()
    host = place.lab.hosts - 1
    at = place.link(host, up=False)
    time.sleep(DOWN_S)  # the fault itself
    place.link(host, up=True)
    outcome = cell.right(job, at)
    if cell.seconds is not None and cell.seconds < DOWN_S:
        raise Broken(f"sums went on after {cell.seconds:.2f} s, while the link was down: this cell showed nothing")
    return outcome


def link_down_for_good(cell: Cell) -> str:
    """Set the last host's only link down."""
    place = cell.linked()
    job = cell.job({"NETBOTTLENECK_TIMEOUT_S": str(SILENT_S)}, place)
    job.start()
    at = place.link(place.lab.hosts - 1, up=False)
    return cell.named(job, at, culprits(cell, place.lab.hosts), set(), SILENT)


def interface_down_for_good(cell: Cell) -> str:
    """Set one of the last host's two interfaces down: its lanes are lost, and the others go on."""
    place = cell.linked(links=2)
    job = cell.job({"NETBOTTLENECK_TIMEOUT_S": "30", "NETBOTTLENECK_STREAMS": "4"}, place)
    job.start()
    at = place.link(place.lab.hosts - 1, up=False, link=1)
    return cell.right(job, at)


ROWS = [
    Fault("reset-lane", "a lane's connection is reset", "sums right", reset_lane, DETECTED_WITHIN_S),
    Fault("reset-all", "all connections of a rank are reset", "error names the peer", reset_all, DETECTED_WITHIN_S),
    Fault(
        "blackhole",
        "all packets to and from a host are lost",
        "error names the peer",
        blackhole,
        SILENT_S * SLACK + 0.5,
    ),
    Fault(
        "link-3s",
        f"a host's only link is down for {DOWN_S:g} s of the {PATIENT_S:g} s that a peer may be silent",
        "sums right",
        link_down_for_a_while,
        PATIENT_S,
    ),
    Fault(
        "link-down",
        "a host's only link goes down for good",
        "error names the peer",
        link_down_for_good,
        SILENT_S * SLACK + 0.5,
    ),
    Fault(
        "interface-down",
        "one of a host's two interfaces goes down for good",
        "sums right",
        interface_down_for_good,
        DETECTED_WITHIN_S,
    ),
]
