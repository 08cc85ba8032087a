"""One cell of the matrix: a fault, a network and a number of ranks; and the checks of its outcome."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from matrix import holdings
from matrix.job import Absent, Broken, Event, Job, event_text
from matrix.place import Linked, Loopback, Machine

CELL_LIMIT_S = 30.0  # only a hang takes longer
UNTIMED_LIMIT_S = 100.0  # beside other tests
DETECTED_WITHIN_S = 2.0  # bound on the error that names a dead peer, and on a pause
SILENT_S = 2.0  # the time limit of a silent peer, in cells that wait for it
SILENT = "DeadlineError PeerError"  # of the rank that finds it, and of the ranks it notifies
SLACK = 1.25  # time limits are checked at intervals
MORE_ROUNDS = 3  # that must be right after a fault


@dataclass(frozen=True)
class Outcome:
    """The result of a cell. seconds: time to the error, or the longest pause between two rounds."""

    fault: str
    network: str
    size: int
    verdict: str  # passed, failed, not applicable
    details: str
    seconds: float | None = None
    left: str = ""

    @property
    def name(self) -> str:
        return f"{self.fault} × {self.network} × {self.size}"


@dataclass(frozen=True)
class Fault:
    """A row of the matrix. expects: the outcome; within_s: bound on its time, if any."""

    name: str
    title: str
    expects: str
    run: Callable[[Cell], str]
    within_s: float | None = None


@dataclass
class Cell:
    """A cell under way.

    may_lose: connections that libfabric may leave open in each rank. Its net provider (1.17) does not close one whose
    handshake was under way when the endpoint was closed: that of an outsider, or one made again after a reset. The end
    of the process closes it.
    """

    machine: Machine
    fault: Fault
    network: str
    size: int
    timed: bool = True
    seconds: float | None = None
    left: list[str] = field(default_factory=list)
    may_lose: int = 0
    lost: int = 0
    until: float = 0.0
    _jobs: list[Job] = field(default_factory=list)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _own: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def victim(self) -> int:
        """The rank at fault. The coordinator has rows of its own."""
        return self.size - 1

    def job(self, values: Mapping[str, str] | None = None, place: Loopback | None = None) -> Job:
        """Return a job whose ranks are not started."""
        job = Job(place or Loopback(self.machine, self.network), self.size, values or {}, self.until)
        self._jobs.append(job)
        self._stack.callback(job.close)
        return job

    def linked(self, links: int = 1) -> Linked:
        """Return hosts with links between them. Raises Absent."""
        place = Linked.made(self.machine, self.network, self.size, links)
        self._stack.callback(place.close)
        return place

    def defer(self, close: Callable[[], Any]) -> None:
        """Close something of the cell's own before the check of what is left."""
        self._own.callback(close)

    def ended(self, job: Job, names: list[str]) -> None:
        """Wait for the end of ranks that must end by themselves, and note what they left."""
        lost: Counter[str] = Counter()
        for each in job.ended(names):
            rank, count = each.partition(":")[0], holdings.connections(each)
            lost[rank] += count
            if self.network == "ofi" and count > 0 and lost[rank] <= self.may_lose:
                self.lost += count
            else:
                self.left.append(each)

    # What must come of it

    def named(self, job: Job, at: float, culprits: set[int], dead: set[int], kinds: str = "PeerError") -> str:
        """Check that every live rank fails and names a culprit. A culprit that lives may name any rank.

        at: time of the fault. The time to the outcome counts from there, or from the call that failed. kinds: of error.
        """
        alive = [str(rank) for rank in range(job.size) if rank not in dead]
        took = []
        for name in alive:
            failure = job.wait_for(name, "failed", "right")
            if failure["event"] == "right":
                raise Broken(f"rank {name} did not fail")
            self.names_one_of(name, failure, culprits, job.size)
            if failure["kind"] not in kinds.split():
                raise Broken(f"rank {name} has a {failure['kind']}, not a {kinds}: {event_text(failure)}")
            took.append(failure["at"] - max(failure["began"], at))
        self.seconds = max(took)
        self.ended(job, alive)
        return f"error names rank {', '.join(map(str, sorted(culprits)))}"

    @staticmethod
    def names_one_of(name: str, failure: Event, culprits: set[int], size: int) -> None:
        """Raise Broken unless a failure names the right peer, in its number and in its message."""
        allowed = set(range(size)) - {int(name)} if int(name) in culprits else culprits
        peer = failure["peer"]
        if peer not in allowed or f"rank {peer}" not in failure["message"]:
            raise Broken(f"rank {name} names {peer}, not one of {sorted(allowed)}: {event_text(failure)}")

    def right(self, job: Job, at: float) -> str:
        """Check that all ranks go on with right sums, and end on command. at: time of the fault."""
        names = list(job.processes)
        job.more_rounds(MORE_ROUNDS)
        for name in names:
            job.write(name, "end")
        for name in names:
            ended = job.wait_for(name, "right", "failed")
            if ended["event"] == "failed":
                raise Broken(f"rank {name}: {event_text(ended)}")
        pauses = []
        for name in names:
            times = [event["at"] for event in job.events[name] if event["event"] == "round"]
            pauses += [second - first for first, second in itertools.pairwise(times) if second > at]
        self.seconds = max(pauses, default=0.0)
        self.ended(job, names)
        return "sums right"

    def outcome(self) -> Outcome:
        """Run the cell, and check what it leaves behind."""
        self.until = time.monotonic() + (CELL_LIMIT_S if self.timed else UNTIMED_LIMIT_S)
        verdict, details = "passed", ""
        with self._stack, self._own:
            try:
                details = self.fault.run(self)
                self._own.close()
                for job in self._jobs:
                    self.left += job.left_behind()
            except Absent as absent:
                return Outcome(self.fault.name, self.network, self.size, "not applicable", str(absent))
            except Broken as broken:
                verdict, details = "failed", str(broken)
        if verdict == "passed" and self.left:
            verdict = "failed"
        if verdict == "passed" and self.late:
            verdict, details = "failed", f"{details}, but late: bound {self.fault.within_s:g} s"
        if verdict == "passed" and self.lost:
            details += f" ({self.lost} sockets that libfabric lost end with their processes)"
        left = ", ".join(dict.fromkeys(self.left)) or ("nothing" if verdict == "passed" else "")
        return Outcome(self.fault.name, self.network, self.size, verdict, details, self.seconds, left)

    @property
    def late(self) -> bool:
        """True if the time to the outcome is judged and too long."""
        bound = self.fault.within_s
        return self.timed and bound is not None and self.seconds is not None and self.seconds > bound
