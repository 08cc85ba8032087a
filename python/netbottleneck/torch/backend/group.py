"""The process group that torch.distributed, DDP and FSDP call.

Its methods have torch's names and arguments; what they move is in `reductions` and `exchanges`.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from netbottleneck.torch.backend import exchanges, reductions
from netbottleneck.torch.backend.moves import Ranks, Rounds, parts_of
from netbottleneck.torch.backend.names import Names
from netbottleneck.torch.backend.others import elsewhere
from netbottleneck.torch.backend.plain import Plain
from netbottleneck.torch.backend.under_way import About, BackendWork, Named, Operation, Steps

if TYPE_CHECKING:
    from netbottleneck.torch.backend.link import Link

Method = TypeVar("Method", bound=Callable[..., Any])


def of_host_memory(method: Method) -> Method:
    """Have calls whose tensors are on another device made by the backend that was named for it."""

    @functools.wraps(method)
    def called(self: "NbGroup", first: Any, *args: Any, **kwargs: Any) -> Any:
        device = _device(first)
        if device is not None and device.type != "cpu":
            return getattr(elsewhere(self, device), method.__name__)(first, *args, **kwargs)
        return method(self, first, *args, **kwargs)

    return cast(Method, called)


def _device(first: Any) -> torch.device | None:
    while isinstance(first, list | tuple):
        if not first:
            return None
        first = first[0]
    return cast(torch.device, first.device)


class NbGroup(Plain):
    """Some of the ranks of a link, and what is under way among them."""

    def __init__(self, link: "Link", ranks: Ranks, store: Any, timeout: timedelta, *, owner: bool) -> None:
        super().__init__(ranks.rank, ranks.size)
        self._store = store
        self.link = link
        self.ranks = ranks
        self._owner = owner  # of the link
        self._limit_s = timeout.total_seconds()
        self._pairs = exchanges.Pairs(link, ranks)
        self._names = Names(ranks.number)
        self._order = threading.Lock()

    def _begin(
        self, what: str, rounds: Rounds, opts: Any = None, outputs: list[Any] | None = None, **more: Any
    ) -> BackendWork:
        """Start a collective. outputs: the tensors it writes. more: of BackendWork, and `driven`."""
        timeout = getattr(opts, "timeout", None)
        limit_s = self._limit_s if timeout is None or timeout <= timedelta(0) else timeout.total_seconds()
        about = About(self.link, what, self.ranks.jobs, limit_s)
        operation = Operation()
        operation.driven = more.pop("driven", False)
        operation.run(self._steps(operation, rounds, about.names, awaited=not getattr(opts, "asyncOp", True)))
        if operation.driven and not operation.over(0.0):
            self.link.progress.add(operation)
        return BackendWork(operation, [] if outputs is None else outputs, about, **more)

    def _steps(self, operation: Operation, rounds: Rounds, names: list[Named], *, awaited: bool) -> Steps:
        moves = next(rounds, [])
        with self._order:
            taken = [self._names.take(move, operation) for move in moves]
        names.extend((name, move.group) for (name, _), move in zip(taken, moves, strict=True))
        busy = [before for _, before in taken if before is not None]
        if busy:
            operation.driven = True
            yield busy
        alone = awaited and len(moves) == 1 and not busy
        yield [self.link.submit(move, name, alone) for move, (name, _) in zip(moves, names, strict=True)]
        for count, later in enumerate(rounds, 2):
            fresh = [(f"{names[0][0]}:{count}.{at}", move.group) for at, move in enumerate(later)]
            names[:] = [*names[:1], *fresh]
            yield [self.link.submit(move, name, False) for move, (name, _) in zip(later, fresh, strict=True)]

    @of_host_memory
    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> BackendWork:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        op = _op("all_reduce", opts)
        if given[0].layout != torch.strided:
            outputs = given[:1]
            rounds = reductions.all_reduce_sparse(self.ranks, given[0], op, outputs)
            return self._begin("all_reduce", rounds, opts, outputs, driven=True)
        return self._begin("all_reduce", reductions.all_reduce(self.ranks, given, op), opts, given)

    @of_host_memory
    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> BackendWork:
        rounds = reductions.all_reduce(self.ranks, tensors, _op("all_reduce_coalesced", opts))
        return self._begin("all_reduce_coalesced", rounds, opts, list(tensors))

    @of_host_memory
    def reduce(self, tensors: Any, opts: Any) -> BackendWork:
        rounds = reductions.reduce_to(self.ranks, tensors[0], _op("reduce", opts), opts.rootRank)
        return self._begin("reduce", rounds, opts, list(tensors))

    @of_host_memory
    def broadcast(self, tensors: Any, opts: Any = None) -> BackendWork:
        root = 0 if opts is None else opts.rootRank
        return self._begin("broadcast", exchanges.broadcast(self.ranks, tensors, root), opts, list(tensors))

    @of_host_memory
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> BackendWork:
        rounds = exchanges.all_gather(self.ranks, output_tensors, input_tensors)
        return self._begin("all_gather", rounds, opts, list(output_tensors))

    @of_host_memory
    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> BackendWork:
        """output_lists: one list of tensors for each rank, as long as input_list."""
        by_input = [list(parts) for parts in zip(*output_lists, strict=True)]
        rounds = exchanges.all_gather(self.ranks, by_input, input_list)
        return self._begin("all_gather_coalesced", rounds, opts, list(output_lists))

    @of_host_memory
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> BackendWork:
        rounds = exchanges.all_gather_whole(self.ranks, outputs, inputs)
        return self._begin("all_gather_into_tensor", rounds, opts, list(outputs))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> BackendWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    @of_host_memory
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> BackendWork:
        op = _op("reduce_scatter", opts)
        rounds = reductions.reduce_scatter(self.ranks, outputs, inputs, op)
        return self._begin("reduce_scatter", rounds, opts, list(outputs))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> BackendWork:
        parts = []
        for output, whole in zip(outputs, inputs, strict=True):
            parts_of("reduce_scatter", whole, output, self.ranks.size)
            flat = whole.reshape(-1)
            parts.append(flat.split(output.numel()) if output.numel() else [flat] * self.ranks.size)
        return self.reduce_scatter(outputs, parts, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> BackendWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    @of_host_memory
    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, into: Sequence[int], out: Sequence[int], opts: Any = None
    ) -> BackendWork:
        """into, out: rows from and to each rank, on all ranks; or empty on all: equal parts."""
        parts = [exchanges.rows(output, into or (), self.size()), exchanges.rows(input, out or (), self.size())]
        even = not into and not out
        rounds = exchanges.all_to_all_even(self.ranks, *parts) if even else self._pairs.all_to_all(*parts)
        return self._begin("all_to_all_single", rounds, opts, [output])

    @of_host_memory
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> BackendWork:
        return self._begin("all_to_all", self._pairs.all_to_all(outputs, inputs), opts, list(outputs))

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> BackendWork:
        if inputs[0].device.type != "cpu":
            return cast(BackendWork, elsewhere(self, inputs[0].device).gather(outputs, inputs, opts))
        rounds = self._pairs.gather(outputs[0] if outputs else (), inputs[0], opts.rootRank)
        return self._begin("gather", rounds, opts, list(outputs))

    @of_host_memory
    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> BackendWork:
        rounds = self._pairs.scatter(outputs[0], inputs[0] if inputs else (), opts.rootRank)
        return self._begin("scatter", rounds, opts, list(outputs))

    @of_host_memory
    def send(self, tensors: Any, target: int, tag: int = 0) -> BackendWork:
        rounds = self._pairs.message(self._other(tensors, target), self.ranks.rank, target, tag)
        return self._begin(f"send to rank {self.ranks.jobs[target]} (tag {tag})", rounds, source=self.ranks.rank)

    @of_host_memory
    def recv(self, tensors: Any, source: int, tag: int = 0) -> BackendWork:
        rounds = self._pairs.message(self._other(tensors, source), source, self.ranks.rank, tag)
        what = f"receive from rank {self.ranks.jobs[source]} (tag {tag})"
        return self._begin(what, rounds, None, list(tensors), source=source)

    def _other(self, tensors: Any, rank: int) -> torch.Tensor:
        if rank == self.ranks.rank or not 0 <= rank < self.ranks.size:
            raise ValueError(f"rank {rank} of {self.ranks.size} is no other rank: a message is between two")
        return cast(torch.Tensor, tensors[0])

    def barrier(self, opts: Any = None, *_: Any) -> BackendWork:
        if getattr(opts, "device_ids", None):
            raise NotImplementedError("barrier: device_ids are NCCL's alone: leave them out")
        return self._begin("barrier", reductions.barrier(self.ranks), opts)

    def get_group_store(self) -> Any:
        """Return the store that torch.distributed gave this group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long operations that begin from now on may take."""
        self._limit_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """End; where the link is this group's, for all groups that share it."""
        if self._owner:
            self.link.close()

    def abort(self) -> None:
        """Fail what is pending, on all ranks; where the link is this group's."""
        if self._owner:
            self.link.abort("torch.distributed was asked to abort")


def _op(what: str, opts: Any) -> str:
    """Return the name of the reduction: `opts` is torch's options, or a ReduceOp."""
    if opts is None:
        return "SUM"
    return reductions.op_name(what, getattr(opts, "reduceOp", opts))
