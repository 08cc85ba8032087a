"""The processes of one mode: started, watched by deadlines, and started anew after one that crashed or hung."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ports import free_port

from harness.modes import Mode

RANK = Path(__file__).resolve().parent / "rank.py"
SITE = RANK.parents[2] / "py" / "site"
START_S = 120.0  # until all ranks have loaded torch and met
OTHERS_S = 3.0  # how long the others may take after one has failed
END_S = 120.0  # for the records and reports at the end of the process
STACKS_S = 2.0  # for a rank that hangs to write its stacks
# What an idiom cannot be left alone for by itself: an earlier one in the same processes broke the ranks' connection.
CARRIED = re.compile(r"left alone: .*\[Errno")


@dataclass
class Outcome:
    """How one idiom went in one mode: equal, WRONG, CRASH, HANG or skipped, with what was answers of it."""

    verdict: str
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: str = ""
    lack: str = ""
    detail: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """True for what must not be."""
        return self.verdict in ("WRONG", "CRASH", "HANG")


Item = tuple[str, str]
EXIT: Item = ("(end of the process)", "")


def run_mode(
    folder: Path,
    mode: Mode,
    size: int,
    items: list[Item],
    *,
    deadline_s: float,
    done: Callable[[Item, Outcome], None],
) -> None:
    """Run all items in one mode; `done` is called once for each, and once for an end of the processes that failed."""
    at, attempt = 0, 0
    while at < len(items):
        at, attempt = at + Job(folder, mode, size, items[at:], attempt, deadline_s, done).run(), attempt + 1


class Job:
    """Rank processes that run items one after another. run returns how many got an outcome."""

    def __init__(  # noqa: PLR0917 - one job, once
        self,
        folder: Path,
        mode: Mode,
        size: int,
        items: list[Item],
        attempt: int,
        deadline_s: float,
        done: Callable[[Item, Outcome], None],
    ) -> None:
        self.mode, self.size, self.items, self.deadline_s, self.done = mode, size, items, deadline_s, done
        self.folder = folder / f"{size}-{mode.name}-{attempt}"
        self.folder.mkdir(parents=True)
        reference = folder / f"reference-{size}"
        reference.mkdir(exist_ok=True)
        plan = {
            "mode": mode.name,
            "items": items,
            "folder": str(self.folder),
            "reference": str(reference),
            "deadline_s": 2 * deadline_s,
        }
        self.plan = self.folder / "plan.json"
        self.plan.write_text(json.dumps(plan), encoding="utf-8")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pipes: list[IO[bytes]] = []
        self.answers: list[dict[str, Any]] = [{} for _ in range(size)]  # of the current item, by rank
        self.ready: set[int] = set()
        self.ended: set[int] = set()
        self.current = 0
        self.stopped = False
        self.begun = time.monotonic()

    def run(self) -> int:
        """Return how many items got an outcome: all, or those up to one that ended the processes."""
        try:
            self._start()
            return self._follow()
        finally:
            self._kill()
            for made in self.folder.glob("netbottleneck-*"):  # a run of each model: their records take room
                shutil.rmtree(made, ignore_errors=True)

    def _start(self) -> None:
        port = free_port()
        for rank in range(self.size):
            read, write = os.pipe()
            out = (self.folder / f"{rank}.out").open("wb")
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, str(RANK), str(self.plan), str(write)],
                    env=self._environment(rank, port),
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    pass_fds=(write,),
                    start_new_session=True,
                )
            )
            out.close()
            os.close(write)
            self.pipes.append(os.fdopen(read, "rb", buffering=0))

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("NETBOTTLENECK", "HOROVOD", "PYTHONUNBUFFERED"))
        }
        mine = {"RANK": rank, "WORLD_SIZE": self.size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": self.size}
        paths = [str(SITE), str(RANK.parents[3] / "python"), *filter(None, [kept.get("PYTHONPATH")])]
        return {
            **kept,
            **{name: str(value) for name, value in mine.items()},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            # All ranks share a host. What is compared is the network between them, except in the mode "shm".
            **({"NETBOTTLENECK_SHM": "0"} if self.mode.imported else {}),
            **self.mode.variables,
        }

    def _follow(self) -> int:
        selector = selectors.DefaultSelector()
        for rank, pipe in enumerate(self.pipes):
            selector.register(pipe, selectors.EVENT_READ, [rank, b""])
        while selector.get_map():
            for key, _ in selector.select(0.2):
                rank, rest = key.data
                read = os.read(key.fd, 65536)
                if not read:
                    selector.unregister(key.fileobj)
                    if rank not in self.ended:
                        self.answers[rank].setdefault("error", "the process ended")
                        return self._broken("CRASH")
                *lines, key.data[1] = (rest + read).split(b"\n")
                for line in lines:
                    self._hear(rank, json.loads(line))
                    if self.stopped:
                        return self.current
            if verdict := self._overdue():
                return self._broken(verdict)
        self._wait_for_end()
        return len(self.items)

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        event = message.pop("event")
        if event == "ready":
            self.ready.add(rank)
            self.begun = time.monotonic()
        elif event == "failed":
            self.answers[rank] = message
            wait = OTHERS_S if any(not answers for answers in self.answers) else 0.0
            self.begun = min(self.begun, time.monotonic() - self.deadline_s + wait)
        elif event == "end":
            self.answers[rank] = message
            if all("differences" in answers for answers in self.answers):
                self._take(self._outcome())
        elif event == "done":
            self.ended.add(rank)
            self.begun = time.monotonic()

    def _take(self, outcome: Outcome) -> None:
        """Pass an outcome on; or stop, so that new processes run the idiom, where an earlier one spoilt these."""
        if self.current > 0 and any(CARRIED.search(line) for line in outcome.notes):
            self.stopped = True
            return
        self.done(self.items[self.current], outcome)
        self.answers = [{} for _ in range(self.size)]
        self.current += 1
        self.begun = time.monotonic()

    def _outcome(self) -> Outcome:
        answers = [f"rank {rank}: {line}" for rank, each in enumerate(self.answers) for line in each["differences"]]
        notes = list(dict.fromkeys(f"{level}: {line}" for each in self.answers for level, line in each["notes"]))
        skipped = self.answers[0]["skipped"]
        verdict = "skipped" if skipped else "WRONG" if answers else "equal"
        lack = next((each["lack"] for each in self.answers if each["lack"]), "")
        return Outcome(verdict, answers, notes, skipped, lack, seconds=time.monotonic() - self.begun)

    def _overdue(self) -> str:
        """Return CRASH or HANG where a deadline has passed."""
        if len(self.ready) < self.size:
            limit = START_S
        elif self.ended:
            limit = END_S
        else:
            limit = self.deadline_s
        if time.monotonic() - self.begun < limit:
            return ""
        return "CRASH" if any("error" in answers for answers in self.answers) else "HANG"

    def _broken(self, verdict: str) -> int:
        """Give the current item its outcome, and return how many have one."""
        if verdict == "HANG":
            self._stacks()
        errors = [f"rank {rank}: {answers['error']}" for rank, answers in enumerate(self.answers) if "error" in answers]
        traces = [answers.get("trace", "") for answers in self.answers if "error" in answers]
        if verdict == "HANG":
            errors = [f"rank {rank}: at {_place(self._printed(rank))}" for rank in range(self.size)]
        printed = [f"--- rank {rank}\n{self._printed(rank)}" for rank in range(self.size)]
        detail = "\n".join([*traces, *printed])
        if self.current >= len(self.items):
            self.done(EXIT, Outcome(verdict, errors, detail=detail))
            return len(self.items)
        if not self.ready:
            errors.insert(0, "the ranks did not start")
        self.done(self.items[self.current], Outcome(verdict, errors, detail=detail))
        return self.current + 1

    def _stacks(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + STACKS_S
        while time.monotonic() < until and not all(
            "most recent call first" in self._printed(r) for r in range(self.size)
        ):
            time.sleep(0.05)

    def _printed(self, rank: int) -> str:
        return (self.folder / f"{rank}.out").read_text(encoding="utf-8", errors="replace")[-4000:]

    def _wait_for_end(self) -> None:
        until = time.monotonic() + END_S
        codes: list[int | None] = []
        for process in self.processes:
            try:
                codes.append(process.wait(max(0.0, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
        if any(code != 0 for code in codes):
            self.current = len(self.items)
            for rank, code in enumerate(codes):
                if code != 0:
                    self.answers[rank]["error"] = f"ended with {code}" if code is not None else "did not end"
            self._broken("HANG" if None in codes else "CRASH")

    def _kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in self.pipes:
            pipe.close()


def _place(printed: str) -> str:
    """Return where the main thread stood, of what faulthandler printed last: its innermost frames."""
    _, _, stack = printed.rpartition("most recent call first")
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stack)
    return " < ".join(f"{name} ({Path(path).name}:{line})" for path, line, name in frames[:5]) or "an unknown place"
