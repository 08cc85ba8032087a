"""ReducerGroup: the process group that a DDP model's reducer calls while a run is measured.

DDP keeps its reducer, its buckets, its division, `no_sync` and `join`. `enter` replaces the model's own group in the
reducer with this one; `leave` restores it. Dense gradient all-reduces are timed and travel over the own group or over
our communicator. Every other call goes to the own group.

DDP's reducer itself notes when each gradient is ready, so no hook of ours is on a parameter while DDP synchronises.
On a GPU these notes are times of the host, which runs ahead. So there the stamps are marks on the current stream (see
_core.Recorder.follow): one for each bucket, and one for each gradient in sampled steps.
"""

import errno
import importlib
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from netbottleneck.config import Settings
from netbottleneck.errors import FAILURES, MismatchError
from netbottleneck.hooks.calls import eager
from netbottleneck.runtime import job, nccl
from netbottleneck.runtime.communicators import key_of, quietly
from netbottleneck.torch.gradients import CODES, Bucket, Destination, GradientSink, Stamps, dtype_code, is_reachable
from netbottleneck.trace.ring_file import EVENTS

if TYPE_CHECKING:
    from netbottleneck import _core

Future = torch.futures.Future[Any]

# A complex number is added as a pair of real numbers.
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}

TRIES = 3  # DDP reports a new layout one forward pass late

_engine: Any = torch.autograd.Variable._execution_engine
_c: Any = torch._C
_c10d: Any = importlib.import_module("torch._C._distributed_c10d")
_ProcessGroup: Any = dist.ProcessGroup

logger = logging.getLogger("netbottleneck")


class Pass(NamedTuple):
    """Times of a backward pass, ns of the recorder's clock: begin (0: unknown), first bucket sent, wait for all."""

    begin_ns: int
    sent_ns: int
    wait_begin_ns: int
    wait_end_ns: int


class _Sent(NamedTuple):
    """A bucket in flight over our communicator. DDP waits for `future`. tensors []: a refusal, see _refused."""

    work: Any
    future: Future
    tensors: list[torch.Tensor]
    opts: Any


class _Place:
    """A bucket's tensor, and its operation in the record."""

    __slots__ = ("dtype", "elements", "index", "memory", "name", "operation", "pointer", "strided", "takes", "tensor")

    def __init__(self, index: int, name: str, tensor: torch.Tensor, operation: Any) -> None:
        self.index, self.name, self.operation = index, name, operation
        self.elements, self.dtype = tensor.numel(), tensor.dtype
        self.holds(tensor)

    def holds(self, tensor: torch.Tensor) -> None:
        """Note the bucket's tensor. takes: our communicator can reduce it."""
        self.tensor = weakref.ref(tensor)  # torch gives the same object again while the reducer has its tensor
        self.strided = tensor.layout is torch.strided
        self.pointer = tensor.data_ptr() if self.strided else 0
        on_host = tensor.device.type == "cpu"
        self.memory = (self.pointer, self.elements * tensor.element_size()) if on_host else None
        self.takes = (
            self.strided
            and (on_host or is_reachable(tensor.device))
            and _REAL.get(tensor.dtype, tensor.dtype) in CODES
            and self.elements > 0
            and tensor.is_contiguous()
        )


class OwnStream:
    """A stream of our own on a device. address: the driver's stream."""

    def __init__(self, device: torch.device, address: int) -> None:
        self._module = getattr(torch, device.type)
        self._stream = self._module.ExternalStream(address, device=device)

    def current(self) -> Any:
        """Return a context in which it is the device's current stream."""
        return self._module.stream(self._stream)

    def may_wait(self) -> bool:
        """Return False while the current stream is captured into a graph, of which a wait would become a part."""
        return not self._module.is_current_stream_capturing()


