"""Operations of profiled ranks that belong together: the same operation of a process group, on each of its ranks.

A profile has no number of an operation, so they are matched by their place in their step and group. That holds only
where all ranks did the same there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from netbottleneck.trace.model import (
    ALONE,
    ENDS_TOGETHER,
    NOT_MATCHED,
    POINT_TO_POINT,
    TWO_SIDED,
    UNEVEN,
    Collective,
    Interval,
)

# Ns by which the profiles of two ranks of one host may differ in time.
SAME_CLOCK_NS = 1_000_000
# Above this part of the steps without a match, time in transfer is not known.
UNMATCHED_MOST = 0.1

_Place = tuple[int, int]  # step and group
_OfRanks = Mapping[int, Sequence[Collective]]


@dataclass(frozen=True, slots=True)
class Profiled:
    """A rank's operations. host: "" if not known; steps: indices of the first and the last one.

    nameless: its profile does not name the group of an operation, as that of the CPU. untold_groups: names of the
    rank's process groups of several ranks, but not all, whose operations its profile does not tell from others.
    """

    rank: int
    host: str
    steps: Interval
    rows: Sequence[Collective]
    nameless: bool = False
    untold_groups: tuple[str, ...] = ()


def _is_whole(row: Collective) -> bool:
    """True for an operation of a whole group."""
    return row.kind not in TWO_SIDED


def _by_place(ranks: Sequence[Profiled]) -> dict[_Place, dict[int, list[Collective]]]:
    """The collectives of each rank by step and group, in order; of a group of all ranks, each rank is there."""
    found: dict[_Place, dict[int, list[Collective]]] = {}
    for one in ranks:
        for row in one.rows:
            if row.step is not None and _is_whole(row):
                own = found.setdefault((row.step, row.comm), defaultdict(list))
                own[one.rank].append(row)
                for each in ranks if row.ranks is None else ():
                    own[each.rank]  # a rank without an operation is one that differs
    return found


def _alike(own: _OfRanks) -> bool:
    """True if the operations of all ranks have the same kinds and bytes, in the same order."""
    series = (
        tuple((row.kind, None if row.kind in UNEVEN else row.tensor_bytes) for row in rows) for rows in own.values()
    )
    return len(set(series)) == 1


def _possible(own: _OfRanks, hosts: Mapping[int, str]) -> bool:
    """False if an operation that ends on all ranks at once is over on one before another one of its host calls it."""
    for same in zip(*own.values(), strict=True):
        by_host = defaultdict(list)
        for row in same if same[0].kind in ENDS_TOGETHER else ():
            by_host[hosts[row.rank]].append(row)
        by_host.pop("", None)
        for rows in by_host.values():
            if min(row.done_ns or 0 for row in rows) + SAME_CLOCK_NS < max(row.submit_ns for row in rows):
                return False
    return True


def _apart(row: Collective) -> Collective:
    """The operation with a key that no other rank has."""
    return replace(row, key=row.key + ALONE + POINT_TO_POINT * (row.rank + 1))


def _differ(ranks: Sequence[Profiled]) -> str:
    """How the steps of the ranks' profiles differ, else that their operations do."""
    first = ranks[0]
    other = next((one for one in ranks if one.steps != first.steps), None)
    if other is None:
        return "the ranks' operations differ"
    each = ", ".join(f"rank {one.rank} steps {one.steps[0]} to {one.steps[1]}" for one in (first, other))
    return f"the ranks did not all profile the same ({each})"


def _alone(ranks: Sequence[Profiled], places: Mapping[_Place, _OfRanks]) -> tuple[set[_Place], str]:
    """The places whose operations do not belong together, and why those of one do not."""
    unlike = {place for place, own in places.items() if not _alike(own)}
    if unlike:
        return unlike, _differ(ranks)
    hosts = {one.rank: one.host for one in ranks}
    timed = places if all(one.nameless for one in ranks) else {}
    never = {place for place, own in timed.items() if not _possible(own, hosts)}
    return never, "an operation is over on one rank before another one calls it"


def _of_parts(ranks: Sequence[Profiled]) -> str:
    """Say which groups of a part of the ranks have operations that cannot be told from others; "" if there are none."""
    names = sorted({name or "without a name" for one in ranks for name in one.untold_groups})
    of = f"group {', '.join(names)} of the job has a part of the ranks"
    return f"{of}, and the profiles do not tell its operations from those of others: {NOT_MATCHED}." if names else ""


def _set_apart(ranks: Sequence[Profiled], alone: Container[_Place]) -> list[Sequence[Collective]]:
    """The operations by rank, those of the places `alone` with keys of their own."""
    return [
        [_apart(row) if _is_whole(row) and (row.step, row.comm) in alone else row for row in one.rows] for one in ranks
    ]


def matched(ranks: Sequence[Profiled]) -> tuple[list[Sequence[Collective]], list[str]]:
    """The operations by rank, with equal keys only where they belong together, and a note on the others.

    They belong together where all ranks of their group have the same kinds and bytes in a step, and none of them is
    over before a rank calls it. No operations do if those of a group cannot be told, or more than UNMATCHED_MOST of the
    steps have others.
    """
    places = _by_place(ranks)
    of_parts = _of_parts(ranks) if places and len(ranks) > 1 else ""
    if of_parts:
        return _set_apart(ranks, places), [of_parts]
    alone, why = _alone(ranks, places)
    if not alone:
        return [one.rows for one in ranks], []
    count, whole = len({step for step, _ in alone}), len({step for step, _ in places})
    note = f"in {count} of {whole} steps {why}:"
    if count > UNMATCHED_MOST * whole:
        return _set_apart(ranks, places), [f"{note} {NOT_MATCHED}."]
    return _set_apart(ranks, alone), [f"{note} no rank's waiting is known there."]
