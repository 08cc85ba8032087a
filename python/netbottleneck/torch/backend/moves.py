"""What each collective moves: tensors as the engine's operations, and what is done before and after.

A collective is a generator: it yields the operations of one round after the other, and goes on once they are over.
"""

import functools
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from netbottleneck.runtime import job
from netbottleneck.torch.gradients import dtype_code

Rounds = Generator[list["Move"], None, None]
Memory = tuple[int, int]  # address and bytes

SEGMENTS_MAX = 512  # of one operation of the engine


@dataclass(slots=True)
class Move:
    """One operation of the engine: of the group with this number, whose ranks of the job are `members`.

    way: who goes to whom, where not all ranks of the process group take part.
    """

    kind: str
    memory: list[Memory]
    code: int
    op: int = 0
    root: int = 0
    factor: float = 1.0  # applied to the result
    keep: Any = None
    group: int = 0
    members: Sequence[int] = ()
    way: str = ""

    def signature(self) -> Hashable:
        """Return what is the same for operations that are alike."""
        nbytes = sum(piece[1] for piece in self.memory)
        return (self.kind, nbytes, self.code, self.op, self.root, self.factor)


class Touched:
    """The tensors of one collective: where they are not contiguous, copies of them travel."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what to send."""
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise ValueError(
                f"a {tensor.layout} tensor on {tensor.device} is not supported here: dense tensors travel from host "
                f'memory; for other devices name their backend too, as in "cpu:nb,cuda:nccl"'
            )
        plain = tensor.detach() if tensor.requires_grad else tensor
        return plain if plain.is_contiguous() else plain.contiguous()

    def written(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what to receive into."""
        found = self.read(tensor)
        if found is not tensor and not tensor.is_contiguous():
            self._copies.append((tensor.detach(), found))
        return found

    def settle(self) -> None:
        """Bring what was received to where it belongs."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)


def memory_of(tensor: torch.Tensor) -> Memory:
    """Return where a contiguous tensor lies."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


@functools.cache
def kind_code(kind: str) -> int:
    """Return the engine's number for a kind of operation."""
    return int(getattr(job.core(), kind))


@functools.cache
def bytes_code() -> int:
    """Return the engine's number for what is moved, whatever it means."""
    return int(job.core().UINT8)


def equal_sizes(what: str, tensors: Sequence[torch.Tensor], size: int) -> None:
    """Raise ValueError where these are not `size` tensors of one size and type."""
    if len(tensors) != size:
        raise ValueError(f"{what}: {len(tensors)} tensors for {size} ranks: one for each is required")
    first = tensors[0]
    for tensor in tensors:
        if tensor.numel() != first.numel() or tensor.dtype != first.dtype:
            raise ValueError(
                f"{what}: tensors of one size and type are required, not {list(first.shape)} {first.dtype} and "
                f"{list(tensor.shape)} {tensor.dtype}"
            )


def parts_of(what: str, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """Raise ValueError where `whole` is not `size` times `part`."""
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"{what}: {whole.numel()} elements of {whole.dtype} are not {size} times {part.numel()} of {part.dtype}"
        )


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group: which of the engine's group they are, and in which order.

    order: their numbers in the process group, by their number in the engine's, in which ranks of the job rise.
    """

    number: int
    jobs: Sequence[int]  # of the job, by rank of the process group
    rank: int
    order: Sequence[int]

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.jobs)

    @functools.cached_property
    def members(self) -> Sequence[int]:
        """Their numbers in the job, which rise."""
        return [self.jobs[rank] for rank in self.order]

    def line(self, parts: Sequence[torch.Tensor]) -> list[Memory]:
        """Return where parts lie, one of each rank of the process group, in the engine's order."""
        return [memory_of(parts[rank]) for rank in self.order]

    def move(self, kind: str, memory: list[Memory], code: int, **more: Any) -> Move:
        """Return an operation of all of them."""
        return Move(kind, memory, code, group=self.number, members=self.members, **more)


def gathered(ranks: Ranks, parts: Sequence[torch.Tensor], keep: Any) -> Move:
    """Return the operation by which each rank's part, one after the other, is everywhere; ours is there."""
    return ranks.move("ALLGATHER", ranks.line(parts), bytes_code(), keep=keep)


def exchanged(ranks: Ranks, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor], keep: Any) -> Move:
    """Return the operation by which each rank gets one part of every other's."""
    return ranks.move("ALLTOALL", [*ranks.line(out), *ranks.line(into)], bytes_code(), keep=keep)


def engine_reduces(dtype: torch.dtype) -> bool:
    """Whether the engine can reduce elements of this type."""
    try:
        dtype_code(dtype)
    except ValueError:
        return False
    return True


def nonempty(moves: list[Move]) -> list[Move]:
    """Leave out what has no bytes; all its ranks do."""
    return [move for move in moves if sum(piece[1] for piece in move.memory) > 0]
