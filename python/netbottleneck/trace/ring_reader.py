"""Reader of a run's ring files: converts rings to events, and the events of all ranks to a Trace on one clock.

It runs after the job, or during the job in another process. It accepts ranks that were killed: completed work is kept,
and incomplete work is counted.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netbottleneck.trace import model as tr
from netbottleneck.trace.events import Event, missing_ranks, signed
from netbottleneck.trace.gaps import Gap, gap_of, without
from netbottleneck.trace.heartbeats import HEARTBEAT, clock_of
from netbottleneck.trace.nccl_events import nccl_operations
from netbottleneck.trace.ring_file import EVENT, EVENTS, LASTING, Ring, read_ring
from netbottleneck.trace.transports import NATIVE, STOCK, Arm, backends

# Events of one rank by name, converted to steps, operations, faults and costs. Pure.

# Codes in OP_SUBMIT and OP_DONE: csrc/engine/engine.h, csrc/base/dtype.h, csrc/coll/choose.h.
KINDS = ("allreduce", "allgather", "reducescatter", "broadcast", "barrier", "alltoall", "join")
# Codes of what only the stock path has, in OP_SUBMIT.
STOCK_KINDS = MappingProxyType({32: "reduce", 33: "gather", 34: "scatter", 35: "send", 36: "recv"})
# Codes in OP_SUBMIT: gradients, then the phase of the step in which the script made the call.
PHASES = ("reduce", "forward", "backward", "optimizer", "other")
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
    "inline all-reduce",
    "join",
)
# A reduce-scatter of torch's gloo group is an all-reduce whose result each rank keeps a part of, from torch 2.3 on
# (ProcessGroupGloo::reduce_scatter_tensor_coalesced).
WHOLE_REDUCE_SCATTER = "gloo's all-reduce"
# Algorithms between ranks that share memory; codes of the same enum.
IN_MEMORY = {32: "shared memory", 33: "staged shared memory", 34: "two_level"}


def _arm(arms: Sequence[Arm], number: int) -> Arm:
    return arms[number] if number < len(arms) else Arm(str(number))


def _arm_of(transport: str | None, step: tr.Step | None) -> Arm:
    """Return the arm of an operation of this transport in this step; either may be unknown."""
    if step is not None and transport in (None, step.arm.transport):
        return step.arm
    return STOCK if transport is None else Arm(transport)


def _named(table: Sequence[str | None], number: int) -> str | None:
    return table[number] if number < len(table) else str(number)


@dataclass(slots=True)
class _OpenStep:
    """A step in progress: collects intervals until the step ends."""

    event: Event
    forward: list[tr.Interval] = field(default_factory=list)
    optimizer: list[tr.Interval] = field(default_factory=list)
    modules: list[tuple[int, int, int]] = field(default_factory=list)
    grad_ready: list[tuple[int, int]] = field(default_factory=list)
    waits: list[tuple[int, int, int]] = field(default_factory=list)
    evaluation: list[tr.Interval] = field(default_factory=list)
    checkpoints: list[tr.Interval] = field(default_factory=list)
    begun: dict[tuple[str, int], list[tuple[int, int]]] = field(default_factory=dict)

    def take(self, event: Event) -> None:
        if event.kind == "GRAD_READY":
            self.grad_ready.append((event.key, event.time_ns))
            return
        what, _, edge = event.kind.partition("_")
        if edge == "BEGIN":
            self.begun.setdefault((what, event.key), []).append((event.time_ns, event.a))
        elif edge == "END" and self.begun.get((what, event.key)):
            begin, mark = self.begun[what, event.key].pop()
            if what == "FORWARD" and event.key:
                self.modules.append((event.key - 1, begin, event.time_ns))
            elif what == "FORWARD":
                (self.evaluation if mark else self.forward).append((begin, event.time_ns))
            elif what == "CHECKPOINT":
                self.checkpoints.append((begin, event.time_ns))
            elif what == "OPTIMIZER":
                self.optimizer.append((begin, event.time_ns))
            elif what == "WAIT":
                self.waits.append((event.key, begin, event.time_ns))


def _updates(step: _OpenStep, end_ns: int) -> tuple[tr.Interval, ...]:
    """Return a step's optimizer intervals without the passes that step(closure) makes inside them.

    A pass lasts from the begin of its forward to its last gradient before the next forward.
    """
    found = step.optimizer
    forward = sorted(step.forward)
    for (begin, end), (limit, _) in zip(forward, [*forward[1:], (end_ns, end_ns)], strict=False):
        if any(one < begin < other for one, other in found):
            last = max([end, *(at for _, at in step.grad_ready if begin <= at <= limit)])
            around = [pair for one, other in found for pair in ((one, min(other, begin)), (max(one, last), other))]
            found = [(one, other) for one, other in around if one < other]
    return tuple(found)


def rank_steps(
    events: Iterable[Event], rank: int, arms: Sequence[Arm], plan: str | None
) -> tuple[list[tr.Step], int, bool]:
    """Return the finished steps of a rank's training thread, the number abandoned, and whether the last is open.

    A step without a forward pass is not abandoned: hvd.join() leaves the one that the loop's end began.
    """
    finished: list[tr.Step] = []
    current: _OpenStep | None = None
    unfinished = 0
    for event in events:
        if event.kind == "STEP_BEGIN":
            unfinished += current is not None and bool(current.forward)
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
                    arm=_arm(arms, begin.b),
                    begin_ns=begin.time_ns,
                    end_ns=event.time_ns,
                    plan=plan,
                    sampled=begin.c == 1,
                    forward=tuple(current.forward),
                    optimizer=_updates(current, event.time_ns),
                    modules=tuple(current.modules),
                    grad_ready=tuple(current.grad_ready),
                    waits=tuple(current.waits),
                    evaluation=tuple(current.evaluation),
                    checkpoints=tuple(current.checkpoints),
                    cpu_ns=event.d - begin.d if begin.d and event.d else None,
                )
            )
            current = None
        else:
            current.take(event)
    return finished, unfinished, current is not None


class StepIndex:
    """Finds the step of one rank. error_ns: of the steps' clock against that of the events; None: one clock."""

    def __init__(self, rank_steps: Sequence[tr.Step], error_ns: int | None = None) -> None:
        self._steps = sorted(rank_steps, key=lambda s: s.begin_ns)
        self._begins = [s.begin_ns for s in self._steps]
        self._error_ns = error_ns
        self._by_number = {} if error_ns is None else {step.index: step for step in self._steps}

    def at(self, time_ns: int) -> tr.Step | None:
        place = bisect.bisect_right(self._begins, time_ns) - 1
        return self._steps[place] if place >= 0 and time_ns <= self._steps[place].end_ns else None

    def of(self, event: Event) -> tr.Step | None:
        """Return the step of an event: by its time, and with two clocks by its number if the times agree."""
        if self._error_ns is None:
            return self.at(event.time_ns)
        step = self._by_number.get(event.step)
        if step is None or not -self._error_ns <= event.time_ns - step.begin_ns <= step.duration_ns + self._error_ns:
            return None
        return step


