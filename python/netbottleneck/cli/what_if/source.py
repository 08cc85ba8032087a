"""What is asked about: a run folder, a trace or a layer log, as values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from netbottleneck.analysis.findings import Findings, find
from netbottleneck.report import Run
from netbottleneck.trace import layer_log as layerlog
from netbottleneck.trace import model as tr
from netbottleneck.trace.layer_log import LayerLog, VecTable
from netbottleneck.trace.model import Collective, Step, Trace
from netbottleneck.whatif.links import Table

LONGEST_NS = 1 << 61  # 73 years


@dataclass(frozen=True)
class Source:
    """What was recorded, in the form that it came in: a trace or a log."""

    path: Path
    trace: Trace | None = None
    log: LayerLog | None = None

    @cached_property
    def findings(self) -> Findings | None:
        """The numbers of a run."""
        return None if self.trace is None else find(self.trace)


def _in_time(where: str, times: Iterable[int]) -> None:
    """Raises ValueError for what no clock tells."""
    if odd := next((at for at in times if abs(at) > LONGEST_NS), None):
        raise ValueError(f"{where}: {odd} ns is no time of this run")


def _sound_step(where: str, trace: Trace, step: Step) -> None:
    spans = ((begin, end) for _, begin, end in (*step.waits, *step.modules))
    parts = ((step.begin_ns, step.end_ns), *step.forward, *step.optimizer, *spans)
    for begin_ns, end_ns in parts:
        if end_ns < begin_ns:
            raise ValueError(f"{where}, or a part of it, ends {begin_ns - end_ns} ns before it begins")
    _in_time(where, [at for pair in parts for at in pair] + [at for _, at in step.grad_ready])
    _there(f"{where} has a gradient", trace.parameters, (index for index, _ in step.grad_ready))
    _there(f"{where} has a module", trace.modules, (index for index, _, _ in step.modules))


def _there(where: str, known: Sequence[object], indices: Iterable[int]) -> None:
    """Raises ValueError for an index of what is not known."""
    for index in indices:
        if not 0 <= index < len(known):
            raise ValueError(f"{where} {index}; there are {len(known)}")


def _sound_operation(where: str, operation: Collective) -> None:
    if operation.tensor_bytes < 0 or (operation.bucket or 0) < 0:
        raise ValueError(f"{where}: no size")
    times = (operation.submit_ns, operation.agreed_ns, operation.start_ns, operation.done_ns)
    _in_time(where, (at for at in times if at is not None))


def _sound(path: Path, trace: Trace) -> Trace:
    """Return a trace whose rows go together. Raises ValueError naming the first that does not."""
    if trace.size < 1:
        raise ValueError(f"{path}: a run of {trace.size} ranks: must be 1 or more")
    for step in trace.steps:
        _sound_step(f"{path}: step {step.index} of rank {step.rank}", trace, step)
    for parameter in trace.parameters:
        if parameter.bytes < 0:
            raise ValueError(f"{path}: parameter {parameter.name} has {parameter.bytes} bytes")
    for one in trace.collectives:
        _sound_operation(f"{path}: operation {one.name or one.key} of rank {one.rank}", one)
    return trace


def load(path: Path) -> Source:
    """Read a run folder, a trace or a layer log. Raises OSError; ValueError naming file and line of what is damaged."""
    if path.is_dir():
        return Source(path, trace=_sound(path, Run(path).trace))
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    if packed or path.name.endswith(".gz"):
        return Source(path, trace=_sound(path, tr.read(path)))
    return Source(path, log=layerlog.read(path))


def _alone_s(found: Findings) -> float | None:
    """A single device's step: measured alone, else what is left of a step without communication and waiting."""
    known = found.scaling.get(found.base or "") or next(iter(found.scaling.values()), None)
    return None if known is None else known.t1_ns / 1e9


def layer_log(source: Source, step_s: float | None) -> LayerLog:
    """Return the input as a layer log that knows its step. Raises ValueError where neither it nor step_s tells it."""
    if source.log is not None:
        log, known = source.log, source.log.batch_s
    elif source.trace is not None and source.findings is not None:
        log, known = layerlog.of_trace(source.trace), _alone_s(source.findings)
    else:
        raise ValueError(f"{source.path}: neither a run nor a layer log")
    step = step_s or known
    if step is None:
        raise ValueError(f"{source.path} tells no step of a single device: give its seconds by --step-s")
    return LayerLog(log.name, log.tensors, step, log.others)


def as_cost(table: VecTable) -> Table:
    """Return a table of additions as the engine takes it: beyond its last row it goes on by the last slope."""
    return Table(tuple(map(float, table.bytes)), tuple(1e9 * seconds for seconds in table.seconds))
