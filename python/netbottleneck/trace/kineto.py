"""Traces of torch.profiler (Kineto's JSON, one file for each rank) as a Trace, as far as they tell.

Steps are the profiler's: the script calls prof.step() after each. On the CPU, the forward is DDP's, the backward ends
at the last AccumulateGrad, and communication is what the process group annotates. On a GPU, compute is the union of the
kernels that do not communicate, and communication is NCCL's kernels. Sizes need record_shapes=True on the CPU.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from netbottleneck.trace.model import (
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
KINDS = ("allreduce", "allgather", "reducescatter", "broadcast", "barrier", "alltoall")
STEP = re.compile(r"ProfilerStep#(\d+)")
GRADIENT = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
# Bytes of an element, by the profiler's names of types.
ITEM_BYTES = {
    "float": 4,
    "double": 8,
    "half": 2,
    "bfloat16": 2,
    "c10::half": 2,
    "c10::bfloat16": 2,
    "long int": 8,
    "long": 8,
    "int": 4,
    "short": 2,
    "signed char": 1,
    "char": 1,
    "unsigned char": 1,
    "byte": 1,
    "bool": 1,
}
NO_KERNELS = "nccl"  # part of the name of every kernel that communicates

Event = Mapping[str, Any]


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def is_kineto(path: Path) -> bool:
    """True for a file that begins like a trace of torch.profiler, or has the name that the profiler gives it."""
    if not path.is_file() or not path.name.endswith((".json", ".json.gz")):
        return False
    if ".pt.trace." in path.name:
        return True
    try:
        with _open(path) as file:
            head = file.read(HEAD_BYTES)
    except (OSError, EOFError, zlib.error):
        return False
    return b'"schemaVersion"' in head or b'"traceEvents"' in head


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


def _read(path: Path) -> _Recorded:
    """Read one file. Raises ValueError naming it if it is damaged."""
    try:
        with _open(path) as file:
            whole = json.load(file)
        events = [e for e in whole["traceEvents"] if e.get("ph") == "X" and isinstance(e.get("ts"), int | float)]
        about = whole.get("distributedInfo") or {}
        rank, size = int(about.get("rank", 0)), int(about.get("world_size", 1))
        base_ns = int(whole.get("baseTimeNanoseconds", 0))
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: damaged trace of torch.profiler: {error}") from error
    events.sort(key=lambda e: e["ts"])
    gpu = any(e.get("cat") == "kernel" for e in events)
    host = str(whole.get("host_name", ""))
    return _Recorded(path, rank, size, str(about.get("backend", "")), host, base_ns, tuple(events), gpu)


def _kind(name: str) -> str | None:
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
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not dims or not types:
        return 0
    return _elements(dims[0]) * ITEM_BYTES.get(str(types[0]).lower(), 0)


def _steps(found: _Recorded) -> list[Step]:
    """The profiler's steps, without their parts. Raises ValueError if there is none."""
    steps = {}
    for event in found.events:
        match = STEP.fullmatch(event["name"])
        if match and event.get("cat") != "gpu_user_annotation":
            steps[int(match[1])] = Step(found.rank, int(match[1]), 0, STOCK, *found.span(event))
    if not steps:
        raise ValueError(f"{found.path}: no step: call prof.step() after each step of the training")
    return [steps[index] for index in sorted(steps)]


@dataclass(frozen=True, slots=True)
class _Operation:
    submit_ns: int
    start_ns: int
    done_ns: int
    kind: str
    bytes: int
    group: str = ""


def _cpu_operations(found: _Recorded) -> Iterator[_Operation]:
    """What the process group annotates, each with the call of the same kind and size that came before it."""
    calls: dict[tuple[str, str], list[int]] = defaultdict(list)
    for event in found.events:
        if event["name"].startswith("c10d::"):
            kind = _kind(event["name"])
            if kind is not None:
                calls[kind, _shape(event)].append(found.span(event)[0])
    for event in found.events:
        backend, colon, name = event["name"].partition(":")
        kind = _kind(name)
        if not colon or backend not in ("gloo", "mpi", "ucc", "xccl") or kind is None:
            continue
        begin, end = found.span(event)
        own = calls[kind, _shape(event)]
        submit_ns = own.pop(0) if own and own[0] <= begin else begin
        yield _Operation(submit_ns, begin, end, kind, _bytes(event))


