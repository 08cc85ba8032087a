"""A backward pass played over a real transport: no model, no torch; the bytes move, and the compute is a wait.

The moments are kept and stamped in C; Python runs once a bucket, to submit it, and once a step.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from netbottleneck.launch import connect
from netbottleneck.runtime.communicators import key_of, tensor_over
from netbottleneck.trace.recorder import EVENTS
from netbottleneck.whatif.plan import described
from netbottleneck.whatif.replay_schedule import DTYPE, ELEMENT, Score, score

if TYPE_CHECKING:
    from netbottleneck import _core

__all__ = ["DTYPE", "ELEMENT", "Player", "Score", "score", "sent_bytes"]


@dataclass(frozen=True, slots=True)
class Bucket:
    """What communicators.Buckets calls a bucket."""

    name: str
    parameters: tuple[int, ...]
    nbytes: int
    dtype: str = DTYPE


class Player:
    """A score's buckets in memory, and where they go: communicators.Buckets, as every transport takes them."""

    version = 0
    factors = (True, 1.0, None)

    def __init__(self, played: Score, rank: int, size: int, *, spin: bool = False) -> None:
        core = connect.core()
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
        tensors = [(name, size, DTYPE) for name, size in self.score.tensors]
        return {"modules": [], **described(tensors, self.buckets, key_of)}

    def step(self, recorder: _core.Recorder) -> None:
        """Play one step: all gradients are back, and the optimizer is over, when this returns. Raises as Work.wait."""
        core = connect.core()
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
        core = connect.core()
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
