"""Reports of a run: Run, the files written to a run folder, and Following: the last steps of a run in progress."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from netbottleneck.analysis import traffic, usage, verdict
from netbottleneck.analysis.changes import CHANGE_VALUES, last_change
from netbottleneck.analysis.findings import Findings, find
from netbottleneck.analysis.intervals import missing_ranks
from netbottleneck.analysis.rule_facts import Predicted
from netbottleneck.analysis.thresholds import LOSS_SHARE
from netbottleneck.analysis.verdict import Verdict
from netbottleneck.report import caveats, exporters, html, progress, summary, text
from netbottleneck.report.html import Curve, Recorded
from netbottleneck.trace import counter_files, flight_recorder, kineto, ring_file, ring_reader
from netbottleneck.trace import model as tr
from netbottleneck.trace.files import printable, write_text
from netbottleneck.trace.machine import machine_id
from netbottleneck.trace.ring_file import EVENT, EVENTS, LASTING
from netbottleneck.trace.transports import SINGLE, Arm
from netbottleneck.units import listed

__all__ = ["WINDOW_STEPS", "Change", "Following", "Part", "Run"]


PAGE = "report.html"

# A run in progress: of each ring, what belongs to the last steps.

WINDOW_STEPS = 500
# A window has fewer steps if they hold more events than this, of all ranks: they are Python objects in the analysis.
WINDOW_EVENTS = 400_000
# Of a ring that is long when it is first read: events at its begin, with the probe, and at its end.
FIRST_EVENTS, LAST_EVENTS = 1 << 12, 1 << 18
# Of a host's counters, bytes at the end of the file.
COUNTERS_BYTES = 4 << 20
# Packet loss of a run in progress: the last readings of a host's connections; more bytes than one reading has; in a
# reading with fewer segments than this, a part of them says little.
READINGS, READING_BYTES, READING_SEGMENTS = 1000, 1 << 16, 100
# A connection without a row in this many readings is closed.
CLOSED_READINGS = 10
LOSS_COLUMNS = ("sent_segments", "resent_segments")
# Events that count for all later steps: how many of them are kept.
LASTING_EVENTS = 1 << 12
# A change of the step time within this number of steps from the first one is one of its beginning.
FIRST_STEPS = 50
# A run without a new step for this time, and for this many of its longest steps, is named.
QUIET_S, QUIET_STEPS = 10.0, 5
# The verdict of a run in progress that has nothing to change.
NOTHING = "NOT_NETWORK"
# Places in /proc/PID/stat behind the name: the state, and the begin in ticks since the host has booted.
STAT_STATE, STAT_BEGAN = 0, 19
# Slots that were taken and not filled when they were read, and are read again.
OPEN_SLOTS = 64


class _Tail:
    """The end of one ring file that grows. first: the events of this step and of all later ones are complete.

    whole: its middle is read too, however long it is.
    """

    def __init__(self, path: Path, *, whole: bool) -> None:
        self.path = path
        self._whole = whole
        self.first = 0
        self.events = np.empty(0, EVENT)
        self._head: Any = None
        self._next = 0
        self._open = np.empty(0, np.int64)
        self._lasting = np.zeros(ring_file.LASTING_MOST, bool)  # that were read
        self._gap: tuple[int, int] | None = None  # as of Ring
        self._overwritten = 0  # events of the gap

    def grow(self) -> bool:
        """Read the events that were taken since the last call; return True if there are any. Raises as read_slots."""
        if self._head is None and not self._whole:
            self._skip()
        again = [ring_file.read_slots(self.path, at, at + 1) for at in self._open.tolist()]
        slots = ring_file.read_slots(self.path, self._next)
        self._head = slots.head
        numbers = np.concatenate([*(one.numbers for one in again), slots.numbers])
        fresh = np.concatenate([*(one.events for one in again), slots.events])
        filled = fresh["kind"] != 0
        self._pass(slots)
        lasting = slots.lasting[(slots.lasting["kind"] != 0) & ~self._lasting[: len(slots.lasting)]]
        self._lasting[: len(slots.lasting)] |= slots.lasting["kind"] != 0
        self.events = np.concatenate([self.events, lasting, fresh[filled]])
        self._open, self._next = numbers[~filled][-OPEN_SLOTS:], max(self._next, slots.taken)
        return bool(filled.any() or len(lasting))

    def _skip(self) -> None:
        """Begin near the end of a long ring."""
        slots = ring_file.read_slots(self.path, 0, FIRST_EVENTS)
        last = slots.taken - LAST_EVENTS
        if last > FIRST_EVENTS:
            self.events, self._next = slots.events[slots.events["kind"] != 0], last
            self.first = int(ring_file.read_slots(self.path, last, last + 1).events["step"].max(initial=0)) + 1

    def _pass(self, slots: ring_file.Slots) -> None:
        """Begin behind the last hole, if events were overwritten before they were read."""
        missing = np.diff(slots.numbers, prepend=self._next - 1) - 1
        holes = np.flatnonzero(missing > 0)
        if not len(holes):
            return
        filled = slots.events["kind"] != 0
        before = [self.events["step"], slots.events["step"][: holes[0]][filled[: holes[0]]]]
        behind = int(slots.events["step"][holes[-1] :][filled[holes[-1] :]][:1].max(initial=0))
        self._gap = int(np.concatenate(before).max(initial=0)) if self._gap is None else self._gap[0], behind
        self._overwritten += int(missing[holes].sum())
        self.first = max(self.first, behind + 1)

    def keep(self, first: int, begin_ns: int) -> None:
        """Forget the events before step `first`; of NCCL's events, which have no step, those before a time."""
        late = self.events["time_ns"] >= begin_ns if self.timed else self.events["step"] >= first
        lasting = ~late & np.isin(self.events["kind"], [EVENTS[name] for name in LASTING])
        places = np.concatenate([np.flatnonzero(lasting)[-LASTING_EVENTS:], np.flatnonzero(late)])
        self.events, self.first = self.events[np.sort(places)], max(self.first, first)
        if self._gap is not None and self._gap[1] < first:
            self._gap, self._overwritten = None, 0

    def at(self, kind: str) -> NDArray[Any]:
        """Return the events of a kind."""
        found: NDArray[Any] = self.events[self.events["kind"] == EVENTS[kind]]
        return found

    @property
    def timed(self) -> bool:
        """True if the events have no step, only a time: those of NCCL."""
        return self.path.name.endswith(f".{ring_reader.NCCL}.ring")

    def steps(self, begins: NDArray[Any]) -> NDArray[np.int64]:
        """Return the step of each event. begins: the begins of the rank's steps, which give NCCL's events theirs."""
        if not self.timed:
            return self.events["step"].astype(np.int64)
        if not len(begins):
            return np.empty(0, np.int64)
        begins = begins[np.argsort(begins["time_ns"], kind="stable")]
        places = np.searchsorted(begins["time_ns"], self.events["time_ns"], side="right") - 1
        return begins["step"][np.maximum(places, 0)].astype(np.int64)

    @property
    def ring(self) -> ring_file.Ring:
        """Return the events that were kept, as a ring. Before `grow`, a RuntimeError."""
        if self._head is None:
            raise RuntimeError(f"{self.path}: not read yet")
        ring = ring_file.ring_of(self._head, self.events, len(self._open))
        return replace(ring, gap=self._gap, overwritten=self._overwritten)


