"""Names of operations: the same on all ranks that call alike; used again, so that the engine knows them by number."""

import zlib
from collections.abc import Hashable

from netbottleneck.torch.backend.moves import Move
from netbottleneck.torch.backend.under_way import Operation

SLOTS = 16  # of operations that are alike, under way at the same time; more wait for these
SERIES = 4096  # of those between the same ranks
LABELS_MAX = 4096  # that are kept ready


class _Series:
    __slots__ = ("count", "last")

    def __init__(self) -> None:
        self.count = 0
        self.last: dict[int, Operation] = {}


class Names:
    """The names of a process group's operations.

    Those that are alike take names in turn, in the order in which they begin, which is the same on all their ranks.
    Others may begin in another order on each rank, as those do that callbacks of futures begin.
    """

    def __init__(self, number: int) -> None:
        self._group = f"torch group {number}"
        self._labels: dict[Hashable, tuple[Hashable, str]] = {}
        self._series: dict[Hashable, _Series] = {}

    def take(self, move: Move, operation: Operation) -> tuple[str, Operation | None]:
        """Return a name for an operation, and who has it still; None: nobody."""
        key, label = self._label(move)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = _Series()
        at = series.count % SLOTS
        series.count += 1
        before, series.last[at] = series.last.get(at), operation
        return f"{label}.{at}", None if before is None or before.over(0.0) else before

    def _label(self, move: Move) -> tuple[Hashable, str]:
        signature = (move.way, move.signature())
        found = self._labels.get(signature)
        if found is None:
            number = zlib.crc32(repr(signature).encode()) % SERIES
            nbytes = sum(piece[1] for piece in move.memory)
            text = " ".join(filter(None, (self._group, move.way, move.kind.lower(), f"{nbytes} B")))
            if len(self._labels) >= LABELS_MAX:
                self._labels.clear()
            found = self._labels[signature] = ((move.way, number), f"{text} #{number}")
        return found
