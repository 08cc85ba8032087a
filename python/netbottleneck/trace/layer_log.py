"""Layer logs: a backward pass tensor by tensor, and tables of an addition's cost by size, in the 2020 study's formats.

A layer log is text: a comment, the number of batches, the number of tensors per batch, then lines `wait_us,bytes`.
Tensors are in the order of gradient readiness, each with the time since the previous one (the first: since the start of
the backward). A table has lines `bytes,seconds`. Logs written by this module have the model's name and its step in the
comment, which other readers skip.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import TypeVar

from netbottleneck.trace.model import Parameter, Rank, Step, Trace
from netbottleneck.trace.transports import SINGLE

MARK = "netbottleneck layer log"
SUFFIXES = (".bk.log", ".log", ".csv", ".txt")
# Limits of a time in ns, 73 years, and of the bytes of a batch: sums and products with them stay within 64 bits.
LONGEST_NS = 1 << 61
MOST_BYTES = 1 << 50
T = TypeVar("T")

Tensors = tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class LayerLog:
    """tensors: (wait in s, bytes) in the order of readiness. batch_s: a whole step on one device; None: not known.

    others: further batches, in the same form. Raises ValueError for no tensors, or an invalid wait, size or step.
    """

    name: str
    tensors: Tensors
    batch_s: float | None = None
    others: tuple[Tensors, ...] = ()

    def __post_init__(self) -> None:
        for batch in self.batches:
            if not batch:
                raise ValueError(f"layer log {self.name!r}: a batch without a tensor")
            for wait_s, size in batch:
                _seconds(wait_s, "wait")
                _size(size)
            _seconds(math.fsum(wait_s for wait_s, _ in batch), "sum of the waits")
            _size(sum(size for _, size in batch), "sum of the sizes")
        if self.batch_s is not None and not _seconds(self.batch_s, "step") > 0:
            raise ValueError(f"step {self.batch_s!r}: must be more than 0 seconds")

    @property
    def batches(self) -> tuple[Tensors, ...]:
        return (self.tensors, *self.others)

    @property
    def backward_s(self) -> float:
        """The sum of the first batch's waits."""
        return math.fsum(wait_s for wait_s, _ in self.tensors)

    @property
    def bytes(self) -> int:
        """The bytes of all gradients of a batch."""
        return sum(size for _, size in self.tensors)


@dataclass(frozen=True, slots=True)
class VecTable:
    """Duration in seconds of an operation by size; sizes increase. Raises ValueError for invalid values."""

    bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.bytes or len(self.bytes) != len(self.seconds):
            raise ValueError(f"a table of {len(self.bytes)} sizes and {len(self.seconds)} times: one or more, as many")
        for before, size in zip((-1, *self.bytes), self.bytes, strict=False):
            if size <= before:
                raise ValueError(f"size {size} after {before}: sizes must be 0 or more and rise")
        for seconds in self.seconds:
            _seconds(seconds, "time")


def _seconds(value: float, what: str, unit_ns: float = 1e9) -> float:
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{what} {value!r}: must be a finite number, 0 or more")
    if value * unit_ns > LONGEST_NS:
        raise ValueError(f"{what} {value!r}: must be at most {LONGEST_NS / unit_ns:g}")
    return value


def _size(value: int, what: str = "size") -> int:
    if value < 0:
        raise ValueError(f"{what} {value}: must be 0 or more bytes")
    if value > MOST_BYTES:
        raise ValueError(f"{what} {value}: must be at most {MOST_BYTES} bytes")
    return value


def _number(kind: Callable[[str], T], word: str, what: str) -> T:
    try:
        return kind(word.strip())
    except ValueError:
        raise ValueError(
            f"{what} {word.strip()[:40]!r}: must be {'a whole number' if kind is int else 'a number'}"
        ) from None


class _Lines:
    """The lines of a file in sequence; `number` is that of the last returned line."""

    def __init__(self, path: Path | str) -> None:
        self.number = 0
        self._lines = Path(path).read_bytes().split(b"\n")
        self._cut = self._lines.pop() != b""

    def next(self, what: str) -> str:
        """Return the next line. Raises ValueError at the end of the file."""
        self.number += 1
        if self.number > len(self._lines):
            if self._cut:
                raise ValueError("the last line has no end: the file was cut short, or lacks a line feed there")
            raise ValueError(f"the file ends where {what} should be; it is empty or was cut short")
        try:
            return self._lines[self.number - 1].decode().rstrip("\r")
        except UnicodeDecodeError:
            raise ValueError("no text: not a file of this kind") from None

    def rest(self) -> Iterator[str]:
        while self.number < len(self._lines) or self._cut:
            yield self.next("a line")


