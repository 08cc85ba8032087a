"""Gradients on their way: buckets, their memory, and the C hooks that send them.

The one place that joins parameters, plan, arena and `_core.GradHook`. DistributedOptimizer uses it, and so does
whatever measures a loop of the user's own.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from netbottleneck.runtime import job
from netbottleneck.runtime.members import Members
from netbottleneck.torch.ready import OnAccumulated
from netbottleneck.whatif import plan

if TYPE_CHECKING:
    from netbottleneck import _core

DIRECT_BYTES = 256 << 10
ALIGNMENT = 4096

Sink: TypeAlias = "_core.Comm | Callable[[int], Any] | None"

_CODES = {
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
    """Return the engine's number for a torch dtype; ValueError for one that no operation takes."""
    try:
        return int(getattr(job.core(), _CODES[dtype]))
    except KeyError:
        raise ValueError(f"Tensor type {dtype} is not supported.") from None


@dataclass(frozen=True)
class Bucket:
    """One bucket: `parameters` are indices into Gradients.names, in the order of their memory; offsets in bytes."""

    name: str
    dtype: torch.dtype
    offset: int
    nbytes: int
    parameters: tuple[int, ...]
    parameter_offsets: tuple[int, ...]


class Gradients:
    """Hooks on parameters that fill buckets and send each complete one to a sink; see `target`.

    parameters: (name, tensor) pairs, the same on every rank and in the same order; those that need no gradient or
    have no element are left out. passes: backward passes a step. direct_bytes: a gradient from this size on travels
    from where autograd put it; a smaller one is copied to its bucket and back. Either way `grad` stays the tensor that
    autograd or the user put there. limits: bytes of the first bucket, and of the others.
    agree: turns this rank's bytes into rank 0's, a collective call of equal lengths, once, at the end of the first
    step, so that all ranks re-order their buckets alike; None: through the Comm; where the sink is none, buckets keep
    backward order. among: the ranks that a Comm's sums are of; None: all. Sparse gradients are made dense;
    drop_sparse: parameters that had one in rank 0's first step are left out from then on, and named in `dropped`.

    Raises ValueError for a parameter that is not in host memory, of a dtype that cannot be reduced, or whose gradients
    are of another dtype. A gradient that turns out to be raises RuntimeError in the backward pass.
    """

    def __init__(  # noqa: PLR0913 - all but the first have a default that fits
        self,
        parameters: Iterable[tuple[str, torch.Tensor]],
        *,
        recorder: "_core.Recorder | None" = None,
        passes: int = 1,
        direct_bytes: int = DIRECT_BYTES,
        limits: tuple[int, int] = (plan.FIRST_BYTES, plan.BUCKET_BYTES),
        agree: Callable[[bytes], bytes] | None = None,
        label: str = "gradients",
        among: Members | None = None,
        drop_sparse: bool = False,
    ) -> None:
        chosen = [(name, p) for name, p in parameters if p.requires_grad and p.numel() > 0]
        for name, parameter in chosen:
            check(name, parameter)
        self.names = tuple(name for name, _ in chosen)
        self.parameters = tuple(parameter for _, parameter in chosen)
        self.label = label
        self.version = 0
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
        self._sink: Sink = None
        self._factors: tuple[bool, float, int | None] = (True, 1.0, None)
        self._settled = False
        self._handles: list[Any] = []
        self._build(self._plan(None))

    @property
    def passes(self) -> int:
        """Backward passes a step; may be set between steps."""
        return self._passes

    @passes.setter
    def passes(self, value: int) -> None:
        self._passes = value
        self.hook.passes = value

    @property
    def paused(self) -> bool:
        """While true, gradients are stamped and otherwise left alone."""
        return self._paused

    @paused.setter
    def paused(self, value: bool) -> None:
        self._paused = value
        self.hook.paused = value

    @property
    def on_first(self) -> Callable[[], Any] | None:
        """Called at the first gradient of each pass that is not paused; a pass begins after wait()."""
        return self._on_first

    @on_first.setter
    def on_first(self, call: Callable[[], Any] | None) -> None:
        self._on_first = call
        self.hook.on_first = call

    @property
    def tensors(self) -> list[tuple[str, int, torch.dtype]]:
        """Name, bytes and type of each gradient."""
        return [(n, p.numel() * p.element_size(), p.dtype) for n, p in zip(self.names, self.parameters, strict=True)]

    @property
    def pending(self) -> int:
        """Buckets that were sent and not waited for."""
        return int(self.hook.pending)

    def target(self, sink: Sink, average: bool = True, *, predivide: float = 1.0, op: int | None = None) -> None:
        """Say where complete buckets go, between steps.

        sink: a Comm; a callable that gets a bucket's index, starts its transfer (the bytes are `flat(index)`) and
        returns an object with wait(); None: nowhere, nothing is moved. average divides by the number of ranks, by
        predivide before the sum and by the rest after it. Only a Comm does this by itself; a callable has to. op: one
        of the core's reductions, the sum where None.
        """
        core = job.core()
        self._sink = sink
        self._factors = (average, predivide, op)
        if isinstance(sink, core.Comm):
            size, group = (sink.size, 0) if self._among is None else (self._among.size, self._among.number)
            after = predivide / (size if average else 1)
            self.hook.target(sink, 1.0 / predivide, after, core.SUM if op is None else op, group)
            if self._settled:
                sink.map(self.arena)
        else:
            self.hook.target(sink)

    @property
    def factors(self) -> tuple[bool, float, int | None]:
        """What `target` was told of the arithmetic: (average, predivide, op)."""
        return self._factors

    @property
    def recorded(self) -> bool:
        """True where what happens is stamped."""
        return self._recorder is not None

    def record(self, recorder: "_core.Recorder") -> None:
        """Stamp into this recorder from now on. Between steps only."""
        self._recorder = recorder
        self._build([list(bucket.parameters) for bucket in self.buckets])
        average, predivide, op = self._factors
        self.target(self._sink, average, predivide=predivide, op=op)

    def flat(self, index: int) -> torch.Tensor:
        """Return bucket `index` as one flat tensor over its memory."""
        bucket = self.buckets[index]
        count = bucket.nbytes // bucket.dtype.itemsize
        return torch.frombuffer(self.arena, dtype=bucket.dtype, count=count, offset=bucket.offset)

    def flush(self) -> None:
        """Send what no hook has sent; a gradient that is missing becomes zeros."""
        self.hook.flush()

    def wait(self) -> None:
        """Wait until all buckets are back. After the first step also settle the order of the buckets, on all ranks.

        Raises what the transfers failed with, and RuntimeError for a gradient that was deleted meanwhile.
        """
        self.hook.wait()
        if not self._settled:
            self._settle()

    def close(self) -> None:
        """Remove the hooks. Gradients stay where they are."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _plan(self, order: list[int] | None) -> list[list[int]]:
        sizes = [p.numel() * p.element_size() for p in self.parameters]
        return plan.buckets(sizes, [p.dtype for p in self.parameters], order, *self._limits)

    def _build(self, chosen: list[list[int]]) -> None:
        core = job.core()
        self.close()
        self.buckets, total = _lay_out(chosen, self.parameters, f"{self.label}.{self.version}")
        self.arena = core.Arena(max(total, ALIGNMENT))
        views = list(self.parameters)
        bucket_of = [0] * len(self.parameters)
        offsets = [0] * len(self.parameters)
        for number, bucket in enumerate(self.buckets):
            for index, offset in zip(bucket.parameters, bucket.parameter_offsets, strict=True):
                views[index] = _view(self.arena, bucket.offset + offset, self.parameters[index])
                bucket_of[index] = number
                offsets[index] = offset
        self.hook = core.GradHook(
            self.parameters,
            views,
            bucket_of,
            offsets,
            [(b.name, dtype_code(b.dtype), self.arena.address + b.offset, b.nbytes, 0) for b in self.buckets],
            recorder=self._recorder,
            direct_bytes=self._direct_bytes,
            passes=self._passes,
            keep=self.arena,
        )
        self.hook.paused = self._paused
        self.hook.on_first = self._on_first
        self._handles = [
            OnAccumulated(parameter, self.hook.hook(index)) for index, parameter in enumerate(self.parameters)
        ]

    def _drop(self, order: list[int], sparse: list[int]) -> list[int]:
        """Leave out the parameters that are marked as sparse; return the order of the others, as they count now."""
        kept = [index for index in range(len(order)) if not sparse[index]]
        self.dropped = tuple((self.names[i], self.parameters[i]) for i in range(len(order)) if sparse[i])
        self.names = tuple(self.names[index] for index in kept)
        self.parameters = tuple(self.parameters[index] for index in kept)
        now = {index: place for place, index in enumerate(kept)}
        return [now[index] for index in order if index in now]

    def _settle(self) -> None:
        """Take rank 0's order of the first step, on all ranks, and build anew where it changes a bucket."""
        agree = self._agree
        comm = self._sink if isinstance(self._sink, job.core().Comm) else None
        if agree is None and comm is not None:
            agree = lambda mine: comm.exchange(mine)[0]  # noqa: E731
        if agree is None:
            return
        self._settled = True
        count = len(self.parameters)
        seen = list(dict.fromkeys(self.hook.ready_order()))
        seen += sorted(set(range(count)) - set(seen), reverse=True)
        sparse = self.hook.sparse() if self._drop_sparse else []
        mine = torch.tensor([*seen, *(index in sparse for index in range(count))], dtype=torch.int32)
        agreed = torch.frombuffer(bytearray(agree(mine.numpy().tobytes())), dtype=torch.int32).tolist()
        chosen = self._plan(self._drop(agreed[:count], agreed[count:]))
        if self.dropped or chosen != [list(bucket.parameters) for bucket in self.buckets]:
            self.version += 1
            self._build(chosen)
        average, predivide, op = self._factors
        self.target(self._sink, average, predivide=predivide, op=op)


