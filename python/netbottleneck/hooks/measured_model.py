"""A measured model: its steps, phases and arms, recorded into a session, and the end of the run.

Python code runs a few times per step, never per gradient: C callables stamp the events inside a step.
"""

import contextlib
import errno
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel

from netbottleneck.config import Settings
from netbottleneck.errors import FAILURES, Error, HorovodInternalError, of_handler
from netbottleneck.hooks.calls import Calls, EachCall, watched
from netbottleneck.hooks.collectives import Collectives
from netbottleneck.hooks.reducer_group import Pass, ReducerGroup
from netbottleneck.hooks.updates import Updates, step_frames
from netbottleneck.runtime import job
from netbottleneck.runtime.communicators import key_of
from netbottleneck.runtime.session import Session
from netbottleneck.torch.gradients import GradientSink
from netbottleneck.trace.ring_file import EVENTS
from netbottleneck.trace.transports import BARE, Arm
from netbottleneck.whatif.plan import described

# The measured model.

_engine: Any = torch.autograd.Variable._execution_engine
_c: Any = torch._C

_current_node: Callable[[], Any] = getattr(_c, "_current_autograd_node", lambda: None)
_runs = [getattr(BackwardCFunction, name, None) for name in ("apply", "apply_boxed")]
_BACKWARD = {run.__code__ for run in _runs if run is not None}  # of an autograd function in Python
_FORWARD = {torch.autograd.Function.apply.__func__.__code__}  # type: ignore[attr-defined]

logger = logging.getLogger("netbottleneck")


def _in_function(passes: set[CodeType]) -> bool:
    """Return whether the current pass runs inside such a pass of an autograd function, as in reentrant checkpoints."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code not in passes:
        frame = frame.f_back
    return frame is not None


def refuse_bare(arms: Sequence[Arm], settings: Settings) -> None:
    """Raise ValueError if an arm is the script's own path, where gradients have none."""
    if BARE in arms:
        raise ValueError(
            f"{settings.source_of('transports')}={','.join(arms)}: netbottleneck alone moves the gradients of this "
            "training, so there is no untouched path: leave bare out"
        )


def follow_device(session: Session, parameters: Iterable[torch.Tensor]) -> None:
    """Stamp with the time of the device that holds the parameters, if they are not in host memory. It is no AMD GPU.

    On a GPU each step is an NVTX range on the training thread, so that a profiler shows steps and their arms.
    """
    device = next((parameter.device for parameter in parameters), torch.device("cpu"))
    if device.type == "cuda" and torch.version.hip is not None:
        raise ValueError(
            "it is on an AMD GPU, and only those of NVIDIA can be measured: record it with torch.profiler, and call "
            "netbottleneck report on the traces"
        )
    if device.type != "cpu" and session.recorder.device_stream is None:
        session.recorder.follow(torch.empty(1, device=device), session.settings.cuda_library)
        session.ranges = torch.cuda.nvtx if device.type == "cuda" else None
        module = getattr(torch, device.type)

        def drain() -> None:
            if not module.is_current_stream_capturing():  # a wait would end the capture
                module.current_stream(device).synchronize()

        session.runs_ahead(drain)


def _nothing() -> None:
    return


class _Forgotten(GradientSink):
    """The gradients of a measurement that has ended: they keep no parameter and no bucket."""

    names = ()
    parameters = ()
    buckets = ()
    pending = 0