def _pair(line: str, names: tuple[str, str]) -> tuple[str, str]:
    first, comma, second = line.partition(",")
    if not comma or "," in second:
        raise ValueError(f"{line.strip()[:40]!r}: must be {names[0]},{names[1]}")
    return first, second


def _tensor(line: str) -> tuple[float, int]:
    wait_us, size = _pair(line, ("wait_us", "bytes"))
    return _seconds(_number(float, wait_us, "wait"), "wait", 1e3) / 1e6, _size(_number(int, size, "size"))


def _count(line: str, what: str) -> int:
    count = _number(int, line, f"number of {what}")
    if count < 1:
        raise ValueError(f"{count} {what}: must be 1 or more")
    return count


def _comment(line: str, stem: str) -> tuple[str, float | None]:
    """Return name and step of a log written by this module; else the file's name and None."""
    if not line.startswith(MARK):
        return stem, None
    step = re.search(r"\bstep_s=(\S+)", line)
    name = re.search(r"\bname=(.*)$", line)
    seconds = None if step is None else _seconds(_number(float, step[1].rstrip(";"), "step_s"), "step_s")
    return (name[1].strip() if name is not None else "") or stem, seconds


def _stem(path: Path | str) -> str:
    name = Path(path).name
    return next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end)), name)


def _batch(lines: _Lines, tensors: int, where: str) -> Tensors:
    return tuple(_tensor(lines.next(f"tensor {at + 1} of {tensors} {where}")) for at in range(tensors))


def _log(lines: _Lines, stem: str) -> LayerLog:
    name, step_s = _comment(lines.next("the comment"), stem)
    batches = _count(lines.next("the number of batches"), "batches")
    tensors = _count(lines.next("the number of tensors"), "tensors")
    read = tuple(_batch(lines, tensors, f"of batch {at + 1} of {batches}") for at in range(batches))
    for line in lines.rest():
        if line.strip():
            raise ValueError(f"{line.strip()[:40]!r} after the last of {batches} x {tensors} tensors")
    return LayerLog(name, read[0], step_s, read[1:])


def _table(lines: _Lines) -> VecTable:
    sizes: list[int] = []
    times: list[float] = []
    for line in chain([lines.next("bytes,seconds")], lines.rest()):
        if sizes and not line.strip():
            continue
        size, seconds = _pair(line, ("bytes", "seconds"))
        sizes.append(_number(int, size, "size"))
        if sizes[-1] > MOST_BYTES:
            _size(sizes[-1])
        times.append(_seconds(_number(float, seconds, "time"), "time"))
        if sizes[-1] < 0 or (len(sizes) > 1 and sizes[-1] <= sizes[-2]):
            raise ValueError(f"size {sizes[-1]}: sizes must be 0 or more and rise")
    return VecTable(tuple(sizes), tuple(times))


def _reading(path: Path | str, read: Callable[[_Lines], T]) -> T:
    lines = _Lines(path)
    try:
        return read(lines)
    except ValueError as error:
        raise ValueError(f"{path}, line {max(lines.number, 1)}: {error}") from error


def read(path: Path | str) -> LayerLog:
    """Read a layer log. Raises OSError, and ValueError naming file and line if it is cut short or damaged."""
    return _reading(path, lambda lines: _log(lines, _stem(path)))


def read_table(path: Path | str) -> VecTable:
    """Read a table. Raises as `read` does, and for sizes that do not increase."""
    return _reading(path, _table)


def _microseconds(wait_s: float) -> float:
    """Return the number that `read` converts back to wait_s if there is one, else the nearest number."""
    near = wait_s * 1e6
    return next(
        (us for us in (near, math.nextafter(near, math.inf), math.nextafter(near, 0)) if us / 1e6 == wait_s), near
    )


def write(path: Path | str, log: LayerLog) -> None:
    """Write a layer log for `read`. Raises ValueError if batches differ in length, or for a line feed in the name."""
    if len({len(batch) for batch in log.batches}) > 1 or "\n" in log.name:
        raise ValueError(f"layer log {log.name!r}: batches of one length and a name of one line are needed")
    step = "" if log.batch_s is None else f" step_s={log.batch_s!r};"
    head = f"{MARK}; batches, tensors, then wait_us,bytes in the order of readiness;{step} name={log.name}"
    rows = [f"{_microseconds(wait_s)!r},{size}" for batch in log.batches for wait_s, size in batch]
    Path(path).write_text("\n".join([head, f"{len(log.batches)}", f"{len(log.tensors)}", *rows, ""]), encoding="utf-8")


