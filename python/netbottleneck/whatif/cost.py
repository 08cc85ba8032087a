"""What a collective costs: its parts as a value, and what a run says of them. The formulas: csrc/sim/shape.h."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from netbottleneck import _core
from netbottleneck.analysis.stats import Estimate
from netbottleneck.trace.model import PSEUDO, Trace
from netbottleneck.whatif.contention import contention
from netbottleneck.whatif.copies import byte_cost, without
from netbottleneck.whatif.fitting import explained, interval, lines, shared
from netbottleneck.whatif.link_model import Service, achievable, flows, nominal, step_and_sum
from netbottleneck.whatif.links import UNLIMITED, Link, Table, Wire, at_least_0, positive

__all__ = ["ALGORITHMS", "UNLIMITED", "Cost", "Fit", "Link", "Table", "achievable", "fit", "nominal"]

ALGORITHMS = ("ring", "two_level", "tree", "halving_doubling", "direct")


@dataclass(frozen=True, slots=True)
class Cost:
    """What operations cost among ranks that are alike. csrc/sim/shape.h has the formula of each algorithm.

    alpha_ns: of each step between hosts; host_alpha_ns: within one. link: between hosts; host_bps: within one, None: no
    time. ranks_per_host share a link. add: of adding bytes to others, a table or ns of a byte. copy_byte_ns: of a byte
    into or out of the fusion buffer, where an operation has more than one tensor. launch_ns: from the last rank's
    submission to a place in the queue; fixed_ns: of an operation, once it has its turn. pipelined: sums, the wire and
    the host's inside go on together, else one after the other. ratio: bytes before over bytes after compression, on the
    wire; encode_byte_ns, decode_byte_ns: of an uncompressed byte. contention: compute takes so many times as long while
    an operation is under way. whole_sums: sums are of uncompressed bytes.

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
        at_least_0(
            alpha_ns=self.alpha_ns,
            host_alpha_ns=self.host_alpha_ns,
            copy_byte_ns=self.copy_byte_ns,
            launch_ns=self.launch_ns,
            fixed_ns=self.fixed_ns,
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
            fixed_ns=self.fixed_ns * factor,
            encode_byte_ns=self.encode_byte_ns * factor,
            decode_byte_ns=self.decode_byte_ns * factor,
        )

    def doubts(self, sizes: Sequence[int], workers: int) -> tuple[str, ...]:
        """Return what of a prediction lies outside of what was measured, in words.

        sizes: bytes of its operations. Raises ValueError where the fit is too poor for that."""
        if not sizes:
            return ()
        said = [*self._beyond_sizes(min(sizes), max(sizes)), *self._beyond_workers(workers)]
        if said and self.poor:
            raise ValueError(f"refused to extrapolate: {self.poor}; asked for {'; '.join(said)}")
        if isinstance(self.add, Table) and not self.add.clamped:
            share = max(sizes) / (workers if self.algorithm == "ring" else 1)
            end = self.add.bytes[-1]
            said += [f"sums of {share:.0f} bytes, the table ends at {end:.0f}: its last slope goes on"] * (share > end)
        return tuple(said)

    def _beyond_sizes(self, least: int, most: int) -> list[str]:
        low, high = self.fitted_bytes or (least, most)
        if low <= least and most <= high:
            return []
        seen = f"measured were {low} to {high}"
        return [f"operations of {least} to {most} bytes, {seen}: the rest follows the fitted line"]

    def _beyond_workers(self, workers: int) -> list[str]:
        if self.fitted_size is None or workers == self.fitted_size:
            return []
        said = [f"{workers} workers, measured were {self.fitted_size}: by the formula of {self.algorithm}"]
        if not (self.alpha_ns or self.host_alpha_ns):
            said.append("what a step costs beside its bytes is not known, and left out")
        return said


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost, and how well it explains the run that it is from.

    cost: with the achieved rate. residuals: what each operation took over what the cost says, less 1, in order of time.
    bytes_range: sizes of the operations. reason: why the fit is poor, "" where it is not. in_flight: operations that
    shared the link. achieved, achievable (by the probe), nominal: links; None where the run does not know. notes: what
    was assumed, in words. contention: of the cost, with its interval, and in words; None where the run does not tell.
    others: costs that explain all operations together as well, with another part of it by operation and by byte.
    """

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
    contention: Estimate | None = None
    contention_words: str = ""
    others: tuple[Cost, ...] = ()

    @property
    def count(self) -> int:
        return len(self.residuals)

    @property
    def error(self) -> float:
        """The middle deviation of an operation, relative."""
        return float(np.median(np.abs(self.residuals)))


def fit(
    trace: Trace,
    transport: str | None = None,
    *,
    algorithm: str | None = None,
    ranks_per_host: int | None = None,
    copy_byte_ns: float | None = None,
) -> Fit:
    """Return what the operations of one transport cost in this run.

    The time of an operation, from its last rank's submission to its end and less what it shared with others, is
    fixed + steps x alpha + bytes x beta by the formula of its algorithm; alpha is known only where the job measured it,
    and counts as fixed else. transport: None: the first that recorded operations.
    algorithm: None: what the run says, or a ring. ranks_per_host: None: as the hosts' ids say. copy_byte_ns: of a byte
    into or out of the fusion buffer, of operations that have one, where the run's own do not tell it: else copies
    count as part of what operations cost.

    Raises ValueError where the run has no all-reduce of that transport that all ranks finished in a step, and where
    copies would have taken longer than an operation."""
    name, (formula, rows, flying) = _recorded(trace, transport)
    chosen = algorithm or formula
    if chosen not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {chosen!r}")
    hosts = Counter(rank.host_id for rank in trace.ranks if rank.host_id)
    inside = ranks_per_host or max(hosts.values(), default=1)
    byte_ns, told = byte_cost(rows, flying, copy_byte_ns)
    found = _fitted(trace, name, (chosen, inside), without(rows, byte_ns), flying)
    others = tuple(replace(other, copy_byte_ns=byte_ns) for other in found.others)
    return replace(found, cost=replace(found.cost, copy_byte_ns=byte_ns), notes=(*found.notes, told), others=others)


def _recorded(trace: Trace, transport: str | None) -> tuple[str, tuple[str, list[Service], int]]:
    """The transport, and what its operations are: those of the first that has some where none is named."""
    for name in [transport] if transport is not None else [t for t in trace.transports if t not in PSEUDO]:
        found = shared(trace, name)
        if found[1] and trace.size > 1:
            return name, found
    raise ValueError(f"no all-reduce over {transport or 'any transport'} that all ranks finished in a step")


def _launch_ns(rows: Sequence[Service]) -> float:
    launches = [row.launch_ns for row in rows if row.launch_ns is not None]
    return float(np.median(launches)) if launches else 0.0


def _cost(algorithm: str, size: int, inside: int, parts: tuple[float, float, float], add: float) -> Cost:
    """Parts: ns of an operation, of them in its steps, ns of a byte."""
    fixed_ns, in_steps, byte_ns = parts
    shape = _core.collective_shape(ALGORITHMS.index(algorithm), size, inside)
    steps, share = shape[:2] if shape[1] else shape[2:]
    alpha_ns = in_steps / steps if steps else 0.0
    bps = 8e9 * share / byte_ns if byte_ns > 0 else UNLIMITED
    if shape[1]:
        cost = Cost(algorithm, alpha_ns, Link(bps), inside)
    else:
        cost = Cost(algorithm, host_alpha_ns=alpha_ns, host_bps=bps, ranks_per_host=inside)
    return replace(cost, fixed_ns=fixed_ns - in_steps, add=add)


def _least_byte_ns(trace: Trace, name: str, share: float) -> float:
    """Ns of an operation's byte, of which `share` is sent: what flows were measured to carry is the most they can."""
    rate_bps = Wire.of(trace.network).measured(flows(trace, name)[0])
    return 8e9 * share / rate_bps if rate_bps else 0.0


