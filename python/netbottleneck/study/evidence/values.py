"""Values of a study's cells: facts and their JSON, intervals, and their text form.

A cell is one model on a number of ranks of one network. Times are in ns, rates in bits a second. None: not measured.
Everything is measured except `forecast` and `outlook`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis.comparisons import Estimate, Paired
from netbottleneck.trace.files import write_text
from netbottleneck.trace.model import decode, encode, shallow
from netbottleneck.trace.transports import PSEUDO
from netbottleneck.units import ms, percent

# Facts of a cell.

VERSION = 1
FORMAT = "netbottleneck-cell"
# Source of T_1: see CellFacts.baseline.
ALONE, NOTHING_MOVES, COMPUTED = "one rank alone", "nothing moves", "computed"
STOCK = "stock"
# The job whose steps are one forward and one backward. Its bare arm moves no bytes, and it trains nothing.
INFLATION = "inflation"


@dataclass(frozen=True, slots=True)
class Nic:
    """The busiest interface of a host, the mean over hosts: over the steps, and while an operation was in flight.

    active_rx_bps, active_tx_bps: None if operations are too short for the sampling interval.
    """

    interface: str
    average_rx_bps: float
    average_tx_bps: float
    active_rx_bps: float | None = None
    active_tx_bps: float | None = None


@dataclass(frozen=True, slots=True)
class Cpu:
    """Shares of the steps' CPU time: by kind over all cores, and of the busiest core. Means over hosts."""

    kinds: Mapping[str, float]
    busiest: float

    @property
    def busy(self) -> float:
        """The share of time that is neither idle nor waiting for disks."""
        return 1 - self.kinds.get("idle", 0.0) - self.kinds.get("iowait", 0.0)


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a step, means over the middle half by length: compute + exposed + wait + other = step."""

    step_ns: float
    compute_ns: float
    hidden_ns: float
    exposed_ns: float
    wait_ns: float
    other_ns: float
    communication_ns: float


@dataclass(frozen=True, slots=True)
class ArmFacts:
    """One arm of a cell. step_ns: by blocks, 95 %; blocks: (number, median step) of each block, for pairing.

    forward_backward_ns: forward and backward of a step, without blocked time. active_bps, average_bps: busbw in
    transfer and over the step. sent_over_model: bytes that the interface counted (or the engine: see sent_by), divided
    by those of the algorithm's formula.
    """

    name: str
    step_ns: Estimate
    steps: int
    blocks: tuple[tuple[int, float], ...]
    scaling: Estimate | None = None
    parts: Parts | None = None
    forward_backward_ns: Estimate | None = None
    active_bps: float | None = None
    average_bps: float | None = None
    nic: Nic | None = None
    cpu: Cpu | None = None
    sent_segments: float | None = None
    retransmitted_segments: float | None = None
    sent_over_model: float | None = None
    sent_by: str = ""
    algorithms: tuple[str, ...] = ()
    streams: int | None = None


@dataclass(frozen=True, slots=True)
class ForecastFacts:
    """The forecast of an arm, made before it ran; without values, and with the reason, if it was refused."""

    step_ns: Estimate | None = None
    scaling: Estimate | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """Predicted scaling factor by compression ratio."""

    words: str
    points: tuple[tuple[float, Estimate], ...]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What-if answers about a cell's own run, all predicted.

    transport: the one that the cost was fitted to. full_use: scaling factor with this link fully used. as_used,
    at_full_use: scaling by compression, at the achieved rate and at full use of the link. ratio, full_use_ratio: the
    least compression for a scaling factor of `target` in these two cases; ratio_why, full_use_ratio_why: why no ratio
    is enough, or why there is no answer (ratio_refused, full_use_ratio_refused). enough_bps: the fastest link that
    still helps.
    """

    transport: str
    target: float
    full_use_ns: Estimate | None = None
    full_use: Estimate | None = None
    as_used: Curve | None = None
    at_full_use: Curve | None = None
    ratio: Estimate | None = None
    ratio_why: str = ""
    full_use_ratio: Estimate | None = None
    full_use_ratio_why: str = ""
    enough_bps: Estimate | None = None
    notes: tuple[str, ...] = ()
    ratio_refused: bool = False
    full_use_ratio_refused: bool = False


