"""Operations of process groups, from a flight recorder's dumps: who has joined them, and where they are over. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from netbottleneck.trace.model import (
    COMPLETED,
    ENDED,
    POINT_TO_POINT,
    TWO_SIDED,
    UNEVEN,
    Collective,
    ProcessGroup,
    Trace,
)
from netbottleneck.units import listed, nbytes

OVER = (COMPLETED, ENDED)


@dataclass(frozen=True, slots=True)
class Join:
    """One collective of a group. number: its sequence number; place: among those of one number, from 1.

    bytes: None if not known. submitted: the ranks that recorded it; waiting: those of them on which it is not over.
    missing: ranks that recorded no operation of the group with this number or a later one. unknown: members without a
    record, or whose record of the group is overwritten. differs: how the ranks' operations differ, "" if they do not.
    first_ns, last_ns: when the first and the last rank submitted it.
    """

    group: ProcessGroup
    number: int
    place: int
    name: str
    kind: str
    bytes: int | None
    states: Mapping[int, str]
    missing: tuple[int, ...]
    unknown: tuple[int, ...]
    differs: str
    first_ns: int
    last_ns: int

    @property
    def submitted(self) -> tuple[int, ...]:
        return tuple(self.states)

    @property
    def waiting(self) -> tuple[int, ...]:
        return tuple(rank for rank, state in self.states.items() if state not in OVER)


def _absent(
    group: ProcessGroup, number: int, submitted: Mapping[int, object], overwritten: Mapping[int, bool]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ranks that have not submitted an operation of a group, ranks of which that is not known).

    overwritten: by rank with a record, if operations are missing at its begin.
    """
    last = dict(group.last)
    members = last if group.ranks is None else group.ranks
    absent = [rank for rank in members if rank not in submitted and last.get(rank, 0) < number]
    lost = {rank for rank in absent if rank not in last and overwritten.get(rank, True)}
    return tuple(rank for rank in absent if rank not in lost), tuple(rank for rank in absent if rank in lost)


def _differs(own: Mapping[int, Collective]) -> str:
    """How the ranks' operations differ: in kind, element type or bytes."""
    kinds = {one.kind for one in own.values()}
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, one in own.items():
        sized = one.tensor_bytes is not None and (len(kinds) > 1 or one.kind not in UNEVEN)
        size = f" {one.tensor_bytes} bytes" if sized else ""
        groups[f"{one.kind} {one.dtype}{size}" if one.dtype else one.kind].append(rank)
    if len(groups) < 2:
        return ""
    return "; ".join(f"rank {listed(ranks)}: {what}" for what, ranks in groups.items())


def joins(trace: Trace) -> tuple[Join, ...]:
    """The collectives of a flight recorder's dumps by group and number; empty for any other trace."""
    found: dict[tuple[int, int, int], dict[int, Collective]] = defaultdict(dict)
    for one in trace.collectives if trace.groups else ():
        if one.state is not None and one.kind not in TWO_SIDED and one.key < POINT_TO_POINT:
            found[one.comm, one.round, one.key][one.rank] = one
    operated = {one.rank for one in trace.collectives}
    overwritten = {rank.rank: rank.events_dropped > 0 for rank in trace.ranks if rank.rank in operated}
    rows = []
    for (comm, number, place), own in sorted(found.items()):
        group, first = trace.groups[comm], next(iter(own.values()))
        missing, unknown = _absent(group, number, own, overwritten)
        times = [one.submit_ns for one in own.values()]
        rows.append(
            Join(
                group,
                number,
                place,
                first.name,
                first.kind,
                first.tensor_bytes,
                {rank: str(one.state) for rank, one in own.items()},
                missing,
                unknown,
                _differs(own),
                min(times),
                max(times),
            )
        )
    return tuple(rows)


def unfinished(trace: Trace, found: Sequence[Join]) -> list[str]:
    """Sentences about the operations of a flight recorder's dumps.

    Of each group, the first that is not over or that a rank has not joined, and the first that differs between ranks;
    of each rank, the first send or receive that is not over.
    """
    texts = [_open_words(own) for own in _by_group(one for one in found if one.waiting or one.missing)]
    for own in _by_group(one for one in found if one.differs):
        later = f" Of the same group, {len(own) - 1} later operation(s) differ too." if own[1:] else ""
        texts.append(f"Ranks differ in {_place_words(own[0])}: {own[0].differs} (measured).{later}")
    texts += _open_messages(trace)
    return texts or ["Every recorded operation was joined by its ranks and is over (measured)."]


def _by_group(found: Iterable[Join]) -> list[list[Join]]:
    groups: dict[ProcessGroup, list[Join]] = defaultdict(list)
    for one in found:
        groups[one.group].append(one)
    return list(groups.values())


def _open_messages(trace: Trace) -> list[str]:
    """Of each rank, the first send or receive that is not over."""
    rows = [one for one in trace.collectives if one.kind in TWO_SIDED and one.state is not None]
    first = {one.rank: one for one in reversed(rows) if one.state not in OVER}
    return [
        f"On rank {rank}, {one.name} (number {one.round}) of group {trace.groups[one.comm]} is not over (measured)."
        for rank, one in sorted(first.items())
    ]


def _place_words(one: Join) -> str:
    size = "size not known" if one.bytes is None else nbytes(one.bytes)
    return f"operation {one.number} of group {one.group}, {one.name}, {size}"


def _open_words(of_group: Sequence[Join]) -> str:
    """What the first open operation of a group waits for, as far as the record tells."""
    one, more = of_group[0], len(of_group) - 1
    missing, waiting, unknown = map(listed, (one.missing, one.waiting, one.unknown))
    first = f"Rank {missing} has not joined" if missing else "All recorded ranks joined"
    parts = [f"{first} {_place_words(one)}"]
    parts += [f"waiting: rank {waiting}" if missing else f"not over on rank {waiting}"] if waiting else []
    parts += [f"no record of it from rank {unknown}"] if unknown else []
    later = f" Of the same group, {more} later operation(s) are open too." if more else ""
    return f"{'; '.join(parts)} (measured).{later}"
