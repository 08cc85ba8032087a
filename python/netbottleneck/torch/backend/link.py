"""One communicator of the engine, under the process groups that share it."""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from netbottleneck.errors import HorovodInternalError
from netbottleneck.torch.backend.moves import Move, kind_code
from netbottleneck.torch.backend.under_way import Named, Progress

if TYPE_CHECKING:
    from netbottleneck import _core

# How long rank 0, which agrees the order of all operations, stays for ranks that have not left yet.
LEAVE_S = 5.0

logger = logging.getLogger("netbottleneck")


class Link:
    """A communicator of `size` ranks, and the store by which they met."""

    def __init__(self, comm: "_core.Comm", store: Any) -> None:
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.store = store
        self.progress = Progress()
        self.closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._groups: set[int] = set()

    def submit(self, move: Move, name: str, awaited: bool) -> Any:
        """Start an operation of the engine. Raises what ended the job."""
        if move.group and move.group not in self._groups:
            self.group(move.group, move.members)
        return self.comm.submit(
            name,
            kind_code(move.kind),
            move.memory,
            move.code,
            op=move.op,
            root=move.root,
            postscale=move.factor,
            keep=move.keep,
            awaited=awaited,
            group=move.group,
        )

    def group(self, number: int, ranks: Sequence[int]) -> None:
        """Let operations be of these ranks alone."""
        with self._lock:
            if number not in self._groups:
                self.comm.group(number, ranks)
                self._groups.add(number)

    def pair(self, one: int, other: int) -> int:
        """Return the number of the group of two ranks: the same on both; 0 where there are no others."""
        return 0 if self.size == 2 else self._pair_number(*sorted((one, other)))

    def _pair_number(self, low: int, high: int) -> int:
        return 1 + low * self.size + high

    def fresh_number(self) -> int:
        """Return a number for a group that no other has: one of its ranks asks."""
        return self.size * (self.size + 1) + int(self.store.add("netbottleneck/groups", 1))

    def tell(self) -> None:
        """Log what the communicator has to say: ranks that others wait for, lanes that were lost."""
        for notice in self.comm.notices():
            logger.warning("%s", notice)

    def missing(self, names: Sequence[Named]) -> list[int]:
        """Return the ranks that have not submitted one of these operations, as far as was told."""
        if self.closed:
            return []
        self.tell()
        known = [(name, group) for name, group in names if group == 0 or group in self._groups]
        return sorted({rank for name, group in known for rank in self.comm.missing(name, group)})

    @property
    def is_here(self) -> bool:
        """Whether this is the process that opened it, and no child of that."""
        return os.getpid() == self._process

    def abort(self, why: str) -> None:
        """Fail what is pending, on all ranks."""
        if not self.closed:
            self.comm.abort(why)
            self.close()

    def close(self) -> None:
        """End in good order; what is pending here fails. A second call changes nothing."""
        with self._lock:
            closed, self.closed = self.closed, True
        if closed:
            return
        try:
            self._take_leave()
        finally:
            self.comm.close()
            self.progress.close()

    def _take_leave(self) -> None:
        """Rank 0 leaves last, where that does not take long: without it the others cannot agree on anything."""
        if self.size == 1 or not self._is_well():
            return
        with contextlib.suppress(RuntimeError):  # the store may be gone
            if self.rank:
                self.store.add("netbottleneck/left", 1)
                return
            deadline = time.monotonic() + (0.0 if _has_failed() else LEAVE_S)
            pause_s = 0.001
            while self.store.add("netbottleneck/left", 0) < self.size - 1 and self._is_well():
                if time.monotonic() >= deadline:
                    return
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)

    def _is_well(self) -> bool:
        """Whether no rank was lost: an operation of this rank alone can be begun."""
        number = self._pair_number(self.rank, self.rank)
        alone = Move("BARRIER", [], 0, group=number, members=(self.rank,))
        try:
            return bool(self.submit(alone, "netbottleneck/alone", False).wait())
        except (OSError, HorovodInternalError):
            return False


def _has_failed() -> bool:
    """Whether this process ends because of an exception that nobody caught."""
    return getattr(sys, "last_type", None) is not None
