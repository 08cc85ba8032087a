"""Use of a host's interfaces, cores and TCP connections: over the steps, and while operations are in flight (active).

Samples are not aligned with steps. The rates of an arm are those between neighbouring samples that lie in one run of
its steps, so nothing before or after it is in them; its bytes are those of as many such steps as it has, because steps
move the same bytes however long they take. Else a counter is interpolated linearly between two samples, and a
value over a span shorter than the sampling interval is uncertain.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis.intervals import Intervals, counted, intersection, intervals, total
from netbottleneck.analysis.thresholds import (
    COVERED_MIN,
    LOSS_SEGMENTS,
    LOSS_SHARE,
    QUEUE_RATIO,
    SLOW_LINK_BUSY,
    SLOW_LINK_RATIO,
)
from netbottleneck.trace.counter_files import Connection, Counters, End, Samples
from netbottleneck.trace.counter_files import connections as recorded_connections
from netbottleneck.trace.model import Clock, Step, Trace
from netbottleneck.trace.transports import BARE, STOCK, Arm
from netbottleneck.units import nbytes, percent

READINGS = 2  # shortest mean active span, in sampling intervals, for which an active rate is reported
ARM_READINGS = 10  # sampling intervals within an arm's steps, with fewer of which its values are not reported
UNUSUAL = 2.0  # a step of more than so many medians may have other traffic than the others
CPU_KINDS = ("user", "system", "softirq", "iowait", "steal", "idle")
WAYS = ("rx", "tx")
LOOPBACK = "lo"  # no part of the link


@dataclass(frozen=True, slots=True)
class Use:
    """One interface, one direction, in one arm's steps. Rates in bits a second, including headers.

    average_bps: over the steps. active_bps: while an operation of this host's ranks is in flight; None if no operation
    is known or operations are too short for the sampling interval (READINGS). bytes, packets: of the steps.
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
    """A host in one arm's steps. seconds: total of the steps; active_s: part with an operation in flight.

    recorded: begin and end of the readings of its interfaces, whose bytes and rates are those of the steps inside;
    None: of all steps. mixed: the arm's blocks are short for the readings, so its bytes and rates have a part of what
    came before and after them.
    """

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
    recorded: tuple[int, int] | None = None
    mixed: bool = False

    @property
    def links(self) -> tuple[str, ...]:
        """The interfaces by name, without the loopback unless there is no other."""
        names = sorted({use.interface for use in self.interfaces})
        return tuple(name for name in names if name != LOOPBACK) or tuple(names)

    @property
    def busiest(self) -> str:
        """The busiest interface; the loopback only if there is no other; "" if there is none."""
        return next((use.interface for use in self.interfaces if use.interface in self.links), "")

    def added_up(self) -> HostUse:
        """This host with its links as one interface, which comes first: they share the traffic."""
        links = self.links
        named = {way: [use for use in self.interfaces if use.way == way and use.interface in links] for way in WAYS}
        others = [use for use in self.interfaces if use.interface not in links]
        return replace(self, interfaces=(*(_added_up(uses, links) for uses in named.values() if uses), *others))


def _added_up(uses: Sequence[Use], links: Sequence[str]) -> Use:
    active = [use.active_bps for use in uses if use.active_bps is not None]
    return Use(
        ",".join(links),
        uses[0].way,
        sum(use.average_bps for use in uses),
        sum(active) if len(active) == len(uses) else None,
        sum(use.bytes for use in uses),
        sum(use.packets for use in uses),
    )


def by_link(trace: Trace, hosts: Sequence[HostUse]) -> list[HostUse]:
    """The hosts with interfaces that compare with the run's link: added up where each host has several links."""
    several = trace.network is not None and trace.network.several_links
    return [host.added_up() for host in hosts] if several else list(hosts)


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


