"""The job of this process: settings, place, communicator, and the answers to Horovod's build queries."""

import itertools
import logging
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from netbottleneck.config import Settings, describe
from netbottleneck.config import settings as read_settings
from netbottleneck.errors import FAILURES, DeadlineError, HorovodInternalError
from netbottleneck.launch import connect, topology
from netbottleneck.launch.connect import core
from netbottleneck.runtime import exits

if TYPE_CHECKING:
    from netbottleneck import _core


# The current job. Only this module holds it.

__all__ = [
    "BACKEND",
    "Job",
    "Observer",
    "ccl_built",
    "core",
    "cuda_built",
    "current",
    "ddl_built",
    "failure",
    "gloo_built",
    "gloo_enabled",
    "is_started",
    "leaves",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "observe",
    "register_backend",
    "rocm_built",
    "start",
    "stop",
    "together",
    "uncaught",
]

NOTICE_S = 5.0
OTHERS_S = 0.005  # a wait looks so often at the other pending operations: their next rounds may be due
TAKEN_NS = 5_000_000  # the name of an operation without a waiter stays in use this long, even after completion
TAKEN_MAX = 256  # names; above that, expired ones are dropped
LEVELS = {
    "trace": 5,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}

logger = logging.getLogger("netbottleneck")


class Observer:
    """Interface for job observers, registered by `observe`. All methods do nothing here."""

    def recorder(self, settings: Settings, place: connect.Place) -> "_core.Recorder | None":
        """Return the recorder for a job that is about to start."""
        return None

    def started(self, started: "Job") -> None:
        """The job has started."""

    def gradients(self, gradients: Any, optimizer: Any) -> None:
        """A distributed optimizer has made its Gradients; their target may change between steps."""

    def joining(self, joining: "Job") -> "Sequence[_core.Comm]":
        """This rank is about to join. Return the communicators that it also joins, beside the job's own."""
        return ()

    def joined(self, joined: "Job", last: int) -> int:
        """All ranks have joined, `last` as the last one on the job's communicator. Called on every rank.

        Return the last rank to join on all communicators.
        """
        return last

    def stopping(self, stopping: "Job") -> None:
        """The job is about to end; its communicator is still open."""

    def stopped(self, stopped: "Job") -> None:
        """The job has ended; no other rank waits for this one."""


class Watcher(Protocol):
    """Records what a script submits to a job, and the time for which it waits. None of its methods raises."""

    def submitted(self, work: "_core.Work", name: str, about: tuple[int, Any, int, int]) -> None:
        """Note an operation. about: kind, memory, type, group."""

    def blocks(self, works: Sequence["_core.Work"]) -> Callable[[], None]:
        """Note that a thread begins to wait. Return what to call when it has waited."""

    def completed(self, works: Sequence["_core.Work"]) -> None:
        """Note operations that are done, or soon waited for."""


class Polled(Protocol):
    """A pending operation, of one or more rounds."""

    def poll(self, *, meanwhile: bool = False) -> bool:
        """Begin each round that is due. Return True if the operation is done.

        meanwhile: nobody has asked for it, so its names stay taken.
        """

    def wait(self) -> Any:
        """Return the result."""


