"""Do DDP's own times of its backward passes agree with ours? Told in the rank's record, and as a warning where not.

DDP stamps on the wall clock when each gradient came to it, when it gave away its first bucket and when it had all of
them back. Each of these moments lies between two stamps of ours, so no tolerance is needed but for laying one clock on
the other: ours of a gradient comes just before DDP's, and the next stamp of ours after it.
"""

import logging
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel

from netbottleneck.hooks.reducer_group import ReducerGroup
from netbottleneck.runtime import job
from netbottleneck.runtime.run_folder import RANKS
from netbottleneck.runtime.session import Session
from netbottleneck.trace.recorder import EVENTS
from netbottleneck.trace.ring_files import read_ring

FIRST, EVERY = 10, 100  # DDP keeps the times of its first passes, then of every so many
SLEW = 2000  # ns in which a clock that is being set right goes wrong by one

logger = logging.getLogger("netbottleneck")


@dataclass(frozen=True)
class Sample:
    """DDP's times of one pass, by the clock of the records, each right to `error_ns`.

    ready_ns: of each parameter, where DDP was asked in time.
    """

    begin_ns: int
    sent_ns: int
    end_ns: int
    error_ns: int
    ready_ns: tuple[int, ...]


class Pass(NamedTuple):
    """A backward pass by us, ns: first bucket sent, wait for all buckets begun and ended."""

    sent_ns: int
    wait_begin_ns: int
    wait_end_ns: int


class Apart(NamedTuple):
    """A moment that DDP puts elsewhere: how many ns outside of the two stamps of ours that it must lie between."""

    what: str
    ns: int


class Crosscheck:
    """Collects DDP's times between steps, and compares when the session closes."""

    def __init__(self, ddp: DistributedDataParallel, hook: ReducerGroup, session: Session) -> None:
        self._ddp = weakref.ref(ddp)
        self._hook = hook
        self._session = session
        self._static = bool(ddp.static_graph)  # DDP then holds all gradients back until the last one is there
        self._samples: list[tuple[Sample, int]] = []  # and when, by us, the first bucket of the pass was sent
        self._seen = 0
        self._last: tuple[int, list[int]] = (0, [])
        self._offsets: deque[int] = deque(maxlen=3)  # of the wall clock, at the looks that a pass lies between

    def look(self) -> None:
        """Keep what DDP knows of the pass before the last one. Between two steps."""
        ddp, count = self._ddp(), self._hook.count
        if ddp is None:
            return
        if count > FIRST + 2 and count % EVERY > 2:
            self._offsets.clear()
            return
        before, wall, after = job.core().now_ns(), time.time_ns(), job.core().now_ns()
        self._offsets.append(wall - (before + after) // 2)
        data: Mapping[str, Any] = ddp._get_ddp_logging_data()
        if int(data.get("iteration", 0)) > self._seen and "backward_comm_time_end" in data:
            self._seen = int(data["iteration"])
            self._keep(data, after, (after - before) // 2)
        if self._hook.sent_ns:
            self._last = (self._hook.sent_ns, list(ddp.reducer.get_backward_stats()))

    def _keep(self, data: Mapping[str, Any], now_ns: int, error: int) -> None:
        sent_ns, stats = self._last
        moved = max(self._offsets) - min(self._offsets)  # a clock that is set goes wrong at once
        begin, sent, end = (
            int(data[f"backward_{what}"]) - self._offsets[-1]
            for what in ("compute_time_start", "comm_time_start", "comm_time_end")
        )
        error += moved + (now_ns - end) // SLEW + 1
        if sent_ns and begin - error <= sent_ns <= end + error:
            ready = () if self._static else tuple(begin + each for each in stats)
            self._samples.append((Sample(begin, sent, end, error, ready), sent_ns))

    def compare(self) -> None:
        """Compare what was kept with this rank's ring, and tell."""
        ring = read_ring(self._session.folder / RANKS / f"{self._session.place.rank}.train.ring")
        kinds = ring.events["kind"]
        ready = ring.events[kinds == EVENTS["GRAD_READY"]]
        begins, ends = (ring.events[kinds == EVENTS[kind]]["time_ns"] for kind in ("WAIT_BEGIN", "WAIT_END"))
        found = []
        for sample, sent_ns in self._samples:
            ours = _pass(sent_ns, begins, ends)
            if ours is not None:
                found += compared(sample, ours, ready["time_ns"], ready["key"])
        worst = max(found, key=lambda apart: apart.ns, default=None)
        self._session.described["ddp_times"] = {
            "passes": len(self._samples),
            "gradients": sum(len(sample.ready_ns) for sample, _ in self._samples),
            "apart": len(found),
            "worst": worst and {"what": worst.what, "ns": worst.ns},
        }
        if worst is not None:
            logger.warning(
                "DDP's own times of %d passes and ours are apart at %d moments, most at %s: %d us",
                len(self._samples),
                len(found),
                worst.what,
                worst.ns // 1000,
            )


def _pass(sent_ns: int, begins: NDArray[Any], ends: NDArray[Any]) -> Pass | None:
    """Return the pass with the first wait after a moment; None: it was not recorded."""
    begin = np.searchsorted(begins, sent_ns)
    end = np.searchsorted(ends, begins[begin]) if begin < len(begins) else len(ends)
    return Pass(sent_ns, int(begins[begin]), int(ends[end])) if end < len(ends) else None


def compared(sample: Sample, ours: Pass, times: NDArray[Any], keys: NDArray[Any]) -> list[Apart]:
    """Return the moments that DDP puts elsewhere.

    ours: the same pass by us. times, keys: when which gradient was ready, by us, in order of time. Gradients that we
    did not see in this pass, for no backward pass reached them, are left out.
    """
    low, high = np.searchsorted(times, [sample.begin_ns - sample.error_ns, ours.wait_end_ns])
    mine = {int(key): int(at) for key, at in zip(keys[low:high], times[low:high], strict=True)}
    if not mine:
        return []
    stamps = sorted([*mine.values(), ours.wait_begin_ns])
    places: list[tuple[str, int, int, int | None]] = [
        ("the first bucket sent", sample.sent_ns, stamps[0], ours.sent_ns),
        ("all buckets back", sample.end_ns, ours.wait_begin_ns, ours.wait_end_ns),
    ]
    for index, at in enumerate(sample.ready_ns):
        if index in mine:
            places.append((f"gradient {index}", at, mine[index], _next(stamps, mine[index])))
    outside = [(what, _outside(at, begin, end) - sample.error_ns) for what, at, begin, end in places]
    return [Apart(what, ns) for what, ns in outside if ns > 0]


def _next(stamps: Sequence[int], at: int) -> int | None:
    place = bisect_right(stamps, at)
    return stamps[place] if place < len(stamps) else None


def _outside(at: int, begin: int, end: int | None) -> int:
    """Return by how much a moment lies outside of an interval, which has no end where that is None."""
    return max(begin - at, at - end if end is not None else 0, 0)
