"""A measured run in this process: its folder, its rings, and its arms, which take turns by blocks of steps."""

import atexit
import contextlib
import functools
import itertools
import json
import logging
import os
import platform
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netbottleneck.config import Settings, describe
from netbottleneck.errors import HorovodInternalError
from netbottleneck.launch import connect
from netbottleneck.runtime import communicators, job, monitor, run_folder
from netbottleneck.runtime.run_folder import RANKS
from netbottleneck.trace.model import BARE, NATIVE, SINGLE
from netbottleneck.trace.recorder import EVENTS

if TYPE_CHECKING:
    from netbottleneck import _core

FINISH_S = 10.0  # how long the end of a run may wait for other ranks, all in all
FAILED_FINISH_S = 1.0  # the same after an error, or a loss: the others have failed too by then, or are gone
JOIN_S = 10.0  # how long a run that began alone waits for the other ranks
AGREE_S = 10.0  # how long a rank waits for the others before another arm begins

READY, FAILED = b"1", b"no"  # of different lengths: an exchange of both, or of other words, fails on every rank

logger = logging.getLogger("netbottleneck")


@dataclass(frozen=True)
class Blocks:
    """Which arm a step belongs to: blocks of equal length, the order of the arms turned round from cycle to cycle.

    So a drift of the machine counts for no arm (A B, B A, A B, …).
    """

    arms: tuple[str, ...]
    length: int

    def at(self, step: int) -> tuple[int, int]:
        """Return (block, index of the arm) of a step."""
        block = step // self.length
        cycle, position = divmod(block, len(self.arms))
        return block, position if cycle % 2 == 0 else len(self.arms) - 1 - position