@dataclass
class Job:
    """A running job. Operations may be submitted from any thread."""

    settings: Settings
    place: connect.Place
    comm: "_core.Comm"
    homogeneous: bool = True  # the same number of ranks on every host
    recorder: "_core.Recorder | None" = None
    observer: Observer = field(default_factory=Observer)
    handles: dict[int, "Polled"] = field(default_factory=dict)  # pending operations by handle
    process_sets: dict[int, Any] = field(default_factory=dict)  # registered sets by number, without the global one
    ending: list[Callable[[], None]] = field(default_factory=list)  # callbacks before the comm closes
    watcher: Watcher | None = None
    joins: int = 0  # number of completed joins
    pid: int = field(default_factory=os.getpid)
    _numbers: dict[str, "itertools.count[int]"] = field(default_factory=dict)
    _taken: dict[tuple[int, str], "_core.Work"] = field(default_factory=dict)  # not waited for, by group and name
    _names: dict["_core.Work", tuple[int, str]] = field(default_factory=dict)

    def number(self, kind: str) -> int:
        """Return the count of earlier calls for this kind. Ranks that make the same calls get the same numbers."""
        return next(self._numbers.setdefault(kind, itertools.count()))

    def hold(self, pending: "Polled") -> int:
        """Store a pending operation, and return its handle."""
        handle = self.number("handle")
        self.handles[handle] = pending
        return handle

    def submit(self, name: str, kind: int, memory: Any, dtype: int, **options: Any) -> "_core.Work":
        """Submit an operation, as Comm.submit; a failed job raises HorovodInternalError.

        Raises ValueError for a name that is pending, or that completed within TAKEN_NS and has no waiter yet. Without
        that rule, timing would decide whether a duplicate name is refused, and ranks could differ.
        """
        place = (int(options.get("group", 0)), name)
        first = self._taken.get(place)
        if first is not None and core().now_ns() - first.times()[0] < TAKEN_NS:
            raise ValueError(f"{name}: an operation of this name is still under way on rank {self.place.rank}")
        try:
            work = self.comm.submit(name, kind, memory, dtype, **options)
        except HorovodInternalError:
            raise
        except FAILURES as error:
            raise HorovodInternalError(f"{name}: {error}") from error
        if len(self._taken) >= TAKEN_MAX:
            self._forget()
        self._taken[place], self._names[work] = work, place
        if self.watcher is not None:
            self.watcher.submitted(work, name, (kind, memory, dtype, place[0]))
        return work

    def waited(self, works: Sequence["_core.Work"]) -> dict["_core.Work", tuple[int, str]]:
        """Mark operations as complete: their names are free. Returns them, for `take`."""
        if self.watcher is not None:
            self.watcher.completed(works)
        names = {work: self._names.pop(work) for work in works if work in self._names}
        for work, place in names.items():
            if self._taken.get(place) is work:
                del self._taken[place]
        return names

    def take(self, names: Mapping["_core.Work", tuple[int, str]]) -> None:
        """Take names again that `waited` has freed, except those of later operations."""
        for work, place in names.items():
            if self._taken.setdefault(place, work) is work:
                self._names[work] = place

    def _forget(self) -> None:
        latest = core().now_ns() - TAKEN_NS
        self.waited([work for work in list(self._names) if work.times()[0] < latest])

    def wait(self, works: Sequence["_core.Work"]) -> None:
        """Wait for all works. Meanwhile, log stalls, and go on with the pending operations that have handles.

        Another rank may wait for a round of one of those first. Raises the first failure, a HorovodInternalError, once
        all are done or have failed. So no transfer touches memory that the caller may free.
        """
        failure: HorovodInternalError | None = None
        self.waited(works)
        over = None if self.watcher is None else self.watcher.blocks(works)
        for work in works:
            try:
                while not work.wait(OTHERS_S if self.handles else NOTICE_S):
                    self._meanwhile()
            except HorovodInternalError as error:
                failure = failure or error
            except FAILURES as error:
                failure = failure or HorovodInternalError(str(error))
        if over is not None:
            over()
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback refers to this frame: a cycle that would keep the callers' tensors alive

    def _meanwhile(self) -> None:
        """Do what is due while a thread waits."""
        self.log_notices()
        for pending in list(self.handles.values()):
            pending.poll(meanwhile=True)

    def log_notices(self) -> None:
        """Log the communicator's notices: stalled ranks, lost lanes."""
        for notice in self.comm.notices():
            logger.warning("%s", notice)


@dataclass
class _Process:
    """The job state of this process."""

    job: Job | None = None
    observer: Observer = field(default_factory=Observer)
    lock: Any = field(default_factory=threading.RLock)  # a signal handler may call stop while start waits for ranks
    handler: logging.Handler | None = None  # our handler of the package's logger
    refused: str = ""  # why there is no log file, which is logged once
    left: SystemExit | None = None  # the exit that ends the process


_process = _Process()


def _in_child() -> None:
    """Replace the lock: a thread that held it does not exist in a forked child."""
    _process.lock = threading.RLock()


