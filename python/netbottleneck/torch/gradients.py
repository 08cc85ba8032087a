"""Gradients of a distributed optimizer: readiness hooks, buckets and their memory, and the C hooks that send them.

Only this module joins parameters, plan, arena and `_core.GradHook`. DistributedOptimizer uses it, and so does the
measurement of a user's own loop.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch

from netbottleneck import config
from netbottleneck.runtime import job
from netbottleneck.runtime.async_operations import Members
from netbottleneck.runtime.communicators import scales
from netbottleneck.trace.ring_file import EVENTS
from netbottleneck.whatif import plan

if TYPE_CHECKING:
    from netbottleneck import _core


# Gradient readiness: hooks and stamps.


class OnAccumulated:
    """Calls `call` each time autograd has added to a parameter's gradient, after all post-accumulate hooks.

    It is a hook of the parameter's AccumulateGrad node, as Horovod's and DDP's are. So the user's own hooks (clipping,
    masking) see a gradient before it is sent. call: gets the arguments of a node hook.
    """

    def __init__(self, parameter: torch.Tensor, call: Callable[..., None]) -> None:
        with torch.enable_grad():
            function = cast(Any, parameter.expand_as(parameter).grad_fn)
        self._node = function.next_functions[0][0]  # the parameter holds it only weakly
        self._handle = self._node.register_hook(call)

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()
        self._node = None


class _Hooks(dict[Any, Any]):
    """The hooks of one parameter, smaller than torch's: half of a hook's cost is cache misses.

    It supports weak references: torch's handles of the user's hooks need one.
    """

    __slots__ = ("__weakref__",)


class Stamps:
    """Stamps each ready gradient into a recorder under its parameter's index, by hooks, while it is on."""

    def __init__(self, recorder: "_core.Recorder", parameters: int) -> None:
        self._stampers = [recorder.stamper(EVENTS["GRAD_READY"], index) for index in range(parameters)]
        self._hooks: list[dict[Any, Any]] = []

    @property
    def on(self) -> int:
        """Return on how many parameters the hooks are."""
        return len(self._hooks)

    def start(self, parameters: Sequence[torch.Tensor | None]) -> None:
        """Put a hook on each parameter that is not None. Does nothing while it is on."""
        if self.on:
            return
        for parameter, stamper in zip(cast("Sequence[Any]", parameters), self._stampers, strict=True):
            if parameter is None:
                continue
            if parameter._post_accumulate_grad_hooks is None:
                parameter._post_accumulate_grad_hooks = _Hooks()
            hooks = parameter._post_accumulate_grad_hooks
            hooks[self] = stamper  # torch's keys are numbers
            self._hooks.append(hooks)

    def stop(self) -> None:
        """Remove the hooks."""
        for hooks in self._hooks:
            hooks.pop(self, None)
        self._hooks.clear()


# Buckets, their memory, and the C hooks that send them.

DIRECT_BYTES = 256 << 10
ALIGNMENT = 4096

Destination: TypeAlias = "_core.Comm | Callable[[int], Any] | None"

CODES = {
    torch.uint8: "UINT8",
    torch.int8: "INT8",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float32: "FLOAT32",
    torch.float64: "FLOAT64",
}


def dtype_code(dtype: torch.dtype) -> int:
    """Return the engine's number for a torch dtype; ValueError for a dtype without one."""
    try:
        return int(getattr(job.core(), CODES[dtype]))
    except KeyError:
        raise ValueError(f"Tensor type {dtype} is not supported.") from None


@dataclass(frozen=True)
class Bucket:
    """Gradients that are sent together. parameters: indices into GradientSink.names; empty while unknown.

    offset: place in the memory of our own buckets, whose parameters are in the order of their memory; in bytes.
    nbytes includes the flags of such a bucket.
    """

    name: str
    dtype: torch.dtype
    nbytes: int
    parameters: tuple[int, ...] = ()
    offset: int = 0
    parameter_offsets: tuple[int, ...] = ()


