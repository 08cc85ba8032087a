"""Traces of torch.profiler, one file for each rank, as a Trace.

The files are Kineto's JSON. Steps are the profiler's: the script calls prof.step() after each. On the CPU, the
forward is DDP's, the backward ends at the last AccumulateGrad, and communication is what the process group annotates.
On a GPU, compute is the union of the kernels that do not communicate, and communication is NCCL's kernels. Sizes need
record_shapes=True on the CPU.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from netbottleneck.trace.model import (
    POINT_TO_POINT,
    Bucket,
    Clock,
    Collective,
    Interval,
    Parameter,
    Rank,
    Step,
    Trace,
    TransportInfo,
)
from netbottleneck.trace.transports import STOCK

HEAD_BYTES = 4096
# A kind that is part of another's name follows it.
KINDS = (
    *("allreduce", "allgather", "reducescatter", "broadcast", "barrier", "alltoall"),
    *("reduce", "gather", "scatter", "send", "recv"),
)
TWO_SIDED = ("send", "recv")
WHOLE_RESULT = ("allgather", "gather")  # their bytes are those of the whole result; gloo annotates one rank's part
UNLIKE_CALL = (*WHOLE_RESULT, "scatter", "barrier")  # gloo's annotations and the calls have different sizes
STEP = re.compile(r"ProfilerStep#(\d+)")
GRADIENT = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
# Bytes of an element, by the profiler's names of types.
ITEM_BYTES = {
    **dict.fromkeys(("double", "long int", "long"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("half", "bfloat16", "c10::half", "c10::bfloat16", "short"), 2),
    **dict.fromkeys(("signed char", "char", "unsigned char", "byte", "bool"), 1),
}
NO_KERNELS = "nccl"  # part of the name of every kernel that communicates
BACKENDS = ("gloo", "mpi", "ucc", "xccl")
FORWARD, OPTIMIZER, ACCUMULATE = "DistributedDataParallel.forward", "Optimizer.step#", "torch::autograd::AccumulateGrad"
USED = ("ProfilerStep#", "c10d::", *(f"{one}:" for one in BACKENDS), FORWARD, OPTIMIZER, GRADIENT, ACCUMULATE)

Event = Mapping[str, Any]


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def is_kineto(path: Path) -> bool:
    """True for a file that begins like a trace of torch.profiler, or has the name that the profiler gives it.

    The trace.json.gz of a report begins like one, too, and is none.
    """
    if not path.is_file() or not path.name.endswith((".json", ".json.gz")):
        return False
    if ".pt.trace." in path.name:
        return True
    try:
        with _open(path) as file:
            head = file.read(HEAD_BYTES)
    except (OSError, EOFError, zlib.error):
        return False
    return b'"steps_cut"' not in head and (b'"schemaVersion"' in head or b'"traceEvents"' in head)


def files(path: Path) -> list[Path]:
    """The profiler's traces at a path: the file itself, or those in a folder that is no run folder; may be empty."""
    if path.is_dir():
        return [] if (path / "run.json").exists() else sorted(one for one in path.iterdir() if is_kineto(one))
    return [path] if is_kineto(path) else []


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One rank's file. base_ns: to add to its times; gpu: it has kernels of a GPU; epoch_ns: wall clock at time 0."""

    path: Path
    rank: int
    size: int
    backend: str
    host: str
    base_ns: int
    events: tuple[Event, ...]
    gpu: bool
    epoch_ns: int = 0

    def ns(self, microseconds: float) -> int:
        return self.base_ns + round(1000 * microseconds)

    def span(self, event: Event) -> Interval:
        """Begin and end of an event."""
        return self.ns(event["ts"]), self.ns(event["ts"] + event.get("dur", 0))


def _communicates(event: Event) -> bool:
    return event.get("cat") == "kernel" and NO_KERNELS in event["name"].lower()


def _used(events: Sequence[Event]) -> list[Event]:
    """The events that the trace is made of, few of a profile's: the rest would take most of the memory."""
    launched = {event.get("args", {}).get("External id") for event in events if _communicates(event)} - {None}
    found = []
    for event in events:
        args, is_call = event.get("args", {}), event.get("cat") == "cpu_op"
        if event["name"].startswith(USED) or _communicates(event):
            found.append(event)
        elif event.get("cat") == "kernel" or (is_call and args.get("External id") in launched):
            about = {"args": {"External id": args["External id"]}} if is_call else {}
            found.append({name: event[name] for name in ("name", "cat", "ts", "dur") if name in event} | about)
    return found