def interface(counters: Counters, name: str, way: str, over: Intervals, active: Intervals, times: float = 1.0) -> Use:
    """Use of an interface in one direction ("rx" or "tx"): average over `over`, active over `active`.

    times: how many times as many steps the bytes and packets are of as lie in `over`.
    """
    column = f"{name}:{way}_bytes"
    busy, average = rate(counters, column, active), rate(counters, column, over) or 0.0
    return Use(
        name,
        way,
        8 * average,
        None if busy is None else 8 * busy,
        times * increase(counters, column, over),
        times * increase(counters, f"{name}:{way}_packets", over),
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
    clocks = {rank.rank: rank.clock for rank in trace.ranks}
    steps = counted(trace, warmup)
    uses = []
    for sample in samples:
        mine = sample.on_rank_0(clocks.get(sample.rank, Clock()))
        local = {rank for rank, host in ids.items() if host == ids.get(sample.rank)} or {sample.rank}
        here = [step for step in steps if step.rank in local]
        for arm in dict.fromkeys(step.arm for step in here):
            own = [step for step in here if step.arm == arm]
            uses.append(_host(mine, arm, own, _moved(trace, local, arm), _alike(trace, local, arm)))
    return tuple(uses)


def _same(arm: Arm) -> tuple[Arm, ...]:
    """The arms with the traffic of an arm: `stock` and `bare` move the same bytes the same way."""
    return (STOCK, BARE) if arm in (STOCK, BARE) else (arm,)


def _alike(trace: Trace, ranks: Collection[int], arm: Arm) -> _Alike:
    """What the readings of a host are compared with: see _Alike. ranks: those on the host."""
    spans = functools.reduce(intersection, (_usual(trace, rank, arm) for rank in sorted(ranks)))
    return _Alike(spans, [step for step in trace.steps if step.rank in ranks and step.arm in _same(arm)])


def _usual(trace: Trace, rank: int, arm: Arm) -> Intervals:
    """The times of a rank in which the traffic is that of an arm's steps: runs of its steps without an unusual one.

    A step with an evaluation or a checkpoint is unusual, and one of UNUSUAL times the median.
    """
    arms = _same(arm)
    steps = sorted((step for step in trace.steps if step.rank == rank), key=lambda step: step.begin_ns)
    of_arm = [step.duration_ns for step in steps if step.arm in arms]
    most_ns = UNUSUAL * float(np.median(of_arm)) if of_arm else 0.0
    runs: list[tuple[int, int]] = []
    before: Step | None = None
    for step in steps:
        unusual = step.evaluation or step.checkpoints or step.duration_ns > most_ns
        usual = step if step.arm in arms and not unusual else None
        if usual is not None:
            joined = before is not None and usual.begin_ns - before.end_ns <= most_ns
            runs.append((runs.pop()[0] if joined else usual.begin_ns, usual.end_ns))
        before = usual
    return intervals(runs)


@dataclass(frozen=True, slots=True)
class _Alike:
    """The times of a host in which the traffic is that of an arm's steps, and all steps of its ranks with that traffic.

    A step of one rank counts as one.
    """

    spans: Intervals
    steps: Sequence[Step]

    def readings(self, counters: Counters) -> tuple[Intervals, int]:
        """The times between neighbouring readings that lie within one of the spans, and their number."""
        times = counters.time_ns
        if not len(self.spans) or len(times) < 2:
            return self.spans[:0], 0
        place = np.searchsorted(self.spans[:, 0], times, "right") - 1
        inside = (place[:-1] >= 0) & (place[:-1] == place[1:]) & (times[1:] <= self.spans[np.maximum(place[1:], 0), 1])
        return intervals(zip(times[:-1][inside].tolist(), times[1:][inside].tolist(), strict=True)), int(inside.sum())

    def steps_in(self, read: Intervals) -> float:
        """The number of steps within times, with parts of steps."""
        if not len(read):
            return 0.0
        ends = np.array([(s.begin_ns, s.end_ns) for s in self.steps if s.duration_ns > 0], np.int64) - read[0, 0]
        covered = np.cumsum(np.stack([np.zeros(len(read)), read[:, 1] - read[:, 0]], axis=1).ravel())
        inside = np.interp(ends.ravel(), (read - read[0, 0]).ravel(), covered).reshape(-1, 2)
        return float(((inside[:, 1] - inside[:, 0]) / (ends[:, 1] - ends[:, 0])).sum())


def _covered(trace: Trace, samples: Samples) -> float:
    """The part of the steps' time that a host's readings cover, from the first reading on.

    The steps are those of the rank that recorded them. A run that observes begins before its ranks have joined.
    """
    tables = [table for table in (samples.net, samples.host) if table is not None]
    begin_ns = min((int(table.time_ns[0]) for table in tables), default=0)
    own = (step for step in trace.steps if step.rank == samples.rank)
    steps = intervals((max(step.begin_ns, begin_ns), step.end_ns) for step in own)
    if not tables or not total(steps):
        return 1.0
    return min(total(intersection(steps, recorded_span(table))) for table in tables) / total(steps)


def notes(trace: Trace, samples: Sequence[Samples], *, whole: bool) -> list[str]:
    """What the counters of the hosts lack. whole: they are all readings of a run that has ended."""
    clocks = {rank.rank: rank.clock for rank in trace.ranks}
    found = []
    for sample in samples:
        mine = sample.on_rank_0(clocks.get(sample.rank, Clock()))
        host = next((table.hostname for table in (sample.net, sample.host) if table is not None and table.hostname), "")
        name = host or f"rank {sample.rank}'s host"
        covered = _covered(trace, mine) if whole else 1.0
        if covered < COVERED_MIN:
            found.append(f"the counters of {name} cover {percent(covered)} of its steps' time: the rest is not known")
        if sample.net is not None and sample.net.left_out:
            found.append(f"{sample.net.left_out} interfaces of {name} are not recorded")
        if sample.net is not None and sample.net.backwards:  # the kernel's iowait may go backwards at any time
            back = ", ".join(sample.net.backwards)
            found.append(f"counters of {name} went backwards, and count as 0 there: {back}")
    return found


def steps_inside(steps: Iterable[Step], span: tuple[int, int] | None) -> list[Step]:
    """The steps that lie inside a time; all if it is None."""
    return [step for step in steps if span is None or (span[0] <= step.begin_ns and step.end_ns <= span[1])]


def _moved(trace: Trace, ranks: Collection[int], arm: Arm) -> Intervals:
    """Spans in which an operation of these ranks is in flight."""
    rows = (c for c in trace.collectives if c.rank in ranks and c.arm == arm and c.finished)
    return intervals((c.start_ns or 0, c.done_ns or 0) for c in rows)


def _uses(net: Counters, over: Intervals, active: Intervals, times: float) -> tuple[Use, ...]:
    """Use of the interfaces with traffic, the busiest first."""
    uses = [interface(net, name, way, over, active, times) for name in net.owners("rx_bytes") for way in WAYS]
    most = {use.interface: max(u.bytes for u in uses if u.interface == use.interface) for use in uses}
    return tuple(sorted((use for use in uses if most[use.interface]), key=lambda use: -most[use.interface]))


def sampling_interval_ns(counters: Counters) -> float:
    """Mean time between two samples, in ns."""
    return float(np.diff(counters.time_ns).mean()) if len(counters.time_ns) > 1 else float("inf")


def _host(sample: Samples, arm: Arm, steps: Sequence[Step], moved: Intervals, alike: _Alike) -> HostUse:
    """Use of a host in the steps of an arm. moved: spans in which an operation of its ranks is in flight."""
    net, host = sample.net, sample.host
    some = net or host
    whole = intervals((s.begin_ns, s.end_ns) for s in steps)
    active = intersection(moved, whole)
    use = HostUse(
        sample.rank,
        "" if some is None else some.hostname,
        arm,
        total(whole) / 1e9,
        total(active) / 1e9,
        0.0 if some is None or len(some.time_ns) < 2 else 1e9 / sampling_interval_ns(some),
    )
    if net is not None:
        recorded = int(net.time_ns[0]), int(net.time_ns[-1])
        own = steps_inside(steps, recorded)
        inside = intervals((s.begin_ns, s.end_ns) for s in own)
        short = len(active) > 0 and total(active) / len(active) < READINGS * sampling_interval_ns(net)
        active = active[:0] if short else intersection(active, inside)
        read, count = alike.readings(net)
        usual = alike.steps_in(read)
        mixed = count < ARM_READINGS or not usual
        over, times = (inside, 1.0) if mixed else (read, len(own) / usual)
        use = replace(use, interfaces=_uses(net, over, active, times), recorded=recorded, mixed=mixed)
    return use if host is None else _with_cores(use, host, len(steps), alike)


def _with_cores(use: HostUse, host: Counters, steps: int, alike: _Alike) -> HostUse:
    """A host's use with its processors and the TCP segments of so many steps."""
    read, count = alike.readings(host)
    usual = alike.steps_in(read)
    sent, again = (
        steps / usual * increase(host, f"tcp:{kind}_segments", read) if usual else None
        for kind in ("sent", "retransmitted")
    )
    known = cores(host, read) if count >= ARM_READINGS else None
    return replace(use, cores=known, sent_segments=sent, retransmitted_segments=again)


# TCP connections: those between two ranks, in the steps of the arm whose bytes they carry.

# A connection with less of the bytes that its rank sent in an arm is left out: control messages, a store.
SIGNIFICANT = 0.01


@dataclass(frozen=True, slots=True)
class ConnectionUse:
    """One end of a TCP connection that sends, in the counted steps of an arm. None: the kernel does not have it.

    peer: the rank of the other end; None if that end was not recorded. seconds: in which an operation of this arm was
    in flight on `rank`. sent_bytes: payload that the peer acknowledged. segments: with data, of which resent_segments
    again. rtt_s: median of the smoothed round trip, of the readings between which data were sent; least_rtt_s: of the
    connection. delivery_bps: median of the kernel's latest rates that the program did not limit. window_bytes: median
    of the congestion window. busy_s: data were waiting or in flight; of that, receiver_s: the receive window was full;
    buffer_s: the send buffer was full of data in flight; the rest is limited by the congestion window or the network.
    reader_late: the receiving program left more unread than the window that remained, in the median; None if the other
    end was not recorded. path_mtu_bytes: the least of the connection.
    """

    rank: int
    peer: int | None
    arm: Arm
    local: End
    remote: End
    seconds: float
    sent_bytes: float
    segments: float | None = None
    resent_segments: float | None = None
    rtt_s: float | None = None
    least_rtt_s: float | None = None
    delivery_bps: float | None = None
    window_bytes: float | None = None
    busy_s: float | None = None
    receiver_s: float | None = None
    buffer_s: float | None = None
    reader_late: bool | None = None
    path_mtu_bytes: float | None = None

    @property
    def resent_share(self) -> float | None:
        """Part of the sent segments that were sent again."""
        return self.resent_segments / self.segments if self.segments and self.resent_segments is not None else None

    def of_busy(self, limited_s: float | None) -> float | None:
        """A limited time as a part of the busy time."""
        return min(1.0, limited_s / self.busy_s) if self.busy_s and limited_s is not None else None

    @property
    def network_share(self) -> float | None:
        """Part of the busy time that neither the receive window nor the send buffer limited."""
        receiver, buffer = self.of_busy(self.receiver_s), self.of_busy(self.buffer_s)
        return None if receiver is None or buffer is None else max(0.0, 1 - receiver - buffer)

    @property
    def limited_share(self) -> float:
        """Part of the busy time that the receive window or the send buffer limited; 0 if it is not known."""
        return (self.of_busy(self.receiver_s) or 0.0) + (self.of_busy(self.buffer_s) or 0.0)

    @property
    def lossy(self) -> bool:
        """True if it is named for packet loss."""
        return (self.segments or 0.0) >= LOSS_SEGMENTS and (self.resent_share or 0.0) >= LOSS_SHARE

    @property
    def queued(self) -> bool:
        """True if round trips show a queue in the network, or are not known."""
        return not self.rtt_s or not self.least_rtt_s or self.rtt_s > QUEUE_RATIO * self.least_rtt_s


def _grown(one: Connection, name: str, spans: Intervals) -> float | None:
    """Increase of a reading within spans; None if the kernel does not have it."""
    values = one.readings[name]
    inside = intersection(spans, intervals([(int(one.time_ns[0]), int(one.time_ns[-1]))]))
    if np.isnan(values).any():
        return None
    at = np.interp((inside - one.time_ns[0]).ravel(), one.time_ns - one.time_ns[0], values - values[0])
    return float((at[1::2] - at[0::2]).sum())


def _median(values: NDArray[np.float64]) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


def _least(values: NDArray[np.float64]) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.min()) if len(known) else None


