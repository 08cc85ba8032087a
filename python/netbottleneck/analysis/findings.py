"""Everything a report or a verdict says in numbers, worked out once from a trace. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from netbottleneck.analysis import stats
from netbottleneck.analysis.layers import Layer, layers
from netbottleneck.analysis.scaling import WARMUP_STEPS, Exposed, Split, split_steps, typical
from netbottleneck.trace.model import BARE, PSEUDO, Rank, Step, Trace

STOCK = "stock"
# Stock under us may be this much slower than the untouched script before a gain over it is withheld.
HANDICAP_MAX = 0.03


@dataclass(frozen=True, slots=True)
class Parts:
    """A step of one transport: means over the middle half of its steps. compute + exposed + wait + other = step."""

    step_ns: float
    compute_ns: float
    communication_ns: float
    hidden_ns: float
    exposed_ns: float
    wait_ns: float
    other_ns: float
    input_ns: float
    skew_ns: float
    tensor_bytes: float
    operations: float
    steps: int


@dataclass(frozen=True, slots=True)
class StepTime:
    """Length of the counted steps of a transport, all ranks' median each."""

    median_ns: float
    p10_ns: float
    p90_ns: float
    steps: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Findings:
    """The numbers of a run.

    base: the transport that the answer is about, None when no step could be split. share: of base's step that is
    exposed or waiting. late_ns: by rank, what the others' mean step waits for it. comparisons: base against each other
    transport. handicap: the untouched script against base. predicted_full_use_ns: base's step if its transfers moved
    at the achievable rate: step - (exposed - skew) x (1 - achieved / achievable), an upper bound. cores_busy: the part
    of the cores of one machine that its ranks keep busy over base's steps, where all threads of a rank count.
    """

    trace: Trace
    times: Mapping[str, StepTime]
    parts: Mapping[str, Parts]
    achieved: Mapping[str, stats.Achieved]
    achievable: stats.Achievable | None
    link_bps: float | None
    scaling: Mapping[str, stats.Scaling]
    costs: Mapping[str, stats.Costs] = field(default_factory=dict)
    travels: Mapping[str, tuple[stats.Travel, ...]] = field(default_factory=dict)
    base: str | None = None
    share: stats.Estimate | None = None
    late_ns: Mapping[int, float] = field(default_factory=dict)
    comparisons: tuple[stats.Paired, ...] = ()
    handicap: stats.Paired | None = None
    headroom: stats.Paired | None = None
    latency_share: float | None = None
    cores_busy: float | None = None
    layers: tuple[Layer, ...] = ()
    predicted_full_use_ns: float | None = None

    @property
    def label(self) -> str:
        """What the numbers are: "measured", or "predicted" in a simulated trace."""
        return "measured" if self.trace.origin == "measured" else "predicted"

    @property
    def link_burst_bytes(self) -> int | None:
        """What the link's cap, where it was made here, lets through at once after a pause."""
        verified = self.trace.network.verified if self.trace.network else {}
        return (verified.get("many_flows") or {}).get("link_burst_bytes")

    @property
    def handicapped(self) -> bool:
        """Whether a gain over base must be withheld."""
        return self.handicap is not None and self.handicap.enough and self.handicap.ratio.value > 1 + HANDICAP_MAX


def _parts(splits: Sequence[Split]) -> Parts:
    def mean(name: str) -> float:
        return float(np.mean([getattr(s, name) for s in splits]))

    names = [n for n in Parts.__dataclass_fields__ if n != "steps"]
    return Parts(**{name: mean(name) for name in names}, steps=len(splits))


def _share(splits: Sequence[Split]) -> stats.Estimate:
    """Mean and normal 95 % interval of what is not compute nor other, by step."""
    shares = np.array([(s.exposed_ns + s.wait_ns) / s.step_ns for s in splits if s.step_ns])
    half = 1.96 * float(shares.std(ddof=1)) / len(shares) ** 0.5 if len(shares) > 1 else 1.0
    return stats.Estimate(float(shares.mean()), float(shares.mean()) - half, float(shares.mean()) + half)


def _step_time(trace: Trace, transport: str, warmup: int) -> StepTime | None:
    blocks = stats.step_times(trace, transport, warmup)
    if not blocks:
        return None
    p10, p50, p90 = np.percentile(np.concatenate(list(blocks.values())), [10, 50, 90])
    return StepTime(float(p50), float(p10), float(p90), sum(map(len, blocks.values())), len(blocks))


def _late(splits: Sequence[Split], size: int) -> dict[int, float]:
    """Ns a step that each rank makes the mean other rank wait."""
    waited: dict[int, float] = defaultdict(float)
    for split in splits:
        for rank, ns in split.late_ns.items():
            waited[rank] += ns
    per_rank = len(splits) / max(size, 1)
    return {rank: ns / per_rank / max(size - 1, 1) for rank, ns in sorted(waited.items())}


