"""A backward pass played over a real transport: no model, no torch; the bytes move, and the compute is a wait.

The moments are kept and stamped in C; Python runs once a bucket, to submit it, and once a step.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from netbottleneck import launch
from netbottleneck.comm import key_of, tensor_over
from netbottleneck.plan import Plan
from netbottleneck.recorder import EVENTS
from netbottleneck.trace import BARE, NULL, SINGLE, Step, Trace

if TYPE_CHECKING:
    from netbottleneck import _core

ELEMENT = 4  # bytes: everything travels as float32
DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class Score:
    """One step of one rank. tensors: (name, bytes); ready: (index, ns after the step's begin), rising.

    forward_ns: until the backward pass begins; tail_ns: what follows once all gradients are back (the optimizer).
    buckets: indices of tensors, each sent when its last is ready. note: where the times come from.
    """

    name: str
    tensors: tuple[tuple[str, int], ...]
    ready: tuple[tuple[int, int], ...]
    forward_ns: int
    tail_ns: int
    buckets: tuple[tuple[int, ...], ...]
    note: str = ""

    @property
    def bytes(self) -> int:
        """Of all gradients."""
        return sum(size for _, size in self.tensors)

    def bucket_bytes(self, index: int) -> int:
        """Of one bucket."""
        return sum(self.tensors[at][1] for at in self.buckets[index])

    def parts(self) -> list[tuple[list[int], list[int], list[int]]]:
        """Return the step cut where buckets are sent: (times, tensors, the buckets that are complete then)."""
        missing = [len(bucket) for bucket in self.buckets]
        home = {at: number for number, bucket in enumerate(self.buckets) for at in bucket}
        found: list[tuple[list[int], list[int], list[int]]] = []
        times: list[int] = []
        tensors: list[int] = []
        for index, at in self.ready:
            times.append(at)
            tensors.append(index)
            missing[home[index]] -= 1
            if missing[home[index]] == 0:
                found.append((times, tensors, [home[index]]))
                times, tensors = [], []
        return found


def score(trace: Trace, plan: Plan, *, scale: float = 1.0, stretch: float = 1.0) -> Score:
    """Return the median step of a trace's first rank that tells its gradients, to be played by a static plan.

    A rank alone counts before others, and nobody who waited for bytes before those who did not. scale: what bytes are
    multiplied with, stretch: times. Raises ValueError where no step tells when its gradients were ready, for a plan
    that decides as it runs, and for factors that are not positive.
    """
    if not (0 < scale <= 64 and 0 < stretch <= 1000):
        raise ValueError(f"bytes times {scale} and times {stretch}: must be positive, at most 64 and 1000")
    steps = _told(trace)
    offsets: dict[int, list[int]] = defaultdict(list)
    for step in steps:
        for index, at in step.grad_ready:
            offsets[index].append(at - step.begin_ns)
    medians = {index: round(stretch * statistics.median_low(times)) for index, times in offsets.items()}
    ready = tuple(sorted(medians.items(), key=lambda row: row[1]))
    tensors = tuple((p.name, max(ELEMENT, round(p.bytes * scale / ELEMENT) * ELEMENT)) for p in trace.parameters)
    if len(ready) != len(tensors):
        raise ValueError(f"run {trace.id}: {len(tensors)} gradients, of which {len(ready)} tell when they are ready")
    buckets = plan.resolve([size for _, size in tensors], [DTYPE] * len(tensors), [index for index, _ in ready])
    if not buckets:
        raise ValueError(f"the rule {plan.rule} decides as it runs: a replay needs one that does not, ddp or explicit")
    forward = min(round(stretch * statistics.median_low([_forward_ns(step) for step in steps])), ready[0][1])
    tail = round(stretch * statistics.median_low([_tail_ns(step) for step in steps]))
    note = f"{trace.origin}: {', '.join(trace.notes)}" if trace.notes else trace.origin
    return Score(trace.model or trace.id, tensors, ready, forward, tail, buckets, note)


def _told(trace: Trace) -> Sequence[Step]:
    told = [step for step in trace.steps if step.grad_ready and step.transport != BARE]
    if not told:
        raise ValueError(f"run {trace.id}: no step tells when its gradients were ready")
    order = [SINGLE, NULL, *trace.transports, *(step.transport for step in told)]
    first = min(told, key=lambda step: (order.index(step.transport), step.rank))
    own = [step for step in told if (step.rank, step.transport) == (first.rank, first.transport)]
    firsts: dict[int, int] = {}
    for step in own:
        firsts[step.block] = min(step.index, firsts.get(step.block, step.index))
    return [step for step in own if step.index != firsts[step.block]] or own


def _forward_ns(step: Step) -> int:
    return step.forward[-1][1] - step.begin_ns if step.forward else 0


def _tail_ns(step: Step) -> int:
    return max(0, sum(end - begin for begin, end in step.optimizer))


@dataclass(frozen=True, slots=True)
class Bucket:
    """What comm.Buckets calls a bucket."""

    name: str
    parameters: tuple[int, ...]
    nbytes: int
    dtype: str = DTYPE


class Player:
    """A score's buckets in memory, and where they go: comm.Buckets, as every transport takes them."""

    version = 0
    factors = (True, 1.0, None)

    def __init__(self, played: Score, rank: int, size: int, *, spin: bool = False) -> None:
        core = launch.core()
        self.score = played
        self.buckets = [
            Bucket(f"replay.bucket.{number}", bucket, played.bucket_bytes(number))
            for number, bucket in enumerate(played.buckets)
        ]
        self.memory = [core.Arena(bucket.nbytes) for bucket in self.buckets]
        self._size, self._spin = size, spin
        self._parts = played.parts()
        self._sink: Any = None
        self.fill(float(rank + 1))

    def fill(self, value: float) -> None:
        """Set every gradient of every bucket."""
        for arena in self.memory:
            np.frombuffer(arena, np.float32)[:] = value

    def digest(self) -> bytes:
        """Return a hash of all gradients, as they are now."""
        found = hashlib.sha256()
        for arena in self.memory:
            found.update(memoryview(arena))
        return found.digest()

    def flat(self, index: int) -> Any:
        """Return a bucket as a flat tensor: for stock, which is torch's."""
        return tensor_over(self.memory[index])

    def target(self, sink: Any, _average: bool = True, *, predivide: float = 1.0, op: int | None = None) -> None:
        """Say where complete buckets go from now on. Raises ValueError for anything but a mean."""
        if predivide != 1.0 or op is not None:
            raise ValueError("a replay sends means")
        self._sink = sink

    def describe(self) -> dict[str, Any]:
        """Return what a rank's record says of its tensors and buckets."""
        home = {at: number for number, bucket in enumerate(self.buckets) for at in bucket.parameters}
        return {
            "parameters": [
                {"name": name, "bytes": size, "dtype": DTYPE, "bucket": home[at]}
                for at, (name, size) in enumerate(self.score.tensors)
            ],
            "modules": [],
            "buckets": [
                {
                    "name": bucket.name,
                    "key": key_of(bucket.name),
                    "bytes": bucket.nbytes,
                    "dtype": DTYPE,
                    "parameters": list(bucket.parameters),
                }
                for bucket in self.buckets
            ],
        }

    def step(self, recorder: _core.Recorder) -> None:
        """Play one step: all gradients are back, and the optimizer is over, when this returns. Raises as Work.wait."""
        core = launch.core()
        begin, score = core.now_ns(), self.score
        recorder.put(EVENTS["FORWARD_BEGIN"])
        core.stamp_at(recorder, EVENTS["FORWARD_END"], [begin + score.forward_ns], [0], self._spin)
        works = []
        for times, tensors, complete in self._parts:
            core.stamp_at(recorder, EVENTS["GRAD_READY"], [begin + at for at in times], tensors, self._spin)
            works += [self._send(number) for number in complete]
        recorder.put(EVENTS["WAIT_BEGIN"])
        for work in works:
            if work is not None:
                work.wait()
        recorder.put(EVENTS["WAIT_END"])
        recorder.put(EVENTS["OPTIMIZER_BEGIN"])
        core.stamp_at(recorder, EVENTS["OPTIMIZER_END"], [core.now_ns() + score.tail_ns], [0], self._spin)

    def _send(self, index: int) -> Any:
        sink, bucket, arena = self._sink, self.buckets[index], self.memory[index]
        if sink is None:
            return None
        if callable(sink):
            return sink(index)
        core = launch.core()
        return sink.submit(
            bucket.name, core.ALLREDUCE, arena, core.FLOAT32, postscale=1 / self._size, bucket=index + 1, keep=arena
        )


def sent_bytes(algorithm: str | None, size: int, nbytes: int) -> float | None:
    """Return what one of `size` ranks sends of payload, the mean over ranks; None where the algorithm is not known.

    None stands for stock: gloo's ring. Ring and halving-doubling: 2 S (n-1)/n (Thakur et al. 2005); recursive doubling
    among a power of two: S log2(n).
    """
    power = size & (size - 1) == 0
    if size == 1:
        return 0.0
    if algorithm in (None, "ring all-reduce") or (algorithm == "halving-doubling" and power):
        return 2 * nbytes * (size - 1) / size
    if algorithm == "recursive doubling" and power:
        return float(nbytes * (size.bit_length() - 1))
    return None
