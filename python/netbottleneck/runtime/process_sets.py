"""Agreement on process sets: each gets the same number on all ranks, or none on any."""

from collections.abc import Iterable, Sequence

import numpy as np

from netbottleneck.runtime import async_operations, collectives, job
from netbottleneck.runtime.async_operations import GLOBAL, ProcessSet, global_process_set, members_of

DYNAMIC = "dynamic"


def _agree(sets: Sequence[ProcessSet], what: str) -> None:
    """Raise ValueError on every rank if ranks name different sets, or request different changes."""
    among = members_of(global_process_set)
    request = f"{what} {[process_set.ranks for process_set in sets]}".encode()
    name = async_operations.label("process_sets", None)
    pending = async_operations.Pending(collectives.allgather_steps(np.frombuffer(request, np.uint8), name, among))
    requests = [part.tobytes().decode() for part in pending.wait()]
    different = [rank for rank in range(among.size) if requests[rank] != requests[0]]
    if different:
        raise ValueError(
            f"all ranks must name the same process sets: rank 0 requests {requests[0]}, "
            f"rank {different[0]} {requests[different[0]]}"
        )


def _check(sets: Sequence[ProcessSet], size: int) -> None:
    known = {tuple(one.ranks or ()) for one in job.current().process_sets.values()} | {tuple(range(size))}
    for process_set in sets:
        ranks = tuple(process_set.ranks or ())
        if not ranks or ranks[-1] >= size:
            raise ValueError(f"{process_set}: ranks from 0 to {size - 1} are required")
        if ranks in known:
            raise ValueError(f"a process set of ranks {list(ranks)} already exists")
        known.add(ranks)


def register(sets: Sequence[ProcessSet]) -> None:
    """Assign numbers to sets. Every rank calls it with the same sets, in the same order.

    Raises ValueError, and registers none, if ranks name different sets, if two sets have the same ranks, or if a set
    has ranks outside the job.
    """
    this = job.current()
    _agree(sets, "add")
    _check(sets, this.place.size)
    for process_set in sets:
        number = this.number("process_set") + 1
        ranks = process_set.ranks or []
        if this.place.size > 1 and this.place.rank in ranks:
            this.comm.group(number, ranks)
        process_set.process_set_id = number
        this.process_sets[number] = process_set


def _check_dynamic() -> None:
    if not job.current().settings.dynamic_process_sets:
        raise ValueError(
            "process sets can be added and removed after init() only with HOROVOD_DYNAMIC_PROCESS_SETS=1 or "
            'init(process_sets="dynamic")'
        )


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a set after init(), and return it. Every rank calls it, members or not.

    Raises ValueError as register(), and if dynamic process sets are not enabled.
    """
    _check_dynamic()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    register([added])
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set. Returns True if it was registered and is not the global set. Every rank calls it.

    Raises ValueError, and removes none, if ranks name different sets or dynamic process sets are not enabled.
    """
    _check_dynamic()
    number = process_set.process_set_id
    if number is None or number == GLOBAL:
        return False
    _agree([process_set], "remove")
    process_set.process_set_id = None
    return job.current().process_sets.pop(number, None) is not None
