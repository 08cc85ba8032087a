"""Slow path of gradients: Python hooks send them one by one, for uses that C hooks do not cover."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from netbottleneck.runtime import job
from netbottleneck.runtime.collectives import shape_key
from netbottleneck.torch.compression import Compression, Compressor
from netbottleneck.torch.gradients import (
    Bucket,
    Destination,
    Gradients,
    GradientSink,
    OnAccumulated,
    check,
    dtype_code,
    is_reachable,
    places_of,
)
from netbottleneck.torch.handles import memory_of, synchronize
from netbottleneck.trace.ring_file import EVENTS

if TYPE_CHECKING:
    from netbottleneck import _core


NOTICE_S = 5.0
TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before step(): "
    "increase backward_passes_per_step to add up gradients of several passes"
)
NONE = torch.empty(0)

logger = logging.getLogger("netbottleneck")


class Ways(NamedTuple):
    """Operations that send a gradient of a given name over the job's own communicator; each starts the transfer.

    dense: reduces in place; returns the handle. sparse: returns a function that waits for the sum. label: name of a
    dense gradient's operation. factors: of the reduction, as Gradients.factors. by_name, agree: as of Gradients; they
    order the gradients of a callable destination.
    """

    dense: Callable[[torch.Tensor, str], int]
    sparse: Callable[[torch.Tensor, str], Callable[[], torch.Tensor]]
    label: Callable[[str], str]
    factors: tuple[bool, float, int | None]
    by_name: bool
    agree: Callable[[bytes], bytes | None] | None


class Turns:
    """Starts the transfers of a pass in one order, the same on all ranks, whatever is ready first."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order = order
        self._ready: dict[int, Callable[[], Any]] = {}
        self._works: dict[int, Any] = {}
        self._next = 0
        self._starting = False

    def put(self, index: int, start: Callable[[], Any]) -> None:
        """Start a transfer, after those before it."""
        self._ready[index] = start
        self._start()

    def take(self, index: int) -> Any:
        """Return what `start` returned. All transfers of the pass have been put."""
        self._start()  # again, if it has failed
        return self._works.pop(index)

    def _start(self) -> None:
        if self._starting:  # another thread, which continues with this one
            return
        self._starting = True
        try:
            while self._next < len(self.order) and self.order[self._next] in self._ready:
                index = self.order[self._next]
                self._works[index] = self._ready[index]()
                del self._ready[index]
                self._next += 1
        finally:
            self._starting = False