def _within(time_ns: NDArray[np.int64], spans: Intervals) -> NDArray[np.bool_]:
    """True for times inside the spans."""
    if not len(spans):
        return np.zeros(len(time_ns), np.bool_)
    place = np.searchsorted(spans[:, 0], time_ns, "right") - 1
    inside: NDArray[np.bool_] = (place >= 0) & (time_ns <= spans[np.maximum(place, 0), 1])
    return inside


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _end_of(one: Connection, peer: Connection | None, arm: Arm, spans: Intervals, seconds: float) -> ConnectionUse:
    """Use of one end in the steps of an arm, with what the other end recorded."""
    read = one.readings
    sending = _within(one.time_ns, spans) & (np.diff(read["acked_bytes"], prepend=read["acked_bytes"][:1]) > 0)
    late = None
    if peer is not None:
        unread = _median(peer.readings["unread_bytes"][_within(peer.time_ns, spans)])
        left = _median(read["peer_window_bytes"][sending])
        late = None if unread is None or left is None else unread > left
    return ConnectionUse(
        rank=one.rank,
        peer=None if peer is None else peer.rank,
        arm=arm,
        local=one.local,
        remote=one.remote,
        seconds=seconds,
        sent_bytes=_grown(one, "acked_bytes", spans) or 0.0,
        segments=_grown(one, "sent_segments", spans),
        resent_segments=_grown(one, "resent_segments", spans),
        rtt_s=_scaled(_median(read["rtt_us"][sending]), 1e-6),
        least_rtt_s=_scaled(_least(read["least_rtt_us"]), 1e-6),
        delivery_bps=_scaled(_median(read["delivery_bytes_per_s"][sending & (read["app_limited"] == 0)]), 8),
        window_bytes=_median((read["window_segments"] * read["segment_bytes"])[sending]),
        busy_s=_scaled(_grown(one, "busy_us", spans), 1e-6),
        receiver_s=_scaled(_grown(one, "receiver_limited_us", spans), 1e-6),
        buffer_s=_scaled(_grown(one, "buffer_limited_us", spans), 1e-6),
        reader_late=late,
        path_mtu_bytes=_least(read["path_mtu_bytes"]),
    )


