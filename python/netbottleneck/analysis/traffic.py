"""Bytes between hosts: of the recorded operations, and on the interfaces that carry them. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from netbottleneck.analysis.bandwidth import Achieved, bus_factor
from netbottleneck.analysis.intervals import (
    counted,
    groups,
    host_count,
    intervals,
    last_entries,
    moving_span,
    total,
)
from netbottleneck.analysis.thresholds import HEADERS, INTERFACE_CARRIES, MESSAGE_BYTES, OTHER_TRAFFIC
from netbottleneck.analysis.usage import (
    LOOPBACK,
    NO_CONNECTIONS,
    WAYS,
    Connected,
    ConnectionUse,
    HostUse,
    Use,
    by_link,
    slow_link,
    steps_inside,
)
from netbottleneck.trace.model import MEMORY_LANE, Collective, Rank, Step, Trace, TransportInfo
from netbottleneck.trace.transports import STOCK, Arm
from netbottleneck.units import listed


@dataclass(frozen=True, slots=True)
class Unseen:
    """Bytes on a host's interface in one direction, in an arm's steps, that no recorded operation explains.

    part: of the interface's bytes; surely: the same if headers, acknowledgements and control messages add what they may
    to the recorded ones. active_bps: rate of all bytes on the interface while operations are in flight, or over the
    steps if that is higher. link_bps: rated speed of the interface; None if it is not known.
    """

    hostname: str
    interface: str
    bytes: float
    part: float
    surely: float
    active_bps: float = 0.0
    link_bps: float | None = None

    @property
    def unseen_bps(self) -> float:
        """Rate of the unseen bytes."""
        return self.part * self.active_bps


# Operations in which each rank receives as many bytes as it sends.
EVEN = ("allreduce", "allgather", "reducescatter", "barrier")

# Operations in which the root sends more than the others, or less. The record does not tell which rank that is.
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def in_memory(operation: Collective) -> bool:
    """True if an operation moved its bytes through shared memory alone."""
    return "shared memory" in (operation.algorithm or "")


class _Places:
    """The ranks of a run by host. A rank that did not record its host has one of its own."""

    def __init__(self, trace: Trace) -> None:
        self.size = trace.size
        self.count = host_count(trace)
        self.hosts = {rank.rank: rank.host_id or str(rank.rank) for rank in trace.ranks}
        self._local = Counter(self.hosts.values())

    def local(self, rank: int) -> int:
        """Return the number of ranks on the host of a rank."""
        return self._local[self.hosts[rank]]

    def of(self, host: str) -> int:
        """Return the number of ranks on a host."""
        return self._local[host]

    def most_local(self) -> int:
        """Return the largest number of ranks on a host."""
        return max(self._local.values(), default=1)

    def outside(self, operation: Collective, to: int) -> tuple[float, float]:
        """Return the least and the most part of a rank's bytes in an operation that pass between hosts.

        If all ranks are on one host, these are the bytes on its loopback.
        to: 1 for what it sends, -1 for what it receives. A ring passes from each rank to the next one.
        """
        rank, algorithm = operation.rank, operation.algorithm or ""
        if in_memory(operation):
            return 0.0, 0.0
        if "two_level" in algorithm or self.local(rank) == 1 or self.count == 1:
            return 1.0, 1.0
        if operation.ranks in (None, self.size):
            if operation.kind == "alltoall":
                part = (self.size - self.local(rank)) / (self.size - 1)
                return part, part
            if algorithm.startswith(("ring", "chain")):
                part = float(self.hosts.get((rank + to) % self.size) != self.hosts[rank])
                return part, part
        return 0.0, 1.0


def _sent(operation: Collective, places: _Places) -> float:
    """Bytes that a rank sends in an operation: recorded, else by the operation's kind."""
    if operation.wire_bytes is not None:
        return float(operation.wire_bytes)
    factor = bus_factor(operation.kind, operation.ranks or places.size, operation.algorithm, places.count)
    return operation.known_bytes * factor


def _levels(ranks: int) -> int:
    """Levels of a binomial tree of ranks: its root may send a tensor so many times."""
    return max(1, (ranks - 1).bit_length())


def _received(operation: Collective, sent: float) -> float | None:
    """Bytes that a rank receives in an operation; None if that is not known, as of a gather's root."""
    if operation.kind in EVEN:
        return sent
    if operation.lanes is not None:
        return float(sum(received for lane, _, received in operation.lanes if lane != MEMORY_LANE))
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


