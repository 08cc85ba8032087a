"""A rank's ring events as events of Horovod's timeline. Pure: no clock, no file; timeline_writer.py has those.

A "process" of the Chrome trace is a tensor, as in Horovod: NEGOTIATE_x from the first rank's word to the agreement, in
it an X event for each rank that is ready; then x, in it QUEUE and the activity, such as TCP_ALLREDUCE.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from netbottleneck.runtime.timeline_names import TENSORS_MAX, Names
from netbottleneck.trace.events import ALGORITHMS, DTYPES, IN_MEMORY, KINDS, Event, signed

ChromeEvent = dict[str, Any]

# What a timeline is made of, by name in csrc/trace/event.h.
USED = (
    "OP_SUBMIT",
    "OP_AGREED",
    "OP_START",
    "OP_FIRST_BYTE",
    "OP_DONE",
    "OP_NAME",
    "OP_READY",
    "OP_PACK",
    "CLOCK",
    "STALL",
    "PEER_LOST",
    "LANE_LOST",
)
WORDS = frozenset({"BARRIER", "JOIN"})  # there is no part to them but the negotiation
# csrc/engine/local.h: all of it in memory that ranks share. The star's messages go over the control connections.
SHARED = frozenset({32, 33})
STAR = ALGORITHMS.index("star")
BYTES_OF = {"uint8": 1, "int8": 1, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
MARKS = {"OP_AGREED": "agreed_ns", "OP_START": "start_ns", "OP_FIRST_BYTE": "first_byte_ns"}


@dataclass(slots=True)
class _Operation:
    """One round of a tensor, as far as it is known; times in ns."""

    round: int
    kind: str = ""
    dtype: str = ""
    nbytes: int = 0
    submit_ns: int | None = None
    agreed_ns: int | None = None
    start_ns: int | None = None
    first_byte_ns: int | None = None
    unpack: tuple[int, int] | None = None  # begin, end
    done: Event | None = None
    top: bool = False  # the agreement is told


@dataclass(slots=True)
class _Tensor:
    pid: int = 0  # 0: nothing of it is told
    kind: str = ""  # as some rank announced it
    operation: _Operation | None = None
    negotiating_ns: int | None = None  # when the open NEGOTIATE began
    ready: list[tuple[int, int]] = field(default_factory=list)  # (rank, ns), not told
    packs: list[tuple[int, int]] = field(default_factory=list)  # (begin, end), not told
    reached_ns: int = 0  # the end of what is told
    abandoned_ns: int | None = None  # when one was begun whose end was lost: the next one's submit


class Chrome:
    """Events of one rank, in the order of its ring, to events of one timeline file.

    rank: whose rings they are. start_ns: the file's time 0. What Horovod has in its file comes under the same names,
    B and E of a tensor in pairs; what was under way when the file began is left out.
    """

    def __init__(self, names: Names, *, rank: int, start_ns: int, mark_cycles: bool = False) -> None:
        self._names = names
        self._rank = rank
        self._network = ""
        self._start_ns = start_ns
        self.mark_cycles = mark_cycles
        self._cycle_ns = -1
        self._round_trip_ns: int | None = None
        self._tensors: dict[int, _Tensor] = {}
        self._pids = 0

    def head(self, start_wall_ns: int) -> list[ChromeEvent]:
        """The first events of a file: Horovod's, and what is needed to lay ranks' files on one clock."""
        about = {
            "start_time_since_epoch_in_micros": start_wall_ns // 1000,
            "rank": self._rank,
            "start_monotonic_ns": self._start_ns,
        }
        return [
            {"name": "process_name", "ph": "M", "pid": 0, "args": about},
            {"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},
        ]

    def lost(self, count: int, time_ns: int) -> ChromeEvent:
        """What says that this many events before this moment could not be read."""
        return self._instant("EVENTS_LOST", time_ns, {"count": count})

    def take(self, event: Event, network: str) -> Iterator[ChromeEvent]:
        """Yield what an event adds to the file.

        network: TCP or OFI, what the transport of this ring uses: an activity's name begins so.
        """
        self._network = network
        if event.kind == "CLOCK":
            yield from self._clock(event)
        elif event.kind in ("PEER_LOST", "LANE_LOST"):
            yield self._instant(event.kind, event.time_ns, {"rank": event.a})
        elif event.kind == "STALL":
            missing = [rank for rank in range(64) if event.c >> rank & 1]
            about = {"name": self._names.find(event.key), "waited_ms": event.b // 10**6, "missing_ranks": missing}
            yield self._instant("STALL", event.time_ns, about)
        elif event.kind in USED and event.kind != "OP_NAME":
            tensor = self._tensor(event.key)
            self._learn(tensor, event)
            if self.mark_cycles and event.kind == "OP_AGREED":
                yield from self._cycle(tensor, event)
            yield from self._tell(tensor, event.key)

    def _tensor(self, key: int) -> _Tensor:
        if key not in self._tensors and len(self._tensors) >= TENSORS_MAX:
            self._tensors = {k: t for k, t in self._tensors.items() if t.operation is not None or t.ready}
        return self._tensors.setdefault(key, _Tensor())

    def _learn(self, tensor: _Tensor, event: Event) -> None:
        """Put an event where it belongs. A submit may come after what follows it: another thread stamps it."""
        if event.kind == "OP_READY":
            tensor.kind = _kind(event.d)
            tensor.ready.append((event.b, event.time_ns))
            return
        if event.kind == "OP_PACK" and event.c == 0:
            tensor.packs.append((event.time_ns, event.time_ns + event.d))
            return
        if tensor.operation is None or tensor.operation.round != event.a:
            if tensor.operation is not None and tensor.operation.top and tensor.operation.kind not in WORDS:
                tensor.abandoned_ns = event.time_ns
            tensor.operation = _Operation(event.a)
        operation = tensor.operation
        if event.kind == "OP_SUBMIT":
            tensor.kind = operation.kind = _kind(event.e & 0xFF)
            operation.dtype = _of(DTYPES, event.e >> 8 & 0xFF)
            operation.nbytes = event.b
            operation.submit_ns = event.time_ns
            if self._rank != 0:  # rank 0 alone has the others' word
                tensor.ready.append((self._rank, event.time_ns))
        elif event.kind == "OP_PACK":
            operation.unpack = (event.time_ns, event.time_ns + event.d)
        elif event.kind == "OP_DONE":
            operation.done = event
        else:
            setattr(operation, MARKS[event.kind], event.time_ns)

    def _cycle(self, tensor: _Tensor, event: Event) -> Iterator[ChromeEvent]:
        """There are no fixed cycles: one begins with the word on an operation submitted since the last one began."""
        submitted_ns = tensor.operation.submit_ns if tensor.operation is not None else None
        if submitted_ns is None or submitted_ns > self._cycle_ns:
            self._cycle_ns = event.time_ns
            yield self._instant("CYCLE_START", event.time_ns)

    def _tell(self, tensor: _Tensor, key: int) -> Iterator[ChromeEvent]:
        """Tell what is known and not told of a tensor: in the order of the stages, whatever order they came in."""
        operation = tensor.operation
        if tensor.abandoned_ns is not None:
            yield self._finish(tensor, tensor.abandoned_ns, {"end": "lost"})
            tensor.reached_ns, tensor.abandoned_ns = tensor.abandoned_ns, None
        submitted = operation is not None and operation.submit_ns is not None
        if not submitted and self._names.find(key) is None:
            return  # who it is will be known when it is submitted here
        if operation is None or not operation.top:
            yield from self._negotiation(tensor, key, operation)
        if operation is None or operation.submit_ns is None:
            return
        if operation.agreed_ns is not None and not operation.top:
            yield from self._agreement(tensor, operation.agreed_ns, operation)
        if operation.done is not None:
            yield from self._end(tensor, operation, operation.done)
            tensor.reached_ns = operation.done.time_ns
            tensor.operation = None
            if tensor.ready:  # others have submitted the next round already
                yield from self._negotiation(tensor, key, None)

    def _negotiation(self, tensor: _Tensor, key: int, operation: _Operation | None) -> Iterator[ChromeEvent]:
        times = [at for _, at in tensor.ready]
        if operation is not None and operation.submit_ns is not None:
            times.append(operation.submit_ns)
        if times or tensor.packs:
            yield from self._introduction(tensor, key)
        yield from self._packs(tensor)
        if times and tensor.negotiating_ns is None:
            tensor.negotiating_ns = max(tensor.reached_ns, min(times))
            yield self._begin(tensor, f"NEGOTIATE_{tensor.kind}", tensor.negotiating_ns)
        for rank, at in tensor.ready:
            yield {"ph": "X", "name": str(rank), "ts": self._ts(at), "pid": tensor.pid, "dur": 0}
        tensor.ready.clear()

    def _introduction(self, tensor: _Tensor, key: int) -> Iterator[ChromeEvent]:
        if tensor.pid:
            return
        self._pids += 1
        tensor.pid = self._pids
        name = self._names.find(key) or f"{key:016x}"
        yield {"name": "process_name", "ph": "M", "pid": tensor.pid, "args": {"name": name}}
        yield {"name": "process_sort_index", "ph": "M", "pid": tensor.pid, "args": {"sort_index": tensor.pid}}

    def _packs(self, tensor: _Tensor) -> Iterator[ChromeEvent]:
        """Pieces are joined on the thread that submits, before it does: others may have submitted by then."""
        for begin_ns, end_ns in tensor.packs:
            from_ns = max(begin_ns, tensor.reached_ns, tensor.negotiating_ns or 0)
            yield self._begin(tensor, "MEMCPY_IN_FUSION_BUFFER", from_ns)
            yield self._finish(tensor, max(from_ns, end_ns))
            tensor.reached_ns = max(from_ns, end_ns)
        tensor.packs.clear()

    def _agreement(self, tensor: _Tensor, agreed_ns: int, operation: _Operation) -> Iterator[ChromeEvent]:
        operation.top = True
        yield self._finish(tensor, max(agreed_ns, tensor.negotiating_ns or 0))
        tensor.negotiating_ns = None
        if operation.kind not in WORDS:
            yield self._begin(tensor, operation.kind, agreed_ns)

    def _end(self, tensor: _Tensor, operation: _Operation, done: Event) -> Iterator[ChromeEvent]:
        failed = {"error": signed(done.e)} if done.e else {}
        if operation.agreed_ns is None:  # refused, or of one rank alone
            yield self._finish(tensor, done.time_ns, failed)
            tensor.negotiating_ns = None
            if not failed and operation.kind not in WORDS:
                yield self._begin(tensor, operation.kind, done.time_ns)
                yield self._finish(tensor, done.time_ns, _content(operation))
            return
        if operation.kind in WORDS:
            return
        yield from self._activities(tensor, operation, operation.agreed_ns, done)
        yield self._finish(tensor, done.time_ns, {**_content(operation), **failed})

    def _activities(self, tensor: _Tensor, operation: _Operation, agreed_ns: int, done: Event) -> Iterator[ChromeEvent]:
        start_ns = operation.start_ns
        if start_ns is None:  # it failed before it was begun
            return
        if start_ns > agreed_ns:
            yield self._begin(tensor, "QUEUE", agreed_ns)
            yield self._finish(tensor, start_ns)
        about: dict[str, object] = {
            "algorithm": IN_MEMORY.get(done.d) or _of(ALGORITHMS, done.d),
            "bytes_out": done.b,
            "bytes_in": done.c,
        }
        if operation.first_byte_ns is not None:
            about["first_byte_ts"] = self._ts(operation.first_byte_ns)
        end_ns = operation.unpack[0] if operation.unpack is not None else done.time_ns
        yield self._begin(tensor, self._activity(operation.kind, done.d), start_ns, about)
        yield self._finish(tensor, end_ns)
        if operation.unpack is not None:
            yield self._begin(tensor, "MEMCPY_OUT_FUSION_BUFFER", operation.unpack[0])
            yield self._finish(tensor, operation.unpack[1])

    def _activity(self, kind: str, algorithm: int) -> str:
        network = "SHM" if algorithm in SHARED else "TCP" if algorithm == STAR else self._network
        return f"{network}_{'BCAST' if kind == 'BROADCAST' else kind}"

    def _clock(self, event: Event) -> Iterator[ChromeEvent]:
        """Tell how far this clock is before rank 0's, each time it is known better."""
        if self._round_trip_ns is None or event.b < self._round_trip_ns:
            self._round_trip_ns = event.b
            about = {"before_rank_0_ns": signed(event.a), "round_trip_ns": event.b}
            yield {"name": "clock", "ph": "M", "pid": 0, "args": about}

    def _ts(self, time_ns: int) -> int:
        return max(0, time_ns - self._start_ns) // 1000

    def _begin(
        self, tensor: _Tensor, name: str, time_ns: int, about: Mapping[str, object] | None = None
    ) -> ChromeEvent:
        made = {"ph": "B", "name": name, "ts": self._ts(time_ns), "pid": tensor.pid}
        return {**made, "args": about} if about else made

    def _finish(self, tensor: _Tensor, time_ns: int, about: Mapping[str, object] | None = None) -> ChromeEvent:
        made = {"ph": "E", "ts": self._ts(time_ns), "pid": tensor.pid}
        return {**made, "args": about} if about else made

    def _instant(self, name: str, time_ns: int, about: Mapping[str, object] | None = None) -> ChromeEvent:
        made = {"ph": "i", "name": name, "ts": self._ts(time_ns), "s": "g"}
        return {**made, "args": about} if about else made


def _of(table: tuple[str | None, ...], number: int) -> str:
    return (table[number] if number < len(table) else None) or str(number)


def _kind(number: int) -> str:
    return _of(KINDS, number).upper()


def _content(operation: _Operation) -> dict[str, object]:
    """What Horovod says at the end of an operation; the engine knows a line of elements, not its shape."""
    return {"dtype": operation.dtype, "shape": f"[{operation.nbytes // BYTES_OF.get(operation.dtype, 1)}]"}