class _Losses:
    """What the TCP connections of one host sent again, from its file of counters while that grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rank = 0
        self._bytes = 0
        self._until_ns = -1
        # By connection: the time of its last reading; segments sent, and sent again, until then.
        self._counts: dict[tuple[int, ...], tuple[int, tuple[int, int]]] = {}
        self._readings: deque[tuple[int, float]] = deque(maxlen=READINGS)  # time, and the part that was sent again

    def grow(self) -> None:
        """Add the readings that were written since the last call. Raises as read_samples."""
        size = self.path.stat().st_size
        if size == self._bytes:
            return
        tcp = counter_files.read_samples(self.path, min(COUNTERS_BYTES, size - self._bytes + READING_BYTES))
        self._bytes, self.rank = size, tcp.rank
        if not {*LOSS_COLUMNS, *counter_files.CONNECTION_COLUMNS} <= set(tcp.columns):
            return
        # The rows of the last reading may not all be there.
        rows = np.flatnonzero((tcp.time_ns > self._until_ns) & (tcp.time_ns < tcp.time_ns.max(initial=0)))
        keys = zip(*(tcp.column(name)[rows].tolist() for name in counter_files.CONNECTION_COLUMNS), strict=True)
        counts = zip(*(tcp.column(name)[rows].tolist() for name in LOSS_COLUMNS), strict=True)
        sums: dict[int, tuple[int, int]] = {}
        for time_ns, key, now in zip(tcp.time_ns[rows].tolist(), keys, counts, strict=True):
            _, before = self._counts.get(key, (0, now))
            sent, again = sums.get(time_ns, (0, 0))
            sums[time_ns] = sent + max(0, now[0] - before[0]), again + max(0, now[1] - before[1])
            self._counts[key] = time_ns, now
        for time_ns, (sent, again) in sums.items():
            self._readings.append((time_ns, again / max(sent, READING_SEGMENTS)))
            self._until_ns = time_ns
        if len(self._readings) >= CLOSED_READINGS:
            since_ns = self._readings[-CLOSED_READINGS][0]
            self._counts = {key: count for key, count in self._counts.items() if count[0] >= since_ns}

    def begin_ns(self) -> int:
        """Return the time, on the host's clock, from which on a larger part is sent again than before; 0: none."""
        if not self._readings:
            return 0
        times, parts = zip(*self._readings, strict=True)
        counted = np.maximum(parts, LOSS_SHARE / 2)
        place = last_change(counted, np.zeros(len(counted), np.int64))
        # Whoever adapts to another rate loses less after a while: the cause is the same.
        return int(times[place]) if place and counted[place:].mean() > counted[:place].mean() else 0


