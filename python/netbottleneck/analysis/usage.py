"""Use of a host's interfaces and cores: over the steps (average), and while operations are in flight (active).

Samples are not aligned with steps. A counter is interpolated linearly between two samples, so a value over a span
shorter than the sampling interval is uncertain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from netbottleneck.analysis.intervals import Intervals, bus_factor, counted, host_count, intersection, intervals, total
from netbottleneck.analysis.thresholds import HEADERS
from netbottleneck.trace.model import Counters, Samples, Trace
from netbottleneck.trace.transports import Arm

READINGS = 2  # shortest mean active span, in sampling intervals, for which an active rate is reported
CPU_KINDS = ("user", "system", "softirq", "iowait", "steal", "idle")
WAYS = ("rx", "tx")


@dataclass(frozen=True, slots=True)
class Use:
    """One interface, one direction, in one arm's steps. Rates in bits a second, including headers.

    average_bps: over the steps. active_bps: while an operation of this host's ranks is in flight; None if no operation
    is known or operations are too short for the sampling interval (READINGS). bytes, packets: within the steps.
    """

    interface: str
    way: str
    average_bps: float
    active_bps: float | None
    bytes: float
    packets: float


@dataclass(frozen=True, slots=True)
class Cores:
    """Shares of processor time in an arm's steps, by kind: over all cores, and of the busiest core."""

    mean: Mapping[str, float]
    busiest: str
    busiest_share: float
    softirq_most: float  # highest softirq share of one core


@dataclass(frozen=True, slots=True)
class HostUse:
    """A host in one arm's steps. seconds: total of the steps; active_s: part with an operation in flight."""

    rank: int
    hostname: str
    arm: Arm
    seconds: float
    active_s: float
    hz: float
    interfaces: tuple[Use, ...] = ()
    cores: Cores | None = None
    sent_segments: float | None = None
    retransmitted_segments: float | None = None


def recorded_span(counters: Counters) -> Intervals:
    """The recorded span."""
    return intervals([(int(counters.time_ns[0]), int(counters.time_ns[-1]))])


def increase(counters: Counters, column: str, spans: Intervals) -> float:
    """Increase of a counter within a set of spans, as far as they were recorded."""
    inside = intersection(spans, recorded_span(counters))
    if not len(inside):
        return 0.0
    values = counters.column(column)
    # Relative to the first reading, so that float64 keeps enough digits.
    at = np.interp((inside - counters.time_ns[0]).ravel(), counters.time_ns - counters.time_ns[0], values - values[0])
    return float((at[1::2] - at[0::2]).sum())


def rate(counters: Counters, column: str, spans: Intervals) -> float | None:
    """Mean rate of a counter within a set of spans, per second; None if no part of them was recorded."""
    length_ns = total(intersection(spans, recorded_span(counters)))
    return increase(counters, column, spans) * 1e9 / length_ns if length_ns else None


def interface(counters: Counters, name: str, way: str, whole: Intervals, active: Intervals) -> Use:
    """Use of an interface in one direction ("rx" or "tx"): average over `whole`, active over `active`."""
    column = f"{name}:{way}_bytes"
    busy = rate(counters, column, active)
    return Use(
        name,
        way,
        8 * (rate(counters, column, whole) or 0.0),
        None if busy is None else 8 * busy,
        increase(counters, column, whole),
        increase(counters, f"{name}:{way}_packets", whole),
    )


def cores(counters: Counters, spans: Intervals) -> Cores | None:
    """Processor time in a set of spans, by kind; None if it is less than one tick."""
    names = counters.owners("user")
    ticks = np.array([[increase(counters, f"{name}:{kind}", spans) for kind in CPU_KINDS] for name in names])
    if not ticks.size or ticks.sum() < 1:
        return None
    mean = ticks.sum(axis=0) / ticks.sum()
    each = ticks / np.maximum(ticks.sum(axis=1, keepdims=True), 1)
    busy = 1 - each[:, CPU_KINDS.index("idle")] - each[:, CPU_KINDS.index("iowait")]
    first = int(np.argmax(busy))
    return Cores(
        dict(zip(CPU_KINDS, mean.tolist(), strict=True)),
        names[first],
        float(busy[first]),
        float(each[:, CPU_KINDS.index("softirq")].max()),
    )


