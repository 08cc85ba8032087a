"""Tasks of a study's ranks: their values as JSON, the start of a rank's run, and the replay job.

A replay sends the bytes of a backward pass over a real transport, without model or torch; compute is a timed wait. This
module imports torch only where a replay has stock among its transports.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from netbottleneck import config
from netbottleneck.launch import connect
from netbottleneck.runtime.async_operations import average_factor
from netbottleneck.runtime.communicators import key_of, tensor_over
from netbottleneck.runtime.session import Session, open_session
from netbottleneck.trace.model import decode
from netbottleneck.trace.ring_file import EVENTS
from netbottleneck.trace.transports import BARE, STOCK, Arm
from netbottleneck.whatif.plan import DTYPE, ReplaySchedule, described

if TYPE_CHECKING:
    from netbottleneck import _core

# Tasks and results.

PLAY = "play"  # a replay schedule, without a model
INFLATION = "inflation"
ACCURACY = 0.95  # training target for digits, on the held-out fifth
SAME_STEPS = -1
MOST_ROUNDS = 8  # multiple of the rounds after which training ends at any accuracy


@dataclass(frozen=True)
class Task:
    """One job on one network. The arms take turns by blocks of block_steps steps, in `rounds` rounds.

    job: "digits", "replay" (a torch model that waits), PLAY or INFLATION. alone: steps that rank 0 first runs alone.
    exact_steps: this number of steps instead of rounds, at any accuracy; SAME_STEPS: as many as the previous task ran.
    compute_ms, compute, model: of the replay. network, notes: see open_session.
    """

    job: str
    arms: tuple[Arm, ...]
    folder: str
    block_steps: int = 10
    rounds: int = 6
    alone: int = 10
    exact_steps: int = 0
    compute: str = "sleep"
    compute_ms: tuple[float, float] = (133.0, 267.0)
    model: str = "resnet50"
    provider: str | None = None
    network: dict[str, Any] | None = None
    schedule: str = ""  # the file of the replay schedule
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """The minimum number of steps."""
        return self.exact_steps or self.block_steps * len(self.arms) * self.rounds

    @property
    def most_steps(self) -> int:
        """The maximum number of steps."""
        return self.exact_steps or self.steps * MOST_ROUNDS

    @property
    def title(self) -> str:
        """A description of the job."""
        if self.job == PLAY:
            return self.model
        if self.job == INFLATION:
            return f"{self.model}, forward and backward passes"
        return "thin ResNet on digits" if self.job == "digits" else f"{self.model}, replayed ({self.compute})"

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Task:
        """Return the task whose asdict, as JSON, was parsed."""
        for name in ("compute_ms", "notes"):
            document[name] = tuple(document[name])
        arms = tuple(Arm.parse(name) for name in document.pop("arms"))
        return cls(arms=arms, **document)


def to_json(tasks: Sequence[Task]) -> str:
    """Return tasks as one line of JSON."""
    return json.dumps([asdict(task) for task in tasks])


def from_json(text: str) -> list[Task]:
    """Return the tasks that to_json wrote."""
    return [Task.from_dict(document) for document in json.loads(text)]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    digests: SHA-256 of each rank's weights, or of its sums; () if no arm reduced anything. accuracy: on held-out data,
    None: not measured.
    """

    folder: str
    steps: int
    digests: tuple[str, ...]
    accuracy: float | None = None

    @property
    def equal(self) -> bool | None:
        """True if all ranks hold bit-identical weights; None if there are none to compare."""
        return len(set(self.digests)) == 1 if self.digests else None

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Outcome:
        """Return the outcome that as_dict converted."""
        return cls(document["folder"], document["steps"], tuple(document["digests"]), document["accuracy"])

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome as plain values."""
        return {**asdict(self), "digests": list(self.digests), "equal_on_all_ranks": self.equal}


# The start of a rank's run, the same for all jobs. It imports no torch.

WARM_BYTES = 32 << 20
WARM_TIMES = 3
MONITOR_HZ = 100  # default: a study samples the counters of its hosts
ALIVE_S = 10.0  # between reports of a job whose blocks take longer

StepProgress = Callable[[int, int, str], None]  # step, steps, arm


class Reports:
    """Reports a job's progress: between its blocks, and every ALIVE_S inside a longer one. Without any, it is ended."""

    def __init__(self, progress: StepProgress, steps: int) -> None:
        self._progress = progress
        self._steps = steps
        self._last = time.monotonic()

    def block(self, step: int, arm: str) -> None:
        """Report the end of a block, before step `step`."""
        self._last = time.monotonic()
        self._progress(step, self._steps, arm)

    def alive(self, step: int, arm: str) -> None:
        """Report a step inside a block, unless another report was recent."""
        if time.monotonic() - self._last >= ALIVE_S:
            self.block(step, arm)