def can_travel(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in host memory and of a type that can be reduced."""
    return tensor.device.type == "cpu" and tensor.dtype in _CODES


def check(name: str, parameter: Any) -> None:
    """Raise ValueError for a parameter whose gradient cannot travel."""
    if parameter.device.type != "cpu":
        raise ValueError(f"parameter {name} is on {parameter.device}: gradients travel from host memory only")
    if parameter.dtype not in _CODES:
        raise ValueError(f"parameter {name}: Tensor type {parameter.dtype} is not supported.")
    if own_type(parameter):
        raise ValueError(
            f"parameter {name} is of type {parameter.dtype}, its gradients of another, {parameter.grad_dtype}: average "
            "them by DistributedOptimizer, which sends each as it is"
        )


def own_type(parameter: Any) -> bool:
    """Return whether the gradients of a parameter are known to be of another type than itself."""
    return getattr(parameter, "grad_dtype", None) not in (None, parameter.dtype)


def _lay_out(
    chosen: list[list[int]], parameters: tuple[torch.Tensor, ...], label: str
) -> tuple[tuple[Bucket, ...], int]:
    """Give each bucket its place in the arena, page by page; returns the buckets and the bytes of the arena."""
    made = []
    start = 0
    for number, members in enumerate(chosen):
        sizes = [parameters[index].numel() * parameters[index].element_size() for index in members]
        ends = list(accumulate(sizes))
        offsets = tuple(end - size for end, size in zip(ends, sizes, strict=True))
        made.append(Bucket(f"{label}/{number}", parameters[members[0]].dtype, start, ends[-1], tuple(members), offsets))
        start += -(-ends[-1] // ALIGNMENT) * ALIGNMENT
    return tuple(made), start


def _view(arena: "_core.Arena", offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the arena, shaped and strided as the parameter."""
    view = torch.frombuffer(arena, dtype=parameter.dtype, count=parameter.numel(), offset=offset)
    shape = torch.empty_like(parameter, device="meta")  # strides as autograd would choose them
    return view.as_strided_(shape.shape, shape.stride())
