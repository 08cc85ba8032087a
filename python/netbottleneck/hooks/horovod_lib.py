"""What stands at `horovod.torch.mpi_ops.mpi_lib` where the real Horovod is installed.

All of Horovod's Python layer looks its C library up there, on every call. All-reduces of the world pass through a
Route, which stamps them, or answers them by a communicator of ours; everything else goes to the library.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from netbottleneck.errors import FAILURES
from netbottleneck.runtime import async_operations, job
from netbottleneck.runtime.collectives import shape_key
from netbottleneck.runtime.communicators import key_of
from netbottleneck.torch.gradients import Bucket, Sink, can_travel, dtype_code
from netbottleneck.torch.ready import Stamps
from netbottleneck.trace.recorder import EVENTS

if TYPE_CHECKING:
    from netbottleneck import _core

FIRST_HANDLE = 1 << 30  # ours count from here; Horovod's from 0
NOTICE_S = 5.0
ALLREDUCE = "horovod_torch_allreduce_async_"
GROUPED = "horovod_torch_grouped_allreduce_async_"

logger = logging.getLogger("netbottleneck")


class Call(NamedTuple):
    """An all-reduce as Horovod's Python layer gives it to the library; the tensors of a group are lists."""

    tensors: list[torch.Tensor]
    outputs: list[torch.Tensor]
    name: str
    op: int
    prescale: float
    postscale: float


class Route:
    """Where all-reduces of the world go while a run is measured.

    It takes the place of Gradients under a Communicator: each gradient is a bucket of its own. plain: all go to
    Horovod, and nothing is recorded.
    """

    def __init__(self, named: list[tuple[str, torch.Tensor]], size: int) -> None:
        self.names = tuple(name for name, _ in named)
        self.parameters = tuple(parameter for _, parameter in named)
        self.buckets = tuple(
            Bucket(f"allreduce.{name}", p.dtype, 0, p.numel() * p.element_size(), (index,), (0,))
            for index, (name, p) in enumerate(named)
        )
        self.version = 0
        self.factors: tuple[bool, float, int | None] = (True, 1.0, None)
        self.plain = True
        self.paused = False
        self.stock_only = True  # all-reduces go to Horovod in every arm
        self._size = size
        self._stock = True
        self._sink: Sink = None
        self._recorder: _core.Recorder | None = None
        self._keys = {bucket.name: (key_of(bucket.name), index) for index, bucket in enumerate(self.buckets)}
        self._rounds: dict[str, int] = {}
        self._stamped: dict[int, tuple[int, int]] = {}  # Horovod's handles that were stamped: key and round
        self._works: dict[int, list[Any]] = {}  # our own
        self._next = FIRST_HANDLE
        self._unnamed = 0
        self._stamps: Stamps | None = None

    @property
    def tensors(self) -> list[tuple[str, int, torch.dtype]]:
        """Name, bytes and type of each gradient."""
        return [(n, p.numel() * p.element_size(), p.dtype) for n, p in zip(self.names, self.parameters, strict=True)]

    @property
    def pending(self) -> int:
        """All-reduces that were not waited for."""
        return len(self._works) + len(self._stamped)

    def open(self, recorder: "_core.Recorder") -> None:
        """Stamp into this recorder from now on, each gradient that is ready among it."""
        self.close()
        self._recorder = recorder
        self.plain = False
        self._stamps = Stamps(self.parameters, recorder)

    def close(self) -> None:
        """Leave all to Horovod."""
        self.plain = True
        self._recorder = None
        if self._stamps is not None:
            self._stamps.remove()

    def flush(self) -> None:
        """Nothing: Horovod's optimizer sends them itself."""

    def wait(self) -> None:
        """Nothing: Horovod's optimizer waits for them itself."""

    def flat(self, index: int) -> torch.Tensor:
        """Return a gradient."""
        gradient = self.parameters[index].grad
        assert gradient is not None
        return gradient.view(-1)

    def target(self, sink: Sink, average: bool = True, *, predivide: float = 1.0, op: int | None = None) -> None:
        """Answer all-reduces by a Comm, or without moving anything (None), from now on. Between steps."""
        self._sink = sink
        self._stock = False
        self.factors = (average, predivide, op)

    def to_horovod(self) -> None:
        """Give all-reduces to Horovod, and stamp them, from now on. Between steps."""
        self._stock = True

    def takes(self, call: Call) -> bool:
        """Return whether this all-reduce is one that we answer."""
        if self.plain or self._stock or call.op not in (async_operations.Average, async_operations.Sum):
            return False
        return all(can_travel(tensor) for tensor in [*call.tensors, *call.outputs])

    def start(self, call: Call, grouped: bool) -> int:
        """Start an all-reduce of ours; return its handle. ValueError while one of this name is pending."""
        name = call.name
        if not name:
            name, self._unnamed = f"noname.{self._unnamed}", self._unnamed + 1
        works = []
        for index, (tensor, output) in enumerate(zip(call.tensors, call.outputs, strict=True)):
            if output.data_ptr() != tensor.data_ptr():
                output.detach().copy_(tensor.detach())
            if self._sink is not None and output.numel() > 0:
                whole = f"grouped_allreduce.{name}_{index + 1}of{len(call.tensors)}" if grouped else f"allreduce.{name}"
                works.append(self._submit(whole, output, call))
        handle, self._next = self._next, self._next + 1
        self._works[handle] = works
        return handle

    def _submit(self, name: str, output: torch.Tensor, call: Call) -> Any:
        core, sink = job.core(), self._sink
        assert isinstance(sink, core.Comm)
        _, index = self._keys.get(name, (0, -1))
        share = 1.0 / self._size if call.op == async_operations.Average else 1.0
        try:
            return sink.submit(
                name,
                core.ALLREDUCE,
                (output.data_ptr(), output.numel() * output.element_size()),
                dtype_code(output.dtype),
                prescale=call.prescale,
                postscale=call.postscale * share,
                bucket=index + 1,
                shape=shape_key((tuple(output.shape),)),
                keep=output,
            )
        except FAILURES as error:
            raise RuntimeError(f"{name}: {error}") from error

    def started(self, call: Call, grouped: bool) -> Callable[[int], None]:
        """Stamp that Horovod gets an all-reduce now; return what stamps that it has it, under a handle."""
        recorder = self._recorder
        if recorder is None or self.plain:
            return lambda _handle: None
        name = f"grouped_allreduce.{call.name}" if grouped else f"allreduce.{call.name}"
        key, index = self._keys.get(name) or self._keys.setdefault(name, (key_of(name), -1))
        turn = self._rounds.get(name, 0)
        self._rounds[name] = turn + 1
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in call.tensors)
        kind = job.core().ALLREDUCE | dtype_code(call.tensors[0].dtype) << 8
        recorder.put(EVENTS["OP_SUBMIT"], key, turn, nbytes, index + 1, 0, kind)

        def has_it(handle: int) -> None:
            recorder.put(EVENTS["OP_START"], key, turn)
            self._stamped[handle] = (key, turn)

        return has_it

    def owns(self, handle: int) -> bool:
        """Return whether a handle is one of ours."""
        return handle in self._works

    def poll(self, handle: int) -> bool:
        """Return whether waiting for a handle of ours would return, or raise, at once."""
        try:
            return all(work.test() for work in self._works[handle])
        except FAILURES:
            return True

    def finish(self, handle: int) -> None:
        """Wait for an all-reduce of ours. RuntimeError where it failed, which Horovod makes its own error of."""
        works = self._works.pop(handle)
        self._stamp("WAIT_BEGIN", 0)
        try:
            for work in works:
                while not work.wait(NOTICE_S):
                    job.current().tell()
        except FAILURES as error:
            raise RuntimeError(str(error)) from error
        finally:
            self._stamp("WAIT_END", 0)

    def watch(self, handle: int, library: Any) -> Any:
        """Wait for one of Horovod's, and stamp it. When it was done is not told: the stamp is of when that was seen."""
        key, turn = self._stamped.pop(handle, (0, 0))
        if key == 0 or self._recorder is None:
            return library.horovod_torch_wait_and_clear(handle)
        done = library.horovod_torch_poll(handle) != 0
        if not done:
            self._stamp("WAIT_BEGIN", key)
        try:
            return library.horovod_torch_wait_and_clear(handle)
        finally:
            if not done:
                self._stamp("WAIT_END", key)
            self._stamp("OP_DONE", key, turn)

    def _stamp(self, kind: str, key: int, turn: int = 0) -> None:
        if self._recorder is not None:
            self._recorder.put(EVENTS[kind], key, turn)


