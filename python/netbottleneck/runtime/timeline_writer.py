"""The process that writes one rank's timeline: it follows the rank's rings, and ends when the rank does.

It runs beside training, at low priority: what it cannot read in time is lost to the file, which says so, and nobody
waits. Commands come as lines of JSON on stdin, each answered by one on stdout: {"do": "start", "path": …,
"mark_cycles": …}, {"do": "stop"}, {"do": "follow", "path": …, "network": …}. The answer is {} or {"error": …}.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netbottleneck.runtime.timeline_events import USED, Chrome
from netbottleneck.runtime.timeline_names import Names, Negotiations
from netbottleneck.trace.events import Event
from netbottleneck.trace.recorder import EVENTS
from netbottleneck.trace.ring_files import EVENT, HEADER, RING_HEADER_BYTES, RING_MAGIC, RING_VERSION

WRITING_S, IDLE_S = 0.01, 0.05  # between two looks at the rings, with a file and without
NICE = 5
PIECE_BYTES = 1 << 16
LOST_S = 1.0  # between two words on lost events
LAST_LOOKS = 3  # when it ends: a slot that was taken may still be empty at the first
WAKE_BYTES = 1 << 16

_FIELDS = ["time_ns", "step", "key", *"abcde"]
_NAMES = MappingProxyType({EVENTS[name]: name for name in USED})


class Tail:
    """The end of a ring file that is being written to.

    rewinds: the file serves nobody else and cannot shrink; once half of it is read, writing begins at its start anew,
    so that it never ends. Else it ends when it is full. Raises ValueError for what is no ring file.
    """

    def __init__(self, fd: int, network: str = "TCP", *, rewinds: bool) -> None:
        self.network = network
        self._fd = fd
        self._head = self._header()
        if self._head["magic"] != RING_MAGIC.rstrip(b"\0") or self._head["version"] != RING_VERSION:
            raise ValueError(f"not a ring file of version {RING_VERSION}")
        self._capacity = int(self._head["capacity"])
        self._at = 0
        self._late: int | None = None  # where writers that were overtaken by a rewind leave their events
        self._full = 0  # of a file that is not rewound: what was lost so far
        self._lost = 0
        self._slots: NDArray[Any] | None = None
        if rewinds:
            memory = mmap.mmap(fd, RING_HEADER_BYTES + self._capacity * EVENT.itemsize)
            self._slots = np.frombuffer(memory, EVENT, self._capacity, RING_HEADER_BYTES)
            # One store of eight bytes: a writer's atomic addition comes before it or after it.
            self._taken = ctypes.c_uint64.from_buffer(memory, int(HEADER.fields["taken"][1]))  # type: ignore[index]

    def _header(self) -> Any:
        raw = os.pread(self._fd, HEADER.itemsize, 0)
        return np.frombuffer(raw.ljust(HEADER.itemsize, b"\0"), HEADER, 1)[0]

    def lost(self) -> int:
        """Return how many events were lost since the last call."""
        count, self._lost = self._lost, 0
        return count

    def take(self) -> list[Event]:
        """Return the events that came since the last call and that a timeline is made of, in the ring's order."""
        found = self._overtaken()
        taken = int(self._header()["taken"])
        end = min(taken, self._capacity)
        # What is whole in a first look is read in a second one: a writer fills a slot's kind last.
        empty = np.flatnonzero(self._read(self._at, end)["kind"] == 0)
        whole = int(empty[0]) if len(empty) else end - self._at
        found += _named(self._read(self._at, self._at + whole))
        self._at += whole
        if self._slots is not None and self._at == end and 2 * self._at >= self._capacity:
            self._rewind(self._slots)
        elif self._slots is None and taken - end > self._full:
            self._lost += taken - end - self._full
            self._full = taken - end
        return found

    def _read(self, first: int, end: int) -> NDArray[Any]:
        want = max(0, end - first) * EVENT.itemsize
        raw = os.pread(self._fd, want, RING_HEADER_BYTES + first * EVENT.itemsize) if want else b""
        rows = np.zeros(max(0, end - first), EVENT)
        got = len(raw) // EVENT.itemsize
        rows[:got] = np.frombuffer(raw, EVENT, got)
        return rows

    def _rewind(self, slots: NDArray[Any]) -> None:
        slots["kind"][: self._at] = 0
        before = self._taken.value
        self._taken.value = 0
        self._lost += max(0, before - self._capacity)
        self._late = self._at if self._at < self._capacity else None
        self._at = 0

    def _overtaken(self) -> list[Event]:
        """Events of writers that took a slot just before a rewind."""
        found: list[Event] = []
        while self._slots is not None and self._late is not None:
            if self._late >= self._capacity or self._taken.value > self._late:
                self._late = None
            elif self._slots["kind"][self._late] == 0:
                break
            else:
                found += _named(self._read(self._late, self._late + 1))
                self._slots["kind"][self._late] = 0
                self._late += 1
        return found


