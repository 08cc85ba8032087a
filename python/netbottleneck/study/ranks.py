"""Ranks of a study's job in a lab: starts them, shows their progress, and ends all of them with the job."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from netbottleneck.bench.worker import UNCAPPED_BPS, message_of
from netbottleneck.lab import Lab, LinkSpec
from netbottleneck.launch.topology import without_job
from netbottleneck.study.task import WARM_BYTES, WARM_TIMES, Outcome, Task, read_schedule, to_json

SILENCE_S = 300.0  # limit without progress of a task, in addition to twice its longest step
GRACE_S = 3.0  # after one rank has failed, for the others to report their errors
SHOWN_LINES = 12
# Variables that would install our hooks in the ranks, or redirect their records.
REMOVED_VARIABLES = ("NETBOTTLENECK", "NETBOTTLENECK_TRANSPORT", "NETBOTTLENECK_DIR")
# Errors of a rank that only lost the connection to another rank.
LOST_PEER_ERRORS = ("PeerError", "ClosedError", "Connection reset", "Connection closed", "Broken pipe")

TaskProgress = Callable[[Task, int, int, str], None]


class JobError(RuntimeError):
    """A rank failed; the text names the rank and quotes its last lines."""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the base environment of a lab's ranks: this process's without its own job, and with one thread each."""
    variables = {name: value for name, value in without_job(os.environ).items() if name not in REMOVED_VARIABLES}
    return {**variables, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(extra or {})}


def described_network(how: str, caps: Sequence[LinkSpec], verified: Mapping[str, Any] | None) -> dict[str, Any]:
    """Describe a network for a session. caps: those that exist, by link of a host; the rates of its links add up."""
    rates = [link.link_bps for link in caps if link.link_bps is not None]
    link_bps = sum(rates) if len(rates) == len(caps) else None
    return {"how": how, "link_bps": link_bps, "flow_bps": list(caps[0].flow_bps), "verified": verified or {}}


def run_in_lab(
    lab: Lab,
    tasks: Sequence[Task],
    on_progress: TaskProgress,
    *,
    env: Mapping[str, str] | None = None,
    limit_s: float | None = None,
) -> list[Outcome]:
    """Run tasks one after another on all ranks of a lab, one process each. Calls on_progress(task, step, steps, arm).

    Raises JobError if a rank fails, or no task makes progress for limit_s (None: see patience_s); all ranks are then
    ended.
    """
    limit_s = max(patience_s(task, lab.spec, lab.ranks_per_host) for task in tasks) if limit_s is None else limit_s
    logs = Path(tasks[0].folder).parent
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "netbottleneck.study.worker", to_json(tasks)]
    ranks: list[Rank] = []
    try:
        for rank in range(lab.size):
            path = logs / f"{Path(tasks[0].folder).name}.rank{rank}.log"
            with path.open("wb") as log:
                process = lab.popen(
                    rank,
                    command,
                    environment(env),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=log,
                    start_new_session=True,
                )
            ranks.append(Rank(process, path))
        outcomes = _OutputReader(tasks, ranks, on_progress, limit_s).run()
        if len(outcomes) < len(tasks):
            _wait_for_exit(ranks)
            raise JobError(_failure_text(tasks[len(outcomes)], ranks, limit_s))
        return outcomes
    finally:
        _kill(ranks)


def patience_s(task: Task, spec: LinkSpec, ranks_per_host: int = 1) -> float:
    """Return the allowed silence of rank 0: SILENCE_S, twice a step, and twice the transfers before the first one.

    Transfers are estimated at the slowest rate of the network, which the ranks of a host share."""
    compute_ns = nbytes = 0
    if task.schedule:
        schedule = read_schedule(task.schedule)
        compute_ns, nbytes = schedule.compute_ns, schedule.bytes
    nbytes += WARM_TIMES * WARM_BYTES * len(task.arms)
    transfer_s = 8 * 2 * nbytes * ranks_per_host / (spec.slowest_bps or UNCAPPED_BPS)
    return SILENCE_S + 2 * (compute_ns / 1e9 + transfer_s)


@dataclass(frozen=True)
class Rank:
    """A rank's process and the file of its stderr."""

    process: subprocess.Popen[bytes]
    log: Path