def _busy(rank: int, steps: Sequence[Step]) -> float | None:
    """How many cores a rank keeps busy over its `steps`; None where it does not tell."""
    own = [step for step in steps if step.rank == rank]
    used = [step.cpu_ns for step in own if step.cpu_ns is not None]
    long_ns = sum(step.duration_ns for step in own)
    return sum(used) / long_ns if len(used) == len(own) and long_ns > 0 else None


def _cores_busy(trace: Trace, steps: Sequence[Step]) -> float | None:
    """Of the cores that the ranks of one machine may run on, the part that they keep busy over `steps`.

    The busiest machine's; None where a rank does not tell. Machines go by name: hosts of a lab share one.
    """
    machines: dict[str, list[Rank]] = defaultdict(list)
    for rank in trace.ranks:
        machines[rank.hostname].append(rank)
    shares = []
    for ranks in machines.values():
        used = [busy for busy in (_busy(rank.rank, steps) for rank in ranks) if busy is not None]
        if len(used) < len(ranks) or not all(rank.cores for rank in ranks) or trace.origin != "measured":
            return None
        shares.append(sum(used) / len({core for rank in ranks for core in rank.cores}))
    return max(shares, default=None)


def _link_bps(trace: Trace, base: str | None) -> float | None:
    """The network's speed as it was given; else, between hosts, the rating of the slowest interface under base."""
    if trace.network is not None:
        return trace.network.link_bps
    if trace.origin != "measured" or len({rank.host_id for rank in trace.ranks}) < 2:
        return None
    rated = [info.link_bps for rank in trace.ranks for info in rank.transports if info.name == base]
    return min((bps for bps in rated if bps), default=None) if all(rated) else None


def _full_use(parts: Parts, achieved: stats.Achieved | None, achievable: stats.Achievable | None) -> float | None:
    if achieved is None or achievable is None:
        return None
    factor = min(achieved.active_bps / achievable.best[1], 1.0)
    return parts.step_ns - max(parts.exposed_ns - parts.skew_ns, 0.0) * (1 - factor)


def _base(trace: Trace, available: Mapping[str, object]) -> str | None:
    order = [STOCK, *(t for t in trace.transports if t not in PSEUDO), *trace.transports]
    return next((t for t in order if t in available), None)


Row = tuple[Step, Split, Exposed]
T = TypeVar("T")


def _there(values: Mapping[str, T | None]) -> dict[str, T]:
    """What is not None."""
    return {name: value for name, value in values.items() if value is not None}


def _about(common: Findings, base: str, rows: Sequence[Row], warmup: int) -> Findings:
    """`common` with what concerns `base`, whose counted steps are `rows`."""
    trace = common.trace
    middle = typical(rows, lambda row: row[1].step_ns)
    splits = [row[1] for row in rows]
    others = set(common.times) - {base, *PSEUDO}
    pairs = _there({name: stats.compare(trace, base, name, warmup) for name in common.times if name in others})
    own = [c for c in trace.collectives if c.transport == base and c.step is not None]
    sampled = [step for step in trace.steps if step.transport == base]
    return replace(
        common,
        base=base,
        share=_share(splits),
        late_ns=_late([row[1] for row in middle], trace.size),
        comparisons=tuple(pairs.values()),
        handicap=stats.compare(trace, BARE, base, warmup) if base == STOCK else None,
        headroom=stats.headroom(trace, base),
        latency_share=stats.latency_share(own),
        cores_busy=_cores_busy(trace, [step for step, _, _ in rows]),
        layers=layers(trace, [(step, exposed) for step, _, exposed in middle], sampled),
        predicted_full_use_ns=_full_use(common.parts[base], common.achieved.get(base), common.achievable),
    )


def find(trace: Trace, warmup: int = WARMUP_STEPS) -> Findings:
    """Works the numbers of a trace out."""
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in split_steps(trace, warmup):
        rows[row[0].transport].append(row)
    named = list(dict.fromkeys([*trace.transports, *rows]))
    splits = {name: [row[1] for row in rows[name]] for name in named if name in rows}
    times = {name: _step_time(trace, name, warmup) for name in named}
    achieved = {name: stats.achieved(name, own) for name, own in splits.items()}
    factors = {n: stats.scaling_factor(trace, n, splits.get(n, ())) for n in times if n not in PSEUDO}
    parts = {name: _parts(typical(own, lambda split: split.step_ns)) for name, own in splits.items()}
    base = _base(trace, parts)
    common = Findings(
        trace=trace,
        times=_there(times),
        parts=parts,
        achieved=_there(achieved),
        achievable=stats.achievable(trace),
        link_bps=_link_bps(trace, base),
        scaling=_there(factors),
        costs=stats.costs(trace),
        travels=stats.travels(trace),
    )
    return common if base is None else _about(common, base, rows[base], warmup)
