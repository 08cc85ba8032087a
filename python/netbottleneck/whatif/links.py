"""Rates and times by size: a host's link, a network as it is known, a measured table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from netbottleneck.trace.model import Network

# No rate: what takes no time.
UNLIMITED = math.inf


def positive(name: str, value: float, *, endless: bool = False) -> None:
    """Raises ValueError naming what is not above 0; `endless`: it may have no end."""
    if not (value > 0 and (endless or math.isfinite(value))):
        raise ValueError(f"{name} must be positive, not {value}")


def at_least_0(**values: float) -> None:
    """Raises ValueError naming what is below 0 or no number."""
    for name, value in values.items():
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be at least 0 and finite, not {value}")


@dataclass(frozen=True, slots=True)
class Table:
    """Ns by bytes: points in rising order, straight lines between them.

    Below the first point it is flat (starting costs something); beyond the last it goes on by the last slope, or, where
    `clamped`, is flat. `covers` tells whether a size lies within the points."""

    bytes: tuple[float, ...]
    ns: tuple[float, ...]
    clamped: bool = False

    def __post_init__(self) -> None:
        if len(self.bytes) != len(self.ns) or not self.bytes:
            raise ValueError(f"a table needs as many times as sizes, got {len(self.ns)} and {len(self.bytes)}")
        rising = all(a < b for a, b in zip(self.bytes, self.bytes[1:], strict=False))
        if not rising or not all(math.isfinite(x) for x in (*self.bytes, *self.ns)):
            raise ValueError("a table's sizes must rise, and be finite as its times")
        if self.bytes[0] < 0 or min(self.ns) < 0:
            raise ValueError("a table has no size and no time below 0")

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
    """A host's link in each direction, bits a second: nominal, achievable or achieved, as its maker says.

    lanes, lane_bps: network streams, and what one of them reaches at most; None: as much as the link."""

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
        """What all lanes together move: min(bps, lanes x lane_bps)."""
        return self.bps if self.lane_bps is None else min(self.bps, self.lanes * self.lane_bps)

    @property
    def byte_ns(self) -> float:
        """Ns of a byte: 8e9 / rate."""
        return 8e9 / self.rate_bps


@dataclass(frozen=True, slots=True)
class Wire:
    """A network as it is known before a run, bits a second. None: no cap, or not measured.

    link_bps, flow_bps: what it is made for, each link and each flow, headers counted. one_flow_bps, many_flows_bps:
    what was measured just before, of payload: one flow, and as many as fill the link. burst_bytes: what a flow that was
    idle may send at once, beyond its rate."""

    link_bps: float | None = None
    flow_bps: float | None = None
    one_flow_bps: float | None = None
    many_flows_bps: float | None = None
    burst_bytes: float | None = None

    @classmethod
    def of(cls, network: Network | None) -> Wire:
        """What a trace knows of its network."""
        if network is None:
            return cls()
        seen = {name: network.verified.get(name) or {} for name in ("one_flow", "many_flows")}
        rates = [float(found["measured_bps"]) if "measured_bps" in found else None for found in seen.values()]
        burst_bytes = seen["one_flow"].get("burst_bytes")
        return cls(network.link_bps, min(network.flow_bps, default=None), rates[0], rates[1], burst_bytes)

    @classmethod
    def of_network(cls, network: Mapping[str, Any]) -> Wire:
        """The same of a session's network: how, link_bps, flow_bps, verified."""
        flows = tuple(float(bps) for bps in network.get("flow_bps") or ())
        return cls.of(Network("", network.get("link_bps"), flows, network.get("verified") or {}))

    def measured(self, flows: float) -> float | None:
        """What so many flows carry together, as was measured."""
        one, many = self.one_flow_bps, self.many_flows_bps
        return None if one is None or many is None else min(many, flows * one) if flows > 1 else one

    @property
    def burst_ns(self) -> float:
        """What a flow saves that was idle before: its burst, at its rate."""
        rate_bps = self.one_flow_bps or self.flow_bps
        return 8e9 * self.burst_bytes / rate_bps if self.burst_bytes and rate_bps else 0.0

    def made_for(self, flows: float) -> float | None:
        """The same by the caps; None where there is none."""
        caps = [cap for cap in (self.link_bps, self.flow_bps and flows * self.flow_bps) if cap and math.isfinite(cap)]
        return min(caps, default=None)