@dataclass(frozen=True, slots=True)
class _Known:
    """Bytes that a host's operations move in one direction on its interface: at least, and at most.

    more: what headers, acknowledgements and control messages add at most.
    """

    least: float
    most: float
    more: float

    @property
    def exact(self) -> bool:
        """True if the bytes are known but for headers."""
        return self.most - self.least <= HEADERS * self.most


def _known(places: _Places, operations: Sequence[Collective], way: str) -> _Known | None:
    """The recorded bytes of a host's operations in one direction; None if they are not known.

    If ranks of one host share memory, their other bytes say nothing about its loopback.
    """
    if places.count == 1 and any(map(in_memory, operations)):
        return None
    least = most = messages = 0.0
    for one in operations:
        sent = _sent(one, places)
        moved = sent if way == "tx" else _received(one, sent)
        if moved is None:
            return None
        low, high = places.outside(one, 1 if way == "tx" else -1)
        if one.kind in ROOTED and one.wire_bytes is None:
            low, high = 0.0, high * _levels(one.ranks or places.size)
        least, most = least + low * moved, most + high * moved
        messages += high * 2 * ((one.ranks or places.size) - 1)
    return _Known(least, most, HEADERS * most + MESSAGE_BYTES * messages)


def _link(use_of: HostUse, way: str, known: _Known, names: Collection[str]) -> Use | None:
    """The use of the interface that carries a host's operations; None if none has traffic.

    names: the interfaces that may. Of several that moved enough bytes, the one with the fewest: its unseen bytes are
    the fewest. Readings are not exact at the ends of steps, so a few bytes may lack.
    """
    uses = [use for use in use_of.interfaces if use.way == way and use.interface in names and use.bytes > 0]
    enough = [use for use in uses if use.bytes >= (1 - HEADERS) * known.least]
    if known.exact and enough:
        return min(enough, key=lambda use: use.bytes)
    return max(uses, key=lambda use: use.bytes, default=None)


def _names(trace: Trace, use_of: HostUse, arm: Arm, host: Sequence[Rank], places: _Places) -> set[str]:
    """The interfaces of a host that may carry an arm's operations: the loopback if all ranks are on one host."""
    if places.count == 1:
        return {LOOPBACK}
    links = set(use_of.links) - {LOOPBACK}
    infos = [info for rank in host for info in rank.transports if info.name == arm.transport]
    sure = {info.interface for info in infos if info.interface and info.interface_known}
    return links & sure or links


def _unseen_of(use_of: HostUse, use: Use, known: _Known, host: Sequence[Rank]) -> Unseen:
    """The unseen bytes of an interface."""
    surely, part = (max(0.0, 1 - recorded / use.bytes) for recorded in (known.most + known.more, known.most))
    rated = [info.link_bps for rank in host for info in rank.transports if info.interface == use.interface]
    return Unseen(
        use_of.hostname,
        use.interface,
        part * use.bytes,
        part,
        surely,
        max(use.active_bps or 0.0, use.average_bps),
        min((bps for bps in rated if bps), default=None),
    )


def unseen(trace: Trace, arm: Arm, uses: Sequence[HostUse], warmup: int = 1) -> Unseen | None:
    """The largest unseen part among the hosts, in an arm's counted steps; None if it is not known.

    uses: of the same steps. What an interface sent is compared with what the operations sent to other hosts, and what
    it received with what they received, if that is known. Where it is not known how many bytes pass between hosts, all
    of them are taken to, and the rest counts only if it surely does. Without recorded bytes, as in shared memory,
    nothing is compared.
    """
    recorded, places = _recorded(trace, arm, uses, warmup), _Places(trace)
    found = []
    for use_of in by_link(trace, [use for use in uses if use.arm == arm and use.rank in recorded]):
        host = [rank for rank in trace.ranks if places.hosts[rank.rank] == places.hosts[use_of.rank]]
        names = _names(trace, use_of, arm, host, places)
        for way in WAYS:
            known = _known(places, recorded[use_of.rank], way)
            use = None if known is None or known.most <= 0 else _link(use_of, way, known, names)
            if use is not None and known is not None:
                one = _unseen_of(use_of, use, known, host)
                if known.exact or one.surely >= OTHER_TRAFFIC:
                    found.append(one)
    return max(found, key=lambda one: (one.surely, one.part), default=None)


@dataclass(frozen=True, slots=True)
class OnInterface:
    """Rate on the interface of a host, one way, over the busbw of a rank: in transfer, and over the step.

    least: of it, the least part that passes between hosts by any algorithm; 1 if it is known to be that of a ring.
    """

    active: float = 1.0
    average: float = 1.0
    least: float = 1.0


