"""Where 1 - scaling factor goes, arm by arm: parts of the step that add up to it exactly. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from netbottleneck.study.evidence.values import COMPUTED, ArmFacts, CellFacts, Parts

NOT_APART = "what is lost inside a host is counted as network: no cell of one host was measured"
NO_BASELINE = "inflation is counted as other: one rank's step was not measured"


@dataclass(frozen=True, slots=True)
class Budget:
    """The loss of one arm of one cell, as parts of its step; host_internal + inflation + exposed + other = loss.

    loss: 1 - scaling factor.
    host_internal: exposed communication between the ranks of one host: all of it where one host has all ranks, none
    where each rank has its own; else what the same model showed on one host, at most all.
    inflation: by how much forward, backward and optimizer are longer than those of one rank. One rank's are its step
    less what this arm's step has of other time, where the parts of its step are not known.
    exposed: the rest of the exposed communication, that nothing hides: the network, and the transport over it.
    other: what remains: waiting for ranks or for their agreement (waiting, of it), data, and all that is in no part.
    """

    key: str
    arm: str
    loss: float
    host_internal: float
    inflation: float
    exposed: float
    other: float
    waiting: float
    notes: tuple[str, ...] = ()


def budget(cell: CellFacts, arm: ArmFacts, cells: Sequence[CellFacts] = ()) -> Budget | None:
    """The loss of an arm; None where its steps were not split. cells: of the study, for what one host loses."""
    if arm.parts is None or arm.scaling is None:
        return None
    step_ns = arm.parts.step_ns
    inside_ns, inside_note = _inside(cell, arm.parts, _on_one_host(cell, arm, cells))
    longer_ns, longer_note = _longer(cell, arm.parts)
    loss = 1 - arm.scaling.value
    parts = (inside_ns / step_ns, longer_ns / step_ns, (arm.parts.exposed_ns - inside_ns) / step_ns)
    return Budget(
        cell.key,
        arm.name,
        loss,
        *parts,
        other=loss - sum(parts),
        waiting=arm.parts.wait_ns / step_ns,
        notes=tuple(note for note in (inside_note, longer_note) if note),
    )


def budgets(cells: Sequence[CellFacts]) -> tuple[Budget, ...]:
    """Of every arm that moves bytes, in every cell where it can be told."""
    found = [budget(cell, arm, cells) for cell in cells for arm in cell.transports]
    return tuple(one for one in found if one is not None)


def _on_one_host(cell: CellFacts, arm: ArmFacts, cells: Sequence[CellFacts]) -> Parts | None:
    """The same arm of the same model with as many ranks as a host of this cell has, all of them on one."""
    for other in cells:
        alike = (other.model, other.job, other.ranks) == (cell.model, cell.job, cell.ranks_per_host)
        if alike and other.ranks == other.ranks_per_host and arm.name in other.arms:
            return other.arms[arm.name].parts
    return None


def _inside(cell: CellFacts, parts: Parts, one_host: Parts | None) -> tuple[float, str]:
    if cell.ranks == cell.ranks_per_host:
        return parts.exposed_ns, ""
    if cell.ranks_per_host == 1:
        return 0.0, ""
    if one_host is None:
        return 0.0, NOT_APART
    return min(parts.exposed_ns, one_host.exposed_ns), ""


def _longer(cell: CellFacts, parts: Parts) -> tuple[float, str]:
    if cell.single_ns is None or cell.baseline == COMPUTED:
        return 0.0, NO_BASELINE
    alone_ns = cell.single_compute_ns
    if alone_ns is None:
        alone_ns = cell.single_ns.value - parts.other_ns
    return parts.compute_ns - alone_ns, ""