def _without_probes(trace: tr.Trace) -> tr.Trace:
    """Return the trace without the probes of its start, whose rates may not hold any more."""
    ranks = [
        replace(rank, transports=tuple(replace(info, probe=()) for info in rank.transports)) for rank in trace.ranks
    ]
    return replace(trace, ranks=tuple(ranks))


class _StepTimes:
    """How long the last steps took, each on the rank with the longest, and over which arm.

    They reach back to before a change that the window begins with: the steps that come after it then place it better.
    """

    def __init__(self) -> None:
        self._steps = np.empty(0, np.int64)
        self._ns, self._arms = np.empty(0), np.empty(0, np.int64)

    def grow(self, trains: Iterable[_Tail], first: int, last: int) -> None:
        """Add the steps up to `last` that are not known yet, and forget those before `first`."""
        begin = max(first, int(self._steps.max(initial=-1)) + 1)
        numbers = np.arange(begin, last + 1)
        ns, arms = np.zeros(len(numbers)), np.zeros(len(numbers), np.int64)
        for tail in trains:
            begins, ends = tail.at("STEP_BEGIN"), tail.at("STEP_END")
            _, began, ended = np.intersect1d(begins["step"], ends["step"], return_indices=True)
            begins, ends = begins[began], ends[ended]
            inside = (begins["step"] >= begin) & (begins["step"] <= last)
            places = begins["step"][inside].astype(np.int64) - begin
            took = ends["time_ns"][inside] - begins["time_ns"][inside]
            ns[places], arms[places] = np.maximum(ns[places], took), begins["b"][inside]
        late, known = self._steps >= first, ns > 0
        self._steps = np.concatenate([self._steps[late], numbers[known]])
        self._ns = np.concatenate([self._ns[late], ns[known]])
        self._arms = np.concatenate([self._arms[late], arms[known]])

    def change(self) -> int:
        """Return the first step after the last change of the step time; 0: there is none."""
        place = last_change(self._ns, np.unique(self._arms, return_inverse=True)[1])  # a damaged arm is any number
        return int(self._steps[place]) if place else 0


def _rise_of_losses(trains: Mapping[str, _Tail], losses: Iterable[_Losses], last: int) -> int:
    """Return the first step after the last rise of the packet loss; 0: there is none."""
    latest = 0
    for one in losses:
        since_ns, train = one.begin_ns(), trains.get(f"{one.rank}.{ring_reader.TRAIN}.ring")
        if since_ns and train is not None:
            begins = train.at("STEP_BEGIN")
            steps = begins["step"][(begins["time_ns"] >= since_ns) & (begins["step"] <= last)]
            if len(steps) >= CHANGE_VALUES:
                latest = max(latest, int(steps.min()))
    return latest


