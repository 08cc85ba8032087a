"""The cost of a collective: its parts as a value, the rates of links and networks, and tables of measured times.

The formulas are in csrc/sim/shape.h.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from netbottleneck.trace.model import Network

# Unlimited rate: takes no time.
UNLIMITED = math.inf


def positive(name: str, value: float, *, endless: bool = False) -> None:
    """Raises ValueError naming a value that is not above 0; `endless`: infinity is allowed."""
    if not (value > 0 and (endless or math.isfinite(value))):
        raise ValueError(f"{name} must be positive, not {value}")


def non_negative(**values: float) -> None:
    """Raises ValueError naming a value that is negative or not finite."""
    for name, value in values.items():
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be at least 0 and finite, not {value}")


@dataclass(frozen=True, slots=True)
class Table:
    """Ns by bytes: points in rising order, linear between them.

    Flat below the first point, because a start has a cost. Beyond the last point it continues with the last slope, or
    is flat if `clamped`. `covers` is true for sizes within the points.
    """

    bytes: tuple[float, ...]
    ns: tuple[float, ...]
    clamped: bool = False

    def __post_init__(self) -> None:
        if len(self.bytes) != len(self.ns) or not self.bytes:
            raise ValueError(f"a table needs as many times as sizes, got {len(self.ns)} and {len(self.bytes)}")
        rising = all(a < b for a, b in zip(self.bytes, self.bytes[1:], strict=False))
        if not rising or not all(math.isfinite(x) for x in (*self.bytes, *self.ns)):
            raise ValueError("the sizes of a table must rise, and all its sizes and times must be finite")
        if self.bytes[0] < 0 or min(self.ns) < 0:
            raise ValueError("the sizes and times of a table must be at least 0")

    def covers(self, nbytes: float) -> bool:
        return self.bytes[0] <= nbytes <= self.bytes[-1]

    def at(self, nbytes: float) -> float:
        """Ns of nbytes."""
        if self.clamped or nbytes <= self.bytes[-1] or len(self.bytes) == 1:
            return float(np.interp(nbytes, self.bytes, self.ns))
        slope = (self.ns[-1] - self.ns[-2]) / (self.bytes[-1] - self.bytes[-2])
        return self.ns[-1] + max(0.0, slope) * (nbytes - self.bytes[-1])


@dataclass(frozen=True, slots=True)
class Link:
    """A host's link in each direction, bits a second: nominal, achievable or achieved, as the caller says.

    lanes, lane_bps: network streams, and the most that one of them reaches; None: as much as the link.
    """

    bps: float
    lanes: int = 1
    lane_bps: float | None = None

    def __post_init__(self) -> None:
        positive("bps", self.bps, endless=True)
        if self.lanes < 1:
            raise ValueError(f"lanes must be at least 1, not {self.lanes}")
        if self.lane_bps is not None:
            positive("lane_bps", self.lane_bps, endless=True)

    @property
    def rate_bps(self) -> float:
        """Rate of all lanes together: min(bps, lanes x lane_bps)."""
        return self.bps if self.lane_bps is None else min(self.bps, self.lanes * self.lane_bps)

    @property
    def byte_ns(self) -> float:
        """Ns of a byte: 8e9 / rate."""
        return 8e9 / self.rate_bps


@dataclass(frozen=True, slots=True)
class Wire:
    """A network as known before a run, bits a second. None: no cap, or not measured.

    link_bps, flow_bps: configured caps of each host and each flow, headers included. one_flow_bps, many_flows_bps:
    payload rates measured before the run, with one flow and with enough flows to fill the links of a host. burst_bytes:
    bytes that an idle flow may send at once, beyond its rate.
    """

    link_bps: float | None = None
    flow_bps: float | None = None
    one_flow_bps: float | None = None
    many_flows_bps: float | None = None
    burst_bytes: float | None = None

    @classmethod
    def of(cls, network: Network | None) -> Wire:
        """The network of a trace."""
        if network is None:
            return cls()
        verified = {name: network.verified.get(name) or {} for name in ("one_flow", "many_flows")}
        rates = [float(found["measured_bps"]) if "measured_bps" in found else None for found in verified.values()]
        burst_bytes = verified["one_flow"].get("burst_bytes")
        one, many = rates
        if many is not None:  # `many_flows` fill the first link alone
            many += sum(float(link["measured_bps"]) for link in network.verified.get("more_links") or ())
        return cls(network.link_bps, min(network.flow_bps, default=None), one, many, burst_bytes)

    @classmethod
    def of_network(cls, network: Mapping[str, Any]) -> Wire:
        """The network of a session: a mapping with how, link_bps, flow_bps, verified."""
        flows = tuple(float(bps) for bps in network.get("flow_bps") or ())
        return cls.of(Network("", network.get("link_bps"), flows, network.get("verified") or {}))

    def measured(self, flows: float) -> float | None:
        """Measured rate of this many flows together; None if not measured."""
        one, many = self.one_flow_bps, self.many_flows_bps
        return None if one is None or many is None else min(many, flows * one) if flows > 1 else one

    @property
    def burst_ns(self) -> float:
        """Time that an initially idle flow saves: its burst, at its rate."""
        rate_bps = self.one_flow_bps or self.flow_bps
        return 8e9 * self.burst_bytes / rate_bps if self.burst_bytes and rate_bps else 0.0

    def configured(self, flows: float) -> float | None:
        """Rate of this many flows by the caps; None without caps."""
        caps = [cap for cap in (self.link_bps, self.flow_bps and flows * self.flow_bps) if cap and math.isfinite(cap)]
        return min(caps, default=None)


# The cost of a collective.

ALGORITHMS = ("ring", "two_level", "tree", "halving_doubling", "direct")


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of operations among identical ranks. csrc/sim/shape.h has the formula of each algorithm.

    alpha_ns: of each step between hosts; host_alpha_ns: within a host. link: between hosts; host_bps: within a host,
    None: no time. ranks_per_host share a link. add: of adding bytes to others, a table or ns of a byte. copy_byte_ns:
    of a byte into or out of the fusion buffer, for an operation of several tensors. launch_ns: from the last rank's
    submission to a place in the queue. fixed_ns: of an operation, from its turn. pipelined: additions, network and host
    transfers overlap, else they run one after the other. ratio: bytes before over bytes after compression, on the wire.
    encode_byte_ns, decode_byte_ns: of an uncompressed byte. contention: compute takes this many times as long while an
    operation is in flight. whole_sums: additions are of uncompressed bytes.

    residual: measured over predicted time of operations, minus 1, as (low, high). fitted_bytes: sizes in the fit;
    fitted_size: its ranks. poor: why the fit must not be extrapolated, "" if it may.
    """

    algorithm: str = "ring"
    alpha_ns: float = 0.0
    link: Link = field(default_factory=lambda: Link(UNLIMITED))
    ranks_per_host: int = 1
    host_bps: float | None = None
    host_alpha_ns: float = 0.0
    add: Table | float = 0.0
    copy_byte_ns: float = 0.0
    launch_ns: float = 0.0
    fixed_ns: float = 0.0
    pipelined: bool = True
    ratio: float = 1.0
    encode_byte_ns: float = 0.0
    decode_byte_ns: float = 0.0
    contention: float = 1.0
    whole_sums: bool = False
    residual: tuple[float, float] = (0.0, 0.0)
    fitted_bytes: tuple[int, int] | None = None
    fitted_size: int | None = None
    poor: str = ""

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {self.algorithm!r}")
        if self.ranks_per_host < 1:
            raise ValueError(f"ranks_per_host must be at least 1, not {self.ranks_per_host}")
        if self.host_bps is not None:
            positive("host_bps", self.host_bps, endless=True)
        non_negative(
            alpha_ns=self.alpha_ns,
            host_alpha_ns=self.host_alpha_ns,
            copy_byte_ns=self.copy_byte_ns,
            launch_ns=self.launch_ns,
            fixed_ns=self.fixed_ns,
            encode_byte_ns=self.encode_byte_ns,
            decode_byte_ns=self.decode_byte_ns,
        )
        if not isinstance(self.add, Table):
            non_negative(add=self.add)
        positive("ratio", self.ratio)
        if not 1.0 <= self.contention <= 100.0:
            raise ValueError(f"contention must be from 1 to 100, not {self.contention}")
        low, high = self.residual
        if not -1.0 < low <= 0.0 <= high or not math.isfinite(high):
            raise ValueError(f"residual must be an interval around 0 above -1, not {self.residual}")

    @classmethod
    def free(cls) -> Cost:
        """Communication that takes no time: only compute remains."""
        return cls()

    def slower(self, factor: float) -> Cost:
        """Return the cost of operations that take `factor` times as long; compute is unchanged."""
        positive("factor", factor)
        lanes = None if self.link.lane_bps is None else self.link.lane_bps / factor
        add = self.add
        return replace(
            self,
            alpha_ns=self.alpha_ns * factor,
            host_alpha_ns=self.host_alpha_ns * factor,
            link=replace(self.link, bps=self.link.bps / factor, lane_bps=lanes),
            host_bps=None if self.host_bps is None else self.host_bps / factor,
            add=replace(add, ns=tuple(t * factor for t in add.ns)) if isinstance(add, Table) else add * factor,
            copy_byte_ns=self.copy_byte_ns * factor,
            launch_ns=self.launch_ns * factor,
            fixed_ns=self.fixed_ns * factor,
            encode_byte_ns=self.encode_byte_ns * factor,
            decode_byte_ns=self.decode_byte_ns * factor,
        )

    def extrapolation_notes(self, sizes: Sequence[int], workers: int) -> tuple[str, ...]:
        """Return, as text, where a prediction lies outside of the measurements.

        sizes: bytes of its operations. Raises ValueError if the fit is too poor to extrapolate.
        """
        if not sizes:
            return ()
        notes = [*self._beyond_sizes(min(sizes), max(sizes)), *self._beyond_workers(workers)]
        if notes and self.poor:
            raise ValueError(f"refused to extrapolate a poor fit: {self.poor}; requested: {'; '.join(notes)}")
        if isinstance(self.add, Table) and not self.add.clamped:
            share = max(sizes) / (1 if self.whole_sums else self.ratio) * self._largest_sum(workers)
            end = self.add.bytes[-1]
            notes += [
                f"sums of {share:.0f} bytes exceed the table, which ends at {end:.0f}: its last slope is extrapolated"
            ] * (share > end)
        return tuple(notes)

    def _largest_sum(self, workers: int) -> float:
        """Return the largest part of an operation's bytes that is added at once, as in csrc/sim/shape.c; 0 for none."""
        inside = min(self.ranks_per_host, workers)
        if workers < 2:
            return 0.0
        match self.algorithm:
            case "ring":
                return 1 / workers
            case "two_level":
                return 1 / (inside if inside > 1 else workers)
            case "halving_doubling":
                return 0.5 if workers.bit_count() == 1 else 1.0
        return 1.0

    def _beyond_sizes(self, least: int, most: int) -> list[str]:
        """Notes on sizes, on the wire, outside of those in the fit."""
        low, high = self.fitted_bytes or (0, math.inf)
        least, most = round(least / self.ratio), round(most / self.ratio)
        if low <= least and most <= high:
            return []
        how = "" if self.ratio == 1.0 else ", compressed"
        notes = [
            f"operations of {least} to {most} bytes{how}, measured {low} to {high}: the fitted line is extrapolated"
        ]
        if least < low and not (self.fixed_ns or self.alpha_ns or self.host_alpha_ns):
            notes.append("the latency of an operation is not known, and is left out")
        return notes

    def _beyond_workers(self, workers: int) -> list[str]:
        if self.fitted_size is None or workers == self.fitted_size:
            return []
        notes = [f"{workers} workers, measured {self.fitted_size}: scaled by the formula of {self.algorithm}"]
        if not (self.alpha_ns or self.host_alpha_ns):
            notes.append("the latency of a step between hosts is not known, and is left out")
        return notes
