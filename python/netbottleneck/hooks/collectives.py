"""Calls of the script, recorded while a model is measured: collectives beside the gradients, and torch.save.

Those of our own API are observed where it submits to the job and waits for it (job.Watcher). The others, of
torch.distributed, have no such place in our code: they are observed at the methods of ProcessGroup, Work and Future,
which its functions call. The functions themselves stay as they are: torch compares them by identity (torch.compile,
_coalescing_manager), and scripts import them by name. A dispatch mode or a profiler would run code for every operator,
and a second profiler ends the user's. Functional collectives, those of DTensor too, are operators in C++: they are
observed where Python calls these. One that C++ calls itself, such as the backward pass of an operator of
_c10d_functional_autograd, is not seen here: interface bytes show it.
"""

import atexit
import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist

from netbottleneck.errors import of_handler
from netbottleneck.hooks.calls import eager
from netbottleneck.hooks.recorded_calls import (
    METHODS,
    OPERATORS,
    SPACES,
    Call,
    address,
    bytes_submitted,
    is_inline,
    payload_of,
    tensors_in,
    tensors_of,
)
from netbottleneck.runtime import job
from netbottleneck.runtime.communicators import APART, key_of, quietly
from netbottleneck.runtime.session import FINISH_S
from netbottleneck.trace.ring_file import EVENTS
from netbottleneck.trace.ring_reader import KINDS, PHASES, STOCK_KINDS

if TYPE_CHECKING:
    from netbottleneck import _core

_SUBMIT, _START, _DONE = EVENTS["OP_SUBMIT"], EVENTS["OP_START"], EVENTS["OP_DONE"]
_SAVE_BEGIN, _SAVE_END = EVENTS["CHECKPOINT_BEGIN"], EVENTS["CHECKPOINT_END"]
_WAIT_BEGIN, _WAIT_END = EVENTS["WAIT_BEGIN"], EVENTS["WAIT_END"]
_STAGES = (EVENTS["OP_AGREED"], _START, EVENTS["OP_FIRST_BYTE"], _DONE)
_SUBMITTED_MAX = 4096
_CODES = {name: code for code, name in (*enumerate(KINDS), *STOCK_KINDS.items())}

_c: Any = torch._C
_ProcessGroup: Any = dist.ProcessGroup
_Work: Any = dist.distributed_c10d.Work


# What torch.save calls: it opens an archive and closes it when all is written, or writes a file of the older format.
_OPENS, _WRITES = "_open_zipfile_writer", "_legacy_save"
# What the functions of safetensors.torch call to save, one after another. Other modules import those functions by name.
_SAFETENSORS, _SERIALIZES = "safetensors.torch", ("_flatten", "_flatten_as_ptr", "serialize", "serialize_file")
# DDP's broadcast of buffers, a function of torch.distributed: its first argument is the group.
_BUFFERS = "_broadcast_coalesced"


class _Sent(NamedTuple):
    """A recorded call. host: its tensors are in host memory; else its stamps are a GPU's times.

    seen: its end has been stamped. over: stamps it if a callback, which may wait for the GIL, has not. waiting: the
    training's stream waits since the call, as torch runs one that is not asynchronous on that stream itself.
    """

    key: int
    turn: int
    host: bool = True
    seen: bool = False
    over: "Callable[[], None] | None" = None
    waiting: bool = False