def _begins(trains: Mapping[str, _Tail], name: str) -> NDArray[Any]:
    """Return the begins of the steps of the rank that wrote a ring."""
    train = trains.get(f"{name.partition('.')[0]}.{ring_reader.TRAIN}.ring")
    return np.empty(0, EVENT) if train is None else train.at("STEP_BEGIN")


class Part:
    """The last steps of a run's rings: each `look` reads only what was written since the one before.

    steps: of the window, on all ranks the same; 0: all. A window begins where the step time has last changed or the
    packet loss has risen, so that it shows one state of the run.
    """

    def __init__(self, folder: Path | str, steps: int = WINDOW_STEPS, most_events: int = WINDOW_EVENTS) -> None:
        self._folder = Path(folder)
        self._steps, self._most = steps, most_events
        self._tails: dict[str, _Tail] = {}
        self._losses: dict[str, _Losses] = {}
        self._times = _StepTimes()
        self.change = 0  # the last step with which the step time changed, or the packet loss rose
        self._begin: int | None = None  # the first step that was read

    @property
    def unlike_its_start(self) -> bool:
        """True if there was a change after the first steps, which may be slow for reasons of their own."""
        return self._begin is not None and self.change >= self._begin + FIRST_STEPS

    def look(self) -> bool:
        """Read what was written since the last call; return True if anything was."""
        grown = False
        for path in sorted((self._folder / "ranks").glob("*.ring")):
            tail = self._tails.setdefault(path.name, _Tail(path, whole=not self._steps))
            try:
                grown |= tail.grow()
            except (OSError, ValueError):  # `ring` reports it, as a note of the trace
                del self._tails[path.name]
        if self._steps:
            for path in (self._folder / "ranks").glob(f"*.{counter_files.TCP}.counters"):
                with contextlib.suppress(OSError, ValueError):  # a note of the run reports it
                    self._losses.setdefault(path.name, _Losses(path)).grow()
            self._forget()
        return grown

    def ring(self, path: Path) -> ring_file.Ring:
        """Return the window of one ring. Raises ValueError if the file cannot be read."""
        tail = self._tails.get(path.name)
        return tail.ring if tail is not None else ring_file.read_ring(path)

    def _forget(self) -> None:
        trains = {name: tail for name, tail in self._tails.items() if name.endswith(f".{ring_reader.TRAIN}.ring")}
        last = min((int(ends["step"].max()) for t in trains.values() if len(ends := t.at("STEP_END"))), default=0)
        oldest = max(0, last - self._steps + 1)
        first = self._affordable(trains, max([oldest, *(tail.first for tail in self._tails.values())]), last)
        if self._begin is None:
            steps = [int(begins["step"].min()) for t in trains.values() if len(begins := t.at("STEP_BEGIN"))]
            self._begin = min(steps, default=None)
        self._times.grow(trains.values(), oldest, last)
        change = self._times.change()
        if self._begin is not None and last >= self._begin + FIRST_STEPS:
            change = max(change, _rise_of_losses(trains, self._losses.values(), last))
        first = max(first, change)
        self.change = change or self.change
        if first == 0:
            return
        for name, tail in self._tails.items():
            begins = _begins(trains, name)
            times = begins["time_ns"][begins["step"] >= first]
            tail.keep(first, int(times.min(initial=np.iinfo(np.int64).max)))

    def _affordable(self, trains: Mapping[str, _Tail], first: int, last: int) -> int:
        """Return the first step from which on all rings together hold at most the events of a window."""
        counts = np.zeros(max(1, last - first + 2), np.int64)
        for name, tail in self._tails.items():
            steps = tail.steps(_begins(trains, name))
            own = np.clip(steps[steps >= first] - first, 0, len(counts) - 1)
            counts += np.bincount(own, minlength=len(counts))
        from_end = np.cumsum(counts[::-1])
        steps_kept = max(2, int(np.searchsorted(from_end, self._most, side="right")))
        return max(first, last + 2 - steps_kept)


