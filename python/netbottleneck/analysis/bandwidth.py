"""Bandwidth: busbw from tensor bytes, what an arm achieved, and what the probe says is achievable. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from netbottleneck.analysis.thresholds import PROBE_NEAR_BEST
from netbottleneck.trace.model import Trace
from netbottleneck.trace.transports import Arm
from netbottleneck.units import streams

if TYPE_CHECKING:
    from netbottleneck.analysis.intervals import Split


# Collectives in which each rank keeps its own part of the tensor.
IN_PARTS = ("allgather", "reducescatter", "alltoall", "gather", "scatter")


def bus_factor(kind: str, size: int, algorithm: str | None = None, hosts: int | None = None) -> float:
    """Factor from tensor bytes to bytes on a link. Source: nccl-tests, doc/PERFORMANCE.md.

    A receive is counted by its sender.

    An algorithm of two levels sends between hosts only what one rank of each host sends: the factor of `hosts` ranks.
    A reduce-scatter by an all-reduce sends what that sends.
    """
    if algorithm is not None and "two_level" in algorithm and hosts is not None and hosts > 1:
        size = hosts
    if kind == "reducescatter" and algorithm is not None and algorithm.endswith("all-reduce"):
        kind = "allreduce"
    if kind in ("barrier", "recv") or size < 2:
        return 0.0
    return {"allreduce": 2.0, **dict.fromkeys(IN_PARTS, 1.0)}.get(kind, size / (size - 1)) * (size - 1) / size


@dataclass(frozen=True, slots=True)
class Achieved:
    """Achieved bandwidth of an arm, one direction, as busbw (tensor bits times 2(n-1)/n for an all-reduce).

    Of its typical steps: active over transfer time, average over whole steps, of all bytes in them. Report both or
    neither. p10, p90: active rate of single steps, of all that move bytes; steps: their number. wire_bps: active rate
    of the bytes sent; None if its transport does not count them. operation_s: transfer time of a mean operation.
    """

    arm: Arm
    active_bps: float
    average_bps: float
    p10_bps: float
    p90_bps: float
    wire_bps: float | None
    steps: int
    operation_s: float


def _moves(split: Split) -> bool:
    """True if a step has a rate."""
    return split.transfer_ns > 0 and split.bus_bytes > 0


def achieved_bandwidth(arm: Arm, typical: Iterable[Split], splits: Iterable[Split]) -> Achieved | None:
    """Achieved bandwidth over the typical steps of an arm; None if no bytes moved in them. splits: all its steps."""
    sized, every = ([s for s in those if s.arm == arm and not s.unsized] for those in (typical, splits))
    moved = list(filter(_moves, sized))
    if not moved:
        return None
    transfer_ns = sum(s.transfer_ns for s in moved)
    rates = [8e9 * s.bus_bytes / s.transfer_ns for s in filter(_moves, every)]
    wire = [s.wire_bytes for s in moved if s.wire_bytes is not None]
    p10, p90 = np.percentile(rates, [10, 90])
    return Achieved(
        arm,
        8e9 * sum(s.bus_bytes for s in moved) / transfer_ns,
        8e9 * sum(s.step_bus_bytes for s in sized) / sum(s.step_ns for s in sized),
        float(p10),
        float(p90),
        8e9 * sum(wire) / transfer_ns if len(wire) == len(moved) else None,
        len(rates),
        transfer_ns / 1e9 / sum(s.operations for s in moved),
    )


def stated_link_bps(trace: Trace, arm: Arm | None) -> float | None:
    """Return the link's configured rate; else, across hosts, that of the slowest interface of an arm; None: not known.

    Without an arm, only the configured rate counts.
    """
    if trace.network is not None:
        return trace.network.link_bps
    if arm is None or len({rank.host_id for rank in trace.ranks}) < 2:
        return None
    rated = [info.link_bps for rank in trace.ranks for info in rank.transports if info.name == arm.transport]
    return min((bps for bps in rated if bps), default=None) if all(rated) else None


@dataclass(frozen=True, slots=True)
class Achievable:
    """Probe results: (streams, bits/s) points, medians over ranks; best: fewest streams near the top rate.

    faster: an arm that moved data faster in the run than all points, with its rate in transfer; None if none did.
    """

    transport: str
    points: tuple[tuple[int, float], ...]
    best: tuple[int, float]
    faster: tuple[Arm, float] | None = None

    @property
    def bps(self) -> float:
        """The achievable rate: that of the best point, or of the faster arm."""
        return self.best[1] if self.faster is None else self.faster[1]

    @property
    def how(self) -> str:
        """What reached the achievable rate: "with 8 streams", or "over tcp"."""
        return f"with {streams(self.best[0])}" if self.faster is None else f"over {self.faster[0]}"

    @property
    def flat(self) -> bool:
        """True if more streams than the best were probed: the rate no longer rises."""
        return self.best[0] < self.points[-1][0]


def probed(trace: Trace) -> dict[str, Achievable]:
    """By transport: its probe result."""
    rates: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for rank in trace.ranks:
        for info in rank.transports:
            for point in info.probe:
                if point.bits_per_s > 0:
                    rates[info.name][point.lanes].append(point.bits_per_s)
    found = {}
    for name, by_lanes in rates.items():
        points = tuple((lanes, float(np.median(values))) for lanes, values in sorted(by_lanes.items()))
        top = max(rate for _, rate in points)
        found[name] = Achievable(name, points, next(p for p in points if p[1] >= PROBE_NEAR_BEST * top))
    return found


@dataclass(frozen=True, slots=True)
class StreamChange:
    """A change of the number of a transport's streams by its probe, which ended in this step."""

    transport: str
    step: int
    before: int
    after: int


def stream_changes(trace: Trace) -> dict[str, StreamChange]:
    """By transport: the change of its streams between two steps, by the lanes of its operations."""
    ended: dict[str, int] = {}
    for step in trace.steps:
        if step.probed:
            ended[step.arm.transport] = max(step.index, ended.get(step.arm.transport, 0))
    used: dict[tuple[str, bool], int] = defaultdict(int)
    for one in trace.collectives if ended else ():
        place = ended.get(one.transport)
        if place is not None and one.step is not None and one.step != place:
            key = one.transport, one.step > place
            used[key] = max(used[key], len(one.lanes or ()))
    found = [StreamChange(name, step, used[name, False], used[name, True]) for name, step in ended.items()]
    return {one.transport: one for one in found if 0 < one.before != one.after > 0}


def achievable_bandwidth(trace: Trace, moved: Iterable[Achieved] = ()) -> Achievable | None:
    """Probe result of the fastest transport; None without a probe.

    moved: what arms of the run achieved. A compressed arm proves nothing, nor does one that was faster than the link's
    configured rate.
    """
    found = max(probed(trace).values(), key=lambda a: a.best[1], default=None)
    if found is None:
        return None
    link_bps = (trace.network.link_bps if trace.network is not None else None) or math.inf
    rates = [(one.arm, one.active_bps) for one in moved if one.arm.compression is None and one.active_bps <= link_bps]
    fastest = max(rates, key=lambda rate: rate[1], default=None)
    beyond = fastest is not None and PROBE_NEAR_BEST * fastest[1] > max(rate for _, rate in found.points)
    return replace(found, faster=fastest) if beyond else found