class _Unsent:
    """A bucket whose submission failed. `wait` raises the error."""

    def __init__(self, error: OSError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


class OwnGroup:
    """The arms "stock" and "bare" of a DDP model: gradients travel over the model's own process group.

    device: of the gradients, for arms over NCCL beside it; None: there are none.
    """

    name = "stock"

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        self._group, self._device = None if device is None else group, device
        self._backend = str(dist.get_backend(group))

    def over_nccl(self, transport: str, settings: Settings) -> Callable[[], nccl.OverNccl]:
        """Prepare the arm of a transport over NCCL that differs from this one in its network: see open_arm."""
        return nccl.open_arm(transport, settings, self._group, self._device)

    def target(self, gradients: Any) -> None:
        """Route the reducer's buckets over the model's own group from now on."""
        gradients.to_own_group()

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def info(self) -> dict[str, Any]:
        """Return the record's entry for this transport."""
        return {"provider": self._backend}

    def wire(self) -> int | None:
        """Return None: torch.distributed does not report how many bytes it sent."""
        return None

    def close(self) -> None:
        """Drop the reference to the group, which the user owns."""
        self._group = None


class ReducerGroup(_ProcessGroup, GradientSink):  # type: ignore[misc]
    """Intercepts the calls of one DDP model's reducer to its process group. See the module's docstring.

    on_error: called with an exception of the measurement itself; the bucket still travels. limit_s: after which a
    bucket over our communicator fails that a rank has not submitted; 0: never. Holds weak references to the model and
    its parameters.
    """

    getSize = _ProcessGroup.size
    records_itself = True  # see hooks.collectives

    def __init__(
        self,
        ddp: DistributedDataParallel,
        recorder: "_core.Recorder",
        on_error: Callable[[Exception], None],
        limit_s: float,
    ) -> None:
        group = ddp.process_group
        super().__init__(group.rank(), group.size())
        named = reduced_parameters(ddp)
        self.names = tuple(name for name, _ in named)
        self._tensors = [(name, p.numel() * p.element_size(), p.dtype) for name, p in named]
        self.buckets: list[Bucket] = []
        self._factors = (False, 1.0, None)  # DDP divides
        self.count = 0  # backward passes that sent a bucket
        self.last_pass: Pass | None = None  # the last complete one
        self.hooked = False  # the user's communication hook sends the buckets
        self.unseen = False  # the reducer sends its buckets past this group
        self._ddp = weakref.ref(ddp)
        self._group: Any = group
        self._recorder: _core.Recorder | None = recorder
        self.on_error = on_error
        self._parameters = [weakref.ref(p) for _, p in named]
        self._limit_s = limit_s
        device, address = named[0][1].device if named else torch.device("cpu"), recorder.device_stream
        self._devices: Any = None if device.type == "cpu" else [device]  # that DDP's futures have events of
        self._stream = None if address is None else OwnStream(device, address)
        self._elements = sum(p.numel() for _, p in named)
        self._own = True
        self._over: Any = None  # the group of an arm over NCCL, in place of the own group
        self._inside = False
        self._stamps = Stamps(recorder, len(named))
        self._forward_ns = 0  # begin of the last forward pass that DDP prepared for
        self._wait_ns = 0  # begin of the last wait for buckets
        self._under_way: list[_Sent] = []
        self._overtaken = False  # the own group was called while they were under way
        self._places: list[_Place] = []  # of the buckets
        self._operations: dict[str, _core.Operation] = {}  # by the bucket's name
        self._index = 0  # of the next bucket
        self._sent_elements = 0  # in this pass so far
        self._whole = False  # this pass has sent all buckets
        self._task = -1  # id of the autograd graph task at whose end we wait
        self._sends: list[tuple[int, int]] = []  # index of each bucket of this pass, and when the reducer sent it
        self._ends: list[Callable[[], None]] = []  # stampers of their ends, where callbacks stamp them too
        self._core = job.core()
        self._now_ns = self._core.now_ns
        self._wait_begin, self._wait_end = recorder.stamper(EVENTS["WAIT_BEGIN"]), recorder.stamper(EVENTS["WAIT_END"])
        self._searched_version, self._tries = -1, 0

    @property
    def tensors(self) -> Sequence[tuple[str, int, torch.dtype]]:
        """Name, bytes and type of each gradient."""
        return self._tensors

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """The parameters that are still alive."""
        return tuple(p for p in (reference() for reference in self._parameters) if p is not None)

    @property
    def pending(self) -> int:
        """Number of buckets submitted to our communicator and not yet waited for."""
        return len(self._under_way)

    @property
    def inside(self) -> bool:
        """True while the reducer calls this group."""
        return self._inside

    def enter(self) -> None:
        """Make the reducer call this group. Never call it during a backward pass."""
        ddp = self._ddp()
        if self._inside or ddp is None or self._group is None:
            return
        reducer_of(ddp)._update_process_group(self)
        self._inside = True
        self._use_hooks(len(self.names) if self.unseen and self._stream is None else 0)
        self.new_pass()

    def leave(self) -> None:
        """Restore the model's own group in the reducer and stop stamping. Never call it during a backward pass."""
        self._stamps.stop()
        ddp = self._ddp()
        if self._inside and ddp is not None:
            reducer_of(ddp)._update_process_group(self._group)
        self._inside = False

    def close(self) -> None:
        """Leave for good and drop all references to the user's objects."""
        self.leave()
        self._group = None
        self._recorder = None
        self._parameters = []  # weak references, which torch.utils.swap_tensors refuses
        self.to_own_group()

    def to_own_group(self) -> None:
        """Route buckets over the model's own group. Never call it during a backward pass."""
        self.to_group(None)

    def to_group(self, group: Any) -> None:
        """Route buckets over another group of the same ranks; None: the own one. Never call it in a backward pass."""
        self._own, self._over, self._destination = True, group, None

    def target(
        self, destination: Destination, average: bool = False, *, predivide: float = 1.0, op: int | None = None
    ) -> None:
        """Route buckets over a Comm; None: reduce nothing. Never call it during a backward pass."""
        super().target(destination, average, predivide=predivide, op=op)
        self._own = False

    def forward_begins(self) -> None:
        """Handle the begin of the model's forward pass, where DDP decides whether its backward pass synchronises.

        DDP ignores forward passes without gradients. They may run inside a backward pass, or in another thread.
        """
        ddp = self._ddp()
        if not self._inside or ddp is None or not torch.is_grad_enabled():
            return
        synchronises = bool(ddp.require_backward_grad_sync)
        on_device = self._stream is not None
        if self.detailed if on_device else self.unseen or not synchronises:
            self._use_hooks(len(self.names))
        else:
            # On a device a pass without buckets has the time of one gradient: that which it reaches last, as a rule.
            self._use_hooks(0 if synchronises else 1)
        if synchronises:
            self._forward_ns = self._now_ns()
            self.new_pass()

    def new_pass(self) -> None:
        """Handle the begin of a pass: the next bucket has index 0."""
        self._index = 0

    def _use_hooks(self, first: int) -> None:
        """Stamp so many of the first gradients by hooks, in passes that the reducer does not time for us."""
        if self._stamps.on != first:
            self._stamps.stop()
        stamped = self.parameters
        if first and self._recorder is not None and len(stamped) == len(self._parameters):
            self._stamps.start([*stamped[:first], *[None] * len(stamped[first:])])

    @eager
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Reduce a bucket. The reducer calls this in the backward pass and holds its mutex: do not call the reducer."""
        if self.hooked:  # a bucket comes here from inside the hook, which is timed and may wait for the result
            self._whole = self._whole or not _are_numbers(tensors)
            return self._group.allreduce(tensors, opts)
        if not self._own:
            place = self._next_place(tensors)
            if place is not None and place.takes:
                return self._send(place, tensors[0], opts)
            if self._under_way:
                self._overtaken = True
                self._in_backward()  # it may be the last bucket, and DDP then waits for all at the end of this pass
            return self._group.allreduce(tensors, opts)
        submitted = None
        try:
            submitted = self._stamp_submission(self._next_place(tensors))
        except Exception as error:
            self._measuring_ends(error)
        # Not by what is recorded: all ranks must choose the same group.
        group = self._over if self._over is not None and self._may_turn(tensors) else self._group
        if submitted is None:
            return group.allreduce(tensors, opts)
        work = quietly(group.allreduce, tensors, opts)
        try:
            self._stamp_end(submitted, work.get_future())
        except Exception as error:
            self._measuring_ends(error)
        return work

    def _may_turn(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether a bucket may travel by an arm's group: one of dense gradients, not captured into a graph."""
        return _are_gradients(tensors) and (self._stream is None or self._stream.may_wait())

    def _stamp_end(self, submitted: "_core.Operation", future: Any, moved: int = 0) -> None:
        """Stamp the start of a bucket, and its end when the future completes. moved: see Operation.started.

        NCCL's future is complete at once, and carries an event for the end of the device's work. A stream of our own
        waits for that event.
        """
        if self._stream is None or not future.done():
            done = submitted.started(self._stream is not None, False, moved)
            if self._stream is None:
                self._ends.append(done.twin())
            future.add_done_callback(done)
            return
        done = submitted.started(False, False, moved)
        if self._stream.may_wait():
            with self._stream.current():
                future.wait()
                done()

    @eager
    def hook_begins(self, bucket: Any) -> Any:
        """Stamp a bucket before the user's communication hook runs; return what `hook_returned` takes."""
        if not self._inside or self._recorder is None:
            return None
        try:
            index = bucket.index()
            if index == 0:
                self._begin()
            return self._stamp_submission(self._place(index, bucket.buffer()))
        except Exception as error:
            self._measuring_ends(error)
            return None

    @eager
    def hook_returned(self, submitted: Any, future: Any, moved: int | None) -> None:
        """Stamp the start of a bucket, and its end when the hook's future completes.

        If that is complete by now, on a CPU, the hook itself has waited for the bucket. moved: tensor bytes that the
        hook's calls move, 0: unknown, None: not seen.
        """
        code = 0 if moved is None else 1 + moved
        try:
            if self._stream is None and future.done():
                submitted.started(False, True, code)()
            else:
                self._stamp_end(submitted, future, code)
        except Exception as error:
            self._measuring_ends(error)

    def _next_place(self, tensors: Sequence[torch.Tensor]) -> _Place | None:
        """Return the place of a pass's next bucket; None: these are no gradients.

        A new pass begins in three cases: the model's forward pass began, the pass has sent all buckets, or the first
        bucket's buffer comes again. The last call of a pass is the last bucket, or else the map of used parameters: DDP
        may skip buckets that are not used.
        """
        tensor, index, places, whole = tensors[0], self._index, self._places, self._whole
        place = places[index] if index < len(places) and not (whole and index) else None
        if place is None or place.tensor() is not tensor:
            if not _are_numbers(tensors):
                self._whole = True
                return None
            pointer = tensor.data_ptr() if tensor.layout is torch.strided else 0
            if whole or (index and pointer and pointer == places[0].pointer):
                index = 0
        if index == 0:
            self._begin()
        self._index = index + 1
        return self._place(index, tensor)

    def _begin(self) -> None:
        self._settle()  # what a backward pass that raised has left
        self.count += 1
        self._task = -1
        self._sends, self._ends = [], []
        self._sent_elements, self._whole, self._overtaken = 0, False, False

    def _place(self, index: int, tensor: torch.Tensor) -> _Place:
        """Return the place of a bucket that is sent. The layout changes when DDP rebuilds its buckets."""
        place = self._places[index] if index < len(self._places) else None
        if place is None or place.tensor() is not tensor:
            place = self._placed(place, index, tensor)
        self._sent_elements += place.elements
        self._whole = self._sent_elements >= self._elements
        return place

    def _placed(self, place: _Place | None, index: int, tensor: torch.Tensor) -> _Place:
        if place is not None and place.elements == tensor.numel() and place.dtype is tensor.dtype:
            place.holds(tensor)
            return place
        nbytes = tensor.numel() * tensor.element_size()
        name = f"ddp/{index}:{nbytes}"  # all ranks must compute the same one
        if name not in self._operations and self._recorder is not None:
            about = (key_of(name), nbytes, index + 1, self._core.ALLREDUCE)
            self._operations[name] = self._recorder.operation(*about)
        place = _Place(index, name, tensor, self._operations.get(name))
        self._places[index:] = [place]
        self.buckets[index:] = [Bucket(name, tensor.dtype, nbytes)]
        self.version += 1
        return place

    def _send(self, place: _Place, tensor: torch.Tensor, opts: Any) -> Any:
        """Submit a bucket to the communicator; return the work that DDP waits for."""
        future: Future = Future(devices=self._devices)
        work: Any = None
        self._sends.append((place.index, self._now_ns()))
        destination = cast("_core.Comm | None", self._destination)
        if destination is not None:
            try:
                work = destination.submit(
                    place.name,
                    self._core.ALLREDUCE,
                    place.memory or tensor,
                    dtype_code(_REAL.get(place.dtype, place.dtype)),
                    bucket=place.index + 1,
                    keep=tensor,
                    limit_s=self._limit_s,
                )
            except FAILURES as error:
                if error.errno == errno.EBUSY:  # a capture keeps the device from being opened
                    return self._refused(destination, place, tensor, opts, error)
                work = _Unsent(error)
            except ValueError as error:
                return self._refused(destination, place, tensor, opts, error)
        sent = _Sent(work, future, [tensor], opts)
        if self._in_backward():
            self._under_way.append(sent)
        else:
            # The first pass of a static graph, or a pass of a joined rank: DDP waits right after this call.
            self._wait(sent)
            future.set_result([tensor])
        return _c10d._create_work_from_future(future)

    def _refused(
        self, destination: "_core.Comm", place: _Place, tensor: torch.Tensor, opts: Any, error: Exception
    ) -> Any:
        """Reduce over the own group a bucket that our communicator refuses, such as one of a captured stream.

        Other ranks may have submitted it. An operation of one byte under the bucket's name ends theirs with a
        MismatchError, and they follow: see _wait.
        """
        self._measuring_ends(error)
        memory = bytearray(1)
        work = destination.submit(place.name, self._core.ALLREDUCE, memory, dtype_code(torch.uint8))
        self._under_way.append(_Sent(work, Future(), [], opts))
        self._in_backward()
        return self._group.allreduce([tensor], opts)

    def _wait(self, sent: _Sent) -> None:
        """Wait for a bucket that was submitted. If another rank has refused it, reduce it over the own group.

        Not if the own group was called since, as its calls have one order on all ranks.
        """
        try:
            if sent.work is not None:
                sent.work.wait()
        except MismatchError as error:
            if not sent.tensors:
                return
            if self._overtaken:
                raise
            self._measuring_ends(RuntimeError(f"another rank sends its gradients over the model's own group: {error}"))
            self._group.allreduce(sent.tensors, sent.opts).wait()

    def _stamp_submission(self, place: _Place | None) -> "_core.Operation | None":
        """Stamp the submission of a bucket to the own group; None if it is not recorded."""
        if place is None:
            return None
        operation = place.operation if place.strided and self._recorder is not None else None
        self._sends.append((place.index, self._now_ns() if operation is None else operation.submitted()))
        if operation is not None and self._task == -1:
            self._in_backward()
        return operation

    def _in_backward(self) -> bool:
        """Return whether a backward pass runs; if so, `_wait_begins` is queued for its end.

        It runs before the callback that DDP queues with its last bucket. Returns False inside these callbacks, where a
        static graph's first pass sends its buckets.
        """
        task = _c._current_graph_task_id()
        if task == -1:
            return False
        if task != self._task:
            if _c._current_autograd_node() is None:
                return False
            self._task = task
            _engine.queue_callback(self._wait_begins)
        return True

    def _more_to_come(self) -> bool:
        """Return True if this pass runs inside another one, and DDP sends more buckets after it.

        False while the layout of the buckets is not known. DDP waits for all of them in the pass of the last one.
        """
        return (
            self._index < len(self.buckets)
            and not self._whole
            and _c._current_autograd_node() is not None
            and all(bucket.parameters for bucket in self.buckets)
        )

    @eager
    def _wait_begins(self) -> None:
        """Wait for the buckets in flight. When no transfer is left in flight, raise the first failure.

        At the end of a pass inside another one, as of a reentrant checkpoint, a later bucket queues the wait again.
        """
        if self._more_to_come():
            self._task = -1
            return
        self._wait_ns = self._now_ns()
        self._wait_begin()
        self._settle()
        _engine.queue_callback(self._pass_ends)  # after DDP's own

    @eager
    def _pass_ends(self) -> None:
        """Stamp the end of the wait, and when each gradient of the pass was ready.

        DDP has waited for all buckets, once the last one was sent. A callback that stamps the end of one may still wait
        for the GIL.
        """
        if self._whole:
            for end in self._ends:
                end()
            self._ends = []
        self._wait_end()
        self._task = -1
        try:
            self._record_pass()
        except Exception as error:
            self._measuring_ends(error)

    def _record_pass(self) -> None:
        ddp, recorder = self._ddp(), self._recorder
        # A reduction may take several backward passes. All its gradients are ready when all buckets were sent.
        if ddp is None or recorder is None or not self._whole:
            return
        begun_ns = 0
        if not self._stamps.on and self._stream is None:
            offsets = reducer_of(ddp).get_backward_stats()
            sent = [(ns, self.buckets[index].parameters) for index, ns in self._sends]
            begun_ns = recorder.put_ready(offsets, sent, self._forward_ns) if len(offsets) == len(self.names) else 0
        self.last_pass = Pass(begun_ns, self._sends[0][1], self._wait_ns, self._now_ns())

    def _settle(self) -> None:
        under_way, self._under_way = self._under_way, []
        failure: OSError | None = None
        for sent in under_way:
            try:
                self._wait(sent)
            except FAILURES as error:
                failure = failure or error
        if failure is not None:
            raise failure
        for sent in under_way:
            sent.future.set_result(sent.tensors)

    def _measuring_ends(self, error: Exception) -> None:
        """Handle an exception of the measurement: it ends, and the training goes on."""
        self._recorder = None
        self.on_error(error)

    def learn_parameters(self) -> None:
        """Find which parameters each bucket holds, if unknown. Call between steps, because it calls the reducer."""
        if self._searched_version != self.version:
            self._searched_version, self._tries = self.version, 0
        ddp = self._ddp()
        if ddp is None or self._tries >= TRIES or all(bucket.parameters for bucket in self.buckets):
            return
        self._tries += 1
        sizes = [bucket.nbytes for bucket in self.buckets]
        found = next((each for each in _layouts(ddp, self.tensors) if _sizes(each, self.tensors) == sizes), None)
        if found is not None:
            self.buckets = [replace(bucket, parameters=each) for bucket, each in zip(self.buckets, found, strict=True)]
            self.version += 1


def _are_numbers(tensors: Sequence[torch.Tensor]) -> bool:
    return len(tensors) == 1 and (tensors[0].is_floating_point() or tensors[0].is_complex())


def _are_gradients(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a call of the reducer has a bucket of dense gradients, not a map of used parameters."""
    return _are_numbers(tensors) and tensors[0].layout is torch.strided


def _delegated(name: str) -> Callable[..., Any]:
    def call(self: ReducerGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._group, name)(*args, **kwargs)

    return call


for _name in (
    "broadcast",
    "allreduce_coalesced",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "alltoall",
    "alltoall_base",
    "barrier",
    "send",
    "recv",
):
    setattr(ReducerGroup, _name, eager(_delegated(_name)))


def reducer_of(ddp: DistributedDataParallel) -> Any:
    """Return the reducer of a model."""
    return ddp.reducer


def reduced_parameters(ddp: DistributedDataParallel) -> list[tuple[str, torch.Tensor]]:
    """Return name and tensor of each parameter that a model's reducer reduces, in the reducer's order.

    DDP asks each module for its own parameters (_build_params_for_reducer). A module may list fewer for all below it.
    """
    ignored = ddp.parameters_to_ignore
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for module_name, module in ddp.module.named_modules():
        for name, p in module.named_parameters(recurse=False):
            full = f"{module_name}.{name}"
            if p.requires_grad and full not in ignored:
                found.setdefault(id(p), (full.removeprefix("."), p))
    return list(found.values())


def _sizes(members: Sequence[Sequence[int]], tensors: Sequence[tuple[str, int, Any]]) -> list[int]:
    try:
        return [sum(tensors[index][1] for index in bucket) for bucket in members]
    except IndexError:
        return []


def _layouts(ddp: DistributedDataParallel, tensors: Sequence[tuple[str, int, Any]]) -> list[list[tuple[int, ...]]]:
    """Return the possible bucket layouts of a model: the one that DDP's logger reports, then DDP's initial ones.

    A layout is one tuple of parameter indices per bucket. tensors: name, bytes and dtype of each parameter.
    """
    found = []
    rebuilt = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    if rebuilt:
        found.append([tuple(int(index) for index in bucket.split()) for bucket in rebuilt.split(",")])
    live = [p for _, p in reduced_parameters(ddp)]
    if len(live) == len(tensors):
        cap = int(getattr(ddp, "bucket_bytes_cap", 25 << 20))
        first: int = getattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1 << 20)
        assign: Any = dist.__dict__["_compute_bucket_assignment_by_size"]
        for limits in ([1 << 62], [first, cap], [cap]):
            members, _ = assign(live, limits, [False] * len(live))
            found.append([tuple(bucket) for bucket in reversed(members)])
    return found
