"""What a rank's events say, by name: steps, operations, faults, costs. Pure; recorder.py turns rings into events."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from netbottleneck.trace import model as tr

# The numbers inside OP_SUBMIT and OP_DONE: csrc/engine/engine.h, csrc/base/dtype.h, csrc/coll/choose.h.
KINDS = ("allreduce", "allgather", "reducescatter", "broadcast", "barrier", "alltoall", "join")
DTYPES = ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
# csrc/coll/choose.h, enum nb_algorithm.
ALGORITHMS = (
    None,
    "ring all-reduce",
    "ring all-gather",
    "ring reduce-scatter",
    "chain broadcast",
    "recursive doubling",
    "halving-doubling",
    "pairwise all-to-all",
    "star",
)
# csrc/engine/local.h: what takes the place of a schedule where ranks share memory.
IN_MEMORY = {32: "shared memory", 33: "staged shared memory", 34: "two_level"}


class Event(NamedTuple):
    """One stamp. a…e as csrc/trace/event.h says, unsigned."""

    kind: str
    time_ns: int
    step: int
    key: int
    a: int
    b: int
    c: int
    d: int
    e: int


def signed(value: int, bits: int = 64) -> int:
    """The two's complement number in the low `bits` of value."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _named(table: Sequence[str | None], number: int) -> str | None:
    return table[number] if number < len(table) else str(number)


@dataclass(slots=True)
class _OpenStep:
    """A step that has begun: intervals are collected until it ends."""

    event: Event
    forward: list[tr.Interval] = field(default_factory=list)
    optimizer: list[tr.Interval] = field(default_factory=list)
    modules: list[tuple[int, int, int]] = field(default_factory=list)
    grad_ready: list[tuple[int, int]] = field(default_factory=list)
    waits: list[tuple[int, int, int]] = field(default_factory=list)
    begun: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def take(self, event: Event) -> None:
        if event.kind == "GRAD_READY":
            self.grad_ready.append((event.key, event.time_ns))
            return
        what, _, edge = event.kind.partition("_")
        if edge == "BEGIN":
            self.begun.setdefault((what, event.key), []).append(event.time_ns)
        elif edge == "END" and self.begun.get((what, event.key)):
            begin = self.begun[what, event.key].pop()
            if what == "FORWARD" and event.key:
                self.modules.append((event.key - 1, begin, event.time_ns))
            elif what == "FORWARD":
                self.forward.append((begin, event.time_ns))
            elif what == "OPTIMIZER":
                self.optimizer.append((begin, event.time_ns))
            elif what == "WAIT":
                self.waits.append((event.key, begin, event.time_ns))


def steps(
    events: Iterable[Event], rank: int, transports: Sequence[str], plan: str | None
) -> tuple[list[tr.Step], int, bool]:
    """The finished steps of a rank's training thread, how many were begun anew, and whether the last is still open."""
    finished: list[tr.Step] = []
    current: _OpenStep | None = None
    unfinished = 0
    for event in events:
        if event.kind == "STEP_BEGIN":
            unfinished += current is not None
            current = _OpenStep(event)
        elif current is None:
            continue
        elif event.kind == "STEP_END":
            begin = current.event
            finished.append(
                tr.Step(
                    rank=rank,
                    index=begin.step,
                    block=begin.a,
                    transport=_named(transports, begin.b) or "",
                    begin_ns=begin.time_ns,
                    end_ns=event.time_ns,
                    plan=plan,
                    sampled=begin.c == 1,
                    forward=tuple(current.forward),
                    optimizer=tuple(current.optimizer),
                    modules=tuple(current.modules),
                    grad_ready=tuple(current.grad_ready),
                    waits=tuple(current.waits),
                    cpu_ns=event.d - begin.d if begin.d and event.d else None,
                )
            )
            current = None
        else:
            current.take(event)
    return finished, unfinished, current is not None


class StepIndex:
    """Which step of one rank a moment lies in."""

    def __init__(self, rank_steps: Sequence[tr.Step]) -> None:
        self._steps = sorted(rank_steps, key=lambda s: s.begin_ns)
        self._begins = [s.begin_ns for s in self._steps]

    def at(self, time_ns: int) -> tr.Step | None:
        place = bisect.bisect_right(self._begins, time_ns) - 1
        return self._steps[place] if place >= 0 and time_ns <= self._steps[place].end_ns else None


