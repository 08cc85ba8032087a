"""One rank of the faults matrix: sums without end, each checked bit for bit.

It reports events as lines of JSON through one pipe, and reads commands from another. Times are from time.monotonic(),
the same clock in all processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from matrix import holdings

NEW_USER, NEW_NET = 0x10000000, 0x40000000
PARENT_ENDS = 1  # PR_SET_PDEATHSIG: no rank outlives the process that forked it
REPORT_EACH_S = 0.02
UNSPECIFIED = b"\0" * 16  # an address of AF_UNSPEC


def enter(spaces: str) -> None:
    """Enter namespaces: KIND:PATH, several of them with commas, before there is a second thread."""
    for space in filter(None, spaces.split(",")):
        kind, _, path = space.partition(":")
        with open(path, "rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), int(kind)) != 0:
                raise OSError(ctypes.get_errno(), f"setns: {path}")


def has_peer(one: socket.socket) -> bool:
    """Return whether a socket is connected."""
    try:
        one.getpeername()
    except OSError:
        return False
    return True


class Line:
    """The pipes to and from the runner."""

    def __init__(self, folder: Path, rank: str) -> None:
        self.events = os.open(folder / f"{rank}.events", os.O_WRONLY)
        self.commands = os.open(folder / f"{rank}.commands", os.O_RDONLY)

    def report(self, event: str, **values: Any) -> None:
        os.write(self.events, json.dumps({"event": event, "at": time.monotonic(), **values}).encode() + b"\n")


class Rank:
    """The state of this rank, and the faults that it injects into itself."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.ending = False
        self.doing = threading.Lock()  # held while a command is carried out
        self.began = 0.0
        self.opened: list[int] = []

    def listen(self) -> None:
        """Carry out commands and answer each, until the pipe is closed."""
        with os.fdopen(self.line.commands, encoding="ascii") as commands:
            for command in commands:
                name, *arguments = command.split()
                with self.doing:
                    answer = getattr(self, f"do_{name}")(*arguments)
                    self.line.report(f"done {name}", answer=answer)

    def do_end(self) -> None:
        """End with the round in which all ranks have this command."""
        self.ending = True

    def do_fork(self) -> int:
        """Fork a child that keeps every descriptor it inherits. Returns its process id."""
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            ended = select.poll()
            ended.register(self.line.commands, 0)  # hung up: the matrix has ended
            while not ended.poll():
                pass
            os._exit(0)
        return child

    def do_reset(self, many: str) -> int:
        """Reset connections of this rank. many: "lane" (one connection), or "all".

        The peer gets RST, and this end is left as by one: what was on its way is lost, and the socket is at its end.
        """
        port = int(os.environ["NETBOTTLENECK_MASTER"].rpartition(":")[2])
        found = []
        for name in sorted(map(int, os.listdir("/proc/self/fd"))):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found.append(socket.socket(fileno=os.dup(name)))
        joined = [one for one in found if one.family == socket.AF_INET and has_peer(one)]
        lanes = [one for one in joined if port not in (one.getsockname()[1], one.getpeername()[1])]
        chosen = joined if many == "all" else lanes[-1:]
        for one in chosen:
            ctypes.CDLL(None).connect(one.fileno(), UNSPECIFIED, len(UNSPECIFIED))
            with contextlib.suppress(OSError):  # "not connected", but it takes effect
                one.shutdown(socket.SHUT_RDWR)
        for one in found:
            one.close()
        return len(chosen)

    def do_limit(self, free: str) -> int:
        """Limit this process to so many descriptors more than it has."""
        most = max(map(int, os.listdir("/proc/self/fd"))) + 1 + int(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        return most

    def do_open(self) -> int:
        """Open files until there is no descriptor left."""
        count = len(self.opened)
        with contextlib.suppress(OSError):
            while True:
                self.opened.append(os.open(os.devnull, os.O_RDONLY))
        return len(self.opened) - count

    def do_close(self) -> None:
        """Close the files of do_open."""
        while self.opened:
            os.close(self.opened.pop())

    def do_try(self) -> str:
        """Open a file and a pipe, as user code may. Returns the error, or ""."""
        held = []
        try:
            held += [os.open(os.devnull, os.O_RDONLY), *os.pipe()]
        except OSError as error:
            return str(error)
        finally:
            for descriptor in held:
                os.close(descriptor)
        return ""

    def do_time(self) -> float:
        """Return the time of day."""
        return time.time()

    def do_fill(self, path: str) -> int:
        """Write a file until the disk is full."""
        written = 0
        with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
            for size in (1 << 16, 1):
                with contextlib.suppress(OSError):
                    while True:
                        written += file.write(b"x" * size)
        return written

    def sum(self, place: Any) -> None:
        """Sum and broadcast until all ranks have the command to end; check each result."""
        import numpy as np

        import netbottleneck as nb
        from netbottleneck.runtime import job

        rank, size = place.rank, place.size
        arena = job.core().Arena(4 << 20)
        job.current().comm.map(arena)
        lines = [("mapped", np.frombuffer(arena, np.float32)), ("large", np.empty(1 << 18, np.float32))]
        lines += [("small", np.empty(5, np.float64))]
        bases = [(np.arange(line.size) % 1000).astype(line.dtype) for _, line in lines]
        more = np.ones(1)
        self.number, reported = 0, 0.0
        while more[0] > 0:
            shift = self.number % 7
            for (name, line), base in zip(lines, bases, strict=True):
                np.add(base, rank + shift, out=line)
                self.began = time.monotonic()
                nb.allreduce_(line, nb.runtime.ops.Sum, name)
                self.check(name, line, base * size + (size * (size - 1) // 2 + size * shift))
            name, line = lines[0]
            np.add(bases[0], shift if rank == self.number % size else -1 - rank, out=line)
            self.began = time.monotonic()
            nb.broadcast_(line, self.number % size, "given")
            self.check("given", line, bases[0] + shift)
            more[0] = not self.ending
            self.began = time.monotonic()
            nb.allreduce_(more, nb.runtime.ops.Max, "more")
            self.number += 1
            now = time.monotonic()
            if now - reported >= REPORT_EACH_S:
                self.line.report("round", number=self.number)
                reported = now

    def check(self, name: str, line: Any, expected: Any) -> None:
        """Report a result whose bits are not the expected ones."""
        if line.tobytes() != expected.tobytes():
            differ = line != expected
            first = int(differ.argmax())
            self.line.report(
                "wrong",
                number=self.number,
                name=name,
                count=int(differ.sum()),
                first=[first, float(line[first]), float(expected[first])],
            )


def main() -> int:
    """Run one rank, and report how its job ended."""
    ctypes.CDLL(None).prctl(PARENT_ENDS, signal.SIGKILL)
    enter(os.environ.get("FAULTS_SPACES", ""))
    place = os.environ["FAULTS_RANK"]
    line = Line(Path.cwd(), place)
    import netbottleneck as nb
    from netbottleneck.errors import HorovodInternalError
    from netbottleneck.runtime import job, session, timeline

    session.FAILED_FINISH_S = 0.5
    if os.environ.get("NETBOTTLENECK_TIMELINE"):
        timeline.watch()
    rank = Rank(line)
    threading.Thread(target=rank.listen, daemon=True).start()
    line.report("started")
    before = holdings.held()
    try:
        nb.init()
    except (OSError, HorovodInternalError, ValueError) as error:
        line.report("refused", kind=type(error).__name__, peer=getattr(error, "peer", None), message=str(error))
        return 0
    line.report("joined")
    try:
        rank.sum(job.current().place)
        info = {k: v for k, v in job.current().comm.info().items() if k in ("lanes_lost", "shm", "provider")}
        line.report("right", number=rank.number, info=info)
    except HorovodInternalError as error:
        line.report(
            "failed",
            kind=type(error).__name__,
            peer=getattr(error, "peer", None),
            began=rank.began,
            message=str(error),
            number=rank.number,
        )
    with rank.doing:  # a fault that ended the job may still be under way
        rank.do_close()
    nb.shutdown()
    gc.collect()  # a failure holds the frames that it came through
    line.report("left", more=holdings.more(before, holdings.held()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
