"""What hosts counted of an arm: interfaces, cores, bytes that were sent; means over hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from netbottleneck.analysis.usage import HostUse
from netbottleneck.study.evidence.sent import Sent
from netbottleneck.study.evidence.values import ArmFacts, Cpu, Nic
from netbottleneck.trace.model import PSEUDO


def nic(hosts: Sequence[HostUse]) -> Nic | None:
    """The busiest interface of each host, the mean over hosts; the loopback only where there is no other."""
    rows = []
    for host in hosts:
        named = [use for use in host.interfaces if use.interface != "lo"] or list(host.interfaces)
        ways = {use.way: use for use in named if use.interface == named[0].interface}
        if len(ways) == 2:
            rows.append(ways)
    if not rows:
        return None

    def active(way: str) -> float | None:
        known = [bps for bps in (row[way].active_bps for row in rows) if bps is not None]
        return fmean(known) if len(known) == len(rows) else None

    average = {way: fmean(row[way].average_bps for row in rows) for way in ("rx", "tx")}
    return Nic(rows[0]["tx"].interface, average["rx"], average["tx"], active("rx"), active("tx"))


def cpu(hosts: Sequence[HostUse]) -> Cpu | None:
    """The cores of each host, the mean over hosts."""
    rows = [host.cores for host in hosts if host.cores is not None]
    if not rows:
        return None
    kinds = {kind: fmean(row.mean[kind] for row in rows) for kind in rows[0].mean}
    return Cpu(kinds, fmean(row.busiest_share for row in rows))


def added(values: Sequence[float | None]) -> float | None:
    """The sum of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _ratios(own: Sequence[Sent], counted_by: str) -> list[float]:
    """Bytes that were counted over the model's, by rank; [] where one rank's are not known."""
    counts = [getattr(one, counted_by) for one in own]
    return [] if None in counts else [count / (one.model or 1) for count, one in zip(counts, own, strict=True)]


def with_sent(arm: ArmFacts, rows: Sequence[Sent]) -> ArmFacts:
    """An arm with what its ranks sent, beside the formula of the algorithm that ran."""
    own = [one for one in rows if one.transport == arm.name and one.model]
    if arm.name in PSEUDO or not own:
        return arm
    by = next((name for name in ("interface", "engine") if _ratios(own, name)), "")
    return replace(
        arm,
        algorithms=tuple(dict.fromkeys(word for one in own for word in one.algorithms)),
        sent_over_model=fmean(_ratios(own, by)) if by else None,
        sent_by=by,
    )
