"""A communication hook of DDP's: buckets as DDP's reducer makes them, each sent as soon as it is complete.

DDP takes one hook a model and never gives it back; one that is closed does what DDP does without a hook.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from netbottleneck import job
from netbottleneck.recorder import EVENTS
from netbottleneck.torch.gradients import Bucket, Sink, check, dtype_code
from netbottleneck.torch.ready import stamped

if TYPE_CHECKING:
    from netbottleneck import _core

Future = torch.futures.Future[torch.Tensor]
HOOK = "_netbottleneck_hook"  # of a DDP model: the hook that it has
UNSETTLED_PASSES = 3  # DDP builds its buckets anew once, after the first backward pass

_engine: Any = torch.autograd.Variable._execution_engine


class Pass(NamedTuple):
    """A backward pass by the clock of the records: its first bucket sent, the wait for all of them begun and ended."""

    sent_ns: int
    wait_begin_ns: int
    wait_end_ns: int


class _Failed:
    """A bucket that could not be sent: told where it is waited for, out of DDP's hands."""

    def __init__(self, error: OSError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


class BucketHook:
    """What a DDP model gives its buckets to, in the place of Gradients under a Communicator.

    plain: buckets go as DDP sends them without a hook, and nothing is recorded. A sparse bucket always does. static:
    the model has static_graph=True; all buckets of its first pass come when that is over, and each is waited for.
    """

    def __init__(
        self, group: dist.ProcessGroup, parameters: list[tuple[str, torch.Tensor]], *, static: bool = False
    ) -> None:
        self.names = tuple(name for name, _ in parameters)
        self.parameters = tuple(parameter for _, parameter in parameters)
        self.buckets: list[Bucket] = []
        self.version = 0  # goes up with each bucket that is another than before, or elsewhere
        self.plain = True
        self.paused = False
        self.count = 0  # backward passes
        self.passes: deque[Pass] = deque(maxlen=2)
        self._group = group
        self._static = static
        self._recorder: _core.Recorder | None = None
        self._index_of = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._memory: list[torch.Tensor] = []
        self._sink: Sink = None
        self._factors: tuple[bool, float, int | None] = (True, 1.0, None)
        self._under_way: list[tuple[Any, Future, torch.Tensor]] = []
        self._sent_ns = 0
        self._stamps: list[Any] = []

    @property
    def pending(self) -> int:
        """Buckets that were sent and not waited for."""
        return len(self._under_way)

    @property
    def factors(self) -> tuple[bool, float, int | None]:
        """What `target` was told of the arithmetic: (average, predivide, op)."""
        return self._factors

    def open(self, recorder: "_core.Recorder") -> None:
        """Stamp into this recorder from now on, each gradient that is ready among it."""
        self.close()
        self._recorder = recorder
        self.plain = False
        self._stamps = stamped(self.parameters, recorder)

    def close(self) -> None:
        """Leave the buckets to DDP's own way."""
        self.plain = True
        self._recorder = None
        self._sink = None
        for handle in self._stamps:
            handle.remove()
        self._stamps.clear()

    def target(self, sink: Sink, average: bool = True, *, predivide: float = 1.0, op: int | None = None) -> None:
        """Say where buckets go, between steps, as Gradients.target does."""
        self._sink = sink
        self._factors = (average, predivide, op)

    def flush(self) -> None:
        """Nothing: DDP sends its buckets itself."""

    def wait(self) -> None:
        """Nothing: they are back when the backward pass ends."""

    def flat(self, index: int) -> torch.Tensor:
        """Return bucket `index` as one flat tensor over its memory."""
        return self._memory[index]

    def __call__(self, bucket: GradBucket) -> Future:
        """Send a bucket. DDP's reducer calls it, in the backward pass."""
        buffer = bucket.buffer()
        if self.plain:
            return self._plainly(buffer)
        index = bucket.index()
        if index == 0:
            self._begin()
        self._look_at(index, bucket, buffer)
        if buffer.is_sparse:
            future = self._plainly(buffer)
        else:
            future = Future()
            self._under_way.append((self._send(index, buffer), future, buffer))
        if self._static and self.count == 1:
            self._finish()
        elif bucket.is_last():
            # Before the callback in which the reducer waits, which it queues when this returns.
            _engine.queue_callback(self._finish)
        return future

    def _plainly(self, buffer: torch.Tensor) -> Future:
        work: Any = dist.all_reduce(buffer.div_(self._group.size()), group=self._group, async_op=True)
        done: Future = work.get_future().then(lambda future: future.value()[0])
        return done

    def _begin(self) -> None:
        if self._under_way:  # of a backward pass that an error ended
            self._finish()
        self.count += 1
        self._sent_ns = job.core().now_ns()

    def _look_at(self, index: int, bucket: GradBucket, buffer: torch.Tensor) -> None:
        buffer = torch.empty(0, dtype=buffer.dtype) if buffer.is_sparse else buffer
        known = index < len(self.buckets) and self._memory[index].data_ptr() == buffer.data_ptr()
        if known and self._memory[index].numel() == buffer.numel() and self.count > UNSETTLED_PASSES:
            return
        members = tuple(self._index_of[id(parameter)] for parameter in bucket.parameters())
        nbytes = buffer.numel() * buffer.element_size()
        # Its name is the same on all ranks, whatever the memory.
        made = Bucket(f"ddp/{index}:{nbytes}", buffer.dtype, 0, nbytes, members, ())
        if known and self.buckets[index] == made:
            return
        self.version += 1
        self.buckets[index:] = [made, *self.buckets[index + 1 :]]
        self._memory[index:] = [buffer, *self._memory[index + 1 :]]
        if bucket.is_last():
            del self.buckets[index + 1 :], self._memory[index + 1 :]

    def _send(self, index: int, buffer: torch.Tensor) -> Any:
        sink, core = self._sink, job.core()
        if sink is None:
            return None
        if not isinstance(sink, core.Comm):
            return cast(Callable[[int], Any], sink)(index)
        average, predivide, op = self._factors
        bucket = self.buckets[index]
        try:
            return sink.submit(
                bucket.name,
                core.ALLREDUCE,
                (buffer.data_ptr(), bucket.nbytes),
                dtype_code(bucket.dtype),
                op=core.SUM if op is None else op,
                prescale=1.0 / predivide,
                postscale=predivide / (sink.size if average else 1),
                bucket=index + 1,
                keep=buffer,
            )
        except OSError as error:
            return _Failed(error)

    def _finish(self) -> None:
        """Wait for all buckets, and give them back. Raises the first failure when no transfer is left under way."""
        core, recorder = job.core(), self._recorder
        begun, failure = core.now_ns(), None
        if recorder is not None:
            recorder.put_at(begun, EVENTS["WAIT_BEGIN"])
        under_way, self._under_way = self._under_way, []
        for work, _, _ in under_way:
            try:
                if work is not None:
                    work.wait()
            except OSError as error:
                failure = failure or error
        ended = core.now_ns()
        if recorder is not None:
            recorder.put_at(ended, EVENTS["WAIT_END"])
        if failure is not None:
            raise failure
        for _, future, buffer in under_way:
            future.set_result(buffer)
        self.passes.append(Pass(self._sent_ns, begun, ended))


def register(ddp: DistributedDataParallel, recorder: "_core.Recorder") -> BucketHook:
    """Return the hook of a DDP model, stamping into a recorder; registers it where the model has none."""
    hook = hook_of(ddp)
    if hook is None:
        named = [(name, p) for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore]
        chosen = [(name, p) for name, p in named if p.requires_grad]
        for name, parameter in chosen:
            check(name, parameter)
        hook = BucketHook(ddp.process_group, chosen, static=bool(ddp.static_graph))
        ddp.register_comm_hook(hook, netbottleneck_hook)
        ddp.__dict__[HOOK] = hook
    hook.open(recorder)
    return hook


def hook_of(ddp: DistributedDataParallel) -> BucketHook | None:
    """Return the hook that `register` gave a model."""
    hook: BucketHook | None = ddp.__dict__.get(HOOK)
    return hook


def netbottleneck_hook(state: BucketHook, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send a bucket: what DDP calls. By this name DDP's own record tells of it."""
    return state(bucket)
