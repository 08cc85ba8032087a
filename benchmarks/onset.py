"""From the onset of a cause in a running job to the first line that names it: on two simulated hosts.

python benchmarks/onset.py [--runs 12] [--seed 1] [--json FILE]

Each run trains until the progress of rank 0 has looked, then one cause begins: the rate of every single connection is
capped, a rank is slowed, or packets are dropped. Prints the seconds to the first line of rank 0's log that says so.
Causes, sizes and lengths are drawn. Exit code 0 only if nine of ten lines come within 10 s, and none was wrong.
"""

from __future__ import annotations

import os
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from auto import begin, write

from netbottleneck.lab import Lab

RANK = Path(__file__).with_name("onset_rank.py")
LINK, FLOW = "1gbit", "500mbit"
BEFORE_S, AFTER_S, END_S = 25.0, 40.0, 30.0  # before the onset; after it, at most; for the ranks to end
LIMIT_S, WITHIN = 10.0, 0.9
CHANGED = re.compile(r"the cause has changed: (\w+) -> (\w+)")


@dataclass(frozen=True)
class Cause:
    """A cause to begin. codes: the verdicts that name it."""

    name: str
    begin: Callable[[Lab, Path, random.Random], str]
    codes: tuple[str, ...]


def cap_flows(lab: Lab, folder: Path, draw: random.Random) -> str:
    """Cap every connection."""
    mbit = draw.randint(40, 80)
    lab.set_caps(f"{LINK}/{mbit}mbit")
    return f"connections of {mbit} Mbit/s"


def slow_rank(lab: Lab, folder: Path, draw: random.Random) -> str:
    """Let the last rank take longer."""
    late_ms = draw.randint(10, 40)
    (folder / "late.new").write_text(str(late_ms), encoding="utf-8")
    (folder / "late.new").rename(folder / "late")
    return f"rank 1 slower by {late_ms} ms"


def drop_packets(lab: Lab, folder: Path, draw: random.Random) -> str:
    """Drop packets of one host."""
    part = draw.uniform(0.05, 0.1)
    lab.drop(1, part)
    return f"{part:.1%} of packets dropped"


CAUSES = (
    Cause("flow cap", cap_flows, ("TRANSPORT_LIMITED",)),
    Cause("slow rank", slow_rank, ("STRAGGLER",)),
    Cause("packet loss", drop_packets, ("PACKET_LOSS",)),
)


@dataclass(frozen=True)
class Outcome:
    """Of one run. seconds: to the first right line, None if there was none. wrong: lines that named something else."""

    cause: str
    what: str
    layers: int
    layer_ms: float
    seconds: float | None
    line: str
    wrong: tuple[str, ...]

    def row(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        return {
            "cause": self.cause,
            "what": self.what,
            "layers": f"{self.layers} of {self.layer_ms} ms",
            "seconds": "none" if self.seconds is None else round(self.seconds, 1),
            "line": self.line or "none",
            "wrong": list(self.wrong),
        }


def _read(stream: IO[str], lines: queue.Queue[tuple[float, str]]) -> None:
    for line in stream:
        lines.put((time.monotonic(), line.rstrip()))


def _first(
    lines: queue.Queue[tuple[float, str]], codes: tuple[str, ...], begin_s: float
) -> tuple[float | None, str, list[str]]:
    """Wait for the first change to one of the codes; return its time after the onset, it, and other changes before."""
    wrong: list[str] = []
    while (left_s := begin_s + AFTER_S - time.monotonic()) > 0:
        try:
            at_s, line = lines.get(timeout=left_s)
        except queue.Empty:
            break
        changed = CHANGED.search(line)
        if changed and at_s > begin_s and changed[2] in codes:
            return at_s - begin_s, changed[0], wrong
        wrong += [changed[0]] if changed else []
    return None, "", wrong


def outcome(cause: Cause, draw: random.Random) -> Outcome:
    """Run one job."""
    layers, layer_ms = draw.randint(3, 6), round(draw.uniform(8, 14), 1)
    with tempfile.TemporaryDirectory(prefix="onset-") as name, Lab(2, f"{LINK}/{FLOW}") as lab:
        folder = Path(name)
        variables = {
            "NETBOTTLENECK_TRANSPORT": "stock,tcp",
            "NETBOTTLENECK_STREAMS": "8",
            "NETBOTTLENECK_BLOCK_STEPS": "5",
            "NETBOTTLENECK_LINK_GBPS": "1",
            "NETBOTTLENECK_DIR": f"{name}/run",
            "NETBOTTLENECK_PROGRESS_S": "10",
            "NETBOTTLENECK_MONITOR_HZ": "10",
            "NETBOTTLENECK_INSECURE": "1",  # the network is the lab's own
        }
        command = [sys.executable, "-u", str(RANK), name, str(layers), str(layer_ms)]
        pipes = {0: subprocess.PIPE, 1: subprocess.DEVNULL}
        ranks = [
            lab.popen(
                rank, command, {**os.environ, **variables}, stdout=pipes[rank], stderr=subprocess.STDOUT, text=True
            )
            for rank in pipes
        ]
        lines: queue.Queue[tuple[float, str]] = queue.Queue()
        assert ranks[0].stdout is not None
        threading.Thread(target=_read, args=(ranks[0].stdout, lines), daemon=True).start()
        time.sleep(BEFORE_S)
        begin_s = time.monotonic()
        what = cause.begin(lab, folder, draw)
        seconds, line, wrong = _first(lines, cause.codes, begin_s)
        (folder / "end").touch()
        for process in ranks:
            process.wait(END_S)
    return Outcome(cause.name, what, layers, layer_ms, seconds, line, tuple(wrong))


def main() -> int:
    """Run all jobs and print the table."""
    arguments, facts = begin(__doc__, "--runs", 12)
    print("| cause | what begins | layers | s | first line |\n| --- | --- | --- | --- | --- |", flush=True)
    draw, outcomes = random.Random(arguments.seed), []
    for number in range(arguments.count):
        outcomes.append(outcome(CAUSES[number % len(CAUSES)], draw))
        print("|", " | ".join(str(value) for value in list(outcomes[-1].row().values())[:5]), "|", flush=True)
        for line in outcomes[-1].wrong:
            print(f"  also: {line}", flush=True)
    within = sum(one.seconds is not None and one.seconds <= LIMIT_S for one in outcomes)
    wrong = sum(bool(one.wrong) for one in outcomes)
    print(f"{within} of {len(outcomes)} within {LIMIT_S:g} s, {wrong} with another line before (measured)")
    if arguments.json:
        rows = [one.row() for one in outcomes]
        summary = f"{within} of {len(outcomes)} within {LIMIT_S:g} s, {wrong} with another warning before"
        write(arguments.json, facts, "From the onset of a cause to the warning", summary, rows)
    return 0 if within >= WITHIN * len(outcomes) and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
