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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from netbottleneck.lab import Lab
from netbottleneck.study_task import Outcome, Task

LIMIT_S = 300.0  # for one job on one network
GRACE_S = 3.0  # after one rank has failed, for the others to say what they saw
SHOWN_LINES = 12
# What would put hooks of ours into the ranks, or their records elsewhere.
LEFT_OUT = ("NETBOTTLENECK", "NETBOTTLENECK_TRANSPORT", "NETBOTTLENECK_DIR", "LOCAL_RANK", "GROUP_RANK")
# What a rank says that only lost another one.
CONSEQUENCES = ("PeerError", "ClosedError", "Connection reset", "Connection closed", "Broken pipe")

Follow = Callable[[int, int, str], None]


class JobError(RuntimeError):
    """A rank failed; the text shows which, and its own words."""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what ranks of a lab start from: this process's environment, one thread each."""
    kept = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(extra or {})}


def run_in_lab(
    lab: Lab, task: Task, follow: Follow, *, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
) -> Outcome:
    """Run a task on all ranks of a lab, one process each. follow(step, steps, arm) is called as rank 0 tells.

    Raises JobError where a rank fails, or the job is not done after limit_s; no rank is left then.
    """
    logs = Path(task.folder)
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "netbottleneck.study_worker", task.to_json()]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(lab.size):
            with (logs / f"rank{rank}.log").open("wb") as log:
                ranks.append(
                    lab.popen(
                        rank,
                        command,
                        environment(env),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        told = _follow(ranks, follow, time.monotonic() + limit_s)
        if told is None:
            _grace(ranks)
            raise JobError(_describe(task, ranks, limit_s))
        return Outcome.from_dict(told)
    finally:
        _end(ranks)


def _follow(ranks: list[subprocess.Popen[bytes]], follow: Follow, until: float) -> dict[str, Any] | None:
    """Return what rank 0 had to say in the end, once all have ended well; None where one failed or time is over."""
    told: dict[str, Any] | None = None
    stream = ranks[0].stdout
    assert stream is not None
    os.set_blocking(stream.fileno(), False)
    rest = b""
    with selectors.DefaultSelector() as ready:
        ready.register(stream, selectors.EVENT_READ)
        while time.monotonic() < until:
            codes = [process.poll() for process in ranks]
            if ready.get_map() and ready.select(0.1):
                got = stream.read()
                if got == b"":
                    ready.unregister(stream)
                *lines, rest = (rest + (got or b"")).split(b"\n")
                for line in lines:
                    told = _take(line, follow) or told
            elif any(codes):
                return None
            elif not ready.get_map():
                if all(code == 0 for code in codes):
                    return told
                time.sleep(0.02)
    return None


def _take(line: bytes, follow: Follow) -> dict[str, Any] | None:
    """Read one line of rank 0; what is none of ours is somebody's print."""
    try:
        said = json.loads(line)
        if "outcome" in said:
            return dict(said["outcome"])
        follow(int(said["step"]), int(said["steps"]), str(said["arm"]))
    except (ValueError, KeyError, TypeError):
        sys.stderr.write(line.decode(errors="replace") + "\n")
    return None


def _grace(ranks: list[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until and any(process.poll() is None for process in ranks):
        time.sleep(0.05)


def _describe(task: Task, ranks: list[subprocess.Popen[bytes]], limit_s: float) -> str:
    """Name the rank that failed and show its words; one that only lost another comes after it."""
    failed = []
    for rank, process in enumerate(ranks):
        if process.poll() not in (None, 0):
            words = (Path(task.folder) / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace")
            lines = [line for line in words.splitlines() if line.strip()]
            last = lines[-1] if lines else ""
            failed.append((any(mark in last for mark in CONSEQUENCES), rank, process.returncode, lines))
    if not failed:
        return f"{task.job}: not done after {limit_s:.0f} s; see {task.folder}/rank*.log"
    _, rank, code, lines = min(failed)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed (exit code {code})"
    others = [f"rank {other}: {words[-1]}" for _, other, _, words in failed if other != rank and words]
    return "\n".join([f"{task.job}: rank {rank} {how}:", *lines[-SHOWN_LINES:], *others])


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Kill what still runs, each rank with its children."""
    for process in ranks:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in ranks:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