class GradientSink:
    """Takes ready gradients and sends finished buckets to a destination; see `target`.

    Behind it are our own buckets (Gradients, PerParameter), DDP's (ReducerGroup) or the calls of Horovod (Route).
    names, parameters: of the gradients, the same on every rank and in the same order. version: increases when a bucket
    changes or moves. paused: gradients are not sent. detailed: each gradient is stamped in this step, on a GPU too.
    own_streams: on a GPU, streams beside the training's carry the collectives, and it waits for their events. on_first:
    called at the first gradient of each pass that is not paused, by Gradients; a pass begins after wait().
    """

    names: tuple[str, ...]
    parameters: Sequence[torch.Tensor]
    buckets: Sequence[Bucket]
    version = 0
    paused = False
    detailed = False
    own_streams = False
    on_first: Callable[[], Any] | None = None
    _destination: Destination = None
    _factors: tuple[bool, float, int | None] = (True, 1.0, None)
    _passes = 1

    @property
    def passes(self) -> int:
        """Backward passes a step; may change between steps."""
        return self._passes

    @passes.setter
    def passes(self, value: int) -> None:
        self._passes = value
        self._passes_change()

    def _passes_change(self) -> None:
        """Adopt another number of passes."""

    @property
    def tensors(self) -> Sequence[tuple[str, int, torch.dtype]]:
        """Name, bytes and type of each gradient."""
        return [(n, p.numel() * p.element_size(), p.dtype) for n, p in zip(self.names, self.parameters, strict=True)]

    @property
    def pending(self) -> int:
        """Number of operations that were started and not yet waited for."""
        raise NotImplementedError

    @property
    def begun(self) -> bool:
        """True from the first complete gradient of a step until `wait`, whether or not it was sent."""
        return self.pending > 0

    @property
    def factors(self) -> tuple[bool, float, int | None]:
        """Arithmetic given to `target`: (average, predivide, op)."""
        return self._factors

    def target(
        self, destination: Destination, average: bool = True, *, predivide: float = 1.0, op: int | None = None
    ) -> None:
        """Set the destination of complete buckets; between steps.

        destination: a Comm; a callable that gets a bucket's index, starts its transfer (the bytes are `flat(index)`)
        and returns an object with wait(); or None: nothing is moved. A callable is called in the same order on all
        ranks, whatever is ready first; a Comm negotiates the order. average: divide by the number of ranks, by
        predivide before the sum and by the rest after it. A Comm does this by itself; a callable must do it. op: one of
        the core's reductions; None: the sum.
        """
        self._destination = destination
        self._factors = (average, predivide, op)

    def scales(self, ranks: int) -> tuple[float, float]:
        """Return the factors before and after a sum over so many ranks."""
        return scales(self._factors, ranks)

    def flush(self) -> None:
        """Send the gradients that are not sent yet. Nothing where DDP or Horovod sends them."""

    def wait(self) -> None:
        """Wait until all gradients are reduced. Nothing where DDP or Horovod waits."""

    def hold(self) -> None:
        """Send nothing in this pass before `flush`. Nothing where DDP or Horovod sends gradients."""

    def discard(self) -> None:
        """End a pass that has failed, without its sums. Every rank calls it. Nothing where DDP or Horovod waits."""

    def restart(self) -> None:
        """Begin the step again, without the passes so far. Once a gradient is complete, every rank calls it.

        Raises the failure of a transfer, after which the step has begun too.
        """
        try:
            if self.begun:
                self.discard()
        finally:
            if not self.begun:
                self._passes_change()

    def close(self) -> None:
        """Remove the hooks."""
        raise NotImplementedError


def bucket_limits(settings: config.Settings) -> tuple[int, int]:
    """Return the largest size of the first bucket and of the others, in bytes."""
    return (settings.bucket_bytes,) * 2 if settings.bucket_bytes else (plan.FIRST_BYTES, plan.BUCKET_BYTES)


