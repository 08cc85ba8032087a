"""Replay of a backward pass over a real transport, without model or torch: the bytes move, compute is a timed wait.

C code waits for the recorded times and writes the timestamps. Python runs once per bucket to submit it, and per step.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from netbottleneck.launch import connect
from netbottleneck.runtime.async_operations import average_factor
from netbottleneck.runtime.communicators import key_of, tensor_over
from netbottleneck.trace.ring_reader import EVENTS
from netbottleneck.whatif.plan import DTYPE, ELEMENT, ReplaySchedule, described, replay_schedule

if TYPE_CHECKING:
    from netbottleneck import _core

__all__ = ["DTYPE", "ELEMENT", "Player", "ReplaySchedule", "replay_schedule", "sent_bytes"]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket with the attributes of communicators.Buckets."""

    name: str
    parameters: tuple[int, ...]
    nbytes: int
    dtype: str = DTYPE


class Player:
    """The buckets of a replay schedule in memory and their target, with the interface of communicators.Buckets."""

    version = 0
    factors = (True, 1.0, None)

    def __init__(self, schedule: ReplaySchedule, rank: int, size: int, *, spin: bool = False) -> None:
        core = connect.core()
        self.schedule = schedule
        self.buckets = [
            Bucket(f"replay.bucket.{number}", bucket, schedule.bucket_bytes(number))
            for number, bucket in enumerate(schedule.buckets)
        ]
        self.memory = [core.Arena(bucket.nbytes) for bucket in self.buckets]
        self._size, self._spin = size, spin
        self._parts = schedule.parts()
        self._destination: Any = None
        self.fill(float(rank + 1))

    def fill(self, value: float) -> None:
        """Set every gradient of every bucket to `value`."""
        for arena in self.memory:
            np.frombuffer(arena, np.float32)[:] = value

    def digest(self) -> bytes:
        """Return the SHA-256 of all gradients."""
        found = hashlib.sha256()
        for arena in self.memory:
            found.update(memoryview(arena))
        return found.digest()

    def flat(self, index: int) -> Any:
        """Return a bucket as a flat tensor, for stock, which runs in torch."""
        return tensor_over(self.memory[index])

    def target(self, destination: Any, _average: bool = True, *, predivide: float = 1.0, op: int | None = None) -> None:
        """Set the target of complete buckets. Raises ValueError for anything but a mean."""
        if predivide != 1.0 or op is not None:
            raise ValueError("a replay sends means")
        self._destination = destination

    def describe(self) -> dict[str, Any]:
        """Return the description of tensors and buckets for a rank's record."""
        tensors = [(name, size, DTYPE) for name, size in self.schedule.tensors]
        return {"modules": [], **described(tensors, self.buckets, key_of)}

    def step(self, recorder: _core.Recorder) -> None:
        """Play one step; returns when all gradients are reduced and the optimizer's time has passed.

        Raises as Work.wait."""
        core = connect.core()
        begin, schedule = core.now_ns(), self.schedule
        recorder.put(EVENTS["FORWARD_BEGIN"])
        core.stamp_at(recorder, EVENTS["FORWARD_END"], [begin + schedule.forward_ns], [0], self._spin)
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
        core.stamp_at(recorder, EVENTS["OPTIMIZER_END"], [core.now_ns() + schedule.tail_ns], [0], self._spin)

    def _send(self, index: int) -> Any:
        destination, bucket, arena = self._destination, self.buckets[index], self.memory[index]
        if destination is None:
            return None
        if callable(destination):
            return destination(index)
        core = connect.core()
        return destination.submit(
            bucket.name,
            core.ALLREDUCE,
            arena,
            core.FLOAT32,
            postscale=average_factor(self._size),
            bucket=index + 1,
            keep=arena,
        )


def sent_bytes(algorithm: str | None, size: int, nbytes: int) -> float | None:
    """Return the payload bytes that one of `size` ranks sends, the mean over ranks; None for an unknown algorithm.

    algorithm None: stock, which is gloo's ring. Ring and halving-doubling: 2 S (n-1)/n (Thakur et al. 2005); recursive
    doubling with a power of two ranks: S log2(n).
    """
    power = size & (size - 1) == 0
    if size == 1:
        return 0.0
    if algorithm in (None, "ring all-reduce") or (algorithm == "halving-doubling" and power):
        return 2 * nbytes * (size - 1) / size
    if algorithm == "recursive doubling" and power:
        return float(nbytes * (size.bit_length() - 1))
    return None