@contextmanager
def open_task(task: Task) -> Generator[Session, None, None]:
    """Open the session of a task; at the end close it, and bring the records of all ranks to rank 0's folder.

    Every rank calls it. Raises as open_session.
    """
    session = _open(task)
    try:
        yield session
    except BaseException as error:
        session.fail(error)
        raise
    session.close()
    session.bring()
    session.collect()


def _open(task: Task) -> Session:
    given = config.settings({"directory": task.folder, "provider": task.provider})
    settings = replace(
        given,
        monitor_hz=given.monitor_hz if "monitor_hz" in given.sources else MONITOR_HZ,
        progress_s=0.0,
        block_steps=task.block_steps,
        alternate=config.ALWAYS,
        start_step=0,
        end_step=0,
        sample_every=task.block_steps + 3,  # never the same step of a block twice in turn
        transports=tuple(arm for arm in task.arms if arm != BARE) or (STOCK,),
    )
    opened = open_session(
        settings,
        arms=task.arms,
        directory=task.folder,
        model=task.title,
        network=task.network,
        notes=task.notes,
        alone=task.alone > 0,
    )
    opened.must_agree = True  # if another rank's task has failed, this one fails too, and the next task can run
    return opened


def warm_up(session: Session) -> None:
    """Run a transfer over each of our transports before counted steps: the first large one probes numbers of lanes."""
    core = connect.core()
    for name, arm in session.arms.items():
        comm = getattr(arm, "comm", None)
        if comm is None:
            continue
        arena = core.Arena(WARM_BYTES)
        comm.map(arena)
        for number in range(WARM_TIMES):
            comm.submit(f"study.warm.{name}.{number}", core.ALLREDUCE, arena, core.FLOAT32, keep=arena).wait()


# The replay job: a schedule played over transports that take turns. It imports torch only where stock is among them.
#
# C code waits for the recorded times and writes the timestamps. Python runs once per bucket to submit it, and per step.

VERSION = 1
FORMAT = "netbottleneck-replay-schedule"