class Run:
    """A recorded run: a run folder, a single trace file (*.jsonl.gz), or what torch recorded itself.

    The last is a folder with torch.profiler's trace of each rank, or a folder or prefix of a flight recorder's dumps.
    part: of a run folder, only these events. Raises FileNotFoundError if it does not exist, ValueError naming the file
    for an unknown version.
    """

    def __init__(self, path: Path | str, *, part: Part | None = None) -> None:
        self.path = Path(path)
        self._folder = self.path if self.path.is_dir() else None
        self._last_bytes = None if part is None else COUNTERS_BYTES
        self.trace: tr.Trace
        profiled = kineto.files(self.path) if part is None else []
        dumps = flight_recorder.dumps(self.path) if part is None and not profiled else []
        if part is not None:
            self.trace = ring_reader.load(self.path, part.ring)
            if part.unlike_its_start:
                self.trace = _without_probes(self.trace)
        elif profiled:
            self.trace = kineto.load(profiled)
        elif dumps:
            self.trace = flight_recorder.load(dumps)
        elif self._folder or not self.path.exists():
            self.trace = ring_reader.load(self.path)
            self.trace = replace(self.trace, in_progress=_in_progress(self.path, self.trace))
        else:
            self.trace = tr.read(self.path)
        notes = [*self.trace.notes, *(counter_files.unreadable(self._folder) if self._folder is not None else ())]
        # Of a run in progress, only the last readings are read.
        notes += usage.notes(self.trace, self._samples, whole=part is None and not self.trace.in_progress)
        # They may hold names of files.
        self.trace = replace(self.trace, id=printable(self.trace.id), notes=tuple(map(printable, notes)))

    @cached_property
    def _found(self) -> Findings:
        return find(self.trace)

    @cached_property
    def findings(self) -> Findings:
        """The findings of the run, with notes on the network of its base."""
        found = self._found
        if found.base is None:
            return found
        notes = map(printable, traffic.notes(found.trace, found.base, self.hosts, self.connections))
        return replace(found, trace=replace(found.trace, notes=(*found.trace.notes, *notes)))

    @cached_property
    def verdict(self) -> Verdict:
        """Code, reason, next step, and the evidence of every rule."""
        return verdict.decide(self.findings, self._predicted, self.hosts, self.connections)

    @property
    def _predicted(self) -> Predicted:
        """Savings by the what-if engine, which needs the C module."""
        try:
            from netbottleneck.whatif import sweeps
        except ImportError:
            return Predicted(refused="the what-if engine is not available: the C module is missing")
        trace, base = self.findings.trace, self.findings.base
        faster = {} if base is None else traffic.faster(trace, base, self.hosts, self.connections)
        return sweeps.savings(trace, base, self.findings.full_link_bps, faster)

    @cached_property
    def hosts(self) -> tuple[usage.HostUse, ...]:
        """Use of each host's interfaces and cores, where recorded often enough for the arm's blocks."""
        return tuple(use for use in self._uses if not use.mixed)

    @cached_property
    def _uses(self) -> tuple[usage.HostUse, ...]:
        return usage.hosts(self._found.trace, self._samples)

    @cached_property
    def connections(self) -> usage.Connected:
        """Use of the ranks' TCP connections, where recorded."""
        return usage.connections(self._found.trace, self._samples)

    @cached_property
    def _samples(self) -> tuple[counter_files.Samples, ...]:
        return counter_files.of_run(self._folder, self._last_bytes) if self._folder else ()

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """Content of summary.json."""
        return summary.summary(self.findings, self.verdict, self.hosts, self.connections)

    @property
    def text(self) -> str:
        """Content of report.txt."""
        return text.text(self.findings, self.verdict, self.hosts, self.connections)

    @cached_property
    def html(self) -> str:
        """Content of report.html: one page with pictures, without links or scripts."""
        recorded = Recorded(self._uses, self._samples, self._curve, self.connections)
        return html.page(self.findings, self.verdict, recorded)

    @property
    def _curve(self) -> Curve:
        """Predicted steps by rate of the link, which need the C module."""
        try:
            from netbottleneck.report import what_if
        except ImportError:
            return Curve(missing="the what-if engine is not available: the C module is missing")
        return what_if.curve(self.findings)

    @property
    def _page(self) -> Path | None:
        page = self.path / PAGE
        return page if self._folder is not None and page.exists() else None

    def show(self, console: Console | None = None) -> None:
        """Print the report, and the path of its HTML page."""
        text.show(self.findings, self.verdict, console, self.hosts, self._page, self.connections)

    def show_and_write(self, console: Console) -> None:
        """Print the report, then write its files, which takes as long again. Then raises what printing raised."""
        failed = None
        try:
            text.show(self.findings, self.verdict, console, self.hosts, None, self.connections)
        except Exception as error:
            failed = error
        self.write_all()
        if failed is not None:
            raise failed
        text.show_page(console, self.path / PAGE)

    def write_all(self, folder: Path | str | None = None) -> list[Path]:
        """Write every file of the report into `folder` (default: the run's own) and return their paths.

        Each replaces an earlier one as a whole. If the run has rings, their readable form goes to ranks/ of the run's
        own folder.
        """
        if folder is None and self._folder is None:
            raise ValueError(f"{self.path} is a single trace file: pass the folder to write to")
        target = Path(folder) if folder is not None else self.path
        target.mkdir(parents=True, exist_ok=True)
        written = []
        for name, content in {
            "summary.json": json.dumps(self.summary, indent=1) + "\n",
            "layers.csv": summary.layers_csv(self.findings),
            "collectives.csv": summary.collectives_csv(self.trace),
            "report.txt": self.text,
            PAGE: self.html,
        }.items():
            write_text(target / name, content)
            written.append(target / name)
        summary.write_chrome_trace(self.trace, target / "trace.json.gz")
        written.append(target / "trace.json.gz")
        (target / "ranks").mkdir(exist_ok=True)
        for rank in self.trace.ranks:
            path = target / "ranks" / f"{rank.rank}.jsonl.gz"
            tr.write(self.trace.of_rank(rank.rank), path)
            written.append(path)
        return written

    def export(self, name: str, place: str = "") -> str:
        """Send the numbers to an exporter, such as "tensorboard", and return where they went.

        Raises ValueError for an unknown exporter, ImportError naming the package that is missing.
        """
        return exporters.export(exporters.numbers(self.summary, self.trace), name, place)

    def frames(self) -> dict[str, Any]:
        """Return the tables of the run as pandas.DataFrame: steps, collectives, layers, ready and waits.

        Units are in the names of the columns; an unknown cell is pandas.NA. Raises ImportError if pandas is missing.
        """
        return exporters.frames(exporters.tables(self.summary, self.trace))

    def _repr_html_(self) -> str:
        return html.fragment(self.findings, self.verdict)