@dataclass(frozen=True, slots=True)
class Connected:
    """The ends of the ranks' connections, by arm. left_out: most connections at one time that were not recorded.

    missing: the first ranks of hosts whose connections were not recorded, while those of others were.
    """

    ends: tuple[ConnectionUse, ...] = ()
    left_out: int = 0
    missing: tuple[int, ...] = ()


NO_CONNECTIONS = Connected()


class _Arms:
    """The steps of each arm of a trace by rank, and the arms whose bytes a connection carries."""

    def __init__(self, trace: Trace, warmup: int) -> None:
        self._trace = trace
        self._arms = [arm for arm in trace.arms if arm.real]
        steps: dict[tuple[int, Arm], list[tuple[int, int]]] = defaultdict(list)
        for step in counted(trace, warmup):
            steps[step.rank, step.arm].append((step.begin_ns, step.end_ns))
        self.spans = {key: intervals(pairs) for key, pairs in steps.items()}
        self._seconds: dict[tuple[int, Arm], float] = {}
        self._ports = {
            rank.rank: {port: info.name for info in rank.transports for port in info.ports} for rank in trace.ranks
        }

    def seconds(self, rank: int, arm: Arm) -> float:
        """Return the time in which an operation of a rank was in flight, within its steps of an arm."""
        if (rank, arm) not in self._seconds:
            moved = intersection(_moved(self._trace, {rank}, arm), self.spans[rank, arm])
            self._seconds[rank, arm] = total(moved) / 1e9
        return self._seconds[rank, arm]

    def _by_port(self, one: Connection, peer: Connection | None) -> str | None:
        """Return the transport that accepted a connection at the port of a lane; None if none did.

        Without a record of the other end, it may be any other rank's.
        """
        others = [rank for rank in self._ports if rank != one.rank] if peer is None else [peer.rank]
        there = (self._ports[rank].get(one.remote[1]) for rank in others if rank in self._ports)
        return self._ports.get(one.rank, {}).get(one.local[1]) or next(filter(None, there), None)

    def _by_bytes(self, one: Connection) -> str | None:
        """Return the transport without known ports in whose steps a connection carried the most bytes a second."""
        known = {name for ports in self._ports.values() for name in ports.values()}
        rates: dict[str, float] = {}
        for arm in self._arms:
            spans = self.spans.get((one.rank, arm))
            if arm.transport not in known and spans is not None:
                carried = sum(_grown(one, name, spans) or 0.0 for name in ("acked_bytes", "received_bytes"))
                rates[arm.transport] = max(rates.get(arm.transport, 0.0), carried / max(total(spans), 1))
        best = max(rates, key=lambda name: rates[name], default=None)
        return best if best is not None and rates[best] > 0 else None

    def of(self, one: Connection, peer: Connection | None) -> list[Arm]:
        """Return the arms whose bytes a connection carries."""
        transport = self._by_port(one, peer) or self._by_bytes(one)
        return [arm for arm in self._arms if arm.transport == transport and (one.rank, arm) in self.spans]


