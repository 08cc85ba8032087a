"""What a host's interfaces and cores were used for: over the steps (average), and while something moved (active).

Counters are read at moments that are nobody's step: between two of them a counter is taken to rise evenly, so a span
shorter than the time between two readings is known no better than that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from netbottleneck.analysis.scaling import Intervals, counted, intersection, intervals, total
from netbottleneck.trace.model import Trace
from netbottleneck.trace.samples import Counters, Samples

READINGS = 2  # between two readings lies at most one part in so many of a span that is looked at by itself
CPU_KINDS = ("user", "system", "softirq", "iowait", "steal", "idle")
WAYS = ("rx", "tx")


@dataclass(frozen=True, slots=True)
class Use:
    """An interface in one transport's steps, one way. Rates in bits a second, of all that it carried, headers and all.

    average_bps: over the steps; active_bps: while an operation of this host's ranks was under way; None where no
    operation is known, or where they are too short for the readings (READINGS). bytes, packets: in the steps.
    """

    interface: str
    way: str
    average_bps: float
    active_bps: float | None
    bytes: float
    packets: float


@dataclass(frozen=True, slots=True)
class Cores:
    """Shares of the processor time of a transport's steps, by kind: of all cores, and of the busiest alone."""

    mean: Mapping[str, float]
    busiest: str
    busiest_share: float
    softirq_most: float  # of one core


@dataclass(frozen=True, slots=True)
class HostUse:
    """A host in one transport's steps. seconds: of the steps; active_s: of them, with an operation under way."""

    rank: int
    hostname: str
    transport: str
    seconds: float
    active_s: float
    hz: float
    interfaces: tuple[Use, ...] = ()
    cores: Cores | None = None
    sent_segments: float | None = None
    retransmitted_segments: float | None = None


def known(counters: Counters) -> Intervals:
    """The span that was recorded."""
    return intervals([(int(counters.time_ns[0]), int(counters.time_ns[-1]))])


def rise(counters: Counters, column: str, spans: Intervals) -> float:
    """How much a counter rose within a set of spans, as far as they were recorded."""
    inside = intersection(spans, known(counters))
    if not len(inside):
        return 0.0
    values = counters.column(column)
    # From its first reading on, so that float64 has digits enough.
    at = np.interp((inside - counters.time_ns[0]).ravel(), counters.time_ns - counters.time_ns[0], values - values[0])
    return float((at[1::2] - at[0::2]).sum())


def rate(counters: Counters, column: str, spans: Intervals) -> float | None:
    """A counter's mean rate within a set of spans, a second; None where nothing of them was recorded."""
    length_ns = total(intersection(spans, known(counters)))
    return rise(counters, column, spans) * 1e9 / length_ns if length_ns else None


def interface(counters: Counters, name: str, way: str, whole: Intervals, active: Intervals) -> Use:
    """An interface's use one way ("rx" or "tx"): average over `whole`, active over `active`."""
    column = f"{name}:{way}_bytes"
    busy = rate(counters, column, active)
    return Use(
        name,
        way,
        8 * (rate(counters, column, whole) or 0.0),
        None if busy is None else 8 * busy,
        rise(counters, column, whole),
        rise(counters, f"{name}:{way}_packets", whole),
    )


def cores(counters: Counters, spans: Intervals) -> Cores | None:
    """Where the processor time of a set of spans went; None where it was too short for one tick."""
    names = counters.owners("user")
    ticks = np.array([[rise(counters, f"{name}:{kind}", spans) for kind in CPU_KINDS] for name in names])
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
    """Each host that was recorded, in the counted steps of each transport, of its own ranks.

    Interfaces that carried nothing are left out; the busiest comes first.
    """
    ids = {rank.rank: rank.host_id for rank in trace.ranks}
    clocks = {rank.rank: rank.clock.offset_ns for rank in trace.ranks}
    steps = counted(trace, warmup)
    found = []
    for sample in samples:
        mine = sample.on_clock(clocks.get(sample.rank, 0))
        local = {rank for rank, host in ids.items() if host == ids.get(sample.rank)} or {sample.rank}
        for transport in dict.fromkeys(step.transport for step in steps if step.rank in local):
            whole = intervals((s.begin_ns, s.end_ns) for s in steps if s.rank in local and s.transport == transport)
            found.append(_host(mine, transport, whole, intersection(_moved(trace, local, transport), whole)))
    return tuple(found)


def _moved(trace: Trace, ranks: Collection[int], transport: str) -> Intervals:
    """When an operation of these ranks was under way."""
    rows = (c for c in trace.collectives if c.rank in ranks and c.transport == transport and c.finished)
    return intervals((c.start_ns or 0, c.done_ns or 0) for c in rows)


def _uses(net: Counters, whole: Intervals, active: Intervals) -> tuple[Use, ...]:
    """The interfaces that carried anything, the busiest first."""
    uses = [interface(net, name, way, whole, active) for name in net.owners("rx_bytes") for way in WAYS]
    most = {use.interface: max(u.bytes for u in uses if u.interface == use.interface) for use in uses}
    return tuple(sorted((use for use in uses if most[use.interface]), key=lambda use: -most[use.interface]))


def _between_ns(counters: Counters) -> float:
    """The mean time between two readings."""
    return float(np.diff(counters.time_ns).mean()) if len(counters.time_ns) > 1 else float("inf")


def _host(sample: Samples, transport: str, whole: Intervals, active: Intervals) -> HostUse:
    net, host = sample.net, sample.host
    some = net or host
    short = net is not None and len(active) > 0 and total(active) / len(active) < READINGS * _between_ns(net)
    return HostUse(
        sample.rank,
        "" if some is None else some.hostname,
        transport,
        total(whole) / 1e9,
        total(active) / 1e9,
        0.0 if some is None or len(some.time_ns) < 2 else 1e9 / _between_ns(some),
        () if net is None else _uses(net, whole, active[:0] if short else active),
        None if host is None else cores(host, whole),
        None if host is None else rise(host, "tcp:sent_segments", whole),
        None if host is None else rise(host, "tcp:retransmitted_segments", whole),
    )