@dataclass(frozen=True, slots=True)
class ArmLink:
    """The link of an arm, and what the interface of a host carries of the arm's operations."""

    bps: float
    shared: OnInterface = OnInterface()

    @property
    def full_bps(self) -> float:
        """The busbw of a rank at which the link is full."""
        return self.bps / self.shared.active

    def used(self, did: Achieved) -> tuple[float, float]:
        """The parts of the link that the arm used: in transfer, and over the step."""
        return self.shared.active * did.active_bps / self.bps, self.shared.average * did.average_bps / self.bps


@dataclass(frozen=True, slots=True)
class _Between:
    """An operation between hosts. moved: bytes by bus_factor. local: the ranks of its group by host; None: unknown."""

    operation: Collective
    moved: float
    local: Mapping[str, int] | None

    def of_some(self, size: int) -> bool:
        """True if its group is known and has some of the ranks of a run of this size."""
        return self.local is not None and sum(self.local.values()) < size

    @property
    def factor(self) -> float:
        """Bytes on the interface of a host over those of a rank."""
        if self.local is None:
            return 1.0
        size, most = sum(self.local.values()), max(self.local.values())
        part = (size - most) / (size - 1)
        return {"alltoall": most * part, "gather": part, "scatter": part}.get(self.operation.kind, 1.0)

    @property
    def least(self) -> float:
        """The least part of an all-reduce's busbw between hosts: what a ring of one rank of each host sends."""
        if self.local is None:
            return 1.0
        return bus_factor("allreduce", len(self.local)) / bus_factor("allreduce", sum(self.local.values()))


def _between(trace: Trace, arm: Arm, places: _Places, steps: Collection[tuple[int, int]]) -> Iterator[_Between]:
    """The operations between hosts that an arm moved in these steps, each given as (rank, index)."""
    whole = Counter(places.hosts.values()) if len(places.hosts) == trace.size else None
    local = {match: Counter(places.hosts[rank] for rank in ranks) for match, ranks in groups(trace).items()}
    for one in trace.collectives:
        stays = one.by_script and arm.transport != STOCK.transport
        if one.arm == arm and (one.rank, one.step) in steps and not stays:
            by_host = whole if one.ranks in (None, trace.size) else local.get(one.match)
            moved = one.known_bytes * bus_factor(one.kind, one.ranks or trace.size, one.algorithm, places.count)
            if moved and (by_host is None or len(by_host) > 1):
                yield _Between(one, moved, by_host)


def _host_steps(places: _Places, steps: Collection[tuple[int, int]]) -> dict[str, float]:
    """By host: the number of steps of its mean rank."""
    count = Counter(places.hosts[rank] for rank, _ in steps)
    return {host: count[host] / places.of(host) for host in count}


def _over_step(moved: Sequence[_Between], places: _Places, steps: Collection[tuple[int, int]]) -> dict[str, float]:
    """By host: bytes of operations on its interface, one way, over those of the mean rank, in a step."""
    sent: dict[str, float] = defaultdict(float)
    for one in moved:
        host = places.hosts[one.operation.rank]
        sent[host] += one.moved * one.factor / (places.of(host) if one.local is None else one.local[host])
    counts, mean_bytes = _host_steps(places, steps), sum(one.moved for one in moved) / len(steps)
    return {host: nbytes / counts[host] / mean_bytes for host, nbytes in sent.items()}


def _at_once(
    trace: Trace, moved: Sequence[_Between], places: _Places, steps: Collection[tuple[int, int]]
) -> dict[str, float]:
    """By host: the time in which the mean rank moves data, over that in which any rank of the host does."""
    last = last_entries(trace)
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for one in moved:
        spans[one.operation.rank].append(moving_span(one.operation, last))
    by_host: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for rank, own in spans.items():
        by_host[places.hosts[rank]] += own
    counts, mean_ns = _host_steps(places, steps), sum(total(intervals(own)) for own in spans.values()) / len(steps)
    return {host: mean_ns * counts[host] / max(total(intervals(own)), 1) for host, own in by_host.items()}