def _all_connections(trace: Trace, samples: Sequence[Samples]) -> list[Connection]:
    """Return the recorded connections on rank 0's clock, each with two readings or more."""
    clocks = {rank.rank: rank.clock for rank in trace.ranks}
    tables = [sample.on_rank_0(clocks.get(sample.rank, Clock())).tcp for sample in samples]
    found = [one for table in tables if table is not None for one in recorded_connections(table)]
    return [one for one in found if len(one.time_ns) > 1]


def _all_ranks(trace: Trace, samples: Sequence[Samples]) -> bool:
    """True if connections of every rank were recorded.

    A host's sampler does not see those of a rank of another user or in another PID namespace.
    """
    tables = [sample.tcp for sample in samples if sample.tcp is not None and "rank" in sample.tcp.columns]
    recorded = {rank for table in tables for rank in np.unique(table.column("rank")).tolist()}
    return recorded >= set(range(trace.size))


def _between_ranks(found: Sequence[Connection], complete: bool) -> list[tuple[Connection, Connection | None]]:
    """Return each connection with its other end, which is another rank's; None if that was not recorded.

    complete: every connection was recorded, so that one without another end is not between ranks.
    """
    by_ends = {(one.local, one.remote): one for one in found}
    pairs = [(one, by_ends.get((one.remote, one.local))) for one in found]
    return [(one, peer) for one, peer in pairs if (not complete if peer is None else peer.rank != one.rank)]