@dataclass(frozen=True, slots=True)
class CellFacts:
    """All facts of a cell.

    model: its name in the study. model_title: its descriptive name. network: as requested. one_flow_bps,
    many_flows_bps: measured before the job. link_burst_bytes: what the link's cap passes at once after a pause.
    baseline: the source of single_ns: ALONE, NOTHING_MOVES (the null arm), or COMPUTED (the step less exposed
    communication and waiting; scaling factors are then estimates, and inflation is not known).
    hooks: forward and backward of the null arm over those of the bare arm, in the job inflation, where bare moves no
    bytes. contention: forward and backward of each arm over those of the null arm. pairs: each arm against the first
    transport; few_pairs: by arm, the pairs of blocks with the first transport where they are too few for a claim.
    handicap: why no gain over the first transport may be reported, "" if it may. compute: "timed" if it is a
    timed wait, else "real".
    """

    key: str
    model: str
    job: str
    ranks: int
    network: str
    link_bps: float | None = None
    flow_bps: tuple[float, ...] = ()
    one_flow_bps: float | None = None
    many_flows_bps: float | None = None
    link_burst_bytes: int | None = None
    model_title: str = ""
    compute: str = "real"
    ranks_per_host: int = 1
    cores: int = 0
    tensors: int = 0
    tensor_bytes: int = 0
    baseline: str = ""
    single_ns: Estimate | None = None
    single_compute_ns: float | None = None
    single_forward_backward_ns: Estimate | None = None
    arms: Mapping[str, ArmFacts] = field(default_factory=dict)
    pairs: tuple[Paired, ...] = ()
    handicap: str = ""
    hooks: Paired | None = None
    contention: tuple[Paired, ...] = ()
    equal_weights: bool | None = None
    same_as_stock: bool | None = None
    accuracy: float | None = None
    accuracy_stock_alone: float | None = None
    forecast: Mapping[str, ForecastFacts] = field(default_factory=dict)
    outlook: Outlook | None = None
    notes: tuple[str, ...] = ()
    few_pairs: Mapping[str, int] = field(default_factory=dict)

    @property
    def transports(self) -> tuple[ArmFacts, ...]:
        """The arms that move bytes, in their original order."""
        return tuple(arm for arm in self.arms.values() if arm.name not in PSEUDO)

    def pair(self, other: str, base: str = STOCK) -> Paired | None:
        """Return an arm compared with another, paired by blocks."""
        return next((pair for pair in self.pairs if (pair.base, pair.other) == (base, other)), None)


def with_distinct_models(cells: Sequence[CellFacts]) -> tuple[CellFacts, ...]:
    """Return the cells; a model whose gradients have several sizes (scaled ones) gets the size in its name.

    Different sizes are different jobs."""
    sizes: dict[str, set[int]] = defaultdict(set)
    for cell in cells:
        sizes[cell.model].add(cell.tensor_bytes)
    return tuple(
        replace(cell, model=f"{cell.model} of {cell.tensor_bytes / 1e6:.3g} MB") if len(sizes[cell.model]) > 1 else cell
        for cell in cells
    )


def to_json(cell: CellFacts) -> str:
    """Return the facts as one line of JSON."""
    return encode({"format": FORMAT, "version": VERSION, **shallow(cell)})


def from_json(text: str) -> CellFacts:
    """Parse the output of to_json. Raises ValueError for anything else."""
    try:
        document = json.loads(text)
        if not isinstance(document, dict) or (document.get("format"), document.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"not a {FORMAT} of version {VERSION}")
        cell: CellFacts = decode(CellFacts, document)
        return cell
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error


