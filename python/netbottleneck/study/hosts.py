"""A study on the ranks of a launcher: rank 0 leads, the others do what it sends them; real interfaces are capped."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from netbottleneck.config import settings
from netbottleneck.lab import LabError, LinkSpec, parse_lab
from netbottleneck.lab import measure as flows
from netbottleneck.runtime import job
from netbottleneck.study import runner, worker
from netbottleneck.study.asked import Asked
from netbottleneck.study.ranks import Follow, JobError
from netbottleneck.study.shaping import Shaped
from netbottleneck.study.spec import Cell
from netbottleneck.study.task import AS_BEFORE, Outcome, Task, from_json, to_json

if TYPE_CHECKING:
    from netbottleneck import _core

AS_IT_IS = "hosts as they are"
CAPPED = "hosts, caps on a real interface"


def run(asked: Asked) -> int:
    """Run this rank's part of a study; returns the exit code, on rank 0 that of the whole."""
    started = job.start(settings())
    place, control = started.place, started.comm
    with ExitStack() as caps:
        member = _Member(control, place.local_rank == 0, asked.spec.interface, caps)
        if place.rank != 0:
            return member.serve()
        cells = [cell for cell in asked.spec.cells if cell.ranks == place.size]
        others = len(asked.spec.cells) - len(cells)
        words = f"The network is the one between the {place.size} ranks of this launcher: none is made here."
        if others:
            words += f" {others} cells are of other numbers of ranks: they are for another start in the same folder."
        try:
            return runner.run(asked, _Led(member).opened, words, cells)
        finally:
            with suppress(OSError):  # they may be gone
                member.order("end")


class _Member:
    """One rank's part of what all ranks do together. Rank 0's orders come by the control communicator."""

    def __init__(self, control: _core.Comm, leads_host: bool, interface: str, caps: ExitStack) -> None:
        self.control = control
        self._leads_host = leads_host
        self._interface = interface
        self._caps = caps

    def order(self, what: str, **more: Any) -> None:
        """Tell all other ranks what to do next."""
        text = json.dumps({"what": what, **more}).encode()
        self.control.exchange(len(text).to_bytes(8, "little"))
        self.control.exchange(text)

    def serve(self) -> int:
        """Do what rank 0 says, until it says that this is the end."""
        while True:
            size = int.from_bytes(self.control.exchange(bytes(8))[0], "little")
            order = json.loads(self.control.exchange(bytes(size))[0])
            match order.pop("what"):
                case "end":
                    return 0
                case "caps":
                    self.cap(**order)
                case "flows":
                    self.flows(**order)
                case "task":
                    self.task(**order)

    def cap(self, text: str) -> list[str]:
        """Put caps on this host's interface, or take them off; returns what went wrong, by rank."""
        why = ""
        try:
            self._caps.close()
            if self._leads_host:
                self._caps.enter_context(Shaped(self._interface, parse_lab(text)))
        except OSError as error:
            why = str(error)
        said = self.control.exchange(why.encode()[:512].ljust(512))
        return [words.decode(errors="replace").strip() for words in said]

    def flows(self, count: int, seconds: float) -> dict[str, Any] | None:
        """Let flows run from rank 0 to the last; returns what that one counted, None where it could not."""
        rank, last = self.control.rank, self.control.size - 1
        address = _address(self._interface)
        limit = str(flows.LIMIT_S + seconds)
        words: list[str] = [sys.executable, "-I", "-S", flows.SCRIPT]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
        receiver, port = None, ""
        if rank == last and address:
            receive = ["receive", address, str(count), str(flows.WARMUP_S), str(seconds), limit]
            receiver = subprocess.Popen([*words, *receive], **pipes)
            assert receiver.stdout is not None
            port = receiver.stdout.readline().strip()
        where, _, port = (
            self.control.exchange(f"{address} {port}".encode().ljust(128))[last].decode().strip().partition(" ")
        )
        if rank == 0 and port:
            subprocess.run([*words, "send", where, port, str(count), limit], stdin=subprocess.DEVNULL, check=False)
        text = ""
        if receiver is not None:
            text = receiver.communicate()[0].strip()
        told = self.control.exchange(text.encode().ljust(4096))[last].decode().strip()
        counted: dict[str, Any] | None = json.loads(told) if told else None
        return counted

    def task(self, task: str, score: str, follow: Follow | None = None) -> Outcome:
        """Do one task with all other ranks."""
        (made,) = from_json(task)
        with tempfile.TemporaryDirectory() as folder:
            if score:
                path = Path(folder) / "score.json"
                path.write_text(score, encoding="utf-8")
                made = replace(made, score=str(path))

            def tell(step: int, steps: int, arm: str) -> None:
                if follow is not None:
                    follow(made, step, steps, arm)

            return worker.run(made, tell)


class _Led:
    """The ground that rank 0 stands on: what it does, all others are told to do."""

    interface = ""

    def __init__(self, member: _Member) -> None:
        self._member = member
        self._spec = LinkSpec()
        self.how, self.why = AS_IT_IS, ""
        self._lost = False

    @contextmanager
    def opened(self, cell: Cell) -> Generator[_Led]:
        """Cap the interfaces of all hosts. Raises LabError with the words of the first that cannot."""
        link = self._spec = cell.link
        self.how = CAPPED if link.capped else AS_IT_IS
        if not link.capped:
            yield self
            return
        try:
            self._cap(str(link))
            yield self
        finally:
            self._cap(str(LinkSpec()))

    def _cap(self, text: str) -> None:
        self._member.order("caps", text=text)
        if wrong := next((f"rank {at}: {why}" for at, why in enumerate(self._member.cap(text)) if why), ""):
            raise LabError(wrong)

    def verify(self, seconds: float) -> dict[str, Any] | None:
        """Measure one flow and as many as fill the link, between the first host and the last."""
        found = {}
        for name, count in (("one_flow", 1), ("many_flows", self._spec.saturating_flows())):
            self._member.order("flows", count=count, seconds=seconds)
            counted = self._member.flows(count, seconds)
            if counted is None:
                if self._spec.capped:
                    raise LabError(f"the {count} flows that look at the caps did not run")
                return None
            found[name] = flows.judged(self._spec, count, counted)
        return {"how": self.how, "lab": str(self._spec), **found, "ok": all(one["ok"] for one in found.values())}

    def run(self, tasks: Sequence[Task], follow: Follow, _extra: Mapping[str, str]) -> list[Outcome]:
        """Do the tasks, here and on all other ranks."""
        if self._lost:
            raise JobError("the ranks have lost each other: start the study again, it goes on from here")
        outcomes: list[Outcome] = []
        for task in tasks:
            made = replace(task, exact_steps=outcomes[-1].steps) if task.exact_steps == AS_BEFORE else task
            score = Path(task.score).read_text(encoding="utf-8") if task.score else ""
            self._member.order("task", task=to_json([made]), score=score)
            try:
                outcomes.append(self._member.task(to_json([made]), score, follow))
            except (OSError, ValueError, RuntimeError) as error:
                self._lost = True
                raise JobError(f"{type(error).__name__}: {error}") from error
        return outcomes


def _address(interface: str) -> str:
    """Return this host's IPv4 address: of an interface, or the one that leads to MASTER_ADDR; "" where it has none."""
    if interface:
        found = psutil.net_if_addrs().get(interface, [])
        return next((one.address for one in found if one.family == socket.AF_INET), "")
    with suppress(OSError, KeyError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((os.environ["MASTER_ADDR"], 9))
        address: str = way.getsockname()[0]
        return address
    return ""