class PerParameter(GradientSink):
    """Each gradient in its own bucket, whose bytes are those of the gradient that was sent last.

    For compression classes, whose compress and decompress are the user's, and for sparse gradients, which stay sparse.
    sparse: whether sparse gradients are sent dense, and whether all gradients are known to be sparse. In the latter
    case a missing gradient is sparse without values, otherwise zeros. Gradients use the job's own communicator until
    `target` names another destination; sparse ones always use it.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]],
        compression: type[Compressor],
        ways: Ways,
        passes: int,
        sparse: tuple[bool, bool],
    ) -> None:
        chosen = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        for name, parameter in chosen:
            if not is_reachable(parameter.device):  # the sent tensor may have another type
                check(name, parameter)
        self.names = tuple(name for name, _ in chosen)
        self.parameters = tuple(parameter for _, parameter in chosen)
        self.buckets: list[Bucket] = [
            Bucket(ways.label(name), p.dtype, p.numel() * p.element_size(), (index,))
            for index, (name, p) in enumerate(chosen)
        ]
        self._factors = ways.factors
        self._index = {parameter: index for index, parameter in enumerate(self.parameters)}
        self._compression = compression
        self._ways = ways
        self._passes = passes
        self._sparse_as_dense, all_sparse = sparse
        self._sparse_dims = dict.fromkeys(self.parameters, 1) if all_sparse else {}  # of the sparse gradients
        self._left = dict.fromkeys(self.parameters, passes)
        self._sent: dict[torch.Tensor, tuple[Callable[[], torch.Tensor], Any]] = {}
        self._sparse: dict[torch.Tensor, Callable[[], torch.Tensor]] = {}
        self._own = True  # gradients use the job's own communicator
        self._recorder: _core.Recorder | None = None
        self._stamps: list[Callable[[], None]] = []
        self._staged: dict[int, torch.Tensor] = {}
        places = range(len(self.names))
        self._common = sorted(places, key=self.names.__getitem__) if ways.by_name else list(places)
        self._agree = ways.agree
        self._complete: dict[int, None] = {}  # gradients of this pass in the order in which they were complete
        self._turns = Turns(self._common[::-1])
        self._hooks = [OnAccumulated(parameter, partial(self._ready, parameter)) for parameter in self.parameters]

    def _passes_change(self) -> None:
        self._left = dict.fromkeys(self.parameters, self._passes)

    @property
    def pending(self) -> int:
        """Number of gradients sent and not yet waited for."""
        return len(self._sent) + len(self._sparse)

    def record(self, recorder: "_core.Recorder") -> None:
        """Stamp into this recorder from now on."""
        self._recorder = recorder
        self._stamps = [recorder.stamper(EVENTS["GRAD_READY"], index) for index in range(len(self.parameters))]

    def target(
        self, destination: Destination, average: bool = True, *, predivide: float = 1.0, op: int | None = None
    ) -> None:
        """Set the destination of gradients instead of the job's own communicator. See GradientSink.target."""
        super().target(destination, average, predivide=predivide, op=op)
        self._own = False

    def flat(self, index: int) -> torch.Tensor:
        """Return the sent form of gradient `index`, flat; empty before the first one."""
        return self._staged.get(index, NONE)

    def _ready(self, parameter: torch.Tensor, *_: Any) -> None:
        if self._stamps:
            self._stamps[self._index[parameter]]()
        if self.paused:
            return
        if self._left[parameter] <= 0:
            raise AssertionError(TOO_MANY)
        self._left[parameter] -= 1
        if self._left[parameter] == 0:
            self._complete[self._index[parameter]] = None
            self._send(parameter)

    def _send(self, parameter: torch.Tensor) -> None:
        index = self._index[parameter]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            if parameter in self._sparse_dims:
                parameter.grad = parameter.grad.to_sparse(self._sparse_dims[parameter])
        gradient = parameter.grad
        if gradient.is_sparse:
            if parameter not in self._sparse_dims and not self._sparse_as_dense and self._recorder is not None:
                leave_sparse(self.names[index])
            self._sparse_dims[parameter] = gradient.sparse_dim()
            if not self._sparse_as_dense:
                self._turns.put(index, _nothing)
                self._sparse[parameter] = self._ways.sparse(gradient, self.names[index])
                return
            gradient = gradient.to_dense()
        travelling, context = self._compression.compress(gradient)
        self._sent[parameter] = (self._start(index, travelling.contiguous()), context)

    def _start(self, index: int, travelling: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start a reduction; return a function that waits for the result."""
        if self._own:
            return partial(synchronize, self._ways.dense(travelling, self.names[index]))
        self._describe(index, travelling)
        destination = self._destination
        if destination is None or travelling.numel() == 0:
            self._turns.put(index, _nothing)
            return lambda: travelling
        if isinstance(destination, job.core().Comm):
            return partial(_finish, self._submit(destination, index, travelling), travelling)
        staged = self._staged[index].copy_(travelling.detach().view(-1)).view(travelling.shape)
        turns, start = self._turns, cast(Callable[[int], Any], destination)
        turns.put(index, partial(start, index))
        return lambda: _finish(turns.take(index), staged)

    def _submit(self, comm: "_core.Comm", index: int, travelling: torch.Tensor) -> "_core.Work":
        core, bucket, op = job.core(), self.buckets[index], self.factors[2]
        before, after = self.scales(comm.size)
        return comm.submit(
            bucket.name,
            core.ALLREDUCE,
            memory_of(travelling),
            dtype_code(bucket.dtype),
            op=core.SUM if op is None else op,
            prescale=before,
            postscale=after,
            bucket=index + 1,
            shape=shape_key((tuple(travelling.shape),)),
            keep=travelling.detach(),  # keeps the memory even if the user replaces the tensor's
        )

    def _describe(self, index: int, travelling: torch.Tensor) -> None:
        """Describe the sent tensor in the bucket, and place it where a callable destination finds it."""
        bucket, nbytes = self.buckets[index], travelling.numel() * travelling.element_size()
        if (bucket.dtype, bucket.nbytes) != (travelling.dtype, nbytes):
            self.buckets[index] = replace(bucket, dtype=travelling.dtype, nbytes=nbytes)
            self.version += 1
        staged = self._staged.get(index)
        if callable(self._destination) and (
            staged is None or (staged.dtype, staged.nbytes) != (travelling.dtype, nbytes)
        ):
            self._staged[index] = torch.empty(travelling.numel(), dtype=travelling.dtype)
            self.version += 1

    def flush(self) -> None:
        """Send every gradient not yet sent; a missing one as zeros."""
        for parameter in self.parameters:
            if parameter not in self._sent and parameter not in self._sparse:
                self._send(parameter)

    def wait(self) -> None:
        """Wait until all gradients are back, and write the results.

        Raises the failure of a transfer, and RuntimeError for a gradient that was deleted meanwhile.
        """
        sparse = set(self._sparse)
        results = self._received()
        self._settle()
        deleted = [self.names[self._index[parameter]] for parameter in results if parameter.grad is None]
        for parameter, (result, context) in results.items():
            if parameter.grad is not None:
                self._put(parameter, result if parameter in sparse else self._compression.decompress(result, context))
        if deleted:
            raise RuntimeError(
                f"gradients were deleted while they were on their way: {', '.join(deleted)}: delete gradients after "
                "synchronize() or step()"
            )

    def discard(self) -> None:
        """End a pass without its sums: send what is missing, and wait. Every rank calls it.

        Raises the failure of a transfer.
        """
        self.flush()
        self._received()

    def _received(self) -> dict[torch.Tensor, tuple[torch.Tensor, Any]]:
        """Wait until all gradients are back; return each sum, and the context of its compression."""
        sent, self._sent = self._sent, {}
        sparse, self._sparse = self._sparse, {}
        self._turns = Turns(self._turns.order)
        self._left = dict.fromkeys(self.parameters, self._passes)
        self._stamp("WAIT_BEGIN")
        try:
            results = {parameter: (wait(), context) for parameter, (wait, context) in sent.items()}
            # A sparse sum has several rounds, and each begins only in a wait: all ranks wait in one order.
            in_order = sorted(sparse, key=lambda parameter: self.names[self._index[parameter]])
            return results | {parameter: (sparse[parameter](), None) for parameter in in_order}
        finally:
            self._stamp("WAIT_END")

    def _settle(self) -> None:
        """In a measured run, use rank 0's order of this pass from now on."""
        complete, self._complete = self._complete, {}
        if self._recorder is None or self._agree is None:
            return
        answer = self._agree(np.array(places_of(complete, self._common), np.int32).tobytes())
        if answer is not None:
            self._turns = Turns([self._common[place] for place in np.frombuffer(answer, np.int32).tolist()])
            self._agree = None

    def _put(self, parameter: torch.Tensor, result: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            _put_sparse(gradient, result)
        elif gradient is not result:
            gradient.copy_(result)

    def _stamp(self, kind: str) -> None:
        if self._recorder is not None:
            self._recorder.put(EVENTS[kind])

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def _nothing() -> None:
    """Start nothing."""


def _finish(work: Any, result: torch.Tensor) -> torch.Tensor:
    """Wait for a transfer that a destination started."""
    if isinstance(work, job.core().Work):
        while not work.wait(NOTICE_S):
            job.current().log_notices()
    else:
        work.wait()
    return result


def _put_sparse(gradient: torch.Tensor, result: torch.Tensor) -> None:
    """Write the sum to a sparse gradient, as Horovod does: a dense one becomes sparse in all its dimensions."""
    gradient.zero_().add_(result if result.is_sparse else result.to_sparse())


def leave_sparse(names: str) -> None:
    """Log the gradients that a measured run leaves out."""
    logger.warning(
        "gradients of %s are sparse: they travel as indices and values over the job's own communicator under every "
        "transport, and count as calls of the script; with sparse_as_dense=True they take part",
        names,
    )


class SparseApart:
    """Gradients in buckets; those found to be sparse in the first step are sent one by one."""

    def __init__(self, gradients: Gradients, ways: Ways) -> None:
        self.gradients = gradients
        self._ways = ways
        self._sparse: PerParameter | None = None

    @property
    def passes(self) -> int:
        """Backward passes a step."""
        return self.gradients.passes

    @passes.setter
    def passes(self, value: int) -> None:
        self.gradients.passes = value
        if self._sparse is not None:
            self._sparse.passes = value

    @property
    def begun(self) -> bool:
        """True from the first complete gradient of a step until `wait`."""
        return self.gradients.begun or (self._sparse is not None and self._sparse.begun)

    def flush(self) -> None:
        """Send what has not been sent."""
        self.gradients.flush()
        if self._sparse is not None:
            self._sparse.flush()

    def wait(self) -> None:
        """Wait until all gradients are back. In the first step, also separate the sparse ones."""
        if self._sparse is not None:
            self.gradients.wait()
            self._sparse.wait()
            return
        parameters = () if self.gradients.settled else self.gradients.parameters
        found = [(p, p.grad) for p in parameters if p.grad is not None and p.grad.is_sparse]
        own = {
            p: torch.sparse_coo_tensor(g._indices(), g._values(), g.size(), check_invariants=False) for p, g in found
        }
        self.gradients.wait()
        if self.gradients.dropped:
            self._part(own)

    def restart(self) -> None:
        """Begin the step again, as GradientSink.restart."""
        try:
            self.gradients.restart()
        finally:
            if self._sparse is not None:
                self._sparse.restart()

    def _part(self, own: dict[torch.Tensor, torch.Tensor]) -> None:
        """Send sparse gradients one by one from now on, and resend those of this step (own)."""
        if self.gradients.recorded:
            leave_sparse(", ".join(name for name, _ in self.gradients.dropped))
        waits = []
        for name, parameter in self.gradients.dropped:
            if parameter not in own:  # the gradient is sparse on another rank only
                own[parameter] = torch.zeros_like(parameter).to_sparse(1)
            waits.append((parameter, self._ways.sparse(own[parameter], name)))
        for parameter, wait in waits:
            gradient = parameter.grad
            if gradient is None or not gradient.is_sparse:
                parameter.grad = gradient = own[parameter]
            _put_sparse(gradient, wait())
        self._sparse = PerParameter(self.gradients.dropped, Compression.none, self._ways, self.passes, (False, True))

    def close(self) -> None:
        """Remove the hooks."""
        self.gradients.close()
        if self._sparse is not None:
            self._sparse.close()


class PassGuard:
    """Refuses an extra backward pass before a step.

    It listens to the parameter whose gradient comes first: one Python call a pass.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], limit: int) -> None:
        self.limit = limit
        self._count = 0
        self._first: torch.Tensor | None = None
        self._hooks = {p: OnAccumulated(p, partial(self._ready, p)) for p in parameters}

    def _ready(self, parameter: torch.Tensor, *_: Any) -> None:
        if self._first is None:
            self._first = parameter
            for other, hook in self._hooks.items():
                if other is not parameter:
                    hook.remove()
        if parameter is not self._first:
            return
        if self._count >= self.limit:
            raise AssertionError(TOO_MANY)
        self._count += 1

    def reset(self) -> None:
        """A step begins."""
        self._count = 0

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()
