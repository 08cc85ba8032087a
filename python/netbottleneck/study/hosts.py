"""Study on the ranks of a launcher: rank 0 leads, the others run its tasks, and real interfaces are capped."""

from __future__ import annotations

import contextlib
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
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import psutil

from netbottleneck.config import settings
from netbottleneck.errors import MismatchError
from netbottleneck.lab import LabError, LinkSpec, parse_lab
from netbottleneck.lab import lab as flows
from netbottleneck.lab.lab import find_tool, first_line
from netbottleneck.lab.network import interface_caps
from netbottleneck.runtime import job
from netbottleneck.study import runner, worker
from netbottleneck.study.cells import StudyRequest
from netbottleneck.study.ranks import LOST_PEER_ERRORS, JobError, TaskProgress
from netbottleneck.study.spec import Cell
from netbottleneck.study.task import SAME_STEPS, Outcome, Task, from_json, to_json

if TYPE_CHECKING:
    from netbottleneck import _core


# Caps on a real interface of this host. The previous state is always restored.

MAJOR = 0x6E62  # of our qdisc handle: "nb", unlikely to collide
READY_S = 30.0
_SCRIPT = str(Path(__file__).with_name("_shape.py"))


class InterfaceCaps:
    """Caps for the link and the flows that one interface sends. A context manager.

    A keeper process in its own session sets the caps. It removes them when this process ends or leaves the context,
    even after SIGKILL. Raises LabError if caps are not possible: not root, no tc, several caps for flows, or an
    interface with a queueing discipline that cannot be restored.
    """

    def __init__(self, interface: str, spec: LinkSpec) -> None:
        self._interface = interface
        self._spec = spec
        self._alive = -1
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        if not self._spec.capped:
            return self
        if os.geteuid() != 0:
            raise LabError(f'caps on {self._interface} need root: run as root, or write networks = ["none"]')
        if len(self._spec.flow_bps) > 1 or self._spec.more_bps:
            raise LabError(f"{self._spec}: a real interface supports one cap for the link and one cap for all flows")
        commands = interface_caps(self._interface, self._spec, bool(self._spec.flow_bps), MAJOR)
        read, self._alive = os.pipe()
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", _SCRIPT, find_tool("tc"), self._interface, f"{MAJOR:x}:", str(read)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[read],
                start_new_session=True,
            )
            assert self._keeper.stdin is not None
            with suppress(BrokenPipeError), self._keeper.stdin as pipe:  # a keeper that failed says why on stderr
                pipe.write(commands.encode())
            line = first_line(self._keeper, READY_S)
        except BaseException:
            self._close()
            raise
        finally:
            os.close(read)
        if line != b"ready\n":
            raise LabError(self._close() or f"the process that caps {self._interface} did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (why := self._close()) and kind is None:
            raise LabError(f"the old state could not be restored: {why}")

    def _close(self) -> str:
        """Let the keeper remove the caps; returns its error text, "" on success."""
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return ""
        keeper.stdin = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            _, errors = keeper.communicate(timeout=READY_S)
            return errors.decode(errors="replace").strip() if keeper.returncode else ""
        return f"the process that caps it ({keeper.pid}) does not end"


# Ranks of a launcher.

AS_IT_IS = "hosts as they are"
CAPPED = "hosts, caps on a real interface"
STATUS_BYTES = 509  # a length that no exchange of a task has: mixed with one, it fails on every rank
REASON_CHARACTERS = 500  # of the text that says why flows did not run
STATUS_S = 30.0  # for all ranks to leave a task, beyond the time after which they miss a peer
CONSEQUENCES = (*LOST_PEER_ERRORS, "MismatchError", "Timed out")  # of a failure on another rank


def run(request: StudyRequest | None) -> int:
    """Run this rank's part of a study; returns the exit code, on rank 0 that of the whole study.

    request: needed on rank 0 alone, whose commands the other ranks execute.
    """
    started = job.start(settings())
    place, control = started.place, started.comm
    with ExitStack() as caps:
        member = _RankWorker(control, place.local_rank == 0, caps)
        if place.rank != 0:
            return member.serve()
        assert request is not None
        cells = [cell for cell in request.spec.cells if cell.ranks == place.size]
        others = len(request.spec.cells) - len(cells)
        introduction = f"This study uses the network between the {place.size} ranks of this launcher."
        if others:
            introduction += (
                f" {others} cells have other numbers of ranks: start the study again in this folder with as many ranks."
            )
        try:
            code = runner.run(request, _LauncherRanks(member, request.spec.interface).open_ranks, introduction, cells)
        except BaseException:
            control.abort("rank 0 left the study")  # inside a task, the other ranks would not receive a command
            raise
        with suppress(OSError):  # the other ranks may have ended
            member.send_command("end")
        return code


class _RankWorker:
    """One rank's part in collective work. Rank 0 sends its commands through the control communicator.

    A command carries the interface: a study that is resumed has its file on rank 0 alone.
    """

    def __init__(self, control: _core.Comm, leads_host: bool, caps: ExitStack) -> None:
        self.control = control
        self._leads_host = leads_host
        self._caps = caps

    def send_command(self, what: str, **more: Any) -> None:
        """Send the next command to all other ranks."""
        text = json.dumps({"what": what, **more}).encode()
        self.control.exchange(len(text).to_bytes(8, "little"))
        self.control.exchange(text)

    def serve(self) -> int:
        """Execute rank 0's commands until the command "end". Raises what the control communicator raises."""
        while True:
            size = int.from_bytes(self.control.exchange(bytes(8))[0], "little")
            command = json.loads(self.control.exchange(bytes(size))[0])
            match command.pop("what"):
                case "end":
                    return 0
                case "caps":
                    self.cap(**command)
                case "flows":
                    self.flows(**command)
                case "task":
                    with suppress(JobError):  # rank 0 reports it
                        self.task(**command)

    def cap(self, text: str, interface: str) -> list[str]:
        """Set or remove the caps of this host's interface; returns the error text of each rank, "" for none."""
        why = ""
        try:
            self._caps.close()
            if self._leads_host:
                self._caps.enter_context(InterfaceCaps(interface, parse_lab(text)))
        except OSError as error:
            why = str(error)
        replies = self.control.exchange(why.encode()[:512].ljust(512))
        return [reply.decode(errors="replace").strip() for reply in replies]

    def flows(self, count: int, seconds: float, interface: str) -> dict[str, Any]:
        """Run flows from rank 0 to the last rank; returns the last rank's counts, {"why": TEXT} if they did not run."""
        rank, last = self.control.rank, self.control.size - 1
        address = _address(interface)
        limit = str(flows.LIMIT_S + seconds)
        command: list[str] = [sys.executable, "-I", "-S", flows.SCRIPT]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        receiver, port = None, ""
        if rank == last and address:
            receive = ["receive", address, str(count), str(flows.WARMUP_S), str(seconds), limit]
            receiver = subprocess.Popen([*command, *receive], stdout=subprocess.PIPE, **pipes)
            assert receiver.stdout is not None
            port = receiver.stdout.readline().strip()
        where, _, port = (
            self.control.exchange(f"{address} {port}".encode().ljust(128))[last].decode().strip().partition(" ")
        )
        text, why = "", ""
        if rank == 0 and port:
            why = subprocess.run([*command, "send", where, port, str(count), limit], check=False, **pipes).stderr
        if receiver is not None:
            text, why = receiver.communicate()
        elif rank == last:
            why = f"rank {rank} has no IPv4 address on {interface or 'the route to MASTER_ADDR'}"
        mine = text.strip() or json.dumps({"why": why.strip()[:REASON_CHARACTERS]})
        replies = [json.loads(reply) for reply in self.control.exchange(mine.encode().ljust(4096))]
        counted: dict[str, Any] = replies[last]
        return {"why": replies[0]["why"] or counted["why"]} if "why" in counted else counted

    def task(self, task: str, schedule: str, on_progress: TaskProgress | None = None) -> Outcome:
        """Run one task together with all other ranks.

        If it fails on a rank, JobError is raised on all. Raises what the control communicator raises if the ranks
        cannot agree on that: they have then lost each other.
        """
        (made,) = from_json(task)

        def progress(step: int, steps: int, arm: str) -> None:
            if on_progress is not None:
                on_progress(made, step, steps, arm)

        outcome, why = None, ""
        try:
            with tempfile.TemporaryDirectory() as folder:
                if schedule:
                    path = Path(folder) / "schedule.json"
                    path.write_text(schedule, encoding="utf-8")
                    made = replace(made, schedule=str(path))
                outcome = worker.run(made, progress)
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            why = f"{type(error).__name__}: {error}"
        failed = self._failure(why)
        if outcome is None or failed:
            if "netbottleneck.study.jobs" in sys.modules:
                from netbottleneck.study import jobs

                jobs.leave_torch()
            raise JobError(failed)
        return outcome

    def _failure(self, why: str) -> str:
        """Return the error text of the rank whose task failed, "" if none did. why: of this rank.

        A rank that has failed may meet others that are still inside the task: that exchange fails on every rank, the
        others leave the task, and this rank exchanges again. After any other error the ranks no longer make the same
        exchanges, so this rank aborts the control communicator, and all ranks end.
        """
        mine = why.encode()[:STATUS_BYTES].ljust(STATUS_BYTES)
        limit_s = settings().timeout_s + STATUS_S
        replies: list[bytes] = []
        while not replies:
            try:
                replies = self.control.exchange(mine, limit_s=limit_s)
            except OSError as error:
                if isinstance(error, MismatchError) and not self.control.failed:
                    continue
                self.control.abort(f"rank {self.control.rank} lost the other ranks: {error}")
                raise
        failed = [(at, text) for at, reply in enumerate(replies) if (text := reply.decode(errors="replace").strip())]
        first = min(failed, key=lambda row: any(mark in row[1] for mark in CONSEQUENCES), default=None)
        return "" if first is None else f"rank {first[0]}: {first[1]}"


class _LauncherRanks:
    """Rank 0's view of all ranks (runner.RankGroup): each command is sent to the other ranks and executed here."""

    interface = ""

    def __init__(self, member: _RankWorker, capped: str) -> None:
        """capped: the interface of each host to cap, "" for none."""
        self._member = member
        self._capped = capped
        self._spec = LinkSpec()
        self.how, self.why = AS_IT_IS, ""
        self.caps: Sequence[LinkSpec] = ()
        self._lost = False

    @contextmanager
    def open_ranks(self, cell: Cell) -> Generator[_LauncherRanks]:
        """Cap the interfaces of all hosts. Raises LabError with the text of the first rank that fails."""
        link = self._spec = cell.link
        self.how = CAPPED if link.capped else AS_IT_IS
        self.caps = (link,)
        if not link.capped:
            yield self
            return
        try:
            self._cap(str(link))
            yield self
        except LabError as error:
            try:
                self._cap(str(LinkSpec()))
            except LabError as second:
                raise LabError(f"{error}; then {second}") from error
            raise
        self._cap(str(LinkSpec()))  # not after another exception: then all ranks end, and their caps with them

    def _cap(self, text: str) -> None:
        with _lab_errors():
            self._member.send_command("caps", text=text, interface=self._capped)
            replies = self._member.cap(text, self._capped)
        if wrong := next((f"rank {at}: {why}" for at, why in enumerate(replies) if why), ""):
            raise LabError(wrong)

    def verify(self, seconds: float) -> dict[str, Any] | None:
        """Measure one flow, then as many as fill the link, from rank 0 to the last rank."""
        found = {}
        for name, count in (("one_flow", 1), ("many_flows", self._spec.saturating_flows())):
            with _lab_errors():
                self._member.send_command("flows", count=count, seconds=seconds, interface=self._capped)
                counted = self._member.flows(count, seconds, self._capped)
            if "why" in counted:
                if self._spec.capped:
                    raise LabError(f"the {count} flows that verify the caps did not run: {counted['why']}")
                return None
            found[name] = flows.judged(self._spec, count, counted)
        return {"how": self.how, "lab": str(self._spec), **found, "ok": all(one["ok"] for one in found.values())}

    def run(self, tasks: Sequence[Task], on_progress: TaskProgress, _extra: Mapping[str, str]) -> list[Outcome]:
        """Run the tasks here and on all other ranks. Raises JobError."""
        if self._lost:
            raise JobError("the ranks lost their connections: start the study again, it resumes here")
        outcomes: list[Outcome] = []
        for task in tasks:
            made = replace(task, exact_steps=outcomes[-1].steps) if task.exact_steps == SAME_STEPS else task
            schedule = Path(task.schedule).read_text(encoding="utf-8") if task.schedule else ""
            try:
                self._member.send_command("task", task=to_json([made]), schedule=schedule)
                outcomes.append(self._member.task(to_json([made]), schedule, on_progress))
            except JobError:  # of every rank: they are ready for the next task
                raise
            except (OSError, RuntimeError) as error:
                self._lost = True
                raise JobError(f"{type(error).__name__}: {error}") from error
        return outcomes


@contextmanager
def _lab_errors() -> Generator[None]:
    """Raise a failure of the network between the ranks as LabError."""
    try:
        yield
    except OSError as error:
        raise LabError(f"{type(error).__name__}: {error}") from error


def _address(interface: str) -> str:
    """Return this host's IPv4 address: of an interface, or on the route to MASTER_ADDR; "" if there is none."""
    if interface:
        found = psutil.net_if_addrs().get(interface, [])
        return next((one.address for one in found if one.family == socket.AF_INET), "")
    with suppress(OSError, KeyError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((os.environ["MASTER_ADDR"], 9))
        address: str = way.getsockname()[0]
        return address
    return ""
