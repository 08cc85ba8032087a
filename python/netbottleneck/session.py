"""A measured run in this process: its folder, its rings, and its arms, which take turns by blocks of steps."""

import atexit
import functools
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netbottleneck import comm as comms
from netbottleneck import job, launch, monitor, records
from netbottleneck.env import Settings, describe
from netbottleneck.recorder import EVENTS
from netbottleneck.records import RANKS
from netbottleneck.trace import SINGLE

if TYPE_CHECKING:
    from netbottleneck import _core

FINISH_S = 20.0  # how long rank 0 waits for the others' records before it reports
FAILED_FINISH_S = 1.0  # the same after an error, or a loss: the others have failed too by then, or are gone

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


@dataclass
class Session:
    """What all hooks of this process write to. Between `end` and `begin` lies what belongs to no step."""

    settings: Settings
    place: launch.Place
    folder: Path
    blocks: Blocks
    recorder: "_core.Recorder"
    arms: Mapping[str, comms.Communicator]
    control: "_core.Comm"
    model: str = ""
    network: Mapping[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    step: int = 0
    running: bool = False
    closed: bool = False
    error: str | None = None
    shared: bool = True  # all ranks write to one folder
    described: dict[str, Any] = field(default_factory=dict)
    on_close: list[Callable[[], None]] = field(default_factory=list)
    alone: bool = False
    wires: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by arm, what monitor.wire says

    @property
    def arm(self) -> str:
        """The name of the arm that the current step belongs to."""
        return self.blocks.arms[self.blocks.at(self.step)[1]]

    @property
    def sampled(self) -> bool:
        """True for steps in which each module is stamped."""
        every = self.settings.sample_every
        # Not the first step of a block of ten, which the comparison of transports leaves out.
        return every > 0 and self.counted and self.step % every == (every // 2 + 1) % every

    @property
    def counted(self) -> bool:
        """True for steps inside START_STEP and END_STEP."""
        end = self.settings.end_step
        return self.step >= self.settings.start_step and (end == 0 or self.step < end)

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

    def end(self) -> None:
        """Stamp the end of a step, and go on to the next."""
        if self.running and self.counted:
            self.recorder.put(EVENTS["STEP_END"], d=monitor.processor_ns())
        self.running = False
        self.step += 1

    @contextmanager
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
        meta = {
            "version": 1,
            "rank": self.place.rank,
            "size": self.place.size,
            "hostname": platform.node(),
            "host_id": launch.host_digest(self.settings).hex(),
            "pid": os.getpid(),
            "finished": finished,
            "error": error,
            "cores": monitor.cores(),
            "transports": {name: {**arm.info(), **self.wires.get(name, {})} for name, arm in self.arms.items()},
            **self.described,
        }
        _write_json(self.folder / RANKS / f"{self.place.rank}.meta.json", meta)

    def close(self, error: str | None = None) -> None:
        """End the run: records are complete on disk when this returns, on every rank that came so far."""
        if self.closed:
            return
        self.closed = True
        self.error = error
        if self.running and error is None:
            self.running = False  # a step that was begun and never ended: the loop is over
        for call in self.on_close:
            call()
        self.write(finished=error is None, error=error)
        for arm in self.arms.values():
            arm.close()
        self.recorder.close()

    def bring(self) -> None:
        """Where no folder is shared, bring all records to rank 0's. Every rank calls it, after `close`."""
        if not self.shared:
            try:
                records.gather(self.control, self.folder / RANKS, self._finish_s)
            except OSError as error:
                logger.warning("the records of other hosts could not be brought to %s: %s", self.folder, error)

    @property
    def _finish_s(self) -> float:
        return FAILED_FINISH_S if self.error is not None or self.control.failed else FINISH_S

    def collect(self) -> None:
        """Wait until rank 0 has the records of all that share its folder, at most FINISH_S. After `bring`."""
        if self.place.rank != 0 or not self.shared:
            return
        until = time.monotonic() + self._finish_s
        missing = set(range(self.place.size))
        while missing and time.monotonic() < until:
            missing = {rank for rank in missing if not records.finished(self.folder / RANKS / f"{rank}.meta.json")}
            if missing:
                time.sleep(0.02)
        if missing:
            logger.warning("no complete record of ranks %s in %s", sorted(missing), self.folder)


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps(value, indent=1), encoding="utf-8")
    scratch.replace(path)


def _folder(settings: Settings, directory: str | None, control: "_core.Comm") -> Path:
    """Return the run folder, the same on all ranks: rank 0 names it."""
    stamp = os.environ.get("SLURM_JOB_ID") or time.strftime("%Y%m%d-%H%M%S")
    wanted = Path(directory or settings.directory or f"netbottleneck-{stamp}").absolute()
    found = records.claim(control, wanted, settings.start_timeout_s)
    if control.rank == 0 and found != wanted:
        logger.warning("NETBOTTLENECK_DIR=%s holds a run already: this one goes to %s", wanted, found)
    return found


def _arm(  # noqa: PLR0913, PLR0917 - what an arm may need, once
    name: str,
    settings: Settings,
    place: launch.Place,
    folder: Path,
    recorder: "_core.Recorder",
    control: "_core.Comm",
    group: Any,
) -> comms.Communicator:
    if name in ("tcp", "ofi"):
        ring = _ring(folder, place.rank, name, settings)
        return comms.Native(name, launch.connect(settings, place, recorder=ring, transport=name), ring)
    if name == "null":
        return comms.Null()
    if name in ("stock", "bare"):
        meet = functools.partial(records.together, control, limit_s=settings.start_timeout_s)
        chosen = group if group is not None else comms.stock_group(settings, place, meet)
        return comms.Stock(chosen, place.size, recorder, owned=group is None)
    raise ValueError(f"NETBOTTLENECK_TRANSPORT={name}: must be a list of {', '.join(comms.KINDS)}")


def _ring(folder: Path, rank: int, name: str, settings: Settings) -> "_core.Recorder":
    path = folder / RANKS / f"{rank}.{name}.ring"
    path.parent.mkdir(parents=True, exist_ok=True)
    ring: _core.Recorder = launch.core().Recorder(
        str(path), settings.trace_events, rank, timeline=settings.timeline is not None
    )
    return ring


def open_session(  # noqa: PLR0913 - all but the first have a default that fits
    settings: Settings,
    *,
    arms: tuple[str, ...] | None = None,
    group: Any = None,
    stock: comms.Communicator | None = None,
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
    Raises as launch.connect and records.together, and OSError where the folder cannot be written.
    """
    this = job.start(settings)
    place, control = this.place, this.comm
    names = arms or settings.transports
    folder = _folder(settings, directory, control)
    recorder = _ring(folder, place.rank, "train", settings)
    made: dict[str, comms.Communicator] = {}
    for name in dict.fromkeys(names):
        own = stock if name in ("stock", "bare") else None
        made[name] = own or _arm(name, settings, place, folder, recorder, control, group)
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
        _write_json(folder / "run.json", _run(opened))
        _write_json(folder / "env.json", {row.name: [row.value, row.source] for row in describe(settings)})
    opened.write(finished=False)
    records.together(control, b"written", settings.start_timeout_s)
    opened.shared = records.shared(control, folder / "run.json", settings.start_timeout_s)
    opened.on_close.append(monitor.watch(settings, place, folder / RANKS))
    atexit.register(opened.close)
    return opened


def _run(session: Session) -> dict[str, Any]:
    folder = session.folder
    return {
        "version": 1,
        "id": f"{folder.parent.name}-{folder.name}" if folder.name.isdecimal() else folder.name,
        "command": sys.argv,
        "started_wall_ns": time.time_ns(),
        "size": session.place.size,
        "transports": [*session.blocks.arms, *([SINGLE] if session.alone else [])],
        "network": session.network,
        "model": session.model,
        "notes": session.notes,
    }
