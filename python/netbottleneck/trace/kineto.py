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
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from netbottleneck.trace.matching import Profiled, matched
from netbottleneck.trace.model import (
    NOT_RECORDED,
    POINT_TO_POINT,
    TWO_SIDED,
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
RANKS_MOST = 1 << 20  # a larger number is no rank
# Microseconds of 95 years: a time of a trace farther from 0 is damaged. The sum of three such times fits in 64 bits.
US_MOST = 95 * 365 * 86400 * 10**6
SHOWN_MOST = 40  # characters of a damaged value in a message
# A kind that is part of another's name follows it.
KINDS = (
    *("allreduce", "allgather", "reducescatter", "broadcast", "barrier", "alltoall"),
    *("reduce", "gather", "scatter", "send", "recv"),
)
WHOLE_RESULT = ("allgather", "gather")  # their bytes are those of the whole result; gloo annotates one rank's part
# gloo's annotations and the calls have different sizes; of an all-to-all, those of the input and of the output
UNLIKE_CALL = (*WHOLE_RESULT, "scatter", "barrier", "alltoall")
SPARSE = "sparse"  # part of the name of an operation of a sparse tensor, whose shape does not tell its bytes
UNANNOTATED_CALL = "c10d::monitored_barrier_"  # gloo annotates its sends and receives, not a barrier
STEP = re.compile(r"ProfilerStep#(\d+)")
LAUNCHES = ("cuda_runtime", "cuda_driver")  # categories of the calls that launch kernels, among others
GRADIENT = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
# Bytes of an element, by the profiler's names of types in lower case.
FLOAT8 = tuple(f"float8_{form}" for form in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"))
ITEM_BYTES = {
    **dict.fromkeys(("complexdouble", "c10::complex<double>"), 16),
    **dict.fromkeys(("double", "long int", "long", "unsigned long", "uint64"), 8),
    **dict.fromkeys(("complexfloat", "c10::complex<float>"), 8),
    **dict.fromkeys(("float", "int", "unsigned int", "uint32", "complexhalf", "c10::complex<c10::half>"), 4),
    **dict.fromkeys(("half", "bfloat16", "c10::half", "c10::bfloat16", "short", "unsigned short", "uint16"), 2),
    **dict.fromkeys(("signed char", "char", "unsigned char", "byte", "bool"), 1),
    **dict.fromkeys((*FLOAT8, *(f"c10::{name}" for name in FLOAT8)), 1),
}
IN_COUNT, OUT_COUNT, GROUP_SIZE = "In msg nelems", "Out msg nelems", "Group size"
GROUP_NAME, GROUP_RANKS = "Process Group Name", "Process Group Ranks"
NO_KERNELS = "nccl"  # part of the name of every kernel that communicates
BACKENDS = ("gloo", "mpi", "ucc", "xccl")
ACTIVITIES = "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
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
    """One rank's file. base_ns: to add to its times; gpu: it has kernels of a GPU; epoch_ns: wall clock at time 0.

    size: 0 if neither distributedInfo nor an operation has it. missing: fields that distributedInfo lacks.
    kernels_communicate: operations are NCCL's kernels. calls_nccl: the CPU called NCCL. part_groups: the ranks of each
    group of several, but not all, by its name.
    """

    path: Path
    rank: int
    size: int
    backend: str
    host: str
    base_ns: int
    events: tuple[Event, ...]
    gpu: bool
    kernels_communicate: bool
    calls_nccl: bool
    missing: tuple[str, ...] = ()
    part_groups: Mapping[str, str] = field(default_factory=dict)
    epoch_ns: int = 0

    @property
    def lacks_nccl(self) -> bool:
        """True if one of several ranks called NCCL, and its trace has no kernel of NCCL or other backend's operation.

        On one rank, NCCL needs no kernel.
        """
        operations = self.kernels_communicate or any(map(_annotated, self.events))
        return self.calls_nccl and self.size != 1 and not operations

    def ns(self, microseconds: float) -> int:
        return self.base_ns + round(1000 * microseconds)

    def span(self, event: Event) -> Interval:
        """Begin and end of an event."""
        return self.ns(event["ts"]), self.ns(event["ts"] + event.get("dur", 0))


def _communicates(event: Event) -> bool:
    return event.get("cat") == "kernel" and NO_KERNELS in event["name"].lower()


def _computes(event: Event) -> bool:
    """True for a kernel of a GPU that does not communicate."""
    return event.get("cat") == "kernel" and not _communicates(event)


def _trains(event: Event) -> bool:
    """True for a part of a step on the CPU."""
    name = event["name"]
    return name in (FORWARD, GRADIENT) or bool(name.startswith(OPTIMIZER))


def _annotated(event: Event) -> bool:
    """True for an operation of a process group on the CPU."""
    backend, colon, name = event["name"].partition(":")
    return bool(colon) and backend in BACKENDS and kind_of(name) is not None


def _launches(event: Event) -> bool:
    """True for a call that launches a kernel."""
    return event.get("cat") in LAUNCHES and "Launch" in event["name"]


def _used(events: Sequence[Event]) -> list[Event]:
    """The events that the trace is made of, few of a profile's: the rest would take most of the memory.

    Of the calls that launch kernels, the last one.
    """
    last = max(filter(_launches, events), key=lambda event: event["ts"], default=None)
    launched = {event.get("args", {}).get("External id") for event in events if _communicates(event)} - {None}
    found = []
    for event in events:
        args, is_call = event.get("args", {}), event.get("cat") == "cpu_op"
        if event["name"].startswith(USED) or _communicates(event) or event is last:
            found.append(event)
        elif event.get("cat") == "kernel" or (is_call and args.get("External id") in launched):
            about = {"args": {"External id": args["External id"]}} if is_call else {}
            found.append({name: event[name] for name in ("name", "cat", "ts", "dur") if name in event} | about)
    return found


def _count_of(args: Mapping[str, Any], field: str) -> int:
    """A count among the arguments of an event. Raises ValueError naming the field."""
    value = args[field]
    try:
        count = int(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f'"{field}" is {json.dumps(value)}, which is not a number') from error
    if count < 0:
        raise ValueError(f'"{field}" is {count}, which is less than 0')
    return count


def _shown(value: object) -> str:
    """A value of a file in a message."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN_MOST else f"{text[:SHOWN_MOST]}…"


def _spans(events: Iterable[Event]) -> list[Event]:
    """The events with a begin and a length. Raises ValueError naming one with other arguments than an object."""
    spans = [event for event in events if event.get("ph") == "X" and isinstance(event.get("ts"), int | float)]
    bad = next((event for event in spans if not isinstance(event.get("args", {}), dict)), None)
    if bad is not None:
        raise ValueError(f'event {bad["name"]!r}: "args" is {json.dumps(bad["args"])}, which is not an object')
    return spans


def _check(event: Event) -> None:
    """Raise ValueError naming the event and the field that has no usable value."""
    try:
        for field in ("ts", "dur"):
            value = event.get(field, 0)
            if not isinstance(value, int | float) or not abs(value) <= US_MOST:
                raise ValueError(f'"{field}" is {_shown(value)}, which is not a time')
        args = event.get("args", {})
        for field in (IN_COUNT, OUT_COUNT, GROUP_SIZE):
            if field in args and (field != GROUP_SIZE or args[field] is not None):
                _count_of(args, field)
    except ValueError as error:
        raise ValueError(f"event {event['name']!r}: {error}; export the trace again") from error


def _group_size(events: Sequence[Event]) -> int:
    """Ranks of the largest group of an operation; 0 if no event has them. Raises ValueError naming the field."""
    about = [event.get("args", {}) for event in events]
    return max((_count_of(args, GROUP_SIZE) for args in about if args.get(GROUP_SIZE) is not None), default=0)


def _place(about: Mapping[str, Any], events: Sequence[Event]) -> tuple[int, int, tuple[str, ...]]:
    """Rank, number of ranks (0: not known), and the fields that distributedInfo lacks.

    Without an operation, the size is 1. Raises ValueError naming a field without a usable number.
    """
    missing = tuple(field for field in ("rank", "world_size") if field not in about)
    rank = 0 if "rank" in missing else _count_of(about, "rank")
    if rank >= RANKS_MOST:
        raise ValueError(f'"rank" is {rank}: a rank is below {RANKS_MOST}')
    if "world_size" in missing:
        communicates = any(_communicates(event) or _annotated(event) for event in events)
        return rank, _group_size(events) if communicates else 1, missing
    size = _count_of(about, "world_size")
    if not rank < size <= RANKS_MOST:
        raise ValueError(f'"rank" is {rank} and "world_size" {size}: the size is above the rank, at most {RANKS_MOST}')
    return rank, size, missing


def _part_groups(about: Mapping[str, Any], size: int) -> dict[str, str]:
    """Ranks, as text, of each group of several, but not all `size`, by its name, as far as distributedInfo has them."""
    groups = about.get("pg_config")
    told = [one for one in groups if isinstance(one, dict)] if isinstance(groups, list) else []
    parts = [one for one in told if isinstance(one.get("pg_size"), int) and 1 < one["pg_size"] < size]
    return {str(one.get("pg_name", "")): str(one.get("ranks") or "") for one in parts}


def _read(path: Path) -> _Recorded:
    """Read one file. Raises ValueError naming it if it is damaged."""
    try:
        with _open(path) as file:
            whole = json.load(file)
        spans = _spans(whole["traceEvents"])
        events = _used(spans)
        for event in events:
            _check(event)
        about = whole.get("distributedInfo") or {}
        if not isinstance(about, dict):
            raise ValueError(f'"distributedInfo" is {_shown(about)}, not an object')
        rank, size, missing = _place(about, spans)
        base_ns = _count_of({"baseTimeNanoseconds": 0} | whole, "baseTimeNanoseconds")
        if base_ns > 1000 * US_MOST:
            raise ValueError(f'"baseTimeNanoseconds" is {_shown(base_ns)}, which is not a time')
        calls_nccl = any(e["name"].startswith("nccl:") for e in spans) or (
            any(e["name"] == "record_param_comms" for e in spans) and not any(map(_annotated, events))
        )
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path}: damaged trace of torch.profiler: {error}") from error
    events.sort(key=lambda e: e["ts"])
    gpu, communicate = any(e.get("cat") == "kernel" for e in events), any(map(_communicates, events))
    host, backend = str(whole.get("host_name", "")), str(about.get("backend", ""))
    parts = _part_groups(about, size)
    return _Recorded(
        path, rank, size, backend, host, base_ns, tuple(events), gpu, communicate, calls_nccl, missing, parts
    )


def kind_of(name: str) -> str | None:
    """Kind of a collective from any of the profiler's spellings of it; None for what is none."""
    plain = re.sub(r"_|base|into|tensor|coalesced", "", name.lower())
    return next((kind for kind in KINDS if kind in plain), None)


def _elements(dims: object, tensor: bool) -> int:
    """Number of elements in "Input Dims" of one argument: a shape, or a list of shapes. tensor: [] is the shape of one.

    A tensor without dimensions has one element; other arguments than tensors have [] too.
    """
    if not isinstance(dims, list) or not (dims or tensor):
        return 0
    if all(isinstance(one, int) for one in dims):
        return math.prod(dims)
    return sum(_elements(one, True) for one in dims)


def _tensors(args: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Elements and type of each tensor of an operation; of a kernel, those of the larger of its input and output."""
    if IN_COUNT in args:
        count = max(_count_of(args, IN_COUNT), _count_of({OUT_COUNT: 0} | dict(args), OUT_COUNT))
        return [(count, str(args.get("dtype", "")))]
    dims, types = args.get("Input Dims") or (), args.get("Input type") or ()
    pairs = zip(dims, map(str, types), strict=False)
    return [(_elements(one, name.lower() in ITEM_BYTES), name) for one, name in pairs]


def _bytes(event: Event, kind: str = "") -> int | None:
    """Bytes of an operation's tensors; None if the trace does not have them. kind: a barrier has no tensor."""
    tensors = _tensors(event.get("args", {}))
    if _unknown_types(event) or (not tensors and kind != "barrier"):
        return None
    return sum(count * ITEM_BYTES.get(name.lower(), 0) for count, name in tensors)


def _unknown_types(event: Event) -> set[str]:
    """Names of the types of an operation's tensors whose bytes are not known; SPARSE of a sparse tensor."""
    if SPARSE in event.get("name", ""):
        return {SPARSE}
    return {name for count, name in _tensors(event.get("args", {})) if count and name.lower() not in ITEM_BYTES}


def _steps(found: _Recorded) -> list[Step]:
    """The profiler's steps, without their parts. Raises ValueError if there is none."""
    steps = {}
    for event in found.events:
        match = None if event.get("cat") == "gpu_user_annotation" else STEP.fullmatch(event["name"])
        if match:
            steps[int(match[1])] = Step(found.rank, int(match[1]), 0, STOCK, *found.span(event))
    if not steps:
        also = f"{ACTIVITIES}, " if found.gpu else ""
        advice = f"profile with {also}schedule=torch.profiler.schedule(...), and call prof.step() after each step"
        raise ValueError(f"{found.path}: no step: {advice} of the training")
    return [steps[index] for index in sorted(steps)]


@dataclass(frozen=True, slots=True)
class _Operation:
    """called_ns: when the CPU called it, which tells its step. submit_ns: when the rank arrived.

    group: name and ranks, as text; "" if not known. ranks: their number. Both only if not all.
    """

    called_ns: int
    submit_ns: int
    start_ns: int
    done_ns: int
    kind: str
    bytes: int | None
    group: tuple[str, str] = ("", "")
    ranks: int | None = None
    unknown_types: frozenset[str] = frozenset()


def _cpu_operations(found: _Recorded, steps: Sequence[Step]) -> Iterator[_Operation]:
    """What the process group annotates, each with the first call before it of the same kind and size.

    Operations in flight begin in the order of their calls. A call is dropped if a later step has another one before
    the annotation: the process group did not annotate it.
    """
    begins = [-math.inf, *(step.begin_ns for step in steps)]
    calls: dict[tuple[str, int], list[int]] = defaultdict(list)
    for event in found.events:
        if event["name"].startswith("c10d::") and event["name"] != UNANNOTATED_CALL:
            kind = kind_of(event["name"])
            if kind is not None:
                calls[kind, _count(event, kind, 1)].append(found.span(event)[0])
    for event in found.events:
        kind = kind_of(event["name"].partition(":")[2])
        if kind is None or not _annotated(event):
            continue
        begin, end = found.span(event)
        own = calls[kind, _count(event, kind)]
        submit_ns, before = begin, bisect_right(own, begin)
        if before:
            first = bisect_left(own, begins[bisect_right(begins, own[before - 1]) - 1])
            submit_ns = own[first]
            del own[: first + 1]
        nbytes, parts = _bytes(event, kind), found.size if kind in WHOLE_RESULT else 1
        whole = None if nbytes is None else nbytes * parts
        unknown = frozenset(_unknown_types(event))
        yield _Operation(submit_ns, submit_ns, begin, end, kind, whole, unknown_types=unknown)


def _count(event: Event, kind: str, most: int | None = None) -> int:
    """Elements of the first `most` arguments, by which a call and its annotation are paired; 0 without shapes."""
    return 0 if kind in UNLIKE_CALL else sum(count for count, _ in _tensors(event.get("args", {}))[:most])


def _group(found: _Recorded, args: Mapping[str, Any]) -> tuple[tuple[str, str], int | None]:
    """Group and number of ranks of a kernel: see _Operation. Groups of different ranks may have one name."""
    name, size = str(args.get(GROUP_NAME) or ""), int(args.get(GROUP_SIZE) or found.size)
    if size >= found.size:
        return (name, ""), None
    alone = str([found.rank]) if size == 1 else ""
    return (name, str(args.get(GROUP_RANKS) or found.part_groups.get(name, alone))), size


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
        group, members = _group(found, args)
        unknown = frozenset(_unknown_types(event))
        yield _Operation(called_ns, begin, begin, end, kind, _bytes(event, kind), group, members, unknown)


class _Finder:
    """Finds the step that a time is in, and the steps that a span is in."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps, self._begins = steps, [step.begin_ns for step in steps]

    def at(self, time_ns: int) -> Step | None:
        place = bisect_right(self._begins, time_ns) - 1
        return self._steps[place] if place >= 0 and time_ns < self._steps[place].end_ns else None

    def over(self, begin_ns: int, end_ns: int) -> Iterator[Step]:
        """The steps that a span is in."""
        for place in range(max(bisect_right(self._begins, begin_ns) - 1, 0), len(self._steps)):
            step = self._steps[place]
            if step.begin_ns >= end_ns:
                return
            if step.end_ns > begin_ns:
                yield step


def _collectives(
    found: _Recorded, steps: Sequence[Step], groups: list[tuple[str, str]], unknown: list[frozenset[str]]
) -> list[Collective]:
    """The operations of a rank's steps. A collective is the same on all ranks by its place in its step and group.

    Sends and receives have keys of their own on each rank, and belong to the script. unknown: grows by the types of
    each operation that has types of unknown bytes.
    """
    rows, places, buckets, finder = [], Counter[tuple[int, tuple[str, str], bool]](), Counter[int](), _Finder(steps)
    operations = _gpu_operations(found) if found.kernels_communicate else _cpu_operations(found, steps)
    for one in sorted(operations, key=lambda o: (o.called_ns, o.start_ns)):
        step = finder.at(one.called_ns)
        if step is None:
            continue
        if one.group not in groups:
            groups.append(one.group)
        if one.unknown_types:
            unknown.append(one.unknown_types)
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


def _untold_groups(found: _Recorded, own: Sequence[Collective], groups: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Names of the groups whose operations cannot be told from those of others: see Profiled."""
    if not found.kernels_communicate:
        return tuple(found.part_groups)
    parts = [groups[row.comm] for row in own if row.ranks is not None and row.kind not in TWO_SIDED]
    return tuple(name for name, ranks in parts if not ranks)


def _with_parts(found: _Recorded, steps: Sequence[Step]) -> list[Step]:
    """The steps with their forward, gradients and optimizer, or on a GPU with their kernels."""
    forward: dict[int, list[Interval]] = defaultdict(list)
    optimizer: dict[int, list[Interval]] = defaultdict(list)
    ready: dict[int, list[int]] = defaultdict(list)
    finder = _Finder(steps)
    for event in found.events:
        name = event["name"]
        begin, end = found.span(event)
        if found.gpu:
            for part in finder.over(begin, end) if _computes(event) else ():
                forward[part.index].append((max(begin, part.begin_ns), min(end, part.end_ns)))
            continue
        step = finder.at(begin)
        if step is None:
            continue
        if name == FORWARD:
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


def _without_tail(found: _Recorded, steps: list[Step], rows: Sequence[Collective]) -> list[Step]:
    """The steps without the last one if nothing begins in it: the last prof.step() has opened it.

    Kernels may begin in it that were launched before.
    """
    last = steps[-1]
    launched = any(map(_launches, found.events))
    work = _trains if not found.gpu else _launches if launched else _computes
    begins = (found.span(event)[0] for event in found.events if work(event))
    used = any(last.begin_ns <= at < last.end_ns for at in begins) or any(one.step == last.index for one in rows)
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
        _bytes(event) or 0
        for event in found.events
        if event["name"] == ACCUMULATE and finder.at(found.span(event)[0]) is step
    ]
    reduced = [one for one in own if one.step == step.index and one.kind == "allreduce"]
    if not gradients or sum(gradients) != sum(one.known_bytes for one in reduced):
        return [], []
    parameters, buckets, at = [], [], 0
    for number, one in enumerate(reduced):
        first, left = at, one.known_bytes
        while left > 0 and at < len(gradients):
            parameters.append(Parameter(f"gradient {at}", gradients[at], "float32", number))
            left -= gradients[at]
            at += 1
        if left:
            return [], []
        buckets.append(Bucket(one.name, one.key, one.known_bytes, "float32", tuple(range(first, at))))
    return parameters, buckets


def _rank(found: _Recorded, first: _Recorded) -> Rank:
    same = found.host == first.host and found.host != ""
    clock = Clock("rank 0") if found is first else Clock("same clock" if same else "wall")
    transport = TransportInfo(STOCK.transport, provider=found.backend or None)
    return Rank(found.rank, found.host, found.host, finished=True, clock=clock, transports=(transport,))


def _without_operations(size: int) -> Iterator[str]:
    """Note on a run without any operation in its steps; nothing for one rank."""
    if size > 1:
        advice = f"Profile with {ACTIVITIES}: gloo's operations are in the trace of the CPU, NCCL's in that of the GPU"
        yield f"{size} ranks, and no operation of a process group in a step: {NOT_RECORDED}. {advice}."


def _without_forward(steps: Iterable[Sequence[Step]]) -> Iterator[str]:
    """Note on ranks with gradients and no forward; nothing for a GPU, whose steps have no gradients."""
    if any(any(one.grad_ready for one in own) and not any(one.forward for one in own) for own in steps):
        yield "no forward of DDP is in these traces: before the first gradient, input cannot be told from compute."


def _notes(
    ranks: Sequence[_Recorded],
    damaged: Sequence[str],
    steps: Sequence[Sequence[Step]],
    rows: Sequence[Collective],
    unknown: Sequence[frozenset[str]],
) -> Iterator[str]:
    yield "read from traces of torch.profiler: the profiler's own cost is part of the steps."
    yield from damaged
    if any("rank" in one.missing for one in ranks) and rows:
        yield f'{ranks[0].path}: no "rank" in "distributedInfo": rank 0 is assumed.'
    if any(one.gpu for one in ranks):
        yield "compute is all kernels that do not communicate: forward, backward and optimizer are not distinguished."
    yield from _without_forward(steps)
    if not rows:
        yield from _without_operations(max(one.size for one in ranks))
    yield from _without_sizes(rows, unknown)


def _without_sizes(rows: Sequence[Collective], unknown: Sequence[frozenset[str]]) -> Iterator[str]:
    """Notes on the operations without a size."""
    typed = [own for own in unknown if SPARSE not in own]
    if typed:
        types = ", ".join(sorted({name or "no name" for own in typed for name in own}))
        yield f"the sizes of {len(typed)} operations are not known: the bytes of their type are not ({types})."
    if sparse := len(unknown) - len(typed):
        yield f"the sizes of {sparse} operations are not known: they are of sparse tensors. Their steps have no rate."
    unsized = sum(one.tensor_bytes is None for one in rows) - len(unknown)
    if unsized and not any(one.known_bytes for one in rows):
        yield "the sizes of operations are not in these traces: profile with record_shapes=True."
    elif unsized:
        yield f"the sizes of {unsized} of {len(rows)} operations are not in these traces: nor are rates of their steps."


class _OfRank(Protocol):
    """What was read from one rank's file."""

    @property
    def rank(self) -> int: ...


_R = TypeVar("_R", bound=_OfRank)


def readable(
    paths: Sequence[Path], read: Callable[[Path], _R], what: str, check: Callable[[Sequence[_R]], None] = lambda _: None
) -> tuple[list[_R], list[str]]:
    """Return what `read` finds in each file, and a note for each damaged one.

    Raises ValueError if no file can be read, or two are of one rank. what: the kind of file. check: may refuse what
    was read before.
    """
    ranks: list[_R] = []
    damaged = []
    for path in paths:
        try:
            ranks.append(read(path))
        except ValueError as error:
            damaged.append(str(error))
    if not ranks:
        raise ValueError("; ".join(damaged) or f"no {what}")
    check(ranks)
    twice = [rank for rank, count in Counter(one.rank for one in ranks).items() if count > 1]
    if twice:
        raise ValueError(f"{paths[0].parent}: more than one {what} of rank {twice[0]}: give the files of one run")
    return ranks, [f"left out: {error}" for error in damaged]


def _distinct(ranks: Sequence[_Recorded]) -> None:
    """Raise ValueError naming a file whose rank, number of ranks or operations cannot be known."""
    for one in ranks:
        if not one.gpu and one.calls_nccl:
            raise ValueError(f"{one.path}: it has calls of NCCL and no kernel of a GPU: profile with {ACTIVITIES}")
        if one.lacks_nccl:
            plan = "torch.profiler.schedule(wait=1, warmup=1, active=20, repeat=1)"
            advice = f"profile with {ACTIVITIES} and schedule={plan}"
            raise ValueError(f"{one.path}: it has calls of NCCL and kernels of a GPU, but no kernel of NCCL: {advice}")
        if one.size == 0 or ("rank" in one.missing and len(ranks) > 1):
            fields = " and ".join(f'"{name}"' for name in one.missing)
            advice = "profile after init_process_group, and export the trace before destroy_process_group"
            raise ValueError(f'{one.path}: no {fields} in "distributedInfo": {advice}')


def _read_all(paths: Sequence[Path]) -> tuple[list[_Recorded], list[str]]:
    """The files by rank, on a clock that begins with the first step, and a note for each damaged file."""
    ranks, damaged = readable(paths, _read, "trace of torch.profiler", _distinct)
    epoch_ns = min(_steps(one)[0].begin_ns for one in ranks)
    return [
        replace(one, base_ns=one.base_ns - epoch_ns, epoch_ns=epoch_ns)
        for one in sorted(ranks, key=lambda one: one.rank)
    ], damaged


def load(paths: Sequence[Path]) -> Trace:
    """The trace of a run from the files of its ranks. A damaged file is named in the notes.

    Raises ValueError if no file can be read, if a rank has two, if a file has no step, if it does not say which rank
    it is of, or if it has calls of NCCL and no kernels of it.
    """
    ranks, damaged = _read_all(paths)
    groups: list[tuple[str, str]] = []
    unknown: list[frozenset[str]] = []
    steps, rows = [], []
    for one in ranks:
        bare = _steps(one)
        rows.append(_collectives(one, bare, groups, unknown))
        steps.append(_with_waits(_with_parts(one, _without_tail(one, bare, rows[-1])), rows[-1]))
    each = [
        Profiled(
            one.rank,
            one.host,
            (whole[0].index, whole[-1].index),
            own,
            nameless=not one.kernels_communicate,
            untold_groups=_untold_groups(one, own, groups),
        )
        for one, whole, own in zip(ranks, steps, rows, strict=True)
    ]
    same, apart = matched(each)
    parameters, buckets = _model(ranks[0], steps[0], same[0])
    everything = tuple(row for own in same for row in own)
    return Trace(
        paths[0].absolute().parent.name if len(paths) > 1 else paths[0].name.partition(".")[0],
        max(ranks[-1].rank + 1, *(one.size for one in ranks)),
        (STOCK,),
        started_wall_ns=ranks[0].epoch_ns,
        epoch_wall_ns=ranks[0].epoch_ns,
        notes=(*_notes(ranks, damaged, steps, everything, unknown), *apart),
        ranks=tuple(_rank(one, ranks[0]) for one in ranks),
        parameters=tuple(parameters),
        buckets=tuple(buckets),
        steps=tuple(step for own in steps for step in own),
        collectives=everything,
        recorder="torch.profiler",
    )