class _OutputReader:
    """Reads the output of rank 0 until all ranks have succeeded, one has failed, or no task makes progress."""

    def __init__(self, tasks: Sequence[Task], ranks: Sequence[Rank], on_progress: TaskProgress, limit_s: float) -> None:
        self._tasks = tasks
        self._processes = [rank.process for rank in ranks]
        self._on_progress = on_progress
        self._limit_s = limit_s
        self._until = time.monotonic() + limit_s
        self._outcomes: list[Outcome] = []

    def run(self) -> list[Outcome]:
        """Return the outcomes of the completed tasks; on a failure they are fewer than the tasks."""
        stream = self._processes[0].stdout
        assert stream is not None
        os.set_blocking(stream.fileno(), False)
        rest = b""
        with selectors.DefaultSelector() as ready:
            ready.register(stream, selectors.EVENT_READ)
            while time.monotonic() < self._until:
                codes = [process.poll() for process in self._processes]
                if ready.select(0.1 if ready.get_map() else 0.02):
                    got = stream.read()
                    if got == b"":
                        ready.unregister(stream)
                    *lines, rest = (rest + (got or b"")).split(b"\n")
                    for line in lines:
                        self._read_line(line)
                elif any(codes):
                    break
                elif all(code == 0 for code in codes):
                    return self._outcomes
        return self._outcomes[: len(self._tasks) - 1]

    def _read_line(self, line: bytes) -> None:
        """Process one line of rank 0."""
        message = message_of(line, ("outcome", "task"))
        if message is None:
            return
        if "outcome" in message:
            self._outcomes.append(Outcome.from_dict(message["outcome"]))
        else:
            self._on_progress(self._tasks[message["task"]], message["step"], message["steps"], message["arm"])
        self._until = time.monotonic() + self._limit_s


def _wait_for_exit(ranks: Sequence[Rank]) -> None:
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until and any(rank.process.poll() is None for rank in ranks):
        time.sleep(0.05)


def _failure_text(task: Task, ranks: Sequence[Rank], limit_s: float) -> str:
    """Name a failed rank and quote its last lines; ranks that only lost another one come last."""
    failed = []
    for number, rank in enumerate(ranks):
        code = rank.process.poll()
        if code:
            text_lines = rank.log.read_text(encoding="utf-8", errors="replace").splitlines()
            lines = [line for line in text_lines if line.strip()]
            last = " ".join(lines[-2:])
            failed.append((any(mark in last for mark in LOST_PEER_ERRORS), number, code, lines))
    if not failed:
        return f"{task.job}: no progress for {limit_s:.0f} s; see {', '.join(str(rank.log) for rank in ranks)}"
    _, number, code, lines = min(failed)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed (exit code {code})"
    others = [f"rank {other}: {text_lines[-1]}" for _, other, _, text_lines in failed if other != number and text_lines]
    return "\n".join([f"{task.job}: rank {number} {how}:", *lines[-SHOWN_LINES:], *others])


def _kill(ranks: Sequence[Rank]) -> None:
    """Kill the ranks that still run, each with its process group."""
    for rank in ranks:
        if rank.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
        if rank.process.stdout is not None:
            rank.process.stdout.close()


# Progress messages: a progress bar on a terminal, plain lines elsewhere.

PARTS = 4  # progress lines per job without a terminal


class Reporter:
    """Prints messages and the progress of running work."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(emoji=False)
        if not self.console.is_terminal:
            self.console.width = 80
        self._progress: Bar | None = None

    def message(self, text: str) -> None:
        """Print a paragraph."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=not self.console.is_terminal)

    def done(self) -> None:
        """Remove the progress bar, if there is one."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    @contextmanager
    def progress(self, what: str) -> Generator[TaskProgress]:
        """Show that work is in progress; yields a callback for (task, step, steps, arm)."""
        if not self.console.is_terminal:
            yield self._plain(what)
            return
        columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[arm]}"))
        self._progress = Bar(*columns, TimeElapsedColumn(), console=self.console, transient=True)
        shown = self._progress.add_task(what, total=None, arm="")
        progress = self._progress

        def on_progress(task: Task, step: int, steps: int, arm: str) -> None:
            progress.update(
                shown, description=task.title, completed=step, total=steps, arm=f"step {step} of {steps}, {arm}"
            )

        progress.start()
        try:
            yield on_progress
        finally:
            self.done()

    def _plain(self, what: str) -> TaskProgress:
        self.message(f"{what} ...")
        reported: dict[str, int] = {}

        def on_progress(task: Task, step: int, steps: int, arm: str) -> None:
            part = PARTS * step // max(steps, 1)
            if part > reported.get(task.folder, -1):
                reported[task.folder] = part
                self.message(f"{task.title} over {', '.join(task.arms)}: step {step} of {steps}")

        return on_progress
