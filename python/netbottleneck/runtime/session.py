"""Session: a measured run in this process: its record, and its arms, which take turns by blocks."""

import contextlib
import functools
import itertools
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

from netbottleneck.config import UNTIL_KNOWN, Settings
from netbottleneck.errors import FAILURES, HorovodInternalError, of_handler
from netbottleneck.launch import connect
from netbottleneck.runtime import communicators, exits, job, monitor, nccl, progress, run_folder, sampler
from netbottleneck.runtime.auto import Auto, usable
from netbottleneck.runtime.blocks import Blocks, Deciding, UntilKnown, observing
from netbottleneck.runtime.job import together
from netbottleneck.trace.machine import machine_id
from netbottleneck.trace.model import STAYS
from netbottleneck.trace.ring_file import EVENTS
from netbottleneck.trace.transports import AUTO, BARE, NATIVE, NULL, SINGLE, STOCK, Arm

if TYPE_CHECKING:
    from netbottleneck import _core


FINISH_S = 10.0  # total time that the end of a run may wait for other ranks
FAILED_FINISH_S = 1.0  # the same after an error or a loss: by then the others have failed or left
JOIN_S = 10.0  # time that a run begun alone waits for the other ranks
AGREE_S = 10.0  # time that a rank waits for the others before the next arm begins

READY, FAILED = b"1", b"no"  # of different lengths, so that a mixed exchange fails on every rank

logger = logging.getLogger("netbottleneck")


