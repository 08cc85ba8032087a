"""Process group that torch.distributed, DDP and FSDP call.

Its methods have torch's names and arguments; backend/collectives.py implements the transfers.
"""

import contextlib
import functools
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist

from netbottleneck import config
from netbottleneck.launch import connect
from netbottleneck.launch.rendezvous import Rendezvous, Store
from netbottleneck.runtime import exits
from netbottleneck.torch.backend import collectives
from netbottleneck.torch.backend.collectives import Names
from netbottleneck.torch.backend.operations import (
    About,
    BackendWork,
    DeviceOperation,
    Link,
    Named,
    Operation,
    Ranks,
    Rounds,
    Steps,
    parts_of,
)
from netbottleneck.torch.gradients import is_reachable

if TYPE_CHECKING:
    from netbottleneck.torch.backend.operations import Link


# Devices: ours, and those of other backends. "cpu:nb,cuda:nccl" has a second process group below it, made by torch.

NAME = "nb"
_INNER = "_netbottleneck_others"


def _config(group: Any) -> dict[str, str]:
    """Return the backend of each type of device; ours alone while torch does not know the group."""
    world = dist.distributed_c10d._world
    text = world.pg_backend_config.get(group, f"cpu:{NAME},cuda:{NAME}")
    return dict(pair.split(":") for pair in text.split(",") if ":" in pair)


def devices_of(group: Any) -> list[torch.device]:
    """Return the devices for which a backend was named."""
    return [torch.device(device) for device in _config(group)]


def is_ours(group: Any, device: torch.device) -> bool:
    """Return True if the group itself moves this device's memory. A device of another driver is like CUDA's."""
    named = _config(group)
    return is_reachable(device) and named.get(device.type, named.get("cuda")) == NAME


def elsewhere_or_none(group: Any, device: torch.device) -> Any:
    """Return the process group of another backend for a device; None if no other backend was named for it."""
    config = {device: backend for device, backend in _config(group).items() if backend != NAME}
    if device.type not in config:
        return None
    inner = group.__dict__.get(_INNER)
    if inner is None:
        # Every rank reaches this with its first tensor on such a device.
        world = dist.distributed_c10d._world
        ranks = world.pg_group_ranks[group]
        inner, _ = dist.distributed_c10d._new_process_group_helper(
            group.size(),
            group.rank(),
            sorted(ranks, key=lambda rank: ranks[rank]),
            ",".join(f"{name}:{backend}" for name, backend in config.items()),
            world.pg_map[group][1],
            dist.distributed_c10d.GroupName(f"{group.group_name}/others"),
            timeout=dist.distributed_c10d._get_default_timeout(dist.Backend(config[device.type])),
        )
        world.pg_group_ranks[inner] = ranks
        group.__dict__[_INNER] = inner
    return inner


def elsewhere(group: Any, device: torch.device) -> Any:
    """As elsewhere_or_none, but raises ValueError if no backend was named."""
    found = elsewhere_or_none(group, device)
    if found is None:
        backend = NAME if is_reachable(device) else "xccl"
        raise ValueError(
            f'the backend "nb" moves the memory of {", ".join(_config(group))} in this group, and this tensor is on '
            f'{device}: name a backend for it too, as in init_process_group("cpu:nb,{device.type}:{backend}"), or move '
            "the tensor to the CPU"
        )
    return found


# The rest of a process group: its name, its devices, and operations that only NCCL supports.

# torch overloads its methods; only one form of each is called.
_ProcessGroup: Any = dist.ProcessGroup


