"""What copies into and out of a fusion buffer cost: told by operations of several tensors beside those of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis.blocks import BOOTSTRAP_SEED
from netbottleneck.whatif.link_model import HUBER, ROUNDS, Service
from netbottleneck.whatif.links import Table, at_least_0

# Of each kind so many operations, of more than one size.
LEAST = 8
DRAWS = 500
# A byte that is copied goes in, and comes out again.
WAYS = 2
UNKNOWN = "what copies into and out of a fusion buffer cost is not known, and counts as part of operations"

Floats = NDArray[np.float64]


def _line(columns: Floats, took: Floats, weight: Floats, expected: Floats) -> Floats:
    scale = np.sqrt(weight) / expected
    return np.asarray(np.linalg.lstsq(columns * scale[:, None], took * scale, rcond=None)[0], np.float64)


def _solved(rows: Sequence[Service]) -> tuple[float, float, float]:
    """Ns of a byte that is copied with its 95 % interval: relative and robust, as link_model.line; drawn from steps."""
    sizes = np.array([row.nbytes for row in rows], np.float64)
    took = np.array([row.ns for row in rows], np.float64)
    several = np.array([(row.members or 0) > 1 for row in rows], np.float64)
    columns = np.stack([np.ones_like(sizes), sizes, WAYS * sizes * several], axis=1)
    weight = np.ones_like(took)
    expected: Floats = np.maximum(took, 1.0)
    for _ in range(ROUNDS):
        found = _line(columns, took, weight, expected)
        expected = np.maximum(columns @ found, 1.0)
        off = np.abs(took / expected - 1)
        weight = np.minimum(1.0, max(HUBER * float(np.median(off)), 1e-6) / np.maximum(off, 1e-12))
    steps, place = np.unique([row.step for row in rows], return_inverse=True)
    random = np.random.default_rng(BOOTSTRAP_SEED)
    drawn = []
    for _ in range(DRAWS):
        times = np.bincount(random.integers(len(steps), size=len(steps)), minlength=len(steps))
        drawn.append(_line(columns, took, weight * times[place], expected)[2])
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(found[2]), float(low), float(high)


def by_table(table: Table, sizes: Iterable[int]) -> float:
    """Return ns of a byte copied one way where tensors of these bytes are copied one by one, by a table of copies."""
    whole = [size for size in sizes if size > 0]
    return sum(map(table.at, whole)) / sum(whole) if whole else 0.0


def measured(rows: Sequence[Service], in_flight: int) -> tuple[float | None, str]:
    """Return ns of a byte copied one way, where a run's operations tell it, and that in words.

    Time is fixed + bytes x beta, and 2 bytes x copy more of an operation of several tensors. None, and why, where there
    are not both kinds in several sizes, or where operations shared the link, so that one's copies hide behind
    another's bytes. 0 where copies are not surely above nothing."""
    kinds = [[row.nbytes for row in rows if row.members and (row.members > 1) == several] for several in (False, True)]
    if any(row.members is None for row in rows) or any(len(kind) < LEAST or len(set(kind)) < 2 for kind in kinds):
        return None, UNKNOWN
    if in_flight > 1:
        return None, f"{UNKNOWN}: {in_flight} operations shared the link"
    value, low, high = _solved(rows)
    words = f"{low:.3f} to {high:.3f} ns a byte, by operations of several tensors beside those of one (measured)"
    if low <= 0:
        return 0.0, f"copies into and out of a fusion buffer are not told from none: {words}"
    return value, f"a copy into a fusion buffer takes {value:.3f} ns a byte, {words}"


def byte_cost(rows: Sequence[Service], in_flight: int, given_byte_ns: float | None) -> tuple[float, str]:
    """Return ns of a byte copied one way, and whose word that is: the run's, else what is given, else 0."""
    if given_byte_ns is not None:
        at_least_0(copy_byte_ns=given_byte_ns)
    found, told = measured(rows, in_flight)
    if found is None and given_byte_ns is not None:
        return given_byte_ns, f"a copy into a fusion buffer takes {given_byte_ns:.3f} ns a byte, by a table"
    return found or 0.0, told


def without(rows: Sequence[Service], byte_ns: float) -> list[Service]:
    """Return operations as they would have been had nothing been copied.

    Raises ValueError where the copies would have taken longer than an operation did."""
    found = []
    for row in rows:
        copies_ns = WAYS * byte_ns * row.nbytes if (row.members or 0) > 1 else 0.0
        if copies_ns >= row.ns:
            raise ValueError(
                f"copies of {byte_ns:.3g} ns a byte: those of an operation of {row.nbytes} bytes would take "
                f"{copies_ns:.0f} ns, all of it took {row.ns:.0f}: they are no part of it, leave --copy-table out"
            )
        found.append(Service(row.step, row.nbytes, row.ns - copies_ns, row.launch_ns, row.members))
    return found