class Gradients(GradientSink):
    """Hooks on parameters that fill buckets and send each complete one to a destination; see `target`.

    parameters: (name, tensor) pairs, the same on every rank and in the same order; those without gradient or without
    elements are left out. by_name: the ranks may hold them in different orders; the order of the names then makes the
    buckets of the first step, before the ranks agree on another. passes: backward passes a step. direct_bytes: a
    gradient of this size or more is sent from the memory that autograd chose; a smaller one is copied to its bucket and
    back. In both cases `grad` stays the tensor that autograd or the user put there. limits: bytes of the first bucket,
    and of the others. agree: a collective that returns rank 0's bytes on all ranks, of equal length, or None on all of
    them. It is called at the end of the first step, so that all ranks re-order their buckets alike, and of later ones
    while it returns None. None: through the Comm; without a destination, buckets keep backward order. among: the ranks
    of a Comm's sums; None: all. Sparse gradients are made dense. drop_sparse: parameters with a sparse gradient in rank
    0's first step are left out from then on, and named in `dropped`. flagged: each bucket ends with a flag for each
    gradient, and a gradient that no rank has stays None; otherwise a missing gradient becomes zeros, as with Horovod.
    limit_s: after which a bucket over a Comm fails, if a rank has not sent its own; 0: none.

    Raises ValueError for a parameter outside host and CUDA memory, for parameters on several devices, and for one with
    a dtype that cannot be reduced, or with gradients of another dtype. If only the backward pass shows another dtype,
    it raises RuntimeError.
    """

    def __init__(  # noqa: PLR0913 - all but the first have a default that fits
        self,
        parameters: Iterable[tuple[str, torch.Tensor]],
        *,
        recorder: "_core.Recorder | None" = None,
        passes: int = 1,
        direct_bytes: int = DIRECT_BYTES,
        limits: tuple[int, int] = (plan.FIRST_BYTES, plan.BUCKET_BYTES),
        agree: Callable[[bytes], bytes | None] | None = None,
        label: str = "gradients",
        among: Members | None = None,
        drop_sparse: bool = False,
        flagged: bool = False,
        limit_s: float = 0.0,
        by_name: bool = False,
    ) -> None:
        chosen = [(name, p) for name, p in parameters if p.requires_grad and p.numel() > 0]
        for name, parameter in chosen:
            check(name, parameter)
            if parameter.device != chosen[0][1].device:
                raise ValueError(
                    f"parameter {name} is on {parameter.device}, {chosen[0][0]} on {chosen[0][1].device}: gradients of "
                    "one optimizer travel from one device"
                )
        self.names = tuple(name for name, _ in chosen)
        self.parameters = tuple(parameter for _, parameter in chosen)
        self.label = label
        self.dropped: tuple[tuple[str, torch.Tensor], ...] = ()
        self._recorder = recorder
        self._passes = passes
        self._paused = False
        self._on_first: Callable[[], Any] | None = None
        self._direct_bytes = direct_bytes
        self._limits = limits
        self._agree = agree
        self._among = among
        self._drop_sparse = drop_sparse
        self._flagged = flagged
        self._limit_s = limit_s
        self._settled = False
        self._handles: list[Any] = []
        places = range(len(self.names))
        self._common = sorted(places, key=self.names.__getitem__) if by_name else list(places)
        self._build(self._plan(self._common[::-1]))

    def _passes_change(self) -> None:
        self.hook.passes = self._passes

    @property
    def paused(self) -> bool:
        """While True, gradients are stamped but not sent."""
        return self._paused

    @paused.setter
    def paused(self, value: bool) -> None:
        self._paused = value
        self.hook.paused = value

    @property
    def on_first(self) -> Callable[[], Any] | None:
        """See GradientSink."""
        return self._on_first

    @on_first.setter
    def on_first(self, call: Callable[[], Any] | None) -> None:
        self._on_first = call
        self.hook.on_first = call

    @property
    def pending(self) -> int:
        """Number of buckets sent and not yet waited for."""
        return int(self.hook.pending)

    @property
    def begun(self) -> bool:
        """See GradientSink."""
        return bool(self.hook.begun)

    def target(
        self, destination: Destination, average: bool = True, *, predivide: float = 1.0, op: int | None = None
    ) -> None:
        """Set the destination of complete buckets; between steps. See GradientSink.target."""
        super().target(destination, average, predivide=predivide, op=op)
        core = job.core()
        if isinstance(destination, core.Comm):
            size, group = (destination.size, 0) if self._among is None else (self._among.size, self._among.number)
            before, after = self.scales(size)
            self.hook.target(destination, before, after, core.SUM if op is None else op, group, self._limit_s)
            if self._settled and isinstance(self._memory, core.Arena):
                destination.map(self._memory)
        else:
            self.hook.target(destination)

    @property
    def settled(self) -> bool:
        """True once the ranks have agreed on the order of the buckets, and on the sparse gradients to drop."""
        return self._settled

    @property
    def recorded(self) -> bool:
        """True if events are stamped."""
        return self._recorder is not None

    def record(self, recorder: "_core.Recorder") -> None:
        """Stamp into this recorder from now on. Between steps only."""
        self._recorder = recorder
        self._build([list(bucket.parameters) for bucket in self.buckets])
        average, predivide, op = self._factors
        self.target(self._destination, average, predivide=predivide, op=op)

    def flat(self, index: int) -> torch.Tensor:
        """Return bucket `index` as one flat tensor over its memory."""
        bucket = self.buckets[index]
        return _flat(self._memory, bucket.offset, bucket.dtype, bucket.nbytes // bucket.dtype.itemsize)

    @property
    def _address(self) -> int:
        memory = self._memory
        return memory.data_ptr() if isinstance(memory, torch.Tensor) else int(memory.address)

    def flush(self) -> None:
        """Send what the hooks have not sent; a missing gradient is sent as zeros."""
        self.hook.flush()

    def wait(self) -> None:
        """Wait until all buckets are back. Also settle the order of the buckets on all ranks, if it is not yet settled.

        Raises the failure of a transfer, and RuntimeError for a gradient that was deleted meanwhile.
        """
        self.hook.wait()
        if not self._settled:
            self._settle()

    def hold(self) -> None:
        """Send nothing more in this pass before `flush`, so that autograd may add to a gradient several times."""
        self.hook.hold()

    def discard(self) -> None:
        """End a pass that has failed: send what is missing and wait for all buckets; copied gradients get no sum.

        Every rank calls it, after any part of the pass. Raises the failure of a transfer.
        """
        self.hook.discard()

    def close(self) -> None:
        """Remove the hooks. Gradients stay where they are."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _plan(self, order: list[int]) -> list[list[int]]:
        sizes = [p.numel() * p.element_size() for p in self.parameters]
        return plan.buckets(sizes, [p.dtype for p in self.parameters], order, *self._limits)

    def _build(self, chosen: list[list[int]]) -> None:
        core = job.core()
        self.close()
        self.buckets, total = _lay_out(chosen, self.parameters, f"{self.label}.{self.version}", self._flagged)
        self._memory = _memory(self.parameters, max(total, ALIGNMENT))
        views = list(self.parameters)
        bucket_of = [0] * len(self.parameters)
        offsets = [0] * len(self.parameters)
        for number, bucket in enumerate(self.buckets):
            for index, offset in zip(bucket.parameters, bucket.parameter_offsets, strict=True):
                views[index] = _view(self._memory, bucket.offset + offset, self.parameters[index])
                bucket_of[index] = number
                offsets[index] = offset
        self.hook = core.GradHook(
            self.parameters,
            views,
            bucket_of,
            offsets,
            [(b.name, dtype_code(b.dtype), self._address + b.offset, b.nbytes, 0) for b in self.buckets],
            recorder=self._recorder,
            direct_bytes=self._direct_bytes,
            passes=self._passes,
            keep=self._memory,
            flags=[_flags(self._memory, bucket) for bucket in self.buckets] if self._flagged else None,
        )
        self.hook.paused = self._paused
        self.hook.on_first = self._on_first
        self._handles = [
            OnAccumulated(parameter, self.hook.hook(index)) for index, parameter in enumerate(self.parameters)
        ]

    def _drop(self, order: list[int], sparse: set[int]) -> list[int]:
        """Leave out sparse parameters; return the order of the others, with their new indices."""
        kept = [index for index in range(len(order)) if index not in sparse]
        self.dropped = tuple((self.names[index], self.parameters[index]) for index in self._common if index in sparse)
        self.names = tuple(self.names[index] for index in kept)
        self.parameters = tuple(self.parameters[index] for index in kept)
        now = {index: place for place, index in enumerate(kept)}
        return [now[index] for index in order if index in now]

    def _observed(self) -> list[int]:
        """Return the parameters in this step's order of readiness, then for each whether its gradient was sparse.

        A parameter is given as its place in the common order.
        """
        sparse = self.hook.sparse() if self._drop_sparse else []
        return [*places_of(self.hook.ready_order(), self._common), *(i in sparse for i in self._common)]

    def _settle(self) -> None:
        """Use rank 0's order of this step on all ranks, and rebuild the buckets if it changes them."""
        agree = self._agree
        comm = self._destination if isinstance(self._destination, job.core().Comm) else None
        if agree is None and comm is not None:
            agree = lambda mine: comm.exchange(mine)[0]  # noqa: E731
        if agree is None:
            return
        answer = agree(np.array(self._observed(), np.int32).tobytes())
        if answer is None:
            return
        self._settled = True
        agreed = np.frombuffer(answer, np.int32).tolist()
        order = [self._common[place] for place in agreed[: len(self._common)]]
        sparse = {index for index, flag in zip(self._common, agreed[len(self._common) :], strict=True) if flag}
        chosen = self._plan(self._drop(order, sparse))
        if self.dropped or chosen != [list(bucket.parameters) for bucket in self.buckets]:
            self.version += 1
            if isinstance(self._memory, torch.Tensor) and self._memory.is_cuda:
                # This step's copies out of it may be under way on a stream that it was not allocated for.
                self._memory.record_stream(torch.cuda.current_stream(self._memory.device))
            self._build(chosen)
        average, predivide, op = self._factors
        self.target(self._destination, average, predivide=predivide, op=op)


def places_of(ready: Iterable[int], common: Sequence[int]) -> list[int]:
    """Return places in the common order: of what became ready, in its order, then of the rest, last ones first."""
    places = {index: place for place, index in enumerate(common)}
    first = [places[index] for index in dict.fromkeys(ready)]
    return [*first, *sorted(set(places.values()) - set(first), reverse=True)]


UNREACHABLE = "gradients travel from host and CUDA memory only"


@cache
def _device_types() -> tuple[str, ...]:
    """Return torch's names of the devices whose memory can be sent."""
    other = config.settings().cuda_library is not None
    return ("cpu", "cuda", *([torch._C._get_privateuse1_backend_name()] if other else []))


def is_reachable(device: torch.device) -> bool:
    """Return True if gradients in this device's memory can be sent: host and CUDA memory."""
    return device.type in _device_types()


def can_travel(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is in host memory and of a type that can be reduced."""
    return tensor.device.type == "cpu" and tensor.dtype in CODES


def check_on_host(name: str, parameter: Any) -> None:
    """Raise ValueError for a parameter that a training is left alone for: of another device, or refused by check()."""
    if parameter.device.type != "cpu":
        raise ValueError(f"parameter {name} is on {parameter.device}: gradients travel from host memory only")
    check(name, parameter)


def check(name: str, parameter: Any) -> None:
    """Raise ValueError for a parameter whose gradient cannot be sent."""
    if not is_reachable(parameter.device):
        raise ValueError(f"parameter {name} is on {parameter.device}: {UNREACHABLE}")
    if parameter.dtype not in CODES:
        raise ValueError(f"parameter {name}: Tensor type {parameter.dtype} is not supported.")
    if own_type(parameter):
        raise ValueError(
            f"parameter {name} is of type {parameter.dtype}, its gradients of another, {parameter.grad_dtype}: average "
            "them by DistributedOptimizer, which sends each as it is"
        )


def own_type(parameter: Any) -> bool:
    """Return True if the gradients of a parameter are known to have another type than the parameter."""
    return getattr(parameter, "grad_dtype", None) not in (None, parameter.dtype)


def _lay_out(
    chosen: list[list[int]], parameters: Sequence[torch.Tensor], label: str, flagged: bool
) -> tuple[tuple[Bucket, ...], int]:
    """Place each bucket in the arena, page-aligned; return the buckets and the bytes of the arena."""
    made = []
    start = 0
    for number, members in enumerate(chosen):
        sizes = [parameters[index].numel() * parameters[index].element_size() for index in members]
        ends = list(accumulate(sizes))
        offsets = tuple(end - size for end, size in zip(ends, sizes, strict=True))
        dtype = parameters[members[0]].dtype
        nbytes = ends[-1] + (len(members) * dtype.itemsize if flagged else 0)
        made.append(Bucket(f"{label}/{number}", dtype, nbytes, tuple(members), start, offsets))
        start += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(made), start


def _memory(parameters: Sequence[torch.Tensor], nbytes: int) -> "_core.Arena | torch.Tensor":
    """Return memory for buckets on the device of the parameters; on the host an arena, which ranks can share."""
    if not parameters or parameters[0].device.type == "cpu":
        arena: _core.Arena = job.core().Arena(nbytes)
        return arena
    return torch.zeros(nbytes, dtype=torch.uint8, device=parameters[0].device)


def _flat(memory: "_core.Arena | torch.Tensor", offset: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return a flat tensor over the memory of buckets."""
    if isinstance(memory, torch.Tensor):
        return memory[offset : offset + count * dtype.itemsize].view(dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)


def _flags(memory: "_core.Arena | torch.Tensor", bucket: Bucket) -> torch.Tensor:
    """Return the flags at the end of a bucket."""
    count = len(bucket.parameters)
    offset = bucket.offset + bucket.nbytes - count * bucket.dtype.itemsize
    return _flat(memory, offset, bucket.dtype, count)


def _view(memory: "_core.Arena | torch.Tensor", offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the memory of buckets, shaped and strided as the parameter."""
    view = _flat(memory, offset, parameter.dtype, parameter.numel())
    shape = torch.empty_like(parameter, device="meta")  # strides as autograd would choose them
    return view.as_strided_(shape.shape, shape.stride())