def _shape(event: Event) -> str:
    """The number of elements, by which a call and its annotation are paired; "" if shapes were not recorded."""
    dims = event.get("args", {}).get("Input Dims")
    return str(_elements(dims[0])) if dims else ""


def _gpu_operations(found: _Recorded) -> Iterator[_Operation]:
    """NCCL's kernels, each with the call that launched it. Of a call's kernels, begin and end count."""
    calls = {
        event["args"]["External id"]: found.span(event)[0]
        for event in found.events
        if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})
    }
    for event in found.events:
        args = event.get("args", {})
        kind = _kind(str(args.get("Collective name", event["name"])))
        if event.get("cat") != "kernel" or NO_KERNELS not in event["name"].lower() or kind is None:
            continue
        begin, end = found.span(event)
        submit_ns = min(begin, calls.get(args.get("External id"), begin))
        yield _Operation(submit_ns, begin, end, kind, _bytes(event), str(args.get("Process Group Name", "")))


class _Finder:
    """Finds the step that a time is in."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps, self._begins = steps, [step.begin_ns for step in steps]

    def at(self, time_ns: int) -> Step | None:
        place = bisect_right(self._begins, time_ns) - 1
        return self._steps[place] if place >= 0 and time_ns < self._steps[place].end_ns else None


def _collectives(found: _Recorded, steps: Sequence[Step], groups: list[str]) -> list[Collective]:
    """The operations of a rank's steps. An operation is the same on all ranks by its place in its step and group."""
    rows, places, finder = [], Counter[tuple[int, str]](), _Finder(steps)
    operations = _gpu_operations(found) if found.gpu else _cpu_operations(found)
    for one in sorted(operations, key=lambda o: (o.submit_ns, o.start_ns)):
        step = finder.at(one.submit_ns)
        if step is None:
            continue
        if one.group not in groups:
            groups.append(one.group)
        place = places[step.index, one.group]
        places[step.index, one.group] += 1
        rows.append(
            Collective(
                found.rank,
                STOCK,
                place + 1,
                step.index,
                one.submit_ns,
                one.bytes,
                f"{one.kind}.{place}",
                step.index,
                groups.index(one.group),
                kind=one.kind,
                bucket=place if not found.gpu else None,
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
        name, category = event["name"], event.get("cat")
        begin, end = found.span(event)
        step = finder.at(begin)
        if step is None:
            continue
        if found.gpu:
            if category == "kernel" and NO_KERNELS not in name.lower():
                forward[step.index].append((begin, min(end, step.end_ns)))
        elif name == "DistributedDataParallel.forward":
            forward[step.index].append((begin, end))
        elif name.startswith("Optimizer.step#"):
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


def _union(spans: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(spans):
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
        if event["name"] == "torch::autograd::AccumulateGrad" and finder.at(found.span(event)[0]) is step
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


def _read_all(paths: Sequence[Path]) -> tuple[list[_Recorded], list[str]]:
    """The files by rank, on a clock that begins with the first step, and a note for each damaged file."""
    ranks: list[_Recorded] = []
    damaged = []
    for path in paths:
        try:
            ranks.append(_read(path))
        except ValueError as error:
            damaged.append(f"left out: {error}")
    if not ranks:
        raise ValueError("; ".join(damaged) or "no trace of torch.profiler")
    twice = [rank for rank, count in Counter(one.rank for one in ranks).items() if count > 1]
    if twice:
        raise ValueError(f"{paths[0].parent}: two traces of rank {twice[0]}: give the folder of one run")
    epoch_ns = min(_steps(one)[0].begin_ns for one in ranks)
    return [
        replace(one, base_ns=one.base_ns - epoch_ns, epoch_ns=epoch_ns) for one in sorted(ranks, key=_number)
    ], damaged


def _number(one: _Recorded) -> int:
    return one.rank


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
        steps.append(_with_parts(one, bare))
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