os.register_at_fork(after_in_child=_in_child)


def observe(observer: Observer) -> Observer:
    """Register an observer of jobs that start from now on; it replaces the previous one, which is returned."""
    former, _process.observer = _process.observer, observer
    return former


def current() -> Job:
    """Return the current job; ValueError if there is none."""
    if _process.job is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _process.job


def is_started() -> bool:
    """Return True if there is a current job."""
    return _process.job is not None


def start(settings: Settings | None = None, *, environ: Mapping[str, str] = os.environ) -> Job:
    """Start this process's job, or return the running one.

    Every rank calls it. Raises as launch.detect and launch.connect.
    """
    with _process.lock:
        if _process.job is not None:
            return _process.job
        opened = _process.job = _open(settings or read_settings(environ=environ), _process.observer, environ)
        _process.observer.started(opened)
        return opened


def stop() -> None:
    """End the job, if there is one; `start` may follow. Pending operations fail.

    A job that is about to start is none yet: a signal handler that calls this meanwhile does not keep it from starting.
    A forked child leaves its parent's job alone.
    """
    if _process.job is not None and _process.job.pid != os.getpid():
        return
    with _process.lock:
        ended, _process.job = _process.job, None
    if ended is not None:
        for process_set in ended.process_sets.values():
            process_set.process_set_id = None
        try:
            ended.observer.stopping(ended)
            for call in ended.ending:
                call()
        finally:
            ended.log_notices()
            ended.comm.close()
        ended.observer.stopped(ended)


def together(comm: "_core.Comm", blob: bytes, limit_s: float) -> list[bytes]:
    """All-gather one blob of each rank while they open a measured run. Every rank calls it.

    Raises TimeoutError naming the missing ranks after limit_s, NETBOTTLENECK_START_TIMEOUT_S.
    """
    try:
        return comm.exchange(blob, limit_s=limit_s)
    except DeadlineError as error:
        late = DeadlineError(
            error.errno,
            f"rank {comm.rank} starts a measured run, but not all ranks did within {limit_s:g} s "
            f"(NETBOTTLENECK_START_TIMEOUT_S): {error.strerror}. Every rank of the job must create the measured "
            "optimizer or model: check what these ranks do instead, increase that variable, or unset NETBOTTLENECK and "
            "NETBOTTLENECK_TRANSPORT",
        )
        late.peer = error.peer
        raise late from error


