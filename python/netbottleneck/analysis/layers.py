"""Steps and exposed communication by layer. Pure, over what scaling.py splits.

A layer's backward runs from the previous gradient-ready to its own. The exposed time of an operation is attributed to
its tensors by their bytes: an attribution, not a measurement.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from netbottleneck.analysis.scaling import Exposed, backward_intervals, intervals, subtraction, total
from netbottleneck.trace.model import Collective, Parameter, Step, Trace

# The row of operations that carry no gradient of the model.
NO_LAYER = "(no layer)"
# In place of the index of a parameter.
NOBODY = -1


@dataclass(frozen=True, slots=True)
class Layer:
    """A module that owns parameters; means over steps and ranks. forward_ns: of sampled steps, None without any."""

    name: str
    parameters: int
    bytes: int
    buckets: tuple[int, ...]
    forward_ns: float | None
    backward_ns: float
    exposed_ns: float


def layer_of(parameter: str) -> str:
    """The module's name in a parameter's."""
    return parameter.rpartition(".")[0] or parameter


def backward_spans(step: Step) -> list[tuple[int, int, int]]:
    """(parameter index, begin, end) for each gradient-ready: since the one before it. Together: the step's backward."""
    ready = sorted((at, index) for index, at in step.grad_ready)
    found = []
    for begin, end in backward_intervals(step):
        previous = begin
        for at, index in ready[bisect.bisect_left(ready, (begin, -1)) :]:
            if at > end:
                break
            found.append((index, previous, at))
            previous = at
    return found


def backward_times(step: Step) -> list[tuple[int, int]]:
    """(parameter index, ns) for each gradient-ready: its span less the time blocked in it."""
    waits = intervals((begin, end) for _, begin, end in step.waits)
    return [
        (index, total(subtraction(intervals([(begin, end)]), waits)) if len(waits) else end - begin)
        for index, begin, end in backward_spans(step)
    ]


def _by_parameter(trace: Trace, operation: Collective, exposed_ns: float) -> list[tuple[int, float]]:
    if operation.bucket is None or not 0 <= operation.bucket < len(trace.buckets):
        return [(NOBODY, exposed_ns)]
    members = [p for p in trace.buckets[operation.bucket].parameters if p < len(trace.parameters)]
    weight = sum(trace.parameters[p].bytes for p in members)
    if weight == 0:
        return [(NOBODY, exposed_ns)]
    return [(p, exposed_ns * trace.parameters[p].bytes / weight) for p in members]


def _by_parameters(trace: Trace, shares: Exposed) -> Iterator[tuple[int, float]]:
    for operation, ns in shares:
        yield from _by_parameter(trace, operation, ns)


def _forward_times(trace: Trace, sampled: Iterable[Step]) -> dict[str, list[int]]:
    """By module: ns of each forward."""
    found: dict[str, list[int]] = defaultdict(list)
    for step in sampled:
        for index, begin, end in step.modules:
            if index < len(trace.modules):
                found[trace.modules[index]].append(end - begin)
    return found


def _buckets(parameters: Iterable[Parameter]) -> tuple[int, ...]:
    return tuple(sorted({p.bucket for p in parameters if p.bucket is not None}))


def layers(trace: Trace, steps: Iterable[tuple[Step, Exposed]], sampled: Iterable[Step]) -> tuple[Layer, ...]:
    """The layers in the order of their parameters, means over `steps`; their exposed ns sum to the mean step's.

    Forward times are means over `sampled`, where modules were stamped.

    Operations without a layer are a last row of their own, where they cost something.
    """
    names = [layer_of(p.name) for p in trace.parameters]
    known = dict(enumerate(names))
    backward: dict[str, float] = defaultdict(float)
    exposed: dict[str, float] = defaultdict(float)
    forward = _forward_times(trace, sampled)
    count = 0
    for step, shares in steps:
        count += 1
        for index, ns in backward_times(step):
            backward[known.get(index, NO_LAYER)] += ns
        for member, part in _by_parameters(trace, shares):
            exposed[known.get(member, NO_LAYER)] += part
    order = dict.fromkeys([*names, *(name for name in (NO_LAYER,) if exposed[name] or backward[name])])
    count = max(count, 1)
    members = {name: [p for p, own in zip(trace.parameters, names, strict=True) if own == name] for name in order}
    return tuple(
        Layer(
            name=name,
            parameters=len(own),
            bytes=sum(p.bytes for p in own),
            buckets=_buckets(own),
            forward_ns=float(np.mean(forward[name])) if name in forward else None,
            backward_ns=backward[name] / count,
            exposed_ns=exposed[name] / count,
        )
        for name, own in members.items()
    )