class BucketIndex:
    """Which bucket an operation carries: by key, else by its number where the bytes agree."""

    def __init__(self, buckets: Sequence[tr.Bucket]) -> None:
        self._buckets = buckets
        self._by_key = {bucket.key: index for index, bucket in enumerate(buckets)}

    def find(self, submit: Event) -> int | None:
        number = submit.c - 1
        if submit.key in self._by_key:
            return self._by_key[submit.key]
        if 0 <= number < len(self._buckets) and self._buckets[number].bytes == submit.b:
            return number
        return None

    def dtype(self, index: int | None) -> str | None:
        """The type that the bucket was described with."""
        return self._buckets[index].dtype if index is not None else None

    def name(self, index: int | None, key: int) -> str:
        return self._buckets[index].name if index is not None else f"{key:016x}"


_MARK: Mapping[str, str] = MappingProxyType(
    {"OP_AGREED": "agreed_ns", "OP_START": "start_ns", "OP_FIRST_BYTE": "first_byte_ns", "OP_DONE": "done_ns"}
)

_ORDER: Mapping[str, int] = MappingProxyType(
    {"OP_SUBMIT": 0, "OP_LANE": 5} | {kind: i for i, kind in enumerate(_MARK, 1)}
)


def collectives(
    events: Iterable[Event], rank: int, transport: str | None, in_steps: StepIndex, buckets: BucketIndex
) -> list[tr.Collective]:
    """The operations among `events`, in order of submission.

    transport None: that of the step they were submitted in; what only a native transport knows stays None. A key and
    round that come again are counted on, so that operations whose writer gives no round match across ranks too.
    """
    rows: list[dict[str, Any]] = []
    pending: dict[tuple[int, int], dict[str, Any]] = {}
    times: Counter[tuple[int, int]] = Counter()
    # Several threads stamp: at one moment, what must have happened first comes first.
    own = (event for event in events if event.kind in _ORDER)
    for event in sorted(own, key=lambda e: (e.time_ns, _ORDER[e.kind])):
        if event.kind == "OP_SUBMIT":
            step = in_steps.at(event.time_ns)
            bucket = buckets.find(event)
            row: dict[str, Any] = {
                "rank": rank,
                "transport": transport or (step.transport if step else "stock"),
                "key": event.key,
                "round": event.a + times[event.key, event.a],
                "submit_ns": event.time_ns,
                "tensor_bytes": event.b,
                "name": buckets.name(bucket, event.key),
                "step": step.index if step else None,
                "comm": event.d,
                "kind": _named(KINDS, event.e & 0xFF),
                "dtype": buckets.dtype(bucket) or _named(DTYPES, event.e >> 8 & 0xFF),
                "priority": signed(event.e >> 32, 32),
                "bucket": bucket,
                "lanes": [],
            }
            rows.append(row)
            pending[event.key, event.a] = row
            times[event.key, event.a] += 1
        else:
            _mark(pending.get((event.key, event.a)), event, native=transport is not None)
    for row in rows:
        row["lanes"] = tuple(sorted(row["lanes"])) or None
    return [tr.Collective(**row) for row in rows]


def _mark(row: dict[str, Any] | None, event: Event, native: bool) -> None:
    if row is None:
        return
    if event.kind == "OP_LANE":
        row["lanes"].append((event.b, event.c, event.d))
        return
    row[_MARK[event.kind]] = event.time_ns
    if event.kind == "OP_DONE":
        row["error"] = signed(event.e)
        if native:
            row["wire_bytes"] = event.b
            row["algorithm"] = IN_MEMORY.get(event.d) or _named(ALGORITHMS, event.d)


def faults(events: Iterable[Event], rank: int, size: int) -> list[tr.Fault]:
    """Stalls and lost peers and lanes."""
    found = []
    for e in events:
        if e.kind == "STALL":
            missing = tuple(peer for peer in range(min(size, 64)) if e.c >> peer & 1)
            found.append(tr.Fault(rank, "stall", e.time_ns, missing, key=e.key, waited_ns=e.b))
        elif e.kind == "PEER_LOST":
            found.append(tr.Fault(rank, "peer_lost", e.time_ns, (e.a,), code=signed(e.b)))
        elif e.kind == "LANE_LOST":
            found.append(tr.Fault(rank, "lane_lost", e.time_ns, (e.a,), lane=e.b, code=signed(e.c)))
    return found


def probes(events: Iterable[Event]) -> tuple[tr.Probe, ...]:
    """What each number of streams reached."""
    return tuple(tr.Probe(e.a, e.b, e.c) for e in events if e.kind == "PROBE")


def costs(events: Iterable[Event]) -> tuple[float, ...]:
    """Ns of a step, of a byte on the wire and of a byte that is added, as they were known last; else nothing.

    Where sums may take two levels, also ns of these, and of a byte there beside its time on the wire.
    """
    last = next((e for e in reversed(list(events)) if e.kind == "COSTS"), None)
    fs = () if last is None else (last.a, last.b, last.c, *((last.d, last.e) if last.d else ()))
    return tuple(value / 1e6 for value in fs)