def words(error: BaseException) -> str:
    """Return an exception as the record has it: its type, and its message if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _logged(call: Callable[[], None]) -> None:
    """Call a function at the end of the run. Its failure is logged; an exception of a signal handler is raised."""
    try:
        call()
    except Exception as failure:
        if of_handler(failure):
            raise
        logger.error("at the end of the run: %s: %s", type(failure).__name__, failure)


@dataclass(eq=False)
class Session:
    """The record that all hooks of this process write to. Time between `end` and `begin` belongs to no step.

    comm: connects all ranks; None while this rank records alone.
    """

    settings: Settings
    place: connect.Place
    folder: Path
    blocks: Blocks | Deciding
    recorder: "_core.Recorder"
    arms: Mapping[Arm, communicators.Communicator]
    comm: "_core.Comm | None"
    model: str = ""
    network: Mapping[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    step: int = 0
    running: bool = False
    closed: bool = False
    reported: bool = False
    pid: int = field(default_factory=os.getpid)
    moving: Any = field(default_factory=threading.RLock)  # held while the folder changes
    error: str | None = None
    shared: bool = True  # all ranks write to one folder
    described: dict[str, Any] = field(default_factory=dict)
    on_close: list[Callable[[], None]] = field(default_factory=list)
    alone: bool = False
    raised: list[BaseException] = field(default_factory=list)  # by signal handlers while `agree` waited
    must_agree: bool = False  # a failed exchange in `agree` raises, and the communicator stays usable
    wires: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # monitor.wire by transport
    stock_variables: Mapping[str, str] = field(default_factory=nccl.stock_variables)
    stays: Arm | None = None  # the arm of all further steps
    why_stays: str = ""
    followed: bool = False  # another run measures its model from now on
    optimizer: str = ""  # class of the one whose updates end the steps; "": the first one that updates the model
    started_wall_ns: int = field(default_factory=time.time_ns)
    joining: "Joining | None" = None  # for a run that began without the other ranks
    begun_ns: int = 0  # of the current step
    mixed_step: int = -1  # the step whose gradients began over one path, and ended over another
    stamps_gradients: bool = False  # in every step, on a GPU too
    ranges: Any = None  # torch.cuda.nvtx, if steps are NVTX ranges
    range: Any = None  # of the current step
    drain: Callable[[], None] | None = None  # waits for the device's work of the training's stream; see runs_ahead
    until: float = float("inf")  # deadline of the run's end for other ranks, by time.monotonic

    def __post_init__(self) -> None:
        _sessions.add(self)

    @property
    def control(self) -> "_core.Comm":
        """Communicator of all ranks. RuntimeError while this rank records alone."""
        if self.comm is None:
            raise RuntimeError(f"rank {self.place.rank} records alone: no other rank has joined its run")
        return self.comm

    @property
    def arm(self) -> Arm:
        """Return the current step's arm."""
        return self.stays or self.blocks.arms[self.blocks.at(self.step)[1]]

    @property
    def decides(self) -> bool:
        """True while the ranks choose the arm of each block by the steps before it."""
        return isinstance(self.blocks, Deciding) and self.stays is None

    @property
    def switches(self) -> bool:
        """True if an arm moves gradients by another path than the user's: ranks must then be in the same arm."""
        return not set(self.blocks.arms) <= {STOCK, BARE}

    @property
    def block_ends(self) -> bool:
        """True if the ranks choose the next block's arm before this step."""
        return self.stays is None and self.blocks.ends_before(self.step)

    @property
    def sampled(self) -> bool:
        """True for steps in which each module is stamped."""
        every = self.settings.sample_every
        # Soon after the usual START_STEP, and not always at the same place of a block.
        return every > 0 and self.counted and self.step % every == (every // 2 + 1) % every

    @property
    def counted(self) -> bool:
        """True for steps inside START_STEP and END_STEP, while arms take turns as planned."""
        end = self.settings.end_step
        return self.stays is None and self.step >= self.settings.start_step and (end == 0 or self.step < end)

    @property
    def in_child(self) -> bool:
        """True in a forked child, which has no part in the run."""
        return os.getpid() != self.pid

    def begin(self) -> None:
        """Stamp the beginning of a step."""
        self.begun_ns = time.monotonic_ns()
        block, arm = self.blocks.at(self.step)
        self.recorder.step = self.step
        self.recorder.detailed = self.sampled or self.stamps_gradients
        for communicator in self.arms.values():
            ring = getattr(communicator, "_ring", None)
            if ring is not None:
                ring.step = self.step
        self.running = True
        if self.ranges is not None:
            # Not one that nests: the step may begin inside a range of the script.
            self.range = self.ranges.range_start(f"step {self.step} over {self.arm}")
        if self.counted:
            self.recorder.put(EVENTS["STEP_BEGIN"], 0, block, arm, int(self.sampled), monitor.processor_ns())

    def end(self, *, recorded: bool = True) -> None:
        """Stamp the end of a step, unless recorded is False, and advance to the next."""
        try:
            if self.running and self.counted and recorded and self.step != self.mixed_step:
                self.recorder.put(EVENTS["STEP_END"], d=monitor.processor_ns())
        finally:
            self.end_range()
            if self.running and self.stays is None:
                if recorded and self.drain is not None and self.blocks.exact_after(self.step):
                    self.drain()
                self.blocks.took(time.monotonic_ns() - self.begun_ns)
            self.running = False
            self.step += 1

    def end_range(self) -> None:
        """End the NVTX range of the step, if there is one."""
        if self.running and self.ranges is not None:
            self.ranges.range_end(self.range)

    def runs_ahead(self, drain: Callable[[], None]) -> None:
        """Note that the host runs ahead of the device: `drain` waits for it where the time of a block is needed."""
        self.drain = drain
        if isinstance(self.blocks, Deciding):
            self.blocks.runs_ahead = True

    def agree(self) -> bool:
        """Return True if all ranks are at this step, so that another block may begin. Every rank calls it.

        Ranks may skip steps that others make. If ranks differ, or do not answer within AGREE_S, all ranks stop
        switching arms: a rank that comes later waits as long. With must_agree, a failed exchange raises instead, as
        control.exchange. Exceptions of signal handlers meanwhile are put into `raised`: without the answer, this rank
        alone would keep its arm. The caller raises them once it has followed the answer.
        """
        if self.stays is not None:
            return False
        mine = self.blocks.values(self.step)
        try:
            # With must_agree it has a place among all exchanges, so that another rank's failure ends it at once.
            name = None if self.must_agree else "netbottleneck.turns"
            found = self.control.exchange(mine, limit_s=AGREE_S, name=name, raised=self.raised)
            same = {values[:8] for values in found} == {mine[:8]}
            why = "ranks are at different steps"
        except (*FAILURES, HorovodInternalError) as error:
            if self.must_agree:
                raise
            same, why = False, str(error)
        if not same:
            self.why_stays = why
            return False
        if line := self.blocks.decide(self.step, found):
            self._found(line)
        return True

    def _found(self, line: str) -> None:
        """Record what the ranks have found at once: the run may be killed."""
        self.notes.append(line)
        if self.place.rank == 0:
            logger.warning("%s", line)
        try:
            self.write(finished=False)
            if self.place.rank == 0:
                run_folder.write_run(self.folder, _run(self))
        except OSError as error:  # the disk may be full
            if of_handler(error):
                raise
            logger.warning("%s: the record lacks this so far: %s", self.folder, error)

    def keep_own_path(self, own: communicators.Communicator) -> None:
        """Send gradients by the user's own path from now on.

        A recorded step over another arm that is under way gets no end. Raises OSError if rank 0 cannot write the list
        of arms.
        """
        self.arms = {**self.arms, STOCK: own, BARE: own}
        turns, length = (STOCK, BARE), self.settings.block_steps
        if self.step < max(1, self.settings.start_step):
            self.blocks = observing(length, self.settings.start_step)
        else:  # records name an arm by its place in the list
            self.mixed_step = -1 if self.arm in turns else self.step
            arms = tuple(dict.fromkeys((*self.blocks.arms, *turns)))
            self.blocks = Blocks(arms, length, turns, self.step + 1, self.blocks.at(self.step)[0] + 1)
        if self.place.rank == 0 and not self.in_child:
            run_folder.write_run(self.folder, _run(self))

    def stay(self, arm: Arm) -> None:
        """Assign all further steps to one arm, and stop recording them."""
        self.stays = arm
        note = f"{STAYS} {arm}, from step {self.step} on: {self.why_stays}"
        logger.warning("%s", note)
        self.notes.append(note)

    @contextlib.contextmanager
    def by_itself(self, number: int) -> Generator[None, None, None]:
        """Stamp the body as step `number` of this rank alone, before the arms take turns.

        For a session opened with alone=True.
        """
        if not self.alone or self.running:
            raise ValueError("steps of one rank alone come before all others, in a session opened with alone=True")
        self.recorder.step = number
        self.recorder.put(EVENTS["STEP_BEGIN"], 0, 0, len(self.blocks.arms), 0)
        yield
        self.recorder.put(EVENTS["STEP_END"])

    def describe(self, **what: Any) -> None:
        """Add to this rank's record (parameters, modules, buckets), and write it."""
        self.described.update(what)
        self.write(finished=False)

    def write(self, *, finished: bool, error: str | None = None) -> None:
        """Write this rank's record. Does nothing in a forked child."""
        if self.in_child:
            return
        with self.moving:
            run_folder.take_nccl_events(self.folder, self.place.rank)
            run_folder.write_meta(self.folder, self.place.rank, self._meta(finished, error))

    def _meta(self, finished: bool, error: str | None) -> dict[str, Any]:
        return {
            "version": 1,
            "rank": self.place.rank,
            "size": self.place.size,
            "hostname": platform.node(),
            "host_id": connect.host_digest(self.settings).hex(),
            "machine_id": machine_id(),
            "pid": os.getpid(),
            "pid_namespace": sampler.pid_namespace(),
            "finished": finished,
            "error": error,
            "cores": monitor.cores(),
            **monitor.quota(),
            "stock_variables": self.stock_variables,
            "transports": {
                arm.transport: {**communicator.info(), **self.wires.get(arm.transport, {})}
                for arm, communicator in self.arms.items()
                if arm in self.blocks.arms  # not the one that a run turns to at its end, and does not record
            },
            **(self.blocks.described() if isinstance(self.blocks, Deciding) else {}),
            **self.described,
        }

    def fail(self, error: BaseException) -> None:
        """End the run with the error that ends the training. A failure of the run folder is logged, not raised."""
        try:
            self.close(words(error))
        except OSError as failure:  # the disk may be full
            if of_handler(failure):
                raise
            logger.error("%s: the record is not complete: %s", self.folder, failure)

    def close(self, error: str | None = None) -> None:
        """End the run. On return, the records of every rank that has arrived are complete on disk."""
        if self.closed or self.in_child:
            return
        self.closed = True
        exits.unregister(self.close)  # otherwise the run and its gradients would live as long as the process
        self.error = error
        if self.running and error is None:
            self.running = False  # the loop ended in an unfinished step
        with contextlib.ExitStack() as ending:  # each is called, also where a signal handler ends one
            ending.callback(self._close_record, error)
            ending.callback(self._note_unfinished)
            ending.callback(self.on_close.clear)  # the script may keep the session, but not its model by that
            for call in reversed(self.on_close):
                ending.callback(_logged, call)
            if self.joining is not None:
                self.joining.settle()
            self._name_record()

    def _close_record(self, error: str | None) -> None:
        self.until = time.monotonic() + self._finish_s
        try:
            self.write(finished=error is None, error=error)
            if self.place.rank == 0 or self.comm is None:
                run_folder.write_run(self.folder, _run(self))
        finally:
            if self.comm is not None and self in _clocked:
                with contextlib.suppress(OSError, RuntimeError):  # its communicator may be closed
                    self.comm.record_clock(None)
            for communicator in dict.fromkeys(self.arms.values()):
                communicator.close() if error is None else getattr(communicator, "abort", communicator.close)()
            self.recorder.close()

    def _name_record(self) -> None:
        """Log how to read what was recorded before an error, unless another rank has failed before."""
        if self.error is not None and self.step > self.settings.start_step and not run_folder.failed(self.folder):
            logger.warning(
                "rank %d ended by an exception; its steps until then: netbottleneck report %s",
                self.place.rank,
                self.folder,
            )

    def _note_unfinished(self) -> None:
        line = self.blocks.unfinished(self.step) if isinstance(self.blocks, Deciding) and self.stays is None else ""
        self.notes += filter(None, (line, run_folder.no_nccl_events(self.folder, self.place.rank)))

    def begin_folder(self) -> None:
        """Write the run folder's description of the run. Called by rank 0, and by a rank that records alone."""
        run_folder.write_run(self.folder, _run(self))
        run_folder.write_environment(self.folder, self.settings)

    def bring(self) -> None:
        """Copy all records to rank 0's folder if no folder is shared. Every rank calls it, after `close`."""
        if self.comm is not None and not self.shared:
            try:
                run_folder.gather(self.comm, self.folder, self.until)
            except (OSError, ValueError) as error:  # ValueError: a copy that was late is still under way
                logger.warning("the records of other hosts could not be copied to %s: %s", self.folder, error)

    @property
    def _finish_s(self) -> float:
        failed = self.error is not None or (self.comm is not None and self.comm.failed)
        return FAILED_FINISH_S if failed else FINISH_S

    def collect(self) -> None:
        """Wait, at most FINISH_S, until rank 0 has the records of all ranks in its folder. After `bring`."""
        if self.comm is None or self.place.rank != 0 or not self.shared:
            return
        missing = run_folder.incomplete(self.folder, self.place.size, self.until)
        if missing:
            logger.warning("no complete record of ranks %s in %s", missing, self.folder)


def same_ranks(settings: Settings, place: connect.Place) -> None:
    """Raise ValueError if the running job, or the one that would start, is not that of these ranks.

    Such a process would wait for ranks that never come, or run as if it were alone.
    """
    started = job.is_started()
    here = job.current().place if started else connect.detect(settings)
    if (here.rank, here.size) == (place.rank, place.size):
        return
    ours = f"rank {here.rank} of {here.size}, torch.distributed says {place.rank} of {place.size}"
    if started:
        raise ValueError(f"this process was measured as {ours}: it can measure only groups of the same ranks")
    raise ValueError(
        f"the launcher's variables say {ours}: set RANK and WORLD_SIZE in each process to the values of "
        "torch.distributed"
    )


def _communicator(  # noqa: PLR0913, PLR0917 - what a transport may need, once
    arm: Arm,
    settings: Settings,
    place: connect.Place,
    ring: "_core.Recorder | None",
    recorder: "_core.Recorder",
    control: "_core.Comm",
    stock: Any,
) -> communicators.Communicator:
    meet = functools.partial(together, control, limit_s=settings.start_timeout_s)
    if arm.over_nccl:
        prepared = communicators.voted(meet, functools.partial(stock.over_nccl, arm.transport, settings))
        beside: communicators.Communicator = communicators.voted(meet, prepared)
        return beside
    if ring is not None:
        return communicators.Native(
            arm.transport, connect.connect(settings, place, recorder=ring, transport=arm.transport), ring
        )
    if arm.transport == NULL:
        return communicators.Null()
    return communicators.Stock(communicators.stock_group(settings, place, meet), place.size, recorder)


def _refuse_nccl(turns: tuple[Arm, ...], settings: Settings, control: "_core.Comm", stock: Any) -> None:
    """Raise ValueError, the same on all ranks, if an arm needs NCCL and a rank cannot use it."""
    named = [arm.transport for arm in turns if arm.over_nccl]

    def check() -> None:
        reason = nccl.refusal(named, settings)
        if not reason and not hasattr(stock, "over_nccl"):
            reason = f"{named[0]}: only gradients of a DDP model travel over NCCL: use stock, tcp or ofi"
        if reason:
            raise ValueError(reason)

    if named:
        communicators.voted(functools.partial(together, control, limit_s=settings.start_timeout_s), check)


def _communicators(
    turns: tuple[Arm, ...], own: communicators.Communicator | None, make: Callable[[Arm], communicators.Communicator]
) -> dict[str, communicators.Communicator]:
    """Return the communicators of arms, by transport: arms with the same transport share its connections."""
    made: dict[str, communicators.Communicator] = {}
    try:
        for arm in turns:
            made[arm.transport] = (own if arm.own_path else made.get(arm.transport)) or make(arm)
    except Exception:
        for opened in made.values():
            if opened is not own:
                getattr(opened, "abort", opened.close)()
        raise
    return made


def _automatic(settings: Settings, place: connect.Place, control: "_core.Comm") -> tuple[tuple[Arm, ...], list[str]]:
    """Return stock and the native arms that all ranks can use, and a note for each of the others. Ranks call it."""
    native = tuple(Arm(name) for name in NATIVE)
    if place.size == 1:
        return (STOCK,), []
    reasons = [communicators.native_refusal(arm.transport, settings) for arm in native]
    mine = b"".join(
        reason.encode()[: communicators.REASON_BYTES].ljust(communicators.REASON_BYTES) for reason in reasons
    )
    votes = together(control, mine, settings.start_timeout_s)
    of_ranks = [
        {
            arm: vote[place * communicators.REASON_BYTES :][: communicators.REASON_BYTES]
            .decode(errors="replace")
            .strip()
            for place, arm in enumerate(native)
        }
        for vote in votes
    ]
    kept, notes = usable(native, of_ranks)
    return (STOCK, *kept), notes


def _plan(turns: tuple[Arm, ...], settings: Settings, *, automatic: bool) -> Blocks | Deciding:
    known = settings.alternate == UNTIL_KNOWN and not set(turns) <= {STOCK, BARE}  # for which ranks do not agree
    if turns == (STOCK, BARE):
        return observing(settings.block_steps, settings.start_step)
    if len(turns) == 1 or not (automatic or known):
        return Blocks(turns, settings.block_steps)
    if not automatic:
        return UntilKnown(turns, settings.block_steps, settings.start_step, settings.end_step)
    return Auto(turns, settings.block_steps) if "block_steps" in settings.sources else Auto(turns)


def open_session(  # noqa: PLR0913 - all but the first have a default that fits
    settings: Settings,
    *,
    arms: tuple[str, ...] | None = None,
    stock: communicators.Communicator | None = None,
    directory: str | None = None,
    model: str = "",
    network: Mapping[str, Any] | None = None,
    notes: tuple[str, ...] = (),
    alone: bool = False,
) -> Session:
    """Return a session of all ranks of the job; every rank calls this.

    arms: names of the arms that take turns; None: from the settings. "bare" is the user's own path, untouched: the
    hooks that use the session must step aside. stock: the stock communicator; None: gloo. Arms over NCCL need its
    method over_nccl. alone: steps of one rank by itself come first, see Session.by_itself. Raises as connect.connect
    and together, OSError if the folder cannot be written, and ValueError for an arm over NCCL that cannot be used.
    """
    this = job.start(settings)
    place, control = this.place, this.comm
    turns = tuple(dict.fromkeys(Arm.parse(name) for name in arms or settings.transports))
    automatic = turns == (AUTO,)
    if automatic:
        turns, left_out = _automatic(settings, place, control)
        notes = (*notes, *left_out)
    _refuse_nccl(turns, settings, control, stock)
    folder = run_folder.claim(control, run_folder.wanted(settings, directory), settings.start_timeout_s)
    recorder = run_folder.open_ring(folder, place.rank, "train", settings)
    rings = {
        arm.transport: run_folder.open_ring(folder, place.rank, arm.transport, settings) for arm in turns if arm.native
    }
    together(control, b"rings", settings.start_timeout_s)  # no rank connects if another cannot record
    made = _communicators(
        turns,
        stock,
        lambda arm: _communicator(arm, settings, place, rings.get(arm.transport), recorder, control, stock),
    )
    opened = Session(
        settings,
        place,
        folder,
        _plan(turns, settings, automatic=automatic),
        recorder,
        {arm: made[arm.transport] for arm in turns},
        control,
        model,
        network,
        list(notes),
        alone=alone,
        wires={name: monitor.wire(settings, name, provider=one.info().get("provider")) for name, one in made.items()},
    )
    if place.rank == 0:
        opened.begin_folder()
    opened.write(finished=False)
    _meet(opened, control)
    exits.register(opened.close)
    return opened


def open_together(settings: Settings, *, ready: Callable[[Session], None], **options: Any) -> Session:
    """Return open_session's result on all ranks or on none: if one fails, or `ready` with its session, all raise."""
    session = None
    try:
        session = open_session(settings, **options)
        ready(session)
        together(session.control, READY, settings.start_timeout_s)
        return session
    except Exception as error:
        if not _of_exchange(error) and job.is_started():
            with contextlib.suppress(*FAILURES, HorovodInternalError):
                together(job.current().comm, FAILED, settings.start_timeout_s)
        if session is not None:
            session.fail(error)
        if _of_exchange(error) and "mismatched sizes" in str(error):
            raise HorovodInternalError("another rank could not open the run: see that rank's log") from error
        raise


def _of_exchange(error: Exception) -> bool:
    """Return True if all ranks reached the exchange that failed, so none still waits for this rank."""
    return isinstance(error, HorovodInternalError) and "netbottleneck.exchange" in str(error)


def _meet(session: Session, control: "_core.Comm") -> None:
    """Check that all ranks share the run folder; start this host's monitor; record the clock. Every rank calls it."""
    limit_s = session.settings.start_timeout_s
    together(control, b"written", limit_s)
    session.shared = run_folder.is_shared(control, session.folder, limit_s)
    folder = session.folder / run_folder.RANKS
    session.on_close.append(monitor.watch(session.settings, session.place, folder, note=session.notes.append))
    if session.place.rank == 0 and progress.is_shown(session.settings):
        session.on_close.append(progress.Progress(session.folder, session.settings.progress_s).close)
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # the run may be closed by now
        control.record_clock(session.recorder)
        _clocked.clear()
        _clocked.add(session)


def observe(
    settings: Settings,
    place: connect.Place,
    *,
    stock: communicators.Communicator,
    arms: tuple[Arm, ...] = (STOCK, BARE),
    directory: str | None = None,
    model: str = "",
) -> Session:
    """Return a session of this rank that begins at once, and joins the other ranks' sessions during the first steps.

    Every arm sends gradients by the user's own path, `stock`, so ranks need no negotiation. Raises OSError if no folder
    can be written.
    """
    settings = connect.with_known_place(settings, place)
    wanted = run_folder.wanted(settings, directory)
    name = f".{wanted.name}-{platform.node()}-{place.rank}-{os.getpid()}-{next(_scratches)}"
    scratch = run_folder.hidden_in(wanted) / name
    try:
        recorder = run_folder.open_ring(scratch, place.rank, "train", settings)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    opened = Session(
        settings,
        place,
        scratch,
        _plan(arms, settings, automatic=False),
        recorder,
        dict.fromkeys(arms, stock),
        None,
        model,
        wires={STOCK: monitor.wire(settings, STOCK, provider=stock.info().get("provider"))},
    )
    opened.write(finished=False)
    opened.joining = Joining(opened, wanted)
    exits.register(opened.close)
    return opened


_scratches = itertools.count()
_sessions: "weakref.WeakSet[Session]" = weakref.WeakSet()
_clocked: "weakref.WeakSet[Session]" = weakref.WeakSet()  # the one whose recorder gets the clock's measurements


def _before_fork() -> None:
    """Wait until no thread of torch runs a callback of ours: see Recorder.settle."""
    for session in tuple(_sessions):
        session.recorder.settle()


os.register_at_fork(before=_before_fork)


def opened() -> bool:
    """Return True if this process has begun a measured run."""
    return bool(_sessions)


class Joining:
    """Joins this rank's session with those of the other ranks, in its own thread, for at most JOIN_S.

    Sessions of one process join one after another. A session that has not joined when it closes, or after JOIN_S, stays
    alone and notes it.
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
        """True once joining has ended: `settle` then returns at once."""
        return not self._thread.is_alive()

    def settle(self) -> None:
        """Wait until the ranks have joined or the deadline has passed. Then the session's folder is final."""
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
            folder = run_folder.claim(this.comm, self._wanted, settings.start_timeout_s)
            with self._lock:
                if not self._alone:
                    self._adopt(this, folder)
            if session.comm is not None:
                _meet(session, this.comm)
        except Exception as error:
            with self._lock:
                if session.comm is not None:
                    self._note_missing(error)
                elif not self._alone:
                    self._stay_alone(str(error))

    def _note_missing(self, error: Exception) -> None:
        note = (
            f"rank {self._session.place.rank} joined the run, but not all ranks began to record it ({error}): clocks "
            "may not be aligned, and counters of hosts or the progress may be missing"
        )
        logger.warning("%s", note)
        self._session.notes.append(note)

    def _adopt(self, this: job.Job, folder: Path) -> None:
        session = self._session
        try:
            run_folder.move_records(session.folder, folder)
        except OSError as error:  # rank 0's folder is on another file system of this host
            folder = run_folder.own_folder(self._wanted, this.place.rank, error)
            run_folder.move_records(session.folder, folder)
        session.folder, session.place, session.comm = folder, this.place, this.comm
        session.write(finished=False)
        if this.place.rank == 0:
            session.begin_folder()

    def _stay_alone(self, why: str) -> None:
        """Move this rank's records to a folder of its own."""
        self._alone = True
        session = self._session
        session.folder = run_folder.keep_alone(session.folder, self._wanted, session.place.rank)
        note = (
            f"rank {session.place.rank} recorded alone, because the ranks did not join ({why}): waiting times between "
            "ranks, the slowest rank and the measurements of other ranks are not known"
        )
        logger.warning("%s", note)
        session.notes.append(note)
        session.begin_folder()


def _run(session: Session) -> dict[str, Any]:
    return {
        "version": 1,
        "id": run_folder.run_id(session.folder),
        "command": sys.argv,
        "started_wall_ns": session.started_wall_ns,
        "size": session.place.size,
        "arms": [*session.blocks.arms, *([SINGLE] if session.alone else [])],
        "network": session.network,
        "model": session.model,
        "notes": session.notes,
    }
