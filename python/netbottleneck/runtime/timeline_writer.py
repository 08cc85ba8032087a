"""Writer process of one rank's timeline: follows the rank's rings, and ends when the rank does.

It runs beside training, at low priority. Events that it cannot read in time are missing, and the file says so; no rank
waits. Commands are lines of JSON on stdin, each answered by one on stdout: {"do": "start", "path": …, "mark_cycles":
…}, {"do": "stop"}, {"do": "follow", "path": …, "network": …}. The answer is {} or {"error": …}.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netbottleneck.trace.events import Event, missing_ranks, signed
from netbottleneck.trace.ring_file import EVENTS, slots_of
from netbottleneck.trace.ring_reader import ALGORITHMS, DTYPES, IN_MEMORY, KINDS

# State from before the file began: names of operations, and open negotiations. Pure.

TENSORS_MAX = 1 << 16  # most names kept


def name_part(event: Event) -> bytes:
    """The 32 bytes of a name in an OP_NAME event, padded with zeros."""
    return b"".join(value.to_bytes(8, "little") for value in (event.b, event.c, event.d, event.e))


class Names:
    """Names of operations by key, from OP_NAME events; a name is valid once its operation is submitted."""

    def __init__(self) -> None:
        self._parts: dict[int, bytes] = {}
        self._names: dict[int, str] = {}

    def take(self, event: Event) -> None:
        if event.kind == "OP_NAME":
            before = self._parts.get(event.key, b"") if event.a else b""
            self._parts[event.key] = before[: event.a] + name_part(event)
        elif event.kind == "OP_SUBMIT" and event.key in self._parts:
            while len(self._names) >= TENSORS_MAX:
                del self._names[next(iter(self._names))]
            self._names[event.key] = self._parts.pop(event.key).rstrip(b"\0").decode("utf-8", "replace")

    def find(self, key: int) -> str | None:
        return self._names.get(key)


class Negotiations:
    """The events that opened each pending negotiation.

    A submit may follow the agreement on it and even its end, because another thread stamps it.
    """

    def __init__(self) -> None:
        self._open: dict[int, list[Event]] = {}
        self._ended: dict[int, int] = {}  # the last round of a tensor whose negotiation has ended

    def take(self, event: Event) -> None:
        late = event.kind == "OP_SUBMIT" and self._ended.get(event.key) == event.a
        if event.kind in ("OP_READY", "OP_SUBMIT") and not late:
            self._open.setdefault(event.key, []).append(event)
        elif event.kind == "OP_AGREED":
            self._open.pop(event.key, None)
            self._end(event)
        elif event.kind == "OP_DONE":
            if any(one.kind == "OP_SUBMIT" for one in self._open.get(event.key, ())):
                del self._open[event.key]  # the negotiation ended without success; what remains belongs to this round
            self._end(event)

    def _end(self, event: Event) -> None:
        if event.key not in self._ended and len(self._ended) >= TENSORS_MAX:
            del self._ended[next(iter(self._ended))]
        self._ended[event.key] = event.a

    def events(self) -> list[Event]:
        return [event for events in self._open.values() for event in events]


# Ring events of a rank as events of Horovod's timeline. Pure: no clock, no file.
#
# A "process" of the Chrome trace is a tensor, as in Horovod. NEGOTIATE_x runs from the first rank's submission to the
# end of negotiation, with an X event for each rank that is ready. Then x follows, with QUEUE and the activity, such as
# TCP_ALLREDUCE.

ChromeEvent = dict[str, Any]

# Event kinds that a timeline uses, by their names in csrc/trace/event.h.
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
NEGOTIATION_ONLY = frozenset({"BARRIER", "JOIN"})  # operations that move no data
# csrc/coll/choose.h: algorithms that use shared memory only. Inline all-reduces use the control connections.
SHARED = frozenset({32, 33})
INLINE = ALGORITHMS.index("inline all-reduce")
BYTES_OF = {"uint8": 1, "int8": 1, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
MARKS = {"OP_AGREED": "agreed_ns", "OP_START": "start_ns", "OP_FIRST_BYTE": "first_byte_ns"}


@dataclass(slots=True)
class _Operation:
    """One round of a tensor, as far as known; times in ns."""

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
    top: bool = False  # negotiation end has been written


@dataclass(slots=True)
class _Tensor:
    pid: int = 0  # 0: nothing has been written
    kind: str = ""  # as announced by some rank
    operation: _Operation | None = None
    negotiating_ns: int | None = None  # begin of the open NEGOTIATE
    ready: list[tuple[int, int]] = field(default_factory=list)  # (rank, ns), not yet written
    packs: list[tuple[int, int]] = field(default_factory=list)  # (begin, end), not yet written
    reached_ns: int = 0  # end of what has been written
    abandoned_ns: int | None = None  # submit of the next operation, if the end of this one was lost


class Chrome:
    """Converts one rank's events, in the order of its ring, to events of one timeline file.

    rank: owner of the rings. start_ns: time 0 of the file. Events of Horovod's timeline have the same names, with B and
    E of a tensor in pairs. Operations in progress when the file began are left out.
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
        """First events of a file: Horovod's, and the data needed to align ranks' files on one clock."""
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
        """Event that reports `count` lost events before this time."""
        return self._instant("EVENTS_LOST", time_ns, {"count": count})

    def take(self, event: Event, network: str) -> Iterator[ChromeEvent]:
        """Yield what an event adds to the file.

        network: TCP or OFI, the transport of this ring; activity names begin with it.
        """
        self._network = network
        if event.kind == "CLOCK":
            yield from self._clock(event)
        elif event.kind in ("PEER_LOST", "LANE_LOST"):
            yield self._instant(event.kind, event.time_ns, {"rank": event.a})
        elif event.kind == "STALL":
            missing, others = missing_ranks(event)
            about = {"name": self._names.find(event.key), "waited_ms": event.b // 10**6, "missing_ranks": list(missing)}
            about |= {"more_missing_ranks": others} if others else {}
            yield self._instant("STALL", event.time_ns, about)
        elif event.kind in USED and event.kind != "OP_NAME":
            tensor = self._tensor(event.key)
            self._learn(tensor, event)
            if self.mark_cycles and event.kind == "OP_AGREED":
                yield from self._cycle(tensor, event)
            yield from self._write_known(tensor, event.key)

    def _tensor(self, key: int) -> _Tensor:
        if key not in self._tensors and len(self._tensors) >= TENSORS_MAX:
            self._tensors = {k: t for k, t in self._tensors.items() if t.operation is not None or t.ready}
        return self._tensors.setdefault(key, _Tensor())

    def _learn(self, tensor: _Tensor, event: Event) -> None:
        """Store an event in its operation. A submit may follow later events, because another thread stamps it."""
        if event.kind == "OP_READY":
            tensor.kind = _kind(event.d)
            tensor.ready.append((event.b, event.time_ns))
            return
        if event.kind == "OP_PACK" and event.c == 0:
            tensor.packs.append((event.time_ns, event.time_ns + event.d))
            return
        if tensor.operation is None or tensor.operation.round != event.a:
            if tensor.operation is not None and tensor.operation.top and tensor.operation.kind not in NEGOTIATION_ONLY:
                tensor.abandoned_ns = event.time_ns
            tensor.operation = _Operation(event.a)
        operation = tensor.operation
        if event.kind == "OP_SUBMIT":
            tensor.kind = operation.kind = _kind(event.e & 0xFF)
            operation.dtype = _of(DTYPES, event.e >> 8 & 0xFF)
            operation.nbytes = event.b
            operation.submit_ns = event.time_ns
            if self._rank != 0:  # only rank 0 knows the other ranks' submissions
                tensor.ready.append((self._rank, event.time_ns))
        elif event.kind == "OP_PACK":
            operation.unpack = (event.time_ns, event.time_ns + event.d)
        elif event.kind == "OP_DONE":
            operation.done = event
        else:
            setattr(operation, MARKS[event.kind], event.time_ns)

    def _cycle(self, tensor: _Tensor, event: Event) -> Iterator[ChromeEvent]:
        """A cycle begins when the first operation submitted since the last cycle ends its negotiation."""
        submitted_ns = tensor.operation.submit_ns if tensor.operation is not None else None
        if submitted_ns is None or submitted_ns > self._cycle_ns:
            self._cycle_ns = event.time_ns
            yield self._instant("CYCLE_START", event.time_ns)

    def _write_known(self, tensor: _Tensor, key: int) -> Iterator[ChromeEvent]:
        """Yield what is known and not yet written of a tensor, in the order of the stages, not of arrival."""
        operation = tensor.operation
        if tensor.abandoned_ns is not None:
            yield self._finish(tensor, tensor.abandoned_ns, {"end": "lost"})
            tensor.reached_ns, tensor.abandoned_ns = tensor.abandoned_ns, None
        submitted = operation is not None and operation.submit_ns is not None
        if not submitted and self._names.find(key) is None:
            return  # its name is known once it is submitted here
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
            if tensor.ready:  # others have already submitted the next round
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
        """The submitting thread joins pieces before it submits; others may have submitted by then."""
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
        if operation.kind not in NEGOTIATION_ONLY:
            yield self._begin(tensor, operation.kind, agreed_ns)

    def _end(self, tensor: _Tensor, operation: _Operation, done: Event) -> Iterator[ChromeEvent]:
        failed = {"error": signed(done.e)} if done.e else {}
        if operation.agreed_ns is None:  # refused, or an operation of a single rank
            yield self._finish(tensor, done.time_ns, failed)
            tensor.negotiating_ns = None
            if not failed and operation.kind not in NEGOTIATION_ONLY:
                yield self._begin(tensor, operation.kind, done.time_ns)
                yield self._finish(tensor, done.time_ns, _content(operation))
            return
        if operation.kind in NEGOTIATION_ONLY:
            return
        yield from self._activities(tensor, operation, operation.agreed_ns, done)
        yield self._finish(tensor, done.time_ns, {**_content(operation), **failed})

    def _activities(self, tensor: _Tensor, operation: _Operation, agreed_ns: int, done: Event) -> Iterator[ChromeEvent]:
        start_ns = operation.start_ns
        if start_ns is None:  # it failed before it started
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
        network = "SHM" if algorithm in SHARED else "TCP" if algorithm == INLINE else self._network
        return f"{network}_{'BCAST' if kind == 'BROADCAST' else kind}"

    def _clock(self, event: Event) -> Iterator[ChromeEvent]:
        """Yield this clock's offset from rank 0's, each time the estimate improves."""
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
    """Horovod's arguments at the end of an operation; the engine knows a count of elements, not a shape."""
    return {"dtype": operation.dtype, "shape": f"[{operation.nbytes // BYTES_OF.get(operation.dtype, 1)}]"}


WRITING_S, IDLE_S = 0.01, 0.05  # polling intervals of the rings, with a file and without
NICE = 5
PIECE_BYTES = 1 << 16
LOST_S = 1.0  # shortest time between two reports of lost events
LAST_LOOKS = 3  # polls at the end: a reserved slot may still be empty at the first
WAKE_BYTES = 1 << 16

_FIELDS = ["time_ns", "step", "key", *"abcde"]
_NAMES = MappingProxyType({EVENTS[name]: name for name in USED})


class Tail:
    """The end of a ring file that is being written. Raises ValueError if it is not a ring file."""

    def __init__(self, fd: int, network: str = "TCP") -> None:
        self.network = network
        self._fd = fd
        self._at = 0
        self._lost = 0
        slots_of(fd, "the file", 0, 0)

    def lost(self) -> int:
        """Return the number of events lost since the last call: they were overwritten before they were read."""
        count, self._lost = self._lost, 0
        return count

    def take(self) -> list[Event]:
        """Return the events since the last call that a timeline uses, in the ring's order."""
        slots = slots_of(self._fd, "the file", self._at)
        open_slots = np.flatnonzero(slots.events["kind"] == 0)
        complete = int(open_slots[0]) if len(open_slots) else len(slots.events)
        end = int(slots.numbers[complete]) if complete < len(slots.numbers) else slots.taken
        self._lost += end - self._at - complete
        self._at = end
        return _named(slots.events[:complete])


def _named(rows: NDArray[Any]) -> list[Event]:
    known = rows[np.isin(rows["kind"], list(_NAMES))]
    return [Event(_NAMES[kind], *rest) for kind, *rest in known[["kind", *_FIELDS]].tolist()]


class ArrayFile:
    """A file that is a complete JSON array after every write."""

    def __init__(self, path: Path | str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._end = 1  # position of the closing bracket
        self._write(b"[]", 0)

    def append(self, values: Iterable[Any]) -> None:
        """Add values. Raises OSError if the disk is full; the file then ends with the values that fitted."""
        text = b""
        for value in values:
            text += (b"\n" if self._end == 1 and not text else b",\n") + json.dumps(value).encode()
            if len(text) >= PIECE_BYTES:
                self._add(text)
                text = b""
        if text:
            self._add(text)

    def _add(self, text: bytes) -> None:
        try:
            self._write(text + b"]", self._end)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
                self._write(b"]", self._end)
            raise
        self._end += len(text)

    def _write(self, data: bytes, at: int) -> None:
        while data:
            wrote = os.pwrite(self._fd, data, at)
            data, at = data[wrote:], at + wrote

    def close(self) -> None:
        os.close(self._fd)


class Writer:
    """Follows rings, and writes one file at a time."""

    def __init__(self, own: Tail, rank: int) -> None:
        self._tails = [own]
        self._rank = rank
        self._lost = 0
        self._lost_reported_s = 0.0
        self._names = Names()
        self._negotiations = Negotiations()
        self._path: str | None = None
        self._file: ArrayFile | None = None
        self._chrome: Chrome | None = None
        self.ended = False  # by its command

    @property
    def pause_s(self) -> float:
        """Seconds until the next poll."""
        return IDLE_S if self._file is None else WRITING_S

    def look(self, *, last: bool = False) -> None:
        """Read new events, and write them if a file is open. Raises OSError if the disk is full."""
        made: list[dict[str, Any]] = []
        for tail in self._tails:
            for event in tail.take():
                self._names.take(event)
                self._negotiations.take(event)
                if self._chrome is not None:
                    made += self._chrome.take(event, tail.network)
            self._lost += tail.lost()
        if self._lost and self._chrome is not None and (last or time.monotonic() > self._lost_reported_s + LOST_S):
            made.append(self._chrome.lost(self._lost, time.monotonic_ns()))
            self._lost, self._lost_reported_s = 0, time.monotonic()
        if made and self._file is not None:
            self._file.append(made)

    def start(self, path: str, mark_cycles: bool) -> None:
        """Begin a file, with the pending negotiations; continue if that file is already open."""
        if self._chrome is not None and path == self._path:
            self._chrome.mark_cycles = mark_cycles
            return
        self.stop()
        made = ArrayFile(path)
        self._chrome = Chrome(
            self._names,
            rank=self._rank,
            start_ns=time.monotonic_ns(),
            mark_cycles=mark_cycles,
        )
        made.append(self._chrome.head(time.time_ns()))
        for event in self._negotiations.events():
            made.append(self._chrome.take(event, self._tails[0].network))
        self._path, self._file, self._lost = path, made, 0

    def stop(self) -> None:
        """Write what has happened so far, and end the file."""
        try:
            for number in range(LAST_LOOKS):
                self.look(last=number == LAST_LOOKS - 1)
        finally:
            self.give_up()

    def give_up(self) -> None:
        """End the file as it is."""
        made, self._file, self._chrome, self._path = self._file, None, None, None
        if made is not None:
            made.close()

    def follow(self, path: str, network: str) -> None:
        """Follow another ring too, owned by someone else."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._tails.append(Tail(fd, network))
        except ValueError:
            os.close(fd)
            raise

    def execute(self, line: bytes) -> dict[str, str]:
        """Execute a command, and return the answer."""
        try:
            command = json.loads(line)
            if command["do"] == "start":
                self.start(command["path"], command["mark_cycles"])
            elif command["do"] in ("stop", "end"):
                self.ended = command["do"] == "end"
                self.stop()
            elif command["do"] == "follow":
                self.follow(command["path"], command["network"])
        except (OSError, ValueError, KeyError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {}


def serve(writer: Writer, parent: int) -> None:
    """Write until the command to end, the end of stdin, which a fork of the parent keeps open, or of the parent."""
    waiting = b""
    while not writer.ended and os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], writer.pause_s)
        if readable:
            received = os.read(0, WAKE_BYTES)
            if not received:
                break
            *lines, waiting = (waiting + received).split(b"\n")
            for line in lines:
                answer = json.dumps(writer.execute(line)).encode() + b"\n"
                with contextlib.suppress(BrokenPipeError):
                    os.write(1, answer)
        try:
            writer.look()
        except OSError as error:
            sys.stderr.write(f"netbottleneck: the timeline ends here: {error}\n")
            writer.give_up()
    with contextlib.suppress(OSError):
        writer.stop()


def main(argv: list[str]) -> int:
    """Run as `timeline_writer FD PARENT RANK NETWORK`: the ring's descriptor, and its owner."""
    fd, parent, rank = map(int, argv[:3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    serve(Writer(Tail(fd, argv[3]), rank), parent)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