def _left_out(tcp: Counters) -> int:
    """Return the most connections at one reading that were not recorded."""
    return int(tcp.column("left_out").max(initial=0)) if "left_out" in tcp.columns else 0


def connections(trace: Trace, samples: Sequence[Samples], warmup: int = 1) -> Connected:
    """Use of the ranks' TCP connections, by arm, in the counted steps.

    The peer of a connection is the rank that recorded the same addresses from the other end. If every rank was
    recorded completely, a connection without one is not between ranks, and is left out.
    """
    left_out = sum(_left_out(sample.tcp) for sample in samples if sample.tcp is not None)
    arms = _Arms(trace, warmup)
    ends = [
        _end_of(one, peer, arm, arms.spans[one.rank, arm], arms.seconds(one.rank, arm))
        for one, peer in _between_ranks(_all_connections(trace, samples), left_out == 0 and _all_ranks(trace, samples))
        for arm in arms.of(one, peer)
    ]
    sent: dict[tuple[int, Arm], float] = defaultdict(float)
    for end in ends:
        sent[end.rank, end.arm] += end.sent_bytes
    kept = [end for end in ends if end.sent_bytes > SIGNIFICANT * sent[end.rank, end.arm]]
    missing = tuple(sorted(sample.rank for sample in samples if sample.tcp is None)) if kept else ()
    return Connected(tuple(sorted(kept, key=lambda end: trace.arms.index(end.arm))), left_out, missing)