class Between:
    """Horovod's library with a Route before it.

    opened: told of each all-reduce while there is no Route; returns one from when on there is. closing: told when
    Horovod is about to shut down. found: told when an operation is looked up.
    """

    def __init__(
        self,
        library: Any,
        opened: Callable[[Call], Route | None],
        closing: Callable[[], None],
        found: Callable[[], None],
    ) -> None:
        self.library = library
        self.route: Route | None = None
        self._opened = opened
        self._closing = closing
        self._found = found

    def __getattr__(self, name: str) -> Any:
        self._found()
        real: Any = getattr(self.library, name)
        grouped = name.startswith(GROUPED)
        if grouped or name.startswith(ALLREDUCE):

            def allreduce(tensor: Any, output: Any, divisor: int, label: Any, op: int, *rest: Any) -> int:
                prescale, postscale, process_set = rest
                named = label.decode() if isinstance(label, bytes) else label
                tensors, outputs = (list(tensor), list(output)) if grouped else ([tensor], [output])
                call = Call(tensors, outputs, named, op, prescale, postscale)

                def by_horovod() -> int:
                    handle: int = real(tensor, output, divisor, label, op, *rest)
                    return handle

                ours = process_set == 0 and divisor == 1  # a divisor is for GPUs
                return self._allreduce(call, grouped, by_horovod) if ours else by_horovod()

            setattr(self, name, allreduce)
            return allreduce
        return real

    def _allreduce(self, call: Call, grouped: bool, real: Callable[[], int]) -> int:
        if self.route is None:
            self._found()
            self.route = self._opened(call)
        if self.route is None or not call.tensors:
            return real()
        if self.route.takes(call):
            return self.route.start(call, grouped)
        has_it = self.route.started(call, grouped)
        handle = real()
        has_it(handle)
        return handle

    def horovod_torch_poll(self, handle: int) -> Any:
        """Whether a handle is done."""
        if self.route is not None and self.route.owns(handle):
            return int(self.route.poll(handle))
        return self.library.horovod_torch_poll(handle)

    def horovod_torch_wait_and_clear(self, handle: int) -> Any:
        """Wait for a handle, and forget it."""
        if self.route is None:
            return self.library.horovod_torch_wait_and_clear(handle)
        return self.route.finish(handle) if self.route.owns(handle) else self.route.watch(handle, self.library)

    def horovod_torch_join(self, *args: Any) -> Any:
        """Refused while we answer all-reduces: those of the others would wait for this rank's."""
        if self.route is not None and not self.route.plain and not self.route.stock_only:
            raise RuntimeError("hvd.join() needs NETBOTTLENECK_TRANSPORT=stock: Horovod alone knows who has joined")
        return self.library.horovod_torch_join(*args)

    def horovod_torch_reset(self) -> Any:
        """End the run, then let Horovod forget its handles."""
        self.route = None
        self._closing()
        return self.library.horovod_torch_reset()