class Collectives:
    """Records the collectives of this process while `watch` is on.

    failed: called with an exception of the measurement itself; the calls go on unrecorded. device: the GPU whose times
    the recorder has; None: calls on tensors of a GPU are not recorded. streams: torch's module of its streams, if some
    of them carry collectives beside the training's stream; a wait is recorded where the latter waits for an event.
    """

    def __init__(
        self,
        recorder: "_core.Recorder",
        failed: Callable[[Exception], None],
        device: torch.device | None = None,
        streams: Any = None,
    ) -> None:
        self._device = device
        self.streams = streams
        self._stream: Any = None  # the training's
        self.in_forward = False
        self.in_optimizer = False
        self._recorder: _core.Recorder | None = recorder
        _RECORDERS.append(recorder)
        self._failed = failed
        self._thread = threading.get_ident()
        self.pid = os.getpid()
        self._keys: dict[str, int] = {}
        self._rounds: Counter[int] = Counter()
        self._works: weakref.WeakKeyDictionary[Any, _Sent] = weakref.WeakKeyDictionary()
        self._results: dict[int, _Sent] = {}  # of functional collectives, by address, until somebody waits for them
        self._job: job.Job | None = None
        self._submitted: dict[Any, _Sent] = {}  # to the job, and not seen to be done

    def watch(self, on: bool) -> None:
        """Start or stop recording. Without a recording, torch has its own methods."""
        if on != (self in _OBSERVERS):
            self._guarded(self._start if on else self._stop)

    def _start(self) -> None:
        _OBSERVERS.append(self)
        _patch()
        self._job = job.current() if job.is_started() else None
        if self._job is not None:
            self._job.watcher = self

    def _stop(self) -> None:
        _OBSERVERS.remove(self)
        if self._job is not None and self._job.watcher is self:
            self._job.watcher = None
        self._submitted.clear()
        self._results.clear()
        if not _OBSERVERS:
            _restore()

    def forward(self, begins: bool) -> None:
        """Note the begin or the end of the model's forward pass. The thread of one with gradients is the training's."""
        self.in_forward = begins
        if torch.is_grad_enabled():
            self._thread = threading.get_ident()
        if begins and self.streams is not None:
            self._stream = self._guarded(self.streams.current_stream, self._device)

    def begins(self, call: Call, group: Any, values: tuple[Any, ...]) -> _Sent | None:
        """Stamp the submission of a call; None if it is not recorded. values: its arguments without the group."""
        return cast("_Sent | None", self._guarded(self._begin, call, group, values))

    def handed(self, sent: _Sent, work: Any) -> None:
        """Stamp that a call has returned, and the end of its work when it ends."""
        self._guarded(self._handed, sent, work)

    def returned(self, sent: _Sent, results: Any) -> None:
        """Stamp that a functional collective has returned; the end of the wait for its first result is its end."""
        self._guarded(self._returned, sent, results)

    def waits_for(self, result: torch.Tensor) -> "_Blocked | None":
        """Return a context in which a thread waits for a result; None: of no recorded call, or of one that is over."""
        sent = self._guarded(lambda: self._results.pop(address(result), None))
        return None if sent is None else _Blocked(self, sent)

    def waits_inside(self, sent: _Sent) -> "_Blocked":
        """Return a context in which a call blocks until it is done."""
        return _Blocked(self, sent, starts=True)

    def waits(self, work: Any) -> "_Blocked":
        """Return a context in which a thread waits for a work."""
        return _Blocked(self, self._guarded(self._works.get, work))

    def trains(self) -> bool:
        """Return whether this is the training's thread, or one that runs a backward pass."""
        return threading.get_ident() == self._thread or _c._current_graph_task_id() != -1

    def stalls(self, stream: Any = None) -> bool:
        """Return whether a wait on this stream is the training's. None: on the current one."""
        if self.streams is None or self._stream is None:
            return stream is None and self.trains()
        if (stream is not None and stream != self._stream) or not self.trains():
            return False
        return bool(self._guarded(self.streams.current_stream, self._device) == self._stream)

    def put(self, kind: int, key: int, turn: int = 0, *, host: bool = False) -> None:
        """Stamp an event. host: with the host's time, also if the model is on a GPU."""
        if self._recorder is not None:
            self._guarded(functools.partial(self._recorder.put, kind, key, turn, host=host))

    def ended(self, sent: _Sent | None, work: Any = None) -> None:
        """Stamp the end of a call, once."""
        if sent is not None and sent.over is not None:
            self._guarded(lambda: work.is_completed() and sent.over())  # type: ignore[misc]
        elif sent is not None and not sent.seen:
            self.put(_DONE, sent.key, sent.turn, host=sent.host)
            if work is not None:
                self._guarded(self._works.__setitem__, work, sent._replace(seen=True, waiting=False))

    def submitted(self, work: Any, name: str, about: tuple[int, Any, int, int]) -> None:
        """Stamp the submission of an operation of our own API."""
        self._guarded(self._submit, work, name, about)

    def completed(self, works: Sequence[Any]) -> None:
        """Stamp those of these operations that are done, at their own times."""
        self._guarded(self._complete, works)

    def blocks(self, works: Sequence[Any]) -> Callable[[], None]:
        """Stamp that the training's thread waits for operations of our own API; return what stamps the end."""
        sent = next((self._submitted[work] for work in works if work in self._submitted), None)
        if sent is None or not self.trains():
            return lambda: self.completed(works)
        self.put(_WAIT_BEGIN, sent.key)

        def over() -> None:
            self.put(_WAIT_END, sent.key)
            self.completed(works)

        return over

    def _submit(self, work: Any, name: str, about: tuple[int, Any, int, int]) -> None:
        kind, memory, dtype, group = about
        if self._recorder is None or self._job is None:
            return
        key = self._keys.get(name) or self._keys.setdefault(name, key_of(name))
        turn = self._rounds[key]
        self._rounds[key] += 1
        ranks = self._job.process_sets[group].ranks if group in self._job.process_sets else ()
        code = kind | dtype << 8 | PHASES.index(self._phase()) << 16
        # The work's own time: it may be done by now, and the record is read in the order of the times.
        self._recorder.put_at(
            work.times()[0], _SUBMIT, key, turn, bytes_submitted(memory), 0, len(ranks or ()) << 32, code
        )
        if len(self._submitted) >= _SUBMITTED_MAX:
            self._submitted.clear()
        self._submitted[work] = _Sent(key, turn)

    def _complete(self, works: Sequence[Any]) -> None:
        for work in works:
            sent = self._submitted.get(work)
            if sent is None or work.times()[-1] == 0:
                continue
            del self._submitted[work]
            for kind, at in zip(_STAGES, work.times()[1:], strict=True):
                if at and self._recorder is not None:
                    self._recorder.put_at(at, kind, sent.key, sent.turn)

    def _phase(self) -> str:
        if _c._current_graph_task_id() != -1:
            return "backward"
        if threading.get_ident() != self._thread:
            return "other"
        return "forward" if self.in_forward else "optimizer" if self.in_optimizer else "other"

    def _begin(self, call: Call, group: Any, values: tuple[Any, ...]) -> _Sent | None:
        tensors = tensors_of(call, values)
        host = all(tensor.is_cpu for tensor in tensors)
        if self._recorder is None or not (host or self._follows(tensors)):
            return None
        size = group.size()
        nbytes, dtype = payload_of(call, size, tensors)
        name = f"{_name(group)}/{call.kind}"
        if call.kind in ("send", "recv"):
            name += f"/{group.rank()}"  # no operation of all ranks
        key = self._keys.get(name) or self._keys.setdefault(name, key_of(f"torch.distributed/{name}"))
        turn = self._rounds[key]
        self._rounds[key] += 1
        about = _CODES[call.kind] | dtype << 8 | PHASES.index(self._phase()) << 16
        self._recorder.put(_SUBMIT, key, turn, nbytes, 0, size << 32, about, host=host)
        if host or call.blocks:
            return _Sent(key, turn, host)
        # It may run on this stream, which is then behind it when the call returns.
        self._recorder.put(_START, key, turn)
        waiting = is_inline(values) and self.stalls()
        if waiting:
            self._recorder.put(_WAIT_BEGIN, key)
        return _Sent(key, turn, host, waiting=waiting)

    def _follows(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return True if all tensors are on the GPU that holds the model."""
        return self._device is not None and all(tensor.device == self._device for tensor in tensors)

    def _handed(self, sent: _Sent, work: Any) -> None:
        if self._recorder is None:
            return
        self._started(sent)
        if work is None:
            self.ended(sent)
            return
        future = None
        # The future of a work in Python may take a thread. A callback of a GPU's runs on a stream of torch's pool: the
        # script may use that stream, which would then wait, too.
        if type(work) is _Work and sent.host:
            try:
                future = work.get_future()
            except RuntimeError:  # of a send or a receive
                future = None
        if future is not None:
            done = self._recorder.stamper(_DONE, sent.key, sent.turn, awaited=True, host=True)
            sent = sent._replace(over=done.twin())
            future.add_done_callback(done)
        self._works[work] = sent

    def _started(self, sent: _Sent) -> None:
        """Stamp that a call on tensors in host memory has returned."""
        if self._recorder is not None and sent.host:
            self._recorder.put(_START, sent.key, sent.turn, host=True)

    def _returned(self, sent: _Sent, results: Any) -> None:
        if self._recorder is None:
            return
        self._started(sent)
        places = [place for tensor in tensors_in(results) if (place := address(tensor))]
        if not places:
            self.ended(sent)
            return
        if len(self._results) >= _SUBMITTED_MAX:
            self._results.clear()
        self._results[places[0]] = sent

    def _guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:
            if of_handler(error):
                raise
            self._recorder = None
            self._failed(error)
            return None


class _Blocked:
    """A context in which a thread waits: stamps the wait if it is the training's, and then the end of the call."""

    def __init__(self, observer: Collectives, sent: _Sent | None, *, starts: bool = False) -> None:
        self._observer, self._sent = observer, sent
        self._key = 0 if sent is None else sent.key
        self._trains = observer.stalls()
        if starts and sent is not None:
            observer.put(_START, sent.key, sent.turn, host=sent.host)
        if self._trains and not (sent is not None and sent.waiting):
            observer.put(_WAIT_BEGIN, self._key)

    def over(self, work: Any = None) -> None:
        """Stamp the end."""
        self._observer.ended(self._sent, work)
        if self._trains:
            self._observer.put(_WAIT_END, self._key)


def _name(group: Any) -> str:
    """Return a name of a group that is the same on its ranks, also where the script gave it none."""
    try:
        return str(group.group_name)
    except RuntimeError:
        return f"{type(group).__name__} of {group.size()} ranks"


# The end of the process. Ends of operations are stamped by callbacks, for which a thread of torch takes the GIL. While
# the interpreter ends, that aborts the process, or blocks for good.

_RECORDERS: list["_core.Recorder"] = []


@atexit.register
def _settle() -> None:
    """Wait until the callbacks are over.

    A script that ends well waits as long without us: the end of a group waits for its operations. One that failed keeps
    its groups in the traceback, and does not wait. After FINISH_S they are kept for good, as their end calls callbacks.
    """
    failed = hasattr(sys, "last_type")
    limit_s = FINISH_S if failed else dist.default_pg_timeout.total_seconds()
    left, deadline = _RECORDERS, time.monotonic() + limit_s
    while left := [recorder for recorder in left if not recorder.settle()]:
        if time.monotonic() >= deadline:
            for group in getattr(dist.distributed_c10d._world, "pg_map", ()):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            return


# The wrappers. Each has the name of what it wraps, by which pybind11 ends the recursion of a class in Python.

_OBSERVERS: list[Collectives] = []
# (class or module, name) -> our function and the one before it; None: inherited. Ours stays below one that others add.
_PATCHES: dict[tuple[Any, str], tuple[Any, Any]] = {}


class _Bucket:
    """What a communication hook moves for one bucket. ahead: its callbacks that have not run, see _code."""

    def __init__(self) -> None:
        self.nbytes = 0.0
        self.ahead: list[Any] = []


class _Part(NamedTuple):
    """A part of a communication hook: the hook itself, a callback of it, or a call that counts as a whole."""

    bucket: _Bucket
    callback: Any = None  # its _code
    counted: bool = False


class _Hook(threading.local):
    """The part of a communication hook that runs in this thread."""

    part: _Part | None = None

    def runs(self, part: _Part, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call what is a part of a hook. It is not recorded as the script's."""
        former, self.part = self.part, part
        try:
            return quietly(function, *args, **kwargs)
        finally:
            self.part = former

    def counts(self, call: Call, group: Any, values: tuple[Any, ...]) -> _Part | None:
        """Count a call: the tensor bytes of an all-reduce of all ranks that moves as many bytes over a link.

        Returns the part that the call is: calls that it makes in turn do not count. None: no hook makes the call.
        """
        part = self.part
        if part is None or part.counted:
            return None
        if part.callback is not None:
            _CALLS[part.callback] = True
        with contextlib.suppress(Exception):  # the call itself tells what is wrong with it
            size, world = group.size(), dist.get_world_size()
            own = {"allreduce": 2.0 - 2.0 / size, "broadcast": 1.0, "reduce": 1.0, "send": 1.0, "recv": 0.0}
            factor = own.get(call.kind, 1.0 - 1.0 / size) / (2.0 - 2.0 / world)
            part.bucket.nbytes += factor * payload_of(call, size, tensors_of(call, values))[0]
        return part._replace(counted=True)

    def goes_on(self, callback: Any) -> Any:
        """Return a callback that runs as a part of the hook that makes it; the callback itself outside a hook."""
        part = self.part
        if part is None or not callable(callback):
            return callback
        if part.counted:
            return functools.partial(self.runs, part, callback)
        code = part.callback or _code(callback)  # one that a callback makes is a part of it
        inside, ahead = _Part(part.bucket, code), part.bucket.ahead
        ahead.append(code)

        def call(*args: Any) -> Any:
            try:
                return self.runs(inside, callback, *args)
            finally:
                ahead.remove(code)
                if code not in ahead:
                    _CALLS.setdefault(code, False)

        return call


_HOOK = _Hook()
# Callbacks of hooks that have run: whether one of this code has communicated.
_CALLS: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _code(callback: Any) -> Any:
    """Return what is the same each time that a script makes a callback: its code, or its type."""
    while isinstance(callback, functools.partial | MethodType):
        callback = callback.func if isinstance(callback, functools.partial) else callback.__func__
    return callback.__code__ if isinstance(callback, FunctionType) else type(callback)


def moving(hook: Callable[..., Any], *args: Any) -> tuple[Any, int | None]:
    """Call a communication hook quietly; return its result and the tensor bytes that its calls move.

    0: unknown, as a callback of the hook that has not run may move more. None: not seen.
    """
    bucket = _Bucket()
    result = _HOOK.runs(_Part(bucket), hook, *args)
    known = all(_CALLS.get(code) is False for code in tuple(bucket.ahead))
    return result, None if _observer() is None else round(bucket.nbytes) if known else 0


def _observer() -> Collectives | None:
    """Return who records in this process; none in a forked child."""
    return _OBSERVERS[-1] if _OBSERVERS and _OBSERVERS[-1].pid == os.getpid() else None


def _method(call: Call, former: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        part = _HOOK.counts(call, self, (*args, *kwargs.values()))
        if part is not None:
            return _HOOK.runs(part, former, self, *args, **kwargs)
        observer = None if APART.inside else _observer()
        if observer is None:
            return former(self, *args, **kwargs)
        sent = observer.begins(call, self, (*args, *kwargs.values()))
        if sent is None:
            return former(self, *args, **kwargs)
        if call.blocks:
            blocked = observer.waits_inside(sent)
            try:
                return quietly(former, self, *args, **kwargs)
            finally:
                blocked.over()
        work = quietly(former, self, *args, **kwargs)
        observer.handed(sent, work)
        return work

    return method


def _buffers(former: Any) -> Any:
    method = _method(Call("broadcast", blocks=True), former)

    def broadcast(process_group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return method(process_group, tensors, *args, **kwargs)

    return broadcast


def _wait(former: Any) -> Any:
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        observer = _observer()
        if observer is None:
            return former(self, *args, **kwargs)
        blocked = observer.waits(self)
        try:
            return former(self, *args, **kwargs)
        finally:
            blocked.over(self)

    return wait


def _then(former: Any) -> Any:
    def then(self: Any, *args: Any, **kwargs: Any) -> Any:
        return former(self, *map(_HOOK.goes_on, args), **kwargs)

    return then


def _wait_event(former: Any) -> Any:
    def wait_event(self: Any, *args: Any, **kwargs: Any) -> Any:
        observer = _observer()
        if observer is None or not observer.stalls(self):
            return former(self, *args, **kwargs)
        observer.put(_WAIT_BEGIN, 0)
        try:
            return former(self, *args, **kwargs)
        finally:
            observer.put(_WAIT_END, 0)

    return wait_event


class _Operator:
    """Stands for what an operator of torch calls. The operator's hash is that of this object: it stays as it was."""

    _former: Any = None

    def __init__(self, former: Any) -> None:
        self._former = former

    def __hash__(self) -> int:
        return hash(self._former)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._former, name)


class _Functional(_Operator):
    """Records a functional collective on plain tensors. One on others comes here again with those that they hold."""

    def __init__(self, former: Any, call: Call) -> None:
        super().__init__(former)
        self._call = call

    @eager
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        observer = None if APART.inside else _observer()
        values = (*args, *kwargs.values())
        if (_HOOK.part is None and observer is None) or (group := _group_of(values)) is None or not _plain(values):
            return self._former(*args, **kwargs)
        if observer is None:
            part = _HOOK.counts(self._call, group, values)
            return self._former(*args, **kwargs) if part is None else _HOOK.runs(part, self._former, *args, **kwargs)
        sent = observer.begins(self._call, group, values)
        if sent is None:
            return self._former(*args, **kwargs)
        results = quietly(self._former, *args, **kwargs)
        observer.returned(sent, results)
        return results


class _WaitTensor(_Operator):
    """Records the wait for the result of a functional collective."""

    @eager
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        observer, values = _observer(), (*args, *kwargs.values())
        blocked = observer.waits_for(values[0]) if observer is not None and values and _plain(values) else None
        if blocked is None:
            return self._former(*args, **kwargs)
        try:
            return self._former(*args, **kwargs)
        finally:
            blocked.over()


def _plain(values: tuple[Any, ...]) -> bool:
    """Return whether all tensors are in memory, and none is of a class with operators of its own."""
    return all(type(one) in (torch.Tensor, torch.nn.Parameter) and not one.is_meta for one in tensors_in(values))


def _group_of(values: tuple[Any, ...]) -> Any:
    """Return the group that an operator's arguments name; None: none, or one that records itself."""
    for value in reversed(values):
        group = value
        if isinstance(value, str):
            with contextlib.suppress(Exception):  # the name of a reduction, or one that the operator refuses
                group = _c._distributed_c10d._resolve_process_group(value)
        if isinstance(group, _ProcessGroup):
            return None if getattr(group, "records_itself", False) else group
    return None


class _Archive:
    """Stands for the context of the archive that torch.save writes: a checkpoint, until its end."""

    def __init__(self, observer: Collectives, opened: Any) -> None:
        self._observer, self._opened = observer, opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __enter__(self) -> Any:
        return self._opened.__enter__()

    def __exit__(self, *error: object) -> Any:
        try:
            return self._opened.__exit__(*error)
        finally:
            self._observer.put(_SAVE_END, 0)


def _saves(former: Any, *, opens: bool) -> Any:
    """Stamp a checkpoint around a call, or if it `opens` an archive, until the end of that."""

    def save(*args: Any, **kwargs: Any) -> Any:
        observer = _observer()
        if observer is None or not observer.trains():
            return former(*args, **kwargs)
        observer.put(_SAVE_BEGIN, 0)
        opened = None
        try:
            made = former(*args, **kwargs)
            opened = _Archive(observer, made) if opens else None
        finally:
            if opened is None:
                observer.put(_SAVE_END, 0)
        return made if opened is None else opened

    return save


def _classes(base: Any, name: str) -> list[Any]:
    """Return a class, and those below it that have a method of their own, except ours that records itself."""
    found, left = [], [base]
    while left:
        cls = left.pop()
        left += cls.__subclasses__()
        if (cls is base or name in vars(cls)) and not getattr(cls, "records_itself", False) and hasattr(cls, name):
            found.append(cls)
    return found


def _put(owner: Any, name: str, made: Any) -> None:
    made.__code__ = made.__code__.replace(co_name=name)
    former = getattr(owner, name)
    for what in ("__name__", "__qualname__", "__doc__", "__module__"):
        setattr(made, what, getattr(former, what, getattr(made, what)))
    ours = eager(made)
    _PATCHES[owner, name] = ours, vars(owner).get(name)
    setattr(owner, name, ours)


def _put_operator(space: str, name: str, made: Callable[[Any], _Operator]) -> None:
    packet = getattr(getattr(torch.ops, space), name, None)
    for owner in filter(None, (packet, getattr(packet, "default", None))):
        if "_op" in vars(owner) and (owner, "_op") not in _PATCHES:
            ours = made(vars(owner)["_op"])
            _PATCHES[owner, "_op"] = ours, vars(owner)["_op"]
            owner._op = ours


def _wrap(owner: Any, name: str, made: Callable[[Any], Any]) -> None:
    """Put a wrapper of what has this name, if there is any, and no wrapper yet."""
    if hasattr(owner, name) and (owner, name) not in _PATCHES:
        _put(owner, name, made(getattr(owner, name)))


def _patch() -> None:
    for name, call in METHODS.items():
        for cls in _classes(_ProcessGroup, name):
            _wrap(cls, name, functools.partial(_method, call))
    for cls in (*_classes(_Work, "wait"), _c.Future):  # the classes of futures in Python call that one
        _wrap(cls, "wait", _wait)
    for name in ("then", "add_done_callback"):
        _wrap(_c.Future, name, _then)
    streams = None if _observer() is None else _OBSERVERS[-1].streams
    if streams is not None:
        _wrap(streams.Stream, "wait_event", _wait_event)
    for space in SPACES:
        for name, call in OPERATORS.items():
            _put_operator(space, name, functools.partial(_Functional, call=call))
    _put_operator(SPACES[0], "wait_tensor", _WaitTensor)
    _wrap(dist, _BUFFERS, _buffers)
    _wrap(torch.serialization, _OPENS, functools.partial(_saves, opens=True))
    _wrap(torch.serialization, _WRITES, functools.partial(_saves, opens=False))
    for name in _SERIALIZES:
        _wrap(sys.modules.get(_SAFETENSORS), name, functools.partial(_saves, opens=False))


def _restore() -> None:
    for (owner, name), (ours, before) in list(_PATCHES.items()):
        if vars(owner).get(name) is not ours:
            continue  # other code wrapped it: it stays, and passes calls through
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
        del _PATCHES[owner, name]