RECEIVER, BUFFER = "receive window", "send buffer"


@dataclass(frozen=True, slots=True)
class Limited:
    """A limit of an arm's connections. share: of communication time, the mean over the bytes. worst: by its share."""

    what: str
    share: float
    worst: ConnectionUse

    @property
    def rtt_s(self) -> float:
        """The round trip of the worst end."""
        return self.worst.rtt_s or 0.0

    def remedy(self, link_bps: float | None) -> str:
        """The setting to raise. Buffers count their own overhead, so they need twice the bytes in flight."""
        name, rank = ("tcp_rmem", self.worst.peer) if self.what == RECEIVER else ("tcp_wmem", self.worst.rank)
        size = "" if link_bps is None else f", here {nbytes(2 * link_bps / 8 * self.rtt_s)}"
        return (
            f"Raise the maximum of net.ipv4.{name} on rank {rank}'s host to 2 x link rate x round trip{size}, and let "
            "no program set the size (SO_SNDBUF, SO_RCVBUF)."
        )


def limited(connected: Connected, arm: Arm) -> Limited | None:
    """The larger of the two limits that sockets set to an arm's connections; None if neither is known to count.

    An end with a queue in the network does not count, because a larger buffer would lengthen the queue. Nor does a full
    receive window, unless the other end shows that its program reads in time.
    """
    ends = [end for end in connected.ends if end.arm == arm and end.seconds > 0]
    whole = sum(end.sent_bytes for end in ends)
    found = []
    for what in (RECEIVER, BUFFER) if whole else ():
        shares = []
        for end in ends:
            limited_s = end.receiver_s if what == RECEIVER else end.buffer_s
            counts = not end.queued and (what == BUFFER or end.reader_late is False)
            shares.append(min(1.0, (limited_s or 0.0) / end.seconds) if counts else 0.0)
        mean = sum(end.sent_bytes * share for end, share in zip(ends, shares, strict=True)) / whole
        found.append(Limited(what, mean, ends[int(np.argmax(shares))]))
    return max(found, key=lambda one: one.share, default=None)


def packet_loss(connected: Connected, arm: Arm) -> str:
    """Sentence: the packet loss of an arm's worst connection; "" if none lost as much as LOSS_SHARE."""
    ends = [end for end in connected.ends if end.arm == arm and end.lossy]
    if not ends:
        return ""
    end = max(ends, key=lambda one: one.resent_share or 0.0)
    peer = end.remote[0] if end.peer is None else f"rank {end.peer}"
    return (
        f"Packet loss: {arm} sent {percent(end.resent_share or 0.0)} of {end.segments or 0:.0f} segments from rank "
        f"{end.rank} to {peer} again; {len(ends)} of its connections lost packets (measured)."
    )