def _read(path: Path) -> _Recorded:
    """Read one file. Raises ValueError naming it if it is damaged."""
    try:
        with _open(path) as file:
            whole = json.load(file)
        events = _used([e for e in whole["traceEvents"] if e.get("ph") == "X" and isinstance(e.get("ts"), int | float)])
        about = whole.get("distributedInfo") or {}
        rank, size = int(about.get("rank", 0)), int(about.get("world_size", 1))
        base_ns = int(whole.get("baseTimeNanoseconds", 0))
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: damaged trace of torch.profiler: {error}") from error
    events.sort(key=lambda e: e["ts"])
    gpu = any(e.get("cat") == "kernel" for e in events)
    host = str(whole.get("host_name", ""))
    return _Recorded(path, rank, size, str(about.get("backend", "")), host, base_ns, tuple(events), gpu)


def kind_of(name: str) -> str | None:
    """Kind of a collective from any of the profiler's spellings of it; None for what is none."""
    plain = re.sub(r"_|base|into|tensor|coalesced", "", name.lower())
    return next((kind for kind in KINDS if kind in plain), None)


def _elements(dims: object) -> int:
    """Number of elements in "Input Dims" of one argument: a shape, or a list of shapes."""
    if not isinstance(dims, list) or not dims:
        return 0
    if all(isinstance(one, int) for one in dims):
        return math.prod(dims)
    return sum(map(_elements, dims))


def _bytes(event: Event) -> int:
    """Bytes of an operation's tensors; 0 if the trace does not have them."""
    args = event.get("args", {})
    if "In msg nelems" in args:
        count = max(int(args["In msg nelems"]), int(args.get("Out msg nelems", 0)))
        return count * ITEM_BYTES.get(str(args.get("dtype", "")).lower(), 0)
    dims, types = args.get("Input Dims") or (), args.get("Input type") or ()
    return sum(_elements(one) * ITEM_BYTES.get(str(name).lower(), 0) for one, name in zip(dims, types, strict=False))


def _steps(found: _Recorded) -> list[Step]:
    """The profiler's steps, without their parts. Raises ValueError if there is none."""
    steps = {}
    for event in found.events:
        match = None if event.get("cat") == "gpu_user_annotation" else STEP.fullmatch(event["name"])
        if match:
            steps[int(match[1])] = Step(found.rank, int(match[1]), 0, STOCK, *found.span(event))
    if not steps:
        advice = "profile with schedule=torch.profiler.schedule(...), and call prof.step() after each step"
        raise ValueError(f"{found.path}: no step: {advice} of the training")
    return [steps[index] for index in sorted(steps)]


@dataclass(frozen=True, slots=True)
class _Operation:
    """called_ns: when the CPU called it, which tells its step. submit_ns: when the rank arrived. ranks: if not all."""

    called_ns: int
    submit_ns: int
    start_ns: int
    done_ns: int
    kind: str
    bytes: int
    group: str = ""
    ranks: int | None = None


def _cpu_operations(found: _Recorded) -> Iterator[_Operation]:
    """What the process group annotates, each with the first call before it of the same kind and size."""
    calls: dict[tuple[str, int], list[int]] = defaultdict(list)
    for event in found.events:
        if event["name"].startswith("c10d::"):
            kind = kind_of(event["name"])
            if kind is not None:
                calls[kind, _count(event, kind, 1)].append(found.span(event)[0])
    for event in found.events:
        backend, colon, name = event["name"].partition(":")
        kind = kind_of(name)
        if not colon or backend not in BACKENDS or kind is None:
            continue
        begin, end = found.span(event)
        own = calls[kind, _count(event, kind)]
        submit_ns = own.pop(0) if own and own[0] <= begin else begin
        nbytes = _bytes(event) * (found.size if kind in WHOLE_RESULT else 1)
        yield _Operation(submit_ns, submit_ns, begin, end, kind, nbytes)


def _count(event: Event, kind: str, most: int | None = None) -> int:
    """Elements of the first `most` arguments, by which a call and its annotation are paired; 0 without shapes."""
    dims = event.get("args", {}).get("Input Dims") or ()
    return 0 if kind in UNLIKE_CALL else sum(map(_elements, dims[:most]))


def _gpu_operations(found: _Recorded) -> Iterator[_Operation]:
    """NCCL's kernels. The CPU runs ahead: a rank arrives when its kernel begins, which waits for the others."""
    calls = {
        event["args"]["External id"]: found.span(event)[0]
        for event in found.events
        if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})
    }
    for event in found.events:
        args = event.get("args", {})
        if not _communicates(event):
            continue
        begin, end = found.span(event)
        kind = kind_of(str(args.get("Collective name", ""))) or kind_of(event["name"]) or "other"
        called_ns = min(begin, calls.get(args.get("External id"), begin))
        group, ranks = str(args.get("Process Group Name", "")), int(args.get("Group size") or found.size)
        members = ranks if ranks < found.size else None
        yield _Operation(called_ns, begin, begin, end, kind, _bytes(event), group, members)


