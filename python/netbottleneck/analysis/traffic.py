"""Bytes between hosts: of the recorded operations, and on the interfaces that carry them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from netbottleneck.analysis.bandwidth import bus_factor
from netbottleneck.analysis.intervals import counted, host_count
from netbottleneck.analysis.thresholds import HEADERS, INTERFACE_CARRIES
from netbottleneck.analysis.usage import HostUse, steps_inside
from netbottleneck.trace.model import Collective, Rank, Step, Trace, TransportInfo
from netbottleneck.trace.transports import Arm


@dataclass(frozen=True, slots=True)
class Unseen:
    """Bytes on a host's busiest interface in one direction, in an arm's steps, that no recorded operation explains.

    part: of the interface's bytes; surely: the same if headers and acknowledgements add HEADERS to the recorded ones.
    """

    hostname: str
    interface: str
    bytes: float
    part: float
    surely: float


# Operations in which each rank receives as many bytes as it sends.
EVEN = ("allreduce", "allgather", "reducescatter", "barrier")


def _sent(operation: Collective, size: int, hosts: int | None) -> float:
    """Bytes that a rank sends in an operation: recorded, else by the operation's kind."""
    if operation.wire_bytes is not None:
        return float(operation.wire_bytes)
    factor = bus_factor(operation.kind, operation.ranks or size, operation.algorithm, hosts)
    return operation.known_bytes * factor


def _received(operation: Collective, sent: float) -> float | None:
    """Bytes that a rank receives in an operation; None if that is not known, as of a gather's root."""
    if operation.kind in EVEN:
        return sent
    if operation.lanes is not None:
        return float(sum(received for _, _, received in operation.lanes))
    return {"send": 0.0, "recv": float(operation.known_bytes)}.get(operation.kind)


def _recorded(trace: Trace, arm: Arm, uses: Sequence[HostUse], warmup: int) -> dict[int, list[Collective]]:
    """By the rank of each use: the operations of its host's ranks in the counted steps of an arm that it covers."""
    hosts = {rank.rank: rank.host_id or str(rank.rank) for rank in trace.ranks}
    of_host = {hosts[use.rank]: use for use in uses if use.arm == arm and use.rank in hosts}
    by_host: dict[str, list[Step]] = defaultdict(list)
    for step in counted(trace, warmup):
        if step.arm == arm:
            by_host[hosts.get(step.rank, "")].append(step)
    steps = {(s.rank, s.index) for host, use in of_host.items() for s in steps_inside(by_host[host], use.recorded)}
    found: dict[int, list[Collective]] = {use.rank: [] for use in of_host.values()}
    for c in trace.collectives:
        if c.arm == arm and (c.rank, c.step) in steps:
            found[of_host[hosts[c.rank]].rank].append(c)
    return found


def _ways(trace: Trace, operations: Sequence[Collective]) -> dict[str, float | None]:
    """Bytes of a host's operations by way; None if not known."""
    count = host_count(trace)
    sent = [_sent(c, trace.size, count) for c in operations]
    received = [_received(c, each) for c, each in zip(operations, sent, strict=True)]
    known = [each for each in received if each is not None]
    return {"tx": sum(sent), "rx": sum(known) if len(known) == len(received) else None}


def unseen(trace: Trace, arm: Arm, uses: Sequence[HostUse], warmup: int = 1) -> Unseen | None:
    """The largest unseen part among the hosts, in an arm's counted steps; None if no interface's bytes were recorded.

    uses: of the same steps. What an interface sent is compared with what the operations sent, and what it received
    with what they received, if that is known.
    """
    recorded = _recorded(trace, arm, uses, warmup)
    found = []
    for use_of in (use for use in uses if use.arm == arm and use.rank in recorded):
        for way, known in _ways(trace, recorded[use_of.rank]).items():
            use = max((one for one in use_of.interfaces if one.way == way), key=lambda one: one.bytes, default=None)
            if use is not None and use.bytes > 0 and known is not None:
                surely, part = (max(0.0, 1 - known * times / use.bytes) for times in (1 + HEADERS, 1.0))
                found.append(Unseen(use_of.hostname, use.interface, part * use.bytes, part, surely))
    return max(found, key=lambda one: (one.surely, one.part), default=None)


def rating(info: TransportInfo) -> int:
    """The rated speed of a transport's interface in bits a second; 0 if it is not known."""
    return info.link_bps or 0


def carriers(trace: Trace, arm: Arm, uses: Sequence[HostUse], warmup: int = 1) -> set[tuple[str, str]]:
    """(host, interface) of the interfaces whose bytes, in the counted steps of an arm, show that its data travel there.

    An interface must have moved INTERFACE_CARRIES of the bytes that an algorithm sends from host to host at least.
    """
    count = host_count(trace) or 0
    hosts = {rank.rank: rank.host_id for rank in trace.ranks}
    recorded = _recorded(trace, arm, uses, warmup)
    least = {
        rank: sum(c.known_bytes * bus_factor(c.kind, min(c.ranks or trace.size, count)) for c in own if c.rank == rank)
        for rank, own in recorded.items()
    }
    return {
        (hosts[of.rank], use.interface)
        for of in uses
        for use in of.interfaces
        if of.arm == arm and 0 < INTERFACE_CARRIES * least.get(of.rank, 0.0) <= use.bytes
    }


def _rated(rank: Rank) -> list[TransportInfo]:
    """A rank's transports whose interface has a rated speed."""
    return [info for info in rank.transports if info.link_bps and info.interface]


def slow_interface(
    trace: Trace, arm: Arm, uses: Sequence[HostUse] | None = None
) -> tuple[TransportInfo, TransportInfo] | None:
    """An arm's interface on one rank, and a faster one: of another transport there, else of this arm elsewhere.

    uses: of the hosts. An interface that is not known for certain counts if its bytes show that the arm uses it; None:
    it counts anyway.
    """
    own = [(rank, info) for rank in trace.ranks for info in _rated(rank) if info.name == arm.transport]
    if uses is not None:
        seen = carriers(trace, arm, uses)
        own = [(rank, info) for rank, info in own if info.interface_known or (rank.host_id, info.interface) in seen]
    for rank, info in own:
        there = max(_rated(rank), key=rating)
        if rating(there) > rating(info):
            return info, there
    infos = sorted((info for _, info in own), key=rating)
    return (infos[0], infos[-1]) if infos and rating(infos[0]) < rating(infos[-1]) else None


FASTER_INTERFACE, NO_OTHERS = "faster interface", "no other traffic"


def faster(trace: Trace, arm: Arm, uses: Sequence[HostUse]) -> dict[str, float]:
    """By change, the largest factor of an arm's rate: over the faster interface; without the traffic of others."""
    slow, others = slow_interface(trace, arm, uses), unseen(trace, arm, uses)
    found = {} if slow is None else {FASTER_INTERFACE: rating(slow[1]) / rating(slow[0])}
    return found if others is None or others.part >= 1 else {**found, NO_OTHERS: 1 / (1 - others.part)}
