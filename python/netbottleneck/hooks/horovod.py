"""Horovod: measures the distributed optimizer, of this package's Horovod API or of the installed Horovod."""

import importlib
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from netbottleneck import config
from netbottleneck.config import Settings
from netbottleneck.errors import FAILURES
from netbottleneck.hooks.joins import Joins
from netbottleneck.hooks.left_alone import held, left_alone
from netbottleneck.hooks.measured_model import Measured, follow_device, refuse_bare
from netbottleneck.hooks.run_end import close, finish, finish_at_exit, report
from netbottleneck.launch import connect
from netbottleneck.runtime import async_operations, exits, job, run_folder, timeline
from netbottleneck.runtime.collectives import shape_key
from netbottleneck.runtime.communicators import key_of
from netbottleneck.runtime.session import Session, open_together
from netbottleneck.torch.gradients import (
    Bucket,
    Destination,
    GradientSink,
    Stamps,
    can_travel,
    check_on_host,
    dtype_code,
)
from netbottleneck.trace.model import NOT_RECORDED
from netbottleneck.trace.ring_file import EVENTS
from netbottleneck.units import nbytes

if TYPE_CHECKING:
    from netbottleneck import _core


# This package's Horovod API. The job reports the optimizer to an observer and does not depend on sessions.

logger = logging.getLogger("netbottleneck")


class Measuring(job.Observer):
    """Measures the job's first distributed optimizer that has gradients to reduce. Runs on every rank."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._joins: Joins | None = None
        self._refused = False
        self._joined_before = False  # this rank has joined before a run began, which another rank cannot open then
        self._about = ""  # the measured optimizer
        self._others: list[tuple[weakref.ref[Any], str]] = []  # later optimizers, which are left alone

    def gradients(self, gradients: Any, optimizer: Any) -> None:
        if self._session is not None:
            self._leave_alone(self._session, optimizer)
            return
        if self._joined_before and not self._refused:
            self._refused = True
            left_alone("the training", "hvd.join() came before its run had begun: make a step on all ranks before it")
        if self._refused:
            return
        settings = job.current().settings
        refuse_bare(settings.transports, settings)
        # Without a choice, gradients travel as they would without a measurement: over our own transport.
        own = None if "transports" in settings.sources else (connect.native(settings),)

        def ready(session: Session) -> None:
            follow_device(session, gradients.parameters)

        session = open_on_all(settings, ready, arms=own, model=type(optimizer).__name__)
        if session is None:
            self._refused = True
            return
        self._session, self._about, self._others = session, _contents(optimizer), []
        gradients.record(session.recorder)
        joins = self._joins = Joins(session, gradients)
        joins.measured = Measured(session, gradients, optimizer, own_sync=False, step_waits=True, agree=joins.agree)
        joins.measured.between = self._step_ends
        _at_end_of(optimizer, joins.measured.forget, joins.forget)
        exits.register(job.stop)  # runs before the exit handlers of modules imported earlier
        _have_arms_followed(session)

    def _leave_alone(self, session: Session, optimizer: Any) -> None:
        about = _contents(optimizer)
        why = (
            f"another one is or was measured ({self._about}), and only one of a job can be: give all parameters to one "
            "optimizer, or, if the other has done its part, call hvd.shutdown() and hvd.init() before this one is made"
        )
        if session.settings.strict:
            raise ValueError(f"NETBOTTLENECK_STRICT=1, and the distributed optimizer {about} cannot be measured: {why}")
        left_alone(f"the distributed optimizer {about}", why)
        self._others.append((weakref.ref(optimizer), about))

    def _step_ends(self) -> None:
        """Note the optimizers that are there while the measured one goes on making steps."""
        others, self._others = self._others, []
        for reference, about in others:
            note = (
                f"a distributed optimizer ({about}) was left alone: {NOT_RECORDED}, and the wait for it counts as "
                f'input or "other". The measured one is {self._about}.'
            )
            if self._session is not None and reference() is not None and note not in self._session.notes:
                self._session.notes.append(note)

    def joining(self, joining: job.Job) -> "Sequence[_core.Comm]":
        self._joined_before |= self._joins is None
        return () if self._joins is None else self._joins.begin()

    def joined(self, joined: job.Job, last: int) -> int:
        return last if self._joins is None else self._joins.end(last)

    def stopping(self, stopping: job.Job) -> None:
        self._refused = self._joined_before = False
        self._joins = None
        if self._session is not None:
            try:
                close(self._session)
            except Exception as error:
                logger.error("the run was not recorded to its end: %s: %s", type(error).__name__, error)

    def stopped(self, stopped: job.Job) -> None:
        # Report only after the job has stopped: rank 0 waits here for records of ranks that may still wait for rank 0.
        session, self._session = self._session, None
        if session is not None:
            try:
                report(session)
            except Exception as error:
                logger.error("%s: no report: %s: %s", session.folder, type(error).__name__, error)


def _contents(optimizer: Any) -> str:
    """Return what tells an optimizer from another one of its class: "SGD, 4 parameters, 1.5 MiB"."""
    own = held(optimizer)
    size = nbytes(sum(parameter.numel() * parameter.element_size() for parameter in own))
    return f"{type(optimizer).__name__}, {len(own)} parameters, {size}"


def _at_end_of(optimizer: Any, *calls: Callable[[], None]) -> None:
    """Make these calls when an optimizer is gone; not at the process's end."""
    for call in reversed(calls):  # the last finalizer runs first
        weakref.finalize(optimizer, call).atexit = False


