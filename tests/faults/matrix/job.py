"""The ranks of one job: start, events, commands, and the check of what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import ports

from matrix import holdings

RANK = Path(__file__).with_name("rank.py")
ROOT = RANK.parents[3]
UNDER_WAY = 2  # rounds that all ranks do before the fault
GONE_S = 5.0  # for sockets that the kernel closes after a kill

Event = dict[str, Any]


class Broken(Exception):
    """A check of a cell that failed."""


class Absent(Exception):
    """A cell that cannot exist; the text says why."""


class Process(Protocol):
    """What is used of a rank's process."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, signum: int, /) -> None: ...


class Place(Protocol):
    """Where ranks run; see place.py."""

    folder: Path
    environ: Mapping[str, str]

    def start(self, rank: int, arguments: list[str], environ: Mapping[str, str], folder: Path) -> Process: ...


class Job:
    """Ranks of one job. Every wait ends at `until`; what then still runs is killed by close()."""

    def __init__(self, place: Any, size: int, values: Mapping[str, str], until: float) -> None:
        self.place, self.size, self.until = place, size, until
        self.folder = place.new_folder()
        self._claim = contextlib.ExitStack()
        self.ports = self._claim.enter_context(ports.block())
        self.values = {
            "NETBOTTLENECK_SIZE": str(size),
            "NETBOTTLENECK_MASTER": f"{place.address}:{self.ports[0]}",
            "NETBOTTLENECK_PORTS": f"{self.ports[1]}-{self.ports[-1]}",
            "NETBOTTLENECK_SECRET": secrets.token_hex(16),
            "NETBOTTLENECK_STREAMS": "2",
            "NETBOTTLENECK_TIMEOUT_S": "10",
            "NETBOTTLENECK_START_TIMEOUT_S": "20",
            **values,
        }
        self.processes: dict[str, Process] = {}
        self.events: dict[str, list[Event]] = {}
        self.children: list[int] = []
        self._commands: dict[str, int] = {}
        self._selector = selectors.DefaultSelector()
        self._rest: dict[str, bytes] = {}

    # Starting

    def start(self, *ranks: int, under_way: bool = True) -> None:
        """Start ranks, by default all, and return once each has done some rounds."""
        for rank in ranks or range(self.size):
            self.start_one(rank)
        if under_way:
            self.wait_for_rounds(UNDER_WAY)

    def start_one(self, rank: int, values: Mapping[str, str] | None = None, name: str = "") -> str:
        """Start one rank, or by another name a process that joins as this rank. Returns the name."""
        name = name or str(rank)
        for pipe in ("events", "commands"):
            os.mkfifo(self.folder / f"{name}.{pipe}")
        events = os.open(self.folder / f"{name}.events", os.O_RDONLY | os.O_NONBLOCK)
        self._commands[name] = os.open(self.folder / f"{name}.commands", os.O_RDWR)
        self.events[name], self._rest[name] = [], b""
        self._selector.register(events, selectors.EVENT_READ, name)
        environ = {**self.place.environ, **self.values, **self.place.values(rank), **(values or {})}
        environ |= {"NETBOTTLENECK_RANK": str(rank), "FAULTS_RANK": name}
        self.processes[name] = self.place.start(rank, [str(RANK)], environ, self.folder)
        return name

    # Events and commands

    def listen(self, seconds: float) -> None:
        """Read events for at most so long, or until there is one. Raises Broken for a wrong sum."""
        for key, _ in self._selector.select(seconds):
            with contextlib.suppress(BlockingIOError):
                read = os.read(key.fd, 1 << 16)
                if not read:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
                *lines, self._rest[key.data] = (self._rest[key.data] + read).split(b"\n")
                self.events[key.data] += map(json.loads, lines)
        for name, events in self.events.items():
            for event in events:
                if event["event"] == "wrong":
                    raise Broken(f"WRONG SUM on rank {name}: {event_text(event)}")

    def until_true(self, what: str, true: Callable[[], bool]) -> None:
        """Wait until something holds. Raises Broken at the deadline."""
        while not true():
            if time.monotonic() > self.until:
                raise Broken(f"HANG: {what}; {self.describe()}")
            self.listen(0.02)

    def find(self, name: str, *events: str, since: int = 0) -> Event | None:
        """Return the first of these events of a rank, from event number `since` on."""
        return next((event for event in self.events[name][since:] if event["event"] in events), None)

    def wait_for(self, name: str, *events: str, since: int = 0) -> Event:
        """Wait for one of these events of a rank. Raises Broken where the rank ends first."""

        def there() -> bool:
            ended = self.processes[name].poll() is not None
            if ended:
                self.listen(0)
            found = self.find(name, *events, since=since) is not None
            if ended and not found:
                raise Broken(f"rank {name} ended without '{' or '.join(events)}'; {self.describe()}")
            return found

        self.until_true(f"no '{' or '.join(events)}' of rank {name}", there)
        found = self.find(name, *events, since=since)
        assert found is not None
        return found

    def rounds(self, name: str) -> int:
        """Return the last round that a rank has reported."""
        return max((event["number"] for event in self.events[name] if event["event"] == "round"), default=0)

    def wait_for_rounds(self, number: int) -> None:
        """Wait until every rank has done so many. Raises Broken where one fails or ends first."""
        for name in self.processes:

            def done(name: str = name) -> bool:
                for bad in ("failed", "refused"):
                    if failure := self.find(name, bad):
                        raise Broken(f"rank {name} {bad}: {event_text(failure)}; {self.describe()}")
                if self.processes[name].poll() is not None:
                    raise Broken(f"rank {name} ended with {self.processes[name].poll()}; {self.describe()}")
                return self.rounds(name) >= number

            self.until_true(f"rank {name} is not at round {number}", done)

    def more_rounds(self, count: int) -> None:
        """Wait until every rank has begun and finished so many further rounds."""
        self.listen(0)
        self.wait_for_rounds(max(map(self.rounds, self.processes)) + count)

    def write(self, rank: int | str, command: str) -> int:
        """Send a command, and return the number of events before it."""
        since = len(self.events[str(rank)])
        os.write(self._commands[str(rank)], command.encode() + b"\n")
        return since

    def call(self, rank: int | str, command: str) -> Any:
        """Have a rank carry out a command, and return its answer."""
        since = self.write(rank, command)
        return self.wait_for(str(rank), f"done {command.split(maxsplit=1)[0]}", since=since)["answer"]

    def signal(self, rank: int, number: int) -> float:
        """Send a signal to a rank; returns when."""
        with contextlib.suppress(ProcessLookupError):
            self.processes[str(rank)].send_signal(number)
        return time.monotonic()

    # Ending

    def ended(self, names: list[str]) -> list[str]:
        """Wait for ranks that must end by themselves; return descriptions of what they held after shutdown."""
        left = []
        for name in names:
            event = self.wait_for(name, "left")
            left += [f"rank {name}: {each}" for each in event["more"]]
            self.until_true(f"rank {name} does not end", lambda name=name: self.processes[name].poll() is not None)
            if code := self.processes[name].poll():
                raise Broken(f"rank {name} ended with {code}; {self.describe()}")
        return left

    def left_behind(self) -> list[str]:
        """Kill the known children, and return descriptions of what is left of the job."""
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        deadline = time.monotonic() + GONE_S
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def _left(self) -> list[str]:
        sessions = [process.pid for process in self.processes.values()]
        found = holdings.processes(sessions, self.folder)
        found += [each for space in self.place.spaces() for each in holdings.sockets(self.ports, space)]
        return found + self.place.files()

    def describe(self) -> str:
        """Return each rank's last event and the end of its stderr."""
        lines = []
        for name, events in self.events.items():
            last = event_text(events[-1]) if events else "nothing"
            printed = (self.folder / f"{name}.err").read_text(encoding="utf-8", errors="replace").strip()
            code = self.processes[name].poll() if name in self.processes else None
            ended = "" if code is None else f", ended with {code}"
            lines.append(f"rank {name}: {last}{ended}" + (f" | {printed[-600:]}" if printed else ""))
        return "; ".join(lines)

    def close(self) -> None:
        """Kill what is left of this job, and close its pipes."""
        for process in self.processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    process.send_signal(signal.SIGKILL)
                    process.wait(GONE_S)
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        for descriptor in self._commands.values():
            os.close(descriptor)
        self._commands.clear()
        self._claim.close()


def event_text(event: Event) -> str:
    """Return an event as text."""
    return " ".join(f"{name}={value}" for name, value in event.items() if name != "at")[:400]


def popen(arguments: list[str], environ: Mapping[str, str], folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Start a rank in a process that is not forked."""
    with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.err").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=dict(environ),
            cwd=folder,
            start_new_session=True,
        )