def _named(rows: NDArray[Any]) -> list[Event]:
    known = rows[np.isin(rows["kind"], list(_NAMES))]
    return [Event(_NAMES[kind], *rest) for kind, *rest in known[["kind", *_FIELDS]].tolist()]


class ArrayFile:
    """A file that is a whole JSON array after every write."""

    def __init__(self, path: Path | str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._end = 1  # where the closing bracket is
        self._write(b"[]", 0)

    def append(self, values: Iterable[Any]) -> None:
        """Add values. Raises OSError where the disk takes no more; the file then ends with what it took."""
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
    """Rings in, one file at a time out."""

    def __init__(self, own: Tail, rank: int) -> None:
        self._tails = [own]
        self._rank = rank
        self._lost = 0
        self._lost_told_s = 0.0
        self._names = Names()
        self._negotiations = Negotiations()
        self._path: str | None = None
        self._file: ArrayFile | None = None
        self._chrome: Chrome | None = None

    @property
    def pause_s(self) -> float:
        """How long to wait until the next look."""
        return IDLE_S if self._file is None else WRITING_S

    def look(self, *, last: bool = False) -> None:
        """Read what is new, and write it where there is a file. Raises OSError when the disk takes no more."""
        made: list[dict[str, Any]] = []
        for tail in self._tails:
            for event in tail.take():
                self._names.take(event)
                self._negotiations.take(event)
                if self._chrome is not None:
                    made += self._chrome.take(event, tail.network)
            self._lost += tail.lost()
        if self._lost and self._chrome is not None and (last or time.monotonic() > self._lost_told_s + LOST_S):
            made.append(self._chrome.lost(self._lost, time.monotonic_ns()))
            self._lost, self._lost_told_s = 0, time.monotonic()
        if made and self._file is not None:
            self._file.append(made)

    def start(self, path: str, mark_cycles: bool) -> None:
        """Begin a file, with what is not agreed yet; where it is the one that is being written, go on."""
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
        """Read another ring too, which is somebody else's."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._tails.append(Tail(fd, network, rewinds=False))
        except ValueError:
            os.close(fd)
            raise

    def obey(self, line: bytes) -> dict[str, str]:
        """Do what a command says, and return the answer."""
        try:
            command = json.loads(line)
            if command["do"] == "start":
                self.start(command["path"], command["mark_cycles"])
            elif command["do"] == "stop":
                self.stop()
            elif command["do"] == "follow":
                self.follow(command["path"], command["network"])
        except (OSError, ValueError, KeyError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {}


def serve(writer: Writer, parent: int) -> None:
    """Write until stdin ends, or the parent does."""
    waiting = b""
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], writer.pause_s)
        if readable:
            came = os.read(0, WAKE_BYTES)
            if not came:
                break
            *lines, waiting = (waiting + came).split(b"\n")
            for line in lines:
                answer = json.dumps(writer.obey(line)).encode() + b"\n"
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
    """Run as `timeline_writer FD PARENT RANK NETWORK`: the ring's descriptor, and of whom it is."""
    fd, parent, rank = map(int, argv[:3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    serve(Writer(Tail(fd, argv[3], rewinds=True), rank), parent)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