class Measured:
    """Measures one model, its gradients and its optimizer, and records them into a session.

    own_sync: these hooks send the gradients and wait for them at the end of each backward pass. False: DDP or Horovod
    does. step_waits: the optimizer's step waits for them, and then calls that of its base class, as Horovod's does.
    bare: switches the user's own path on (True) or off, if there is one; the arm "bare" runs that path without our
    hooks. agree: called before the arm changes; if it returns False, the current arm stays; None: the session's, if
    arms move gradients by different paths. on_forward: called when the model's forward pass begins. model None: found
    at the first forward pass. optimizer None: found at its first step.

    An exception in the measurement is logged once and ends the recording; gradients still travel as before. Raises
    ValueError if "bare" is an arm but the user has no own path.
    """

    _compiles = False  # the process has called torch.compile
    _between_steps = False
    _steps = 0  # depth of the optimizers' steps that are under way
    _updating = False  # in a step of the optimizer, or since one that raised
    _depth = 0  # of the model's calls that are under way
    _evaluates = False  # by the module inside a DDP model

    def __init__(  # noqa: PLR0913 - all but three have a default that fits
        self,
        session: Session,
        gradients: GradientSink,
        optimizer: Any,
        *,
        model: torch.nn.Module | None = None,
        own_sync: bool = True,
        step_waits: bool = False,
        bare: Callable[[bool], None] | None = None,
        agree: Callable[[], bool] | None = None,
        on_forward: Callable[[], None] | None = None,
    ) -> None:
        if bare is None:
            refuse_bare(session.blocks.arms, session.settings)
        self.session = session
        self.gradients = gradients
        self.between: Callable[[], None] = _nothing  # called between two steps
        self.ending: Callable[[], None] = _nothing  # called when it closes, not in a finalizer
        self._own_sync = own_sync
        self._bare = bare
        self._agree = agree or (session.agree if session.switches else None)
        self.on_forward = on_forward
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._leaves: list[str] = []  # names of the modules stamped in sampled steps
        self._calls: Calls | None = None
        self._inner_calls: Calls | None = None  # of the module inside a DDP model, by which scripts evaluate
        self._seeking: EachCall | None = None
        self._sampling: list[Callable[[], object]] = []  # what ends the stamps of the modules
        self._queued = False
        self._following: list[Any] = []  # hooks of the nodes after the one that ran a pass inside the pass
        self._synced = False  # in the current step
        self._in_backward = False  # the optimizer steps inside the backward pass, or beside it
        self._thread = 0  # of the forward passes; 0: not known
        self._late = False  # a step has ended inside the backward pass
        self._broken = False
        self.closed = False
        self._arm: Arm | None = None
        self._version = -1
        self._on_device = session.recorder.device_stream is not None
        put = session.recorder.stamper
        self._optimizer_begin, self._optimizer_end = put(EVENTS["OPTIMIZER_BEGIN"]), put(EVENTS["OPTIMIZER_END"])
        self._forward_begin, self._forward_end = put(EVENTS["FORWARD_BEGIN"]), put(EVENTS["FORWARD_END"])
        self._evaluation_begin = put(EVENTS["FORWARD_BEGIN"], 0, 1)
        followed = next((p.device for p in gradients.parameters), None) if self._on_device else None
        streams = getattr(torch, followed.type) if followed is not None and gradients.own_streams else None
        self._collectives = Collectives(session.recorder, self.failed, followed, streams)
        if optimizer is not None:
            session.optimizer = type(getattr(optimizer, "wraps", optimizer)).__name__
        hooks = (self._before_step, self._after_step, self._beside)
        self._updates = Updates(gradients.parameters, optimizer, *hooks, waits=step_waits)
        if own_sync:
            gradients.on_first = self._backward_begins
        if model is None:
            self._seeking = EachCall(self._holds_all, self._found)
        else:
            self._know(model)
        session.on_close.append(self.close)
        self._choose()
        session.begin()

    def begun_by(self, marks: Any) -> None:
        """Begin the optimizer phase of a step at the pre-hook of `marks` instead of the optimizer's."""
        self._updates.begun_by(marks)

    def close(self, *, in_finalizer: bool = False) -> None:
        """Remove all hooks and return the gradients to the user's own path.

        in_finalizer: the optimizers' hooks stay and do nothing until `remove_hooks`. In a forked child all of it stays.
        """
        if self.closed:
            return
        self.closed = True
        if self.session.in_child:
            return
        self.guarded(self._describe)
        if in_finalizer:
            self._updates.silence()
        else:
            self.guarded(self.ending)
            self._updates.remove()
        self._watch(False)
        self._stop_seeking()
        self._stop_following()
        if self._own_sync:
            self.gradients.close()
            if not (self._queued or self.gradients.pending):  # else a pass under way ends with them
                self.gradients.target(None)  # a destination may hold them
                self.gradients = _Forgotten()
        if self._bare is not None:
            self._bare(True)

    def forget(self) -> None:
        """Close in a finalizer of the optimizer, and keep no parameter.

        The path of the gradients stays: a finalizer may run at another time on another rank.
        """
        self._bare = None
        self.close(in_finalizer=True)
        self.session.on_close.append(self.remove_hooks)
        self.gradients = _Forgotten()

    def remove_hooks(self) -> None:
        """Remove the hooks that a close in a finalizer has left."""
        self._updates.remove()

    def resume(self, step: int) -> None:
        """Leave the current step unrecorded, and begin `step`. Every rank calls it, with the same number."""
        session = self.session
        session.end_range()
        self._late = session.running = False
        session.step = step
        self._choose()
        self.guarded(session.begin)
        self._raise_held()

    def failed(self, error: Exception) -> None:
        """Stop recording and log the reason once."""
        if not self._broken:
            self._broken = True
            with contextlib.suppress(Exception):  # of a handler of the script
                logger.error("measuring has ended, the training goes on: %s: %s", type(error).__name__, error)
                logger.debug("measuring has ended", exc_info=error)
            self.session.notes.append(f"measuring ended at step {self.session.step}: {type(error).__name__}: {error}")
            self._collectives.watch(False)

    def guarded(self, call: Callable[[], Any]) -> None:
        """Call a function that only measures. If it raises, the recording ends and the training continues.

        An exception of the script's signal handler is raised, between two steps once the next step has begun.
        """
        if self._broken:
            return
        try:
            call()
        except Exception as error:
            if not of_handler(error):
                self.failed(error)
            elif self._between_steps:
                self.session.raised.append(error)
            else:
                raise

    def _holds_all(self, module: torch.nn.Module) -> bool:
        """Return whether a module holds all the parameters. The outermost one is the model."""
        own = {id(parameter) for parameter in module.parameters()}
        return all(id(parameter) in own for parameter in self.gradients.parameters)

    def _found(self, model: torch.nn.Module) -> None:
        self._stop_seeking()
        self._know(model)
        if self._arm != BARE:
            self._watch(True)
            self.guarded(self._forward_begin if torch.is_grad_enabled() else self._evaluation_begin)

    def _stop_seeking(self) -> None:
        seeking, self._seeking = self._seeking, None
        if seeking is not None:
            seeking.remove()

    def _know(self, model: torch.nn.Module) -> None:
        def learn() -> None:
            self._leaves = [name for name, _ in leaves(model)]
            self._describe()

        self._model = weakref.ref(model)
        self.guarded(learn)

    def _watch(self, on: bool) -> None:
        """Start or stop stamping the model's calls."""
        model = None if self._model is None else self._model()
        if on and self._calls is None and model is not None:
            self._calls = Calls(model, self._forward_begins, self._forward_ends)
            inner = inside(model)
            if inner is not None and not compiles():
                self._inner_calls = Calls(inner, self._inner_begins, self._inner_ends)
        elif not on and self._calls is not None:
            self._calls.remove()
            if self._inner_calls is not None:
                self._inner_calls.remove()
            self._calls = self._inner_calls = None
        if not on:
            self._stop_sampling()
        self._collectives.watch(on and self._arm != BARE and not self.closed and not self._broken)

    def _inner_begins(self) -> None:
        """Stamp an evaluation that the script makes by the module inside its DDP model."""
        if not (self._depth or torch.is_grad_enabled() or self.session.in_child):
            self._evaluates = True
            self.guarded(self._evaluation_begin)

    def _inner_ends(self) -> None:
        if self._evaluates:
            self._evaluates = False
            self.guarded(self._forward_end)

    def _forward_begins(self) -> None:
        self._depth += 1
        if self.session.in_child:
            self.gradients.paused = True
            return
        self._collectives.forward(True)
        trains = torch.is_grad_enabled()
        if trains or _in_function(_FORWARD):
            self._training_goes_on()
        if self.on_forward is not None:
            self.on_forward()
        if self._arm != BARE:
            self.guarded(self._forward_begin if trains else self._evaluation_begin)
            if trains and self.session.sampled:
                self.guarded(self._sample)

    def _training_goes_on(self) -> None:
        """End what is before a forward pass. An evaluation ends nothing: one rank, or another thread, may make it."""
        self._updating = False
        self._thread = threading.get_ident()
        if self._steps and not step_frames():  # a step has raised
            self._steps, self._collectives.in_optimizer = 0, False
        if _c._current_graph_task_id() != -1:
            return
        if self._queued and torch.is_grad_enabled():
            self._drop_pass()
        if self._late:
            self._late = False
            self._next_step()

    def _forward_ends(self) -> None:
        self._depth -= 1
        self._collectives.forward(False)
        self._stop_sampling()
        if self._arm != BARE:
            self.guarded(self._forward_end)
            if self._on_device and self.session.sampled:  # its times fill the queue of the clock soon
                self.guarded(self.session.recorder.read)

    def _sample(self) -> None:
        """Stamp every module of this forward pass that Python calls."""
        model = None if self._model is None else self._model()
        if model is None or self._sampling or self._compiles:
            return
        found = list(leaves(model))
        if [name for name, _ in found] != self._leaves:
            return
        self._compiles = compiles()
        if self._compiles:
            self.session.notes.append("forward times by module are not recorded: the training uses torch.compile")
            return
        put, inner = self.session.recorder.stamper, inside(model)
        for index, (_, module) in enumerate(found):
            begin, end = put(EVENTS["FORWARD_BEGIN"], index + 1), put(EVENTS["FORWARD_END"], index + 1)
            if module is model or module is inner:  # they are watched already, and begin now
                begin()
                self._sampling.append(end)
            elif not (watched(module) or isinstance(module, torch.jit.ScriptModule)):
                self._sampling.append(Calls(module, begin, end).remove)

    def _stop_sampling(self) -> None:
        for end in self._sampling:
            end()
        self._sampling.clear()

    def _backward_begins(self) -> None:
        """Handle the first gradient of a backward pass."""
        if not self._queued and self._arm != BARE and _c._current_graph_task_id() != -1:
            self._queued = True
            if _in_function(_BACKWARD):
                self.gradients.hold()  # a later function of the pass may use the same parameters
            _engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        node = _current_node()  # of the outer pass, if this one ran inside it
        if self._queued and (node is None or not self._follow(node)):
            self._queued = False
            self._sync()

    def _follow(self, node: Any) -> bool:
        """Call `_backward_ends` at the end of the pass that runs a node. Returns False if no other node follows it."""
        self._stop_following()
        after = [following for following, _ in node.next_functions if following is not None]
        self._following = [following.register_prehook(self._outer_goes_on) for following in after]
        return bool(after)

    def _stop_following(self) -> None:
        for handle in self._following:
            handle.remove()
        self._following.clear()

    def _outer_goes_on(self, _gradients: Any) -> None:
        self._stop_following()
        _engine.queue_callback(self._backward_ends)

    def _drop_pass(self) -> None:
        """End a backward pass that raised: autograd has dropped its callback.

        Raises netbottleneck.Error unless the pass raised on all ranks.
        """
        place = self.session.place
        if place.size > 1:
            try:
                self.session.control.exchange(b"dropped", limit_s=self.session.settings.timeout_s)
            except (*FAILURES, HorovodInternalError) as error:
                raise Error(
                    errno.EPROTO,
                    f"a backward pass of rank {place.rank} raised an exception, and not that of every rank: gradients "
                    f"of this pass cannot be averaged ({error})",
                ) from error
        self._stop_following()
        self.gradients.discard()
        self._queued = False

    def _sync(self) -> None:
        self._synced = True
        self.gradients.flush()
        self.gradients.wait()

    def _before_step(self) -> None:
        if self.session.in_child:
            return
        if (
            self._own_sync
            and not self.gradients.paused
            and (not (self._synced or self._updating) or self._queued or self.gradients.pending)
        ):
            self._queued = False
            self._sync()
        self._synced = False
        self._updating = True
        self._count_step(True)

    def _beside(self, begins: bool) -> None:
        """Stamp the begin or the end of a step of an optimizer that ends no step."""
        if self.closed or self._arm == BARE:
            return
        self._count_step(begins)
        if self._steps == 0:
            self.guarded(self._optimizer_end)

    def _count_step(self, begins: bool) -> None:
        """Note the begin or the end of an optimizer's step; stamp the begin of the outermost one."""
        self._steps = self._steps + 1 if begins else max(0, self._steps - 1)
        self._collectives.in_optimizer = self._steps > 0
        if begins and self._steps == 1:
            self.guarded(self._optimizer_begin)

    def _after_step(self) -> None:
        self._updating = False
        self._count_step(False)
        if self.closed or self.session.in_child:
            return
        if _c._current_graph_task_id() != -1 or self._thread not in (0, threading.get_ident()):
            # The gradients' path must not change during a backward pass, of this thread or of that of the forward
            # passes: the next forward pass ends this step.
            self._late = self._in_backward = True
            self._watch(True)
            return
        self._next_step()

    def _next_step(self) -> None:
        self._stop_seeking()  # if no module holds all parameters, there are no forward times
        self._between_steps = True
        try:
            self._change_steps()
        finally:
            self._between_steps = False
        self._raise_held()

    def _raise_held(self) -> None:
        """Raise the first exception that a signal handler of the script raised while the step changed."""
        raised = self.session.raised
        if raised:
            del raised[1:]
            raise raised.pop()

    def _change_steps(self) -> None:
        self.guarded(self._optimizer_end)
        if self._broken:
            self.session.end(recorded=False)
        self.guarded(self.session.end)
        if self._on_device:
            self.guarded(self.session.recorder.read)
        if self.gradients.version != self._version:
            self.guarded(self._describe)
        self.guarded(self.between)
        self._choose()
        self.guarded(self.session.begin)

    def _choose(self) -> None:
        """Switch the gradients to the arm of the next step."""
        session, before = self.session, self._arm
        self.gradients.detailed = session.sampled
        ends = session.arm != before or session.block_ends
        if before is not None and ends and self._agree is not None and not self._agree():
            session.stay(before)
        arm = session.arm
        if arm == before:
            return
        self._arm = arm
        if self._bare is not None and (BARE in (before, arm) or before is None):
            self._bare(arm == BARE)
        self.gradients.paused = arm == BARE
        self._watch(arm != BARE or self._in_backward)
        if arm != BARE:
            self.session.arms[arm].target(self.gradients)

    def _describe(self) -> None:
        g = self.gradients
        layout = described(g.tensors, g.buckets, key_of)
        earlier = self.session.described.get("buckets", []) if self._version != -1 else []
        names = {bucket["name"] for bucket in layout["buckets"]}
        layout["buckets"] += [bucket for bucket in earlier if bucket["name"] not in names]
        self._version = g.version
        self.session.describe(modules=self._leaves, **layout)