@dataclass(frozen=True, slots=True)
class SlowLink:
    """The link of one host, which is slower than those of all others.

    ranks: of the host. bps: of its connections to and from other hosts while they are busy, the highest rate one way;
    others_bps: between the other hosts, the lowest. busy: its connections' busy part of communication time, the least.
    """

    ranks: tuple[int, ...]
    bps: float
    others_bps: float
    busy: float


@dataclass(slots=True)
class _Way:
    """The connections from one host to another.

    bps: their rate while only the network limits them; least_bps: while they are busy. busy: part of the time.
    """

    bps: float = 0.0
    least_bps: float = 0.0
    busy: float = 0.0

    def add(self, end: ConnectionUse, busy_s: float) -> None:
        """Add a connection. A queue in the network fills buffers too."""
        share = 1.0 if end.queued else end.network_share
        self.bps += 8 * end.sent_bytes / (busy_s * share) if share else math.inf
        self.least_bps += 8 * end.sent_bytes / busy_s
        self.busy = max(self.busy, min(1.0, busy_s / end.seconds))


def _ways(connected: Connected, arm: Arm, hosts: Mapping[int, str]) -> dict[tuple[str, str], _Way]:
    """The connections of an arm by the hosts of their ends; {} unless all of them, and of every host, are known."""
    found: dict[tuple[str, str], _Way] = defaultdict(_Way)
    for end in (end for end in connected.ends if end.arm == arm):
        one, two = hosts.get(end.rank), None if end.peer is None else hosts.get(end.peer)
        if one is None or two is None or not end.busy_s or end.seconds <= 0:
            return {}
        if one != two:
            found[one, two].add(end, end.busy_s)
    every = set(hosts.values())
    return found if {one for one, _ in found} == {two for _, two in found} == every else {}


def _link_of(host: str, ranks: tuple[int, ...], ways: Mapping[tuple[str, str], _Way]) -> SlowLink:
    own = [way for pair, way in ways.items() if host in pair]
    rest = [way.least_bps for pair, way in ways.items() if host not in pair]
    return SlowLink(ranks, max(way.bps for way in own), min(rest, default=0.0), min(way.busy for way in own))


def slow_link(trace: Trace, connected: Connected, arm: Arm) -> SlowLink | None:
    """The host whose link is slower than those of the others, by an arm's connections; None if none is surely.

    Of two hosts, either may be the slow one. A host is named if all data that it sends or gets move slowly, and all
    others do not.
    """
    hosts = {rank.rank: rank.host_id or str(rank.rank) for rank in trace.ranks}
    ways = _ways(connected, arm, hosts)
    ranks = {host: tuple(rank for rank in hosts if hosts[rank] == host) for host in hosts.values()}
    links = [_link_of(host, own, ways) for host, own in ranks.items()] if ways else []
    surely = (one for one in links if one.others_bps >= SLOW_LINK_RATIO * one.bps and one.busy >= SLOW_LINK_BUSY)
    return next(surely, None)


def total_of(ends: Sequence[ConnectionUse]) -> ConnectionUse:
    """All ends of an arm as one: sums, and medians of what is no sum. Ranks and addresses are those of the first."""

    def known(name: str) -> list[float]:
        values = [getattr(end, name) for end in ends]
        return [value for value in values if value is not None]

    def summed(name: str) -> float | None:
        return sum(known(name)) if len(known(name)) == len(ends) else None

    def middle(name: str) -> float | None:
        return float(np.median(known(name))) if known(name) else None

    return replace(
        ends[0],
        sent_bytes=sum(end.sent_bytes for end in ends),
        segments=summed("segments"),
        resent_segments=summed("resent_segments"),
        rtt_s=middle("rtt_s"),
        least_rtt_s=middle("least_rtt_s"),
        delivery_bps=middle("delivery_bps"),
        window_bytes=middle("window_bytes"),
        busy_s=summed("busy_s"),
        receiver_s=summed("receiver_s"),
        buffer_s=summed("buffer_s"),
        reader_late=None,
    )