class BucketIndex:
    """Finds the bucket of an operation: by key, else by its number if the bytes are equal."""

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
        """Return the recorded type of the bucket; None without a bucket."""
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
    """Return the operations among `events`, in order of submission.

    transport None: use that of the step of the submission; fields that only a native transport has stay None. A reused
    pair of key and round is numbered on, so that operations without recorded rounds also match across ranks.
    """
    rows: list[dict[str, Any]] = []
    pending: dict[tuple[int, int], dict[str, Any]] = {}
    times: Counter[tuple[int, int]] = Counter()
    # Several threads write events: at equal times, causal order applies.
    own = (event for event in events if event.kind in _ORDER)
    for event in sorted(own, key=lambda e: (e.time_ns, _ORDER[e.kind])):
        if event.kind == "OP_SUBMIT":
            step = in_steps.of(event)
            bucket = buckets.find(event)
            phase = _named(PHASES, event.e >> 16 & 0xFF)
            kind = STOCK_KINDS.get(event.e & 0xFF) or _named(KINDS, event.e & 0xFF)
            row: dict[str, Any] = {
                "rank": rank,
                "arm": _arm_of(transport, step),
                "key": event.key,
                "round": event.a + times[event.key, event.a],
                "submit_ns": event.time_ns,
                # An all-to-all of ours has its input and its output in one buffer.
                "tensor_bytes": event.b // 2 if transport is not None and kind == "alltoall" else event.b,
                "name": buckets.name(bucket, event.key) if phase == PHASES[0] else f"{phase}/{kind}",
                "step": step.index if step else None,
                "comm": event.d & 0xFFFFFFFF,
                "ranks": event.d >> 32 or None,
                "kind": kind,
                "dtype": buckets.dtype(bucket) or _named(DTYPES, event.e >> 8 & 0xFF),
                "phase": phase,
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


def _known_algorithms(own: Sequence[tr.Collective], about: _Described) -> list[tr.Collective]:
    """The operations of the script's own path, with their algorithm where its backend has only one."""
    if STOCK.transport not in about.transports or backends(about.transports[STOCK.transport].provider) != {"gloo"}:
        return list(own)
    return [replace(one, algorithm=WHOLE_REDUCE_SCATTER) if one.kind == "reducescatter" else one for one in own]


def host_events(events: Iterable[Event]) -> list[Event]:
    """Return begins and ends of steps, submits and starts of operations, with the host's times instead of a device's.

    Operations of which no host time was recorded are left out.
    """
    found: list[Event] = []
    submits: dict[tuple[int, int], Event] = {}
    for event in sorted(events, key=lambda e: (e.time_ns, _ORDER.get(e.kind, 0))):
        on_host = event._replace(time_ns=event.time_ns - signed(event.e))
        if event.kind in ("STEP_BEGIN", "STEP_END"):
            found.append(on_host)
        elif event.kind == "OP_SUBMIT":
            submits[event.key, event.a] = event
        elif event.kind == "OP_START" and event.b and (event.key, event.a) in submits:
            submit = submits.pop((event.key, event.a))
            found += [submit._replace(time_ns=on_host.time_ns - event.b), on_host]
    return sorted(found, key=lambda e: e.time_ns)


def _mark(row: dict[str, Any] | None, event: Event, native: bool) -> None:
    if row is None:
        return
    if event.kind == "OP_LANE":
        row["lanes"].append((event.b, event.c, event.d))
        return
    row[_MARK[event.kind]] = event.time_ns
    if event.kind == "OP_START" and event.c:
        row["tensor_bytes"] = event.c - 1 or None
    if event.kind == "OP_DONE":
        row["error"] = signed(event.e)
        if native:
            row["wire_bytes"] = event.b
            row["algorithm"] = IN_MEMORY.get(event.d) or _named(ALGORITHMS, event.d)


def faults(events: Iterable[Event], rank: int, size: int) -> list[tr.Fault]:
    """Return stalls, lost peers and lost lanes."""
    found = []
    for e in events:
        if e.kind == "STALL":
            missing, others = missing_ranks(e, size)
            found.append(tr.Fault(rank, "stall", e.time_ns, missing, key=e.key, waited_ns=e.b, others=others))
        elif e.kind == "PEER_LOST":
            found.append(tr.Fault(rank, "peer_lost", e.time_ns, (e.a,), code=signed(e.b)))
        elif e.kind == "LANE_LOST":
            found.append(tr.Fault(rank, "lane_lost", e.time_ns, (e.a,), lane=e.b, code=signed(e.c)))
    return found


def device_clock(events: Iterable[Event], steps: Sequence[tr.Step]) -> tuple[int | None, int]:
    """Return the largest error in ns of a device's times in these steps, and the number of lost times.

    None: the times are those of the host."""
    stated = [event for event in events if event.kind == "DEVICE_CLOCK"]
    if not stated:
        return None, 0
    since_ns = min((step.begin_ns for step in steps), default=0)
    ends = [event.time_ns for event in stated[1:]]
    in_steps = [event.b for event, end in zip(stated, [*ends, float("inf")], strict=True) if end >= since_ns]
    return max(in_steps), stated[-1].c


def with_bucket_times(
    steps: Iterable[tr.Step], collectives: Iterable[tr.Collective], buckets: Sequence[tr.Bucket]
) -> list[tr.Step]:
    """Return steps of a device: gradients that are not stamped are ready when their bucket is handed over.

    Outside sampled steps only passes without buckets have stamps. A time of the host is moved into the step.
    """
    handed: dict[int, list[tuple[int, int]]] = {}
    for one in collectives:
        if one.step is not None and one.bucket is not None and not one.by_script:
            members = buckets[one.bucket].parameters
            handed.setdefault(one.step, []).extend((index, one.submit_ns) for index in members)
    return [one if one.sampled and one.grad_ready else _with_times(one, handed.get(one.index, ())) for one in steps]


def _with_times(step: tr.Step, handed: Iterable[tuple[int, int]]) -> tr.Step:
    inside = [(index, min(max(at_ns, step.begin_ns), step.end_ns)) for index, at_ns in handed]
    return replace(step, grad_ready=tuple(sorted((*step.grad_ready, *inside), key=lambda row: row[1])))


def probes(events: Iterable[Event]) -> tuple[tr.Probe, ...]:
    """Return the probe result of each number of streams."""
    return tuple(tr.Probe(e.a, e.b, e.c) for e in events if e.kind == "PROBE")


def with_probes(steps: Sequence[tr.Step], index: StepIndex, events: Iterable[Event]) -> list[tr.Step]:
    """Return the steps of a rank, those noted in which a probe of these events ended."""
    ended = {step.index for event in events if event.kind == "PROBE" and (step := index.at(event.time_ns)) is not None}
    return [replace(step, probed=True) if step.index in ended else step for step in steps]


def costs(events: Iterable[Event]) -> tuple[float, ...]:
    """Return the last recorded costs: ns per step, per byte on the wire and per byte added; () if there are none.

    If two-level sums are possible: also their fixed ns, and ns per byte beyond its time on the wire.
    """
    last = next((e for e in reversed(list(events)) if e.kind == "COSTS"), None)
    fs = () if last is None else (last.a, last.b, last.c, *((last.d, last.e) if last.d else ()))
    return tuple(value / 1e6 for value in fs)


# Rings and metadata of all ranks, combined into one Trace.

_NAMES = MappingProxyType({number: name for name, number in EVENTS.items()})
# Events for Horovod's timeline only (timeline_writer.py): rank 0 has one per rank and operation.
_LEFT_OUT = tuple(EVENTS[name] for name in ("OP_NAME", "OP_READY", "OP_PACK"))
_LASTING = tuple(EVENTS[name] for name in LASTING)

# Monotonic clocks with wall anchors this close are the same clock: no two hosts boot within this time.
SAME_CLOCK_NS = 20_000_000

RUN_FILE = "run.json"
TRAIN = "train"
NCCL = "nccl"  # the ring of NCCL's profiler plugin
_RING_NAME = re.compile(r"(\d+)\.(.+)\.ring")
_TRACE_NAME = re.compile(r"(\d+)\.jsonl\.gz")


@dataclass(frozen=True, slots=True)
class _Described:
    """A rank's description of itself, and of the model. transports: by name."""

    hostname: str = ""
    host_id: str = ""
    machine_id: str = ""
    pid: int = 0
    finished: bool = False
    error: str | None = None
    cores: tuple[int, ...] = ()
    transports: Mapping[str, tr.TransportInfo] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    parameters: tuple[tr.Parameter, ...] = ()
    buckets: tuple[tr.Bucket, ...] = ()
    quota_cores: float | None = None
    quota_group: str = ""
    stock_variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _RankFiles:
    """The files of a rank. meta: its description as it was written, without nulls."""

    rank: int
    meta: Mapping[str, Any]
    described: _Described
    rings: Mapping[str, Ring]
    notes: tuple[str, ...]

    def events(self) -> NDArray[Any]:
        return np.concatenate([ring.events for ring in self.rings.values()] or [np.empty(0, EVENT)])

    def anchor_ns(self) -> int | None:
        """Return wall clock minus monotonic clock, None without rings."""
        return next((r.opened_wall_ns - r.opened_mono_ns for r in self.rings.values()), None)

    def span_ns(self) -> NDArray[np.int64]:
        """Return when the training thread's ring was opened and its last event, on this rank's monotonic clock."""
        ring = self.rings[TRAIN]
        return np.array([ring.opened_mono_ns, max([ring.opened_mono_ns, *ring.events["time_ns"][-1:]])], np.int64)

    def lacks(self) -> list[str]:
        """Return the transports whose files of events are missing, and TRAIN if that of the training thread is."""
        opened = (name for name, info in self.described.transports.items() if info.streams_open is not None)
        return [name for name in (TRAIN, *opened) if name in (TRAIN, *NATIVE) and name not in self.rings]


def _clock(files: _RankFiles, reference_ns: int | None) -> tr.Clock:
    """Return this rank's clock relative to rank 0's."""
    if files.rank == 0:
        return tr.Clock("rank 0", 0, 0)
    events, anchor = files.events(), files.anchor_ns()
    beats = events[events["kind"] == EVENTS["CLOCK"]]
    by_wall = None if anchor is None or reference_ns is None else reference_ns - anchor
    same = by_wall is not None and abs(by_wall) <= SAME_CLOCK_NS
    if len(beats):
        clock = clock_of(beats, int(events["time_ns"].min()), int(events["time_ns"].max()))
        agrees = abs(clock.offset_ns) <= (clock.error_ns or 0)
        return tr.Clock("same clock", 0, 0) if same and agrees else clock
    known = [t["clock_offset_ns"] for t in files.meta.get("transports", {}).values() if t.get("clock_offset_ns")]
    if known:
        return tr.Clock(HEARTBEAT, int(known[0]), None)
    if by_wall is None:
        return tr.Clock()
    return tr.Clock("same clock", 0, 0) if same else tr.Clock("wall", by_wall, None)


def _named_events(ring: Ring, clock: tr.Clock, *, of_steps: bool) -> list[Event]:
    """Return the events of a ring; those with a step without the steps of its gap."""
    rows = ring.events[~np.isin(ring.events["kind"], _LEFT_OUT)]
    if of_steps and ring.gap is not None:
        first, last = ring.gap
        outside = (rows["step"] < first) | (last is not None and rows["step"] > last)
        rows = rows[outside | np.isin(rows["kind"], _LASTING)]
    rows["time_ns"] = clock.to_rank_0(rows["time_ns"].astype("i8"))
    return [
        Event(_NAMES.get(kind, str(kind)), *rest)
        for kind, *rest in rows[["kind", "time_ns", "step", "key", "a", "b", "c", "d", "e"]].tolist()
    ]


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    version = found.get("version") if isinstance(found, dict) else None
    if version != 1:
        raise ValueError(f"{path}: a run record of version {version}; this netbottleneck reads version 1")
    return found  # type: ignore[no-any-return]


def _without_nulls(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if value is not None}


@contextlib.contextmanager
def _of_file(path: Path) -> Iterator[None]:
    """Raise ValueError naming the file for a value of another shape."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}: {what}") from error


def _described_transport(name: str, info: Mapping[str, Any]) -> dict[str, Any]:
    tr.decode(int, info.get("clock_offset_ns") or 0)
    points = [dict(zip(("lanes", "bytes", "ns"), point, strict=True)) for point in info.get("probe") or ()]
    return {**_without_nulls(info), "name": name, "probe": points, "costs": []}


def _described(meta: Mapping[str, Any]) -> _Described:
    """Return the typed values of a description. Raises as decode."""
    transports = {name: _described_transport(name, info) for name, info in meta.get("transports", {}).items()}
    buckets = [{**bucket, "key": _key(bucket["key"])} for bucket in meta.get("buckets", ())]
    found: _Described = tr.decode(_Described, {**meta, "transports": transports, "buckets": buckets})
    return found


def _rank_files(folder: Path, rank: int, read: Callable[[Path], Ring]) -> _RankFiles:
    """Read the files of a rank; unreadable files become notes."""
    notes: list[str] = []
    meta, described = dict[str, Any](), _Described()
    path = folder / f"{rank}.meta.json"
    try:
        written = _without_nulls(_read_json(path))
        with _of_file(path):
            described, meta = _described(written), written
    except FileNotFoundError:
        notes.append(f"rank {rank} left no description of itself")
    except ValueError as error:
        notes.append(str(error))
    except OSError as error:
        notes.append(f"{path}: {error.strerror}")
    rings: dict[str, Ring] = {}
    for path in sorted(folder.glob(f"{rank}.*.ring")):
        try:
            name, ring = path.name.split(".", 1)[1].removesuffix(".ring"), read(path)
            if name != NCCL and ring.rank != rank:  # NCCL's ring does not know its rank
                raise ValueError(f"{path}: the ring of rank {ring.rank}")
            rings[name] = ring
        except ValueError as error:
            notes.append(f"left out: {error}")
        except OSError as error:
            notes.append(f"left out: {path}: {error.strerror}")
    return _RankFiles(rank, meta, described, rings, tuple(notes))


def _transport(info: tr.TransportInfo, events: Sequence[Event]) -> tr.TransportInfo:
    return replace(info, probe=info.probe or probes(events), costs=costs(events))


def _transports(
    described: Mapping[str, tr.TransportInfo], named: Mapping[str, list[Event]]
) -> tuple[tr.TransportInfo, ...]:
    names = dict.fromkeys([*described, *(name for name in named if name not in (TRAIN, NCCL))])
    return tuple(_transport(described.get(name) or tr.TransportInfo(name), named.get(name, ())) for name in names)


def _key(value: int | str) -> int:
    return (int(value, 0) if isinstance(value, str) else value) & (1 << 64) - 1


def _rank_trace(
    run: tr.Trace, files: _RankFiles, clock: tr.Clock, named: Mapping[str, list[Event]], plan: str | None
) -> tr.Trace:
    train = named.get(TRAIN, [])
    steps, unfinished, still_open = rank_steps(train, files.rank, run.arms, plan)
    index, buckets = StepIndex(steps), BucketIndex(run.buckets)
    # Gradients of the training thread are used only for transports without a ring; the script's own calls always.
    own = _known_algorithms(collectives(train, files.rank, None, index, buckets), files.described)
    found = [c for c in own if c.arm.transport not in named or c.phase != PHASES[0]]
    error_ns, lost = device_clock(train, steps)
    on_host = StepIndex(steps, error_ns)
    for name, events in named.items():
        if name not in (TRAIN, NCCL):
            found += collectives(events, files.rank, name, on_host, buckets)
            steps = with_probes(steps, on_host, events)
    if error_ns is not None:
        steps = with_bucket_times(steps, found, run.buckets)
    about = files.described
    ended_well = about.finished and not about.error
    rank = tr.Rank(
        files.rank,
        hostname=about.hostname,
        host_id=about.host_id,
        machine_id=about.machine_id,
        pid=next((ring.pid for ring in files.rings.values()), about.pid),
        finished=about.finished,
        error=about.error,
        clock=clock,
        # After a normal end, the last step is open: the script ends within it.
        steps_unfinished=unfinished + (still_open and not ended_well),
        events_dropped=sum(_dropped(name, ring) for name, ring in files.rings.items()) + lost,
        cores=about.cores,
        transports=_transports(about.transports, named),
        device_error_ns=error_ns,
        quota_cores=about.quota_cores,
        quota_group=about.quota_group,
        run_steps=files.rings[TRAIN].steps if TRAIN in files.rings else (),
        stock_variables=about.stock_variables,
    )
    return replace(
        run,
        ranks=(rank,),
        steps=tuple(steps),
        collectives=tuple(sorted(found, key=lambda c: c.submit_ns)),
        nccl=_nccl(run, rank, named, index, found),
        faults=tuple(f for events in named.values() for f in faults(events, files.rank, run.size)),
    )


def _nccl(
    run: tr.Trace,
    rank: tr.Rank,
    named: Mapping[str, Sequence[Event]],
    in_steps: StepIndex,
    calls: Sequence[tr.Collective],
) -> tuple[tr.NcclOperation, ...]:
    """Return NCCL's operations. in_steps, calls: of the rank, maybe with the times of its device."""
    if not named.get(NCCL):
        return ()
    if rank.device_error_ns is not None:
        train = host_events(named.get(TRAIN, ()))
        in_steps = StepIndex(rank_steps(train, rank.rank, run.arms, None)[0])
        calls = collectives(train, rank.rank, None, in_steps, BucketIndex(run.buckets))
    return nccl_operations(named[NCCL], rank.rank, in_steps.at, calls, run.buckets)


def _head(run: Mapping[str, Any], ranks: Sequence[_RankFiles]) -> tr.Trace:
    """Return the part of a trace that all ranks share. Raises as decode."""
    about = next((files.described for files in ranks if files.described.parameters), _Described())
    network = _without_nulls(run.get("network") or {})
    arms = run.get("arms") or run.get("transports")
    known = _without_nulls({**run, "arms": arms, "network": network or None})
    head: tr.Trace = tr.decode(tr.Trace, {"id": "", **known})
    return replace(
        head,
        notes=(*head.notes, *(note for files in ranks for note in files.notes)),
        modules=about.modules,
        parameters=about.parameters,
        buckets=about.buckets,
    )


def _from_rings(run: Mapping[str, Any], folder: Path, ranks: list[int], read: Callable[[Path], Ring]) -> tr.Trace:
    """Read the ranks' files of events. Notes name what is left out where one is missing.

    If all ranks left their own traces, these are read instead. Raises as `load`.
    """
    everyone = [_rank_files(folder, rank, read) for rank in ranks]
    lacking = [(files.rank, name) for files in everyone for name in files.lacks()]
    whole = _instead(folder, set(ranks), lacking)
    if whole is not None:
        return whole
    recorded = [files for files in everyone if TRAIN in files.rings]
    if not recorded:
        lost = ", ".join(f"ranks/{rank}.{TRAIN}.ring" for rank in ranks)
        raise FileNotFoundError(f"{folder.parent}: no rank has left a record of its steps: {lost}")
    with _of_file(folder.parent / RUN_FILE):
        head, plan = _head(run, everyone), tr.decode(str | None, run.get("plan"))
    reference = next((files.anchor_ns() for files in everyone if files.rank == 0), None)
    kept, left_out = _of_one_time(recorded, reference)
    parts = [_part(head, files, reference, plan) for files in kept]
    known = _known(replace(tr.merge(parts), epoch_wall_ns=reference or 0), lacking)
    known = replace(known, notes=(*known.notes, *left_out))
    gaps = list(chain.from_iterable(map(_gaps, kept)))
    return without(known, gaps) if gaps else known


def _of_one_time(ranks: Sequence[_RankFiles], reference_ns: int | None) -> tuple[list[_RankFiles], list[str]]:
    """Return the ranks whose records overlap that of the first one, and a note for each of the others."""
    first, kept, notes = ranks[0], [], []
    for files in ranks:
        if _at_the_time_of(files, first, reference_ns):
            kept.append(files)
        else:
            common = f"its record and that of rank {first.rank} have no time in common"
            notes.append(
                f"rank {files.rank} is {tr.LEFT_OUT}{common}: they are of different runs, or their clocks differ"
            )
    return kept, notes


def _at_the_time_of(files: _RankFiles, first: _RankFiles, reference_ns: int | None) -> bool:
    """Return whether the records of two ranks overlap, by their wall clocks or by rank 0's clock.

    Ranks of one run wait for each other, so their records overlap if both have a step.
    """
    both = (files, first)
    if not all((one.rings[TRAIN].events["kind"] == EVENTS["STEP_END"]).any() for one in both):
        return True

    def overlap(a: NDArray[np.int64], b: NDArray[np.int64]) -> bool:
        return bool(max(a[0], b[0]) <= min(a[1], b[1]))

    return overlap(*(one.span_ns() + (one.anchor_ns() or 0) for one in both)) or overlap(
        *(_clock(one, reference_ns).to_rank_0(one.span_ns()) for one in both)
    )


def _part(run: tr.Trace, files: _RankFiles, reference_ns: int | None, plan: str | None) -> tr.Trace:
    """Return the trace of one rank, on the clock of the reference."""
    clock = _clock(files, reference_ns)
    named = {name: _named_events(ring, clock, of_steps=name != NCCL) for name, ring in files.rings.items()}
    return _rank_trace(run, files, clock, named, plan)


def _gaps(files: _RankFiles) -> list[Gap]:
    """Return the steps that are left out for gaps in a rank's files."""
    return [gap_of(files.rank, name, ring) for name, ring in files.rings.items() if ring.gap and name != NCCL]


def _instead(folder: Path, ranks: set[int], lacking: Sequence[tuple[int, str]]) -> tr.Trace | None:
    """Return what the ranks' own traces tell, if files of events are missing and all ranks left one. Raises as load."""
    told = _own_traces(folder).keys()
    lost = [f"ranks/{rank}.{name}.ring" for rank, name in (*lacking, *((rank, TRAIN) for rank in sorted(told - ranks)))]
    if not lost or not told >= ranks:
        return None
    whole = _from_traces(folder)
    return replace(
        whole, notes=(*whole.notes, f"{', '.join(lost)} cannot be read: ranks/<rank>.jsonl.gz are read instead")
    )


def _known(trace: tr.Trace, lacking: Sequence[tuple[int, str]]) -> tr.Trace:
    """Return the trace without what is not known where files of events are missing. lacking: (rank, name) of each."""
    notes = []
    for rank, name in lacking:
        what = f"rank {rank} is" if name == TRAIN else f"steps over {name} are"
        notes.append(f"{what} {tr.LEFT_OUT}ranks/{rank}.{name}{tr.NO_EVENTS}")
    unknown = {name for _, name in lacking}
    return replace(
        trace,
        steps=tuple(step for step in trace.steps if step.arm.transport not in unknown),
        collectives=tuple(one for one in trace.collectives if one.arm.transport not in unknown),
        notes=(*trace.notes, *notes),
    )


def _dropped(name: str, ring: Ring) -> int:
    """Return the number of events that steps of the trace lack. Steps without NCCL's events are in it."""
    return ring.dropped + (ring.overwritten if name == NCCL else 0)


def load(run_dir: Path | str, read: Callable[[Path], Ring] = read_ring) -> tr.Trace:
    """Load the trace of a run folder from its rings, or else from ranks/<rank>.jsonl.gz. Writes nothing.

    read: returns the ring of a file, such as a part of it. Raises FileNotFoundError for a folder without a run, and
    ValueError naming the file for an unknown version."""
    folder = Path(run_dir)
    if not (folder / RUN_FILE).exists():
        raise FileNotFoundError(f"{folder}: no run.json here; give the folder of a run")
    run = _read_json(folder / RUN_FILE)
    ranks_dir = folder / "ranks"
    matches = [_RING_NAME.fullmatch(path.name) for path in ranks_dir.glob("*.ring")]
    ranks = sorted({int(match[1]) for match in matches if match})
    if ranks:
        return _from_rings(run, ranks_dir, ranks, read)
    return _from_traces(ranks_dir)


def _own_traces(folder: Path) -> dict[int, Path]:
    """Return the ranks' own traces, by rank."""
    names = {path: _TRACE_NAME.fullmatch(path.name) for path in folder.glob("*.jsonl.gz")}
    return {int(match[1]): path for path, match in names.items() if match is not None}


def _from_traces(folder: Path) -> tr.Trace:
    """Read the ranks' own traces; an unreadable one becomes a note. Raises as load, ValueError if none can be read."""
    numbers = _own_traces(folder)
    if not numbers:
        raise FileNotFoundError(f"{folder}: no rank has left a record")
    parts, errors = [], []
    for rank in sorted(numbers):
        try:
            parts.append(tr.read(numbers[rank]))
        except ValueError as error:
            errors.append(str(error))
    if not parts:
        raise ValueError("; ".join(errors))
    whole = tr.merge(parts)
    return replace(whole, notes=(*whole.notes, *(f"left out: {error}" for error in errors)))


def convert(run_dir: Path | str) -> tr.Trace:
    """Load a run folder and write ranks/<rank>.jsonl.gz next to the rings."""
    trace = load(run_dir)
    for rank in trace.ranks:
        tr.write(trace.of_rank(rank.rank), Path(run_dir) / "ranks" / f"{rank.rank}.jsonl.gz")
    return trace