class Plain(_ProcessGroup):  # type: ignore[misc]
    """A process group in Python. It is also its own backend: torch 2.13 has no backend class that can be subclassed."""

    _name = ""
    _desc = ""

    def getBackendName(self) -> str:
        return "nb"

    _get_backend_name = name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupName = _set_group_name
    setGroupDesc = _set_group_desc

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *(device for device in devices_of(self) if device.type != "cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """Return the backend of a device: this group, or the backend named for the device."""
        if torch.device(device).type == "cpu":
            return self
        other = elsewhere_or_none(self, torch.device(device))
        return self if other is None else other._get_backend(device)

    # Interface of a backend.
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def __repr__(self) -> str:
        return f"<nb process group {self._name!r}: rank {self.rank()} of {self.size()}>"

    # Operations that only NCCL supports, or no CPU backend.
    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise NotImplementedError(f'{what} is not possible with the backend "nb": {instead}')

    def recv_anysource(self, tensors: Any, tag: int) -> NoReturn:
        self._refuse("recv from any source", "name the source: recv(tensor, src=…)")

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse(
            "monitored_barrier",
            "barrier() names the missing ranks, if its timeout is longer than NETBOTTLENECK_STALL_S",
        )

    def split_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("split_group", "use new_group()")

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("merge_remote_group", "use new_group()")

    def _start_coalescing(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("coalescing of different operations", "begin them one by one with async_op=True")

    def _end_coalescing(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("coalescing of different operations", "begin them one by one with async_op=True")

    def _register_on_completion_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("a hook on completion", "use work.get_future().then(…)")

    def _enable_collectives_timing(self) -> NoReturn:
        self._refuse("timing by the backend", "measure with netbottleneck (NETBOTTLENECK=1)")


# The group and its collectives.


class Call(NamedTuple):
    """A collective to begin. opts: torch's. outputs: the tensors it writes. source: of a received tensor."""

    what: str
    rounds: Rounds
    opts: Any = None
    outputs: list[Any] | None = None
    source: int = -1
    driven: bool = False


def collective(method: Callable[..., Call], of: int = 0) -> Callable[..., BackendWork]:
    """Begin the collective that a method returns, or forward it to the backend named for its tensors' device.

    of: the position of the tensors in question.
    """

    @functools.wraps(method)
    def called(self: "NbGroup", *args: Any, **kwargs: Any) -> BackendWork:
        device = _device(args[of])
        if device is None or device.type == "cpu":
            return self._begin(Operation(), method(self, *args, **kwargs))
        if is_ours(self, device):
            return self._begin(DeviceOperation(device), method(self, *args, **kwargs))
        other, name = elsewhere(self, device), method.__name__
        given = name if hasattr(other, name) else EARLIER.get(name, name)
        return cast(BackendWork, getattr(other, given)(*args, **kwargs))

    return called


def _has_inference(outputs: Any) -> bool:
    """Return True if one of the tensors can be written in inference mode only."""
    if isinstance(outputs, torch.Tensor):
        return outputs.is_inference()
    return outputs is not None and any(map(_has_inference, outputs))


def _device(first: Any) -> torch.device | None:
    while isinstance(first, list | tuple):
        if not first:
            return None
        first = first[0]
    return cast(torch.device, first.device)


class NbGroup(Plain):
    """Some of the ranks of a link, and their pending operations."""

    def __init__(self, link: "Link", ranks: Ranks, store: Any, timeout: timedelta, *, owner: bool) -> None:
        super().__init__(ranks.rank, ranks.size)
        self._store = store
        self.link = link
        self.ranks = ranks
        self._owner = owner  # of the link
        self._limit_s = timeout.total_seconds()
        self._pairs = collectives.Pairs(link, ranks)
        self._names = Names(ranks.number)
        self._order = threading.Lock()

    def _begin(self, operation: Operation, call: Call) -> BackendWork:
        timeout = getattr(call.opts, "timeout", None)
        limit_s = self._limit_s if timeout is None or timeout <= timedelta(0) else timeout.total_seconds()
        about = About(self.link, call.what, self.ranks.jobs, limit_s)
        operation.driven = call.driven
        operation.inference = operation.inference or _has_inference(call.outputs)
        awaited = not getattr(call.opts, "asyncOp", True)
        operation.run(self._steps(operation, call.rounds, about.names, awaited=awaited))
        if operation.driven and not operation.over(0.0):
            self.link.progress.add(operation)
        return BackendWork(operation, [] if call.outputs is None else call.outputs, about, call.source)

    def _steps(self, operation: Operation, rounds: Rounds, names: list[Named], *, awaited: bool) -> Steps:
        moves = next(rounds, [])
        with self._order:
            taken, busy = self._names.take(moves, operation)
        names.extend((name, move.group) for name, move in zip(taken, moves, strict=True))
        if busy:
            operation.driven = True
            yield busy
        alone = awaited and len(moves) == 1 and not busy
        yield [self.link.submit(move, name, alone) for move, (name, _) in zip(moves, names, strict=True)]
        for count, later in enumerate(rounds, 2):
            fresh = [(f"{names[0][0]}:{count}.{at}", move.group) for at, move in enumerate(later)]
            names[:] = [*names[:1], *fresh]
            yield [self.link.submit(move, name, False) for move, (name, _) in zip(later, fresh, strict=True)]

    @collective
    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> Call:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        op = _op("all_reduce", opts)
        if given[0].layout != torch.strided and given[0].is_cpu:
            outputs = given[:1]
            rounds = collectives.all_reduce_sparse(self.ranks, given[0], op, outputs)
            return Call("all_reduce", rounds, opts, outputs, driven=True)
        return Call("all_reduce", collectives.all_reduce(self.ranks, given, op), opts, given)

    @collective
    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Call:
        rounds = collectives.all_reduce(self.ranks, tensors, _op("all_reduce_coalesced", opts))
        return Call("all_reduce_coalesced", rounds, opts, list(tensors))

    @collective
    def reduce(self, tensors: Any, opts: Any) -> Call:
        rounds = collectives.reduce_to(self.ranks, tensors[0], _op("reduce", opts), opts.rootRank)
        return Call("reduce", rounds, opts, list(tensors))

    @collective
    def broadcast(self, tensors: Any, opts: Any = None) -> Call:
        root = 0 if opts is None else opts.rootRank
        return Call("broadcast", collectives.broadcast(self.ranks, tensors, root), opts, list(tensors))

    @collective
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Call:
        rounds = collectives.all_gather(self.ranks, output_tensors, input_tensors)
        return Call("all_gather", rounds, opts, list(output_tensors))

    @collective
    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Call:
        """output_lists: one list of tensors for each rank, of the length of input_list."""
        by_input = [list(parts) for parts in zip(*output_lists, strict=True)]
        rounds = collectives.all_gather(self.ranks, by_input, input_list)
        return Call("all_gather_coalesced", rounds, opts, list(output_lists))

    @collective
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Call:
        rounds = collectives.all_gather_whole(self.ranks, outputs, inputs)
        return Call("all_gather_into_tensor", rounds, opts, list(outputs))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> BackendWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    @collective
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Call:
        op = _op("reduce_scatter", opts)
        rounds = collectives.reduce_scatter(self.ranks, outputs, inputs, op)
        return Call("reduce_scatter", rounds, opts, list(outputs))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> BackendWork:
        parts = []
        for output, whole in zip(outputs, inputs, strict=True):
            parts_of("reduce_scatter", whole, output, self.ranks.size)
            flat = whole.reshape(-1)
            parts.append(flat.split(output.numel()) if output.numel() else [flat] * self.ranks.size)
        return self.reduce_scatter(outputs, parts, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> BackendWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    @collective
    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, into: Sequence[int], out: Sequence[int], opts: Any = None
    ) -> Call:
        """into, out: rows from and to each rank, on all ranks; or empty on all ranks: equal parts."""
        parts = [collectives.rows(output, into or (), self.size()), collectives.rows(input, out or (), self.size())]
        even = not into and not out
        rounds = collectives.all_to_all_even(self.ranks, *parts) if even else self._pairs.all_to_all(*parts)
        return Call("all_to_all_single", rounds, opts, [output])

    @collective
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Call:
        return Call("all_to_all", self._pairs.all_to_all(outputs, inputs), opts, list(outputs))

    @functools.partial(collective, of=1)  # the outputs are the root's alone
    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Call:
        rounds = self._pairs.gather(outputs[0] if outputs else (), inputs[0], opts.rootRank)
        return Call("gather", rounds, opts, list(outputs))

    @collective
    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Call:
        rounds = self._pairs.scatter(outputs[0], inputs[0] if inputs else (), opts.rootRank)
        return Call("scatter", rounds, opts, list(outputs))

    @collective
    def send(self, tensors: Any, target: int, tag: int = 0) -> Call:
        rounds = self._pairs.message(self._other(tensors, target), self.ranks.rank, target, tag)
        return Call(f"send to rank {self.ranks.jobs[target]} (tag {tag})", rounds, source=self.ranks.rank)

    @collective
    def recv(self, tensors: Any, source: int, tag: int = 0) -> Call:
        rounds = self._pairs.message(self._other(tensors, source), source, self.ranks.rank, tag)
        what = f"receive from rank {self.ranks.jobs[source]} (tag {tag})"
        return Call(what, rounds, None, list(tensors), source=source)

    def _other(self, tensors: Any, rank: int) -> torch.Tensor:
        if rank == self.ranks.rank or not 0 <= rank < self.ranks.size:
            raise ValueError(f"rank {rank} of {self.ranks.size}: a message needs another rank of the group")
        return cast(torch.Tensor, tensors[0])

    def barrier(self, opts: Any = None, *_: Any) -> BackendWork:
        if getattr(opts, "device_ids", None):
            raise NotImplementedError("barrier: only NCCL supports device_ids: omit them")
        return self._begin(Operation(), Call("barrier", collectives.barrier(self.ranks), opts))

    def get_group_store(self) -> Any:
        """Return the store that torch.distributed gave this group."""
        return self._store

    @property
    def timeout(self) -> timedelta:
        """The deadline of operations that begin now."""
        return timedelta(seconds=self._limit_s)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of operations that begin from now on."""
        self._limit_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """End the group. If it owns the link, all groups that share the link end."""
        if self._owner:
            self.link.close()

    def abort(self) -> None:
        """If the group owns the link, fail all pending operations, on all ranks."""
        if self._owner:
            self.link.abort("abort() of the process group was called")


def _op(what: str, opts: Any) -> str:
    """Return the name of the reduction: `opts` is torch's options, or a ReduceOp."""
    if opts is None:
        return "SUM"
    return collectives.op_name(what, getattr(opts, "reduceOp", opts))


EARLIER = {  # names in torch 2.3 to 2.12
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
for _later, _earlier in EARLIER.items():
    setattr(NbGroup, _earlier, getattr(NbGroup, _later))


# Creation of a process group from torch.distributed's store, rank and size.

NONCE_BYTES = 8


@dataclass
class _Process:
    """The links of this process, and the link of its default group."""

    links: list[Link] = field(default_factory=list)
    default: Link | None = None


_process = _Process()


def create(options: Any, backend_options: Any) -> NbGroup:
    """Return a process group: with its own link if it has all ranks, else on the default group's link if that is ours.

    Every rank of the group calls it. Raises as connect.connect; ValueError for options, because none are supported.
    """
    if backend_options is not None:
        raise ValueError(f'the backend "nb" takes no pg_options, not {type(backend_options).__name__}')
    some = list(options.global_ranks_in_group)
    default = _process.default
    if some and default is not None and not default.closed and default.rank == some[options.group_rank]:
        return NbGroup(default, _ranks(default, some, options), options.store, options.timeout, owner=False)
    size = options.group_size
    link = _open(options.store, options.group_rank, size, options.timeout)
    if not some:
        _process.default = link
    ranks = Ranks(0, range(size), options.group_rank, range(size))
    return NbGroup(link, ranks, options.store, options.timeout, owner=True)


def _ranks(link: Link, jobs: list[int], options: Any) -> Ranks:
    """Return the ranks of a subgroup; its first rank assigns the group's number."""
    key = link.number_key(jobs)
    if options.group_rank == 0:
        number = link.fresh_number()
        options.store.set(key, str(number))
    else:
        number = int(options.store.get(key))
    order = sorted(range(len(jobs)), key=lambda rank: jobs[rank])
    return Ranks(number, jobs, options.group_rank, order)


def _open(store: Any, rank: int, size: int, timeout: timedelta) -> Link:
    settings = config.settings()
    limit_s = timeout.total_seconds()
    stall_s = min(settings.stall_s, limit_s / 2) if settings.stall_s else 0.0
    settings = replace(settings, start_timeout_s=min(settings.start_timeout_s, limit_s), stall_s=stall_s)
    if rank == 0:
        with contextlib.suppress(RuntimeError):  # a store that cannot delete keys is new
            store.delete_key("netbottleneck/left")
    meeting = Rendezvous(Store(lambda: store, "torch.distributed's store"))
    place = connect.Place(rank, size, None, None, None, None, "torch.distributed")
    comm = connect.connect_at(settings, place, meeting)
    nonce, *_ = comm.exchange(secrets.token_bytes(NONCE_BYTES), limit_s=settings.start_timeout_s)
    link = Link(comm, store, nonce)
    _process.links = [other for other in _process.links if not other.closed]
    _process.links.append(link)
    return link


def _end() -> None:
    """Close the links if the program has not; torch's own cleanup is too late for threads and tensors."""
    if not all(link.is_here for link in _process.links):
        return
    ours = _process.default is not None and not _process.default.closed
    if ours and dist.is_initialized():
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            dist.destroy_process_group()
    for link in reversed(_process.links):
        link.close()


exits.register(_end)
