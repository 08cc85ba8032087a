"""What a step saves if late ranks came earlier to its operations: these are replayed. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from netbottleneck.trace.model import ENDS_TOGETHER, Collective

Waits = Mapping[int, Sequence[tuple[int, int, int]]]  # (key, begin, end) of the training threads in a step, by rank


def saved_ns(rows: Sequence[Collective], waits: Waits, late_ns: Mapping[int, float]) -> float:
    """Ns by which the last operation of a step would end earlier, if some ranks were less late.

    late_ns: by rank, how much earlier it submits its operations at most; never earlier than the median of the other
    ranks. rows: the operations of all ranks in the step. A transfer begins when the last rank has submitted it and the
    one before is done, and lasts as long as recorded. So transfers that a late rank hides behind its own work show
    once it is on time. Infinite if the record does not tell: operations that do not end on all ranks at once, or ranks
    that wait before they submit the last one, which then depends on those before.
    """
    calls = _calls(rows)
    if not calls or _waits_before(calls[-1], waits):
        return math.inf
    done = earlier = -math.inf
    for own in calls:
        submits = {rank: one.submit_ns for rank, one in own.items()}
        others = float(np.median([at for rank, at in submits.items() if rank not in late_ns]))
        moved = [at - min(max(at - others, 0.0), late_ns.get(rank, 0.0)) for rank, at in submits.items()]
        end = max(one.done_ns or 0 for one in own.values())
        lasts = max(0.0, end - max(*submits.values(), done))
        earlier, done = max(*moved, earlier) + lasts, max(done, end)
    return done - earlier


def _calls(rows: Sequence[Collective]) -> list[dict[int, Collective]]:
    """The operations of a step, by rank, in the order of their last arrivals; [] if not all are of all ranks."""
    groups: dict[object, dict[int, Collective]] = defaultdict(dict)
    for one in rows:
        groups[one.match][one.rank] = one
    ranks = {one.rank for one in rows}
    if not all(own.keys() == ranks and all(map(_is_common, own.values())) for own in groups.values()):
        return []
    return sorted(groups.values(), key=lambda own: max(one.submit_ns for one in own.values()))


def _waits_before(last: Mapping[int, Collective], waits: Waits) -> bool:
    """True if a rank waits in the step before it submits its last operation."""
    return any(begin < one.submit_ns for rank, one in last.items() for _, begin, _ in waits.get(rank, ()))


def _is_common(one: Collective) -> bool:
    """True for a finished operation of all ranks that ends on all of them at once."""
    return one.finished and one.done_ns is not None and one.kind in ENDS_TOGETHER and one.ranks is None