def open_on_all(settings: Settings, ready: Callable[[Session], None], **options: Any) -> Session | None:
    """Return the session of open_together; if a rank fails, log one line and return None.

    With NETBOTTLENECK_STRICT=1 the exception propagates.
    """
    try:
        return open_together(settings, ready=ready, **options)
    except Exception as error:
        if settings.strict:
            raise
        left_alone("the training", f"no run can be measured on all ranks: {type(error).__name__}: {error}")
        return None


def _have_arms_followed(session: Session) -> None:
    """Add the operations of our own arms to Horovod's timeline, if one runs. The stock arm has no ring to follow."""
    running = timeline.running(job.current())
    for name in session.arms if running is not None else ():
        path = run_folder.ring_path(session.folder, session.place.rank, name)
        if running is not None and path.exists():
            running.follow(path, name)


# The replacement of `horovod.torch.mpi_ops.mpi_lib` if the real Horovod is installed.
#
# Horovod's Python layer looks up its C library there on every call. All-reduces of the global process set pass through
# a Route, which stamps them or runs them on our communicator. All other calls go to the library.

FIRST_HANDLE = 1 << 30  # our handles start here, Horovod's at 0
NOTICE_S = 5.0
ALLREDUCE = "horovod_torch_allreduce_async_"
GROUPED = "horovod_torch_grouped_allreduce_async_"


class Call(NamedTuple):
    """An all-reduce as Horovod's Python layer passes it to the library. A call that is not grouped has one tensor."""

    tensors: list[torch.Tensor]
    outputs: list[torch.Tensor]
    name: str
    op: int
    prescale: float
    postscale: float