def _fitted(trace: Trace, name: str, formula: tuple[str, int], rows: Sequence[Service], flying: int) -> Fit:
    algorithm, inside = formula
    shape = _core.collective_shape(ALGORITHMS.index(algorithm), trace.size, inside)
    step_ns, add = step_and_sum(trace, name)
    known = None if step_ns is None else step_ns * (shape[0] if shape[1] else shape[2])
    floor = _least_byte_ns(trace, name, shape[1])
    a, b, why, note = explained(rows, known, floor)
    expected = np.array([a + b * row.nbytes for row in rows])
    residuals = np.array([row.ns for row in rows]) / np.maximum(expected, 1.0) - 1
    sizes = (min(row.nbytes for row in rows), max(row.nbytes for row in rows))
    beside, told = contention(trace, name)
    notes = (f"{algorithm} of {trace.size} ranks, {inside} on a host", *([note] if note else []), told)
    cost = replace(
        _cost(algorithm, trace.size, inside, (a, min(a, known or 0.0), b), add),
        launch_ns=_launch_ns(rows),
        contention=1.0 if beside is None else beside.value,
        residual=interval(rows, expected),
        fitted_bytes=sizes,
        fitted_size=trace.size,
        poor=why,
    )
    far = achievable(trace, name)
    reached = (cost.link, far, nominal(trace))
    others = [_along(cost, a, b, line) for line in lines(rows, a, b, floor)]
    return Fit(cost, name, tuple(residuals.tolist()), sizes, why, flying, *reached, notes, beside, told, tuple(others))


def _along(cost: Cost, a: float, b: float, line: tuple[float, float]) -> Cost:
    """A cost that was fitted with a ns of an operation and b ns of a byte, with others."""
    rate = b / line[1] if line[1] > 0 and b > 0 else 1.0
    inside = None if cost.host_bps is None else cost.host_bps * rate
    fixed_ns = max(0.0, cost.fixed_ns + line[0] - a)
    return replace(cost, fixed_ns=fixed_ns, link=replace(cost.link, bps=cost.link.bps * rate), host_bps=inside)
