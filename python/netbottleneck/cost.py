"""What a collective costs: its parts as a value, and what a run says of them. The formulas: csrc/sim/shape.h."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from netbottleneck.links import UNLIMITED, Link, Table, at_least_0, positive
from netbottleneck.trace import Trace

__all__ = ["ALGORITHMS", "UNLIMITED", "Cost", "Fit", "Link", "Table", "fit"]

ALGORITHMS = ("ring", "two_level", "tree", "halving_doubling", "direct")


@dataclass(frozen=True, slots=True)
class Cost:
    """What operations cost among ranks that are alike. csrc/sim/shape.h has the formula of each algorithm.

    alpha_ns: of each step between hosts; host_alpha_ns: within one. link: between hosts; host_bps: within one, None: no
    time. ranks_per_host share a link. add: of adding bytes to others, a table or ns of a byte. copy_byte_ns: of a byte
    into or out of the fusion buffer, where an operation has more than one tensor. launch_ns: from the last rank's
    submission to a place in the queue. pipelined: sums, the wire and the host's inside go on together, else one after
    the other. ratio: bytes before over bytes after compression, on the wire; encode_byte_ns, decode_byte_ns: of an
    uncompressed byte. contention: compute takes so many times as long while an operation is under way. whole_sums: sums
    are of uncompressed bytes.

    residual: what operations took, over what this says, less 1, from low to high. fitted_bytes: sizes that a fit saw;
    fitted_size: its ranks; poor: why it may not be trusted beyond them, "" where it may.
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
        at_least_0(
            alpha_ns=self.alpha_ns,
            host_alpha_ns=self.host_alpha_ns,
            copy_byte_ns=self.copy_byte_ns,
            launch_ns=self.launch_ns,
            encode_byte_ns=self.encode_byte_ns,
            decode_byte_ns=self.decode_byte_ns,
        )
        if not isinstance(self.add, Table):
            at_least_0(add=self.add)
        positive("ratio", self.ratio)
        if not 1.0 <= self.contention <= 100.0:
            raise ValueError(f"contention must be from 1 to 100, not {self.contention}")
        low, high = self.residual
        if not -1.0 < low <= 0.0 <= high or not math.isfinite(high):
            raise ValueError(f"residual must be an interval around 0 above -1, not {self.residual}")

    @classmethod
    def free(cls) -> Cost:
        """Communication that takes no time: what is left is the compute."""
        return cls()

    def slower(self, factor: float) -> Cost:
        """Return the cost of operations that take `factor` times as long, compute aside."""
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
            encode_byte_ns=self.encode_byte_ns * factor,
            decode_byte_ns=self.decode_byte_ns * factor,
        )

    def bounds(self) -> tuple[Cost, Cost]:
        """Return the cost at the low and at the high end of `residual`: the interval of what is predicted with it."""
        return self.slower(1 + self.residual[0]), self.slower(1 + self.residual[1])

    def doubts(self, sizes: Sequence[int], workers: int) -> tuple[str, ...]:
        """Return what of a prediction lies outside of what was measured, in words.

        sizes: bytes of its operations. Raises ValueError where the fit is too poor for that."""
        said = []
        if self.fitted_bytes is not None and sizes:
            low, high = self.fitted_bytes
            if min(sizes) < low or max(sizes) > high:
                said.append(
                    f"operations of {min(sizes)} to {max(sizes)} bytes, measured were {low} to {high}: the rest follows"
                    " the fitted line"
                )
        if self.fitted_size is not None and workers != self.fitted_size:
            said.append(f"{workers} workers, measured were {self.fitted_size}: by the formula of {self.algorithm}")
        if said and self.poor:
            raise ValueError(f"refused to extrapolate: {self.poor}; asked for {'; '.join(said)}")
        if isinstance(self.add, Table) and not self.add.clamped and sizes:
            share = max(sizes) / max(1, workers)
            if self.algorithm != "ring":
                share = float(max(sizes))
            if share > self.add.bytes[-1]:
                said.append(
                    f"sums of {share:.0f} bytes, the table ends at {self.add.bytes[-1]:.0f}: its last slope goes on"
                )
        return tuple(said)


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost, and how well it explains the run that it is from.

    cost: with the achieved rate. residuals: what each operation took over what the cost says, less 1, in order of time.
    count: operations. bytes_range: their sizes. reason: why the fit is poor, "" where it is not. in_flight: operations
    that shared the link. achieved, achievable (by the probe), nominal: links, None where the run does not know."""

    cost: Cost
    transport: str
    residuals: tuple[float, ...]
    bytes_range: tuple[int, int]
    reason: str = ""
    in_flight: int = 1
    achieved: Link | None = None
    achievable: Link | None = None
    nominal: Link | None = None
    notes: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.residuals)


def fit(trace: Trace, transport: str | None = None, *, algorithm: str | None = None, ranks_per_host: int = 1) -> Fit:
    """Return what the operations of one transport cost in this run.

    transport: None: the first that recorded its operations; algorithm: None: what the run says, or a ring.
    Raises ValueError where the run has no finished all-reduce of that transport."""
    raise NotImplementedError