class Route(GradientSink):
    """Routes all-reduces of the global process set to Horovod or to our communicator while a run is measured.

    It replaces Gradients as the target of a Communicator; each gradient is one bucket. plain: all all-reduces go to
    Horovod and nothing is recorded.
    """

    def __init__(self, named: list[tuple[str, torch.Tensor]], size: int) -> None:
        self.names = tuple(name for name, _ in named)
        self.parameters = tuple(parameter for _, parameter in named)
        self.buckets = tuple(
            Bucket(async_operations.fitted(f"allreduce.{name}"), p.dtype, p.numel() * p.element_size(), (index,))
            for index, (name, p) in enumerate(named)
        )
        self.plain = True
        self.paused = False
        self.stock_only = True  # every arm sends all-reduces to Horovod
        self._size = size
        self._stock = True
        self._recorder: _core.Recorder | None = None
        self._keys = {bucket.name: (key_of(bucket.name), index) for index, bucket in enumerate(self.buckets)}
        self._rounds: dict[str, int] = {}
        self._stamped: dict[int, tuple[int, int]] = {}  # stamped handles of Horovod: key and round
        self._works: dict[int, list[Any]] = {}  # our own handles
        self._next = FIRST_HANDLE
        self._unnamed = 0
        self._stamps: Stamps | None = None

    @property
    def pending(self) -> int:
        """Number of all-reduces that were not waited for."""
        return len(self._works) + len(self._stamped)

    def open(self, recorder: "_core.Recorder") -> None:
        """Stamp all-reduces and ready gradients into this recorder from now on."""
        self.close()
        self._recorder = recorder
        self.plain = False
        self._stamps = Stamps(recorder, len(self.parameters))
        self._stamps.start(self.parameters)

    def close(self) -> None:
        """Send all all-reduces to Horovod and stop recording."""
        self.plain = True
        self._recorder = None
        if self._stamps is not None:
            self._stamps.stop()

    def forget(self) -> None:
        """Keep no parameter: a finalizer of the optimizer calls it. All-reduces keep their path."""
        self.parameters = ()

    def rest(self, on: bool) -> None:
        """Send all all-reduces to Horovod and stamp nothing, or record again. Call between steps."""
        self.plain = on
        if self._stamps is None:
            return
        if on:
            self._stamps.stop()
        else:
            self._stamps.start(self.parameters)

    def flat(self, index: int) -> torch.Tensor:
        """Return a gradient as a flat view."""
        gradient = self.parameters[index].grad
        assert gradient is not None
        return gradient.view(-1)

    def target(
        self, destination: Destination, average: bool = True, *, predivide: float = 1.0, op: int | None = None
    ) -> None:
        """Run all-reduces on a Comm from now on; None: reduce nothing. Call between steps."""
        super().target(destination, average, predivide=predivide, op=op)
        self._stock = False

    def to_horovod(self) -> None:
        """Send all-reduces to Horovod and stamp them from now on. Call between steps."""
        self._stock = True

    def takes(self, call: Call) -> bool:
        """Return whether our communicator runs this all-reduce."""
        if self.plain or self._stock or call.op not in (async_operations.Average, async_operations.Sum):
            return False
        return all(can_travel(tensor) for tensor in [*call.tensors, *call.outputs])

    def start(self, call: Call, grouped: bool) -> int:
        """Start an all-reduce on our communicator; return its handle.

        Raises ValueError while one with this name is pending, RuntimeError if the submission fails.
        """
        name = call.name
        if not name:
            name, self._unnamed = f"noname.{self._unnamed}", self._unnamed + 1
        works = []
        for index, (tensor, output) in enumerate(zip(call.tensors, call.outputs, strict=True)):
            if output.data_ptr() != tensor.data_ptr():
                output.detach().copy_(tensor.detach())
            if self._destination is not None and output.numel() > 0:
                label = f"grouped_allreduce.{name}_{index + 1}of{len(call.tensors)}" if grouped else f"allreduce.{name}"
                works.append(self._submit(async_operations.fitted(label), output, call))
        handle, self._next = self._next, self._next + 1
        self._works[handle] = works
        return handle

    def _submit(self, name: str, output: torch.Tensor, call: Call) -> Any:
        core, destination = job.core(), self._destination
        assert isinstance(destination, core.Comm)
        _, index = self._keys.get(name, (0, -1))
        share = async_operations.average_factor(self._size) if call.op == async_operations.Average else 1.0
        try:
            return destination.submit(
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
        """Stamp the submission of an all-reduce to Horovod; return a callback that stamps its start by handle."""
        recorder = self._recorder
        if recorder is None or self.plain:
            return lambda _handle: None
        kind_of = "grouped_allreduce" if grouped else "allreduce"
        name = async_operations.fitted(f"{kind_of}.{call.name}")
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
        """Return whether a handle is ours."""
        return handle in self._works

    def poll(self, handle: int) -> bool:
        """Return whether waiting for our handle would return or raise at once."""
        try:
            return all(work.test() for work in self._works[handle])
        except FAILURES:
            return True

    def finish(self, handle: int) -> None:
        """Wait for our all-reduce. Raises RuntimeError if it failed; Horovod converts that to its own error."""
        works = self._works.pop(handle)
        self._stamp("WAIT_BEGIN", 0)
        try:
            for work in works:
                while not work.wait(NOTICE_S):
                    job.current().log_notices()
        except FAILURES as error:
            raise RuntimeError(str(error)) from error
        finally:
            self._stamp("WAIT_END", 0)

    def watch(self, handle: int, library: Any) -> Any:
        """Wait for an all-reduce of Horovod and stamp it. OP_DONE has the time of detection: Horovod gives no other."""
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
    """Wraps Horovod's C library and passes its all-reduces through a Route.

    opened: called for each all-reduce while there is no Route; returns the Route, or None. closing: called before
    Horovod shuts down. found: called when a function of the library is looked up.
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

                ours = process_set == 0 and divisor == 1  # Horovod uses a divisor on GPUs only
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
        """Return nonzero if a handle is complete."""
        if self.route is not None and self.route.owns(handle):
            return int(self.route.poll(handle))
        return self.library.horovod_torch_poll(handle)

    def horovod_torch_wait_and_clear(self, handle: int) -> Any:
        """Wait for a handle and release it."""
        if self.route is None:
            return self.library.horovod_torch_wait_and_clear(handle)
        return self.route.finish(handle) if self.route.owns(handle) else self.route.watch(handle, self.library)

    def horovod_torch_join(self, *args: Any) -> Any:
        """Join. Raises RuntimeError if an arm uses our communicator: the other ranks would wait for this rank."""
        if self.route is not None and not self.route.plain and not self.route.stock_only:
            raise RuntimeError("hvd.join() needs NETBOTTLENECK_TRANSPORT=stock: Horovod alone knows who has joined")
        return self.library.horovod_torch_join(*args)

    def horovod_torch_reset(self) -> Any:
        """End the run, then let Horovod reset its handles."""
        self.route = None
        self._closing()
        return self.library.horovod_torch_reset()


# The installed Horovod: measured unchanged or, on request, with its all-reduces on our communicator.
#
# Only one attribute is replaced: `mpi_lib` of `horovod.torch.mpi_ops`.

ALONE = (
    "each rank trains alone and nothing is reduced, as Horovod does not read these variables (start it by horovodrun "
    "or mpirun, or uninstall it: netbottleneck takes its place under every launcher); "
)
MODULE = "horovod.torch.mpi_ops"
FRAMES = 8  # limit of the search from the library's caller up to the optimizer


class Stock:
    """Horovod's own path as a transport of a run: the arms "stock" and "bare"."""

    name = "stock"

    def __init__(self, mpi_ops: Any, route: Route) -> None:
        self._mpi_ops = mpi_ops
        self._route = route

    def target(self, _gradients: Any) -> None:
        """Send the optimizer's all-reduces to Horovod."""
        self._route.to_horovod()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._mpi_ops.barrier()

    def info(self) -> dict[str, Any]:
        """Return the record's entry for Horovod."""
        below = "mpi" if self._mpi_ops.mpi_enabled() else "gloo"
        version = getattr(sys.modules.get("horovod"), "__version__", "")
        return {"provider": f"horovod {version} over {below}", "done": "when it was seen at the wait"}

    def wire(self) -> int | None:
        """Return None: Horovod does not report the bytes it sent."""
        return None

    def close(self) -> None:
        """Do nothing: the user owns Horovod."""


class Attached:
    """An installed Horovod whose library is wrapped, and its measured run, which begins with the first gradient."""

    def __init__(self, mpi_ops: Any) -> None:
        self._mpi_ops = mpi_ops
        self._session: Session | None = None
        self._refused = False
        self._looked = False
        self.between = Between(mpi_ops.mpi_lib, self._opened, self.finish, self._look)
        mpi_ops.mpi_lib = self.between

    def finish(self) -> None:
        """End the run, if there is one; the next optimizer's first gradient begins the next run."""
        session, self._session = self._session, None
        self._refused = self._looked = False
        if session is not None:
            finish(session)
            job.stop()

    def _look(self) -> None:
        """Warn, once per initialisation of Horovod, if its rank and size differ from the launcher's variables.

        The training is then left alone, also if those variables are invalid: NETBOTTLENECK_STRICT=1 raises ValueError.
        """
        if self._looked:
            return
        try:
            rank, size = int(self._mpi_ops.rank()), int(self._mpi_ops.size())
        except ValueError:
            return  # Horovod is not initialised yet
        self._looked = True
        settings = config.settings()
        try:
            place = connect.detect(settings)
        except ValueError as error:
            if settings.strict:
                raise
            self._refused = True
            left_alone("the training", str(error))
            return
        self._refused = (place.rank, place.size) != (rank, size)
        if self._refused:
            logger.warning(
                "Horovod has %d ranks and takes this one for rank %d, but the launcher's variables (%s) say %d and %d: "
                "%sit is not measured",
                size,
                rank,
                place.launcher,
                place.size,
                place.rank,
                ALONE if size == 1 else "",
            )

    def _opened(self, call: Call) -> Route | None:
        """Begin a run if an optimizer's gradient is all-reduced. Every rank calls this at its first such all-reduce."""
        if self._refused or call.op not in (async_operations.Average, async_operations.Sum):
            return None
        optimizer = _asking()
        if optimizer is None:
            return None
        settings, size = config.settings(), int(self._mpi_ops.size())
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer._parameter_names]
        named = [(str(optimizer._parameter_names[p]), p) for p in parameters if p.requires_grad and p.numel() > 0]
        route = Route([(name, p) for name, p in named if _can_travel(name, p, settings.strict)], size)
        stock = Stock(self._mpi_ops, route)
        model = type(optimizer).__name__

        def ready(session: Session) -> None:
            route.open(session.recorder)

        session = open_on_all(settings, ready, arms=settings.arms, model=model, stock=stock) if route.names else None
        if session is None:
            self._refused = True
            return None
        route.stock_only = all(arm.own_path for arm in session.arms)
        measured = Measured(session, route, optimizer, own_sync=False, step_waits=True, bare=route.rest)
        _at_end_of(optimizer, measured.forget, route.forget)
        session.on_close.append(route.close)
        finish_at_exit(session)
        self._session = session
        return route


