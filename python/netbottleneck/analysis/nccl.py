"""Split of NCCL's operations: the GPU kernel's interval, and waiting for the GPU, waiting for the peer, and the wire.

NCCL reports a message's states on the rank where they occur. A receiver sees one wait until arrival, which contains the
sender's delay. Where both ends left a record, a message is on the wire from the moment both have requested it, until it
is sent, or has arrived and is flushed. A sender that is late is the receiver's wait for its peer, and the other way
round; such a wait is as uncertain as the offset of the two ranks' clocks. NCCL's proxies request messages when the
kernel is launched. What passes until it starts is waiting for the GPU. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from netbottleneck.analysis.intervals import intervals, subtraction, total, union
from netbottleneck.trace.model import NcclOperation, NcclStep, Trace
from netbottleneck.trace.transports import Arm

# A message is equal on both ends in: communicator, function, call, channel, number, sender, receiver.
Message = tuple[int, str, int, int, int, int, int]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Waits:
    """Spans of one message on one rank. unknown: until arrival, of a message whose sender left no record."""

    gpu: Span
    peer: Span
    wire: Span
    unknown: Span


@dataclass(frozen=True, slots=True)
class NcclSplit:
    """One operation on one rank. wire + peer_wait + gpu_wait + unknown + idle = network.

    kernel_ns: from the first channel's start to the last one's stop, on the GPU's clock; None if not reported.
    network_ns: from the first message's begin to the last one's end. wire_ns: part in which a message is on the wire.
    peer_wait_ns: of the rest, part in which one waits for its peer. unknown_ns: of the rest, part in which one has not
    arrived and its sender left no record. gpu_wait_ns: of the rest, part in which one waits for this rank's GPU. Before
    the kernel starts, waits for the peer and for arrival are the GPU's.
    """

    operation: NcclOperation
    kernel_ns: int | None
    network_ns: int
    wire_ns: int
    peer_wait_ns: int
    unknown_ns: int
    gpu_wait_ns: int

    @property
    def idle_ns(self) -> int:
        """Part without an unfinished message."""
        return self.network_ns - self.wire_ns - self.peer_wait_ns - self.unknown_ns - self.gpu_wait_ns


@dataclass(frozen=True, slots=True)
class NcclMean:
    """Means of the operations of one bucket, or of one function and size, in one arm, over ranks and calls. In ns.

    arm: that of the operations' steps. kernel_ns: None if not reported."""

    name: str
    arm: Arm
    operations: int
    bytes: int
    kernel_ns: float | None
    network_ns: float
    wire_ns: float
    peer_wait_ns: float
    unknown_ns: float
    gpu_wait_ns: float


@dataclass(frozen=True, slots=True)
class GpuClock:
    """A GPU's clock minus rank 0's: within error_ns of offset_ns; None if no error can be stated."""

    offset_ns: int
    error_ns: int | None


def _messages(operation: NcclOperation) -> Iterable[tuple[Message, NcclStep]]:
    if operation.sequence is None:
        return
    call = (operation.comm, operation.function, operation.sequence)
    for step in operation.network:
        ends = (operation.comm_rank, step.peer) if step.sent else (step.peer, operation.comm_rank)
        yield (*call, step.channel, step.number, *ends), step


def waits(step: NcclStep, other: NcclStep | None) -> Waits:
    """Return the spans of a message on this rank; other: the same message on its peer, None without a record."""
    begin, first, second, end = step.times_ns
    if step.sent:
        requested = second if other is None else min(max(second, other.times_ns[0]), end)
        return Waits(gpu=(begin, first), peer=(first, requested), wire=(requested, end), unknown=(end, end))
    if other is None:
        return Waits(gpu=(second, end), peer=(begin, begin), wire=(first, second), unknown=(begin, first))
    requested = min(max(begin, other.times_ns[2]), first)
    return Waits(gpu=(second, end), peer=(begin, requested), wire=(requested, second), unknown=(begin, begin))


def _started_ns(operation: NcclOperation) -> int | None:
    """Return when the kernel is known to have started: its start was seen, or it has filled a buffer. None: unknown."""
    seen = [channel.start_seen_ns for channel in operation.kernel]
    return min([*seen, *(step.times_ns[1] for step in operation.network if step.sent)], default=None)


def _from(span: Span, started_ns: int | None) -> tuple[Span, Span]:
    """Return the part of a span before the start, and the part after."""
    begin, end = span
    cut = begin if started_ns is None else min(max(begin, started_ns), end)
    return (begin, cut), (cut, end)


def _waits_of_started(found: Waits, started_ns: int | None) -> tuple[Waits, tuple[Span, Span]]:
    """Return the spans without the waits before the start, and those."""
    before_peer, peer = _from(found.peer, started_ns)
    before_arrival, unknown = _from(found.unknown, started_ns)
    return replace(found, peer=peer, unknown=unknown), (before_peer, before_arrival)


