"""The job of this process: settings, place and communicator. One place holds the current one."""

import atexit
import itertools
import logging
import os
import platform
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from netbottleneck.config import Settings, describe
from netbottleneck.config import settings as read_settings
from netbottleneck.errors import FAILURES, Error, HorovodInternalError
from netbottleneck.launch import connect
from netbottleneck.launch.connect import core

if TYPE_CHECKING:
    from netbottleneck import _core

__all__ = ["Job", "Observer", "core", "current", "is_started", "observe", "start", "stop"]

NOTICE_S = 5.0
TAKEN_NS = 5_000_000  # how long the name of an operation that nobody has waited for is taken, even where it is over
TAKEN_MAX = 256  # names; where there are more, those are forgotten whose time is over
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
    """What wants to know of jobs: `observe` names it. All methods do nothing here."""

    def recorder(self, settings: Settings, place: connect.Place) -> "_core.Recorder | None":
        """Return what the job that is about to start records to."""
        return None

    def started(self, started: "Job") -> None:
        """The job runs."""

    def gradients(self, gradients: Any, optimizer: Any) -> None:
        """A distributed optimizer has made its Gradients; their target may be changed between steps."""

    def stopping(self, stopping: "Job") -> None:
        """The job is about to end: its communicator is still there."""

    def stopped(self, stopped: "Job") -> None:
        """The job has ended: no other rank waits for this one any more."""


@dataclass
class Job:
    """A running job. Operations may be submitted from any thread."""

    settings: Settings
    place: connect.Place
    comm: "_core.Comm"
    homogeneous: bool = True  # the same number of ranks on every host
    recorder: "_core.Recorder | None" = None
    observer: Observer = field(default_factory=Observer)
    handles: dict[int, Any] = field(default_factory=dict)  # what is under way, by number
    process_sets: dict[int, Any] = field(default_factory=dict)  # registered, by number: but the global one
    ending: list[Callable[[], None]] = field(default_factory=list)  # what is called when it ends, before the comm does
    joins: int = 0  # how often all ranks have joined
    pid: int = field(default_factory=os.getpid)
    _numbers: dict[str, "itertools.count[int]"] = field(default_factory=dict)
    _taken: dict[tuple[int, str], "_core.Work"] = field(default_factory=dict)  # not waited for, by group and name
    _names: dict["_core.Work", tuple[int, str]] = field(default_factory=dict)

    def number(self, kind: str) -> int:
        """Return how many things of this kind were numbered before: the same on all ranks that ask alike."""
        return next(self._numbers.setdefault(kind, itertools.count()))

    def hold(self, pending: Any) -> int:
        """Keep what is under way under a number, and return the number."""
        handle = self.number("handle")
        self.handles[handle] = pending
        return handle

    def submit(self, name: str, kind: int, memory: Any, dtype: int, **options: Any) -> "_core.Work":
        """Start an operation, as Comm.submit; a job that has failed raises HorovodInternalError.

        ValueError for the name of one that is under way, or was a moment ago and nobody has waited for it: else it
        would depend on how fast it was whether a name that is given twice is refused, on one rank and not on another.
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
        return work

    def waited(self, works: Sequence["_core.Work"]) -> None:
        """Operations are known to be over: their names are free."""
        for work in works:
            place = self._names.pop(work, None)
            if place is not None and self._taken.get(place) is work:
                del self._taken[place]

    def _forget(self) -> None:
        latest = core().now_ns() - TAKEN_NS
        self.waited([work for work in list(self._names) if work.times()[0] < latest])

    def wait(self, works: Sequence["_core.Work"]) -> None:
        """Wait for all, and tell of stalls meanwhile.

        Raises the first failure, a HorovodInternalError, once all are done or have failed, so that no transfer touches
        memory that a caller may free.
        """
        failure: HorovodInternalError | None = None
        self.waited(works)
        for work in works:
            try:
                while not work.wait(NOTICE_S):
                    self.tell()
            except HorovodInternalError as error:
                failure = failure or error
            except FAILURES as error:
                failure = failure or HorovodInternalError(str(error))
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback has this frame: a circle that would keep the callers' tensors

    def tell(self) -> None:
        """Log what the communicator has to say: ranks that others wait for, lanes that were lost."""
        for notice in self.comm.notices():
            logger.warning("%s", notice)


@dataclass
class _Process:
    """What this process runs."""

    job: Job | None = None
    observer: Observer = field(default_factory=Observer)
    lock: threading.Lock = field(default_factory=threading.Lock)
    handler: logging.Handler | None = None  # of the package's logger, ours


_process = _Process()


def observe(observer: Observer) -> Observer:
    """Have an observer told of the jobs that start from now on, in the place of the one before, which is returned."""
    former, _process.observer = _process.observer, observer
    return former


def current() -> Job:
    """Return the current job; ValueError where none was started."""
    if _process.job is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _process.job


def is_started() -> bool:
    """Return whether there is a current job."""
    return _process.job is not None


def start(settings: Settings | None = None, *, environ: Mapping[str, str] = os.environ) -> Job:
    """Start this process's job, or return the one that runs.

    Every rank calls it. Raises as launch.detect and launch.connect.
    """
    with _process.lock:
        if _process.job is None:
            _process.job = _open(settings or read_settings(environ=environ), _process.observer, environ)
            _process.observer.started(_process.job)
        return _process.job


def stop() -> None:
    """End the job, if there is one; `start` may follow. Operations that are pending fail.

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
            ended.tell()
            ended.comm.close()
        ended.observer.stopped(ended)


def set_up_log(settings: Settings, place: connect.Place) -> None:
    """Tell of what the package logs from LOG_LEVEL on: in LOG_FILE, else on stderr.

    A program that has handlers of its own is told by these instead of on stderr. Raises Error naming the variable
    where the file cannot be opened.
    """
    former, _process.handler = _process.handler, None
    if former is not None:
        logger.removeHandler(former)
        former.close()
    if logger.level == logging.NOTSET or "log_level" in settings.sources:
        logger.setLevel(LEVELS[settings.log_level])
    if settings.log_file is None and logger.hasHandlers():
        return
    host = platform.node()
    handler: logging.Handler = logging.StreamHandler()
    if settings.log_file is not None:
        meant = {"%h": host, "%p": str(os.getpid()), "%r": str(place.rank)}
        path = re.sub("%[hpr]", lambda found: meant[found.group()], settings.log_file)
        try:
            handler = logging.FileHandler(path, encoding="utf-8")
        except OSError as error:
            raise Error(error.errno or 0, f"NETBOTTLENECK_LOG_FILE={settings.log_file}: {error.strerror}") from error
    host = host.replace("%", "%%")
    handler.setFormatter(
        logging.Formatter(f"[rank {place.rank}/{place.size} {host}] netbottleneck %(levelname)s: %(message)s")
    )
    logger.addHandler(handler)
    _process.handler = handler


def _tell_settings(settings: Settings, place: connect.Place) -> None:
    """Log what is in force, once in the job."""
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
    _tell_settings(settings, place)
    recorder = observer.recorder(settings, place)
    comm = connect.connect(settings, place, recorder=recorder, environ=environ)
    try:
        hosts = comm.exchange(connect.host_digest(settings)) if place.size > 1 else [connect.host_digest(settings)]
    except BaseException:
        comm.close()
        raise
    found = connect.topology(hosts, place.rank)
    if settings.host_id is not None or not place.complete:
        place = connect.located(place, found)
    return Job(settings, place, comm, found.homogeneous, recorder, observer)


atexit.register(stop)