class _Finder:
    """Finds the step that a time is in."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps, self._begins = steps, [step.begin_ns for step in steps]

    def at(self, time_ns: int) -> Step | None:
        place = bisect_right(self._begins, time_ns) - 1
        return self._steps[place] if place >= 0 and time_ns < self._steps[place].end_ns else None


def _collectives(found: _Recorded, steps: Sequence[Step], groups: list[str]) -> list[Collective]:
    """The operations of a rank's steps. A collective is the same on all ranks by its place in its step and group.

    Sends and receives have keys of their own on each rank, and belong to the script.
    """
    rows, places, buckets, finder = [], Counter[tuple[int, str, bool]](), Counter[int](), _Finder(steps)
    operations = _gpu_operations(found) if found.gpu else _cpu_operations(found)
    for one in sorted(operations, key=lambda o: (o.called_ns, o.start_ns)):
        step = finder.at(one.called_ns)
        if step is None:
            continue
        if one.group not in groups:
            groups.append(one.group)
        two_sided = one.kind in TWO_SIDED
        place = places[step.index, one.group, two_sided]
        places[step.index, one.group, two_sided] += 1
        bucket = None if found.gpu or one.kind != "allreduce" else buckets[step.index]
        buckets[step.index] += bucket is not None
        rows.append(
            Collective(
                found.rank,
                STOCK,
                place + 1 + two_sided * POINT_TO_POINT * (found.rank + 1),
                step.index,
                one.submit_ns,
                one.bytes,
                f"{one.kind}.{place}",
                step.index,
                groups.index(one.group),
                one.ranks,
                kind=one.kind,
                phase="other" if two_sided else "reduce",
                bucket=bucket,
                start_ns=one.start_ns,
                done_ns=one.done_ns,
            )
        )
    return rows


def _with_parts(found: _Recorded, steps: Sequence[Step]) -> list[Step]:
    """The steps with their forward, gradients and optimizer, or on a GPU with their kernels."""
    forward: dict[int, list[Interval]] = defaultdict(list)
    optimizer: dict[int, list[Interval]] = defaultdict(list)
    ready: dict[int, list[int]] = defaultdict(list)
    finder = _Finder(steps)
    for event in found.events:
        name = event["name"]
        begin, end = found.span(event)
        step = finder.at(begin)
        if step is None:
            continue
        if found.gpu:
            if event.get("cat") == "kernel" and not _communicates(event):
                forward[step.index].append((begin, min(end, step.end_ns)))
        elif name == FORWARD:
            forward[step.index].append((begin, end))
        elif name.startswith(OPTIMIZER):
            optimizer[step.index].append((begin, end))
        elif name == GRADIENT:
            ready[step.index].append(end)
    return [
        replace(
            step,
            forward=tuple(_union(forward[step.index])),
            optimizer=tuple(optimizer[step.index]),
            grad_ready=tuple(enumerate(ready[step.index])),
        )
        for step in steps
    ]


def _with_waits(steps: Sequence[Step], rows: Sequence[Collective]) -> list[Step]:
    """The steps with their waits: from the last gradient to the optimizer, while an operation was on its way."""
    found, of = [], defaultdict[int | None, list[Collective]](list)
    for one in rows:
        of[one.step].append(one)
    for step in steps:
        ready_ns = max((at for _, at in step.grad_ready), default=step.end_ns)
        update_ns = min((begin for begin, _ in step.optimizer if begin >= ready_ns), default=ready_ns)
        spans = _union((max(o.submit_ns, ready_ns), min(o.done_ns or 0, update_ns)) for o in of[step.index])
        found.append(replace(step, waits=tuple((0, begin, end) for begin, end in spans)))
    return found


def _without_tail(steps: list[Step], rows: Sequence[Collective]) -> list[Step]:
    """The steps without the last one if nothing happens in it: the last prof.step() has opened it."""
    last = steps[-1]
    used = last.forward or last.optimizer or last.grad_ready or any(one.step == last.index for one in rows)
    return steps if used or len(steps) == 1 else steps[:-1]


def _union(spans: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted((begin, end) for begin, end in spans if begin < end):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _model(found: _Recorded, steps: Sequence[Step], own: Sequence[Collective]) -> tuple[list[Parameter], list[Bucket]]:
    """Gradients in the order of the backward, and the all-reduces that carry them; empty unless their sizes agree."""
    step, finder = steps[-1], _Finder(steps)
    gradients = [
        _bytes(event)
        for event in found.events
        if event["name"] == ACCUMULATE and finder.at(found.span(event)[0]) is step
    ]
    reduced = [one for one in own if one.step == step.index and one.kind == "allreduce"]
    if not gradients or sum(gradients) != sum(one.tensor_bytes for one in reduced):
        return [], []
    parameters, buckets, at = [], [], 0
    for number, one in enumerate(reduced):
        first, left = at, one.tensor_bytes
        while left > 0 and at < len(gradients):
            parameters.append(Parameter(f"gradient {at}", gradients[at], "float32", number))
            left -= gradients[at]
            at += 1
        if left:
            return [], []
        buckets.append(Bucket(one.name, one.key, one.tensor_bytes, "float32", tuple(range(first, at))))
    return parameters, buckets


def _rank(found: _Recorded, first: _Recorded) -> Rank:
    same = found.host == first.host and found.host != ""
    clock = Clock("rank 0") if found is first else Clock("same clock" if same else "wall")
    transport = TransportInfo(STOCK.transport, provider=found.backend or None)
    return Rank(found.rank, found.host, found.host, finished=True, clock=clock, transports=(transport,))


def _notes(ranks: Sequence[_Recorded], damaged: Sequence[str], rows: Sequence[Collective]) -> Iterator[str]:
    yield "read from traces of torch.profiler: the profiler's own cost is part of the steps."
    yield from damaged
    if any(one.gpu for one in ranks):
        yield "compute is all kernels that do not communicate: forward, backward and optimizer are not distinguished."
    if rows and not any(one.tensor_bytes for one in rows):
        yield "the sizes of operations are not in these traces: profile with record_shapes=True."


class _OfRank(Protocol):
    """What was read from one rank's file."""

    @property
    def rank(self) -> int: ...