def on_interface(trace: Trace, arm: Arm, warmup: int = 1) -> OnInterface:
    """What the interface of a host carries of an arm's operations, over what bus_factor counts for a rank.

    A ring enters and leaves each host once, so that a host's interface carries the bytes of one rank, however many
    ranks of its group share it. In an all-to-all each of its L ranks sends n - L of n parts to other hosts: L (n - L) /
    (n - 1). The root of a gather or scatter exchanges n - L parts: (n - L) / (n - 1). Groups of some of the ranks share
    the interface of their host, and add up in transfer as far as they move data at once. A group whose ranks are not
    all recorded counts as one of all ranks. Of the host with the highest rate.
    """
    places = _Places(trace)
    steps = {(step.rank, step.index) for step in counted(trace, warmup) if step.arm == arm}
    shared = places.most_local() > 1 and places.count != 1
    moved = list(_between(trace, arm, places, steps)) if shared else []
    if not moved:
        return OnInterface()
    average = _over_step(moved, places, steps)
    active = average
    if any(one.of_some(trace.size) for one in moved):
        at_once = _at_once(trace, moved, places, steps)
        active = {host: rate * at_once[host] for host, rate in average.items()}
    least = sum(one.moved * one.least for one in moved) / sum(one.moved for one in moved)
    return OnInterface(max(active.values()), max(average.values()), 1.0 if _as_a_ring(trace, arm) else least)


def _as_a_ring(trace: Trace, arm: Arm) -> bool:
    """True if all-reduces of an arm are known to be rings. NCCL and MPI may send by a tree or by levels."""
    if not (arm.own_path or arm.over_nccl):
        return True
    providers = {info.provider for rank in trace.ranks for info in rank.transports if info.name == arm.transport}
    return providers <= {"gloo"} or {one.algorithm for one in trace.nccl if one.function == "AllReduce"} == {"RING"}


def rounds(trace: Trace, arm: Arm) -> int:
    """How often a step of an arm reduces the same bucket, at most: once for each micro-batch, without no_sync()."""
    seen = Counter(
        (one.rank, one.step, one.part, one.bucket)
        for one in trace.collectives
        if one.arm == arm and one.bucket is not None and one.step is not None and not one.by_script
    )
    return max(seen.values(), default=0)


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


def unproven(trace: Trace, arm: Arm, uses: Sequence[HostUse]) -> TransportInfo | None:
    """A rated interface that an arm may not use, on any rank; None if each is known, or its bytes show the arm's data.

    A declared rate is of the network that the arm uses.
    """
    if trace.network is not None:
        return None
    rated = [(rank, info) for rank in trace.ranks for info in rank.transports if info.name == arm.transport]
    named = [(rank, info) for rank, info in rated if info.link_bps and info.interface]
    perhaps = [(rank, info) for rank, info in named if not (info.interface_known or info.declared)]
    seen = carriers(trace, arm, uses) if perhaps else set()
    return next((info for rank, info in perhaps if (rank.host_id, info.interface) not in seen), None)


def _rated(rank: Rank) -> list[TransportInfo]:
    """A rank's transports whose interface has a rated speed."""
    return [info for info in rank.transports if info.link_bps and info.interface]


def _certain(
    trace: Trace, arm: Arm, own: Sequence[tuple[Rank, TransportInfo]], uses: Sequence[HostUse]
) -> list[tuple[Rank, TransportInfo]]:
    """Those of an arm's transports whose interface is known, or whose bytes show that the arm uses it."""
    seen = set() if all(info.interface_known for _, info in own) else carriers(trace, arm, uses)
    return [(rank, info) for rank, info in own if info.interface_known or (rank.host_id, info.interface) in seen]


def slow_interface(
    trace: Trace, arm: Arm, uses: Sequence[HostUse] | None = None
) -> tuple[TransportInfo, TransportInfo] | None:
    """An arm's interface on one rank, and a faster one: of another transport there, else of this arm elsewhere.

    uses: of the hosts. An interface that is not known for certain counts if its bytes show that the arm uses it; None:
    it counts anyway.
    """
    own = [(rank, info) for rank in trace.ranks for info in _rated(rank) if info.name == arm.transport]
    if uses is not None:
        own = _certain(trace, arm, own, uses)
    for rank, info in own:
        there = max(_rated(rank), key=rating)
        if rating(there) > rating(info):
            return info, there
    infos = sorted((info for _, info in own), key=rating)
    return (infos[0], infos[-1]) if infos and rating(infos[0]) < rating(infos[-1]) else None


FASTER_INTERFACE, NO_OTHERS, NO_SLOW_LINK = "faster interface", "no other traffic", "no slow link"


def faster(trace: Trace, arm: Arm, uses: Sequence[HostUse], connected: Connected = NO_CONNECTIONS) -> dict[str, float]:
    """By change, the factor of an arm's rate.

    That is over the faster interface and without the traffic of others, the largest; and with a slow link of one host
    as fast as the connections between the other hosts, the least.
    """
    slow, others, link = slow_interface(trace, arm, uses), unseen(trace, arm, uses), slow_link(trace, connected, arm)
    found = {} if slow is None else {FASTER_INTERFACE: rating(slow[1]) / rating(slow[0])}
    found |= {} if others is None or others.part >= 1 else {NO_OTHERS: 1 / (1 - others.part)}
    return found if link is None else {**found, NO_SLOW_LINK: link.others_bps / link.bps}