def _split(operation: NcclOperation, other_ends: Mapping[tuple[Message, bool], NcclStep]) -> NcclSplit:
    known = dict(_messages(operation))
    peers = {id(step): other_ends.get((message, not step.sent)) for message, step in known.items()}
    started_ns = _started_ns(operation)
    found = [_waits_of_started(waits(step, peers.get(id(step))), started_ns) for step in operation.network]
    spans = [span for span, _ in found]
    launch = [part for _, before in found for part in before]
    wire = intervals(span.wire for span in spans)
    peer = subtraction(intervals(span.peer for span in spans), wire)
    unknown = subtraction(intervals(span.unknown for span in spans), union(wire, peer))
    gpu = subtraction(intervals([*launch, *(span.gpu for span in spans)]), union(wire, peer, unknown))
    times = [time for step in operation.network for time in (step.times_ns[0], step.times_ns[3])]
    return NcclSplit(
        operation,
        kernel_ns(operation),
        max(times, default=0) - min(times, default=0),
        total(wire),
        total(peer),
        total(unknown),
        total(gpu),
    )


def kernel_ns(operation: NcclOperation) -> int | None:
    """Return the length of the operation's kernel over all channels; None if none was reported."""
    ended = [channel for channel in operation.kernel if channel.stop_gpu_ns]
    if not ended:
        return None
    return max(channel.stop_gpu_ns for channel in ended) - min(channel.start_gpu_ns for channel in ended)


def splits(trace: Trace) -> tuple[NcclSplit, ...]:
    """Return the split of every operation that NCCL reported, in the trace's order."""
    ends = {(message, step.sent): step for operation in trace.nccl for message, step in _messages(operation)}
    return tuple(_split(operation, ends) for operation in trace.nccl)


def gpu_clock(operations: Sequence[NcclOperation]) -> GpuClock | None:
    """Return the clock of the GPU of these operations, all of one rank; None if no kernel bounds it from both sides.

    A kernel starts after its operation was called, and starts and stops before either was seen. So GPU minus host is at
    most start - called of any operation, and at least start - seen and stop - seen of any. Drift is not modelled: where
    it exceeds the distance of the bounds, they contradict each other, and no error is stated.
    """
    channels = [(o.called_ns, channel) for o in operations for channel in o.kernel if channel.stop_gpu_ns]
    high = min((c.start_gpu_ns - called_ns for called_ns, c in channels if called_ns is not None), default=None)
    if high is None:
        return None
    low = max(max(c.start_gpu_ns - c.start_seen_ns, c.stop_gpu_ns - c.stop_seen_ns) for _, c in channels)
    return GpuClock((low + high) // 2, (high - low + 1) // 2 if high >= low else None)


def _name(split: NcclSplit, trace: Trace) -> str:
    operation = split.operation
    if operation.bucket is not None and 0 <= operation.bucket < len(trace.buckets):
        return trace.buckets[operation.bucket].name
    return operation.function


def means(trace: Trace) -> tuple[NcclMean, ...]:
    """Return the mean split by arm and bucket, else by arm, function and size, of operations within recorded steps.

    The first is that with the longest network time in all.
    """
    arms = {(step.rank, step.index): step.arm for step in trace.steps}
    groups: dict[tuple[str, Arm, int], list[NcclSplit]] = defaultdict(list)
    for split in splits(trace):
        operation = split.operation
        arm = None if operation.step is None else arms.get((operation.rank, operation.step))
        if arm is not None:
            groups[_name(split, trace), arm, operation.bytes].append(split)
    found = [_mean(name, arm, nbytes, own) for (name, arm, nbytes), own in groups.items()]
    return tuple(sorted(found, key=lambda mean: -mean.network_ns * mean.operations))


def nccl_label(mean: NcclMean, all_means: Sequence[NcclMean]) -> str:
    """Return the name of a mean, with its arm if the means are those of several arms."""
    return mean.name if len({one.arm for one in all_means}) < 2 else f"{mean.name} ({mean.arm})"


def _mean(name: str, arm: Arm, nbytes: int, own: Sequence[NcclSplit]) -> NcclMean:
    def of(attribute: str) -> float:
        return float(np.mean([getattr(split, attribute) for split in own]))

    kernels = [split.kernel_ns for split in own if split.kernel_ns is not None]
    return NcclMean(
        name,
        arm,
        len(own),
        nbytes,
        float(np.mean(kernels)) if kernels else None,
        of("network_ns"),
        of("wire_ns"),
        of("peer_wait_ns"),
        of("unknown_ns"),
        of("gpu_wait_ns"),
    )