_R = TypeVar("_R", bound=_OfRank)


def readable(paths: Sequence[Path], read: Callable[[Path], _R], what: str) -> tuple[list[_R], list[str]]:
    """Return what `read` finds in each file, and a note for each damaged one.

    Raises ValueError if no file can be read, or two are of one rank. what: the kind of file.
    """
    ranks: list[_R] = []
    damaged = []
    for path in paths:
        try:
            ranks.append(read(path))
        except ValueError as error:
            damaged.append(f"left out: {error}")
    if not ranks:
        raise ValueError("; ".join(damaged) or f"no {what}")
    twice = [rank for rank, count in Counter(one.rank for one in ranks).items() if count > 1]
    if twice:
        raise ValueError(f"{paths[0].parent}: more than one {what} of rank {twice[0]}: give the files of one run")
    return ranks, damaged


def _read_all(paths: Sequence[Path]) -> tuple[list[_Recorded], list[str]]:
    """The files by rank, on a clock that begins with the first step, and a note for each damaged file."""
    ranks, damaged = readable(paths, _read, "trace of torch.profiler")
    epoch_ns = min(_steps(one)[0].begin_ns for one in ranks)
    return [
        replace(one, base_ns=one.base_ns - epoch_ns, epoch_ns=epoch_ns)
        for one in sorted(ranks, key=lambda one: one.rank)
    ], damaged


def load(paths: Sequence[Path]) -> Trace:
    """The trace of a run from the files of its ranks. A damaged file is named in the notes.

    Raises ValueError if no file can be read, if a rank has two, or if a file has no step.
    """
    ranks, damaged = _read_all(paths)
    groups: list[str] = []
    steps, rows = [], []
    for one in ranks:
        bare = _steps(one)
        rows.append(_collectives(one, bare, groups))
        steps.append(_without_tail(_with_waits(_with_parts(one, bare), rows[-1]), rows[-1]))
    parameters, buckets = _model(ranks[0], steps[0], rows[0])
    everything = tuple(row for own in rows for row in own)
    return Trace(
        paths[0].parent.name if len(paths) > 1 else paths[0].name.partition(".")[0],
        max(ranks[-1].rank + 1, *(one.size for one in ranks)),
        (STOCK,),
        started_wall_ns=ranks[0].epoch_ns,
        epoch_wall_ns=ranks[0].epoch_ns,
        notes=tuple(_notes(ranks, damaged, everything)),
        ranks=tuple(_rank(one, ranks[0]) for one in ranks),
        parameters=tuple(parameters),
        buckets=tuple(buckets),
        steps=tuple(step for own in steps for step in own),
        collectives=everything,
    )