# The network of an arm as its hosts configure it: facts, none of which is known to cost time.

# The kernel gives no path a larger MTU: an IPv4 packet has at most so many bytes.
MTU_MOST_BYTES = 65_535
SAME_MTU = (
    "Set the same MTU on all hosts and on the switches between them; ping -M do -s SIZE, with SIZE 28 below the MTU, "
    "shows what passes."
)


def _with_mtu(trace: Trace, arm: Arm) -> list[tuple[Rank, TransportInfo]]:
    """An arm's transports on an interface, but the loopback, whose MTU is recorded."""
    own = [(rank, info) for rank in trace.ranks for info in rank.transports if info.name == arm.transport]
    return [(rank, info) for rank, info in own if info.mtu_bytes and info.interface not in (None, LOOPBACK)]


def unequal_mtus(trace: Trace, arm: Arm, uses: Sequence[HostUse]) -> str:
    """Clause: the MTUs of an arm's interfaces by rank; "" unless two hosts surely have no MTU in common."""
    own = _with_mtu(trace, arm)
    if len({info.mtu_bytes for _, info in own}) < 2:
        return ""
    of_host: dict[str, set[int]] = defaultdict(set)
    by_mtu: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for rank, info in _certain(trace, arm, own, uses):
        of_host[rank.host_id or str(rank.rank)].add(info.mtu_bytes or 0)
        by_mtu[info.mtu_bytes or 0].append((rank.rank, info.interface or ""))
    if all(one & two for one, two in combinations(set(map(frozenset, of_host.values())), 2)):
        return ""
    each = [
        f"{mtu} bytes on rank {listed(rank for rank, _ in found)} ({', '.join(sorted({name for _, name in found}))})"
        for mtu, found in sorted(by_mtu.items())
    ]
    return f"the MTUs of {arm}'s interfaces differ: {'; '.join(each)}"


def _narrow_path(trace: Trace, arm: Arm, uses: Sequence[HostUse], connected: Connected) -> str:
    """Note: the path of an arm with the smallest MTU below those of the interfaces at both ends; "" without one."""
    own = _with_mtu(trace, arm)
    mtus: dict[int | None, int] = {rank.rank: info.mtu_bytes or 0 for rank, info in own}

    def least(end: ConnectionUse) -> int:
        return min(mtus.get(end.rank, 0), mtus.get(end.peer, 0), MTU_MOST_BYTES)

    ends = [end for end in connected.ends if end.arm == arm and 0 < (end.path_mtu_bytes or 0) < least(end)]
    surely = {rank.rank for rank, _ in _certain(trace, arm, own, uses)} if ends else set()
    ends = [end for end in ends if {end.rank, end.peer} <= surely]
    if not ends:
        return ""
    end = min(ends, key=lambda one: one.path_mtu_bytes or 0)
    return (
        f"the kernel's MTU of {arm}'s path from rank {end.rank} to rank {end.peer} is {end.path_mtu_bytes:.0f} bytes, "
        f"that of the interfaces at its ends {least(end)} or more: a smaller MTU lies in between, or in a route"
    )


def _unlike_variables(trace: Trace, arm: Arm) -> list[str]:
    """A note for each variable that the backend of the script's own path reads, and in which the ranks differ."""
    infos = [info for rank in trace.ranks for info in rank.transports if info.name == arm.transport]
    providers = " ".join(info.provider or "" for info in infos)
    found = []
    for name in sorted({name for rank in trace.ranks for name in rank.stock_variables}) if arm.own_path else ():
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank in trace.ranks:
            ranks[rank.stock_variables.get(name, "not set")].append(rank.rank)
        # Horovod's operations may use any of them.
        if len(ranks) > 1 and ("horovod" in providers or name.partition("_")[0].lower() in providers):
            each = (f"{value} on rank {listed(own)}" for value, own in ranks.items())
            found.append(f"ranks differ in {name}: {'; '.join(each)}")
    return found


def notes(trace: Trace, arm: Arm, uses: Sequence[HostUse], connected: Connected) -> list[str]:
    """What the hosts' configuration of an arm's network has unequal, and a path with a smaller MTU than its ends."""
    unequal = unequal_mtus(trace, arm, uses)
    mtus = [f"{unequal}. {SAME_MTU}" if unequal else "", _narrow_path(trace, arm, uses, connected)]
    return [*filter(None, mtus), *_unlike_variables(trace, arm)]