def write_schedule(path: Path, schedule: ReplaySchedule) -> None:
    """Write a replay schedule for the ranks to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": FORMAT, "version": VERSION, **asdict(schedule)}), encoding="utf-8")


def read_schedule(path: Path | str) -> ReplaySchedule:
    """Read what `write` wrote. Raises ValueError naming the file."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if (document.get("format"), document.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"not a {FORMAT} of version {VERSION}")
        schedule: ReplaySchedule = decode(ReplaySchedule, document)
        return schedule
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket with the attributes of communicators.Buckets."""

    name: str
    parameters: tuple[int, ...]
    nbytes: int
    dtype: str = DTYPE


class Player:
    """The buckets of a replay schedule in memory and their target, with the interface of communicators.Buckets."""

    version = 0
    factors = (True, 1.0, None)

    def __init__(self, schedule: ReplaySchedule, rank: int, size: int, *, spin: bool = False) -> None:
        core = connect.core()
        self.schedule = schedule
        self.buckets = [
            Bucket(f"replay.bucket.{number}", bucket, schedule.bucket_bytes(number))
            for number, bucket in enumerate(schedule.buckets)
        ]
        self.memory = [core.Arena(bucket.nbytes) for bucket in self.buckets]
        self._size, self._spin = size, spin
        self._parts = schedule.parts()
        self._destination: Any = None
        self.fill(float(rank + 1))

    def fill(self, value: float) -> None:
        """Set every gradient of every bucket to `value`."""
        for arena in self.memory:
            np.frombuffer(arena, np.float32)[:] = value

    def digest(self) -> bytes:
        """Return the SHA-256 of all gradients."""
        found = hashlib.sha256()
        for arena in self.memory:
            found.update(memoryview(arena))
        return found.digest()

    def flat(self, index: int) -> Any:
        """Return a bucket as a flat tensor, for stock, which runs in torch."""
        return tensor_over(self.memory[index])

    def target(self, destination: Any, _average: bool = True, *, predivide: float = 1.0, op: int | None = None) -> None:
        """Set the target of complete buckets. Raises ValueError for anything but a mean."""
        if predivide != 1.0 or op is not None:
            raise ValueError("a replay sends means")
        self._destination = destination

    def describe(self) -> dict[str, Any]:
        """Return the description of tensors and buckets for a rank's record."""
        tensors = [(name, size, DTYPE) for name, size in self.schedule.tensors]
        return {"modules": [], **described(tensors, self.buckets, key_of)}

    def step(self, recorder: _core.Recorder) -> None:
        """Play one step; returns when all gradients are reduced and the optimizer's time has passed.

        Raises as Work.wait."""
        core = connect.core()
        begin, schedule = core.now_ns(), self.schedule
        recorder.put_at(begin, EVENTS["FORWARD_BEGIN"])
        core.stamp_at(recorder, EVENTS["FORWARD_END"], [begin + schedule.forward_ns], [0], self._spin)
        works = []
        for times, tensors, complete in self._parts:
            core.stamp_at(recorder, EVENTS["GRAD_READY"], [begin + at for at in times], tensors, self._spin)
            works += [self._send(number) for number in complete]
        recorder.put(EVENTS["WAIT_BEGIN"])
        for work in works:
            if work is not None:
                work.wait()
        recorder.put(EVENTS["WAIT_END"])
        recorder.put(EVENTS["OPTIMIZER_BEGIN"])
        core.stamp_at(recorder, EVENTS["OPTIMIZER_END"], [core.now_ns() + schedule.tail_ns], [0], self._spin)

    def _send(self, index: int) -> Any:
        destination, bucket, arena = self._destination, self.buckets[index], self.memory[index]
        if destination is None:
            return None
        if callable(destination):
            return destination(index)
        core = connect.core()
        return destination.submit(
            bucket.name,
            core.ALLREDUCE,
            arena,
            core.FLOAT32,
            postscale=average_factor(self._size),
            bucket=index + 1,
            keep=arena,
        )


def play_schedule(task: Task, progress: StepProgress) -> Outcome:
    """Play a task's schedule on this rank; every rank calls it. progress: see Reports.

    Raises what the transports raise, and ValueError for an invalid schedule.
    """
    reports = Reports(progress, task.steps)
    schedule = read_schedule(task.schedule)
    with open_task(task) as session:
        place = session.place
        player = Player(schedule, place.rank, place.size, spin=task.compute == "spin")
        session.describe(**player.describe())
        if task.alone:
            _play_alone(session, player, task, reports)
        warm_up(session)
        _play(session, player, task, reports)
        reduced = any(arm.real for arm in task.arms)
        digests = session.control.exchange(player.digest()) if reduced else []
    return Outcome(str(session.folder), task.steps, tuple(digest.hex() for digest in digests))


def _play_alone(session: Session, player: Player, task: Task, reports: Reports) -> None:
    """Replay on rank 0 alone, without communication; the other ranks wait."""
    if session.place.rank == 0:
        for number in range(task.alone):
            with session.by_itself(number):
                player.step(session.recorder)
            reports.alive(0, "one rank alone")
        reports.block(0, "one rank alone")
    session.control.exchange(b"alone".ljust(8))


def _play(session: Session, player: Player, task: Task, reports: Reports) -> None:
    arm = ""
    while session.step < task.steps:
        if session.arm != arm:
            arm = session.arm
            session.arms[arm].target(player)
            session.arms[arm].barrier()
        until = min(session.step + task.block_steps, task.steps)
        while session.step < until:
            session.begin()
            player.step(session.recorder)
            session.end()
            reports.alive(session.step, arm)
        reports.block(session.step, arm)
