"""Process sets: which of a job's ranks an operation is of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from netbottleneck.runtime import job

GLOBAL = 0


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks that an operation is of, on one of them.

    number: of the engine's group, 0: all ranks. ranks: of the job, rising. rank: this process's place among them.
    """

    number: int
    ranks: Sequence[int]
    rank: int

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.ranks)

    def place(self, rank: int, what: str = "root_rank") -> int:
        """Return the place of a rank of the job among them; ValueError naming `what` where it has none."""
        if rank not in self.ranks:
            among = f"a job of {self.size}" if self.number == GLOBAL else f"the process set of ranks {list(self.ranks)}"
            raise ValueError(f"{what}={rank} is no rank of {among}")
        return self.ranks.index(rank)


class ProcessSet:
    """Some of a job's ranks. It can be used once all ranks have given it to init() or add_process_set()."""

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        """Name the ranks, in any order; ValueError for what is no list of different ranks."""
        if hasattr(ranks_or_comm, "Get_size"):
            raise ValueError("a process set of an MPI communicator is not supported: give the list of its ranks")
        given = [int(rank) for rank in ranks_or_comm]
        if not given or min(given) < 0 or len(set(given)) < len(given):
            raise ValueError(f"ProcessSet({given}): a list of different ranks, 0 or above, is required")
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = sorted(given)

    def _known(self) -> "job.Job | None":
        if self.process_set_id is None or not job.is_started():
            return None
        return job.current()

    def size(self) -> int | None:
        """Return the number of its ranks; None where it is not registered."""
        return None if self._known() is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's place in it; None where it is not registered, ValueError where it is none of it."""
        known = self._known()
        if known is None or self.ranks is None:
            return None
        if known.place.rank not in self.ranks:
            raise ValueError(f"rank {known.place.rank} is not part of {self}")
        return self.ranks.index(known.place.rank)

    def included(self) -> bool | None:
        """Return whether this process is part of it; None where it is not registered."""
        known = self._known()
        return None if known is None or self.ranks is None else known.place.rank in self.ranks

    def __str__(self) -> str:
        """Name number and ranks."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


class _AllRanks(ProcessSet):
    """All ranks of the job that runs."""

    process_set_id: int | None = GLOBAL

    def __init__(self) -> None:
        pass

    @property
    def ranks(self) -> list[int] | None:
        """All of them; None before init()."""
        return list(range(job.current().place.size)) if job.is_started() else None

    @ranks.setter
    def ranks(self, ranks: Any) -> None:
        raise AttributeError("the global process set has all ranks")


global_process_set: ProcessSet = _AllRanks()


def members_of(process_set: ProcessSet) -> Members:
    """Return its ranks as operations need them.

    Raises ValueError before init(), where the set is not registered, and where this process is none of it.
    """
    this = job.current()
    if process_set is global_process_set:
        return Members(GLOBAL, range(this.place.size), this.place.rank)
    if process_set.process_set_id is None or process_set.ranks is None:
        raise ValueError(f"{process_set} is not registered: give it to init() or add_process_set() on every rank")
    if this.place.rank not in process_set.ranks:
        raise ValueError(f"rank {this.place.rank} is not part of {process_set}")
    return Members(process_set.process_set_id, process_set.ranks, process_set.ranks.index(this.place.rank))
