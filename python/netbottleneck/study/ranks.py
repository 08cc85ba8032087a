"""Starts the ranks of a study's job in a lab, follows them, and sees to it that none outlives the job."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from netbottleneck.lab import Lab
from netbottleneck.study.task import Outcome, Task, to_json

LIMIT_S = 300.0  # for each task
GRACE_S = 3.0  # after one rank has failed, for the others to say what they saw
SHOWN_LINES = 12
# What would put hooks of ours into the ranks, or their records elsewhere.
LEFT_OUT = ("NETBOTTLENECK", "NETBOTTLENECK_TRANSPORT", "NETBOTTLENECK_DIR", "LOCAL_RANK", "GROUP_RANK")
# What a rank says that only lost another one.
CONSEQUENCES = ("PeerError", "ClosedError", "Connection reset", "Connection closed", "Broken pipe")

Follow = Callable[[Task, int, int, str], None]


class JobError(RuntimeError):
    """A rank failed; the text shows which, and its own words."""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what ranks of a lab start from: this process's environment, one thread each."""
    kept = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(extra or {})}


def run_in_lab(
    lab: Lab, tasks: Sequence[Task], follow: Follow, *, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
) -> list[Outcome]:
    """Run tasks one after another on all ranks of a lab, one process each. follow(task, step, steps, arm): as it goes.

    Raises JobError where a rank fails, or a task is not done after limit_s; no rank is left then.
    """
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
        outcomes = _Following(tasks, ranks, follow, limit_s).run()
        if len(outcomes) < len(tasks):
            _grace(ranks)
            raise JobError(_describe(tasks[len(outcomes)], ranks, limit_s))
        return outcomes
    finally:
        _end(ranks)


@dataclass(frozen=True)
class Rank:
    """A rank's process, and where its stderr goes."""

    process: subprocess.Popen[bytes]
    log: Path


class _Following:
    """Reads what rank 0 tells, until all ranks have ended well, one has failed, or a task takes too long."""

    def __init__(self, tasks: Sequence[Task], ranks: Sequence[Rank], follow: Follow, limit_s: float) -> None:
        self._tasks = tasks
        self._processes = [rank.process for rank in ranks]
        self._follow = follow
        self._limit_s = limit_s
        self._until = time.monotonic() + limit_s
        self._outcomes: list[Outcome] = []

    def run(self) -> list[Outcome]:
        """Return what came of the tasks that were done; fewer than there are where something failed."""
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
                        self._take(line)
                elif any(codes):
                    break
                elif all(code == 0 for code in codes):
                    return self._outcomes
        return self._outcomes[: len(self._tasks) - 1]

    def _take(self, line: bytes) -> None:
        """Read one line of rank 0; what is none of ours is somebody's print."""
        try:
            said = json.loads(line)
            if "outcome" in said:
                self._outcomes.append(Outcome.from_dict(said["outcome"]))
                self._until = time.monotonic() + self._limit_s
            else:
                self._follow(self._tasks[said["task"]], said["step"], said["steps"], said["arm"])
        except (ValueError, KeyError, TypeError):
            sys.stderr.write(line.decode(errors="replace") + "\n")


def _grace(ranks: Sequence[Rank]) -> None:
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until and any(rank.process.poll() is None for rank in ranks):
        time.sleep(0.05)


def _describe(task: Task, ranks: Sequence[Rank], limit_s: float) -> str:
    """Name the rank that failed and show its words; one that only lost another comes after it."""
    failed = []
    for number, rank in enumerate(ranks):
        code = rank.process.poll()
        if code:
            words = rank.log.read_text(encoding="utf-8", errors="replace").splitlines()
            lines = [line for line in words if line.strip()]
            last = " ".join(lines[-2:])
            failed.append((any(mark in last for mark in CONSEQUENCES), number, code, lines))
    if not failed:
        return f"{task.job}: not done after {limit_s:.0f} s; see {', '.join(str(rank.log) for rank in ranks)}"
    _, number, code, lines = min(failed)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed (exit code {code})"
    others = [f"rank {other}: {words[-1]}" for _, other, _, words in failed if other != number and words]
    return "\n".join([f"{task.job}: rank {number} {how}:", *lines[-SHOWN_LINES:], *others])


def _end(ranks: Sequence[Rank]) -> None:
    """Kill what still runs, each rank with its children."""
    for rank in ranks:
        if rank.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
        if rank.process.stdout is not None:
            rank.process.stdout.close()
