"""Agreement on process sets: each gets the same number on all ranks, or none on any."""

from collections.abc import Iterable, Sequence

import numpy as np

from netbottleneck.runtime import async_operations, collectives, job
from netbottleneck.runtime.async_operations import GLOBAL, ProcessSet, global_process_set, members_of

DYNAMIC = "dynamic"


def _agree(sets: Sequence[ProcessSet], what: str) -> None:
    """Raise ValueError on every rank where ranks name different sets, or want something else with them."""
    among = members_of(global_process_set)
    words = f"{what} {[process_set.ranks for process_set in sets]}".encode()
    name = async_operations.label("process_sets", None)
    told = async_operations.Pending(collectives.allgather_steps(np.frombuffer(words, np.uint8), name, among)).wait()
    unlike = [rank for rank in range(among.size) if told[rank].tobytes() != told[0].tobytes()]
    if unlike:
        raise ValueError(
            f"all ranks must name the same process sets: rank 0 would {told[0].tobytes().decode()}, "
            f"rank {unlike[0]} {told[unlike[0]].tobytes().decode()}"
        )


def _check(sets: Sequence[ProcessSet], size: int) -> None:
    known = {tuple(one.ranks or ()) for one in job.current().process_sets.values()} | {tuple(range(size))}
    for process_set in sets:
        ranks = tuple(process_set.ranks or ())
        if not ranks or ranks[-1] >= size:
            raise ValueError(f"{process_set}: ranks from 0 to {size - 1} are required")
        if ranks in known:
            raise ValueError(f"a process set of ranks {list(ranks)} is there already")
        known.add(ranks)


def register(sets: Sequence[ProcessSet]) -> None:
    """Give sets their numbers. Every rank calls it with the same sets, in the same order.

    Raises ValueError, and registers none, where ranks name different ones, where two have the same ranks, or where a
    set has ranks that are not there.
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
    """Register a set after init(), and return it. Every rank calls it, also those that are none of it.

    Raises ValueError as register(), and where dynamic process sets were not asked for.
    """
    _check_dynamic()
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    register([made])
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a set back: True where it was registered, and not the global one. Every rank calls it.

    Raises ValueError where ranks name different sets, which then stay, and where dynamic ones were not asked for.
    """
    _check_dynamic()
    number = process_set.process_set_id
    if number is None or number == GLOBAL:
        return False
    _agree([process_set], "remove")
    process_set.process_set_id = None
    return job.current().process_sets.pop(number, None) is not None