# A run in progress as a whole: its last steps, its state, and its cause.


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the cause during a run. step: the last step of the window that first had the new cause."""

    before: str
    code: str
    step: int

    def __str__(self) -> str:
        return f"the cause has changed: {self.before} -> {self.code}, since step {self.step} or shortly before"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


class Following:
    """A run in progress, or one that has ended, from its folder: each `look` returns its last steps, at most `steps`.

    steps 0: all.
    """

    def __init__(self, path: Path | str, steps: int = WINDOW_STEPS) -> None:
        self.path = Path(path)
        self.steps = steps
        self.changed: Change | None = None  # the last change of the cause
        self.grown = False  # the last look found new events
        self._part = Part(path, steps)
        self._seen_change = 0  # of the window, at the last look
        self._peeked = False  # new events were found since the last look
        self._newest: int | None = None  # the newest step
        self._ended_s: float | None = None  # when it ended, by time.monotonic; None: not known
        self._cause: str | None = None
        self._was_unsure = False  # a look has found steps and no cause
        self._other: tuple[str, int] | None = None  # a cause that one look has found, and the last step of that look
        self._arms: dict[Arm, tr.Step] = {}  # the last step of each arm that was seen with the cause

    def look(self) -> Run:
        """Return the last steps as a run.

        Raises FileNotFoundError if the folder has no run, or no rank has left a record, and ValueError as Run.
        """
        self.grown = self._part.look() or self._peeked
        self._seen_change, self._peeked = self._part.change, False
        return Run(self.path, part=self._part)

    def peek(self) -> bool:
        """Return True if the step time has changed, or the packet loss risen, since the last look: without analysis."""
        self._peeked = self._part.look() or self._peeked
        return self._part.change > self._seen_change

    @property
    def settled(self) -> bool:
        """False after a look that found another cause, which the next look confirms or not."""
        return self._other is None

    def judge(self, run: Run) -> Change | None:
        """Return the change if the cause has changed: two looks in a row, with new steps, found the same other one.

        Otherwise None. An inconclusive verdict names no cause, and a run without steps has none. The two verdicts that
        there is nothing to do are one. The first cause is no change, unless an earlier look was inconclusive and the
        step time has changed since the start. Nor is one that takes the place of a comparison whose arms no longer
        alternate, while the step time stays. run: of `look`.
        """
        own = {step.arm: step for step in run.trace.steps if step.arm != SINGLE}
        steps = [step.index for step in run.trace.steps]
        code = NOTHING if run.verdict.code == "DO_NOTHING" else run.verdict.code
        if not steps or code in ("INCONCLUSIVE", "NO_COMMUNICATION"):
            self._other, self._was_unsure = None, self._was_unsure or (bool(steps) and code == "INCONCLUSIVE")
        elif code == self._cause or self._is_first(code):
            self._cause, self._other, self._arms = code, None, {**self._arms, **own}
        elif self._other is None or self._other[0] != code:
            self._other = code, max(steps)
        elif max(steps) > self._other[1]:
            return self._changes(code, self._other[1], own)
        return None

    def _is_first(self, code: str) -> bool:
        """Return True for a first cause that is no change."""
        changed = self._was_unsure and self._part.unlike_its_start
        return self._cause is None and (code == NOTHING or not changed)

    def _changes(self, code: str, since: int, own: dict[Arm, tr.Step]) -> Change | None:
        """Take another cause. Returns the change; None if it takes the place of a comparison that is over."""
        over, former = self._comparison_is_over(own), self._cause or "INCONCLUSIVE"
        self._cause, self._other, self._arms = code, None, own
        if over:
            return None
        self.changed = Change(former, code, since)
        return self.changed

    def _comparison_is_over(self, own: Mapping[Arm, tr.Step]) -> bool:
        """Return True if the cause was found by a comparison, one of whose arms ended after the step time changed last.

        own: the last step of each arm in the window.
        """
        arms = {**self._arms, **own}
        newest = max((step.block for step in own.values()), default=0)
        ended = [step.index for step in arms.values() if step.block < newest - 2 * len(arms)]
        return self._cause in verdict.COMPARED_CODES and any(index >= self._part.change for index in ended)

    def about(self, run: Run) -> list[str]:
        """Return the state of the run ("in progress", "ended" or "stopped"), then lines about what is missing in it."""
        trace = run.trace
        ended = bool(trace.ranks) and all(rank.finished or rank.error for rank in trace.ranks)
        gone = _gone(self.path, trace)
        lines = _missing(trace)
        lines += [caveats.failure(rank) for rank in trace.ranks if rank.error]
        lines += [f"rank {rank.rank} was killed: its process {rank.pid} is gone" for rank in gone]
        lines += [*trace.incomplete, *(note for note in trace.notes if note.startswith(tr.KNOWN))]
        quiet = self._quiet(trace, ended, bool(gone))
        stopped = gone or (quiet and _has_ended_in_part(trace))
        return ["ended" if ended else "stopped" if stopped else "in progress", *lines, *quiet]

    def _quiet(self, trace: tr.Trace, ended: bool, gone: bool) -> list[str]:
        """A line about steps that do not come. gone: a rank was killed.

        Of a step that has ended before the first look, the end is known by the wall clock alone.
        """
        if not trace.steps:
            over = ended or gone
            return ["no step was recorded" if over else "no step is recorded yet (NETBOTTLENECK_START_STEP)"]
        newest = max(step.index for step in trace.steps)
        if self._newest is None and trace.epoch_wall_ns:
            ago_ns = time.time_ns() - trace.epoch_wall_ns - max(step.end_ns for step in trace.steps)
            self._ended_s = time.monotonic() - max(0, ago_ns) / 1e9
        elif newest != self._newest and self._newest is not None:
            self._ended_s = time.monotonic()
        self._newest = newest
        ago_s = 0.0 if self._ended_s is None else time.monotonic() - self._ended_s
        longest_s = max(step.duration_ns for step in trace.steps) / 1e9
        late = not ended and ago_s > max(QUIET_S, QUIET_STEPS * longest_s)
        return [f"no new step: the last one ended {progress.duration(ago_s)} ago"] if late else []


def _has_ended_in_part(trace: tr.Trace) -> bool:
    """True if a rank has ended. If no step comes, the others were killed, on hosts whose processes are not seen."""
    return bool(trace.steps) and any(rank.finished or rank.error for rank in trace.ranks)


def _missing(trace: tr.Trace) -> list[str]:
    """A line about the ranks without a record."""
    missing = missing_ranks(trace)
    return [f"no record of rank {listed(missing)} in this folder"] if missing else []


def _here(folder: Path, trace: tr.Trace) -> list[tr.Rank]:
    """Return the ranks that did not end their record and whose process numbers are of this host."""
    name, machines = platform.node(), ("", machine_id())  # machines may have equal hostnames
    own = [rank for rank in trace.ranks if rank.hostname == name and rank.machine_id in machines]
    return [rank for rank in own if not (rank.finished or rank.error or _elsewhere(folder, rank.rank))]


def _gone(folder: Path, trace: tr.Trace) -> list[tr.Rank]:
    """Return the ranks of this host whose process is not there any more, and that had not ended their record by then.

    A rank may end its record after `trace` was read, so its description is read again.
    """
    gone = [rank for rank in _here(folder, trace) if not _lives(folder, rank)]
    about = [(rank, _described(folder, rank.rank)) for rank in gone]
    return [rank for rank, meta in about if not (meta.get("finished") or meta.get("error"))]


def _in_progress(folder: Path, trace: tr.Trace) -> bool:
    """True if no rank has ended its record, and the processes of this host's ranks are there.

    False if this host has none of the ranks: whether they run is then not known.
    """
    ended = any(rank.finished or rank.error for rank in trace.ranks)
    return not ended and bool(_here(folder, trace)) and not _gone(folder, trace)


def _elsewhere(folder: Path, rank: int) -> bool:
    """True if a rank's process number is of another PID namespace, as in a container: it says nothing here."""
    space = _described(folder, rank).get("pid_namespace", "")
    try:
        return bool(space) and space != os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def _described(folder: Path, rank: int) -> Mapping[str, Any]:
    """Return a rank's description of itself as it is now; {} if it cannot be read."""
    try:
        found = json.loads((folder / "ranks" / f"{rank}.meta.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lives(folder: Path, rank: tr.Rank) -> bool:
    """True if the process of a rank is there: one with its number, no zombie, that began before its first ring.

    A process whose state this user may not read is there.
    """
    if rank.pid <= 0:
        return False
    try:
        os.kill(rank.pid, 0)
    except PermissionError:
        pass  # it is another user's
    except (OSError, OverflowError):
        return False
    try:
        stat = Path(f"/proc/{rank.pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return True
    began_ns = int(stat[STAT_BEGAN]) * 10**9 // os.sysconf("SC_CLK_TCK")
    return stat[STAT_STATE] != b"Z" and _before_rings(began_ns, _opened(folder, rank.rank))


def _opened(folder: Path, rank: int) -> tuple[int, int] | None:
    """Return when a ring of a rank was opened, by the wall clock and the monotonic clock; None without a ring."""
    for path in sorted((folder / "ranks").glob(f"{rank}.*.ring")):
        with contextlib.suppress(OSError, ValueError):
            head = ring_file.read_slots(path, 0, 0).head
            return int(head["opened_wall_ns"]), int(head["opened_mono_ns"])
    return None


def _before_rings(began_ns: int, opened: tuple[int, int] | None) -> bool:
    """True if a process began before a ring was opened. began_ns: since the host has booted, with suspended time.

    Steps of the wall clock do not matter: it only tells whether the host has booted since.
    """
    if opened is None:
        return True
    since_boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    suspended_ns = since_boot_ns - time.monotonic_ns()
    wall_ns, mono_ns = opened
    return time.time_ns() - since_boot_ns <= wall_ns and began_ns - suspended_ns <= mono_ns
