"""Steps of the chain that are about hosts: their interfaces, average beside active, and their cores."""

from __future__ import annotations

from collections.abc import Sequence

from netbottleneck.study.evidence import speed
from netbottleneck.study.evidence.values import ArmFacts, CellFacts
from netbottleneck.units import gbit, percent

Said = tuple[str, Sequence[str], Sequence[str]]  # verdict, lines, missing
# Of all cores, busier than this is no longer low.
CPU_LOW = 0.5


def average_at_full_use(cell: CellFacts, arm: ArmFacts) -> float | None:
    """What the interface would average, sending the same bytes a step, were the link fully used; bits a second."""
    step_ns = full_use_ns(cell)
    return None if step_ns is None or arm.nic is None else arm.nic.average_tx_bps * arm.step_ns.value / step_ns


def full_use_ns(cell: CellFacts) -> float | None:
    """The step at full use of the link: as it was forecast, else as the run itself gives it."""
    told = cell.forecast.get("full_use")
    if told is not None and told.step_ns is not None:
        return told.step_ns.value
    own = cell.outlook.full_use_ns if cell.outlook is not None else None
    return None if own is None else own.value


def _share(bps: float, link: float | None) -> str:
    return gbit(bps) + (f" ({percent(bps / link)})" if link else "")


def _interface(cell: CellFacts, arm: ArmFacts) -> str:
    assert arm.nic is not None
    active = arm.nic.active_tx_bps
    busy = "too short to tell" if active is None else _share(active, cell.link_bps)
    line = f"{cell.key}, {arm.name}: average {_share(arm.nic.average_tx_bps, cell.link_bps)}, active {busy} (measured)"
    full = average_at_full_use(cell, arm)
    return line + ("" if full is None else f"; at full use it would average {_share(full, cell.link_bps)} (predicted)")


def _again(arms: Sequence[ArmFacts]) -> list[str]:
    """The largest share of TCP segments that were sent again."""
    told = [(arm.retransmitted_segments, arm.sent_segments) for arm in arms]
    shares = [again / sent for again, sent in told if sent and again is not None]
    return [f"TCP segments sent again: at most {100 * max(shares):.2f} % (measured)"] if shares else []


def _used(cell: CellFacts, arm: ArmFacts | None) -> tuple[float, float, str] | None:
    """(active, average, whose) as parts of the link; None where one is not known."""
    if arm is None or arm.nic is None or arm.nic.active_tx_bps is None or not cell.link_bps:
        return None
    return arm.nic.active_tx_bps / cell.link_bps, arm.nic.average_tx_bps / cell.link_bps, f"{arm.name}, {cell.key}"


def interfaces(cells: Sequence[CellFacts]) -> Said:
    """What the interfaces sent, on average beside while something moved."""
    rows = [(cell, arm) for cell in cells for arm in cell.transports if arm.nic is not None]
    if not rows:
        return "The use of interfaces was not measured.", (), ("counters of interfaces",)
    lines = [*(_interface(cell, arm) for cell, arm in rows), *_again([arm for _, arm in rows])]
    used = [one for cell in cells if (one := _used(cell, speed.base(cell))) is not None]
    if not used:
        return "The speed of the links is not known, nor what part of them was used.", lines, ("links with a cap",)
    active, average, whose = min(used)
    verdict = (
        f"As little as {percent(active)} of the link is used while something moves, {percent(average)} on average "
        f"({whose}; measured). An average says nothing of a transport: it is low wherever compute is long."
    )
    return verdict, lines, ()


def processors(cells: Sequence[CellFacts]) -> Said:
    """How busy the cores are."""
    rows = [(cell, arm) for cell in cells for arm in cell.arms.values() if arm.cpu is not None]
    if not rows:
        return "The use of processors was not measured.", (), ("counters of cores",)
    lines = []
    for cell, arm in rows:
        assert arm.cpu is not None
        kinds = ", ".join(
            f"{kind} {percent(share)}" for kind, share in arm.cpu.kinds.items() if kind != "idle" and share >= 0.01
        )
        lines.append(
            f"{cell.key}, {arm.name}: {percent(arm.cpu.busy)} of all cores ({kinds or 'idle'}), the busiest "
            f"{percent(arm.cpu.busiest)} (measured)"
        )
    cell, arm = max(rows, key=lambda row: row[1].cpu.busy if row[1].cpu is not None else 0.0)
    assert arm.cpu is not None
    said = "Processors are not the limit" if arm.cpu.busy < CPU_LOW else "Processors are busy, and may be the limit"
    return f"{said}: at most {percent(arm.cpu.busy)} of all cores ({cell.key}, {arm.name}; measured).", lines, ()
