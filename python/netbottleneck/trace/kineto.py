"""What torch itself records, one file for each rank, as a Trace: torch.profiler's traces, the flight recorder's dumps.

torch.profiler writes Kineto's JSON. Steps are the profiler's: the script calls prof.step() after each. On the CPU, the
forward is DDP's, the backward ends at the last AccumulateGrad, and communication is what the process group annotates.
On a GPU, compute is the union of the kernels that do not communicate, and communication is NCCL's kernels. Sizes need
record_shapes=True on the CPU.

A flight recorder's dump has the last operations of torch.distributed, no steps and no compute.
"""

from __future__ import annotations

import gzip
import json
import math
import pickle
import re
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from netbottleneck.trace.model import (
    ENDED,
    POINT_TO_POINT,
    SCHEDULED,
    STATES,
    Bucket,
    Clock,
    Collective,
    Interval,
    Parameter,
    ProcessGroup,
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
            kind = _kind(event["name"])
            if kind is not None:
                calls[kind, _count(event, kind, 1)].append(found.span(event)[0])
    for event in found.events:
        backend, colon, name = event["name"].partition(":")
        kind = _kind(name)
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
        kind = _kind(str(args.get("Collective name", ""))) or _kind(event["name"]) or "other"
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


def _readable(paths: Sequence[Path], read: Callable[[Path], _R], what: str) -> tuple[list[_R], list[str]]:
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
    ranks, damaged = _readable(paths, _read, "trace of torch.profiler")
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


# The flight recorder's dumps: `<prefix><rank>`, a pickle or JSON. Versions: of the dump, not of torch.

DUMP_VERSIONS = "2."
DUMP = re.compile(r"(?P<prefix>.*?)(?P<rank>\d+)(?P<suffix>(\.(json|pkl|pickle))?)")
DEFAULT_GROUP = "default_pg"
# Names of element types in a dump, in lower case; their bytes are ITEM_BYTES.
DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "char": "int8",
    "byte": "uint8",
    "bool": "bool",
}
_BATCH = ("process_group", "collective_seq_id", "p2p_seq_id")  # equal in the rows of a batch
_FOLLOWED = ("state", "retired", "time_discovered_started_ns", "time_discovered_completed_ns")
_DAMAGE = (OSError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, MemoryError)
_UNREADABLE = (*_DAMAGE, pickle.UnpicklingError, RecursionError, ImportError)


class _PlainValues(pickle.Unpickler):
    """Reads containers, numbers and text. Any other object is refused, so a file runs no code."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}: a dump has only plain values")


def _is_dump(path: Path) -> bool:
    """True for a file that begins like a dump of the flight recorder."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return False
    if head.startswith(b"{"):
        return b'"entries"' in head and (b'"comm_lib_version"' in head or b'"collective_seq_id"' in head)
    return head.startswith(b"\x80") and b"version" in head and (b"pg_config" in head or b"entries" in head)


def _named(paths: Iterable[Path]) -> list[tuple[Path, re.Match[str]]]:
    """The files whose name is that of a dump, with its parts."""
    pairs = ((one, DUMP.fullmatch(one.name)) for one in sorted(paths))
    return [(one, match) for one, match in pairs if match is not None and one.is_file()]


def dumps(path: Path) -> list[Path]:
    """The flight recorder's dumps at a path: the file itself, those in a folder, or those whose names it begins.

    A file beside them with the same prefix is one too, however damaged. May be empty.
    """
    if path.is_file():
        return [one for one, _ in _named([path]) if _is_dump(one)]
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir() or (folder == path and (path / "run.json").exists()):
        return []
    near = _named(folder.iterdir())
    if folder != path:
        near = [(one, match) for one, match in near if match["prefix"] == path.name]
    series = {match.group("prefix", "suffix") for one, match in near if _is_dump(one)}
    return [one for one, match in near if match.group("prefix", "suffix") in series]


@dataclass(frozen=True, slots=True)
class _Dump:
    """One rank's dump. members: of each group by its name, where the dump has them; last: by the group's pg_id."""

    path: Path
    rank: int
    version: str
    entries: tuple[_Entry, ...]
    members: Mapping[str, tuple[int, ...]]
    last: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class _Entry:
    """An operation of a dump. number: of its group; of a send or receive, among these. None: not known."""

    record: int
    group: tuple[str, str]
    group_id: int
    number: int
    between_two: bool
    name: str
    kind: str
    bytes: int | None
    dtype: str
    state: str
    created_ns: int
    start_seen_ns: int | None
    done_seen_ns: int | None


def _sum_bytes(sizes: Any, dtypes: Any) -> int | None:
    """Bytes of tensors of these shapes; None for a type that is not known."""
    if not sizes:
        return 0
    each = [ITEM_BYTES.get(str(one).lower()) for one in dtypes]
    each = each * len(sizes) if len(each) == 1 else each
    if len(each) != len(sizes) or None in each:
        return None
    return sum(math.prod(map(int, shape)) * (item or 0) for shape, item in zip(sizes, each, strict=True))