def write(path: Path | str, cell: CellFacts) -> None:
    """Write facts.json atomically."""
    write_text(path, to_json(cell) + "\n")


def read(path: Path | str) -> CellFacts:
    """Read facts.json. Raises FileNotFoundError, and ValueError naming the file."""
    try:
        return from_json(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


# Text form of facts: estimates with their intervals, names of cells, labels of numbers.

BASELINES = {COMPUTED: "estimated", NOTHING_MOVES: "measured, against the arm null"}

# Names listed before the rest is only counted.
NAMES_MAX = 4


def factor(one: Estimate) -> str:
    """Format an estimate: 0.217 (0.216 to 0.218)."""
    return f"{one.value:.3f} ({one.low:.3f} to {one.high:.3f})"


def percent_change(one: Estimate) -> str:
    """Format a part: +2.1 % (-0.3 to +4.5)."""
    return f"{percent(one.value, digits=1, signed=True)} ({100 * one.low:+.1f} to {100 * one.high:+.1f})"


def time(one: Estimate) -> str:
    """Format a time in ns: 101 ms (100 to 103)."""
    low, high = (ms(ns).removesuffix(" ms") for ns in (one.low, one.high))
    return f"{ms(one.value)} ({low} to {high})"


def minus_one(ratio: Estimate) -> Estimate:
    """Return a ratio less 1."""
    return Estimate(ratio.value - 1, ratio.low - 1, ratio.high - 1)


def label(cell: CellFacts) -> str:
    """Return the label of a cell's scaling factors."""
    return BASELINES.get(cell.baseline, "measured")


def join_names(names: Iterable[str]) -> str:
    """Join distinct names in order, with commas; names beyond NAMES_MAX are counted."""
    found = list(dict.fromkeys(names))
    left = len(found) - NAMES_MAX
    return ", ".join(found[:NAMES_MAX]) + (f" and {left} more" if left > 0 else "")


# Medians over the blocks of an arm with their 95 % intervals: bootstrap over blocks and over the steps of each.
#
# Pure and seeded.

BOOTSTRAP_DRAWS = 2000
BOOTSTRAP_SEED = 0

Blocks = Mapping[int, NDArray[np.float64]]


def _draws(blocks: Blocks, seed: int) -> NDArray[np.float64]:
    random = np.random.default_rng(seed)
    drawn = np.array(
        [np.median(own[random.integers(len(own), size=(BOOTSTRAP_DRAWS, len(own)))], axis=1) for own in blocks.values()]
    )
    which = random.integers(len(drawn), size=(BOOTSTRAP_DRAWS, len(drawn)))
    column = random.integers(BOOTSTRAP_DRAWS, size=which.shape)
    return np.asarray(np.median(drawn[which, column], axis=1), np.float64)


def _middle(blocks: Blocks) -> float:
    return float(np.median([np.median(own) for own in blocks.values()]))


def _estimate(value: float, draws: NDArray[np.float64]) -> Estimate:
    low, high = np.percentile(draws, [2.5, 97.5])
    return Estimate(value, min(value, float(low)), max(value, float(high)))


def median(blocks: Blocks, seed: int = BOOTSTRAP_SEED) -> Estimate | None:
    """Return the median of the blocks' medians; None without blocks."""
    return _estimate(_middle(blocks), _draws(blocks, seed)) if blocks else None


def ratio(above: Blocks, below: Blocks, seed: int = BOOTSTRAP_SEED) -> Estimate | None:
    """Return one arm's median over another's, unpaired: for arms that did not take turns."""
    if not above or not below:
        return None
    return _estimate(_middle(above) / _middle(below), _draws(above, seed) / _draws(below, seed + 1))


def inverse(one: Estimate) -> Estimate:
    """Return the reciprocal of an estimate."""
    return Estimate(1 / one.value, 1 / one.high, 1 / one.low)