@dataclass(eq=False)
class Session:
    """What all hooks of this process write to. Between `end` and `begin` lies what belongs to no step.

    comm: connects all ranks; None while, or where, this rank records alone.
    """

    settings: Settings
    place: connect.Place
    folder: Path
    blocks: Blocks
    recorder: "_core.Recorder"
    arms: Mapping[str, communicators.Communicator]
    comm: "_core.Comm | None"
    model: str = ""
    network: Mapping[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    step: int = 0
    running: bool = False
    closed: bool = False
    reported: bool = False
    pid: int = field(default_factory=os.getpid)
    moving: Any = field(default_factory=threading.RLock)  # held while the folder becomes another one
    error: str | None = None
    shared: bool = True  # all ranks write to one folder
    described: dict[str, Any] = field(default_factory=dict)
    on_close: list[Callable[[], None]] = field(default_factory=list)
    alone: bool = False
    wires: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by arm, what monitor.wire says
    stays: str | None = None  # the arm of all further steps
    why_stays: str = ""
    started_wall_ns: int = field(default_factory=time.time_ns)
    joining: "Joining | None" = None  # of a run that began without the other ranks
    until: float = float("inf")  # when the end of the run waits for other ranks no longer, by time.monotonic

    def __post_init__(self) -> None:
        _sessions.add(self)

    @property
    def control(self) -> "_core.Comm":
        """What connects all ranks. RuntimeError while this rank records alone."""
        if self.comm is None:
            raise RuntimeError(f"rank {self.place.rank} records alone: no other rank has joined its run")
        return self.comm

    @property
    def arm(self) -> str:
        """The name of the arm that the current step belongs to."""
        return self.stays or self.blocks.arms[self.blocks.at(self.step)[1]]

    @property
    def sampled(self) -> bool:
        """True for steps in which each module is stamped."""
        every = self.settings.sample_every
        # Not the first step of a block of ten, which the comparison of transports leaves out.
        return every > 0 and self.counted and self.step % every == (every // 2 + 1) % every

    @property
    def counted(self) -> bool:
        """True for steps inside START_STEP and END_STEP, while arms take turns as planned."""
        end = self.settings.end_step
        return self.stays is None and self.step >= self.settings.start_step and (end == 0 or self.step < end)

    def begin(self) -> None:
        """Stamp the beginning of a step."""
        block, arm = self.blocks.at(self.step)
        self.recorder.step = self.step
        for communicator in self.arms.values():
            ring = getattr(communicator, "_ring", None)
            if ring is not None:
                ring.step = self.step
        self.running = True
        if self.counted:
            self.recorder.put(EVENTS["STEP_BEGIN"], 0, block, arm, int(self.sampled), monitor.processor_ns())

    def end(self, *, recorded: bool = True) -> None:
        """Stamp the end of a step, unless it is not recorded, and go on to the next."""
        try:
            if self.running and self.counted and recorded:
                self.recorder.put(EVENTS["STEP_END"], d=monitor.processor_ns())
        finally:
            self.running = False
            self.step += 1

    def agree(self) -> bool:
        """Return whether all ranks are at this step, so that another arm may begin. Every rank calls it.

        A rank may leave out steps that others make. Where ranks differ, or do not answer within AGREE_S, no arm begins
        any more on any rank.
        """
        if self.stays is not None:
            return False
        mine = self.step.to_bytes(8, "little")
        try:
            same = set(self.control.exchange(mine, limit_s=AGREE_S)) == {mine}
            why = "ranks are at different steps"
        except (OSError, HorovodInternalError) as error:
            same, why = False, str(error)
            # The others must not take this rank's word for a step that it has left by then.
            self.control.abort(f"rank {self.place.rank} goes on without taking turns")
        if not same:
            self.why_stays = why
        return same

    def keep_own_path(self, own: communicators.Communicator) -> None:
        """Have gradients travel by the user's own path in all steps. Before the first step ends."""
        self.arms = {**self.arms, "stock": own, BARE: own}
        self.blocks = replace(self.blocks, arms=("stock", BARE))

    def stay(self, arm: str) -> None:
        """Have all further steps belong to an arm, and record no more of them."""
        self.stays = arm
        said = f"transports stay at {arm} from step {self.step} on: {self.why_stays}"
        logger.warning("%s", said)
        self.notes.append(said)

    @contextlib.contextmanager
    def by_itself(self, number: int) -> Generator[None, None, None]:
        """Stamp what is inside as step `number` of this rank alone, before the arms take turns.

        For a session that was opened with alone=True.
        """
        if not self.alone or self.running:
            raise ValueError("steps of one rank alone come before all others, in a session opened with alone=True")
        self.recorder.step = number
        self.recorder.put(EVENTS["STEP_BEGIN"], 0, 0, len(self.blocks.arms), 0)
        yield
        self.recorder.put(EVENTS["STEP_END"])

    def describe(self, **what: Any) -> None:
        """Add to this rank's description of itself (parameters, modules, buckets), and write it down."""
        self.described.update(what)
        self.write(finished=False)

    def write(self, *, finished: bool, error: str | None = None) -> None:
        """Write this rank's description of itself."""
        with self.moving:
            _write_json(self.folder / RANKS / f"{self.place.rank}.meta.json", self._meta(finished, error))

    def _meta(self, finished: bool, error: str | None) -> dict[str, Any]:
        return {
            "version": 1,
            "rank": self.place.rank,
            "size": self.place.size,
            "hostname": platform.node(),
            "host_id": connect.host_digest(self.settings).hex(),
            "pid": os.getpid(),
            "finished": finished,
            "error": error,
            "cores": monitor.cores(),
            "transports": {name: {**arm.info(), **self.wires.get(name, {})} for name, arm in self.arms.items()},
            **self.described,
        }

    def close(self, error: str | None = None) -> None:
        """End the run: records are complete on disk when this returns, on every rank that came so far."""
        if self.closed or os.getpid() != self.pid:  # a forked child has no part in the run
            return
        self.closed = True
        atexit.unregister(self.close)  # which would keep the run, and gradients, for the life of the process
        self.error = error
        if self.running and error is None:
            self.running = False  # a step that was begun and never ended: the loop is over
        if self.joining is not None:
            self.joining.settle()
        for call in self.on_close:
            try:
                call()
            except Exception as failure:  # the records are written all the same
                logger.error("at the end of the run: %s: %s", type(failure).__name__, failure)
        self.until = time.monotonic() + self._finish_s
        try:
            self.write(finished=error is None, error=error)
            if self.place.rank == 0 or self.comm is None:
                self._write_run()
        finally:
            for arm in self.arms.values():
                arm.close()
            self.recorder.close()

    def begin_folder(self) -> None:
        """Write what the run folder says of the whole run. Rank 0 calls it, and a rank that records alone."""
        self._write_run()
        about = {row.name: [row.value, row.source] for row in describe(self.settings)}
        _write_json(self.folder / "env.json", about)

    def _write_run(self) -> None:
        _write_json(self.folder / "run.json", _run(self))

    def bring(self) -> None:
        """Where no folder is shared, bring all records to rank 0's. Every rank calls it, after `close`."""
        if self.comm is not None and not self.shared:
            try:
                run_folder.gather(self.comm, self.folder / RANKS, self.until)
            except OSError as error:
                logger.warning("the records of other hosts could not be brought to %s: %s", self.folder, error)

    @property
    def _finish_s(self) -> float:
        given_up = self.stays is not None  # a rank that goes on alone has ended the connection itself
        failed = self.error is not None or (self.comm is not None and self.comm.failed and not given_up)
        return FAILED_FINISH_S if failed else FINISH_S

    def collect(self) -> None:
        """Wait until rank 0 has the records of all that share its folder, at most FINISH_S. After `bring`."""
        if self.comm is None or self.place.rank != 0 or not self.shared:
            return
        missing = set(range(self.place.size))
        while missing and time.monotonic() < self.until:
            missing = {rank for rank in missing if not run_folder.finished(self.folder / RANKS / f"{rank}.meta.json")}
            if missing:
                time.sleep(0.02)
        if missing:
            logger.warning("no complete record of ranks %s in %s", sorted(missing), self.folder)


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps(value, indent=1), encoding="utf-8")
    scratch.replace(path)


def wanted_folder(settings: Settings, directory: str | None = None) -> Path:
    """Return the run folder that the settings ask for."""
    stamp = os.environ.get("SLURM_JOB_ID") or time.strftime("%Y%m%d-%H%M%S")
    return Path(directory or settings.directory or f"netbottleneck-{stamp}").absolute()


def same_ranks(settings: Settings, place: connect.Place) -> None:
    """Raise ValueError where the job that runs, or would be started, is not that of these ranks.

    Such a process would wait for ranks that are not there, or take itself for alone.
    """
    here = job.current().place if job.is_started() else connect.detect(settings)
    if (here.rank, here.size) != (place.rank, place.size):
        raise ValueError(
            f"the launcher's variables say rank {here.rank} of {here.size}, torch.distributed says {place.rank} of "
            f"{place.size}: set RANK and WORLD_SIZE in each process to what torch.distributed has"
        )


def _folder(settings: Settings, wanted: Path, control: "_core.Comm") -> Path:
    """Return the run folder, the same on all ranks: rank 0 names it."""
    found = run_folder.claim(control, wanted, settings.start_timeout_s)
    if control.rank == 0 and found != wanted:
        logger.warning("NETBOTTLENECK_DIR=%s holds a run already: this one goes to %s", wanted, found)
    return found


def _arm(  # noqa: PLR0913, PLR0917 - what an arm may need, once
    name: str,
    settings: Settings,
    place: connect.Place,
    ring: "_core.Recorder | None",
    recorder: "_core.Recorder",
    control: "_core.Comm",
    group: Any,
) -> communicators.Communicator:
    if ring is not None:
        return communicators.Native(name, connect.connect(settings, place, recorder=ring, transport=name), ring)
    if name == "null":
        return communicators.Null()
    if name in ("stock", "bare"):
        meet = functools.partial(run_folder.together, control, limit_s=settings.start_timeout_s)
        chosen = group if group is not None else communicators.stock_group(settings, place, meet)
        return communicators.Stock(chosen, place.size, recorder, owned=group is None)
    raise ValueError(f"NETBOTTLENECK_TRANSPORT={name}: must be a list of {', '.join(communicators.KINDS)}")


def _ring(folder: Path, rank: int, name: str, settings: Settings) -> "_core.Recorder":
    path = folder / RANKS / f"{rank}.{name}.ring"
    path.parent.mkdir(parents=True, exist_ok=True)
    ring: _core.Recorder = connect.core().Recorder(
        str(path), settings.trace_events, rank, timeline=settings.timeline is not None
    )
    return ring


def open_session(  # noqa: PLR0913 - all but the first have a default that fits
    settings: Settings,
    *,
    arms: tuple[str, ...] | None = None,
    group: Any = None,
    stock: communicators.Communicator | None = None,
    directory: str | None = None,
    model: str = "",
    network: Mapping[str, Any] | None = None,
    notes: tuple[str, ...] = (),
    alone: bool = False,
) -> Session:
    """Return a session of all ranks of the job; every rank calls this.

    arms: transports that take turns; the settings' where None. "bare" means the user's own path, untouched: the
    hooks that use the session know how to step aside. group: a torch.distributed group that stock uses. stock: what it
    is where it is not torch.distributed. alone: steps of one rank by itself come first, see Session.by_itself.
    Raises as connect.connect and run_folder.together, and OSError where the folder cannot be written.
    """
    this = job.start(settings)
    place, control = this.place, this.comm
    names = arms or settings.transports
    folder = _folder(settings, wanted_folder(settings, directory), control)
    recorder = _ring(folder, place.rank, "train", settings)
    rings = {name: _ring(folder, place.rank, name, settings) for name in NATIVE if name in names}
    run_folder.together(control, b"rings", settings.start_timeout_s)  # no rank connects where another cannot record
    made: dict[str, communicators.Communicator] = {}
    for name in dict.fromkeys(names):
        own = stock if name in ("stock", "bare") else None
        made[name] = own or _arm(name, settings, place, rings.get(name), recorder, control, group)
    opened = Session(
        settings,
        place,
        folder,
        Blocks(tuple(dict.fromkeys(names)), settings.block_steps),
        recorder,
        made,
        control,
        model,
        network,
        list(notes),
        alone=alone,
        wires={name: monitor.wire(settings, name) for name in made},
    )
    if place.rank == 0:
        opened.begin_folder()
    opened.write(finished=False)
    _meet(opened, control)
    atexit.register(opened.close)
    return opened


def open_together(settings: Settings, **options: Any) -> Session:
    """Return what open_session gives, on all ranks or on none: where one fails, each raises."""
    session = None
    try:
        session = open_session(settings, **options)
        run_folder.together(session.control, READY, settings.start_timeout_s)
        return session
    except Exception as error:
        if not _of_exchange(error) and job.is_started():
            with contextlib.suppress(OSError, HorovodInternalError):
                run_folder.together(job.current().comm, FAILED, settings.start_timeout_s)
        if session is not None:
            session.close(f"{type(error).__name__}: {error}")
        if _of_exchange(error) and "mismatched sizes" in str(error):
            raise HorovodInternalError(f"another rank could not open the run: see that rank's log ({error})") from error
        raise


def _of_exchange(error: Exception) -> bool:
    """Return whether all ranks came to an exchange that failed: none of them waits for this one then."""
    return isinstance(error, HorovodInternalError) and "netbottleneck.exchange" in str(error)


def _meet(session: Session, control: "_core.Comm") -> None:
    """Find whether all ranks share the run folder, and watch this host. Every rank calls it."""
    limit_s = session.settings.start_timeout_s
    run_folder.together(control, b"written", limit_s)
    session.shared = run_folder.shared(control, session.folder / "run.json", limit_s)
    session.on_close.append(monitor.watch(session.settings, session.place, session.folder / RANKS))


def observe(
    settings: Settings,
    place: connect.Place,
    *,
    stock: communicators.Communicator,
    arms: tuple[str, ...] = ("stock", BARE),
    directory: str | None = None,
    model: str = "",
) -> Session:
    """Return a session of this rank that begins at once, and joins the other ranks' beside the first steps.

    Every arm sends gradients by the user's own path, `stock`, so that ranks need not agree on anything. Raises OSError
    where no folder can be written.
    """
    wanted = wanted_folder(settings, directory)
    scratch = wanted.parent / f".{wanted.name}-{platform.node()}-{os.getpid()}-{next(_scratches)}"
    recorder = _ring(scratch, place.rank, "train", settings)
    opened = Session(
        settings,
        place,
        scratch,
        Blocks(arms, settings.block_steps),
        recorder,
        dict.fromkeys(arms, stock),
        None,
        model,
        wires={"stock": monitor.wire(settings, "stock")},
    )
    opened.write(finished=False)
    opened.joining = Joining(opened, wanted)
    atexit.register(opened.close)
    return opened


_scratches = itertools.count()
_sessions: "weakref.WeakSet[Session]" = weakref.WeakSet()


def opened() -> bool:
    """Return whether this process has begun a measured run."""
    return bool(_sessions)


class Joining:
    """Joins this rank's session with the other ranks', in a thread of its own, for at most JOIN_S.

    Sessions of one process join one after another. A session that has not joined when it closes, or after JOIN_S, stays
    alone, and says so in its notes.
    """

    _before: "threading.Thread | None" = None

    def __init__(self, session: Session, wanted: Path) -> None:
        self._session = session
        self._wanted = wanted
        self._until = time.monotonic() + JOIN_S
        self._lock = session.moving
        self._alone = False
        self._previous, self._thread = Joining._before, threading.Thread(target=self._join, daemon=True)
        Joining._before = self._thread
        self._thread.start()

    @property
    def done(self) -> bool:
        """True where it has come to an end: `settle` does not wait then."""
        return not self._thread.is_alive()

    def settle(self) -> None:
        """Wait until the ranks have joined, or until it is too late. The session's folder is the final one then."""
        self._thread.join(max(0.0, self._until - time.monotonic()))
        with self._lock:
            if self._session.comm is None and not self._alone:
                self._stay_alone(f"not within {JOIN_S:g} s")

    def _join(self) -> None:
        session, settings = self._session, replace(self._session.settings, start_timeout_s=JOIN_S)
        try:
            if self._previous is not None:
                self._previous.join()
            same_ranks(settings, session.place)
            this = job.start(settings)
            folder = _folder(settings, self._wanted, this.comm)
            with self._lock:
                if not self._alone:
                    self._adopt(this, folder)
            if session.comm is not None:
                _meet(session, this.comm)
        except Exception as error:
            with self._lock:
                if session.comm is None and not self._alone:
                    self._stay_alone(str(error))

    def _adopt(self, this: job.Job, folder: Path) -> None:
        session, scratch = self._session, self._session.folder
        (folder / RANKS).mkdir(parents=True, exist_ok=True)
        for path in (scratch / RANKS).iterdir():
            path.rename(folder / RANKS / path.name)
        shutil.rmtree(scratch, ignore_errors=True)
        session.folder, session.place, session.comm = folder, this.place, this.comm
        session.write(finished=False)
        if this.place.rank == 0:
            session.begin_folder()

    def _stay_alone(self, why: str) -> None:
        """Give the records of this rank a folder of their own."""
        self._alone = True
        session, scratch = self._session, self._session.folder
        folder = _free(self._wanted, session.place.rank)
        scratch.rename(folder)
        session.folder = folder
        said = (
            f"rank {session.place.rank} recorded alone, as the ranks did not join ({why}): how long ranks wait for "
            "each other, which rank is late and what other ranks measured are not known"
        )
        logger.warning("%s", said)
        session.notes.append(said)
        session.begin_folder()


def _free(wanted: Path, rank: int) -> Path:
    first = f"{wanted.name}-rank{rank}"
    names = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    return next(path for path in map(wanted.with_name, names) if not path.exists())


def _run(session: Session) -> dict[str, Any]:
    folder = session.folder
    return {
        "version": 1,
        "id": f"{folder.parent.name}-{folder.name}" if folder.name.isdecimal() else folder.name,
        "command": sys.argv,
        "started_wall_ns": session.started_wall_ns,
        "size": session.place.size,
        "transports": [*session.blocks.arms, *([SINGLE] if session.alone else [])],
        "network": session.network,
        "model": session.model,
        "notes": session.notes,
    }
