"""Horovod's timeline of a rank: a ring that the job stamps into, and a process that writes it to a file.

The job is unaware of it: it stamps as always. The ring is anonymous memory and is reused in a circle.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netbottleneck.config import Settings
from netbottleneck.launch import connect, topology
from netbottleneck.runtime import job

if TYPE_CHECKING:
    from netbottleneck import _core

__all__ = ["DYNAMIC", "Watching", "path_of", "running", "watch"]

DYNAMIC = "DYNAMIC"  # in place of the file: start_timeline() sets the time and the file
RING_EVENTS = 1 << 16
START_S, ANSWER_S = 20.0, 5.0  # deadlines of the writer: to start, and to answer a command
ANSWER_BYTES = 1 << 16

logger = logging.getLogger("netbottleneck")


def path_of(name: str, rank: int) -> str:
    """Return a rank's file: the rank replaces %r; without %r, ranks other than 0 insert it before the suffix.

    So rank 0's file is where Horovod's would be.
    """
    if "%r" in name:
        return name.replace("%r", str(rank))
    if rank == 0:
        return name
    path = Path(name)
    return str(path.with_name(f"{path.stem}.{rank}{path.suffix}"))


class Timeline:
    """One rank's ring, and its writer once there is something to write. Usable only in the process that made it."""

    def __init__(self, settings: Settings, place: connect.Place) -> None:
        self._pid = os.getpid()
        self._rank = place.rank
        self._network = connect.native(settings).upper()
        self._writer: subprocess.Popen[bytes] | None = None
        self._answer = b""
        self._others: list[dict[str, Any]] = []
        self._memory = os.fdopen(os.memfd_create("netbottleneck-timeline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "rb")
        fd = self._memory.fileno()
        self.recorder: _core.Recorder = connect.core().Recorder(
            f"/proc/self/fd/{fd}", RING_EVENTS, self._rank, timeline=True
        )
        # The seal makes the writer's mapping safe: the memory cannot shrink.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)

    def start(self, name: str, mark_cycles: bool) -> None:
        """Write this rank's file from now on. If it cannot be written, a warning is logged and training continues."""
        path = os.path.abspath(path_of(name, self._rank))
        if self._ours():
            self._command({"do": "start", "path": path, "mark_cycles": mark_cycles}, START_S)

    def stop(self) -> None:
        """End the file. It then holds everything that happened before, unless the writer is stuck for ANSWER_S."""
        if self._ours() and self._writer is not None:
            self._command({"do": "stop"}, ANSWER_S)

    def follow(self, path: Path | str, network: str) -> None:
        """Include another ring file of this rank; network: tcp or ofi, its transport."""
        self._others.append({"do": "follow", "path": os.path.abspath(path), "network": network.upper()})
        if self._ours() and self._writer is not None:
            self._command(self._others[-1], ANSWER_S)

    def close(self) -> None:
        """End the file and the writer."""
        if not self._ours():
            return
        if self._writer is not None:
            self._command({"do": "end"}, ANSWER_S)
        self._leave()
        self.recorder.close()
        self._memory.close()
        self._pid = -1

    def _ours(self) -> bool:
        return os.getpid() == self._pid

    def _leave(self) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        for pipe in (writer.stdin, writer.stdout):
            if pipe is not None:
                pipe.close()
        try:
            writer.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            writer.kill()
            writer.wait()

    def _give_up(self) -> None:
        writer, self._writer = self._writer, None
        self._answer = b""
        if writer is not None:
            writer.kill()

    def _command(self, command: dict[str, Any], limit_s: float) -> None:
        try:
            if self._writer is None:
                self._writer = self._begin(self._memory.fileno())
                for other in self._others:
                    self._send(self._writer, other, limit_s)
            self._send(self._writer, command, limit_s)
        except (OSError, ValueError) as error:
            logger.warning("the timeline is not written: its writer does not answer (%s)", error)
            self._give_up()

    def _begin(self, fd: int) -> subprocess.Popen[bytes]:
        """Start the writer: a separate process, so it never takes the GIL from the training loop."""
        values = {name: value for name, value in os.environ.items() if not name.startswith("NETBOTTLENECK")}
        arguments = [str(fd), str(os.getpid()), str(self._rank), self._network]
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "netbottleneck.runtime.timeline_writer", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=topology.with_package(values),
            pass_fds=(fd,),
            start_new_session=True,  # no signal to the rank's process group stops it before the end is written
        )

    def _send(self, writer: subprocess.Popen[bytes], command: dict[str, Any], limit_s: float) -> None:
        assert writer.stdin is not None
        assert writer.stdout is not None
        until = time.monotonic() + limit_s
        answers = select.poll()  # select() takes no descriptor above 1023
        answers.register(writer.stdout, select.POLLIN)
        writer.stdin.write(json.dumps(command).encode() + b"\n")
        writer.stdin.flush()
        while b"\n" not in self._answer:
            if not answers.poll(1000 * max(0.0, until - time.monotonic())):
                raise TimeoutError(f"within {limit_s:g} s")
            received = os.read(writer.stdout.fileno(), ANSWER_BYTES)
            if not received:
                raise ConnectionError("it has exited")
            self._answer += received
        line, _, self._answer = self._answer.partition(b"\n")
        answer: dict[str, str] = json.loads(line)
        if answer.get("error"):
            logger.warning("the timeline is not written: %s", answer["error"])


class Watching(job.Observer):
    """Gives a job its timeline if the settings ask for one, and forwards to the previous observer."""

    def __init__(self, inner: job.Observer) -> None:
        self.inner = inner
        self.timeline: Timeline | None = None

    def recorder(self, settings: Settings, place: connect.Place) -> _core.Recorder | None:
        recorder = self.inner.recorder(settings, place)
        if recorder is not None or not settings.timeline:
            return recorder
        try:
            self.timeline = Timeline(settings, place)
        except OSError as error:
            logger.warning("the timeline is not written: %s", error)
            return None
        return self.timeline.recorder

    def started(self, started: job.Job) -> None:
        self.inner.started(started)
        name = started.settings.timeline
        if self.timeline is not None and name is not None and name != DYNAMIC:
            self.timeline.start(name, started.settings.timeline_mark_cycles)

    def gradients(self, gradients: Any, optimizer: Any) -> None:
        self.inner.gradients(gradients, optimizer)

    def joining(self, joining: job.Job) -> Sequence[_core.Comm]:
        return self.inner.joining(joining)

    def joined(self, joined: job.Job, last: int) -> int:
        return self.inner.joined(joined, last)

    def stopping(self, stopping: job.Job) -> None:
        try:
            self.inner.stopping(stopping)
        finally:
            if self.timeline is not None:
                self.timeline.close()
                self.timeline = None

    def stopped(self, stopped: job.Job) -> None:
        self.inner.stopped(stopped)


def watch() -> None:
    """Observe the next job."""
    watching = Watching(job.Observer())
    former = job.observe(watching)
    watching.inner = former.inner if isinstance(former, Watching) else former


def running(this: job.Job) -> Timeline | None:
    """Return a job's timeline; None if its settings requested none at start."""
    return this.observer.timeline if isinstance(this.observer, Watching) else None