def leaves(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield name and module of each module without children. Names leave out DDP's wrapper."""
    inner = uncompiled(model)
    inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
    return ((name, module) for name, module in inner.named_modules() if not any(module.children()))


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that torch.compile wrapped, or the model itself."""
    # A DDP class of the script's may look up names in its module, which torch.compile may have wrapped.
    if isinstance(model, DistributedDataParallel):
        return model
    try:
        inner: torch.nn.Module = getattr(model, "_orig_mod", model)
    except Exception:  # code of the script's class
        return model
    return inner


def inside(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module inside a DDP model, None for any other model."""
    return model.module if isinstance(model, DistributedDataParallel) else None


def compiles() -> bool:
    """Return whether torch.compile was called in this process: stamps around modules would cause recompilations."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # torch.optim imports it
    patch: Any = getattr(
        getattr(frames, "TorchPatcher", None), "patch", None
    )  # it is called once, by the first compiler
    return frames is not None and (not hasattr(patch, "cache_info") or patch.cache_info().currsize > 0)


# Cross-check of our stamps against DDP's own times of its backward passes. The result goes into the rank's record; a
# disagreement is logged as a warning.
#
# DDP's logger has the wall times at which a pass began, its first bucket was sent, and its buckets were reduced. The
# last two lie between two of our stamps, so the only tolerance is the error of the mapping between the two clocks. The
# begin that we derive from the ready times (see Recorder.put_ready) is never before the stamp that they count from. DDP
# takes that just before the logger's, and its thread may be interrupted between them: so most passes decide.

FIRST, EVERY = 10, 100  # DDP keeps the times of its first 10 passes, then of every 100th
SLEW = 2000  # a clock under adjustment drifts by at most 1 ns in SLEW ns


class Sample(NamedTuple):
    """DDP's times of one backward pass, on the recorder's clock within `error_ns`."""

    begin_ns: int
    sent_ns: int
    end_ns: int
    error_ns: int


class Apart(NamedTuple):
    """A disagreement: DDP's time lies this many ns outside the interval between our two stamps."""

    what: str
    ns: int


class Crosscheck:
    """Collects DDP's times between steps and compares them with our stamps when the session closes."""

    def __init__(self, ddp: DistributedDataParallel, hook: ReducerGroup, session: Session) -> None:
        self._ddp = weakref.ref(ddp)
        self._hook = hook
        self._session = session
        self._samples: list[tuple[Sample, Pass]] = []
        self._seen = 0
        self._last: Pass | None = None
        self._offsets: deque[int] = deque(maxlen=3)  # wall clock minus ours, at the last three looks

    def look(self) -> None:
        """Store DDP's times of the pass before the last one. Call between two steps."""
        ddp, count = self._ddp(), self._hook.count
        if ddp is None:
            return
        if count > FIRST + 2 and count % EVERY > 2:
            self._offsets.clear()
            return
        before, wall, after = job.core().now_ns(), time.time_ns(), job.core().now_ns()
        self._offsets.append(wall - (before + after) // 2)
        data: Mapping[str, Any] = ddp._get_ddp_logging_data()
        complete = len(self._offsets) == self._offsets.maxlen  # from before the pass to now
        if complete and int(data.get("iteration", 0)) > self._seen and "backward_comm_time_end" in data:
            self._seen = int(data["iteration"])
            self._keep(data, after, (after - before) // 2)
        self._last = self._hook.last_pass

    def _keep(self, data: Mapping[str, Any], now_ns: int, error: int) -> None:
        ours = self._last
        moved = max(self._offsets) - min(self._offsets)  # setting the wall clock moves it in one jump
        begin, sent, end = (
            int(data[f"backward_{what}"]) - self._offsets[-1]
            for what in ("compute_time_start", "comm_time_start", "comm_time_end")
        )
        error += moved + (now_ns - end) // SLEW + 1
        if ours is not None and begin - error <= ours.sent_ns <= end + error:
            self._samples.append((Sample(begin, sent, end, error), ours))

    def compare(self) -> None:
        """Compare the stored times with ours; put the result into the record and log a disagreement."""
        found = compared(self._samples)
        late = [ours.begin_ns - sample.begin_ns for sample, ours in self._samples if ours.begin_ns]
        worst = max(found, key=lambda apart: apart.ns, default=None)
        self._session.described["ddp_times"] = {
            "passes": len(self._samples),
            "begin_late_ns": {"median": int(np.median(late)), "max": max(late)} if late else None,
            "apart": len(found),
            "worst": worst and {"what": worst.what, "ns": worst.ns},
        }
        if worst is not None:
            logger.warning(
                "DDP's own times of %d passes and ours are apart at %d moments, most at %s: %d us",
                len(self._samples),
                len(found),
                worst.what,
                worst.ns // 1000,
            )


def compared(passes: Sequence[tuple[Sample, Pass]]) -> list[Apart]:
    """Return the times of DDP that lie outside our stamps of the same passes."""
    found, begins = [], []
    for sample, ours in passes:
        moments = [
            ("the first bucket sent", _outside(sample.sent_ns, sample.begin_ns, ours.sent_ns)),
            ("all buckets back", _outside(sample.end_ns, ours.wait_begin_ns, ours.wait_end_ns)),
        ]
        found += [Apart(what, ns - sample.error_ns) for what, ns in moments]
        if ours.begin_ns:
            begins.append(Apart("the begin of the pass", sample.begin_ns - ours.begin_ns - sample.error_ns))
    early = [apart for apart in begins if apart.ns > 0]
    found += early if 2 * len(early) > len(begins) else []
    return [apart for apart in found if apart.ns > 0]


def _outside(at: int, begin: int, end: int) -> int:
    """Return by how many ns a time lies outside an interval."""
    return max(begin - at, at - end, 0)