def _line(frames: Any) -> str:
    """File and line of the script that called, from the innermost frame outside torch; "" if there is none."""
    for frame in frames or ():
        if "/torch/" not in str(frame["filename"]):
            return f", {Path(str(frame['filename'])).name}:{int(frame['line'])}"
    return ""


def _state(row: Mapping[str, Any], backend: str) -> str:
    """Raises KeyError or ValueError for a row without a known state."""
    state = str(row["state"])
    if state not in STATES:
        raise ValueError(f"unknown state {state!r}")
    over = backend != "nccl" and state == SCHEDULED and row.get("retired")
    return ENDED if over else state  # only NCCL's process group follows the state; another one records the end


def _of_batches(rows: Iterable[Event]) -> list[Event]:
    """The rows by record. NCCL follows one row of a batch: the last, "nccl:coalesced", with the numbers of the others.

    The others take its state, and it is a send or receive if they are. Source: issue 137969 of pytorch/pytorch.
    """
    ordered = sorted(rows, key=lambda row: int(row.get("record_id", 0)))
    before: dict[Any, list[int]] = defaultdict(list)
    for at, row in enumerate(ordered):
        name, batch = str(row["profiling_name"]), str([row.get(part) for part in _BATCH])
        if not name.endswith("coalesced"):
            before[batch].append(at)
            continue
        known = {part: row[part] for part in _FOLLOWED if part in row}
        for place in before.pop(batch, []):
            own = ordered[place]
            ordered[place] = {**own, **known} if own.get("state") == SCHEDULED else own
            ordered[at] = {**ordered[at], "is_p2p": ordered[at].get("is_p2p") or own.get("is_p2p", False)}
    return ordered


def _time(row: Mapping[str, Any], name: str) -> int | None:
    """A time of a row in ns; JSON has 0 for one that is not known."""
    return int(row.get(name) or 0) or None


def _entry(row: Mapping[str, Any]) -> _Entry:
    """Raises KeyError, TypeError or ValueError for a row that is damaged."""
    backend, _, full_name = str(row["profiling_name"]).rpartition(":")
    between_two = bool(row.get("is_p2p", False))
    plain, group = full_name.partition(" ")[0], row["process_group"]
    sizes = [_sum_bytes(row[f"{way}_sizes"], row[f"{way}_dtypes"]) for way in ("input", "output")]
    known = [one for one in sizes if one is not None]
    dtypes = [str(one).lower() for one in (*row["input_dtypes"], *row["output_dtypes"])]
    return _Entry(
        int(row["record_id"]),
        (str(group[0]), str(group[1]).replace("undefined", "")),
        int(row["pg_id"]),
        int(row["p2p_seq_id" if between_two else "collective_seq_id"]),
        between_two,
        (full_name if between_two else plain) + _line(row.get("frames")),
        plain if between_two else _kind(plain) or plain,
        max(known) if len(known) == len(sizes) else None,
        DTYPES.get(dtypes[0], dtypes[0]) if dtypes else "",
        _state(row, backend),
        int(row["time_created_ns"]),
        _time(row, "time_discovered_started_ns"),
        _time(row, "time_discovered_completed_ns"),
    )