def hosts(trace: Trace, samples: Sequence[Samples], warmup: int = 1) -> tuple[HostUse, ...]:
    """Use of each recorded host, by arm, in the counted steps of its own ranks.

    Interfaces without traffic are left out; the busiest comes first.
    """
    ids = {rank.rank: rank.host_id for rank in trace.ranks}
    clocks = {rank.rank: rank.clock.offset_ns for rank in trace.ranks}
    steps = counted(trace, warmup)
    uses = []
    for sample in samples:
        mine = sample.on_clock(clocks.get(sample.rank, 0))
        local = {rank for rank, host in ids.items() if host == ids.get(sample.rank)} or {sample.rank}
        for arm in dict.fromkeys(step.arm for step in steps if step.rank in local):
            whole = intervals((s.begin_ns, s.end_ns) for s in steps if s.rank in local and s.arm == arm)
            uses.append(_host(mine, arm, whole, intersection(_moved(trace, local, arm), whole)))
    return tuple(uses)


@dataclass(frozen=True, slots=True)
class Unseen:
    """Bytes on a host's busiest interface, in an arm's steps, that no recorded operation explains.

    part: of the interface's bytes; surely: the same if headers and acknowledgements add HEADERS to the recorded ones.
    """

    hostname: str
    interface: str
    bytes: float
    part: float
    surely: float


def _recorded_bytes(trace: Trace, arm: Arm) -> dict[int, float]:
    """By rank: bytes that the recorded operations of its host's ranks sent in the steps of an arm."""
    hosts: dict[str, list[int]] = defaultdict(list)
    for rank in trace.ranks:
        hosts[rank.host_id or str(rank.rank)].append(rank.rank)
    count = host_count(trace)
    found: dict[int, float] = {}
    for ranks in hosts.values():
        sent = [
            c.wire_bytes
            if c.wire_bytes is not None
            else c.tensor_bytes * bus_factor(c.kind, c.ranks or trace.size, c.algorithm, count)
            for c in trace.collectives
            if c.rank in ranks and c.arm == arm and c.step is not None
        ]
        found |= dict.fromkeys(ranks, float(sum(sent)))
    return found


def unseen(trace: Trace, arm: Arm, uses: Sequence[HostUse]) -> Unseen | None:
    """The largest unseen part among the hosts, in the steps of an arm; None if no interface's bytes were recorded."""
    recorded = _recorded_bytes(trace, arm)
    found = []
    for use_of in uses:
        sent = recorded.get(use_of.rank)
        if use_of.arm != arm or not use_of.interfaces or sent is None:
            continue
        use = max(use_of.interfaces, key=lambda one: one.bytes)
        if use.bytes > 0:
            surely, part = (max(0.0, 1 - sent * times / use.bytes) for times in (1 + HEADERS, 1.0))
            found.append(Unseen(use_of.hostname, use.interface, part * use.bytes, part, surely))
    return max(found, key=lambda one: (one.surely, one.part), default=None)


def _moved(trace: Trace, ranks: Collection[int], arm: Arm) -> Intervals:
    """Spans in which an operation of these ranks is in flight."""
    rows = (c for c in trace.collectives if c.rank in ranks and c.arm == arm and c.finished)
    return intervals((c.start_ns or 0, c.done_ns or 0) for c in rows)


def _uses(net: Counters, whole: Intervals, active: Intervals) -> tuple[Use, ...]:
    """Use of the interfaces with traffic, the busiest first."""
    uses = [interface(net, name, way, whole, active) for name in net.owners("rx_bytes") for way in WAYS]
    most = {use.interface: max(u.bytes for u in uses if u.interface == use.interface) for use in uses}
    return tuple(sorted((use for use in uses if most[use.interface]), key=lambda use: -most[use.interface]))


def _sampling_interval_ns(counters: Counters) -> float:
    """Mean time between two samples, in ns."""
    return float(np.diff(counters.time_ns).mean()) if len(counters.time_ns) > 1 else float("inf")


def _host(sample: Samples, arm: Arm, whole: Intervals, active: Intervals) -> HostUse:
    net, host = sample.net, sample.host
    some = net or host
    short = net is not None and len(active) > 0 and total(active) / len(active) < READINGS * _sampling_interval_ns(net)
    return HostUse(
        sample.rank,
        "" if some is None else some.hostname,
        arm,
        total(whole) / 1e9,
        total(active) / 1e9,
        0.0 if some is None or len(some.time_ns) < 2 else 1e9 / _sampling_interval_ns(some),
        () if net is None else _uses(net, whole, active[:0] if short else active),
        None if host is None else cores(host, whole),
        None if host is None else increase(host, "tcp:sent_segments", whole),
        None if host is None else increase(host, "tcp:retransmitted_segments", whole),
    )
