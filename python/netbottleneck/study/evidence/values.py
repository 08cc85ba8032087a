"""What a cell of a study came to, as values and as JSON: one model on so many ranks of one network.

Times in ns, rates in bits a second. None: it was not measured. Everything is measured but `forecast` and `outlook`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from netbottleneck.analysis.stats import Estimate, Paired
from netbottleneck.trace import json_codec
from netbottleneck.trace.model import PSEUDO

VERSION = 1
FORMAT = "netbottleneck-cell"
# Where T_1 comes from: see CellFacts.baseline.
ALONE, NOTHING_MOVES, COMPUTED = "one rank alone", "nothing moves", "computed"
STOCK = "stock"
# The job whose steps are one forward and one backward pass, and whose bare arm moves nothing: nothing is learned.
INFLATION = "inflation"


@dataclass(frozen=True, slots=True)
class Nic:
    """The busiest interface of a host, the mean over hosts: over the steps, and while an operation was under way.

    active: None where operations are too short for the readings.
    """

    interface: str
    average_rx_bps: float
    average_tx_bps: float
    active_rx_bps: float | None = None
    active_tx_bps: float | None = None


@dataclass(frozen=True, slots=True)
class Cpu:
    """Shares of the processor time of the steps, by kind: of all cores, and of the busiest one; means over hosts."""

    kinds: Mapping[str, float]
    busiest: float

    @property
    def busy(self) -> float:
        """All but idle and waiting for disks."""
        return 1 - self.kinds.get("idle", 0.0) - self.kinds.get("iowait", 0.0)


@dataclass(frozen=True, slots=True)
class Parts:
    """Of a step, means over the middle half by length: compute + exposed + wait + other = step."""

    step_ns: float
    compute_ns: float
    hidden_ns: float
    exposed_ns: float
    wait_ns: float
    other_ns: float
    communication_ns: float


@dataclass(frozen=True, slots=True)
class ArmFacts:
    """One arm of a cell. step_ns: by blocks, 95 %; blocks: (number, median step) of each, for pairing.

    forward_backward_ns: forward and backward of a step, less what was spent blocked. active_bps, average_bps: busbw in
    transfer and over the step. sent_over_model: bytes counted by the interface (sent_by says if by the engine instead)
    over those of the algorithm's formula.
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
class Foretold:
    """What was predicted of an arm before it ran; nothing, and why, where that was refused."""

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
    """What the what-if engine answers of a cell's own run, all predicted.

    transport: that the cost was fitted to. full_use: this link, fully used. as_used, at_full_use: compression over the
    link as it was used, and fully used. ratio: the least for a scaling factor of `target` as it was used, at full_use
    the same fully used; why: none is enough. enough_bps: a faster link buys nothing.
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


@dataclass(frozen=True, slots=True)
class CellFacts:
    """All that is known of a cell.

    model: its name in the study; model_title: in words; network: as it was asked for; one_flow_bps, many_flows_bps:
    measured before the job; link_burst_bytes: what the link's cap lets through at once after a pause. baseline: what
    single_ns is: ALONE, NOTHING_MOVES (the null arm), or COMPUTED (the step less exposed communication and waiting:
    then scaling factors are estimates, and inflation is not known).
    hooks: forward and backward of the null arm over bare ones, where bare moves nothing either (the job inflation);
    contention: those of an arm over the null arm's. pairs: each arm against the first transport. compute: "timed"
    where it is a wait.
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
    hooks: Paired | None = None
    contention: tuple[Paired, ...] = ()
    equal_weights: bool | None = None
    same_as_stock: bool | None = None
    accuracy: float | None = None
    accuracy_stock_alone: float | None = None
    forecast: Mapping[str, Foretold] = field(default_factory=dict)
    outlook: Outlook | None = None
    notes: tuple[str, ...] = ()

    @property
    def transports(self) -> tuple[ArmFacts, ...]:
        """The arms that move bytes, as they were named."""
        return tuple(arm for arm in self.arms.values() if arm.name not in PSEUDO)

    def pair(self, other: str, base: str = STOCK) -> Paired | None:
        """An arm against another, paired by blocks."""
        return next((pair for pair in self.pairs if (pair.base, pair.other) == (base, other)), None)


def apart(cells: Sequence[CellFacts]) -> tuple[CellFacts, ...]:
    """The cells; where a model's gradients have several sizes (scaled ones), it is named by them: it is not one job."""
    sizes: dict[str, set[int]] = defaultdict(set)
    for cell in cells:
        sizes[cell.model].add(cell.tensor_bytes)
    return tuple(
        replace(cell, model=f"{cell.model} of {cell.tensor_bytes / 1e6:.3g} MB") if len(sizes[cell.model]) > 1 else cell
        for cell in cells
    )


def to_json(cell: CellFacts) -> str:
    """As one line."""
    return json_codec.dump({"format": FORMAT, "version": VERSION, **json_codec.shallow(cell)})


def from_json(text: str) -> CellFacts:
    """What to_json made. Raises ValueError for anything else."""
    try:
        told = json.loads(text)
        if not isinstance(told, dict) or (told.get("format"), told.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"not a {FORMAT} of version {VERSION}")
        cell: CellFacts = json_codec.build(CellFacts, told)
        return cell
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error


def write(path: Path | str, cell: CellFacts) -> None:
    """Write facts.json, whole or not at all."""
    place = Path(path)
    part = place.with_name(f"{place.name}.part")
    part.write_text(to_json(cell) + "\n", encoding="utf-8")
    part.replace(place)


def read(path: Path | str) -> CellFacts:
    """Read facts.json. Raises FileNotFoundError; ValueError naming the file."""
    try:
        return from_json(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