def _members(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, about in config.items():
        ranks = about["ranks"]
        ranks = json.loads(ranks) if isinstance(ranks, str) else ranks
        if name and ranks:
            found[str(name)] = tuple(sorted(map(int, ranks)))
    return found


def _read_dump(path: Path) -> _Dump:
    """Read one dump. Raises ValueError naming it if it is damaged, or has another version."""
    match = DUMP.fullmatch(path.name)
    assert match is not None
    try:
        with path.open("rb") as file:
            is_json = file.read(1) == b"{"
            file.seek(0)
            whole = json.load(file) if is_json else _PlainValues(file).load()
        version = str(whole["version"])
        if not version.startswith(DUMP_VERSIONS):
            raise ValueError(f"version {version}; this netbottleneck reads versions {DUMP_VERSIONS}x")
        entries = tuple(map(_entry, _of_batches(whole["entries"])))
        last = {int(key): int(one["last_enqueued_collective"]) for key, one in whole.get("pg_status", {}).items()}
        members = _members(whole.get("pg_config", {}))
    except _UNREADABLE as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise ValueError(f"{path}: unreadable dump of the flight recorder: {what}") from error
    return _Dump(path, int(match["rank"]), version, entries, members, last)


def _with_members(ranks: Sequence[_Dump]) -> list[_Dump]:
    """The dumps, by rank; each has the members of its groups from the others too."""
    told = [pair for dump in ranks for pair in dump.members.items()]
    return [
        replace(dump, members={**{name: own for name, own in told if dump.rank in own}, **dump.members})
        for dump in sorted(ranks, key=lambda one: one.rank)
    ]


# Name, description and members of a group.
_Group = tuple[str, str, tuple[int, ...] | None]


def _group(dump: _Dump, entry: _Entry) -> _Group:
    return (*entry.group, dump.members.get(entry.group[0]))


def _groups(ranks: Sequence[_Dump], size: int) -> dict[_Group, ProcessGroup]:
    """The groups of the dumps. The default group has all ranks; the members of another one may be unknown."""
    last: dict[_Group, dict[int, int]] = {}
    for dump in ranks:
        for entry in dump.entries:
            own = last.setdefault(_group(dump, entry), {})
            if not entry.between_two:
                own[dump.rank] = max(own.get(dump.rank, 0), entry.number, dump.last.get(entry.group_id, 0))
    return {
        group: ProcessGroup(
            group[0],
            group[1],
            tuple(range(size)) if group[2] is None and group[1] == DEFAULT_GROUP else group[2],
            tuple(sorted(own.items())),
        )
        for group, own in last.items()
    }


def _of_dump(dump: _Dump, groups: Mapping[_Group, ProcessGroup], epoch_ns: int) -> Iterator[Collective]:
    """The operations of a dump. Those of one number (coalesced) are told apart by their place: their key."""
    order, places = list(groups), Counter[tuple[int, int, bool]]()
    for one in dump.entries:
        comm = order.index(_group(dump, one))
        members = groups[_group(dump, one)].ranks
        place = places[comm, one.number, one.between_two]
        places[comm, one.number, one.between_two] += 1
        yield Collective(
            dump.rank,
            STOCK,
            place + 1 + (POINT_TO_POINT if one.between_two else 0),
            one.number,
            one.created_ns - epoch_ns,
            one.bytes or 0,
            one.name,
            comm=comm,
            ranks=None if members is None else len(members),
            kind=one.kind,
            dtype=one.dtype,
            phase="other",
            state=one.state,
            start_seen_ns=None if one.start_seen_ns is None else one.start_seen_ns - epoch_ns,
            done_seen_ns=None if one.done_seen_ns is None else one.done_seen_ns - epoch_ns,
        )


def _dump_notes(ranks: Sequence[_Dump], groups: Iterable[ProcessGroup], damaged: Sequence[str]) -> Iterator[str]:
    yield "read from dumps of torch's flight recorder: they have no steps and no compute."
    yield from damaged
    versions: dict[str, list[int]] = defaultdict(list)
    for dump in ranks:
        versions[dump.version].append(dump.rank)
        if not dump.entries:
            yield f"{dump.path}: no operation: set TORCH_FR_BUFFER_SIZE before the training."
    if len(versions) > 1:
        each = "; ".join(f"{version}: rank {', '.join(map(str, own))}" for version, own in versions.items())
        yield f"the dumps have different versions ({each}): the ranks may run different versions of torch."
    known = {name for dump in ranks for name in dump.members}
    for group in groups:
        if group.name not in known and group.description == DEFAULT_GROUP:
            yield f"the number of ranks is not in the dumps: {len(group.ranks or ())}, or more if dumps are missing."
        elif group.ranks is None:
            yield f"the members of group {group} are not in the dumps: a rank that never used it is not missed."
    if any(entry.bytes is None for dump in ranks for entry in dump.entries):
        yield "the sizes of some operations are not known: their element type is not."


def _read_dumps(paths: Sequence[Path]) -> tuple[list[_Dump], list[str]]:
    """The dumps by rank, and a note for each one that cannot be read."""
    ranks, damaged = _readable(paths, _read_dump, "dump of the flight recorder")
    return _with_members(ranks), damaged


def _rank_of_dump(dump: _Dump, first: _Dump) -> Rank:
    dropped = dump.entries[0].record if dump.entries else 0
    clock = Clock("rank 0" if dump is first else "wall")
    return Rank(dump.rank, finished=True, clock=clock, events_dropped=dropped)


def load_dumps(paths: Sequence[Path]) -> Trace:
    """The trace of a run from the flight recorder's dumps. A damaged one is named in the notes.

    submit_ns: when the operation was enqueued, by the host's wall clock. Begin and end are None: a dump has only the
    times at which a watchdog noticed them. The number of ranks is that of the largest rank named. Raises ValueError
    if no dump can be read, or if a rank has two.
    """
    ranks, damaged = _read_dumps(paths)
    named = [(match["prefix"], int(match["rank"])) for _, match in _named(paths)]
    largest = max(0, *(rank for _, rank in named), *(own[-1] for one in ranks for own in one.members.values()))
    groups = _groups(ranks, largest + 1)
    epoch_ns = min((entry.created_ns for one in ranks for entry in one.entries), default=0)
    return Trace(
        named[0][0].rstrip("_-.") or paths[0].absolute().parent.name,
        largest + 1,
        (STOCK,),
        started_wall_ns=epoch_ns,
        epoch_wall_ns=epoch_ns,
        notes=tuple(_dump_notes(ranks, groups.values(), damaged)),
        ranks=tuple(_rank_of_dump(one, ranks[0]) for one in ranks),
        collectives=tuple(row for one in ranks for row in _of_dump(one, groups, epoch_ns)),
        groups=tuple(groups.values()),
    )