def attach() -> Attached:
    """Import the installed Horovod if needed and wrap its library. A second call changes nothing.

    Raises ImportError if Horovod is not installed.
    """
    return install(importlib.import_module(MODULE))


def install(mpi_ops: ModuleType) -> Attached:
    """Wrap the library of `horovod.torch.mpi_ops`. Raises ImportError if the module is ours, under Horovod's name."""
    library = getattr(mpi_ops, "mpi_lib", None)
    if library is None:
        raise ImportError(f"{MODULE} is not Horovod's own: netbottleneck stands in for it, and measures its optimizers")
    attached: Attached | None = mpi_ops.__dict__.get("_netbottleneck")
    if attached is None:
        attached = mpi_ops.__dict__["_netbottleneck"] = Attached(mpi_ops)
    return attached


def _can_travel(name: str, parameter: torch.Tensor, strict: bool) -> bool:
    """Return whether a gradient can be measured and moved. If not, log one line; only Horovod moves it then.

    strict: raise ValueError instead.
    """
    try:
        check_on_host(name, parameter)
    except ValueError as error:
        if strict:
            raise
        left_alone("a gradient that only Horovod moves", str(error))
        return False
    return True


def _asking() -> Any:
    """Return the distributed optimizer whose method is on the call stack, within FRAMES frames, or None."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(FRAMES):
        if frame is None:
            return None
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.optim.Optimizer) and hasattr(owner, "_parameter_names"):
            return owner
        frame = frame.f_back
    return None