def uncaught() -> BaseException | None:
    """Return the exception that ends this process; None if it is interactive, as it goes on after exceptions."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def leaves(error: SystemExit) -> None:
    """Note the exit that ends this process. Python keeps no SystemExit for exit handlers."""
    _process.left = error


def failure() -> BaseException | None:
    """Return the exception that ends this process with a code other than 0, as far as it is known."""
    left = _process.left or exits.raised()
    fails = left is not None and (not isinstance(left, SystemExit) or left.code)
    return left if fails else uncaught()


def set_up_log(settings: Settings, place: connect.Place) -> None:
    """Send the package's log from LOG_LEVEL on to LOG_FILE, else to stderr.

    If the program has handlers of its own, they replace stderr. If the file cannot be opened, the log goes where it
    goes without one, and its first line names the variable, the path and the reason: no training ends for its log.
    """
    former, _process.handler = _process.handler, None
    if former is not None:
        logger.removeHandler(former)
        former.close()
    if logger.level == logging.NOTSET or "log_level" in settings.sources:
        logger.setLevel(LEVELS[settings.log_level])
    handler, refused = _log_file(settings, place)
    if handler is None and not logger.hasHandlers():
        handler = logging.StreamHandler()
    if handler is not None:
        host = platform.node().replace("%", "%%")
        handler.setFormatter(
            logging.Formatter(f"[rank {place.rank}/{place.size} {host}] netbottleneck %(levelname)s: %(message)s")
        )
        logger.addHandler(handler)
        _process.handler = handler
    if refused and refused != _process.refused:
        logger.warning("%s", refused)
    _process.refused = refused


def _log_file(settings: Settings, place: connect.Place) -> tuple[logging.Handler | None, str]:
    """Return the handler of LOG_FILE, None if there is none; and the reason if its file cannot be opened, else ""."""
    if settings.log_file is None:
        return None, ""
    meant = {"%h": platform.node(), "%p": str(os.getpid()), "%r": str(place.rank)}
    path = re.sub("%[hpr]", lambda found: meant[found.group()], settings.log_file)
    try:
        return logging.FileHandler(path, encoding="utf-8"), ""
    except OSError as error:
        return None, f"NETBOTTLENECK_LOG_FILE={path}: {error.strerror}: this rank does not log to it"


def _log_settings(settings: Settings, place: connect.Place) -> None:
    """Log the settings in force, on rank 0."""
    if place.rank != 0:
        return
    logger.info("%d ranks, started by %s, transport %s", place.size, place.launcher, ",".join(settings.transports))
    if settings.stall_end_s and not settings.stall_limit_s:
        logger.warning(
            "a stall does not end the job: %s=%g, but ranks are named after %g s (0: never)",
            settings.sources.get("stall_end_s", "STALL_END_S"),
            settings.stall_end_s,
            settings.stall_s,
        )
    for row in describe(settings):
        if row.source != "default":
            logger.debug("%s=%s (%s)", row.name, row.value, row.source)


def _open(settings: Settings, observer: Observer, environ: Mapping[str, str]) -> Job:
    place = connect.detect(settings, environ)
    set_up_log(settings, place)
    _log_settings(settings, place)
    recorder = observer.recorder(settings, place)
    comm = connect.connect(settings, place, recorder=recorder, environ=environ)
    try:
        hosts = comm.exchange(connect.host_digest(settings)) if place.size > 1 else [connect.host_digest(settings)]
    except BaseException:
        comm.close()
        raise
    ranks_on_hosts = connect.topology(hosts, place.rank)
    if settings.host_id is not None or not place.complete:
        place = connect.with_topology(place, ranks_on_hosts)
    elif not ranks_on_hosts.homogeneous:  # torchrun's count of agents includes hosts without a rank of this local rank
        place = replace(place, cross_rank=ranks_on_hosts.cross_rank, cross_size=ranks_on_hosts.cross_size)
    return Job(settings, place, comm, ranks_on_hosts.homogeneous, recorder, observer)


exits.register(stop)


# Answers to Horovod's queries about its build.


def gloo_built(verbose: bool = False) -> bool:
    """Return True: there is a TCP path without MPI."""
    return True


def gloo_enabled() -> bool:
    """Return True: tensors never use MPI."""
    return True


def mpi_built(verbose: bool = False) -> bool:
    """Return True: mpirun and mpiexec can start a job, and Adasum, which Horovod has with MPI only, is available."""
    return True


def mpi_enabled() -> bool:
    """Return True if an MPI launcher started the running job, as with Horovod."""
    return is_started() and current().place.launcher in topology.MPI


def mpi_threads_supported() -> bool:
    """Return True: no thread of this package calls MPI, so a script may call it.

    Raises ValueError before init(), and if no MPI launcher started the job.
    """
    current()
    if not mpi_enabled():
        raise ValueError("Horovod MPI is not enabled; this job was not started by mpirun or mpiexec.")
    return True


def nccl_built(verbose: bool = False) -> int:
    """Return 0: NCCL is not included."""
    return 0


def ddl_built(verbose: bool = False) -> bool:
    """Return False."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Return False."""
    return False


def cuda_built() -> bool:
    """Return True: tensors in CUDA memory are sent too. The driver is loaded with the first one."""
    return True


def rocm_built() -> bool:
    """Return False."""
    return False


# Registration of the torch.distributed backend `nb`. The rest of the backend is imported with its first group.

BACKEND = "nb"


def register_backend(create: Callable[[Any, Any], Any]) -> None:
    """Register the backend with torch.distributed, if available; later calls have no effect.

    create: called with the options of the group and of the backend, returns the process group. torch itself may still
    be importing.
    """
    import torch.distributed as dist

    if dist.is_available() and BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