def write_table(path: Path | str, table: VecTable) -> None:
    """Write a table for `read_table`."""
    rows = (f"{size},{seconds!r}\n" for size, seconds in zip(table.bytes, table.seconds, strict=True))
    Path(path).write_text("".join(rows), encoding="utf-8")


def to_trace(log: LayerLog) -> Trace:
    """Return a trace of one step of one rank alone; the time outside the backward is before it.

    A gradient's time is the median over the batches that have the first batch's sizes. The parameters are in the
    model's order, so the last gradient comes first. Raises ValueError if the step is shorter than its backward."""
    batches, notes = _alike_batches(log)
    backward_s = statistics.median(math.fsum(wait_s for wait_s, _ in batch) for batch in batches)
    before_ns = round(((log.batch_s or backward_s) - backward_s) * 1e9)
    if before_ns < 0:
        raise ValueError(f"layer log {log.name!r}: a step of {log.batch_s} s, but {backward_s} s of backward pass")
    count = len(log.tensors)
    passed_s = zip(*(accumulate(wait_s for wait_s, _ in batch) for batch in batches), strict=True)
    ready = [(count - 1 - at, before_ns + round(statistics.median(s) * 1e9)) for at, s in enumerate(passed_s)]
    end_ns = max(ready[-1][1], round((log.batch_s or 0) * 1e9))
    forward = ((0, before_ns),) if before_ns else ()
    step = Step(0, 0, 0, SINGLE, 0, end_ns, forward=forward, grad_ready=tuple(ready))
    sizes = [size for _, size in reversed(log.tensors)]
    parameters = tuple(Parameter(f"tensor.{at}", size, "float32") for at, size in enumerate(sizes))
    return Trace(
        log.name,
        1,
        (SINGLE,),
        model=log.name,
        notes=notes,
        ranks=(Rank(0, finished=True),),
        parameters=parameters,
        steps=(step,),
    )


def _alike_batches(log: LayerLog) -> tuple[list[Tensors], tuple[str, ...]]:
    """Return the batches that have the first one's sizes, and notes."""
    sizes = [size for _, size in log.tensors]
    alike = [batch for batch in log.batches if [size for _, size in batch] == sizes]
    notes = []
    if len(alike) > 1:
        notes.append(f"each gradient's time is its median over {len(alike)} batches of the layer log")
    if left := len(log.batches) - len(alike):
        notes.append(f"{left} of {len(log.batches)} batches of the layer log have other sizes and are left out")
    return alike, tuple(notes)


def _offsets(step: Step) -> dict[int, int]:
    """Return the ns from the start of the last backward to each gradient, by parameter index."""
    origin = step.backward_begin_ns
    return {index: max(at - origin, 0) for index, at in step.grad_ready}


def _recorded_steps(trace: Trace) -> list[Step]:
    """Return the steps with gradient times of one rank and one arm; steps of one rank alone are preferred."""
    recorded = [step for step in trace.steps if step.grad_ready]
    alone = [step for step in recorded if step.arm == SINGLE]
    kind = (alone or recorded)[0].arm if recorded else None
    own = [step for step in recorded if step.arm == kind]
    return [step for step in own if step.rank == min(one.rank for one in own)]


def _source(trace: Trace) -> Sequence[Step]:
    """Return the recorded steps without the first of each block, unless no others are left."""
    own = _recorded_steps(trace)
    first: dict[int, int] = {}
    for step in own:
        first[step.block] = min(step.index, first.get(step.block, step.index))
    return [step for step in own if step.index != first[step.block]] or own


def of_trace(trace: Trace, batch_s: float | None = None) -> LayerLog:
    """Return the backward pass of a run: each gradient's median time over the steps of one rank, in ascending order.

    Raises ValueError if no step records when gradients were ready."""
    steps = _source(trace)
    times: dict[int, list[int]] = defaultdict(list)
    for step in steps:
        for index, offset in _offsets(step).items():
            times[index].append(offset)
    if not times:
        raise ValueError(f"run {trace.id}: no step records when its gradients were ready")
    # Gradients with equal times stay in the order of the first step: dictionaries and sorted() are stable.
    ready = sorted(((statistics.median(offsets), index) for index, offsets in times.items()), key=lambda row: row[0])
    before = 0.0
    tensors = []
    for at, index in ready:
        tensors.append(((at - before) / 1e9, trace.parameters[index].bytes))
        before = at
    return LayerLog(trace.model or trace.id, tuple(tensors), batch_s)
