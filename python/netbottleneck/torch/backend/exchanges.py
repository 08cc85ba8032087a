"""Collectives that move tensors as they are, and messages between two ranks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from netbottleneck.torch.backend.moves import (
    Move,
    Ranks,
    Rounds,
    Touched,
    bytes_code,
    equal_sizes,
    exchanged,
    gathered,
    memory_of,
    nonempty,
    parts_of,
)

if TYPE_CHECKING:
    from netbottleneck.torch.backend.link import Link

PAIRS_MAX = 60_000  # groups of two that a job has room for


def broadcast(ranks: Ranks, tensors: Sequence[torch.Tensor], root: int) -> Rounds:
    """Give every rank the root's tensors, in place."""
    touched = Touched()
    place = list(ranks.order).index(root)
    moves = []
    for tensor in tensors:
        found = touched.written(tensor)
        moves.append(ranks.move("BROADCAST", [memory_of(found)], bytes_code(), root=place, keep=found))
    yield nonempty(moves)
    touched.settle()


def all_gather(ranks: Ranks, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> Rounds:
    """Write each rank's input to the output of that rank: a list of outputs, one of each rank, for each input."""
    touched = Touched()
    moves = []
    for given, mine in zip(outputs, inputs, strict=True):
        equal_sizes("all_gather", [*given, mine], ranks.size + 1)
        parts = [touched.written(part) for part in given]
        _own(parts[ranks.rank], mine)
        moves.append(gathered(ranks, parts, parts))
    yield nonempty(moves)
    touched.settle()


def all_gather_whole(ranks: Ranks, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Rounds:
    """The same, where the outputs of all ranks are one tensor."""
    touched = Touched()
    moves = []
    for given, mine in zip(outputs, inputs, strict=True):
        parts_of("all_gather", given, mine, ranks.size)
        whole = touched.written(given)
        parts = whole.view(-1).split(mine.numel()) if mine.numel() else [whole] * ranks.size
        _own(parts[ranks.rank], mine)
        moves.append(gathered(ranks, parts, whole))
    yield nonempty(moves)
    touched.settle()


def _own(place: torch.Tensor, mine: torch.Tensor) -> None:
    """Put this rank's part where it belongs, unless it is there."""
    if place.data_ptr() != mine.data_ptr() or not mine.is_contiguous():
        place.copy_(mine.detach().reshape(place.shape))


class Pairs:
    """Moves between two ranks of a process group. Each is a broadcast in a group of the two."""

    def __init__(self, link: "Link", ranks: Ranks) -> None:
        self._link = link
        self._ranks = ranks

    def move(self, tensor: torch.Tensor, source: int, target: int, about: str) -> Move:
        """Return the move of a tensor from one rank to another, one of which this is."""
        ranks, link = self._ranks, self._link
        members = sorted((ranks.jobs[source], ranks.jobs[target]))
        return Move(
            "BROADCAST",
            [memory_of(tensor)],
            bytes_code(),
            root=members.index(ranks.jobs[source]),
            keep=tensor,
            group=link.pair(*members),
            members=members,
            way=f"{about}{source}>{target}",
        )

    def message(self, tensor: torch.Tensor, source: int, target: int, tag: int) -> Rounds:
        """Send or receive."""
        touched = Touched()
        found = touched.read(tensor) if source == self._ranks.rank else touched.written(tensor)
        yield nonempty([self.move(found, source, target, f"{tag}:")])
        touched.settle()

    def gather(self, outputs: Sequence[torch.Tensor], mine: torch.Tensor, root: int) -> Rounds:
        """Write each rank's tensor to the root's outputs."""
        touched, rank = Touched(), self._ranks.rank
        if rank != root:
            yield nonempty([self.move(touched.read(mine), rank, root, "g")])
            return
        equal_sizes("gather", [*outputs, mine], self._ranks.size + 1)
        parts = [touched.written(part) for part in outputs]
        _own(parts[root], mine)
        yield nonempty([self.move(part, at, root, "g") for at, part in enumerate(parts) if at != root])
        touched.settle()

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Rounds:
        """Write to each rank's output its tensor of the root's inputs."""
        touched, rank = Touched(), self._ranks.rank
        into = touched.written(output)
        if rank != root:
            yield nonempty([self.move(into, root, rank, "s")])
        else:
            equal_sizes("scatter", [*inputs, output], self._ranks.size + 1)
            parts = [touched.read(part) for part in inputs]
            _own(into, parts[root])
            yield nonempty([self.move(part, root, at, "s") for at, part in enumerate(parts) if at != root])
        touched.settle()

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Rounds:
        """Give each rank one tensor, of any size, and write what each gives to the outputs."""
        touched, ranks = Touched(), self._ranks
        if self._link.size * (self._link.size - 1) // 2 > PAIRS_MAX:
            raise NotImplementedError(f"all_to_all of parts of different sizes among {self._link.size} ranks")
        out = [touched.read(part) for part in inputs]
        into = [touched.written(part) for part in outputs]
        if out[ranks.rank].numel() != into[ranks.rank].numel():
            raise ValueError(
                f"all_to_all: rank {ranks.rank} gives itself {out[ranks.rank].numel()} elements, and takes "
                f"{into[ranks.rank].numel()}"
            )
        _own(into[ranks.rank], out[ranks.rank])
        others = [at for at in range(ranks.size) if at != ranks.rank]
        moves = [self.move(out[at], ranks.rank, at, "a") for at in others]
        moves += [self.move(into[at], at, ranks.rank, "a") for at in others]
        yield nonempty(moves)
        touched.settle()


def all_to_all_even(ranks: Ranks, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Rounds:
    """The same, of parts of one size."""
    touched = Touched()
    out = [touched.read(part) for part in inputs]
    into = [touched.written(part) for part in outputs]
    yield nonempty([exchanged(ranks, out, into, (out, into))])
    touched.settle()


def rows(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[torch.Tensor]:
    """Return a part for each rank: of equal numbers of rows where splits is empty. ValueError where that cannot be."""
    length = tensor.size(0) if tensor.dim() else 0
    if not splits:
        if length % size:
            raise ValueError(f"all_to_all_single: {length} rows are no {size} equal parts: give splits")
        return list(tensor.split(length // size)) if length else [tensor] * size
    if len(splits) != size or sum(splits) != length:
        raise ValueError(f"all_to_all_single: splits {list(splits)} of {length} rows: one for each of {size} ranks")
    return list(tensor.split(list(splits)))
