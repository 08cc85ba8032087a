"""Events during a job: another TCP job shares the link for a while, or an interface goes down."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from judge import Figure, certain, closeness
from peers.iperf import mean_received

from netbottleneck.errors import Error
from netbottleneck.lab import Lab, LabError
from netbottleneck.lab.network import LinkSpec, parse_lab

if TYPE_CHECKING:
    from cases import Run

LAB = "1gbit"
STREAMS = 4
# Much more than the queue of a full link, so that an all-reduce waits for bandwidth and not for round trips.
BYTES = 16_000_000
ROUNDS = 6
ALONE_S = 3.0  # before the neighbour starts, and after it ends
SHARED_S = 10
SETTLED_S = 1.0  # not counted, at both ends of the shared time
WINDOW_NS = 400_000_000
BACK = 0.9  # part of the previous rate that counts as recovered
DOWN_AFTER_S = 3.0
DOWN_FOR_S = 25.0
LAST_S = 5.0
LIMIT_S = 60.0
SHARE_BAR = 0.85
PIPES: dict[str, Any] = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
    "text": True,
}


@dataclass(frozen=True)
class Shared:
    """One round: rates in bits a second while a neighbour shares the link.

    ours_bps, iperf_bps: of our job, and of iperf3 in its place. beside_ours_bps, beside_iperf_bps: of the neighbour at
    the same time. back_s: from the neighbour's end until our rate has recovered. pause_s: longest time between results.
    """

    ours_bps: float
    iperf_bps: float
    beside_ours_bps: float
    beside_iperf_bps: float
    back_s: float
    pause_s: float
    error: str


def neighbour(run: Run) -> Iterator[Figure]:
    """A plain TCP job (iperf3 with as many flows as we have) shares the link for a while."""
    label = f"{LAB}, {STREAMS} streams, as many flows beside"
    rounds: list[Shared] = []
    why = ""
    for _ in range(run.batches):
        try:
            rounds += _shared_rounds(run)
        except (LabError, Error, OSError, subprocess.TimeoutExpired) as error:
            why = str(getattr(error, "strerror", None) or error)
            break
        figures = _shared_figures(label, rounds)
        if all(figure.verdict != "undecided" for figure in figures):
            break
    if rounds:
        yield from _shared_figures(label, rounds)
    else:
        yield Figure(f"{label}: share of the link", SHARE_BAR, reason=why or "not measured")


def _shared_rounds(run: Run) -> list[Shared]:
    found = []
    with checked(LAB) as lab:
        for _ in range(run.rounds or ROUNDS):
            found.append(_shared_round(lab))
            last = found[-1]
            rates = f"ours {last.ours_bps / 1e6:.0f} beside {last.beside_ours_bps / 1e6:.0f} Mbit/s"
            rates += f", iperf3 in our place {last.iperf_bps / 1e6:.0f} beside {last.beside_iperf_bps / 1e6:.0f}"
            run.say(f"# neighbour: {rates}; back after {last.back_s:.2f} s, longest pause {last.pause_s:.2f} s")
    return found


def _shared_figures(label: str, rounds: Sequence[Shared]) -> list[Figure]:
    ours, theirs = [each.ours_bps for each in rounds], [each.iperf_bps for each in rounds]
    error = next((each.error for each in rounds if each.error), "")
    share = Figure(f"{label}: share as near to iperf3's", SHARE_BAR, closeness(ours, theirs), len(rounds), broken=error)
    back, pause = max(each.back_s for each in rounds), max(each.pause_s for each in rounds)
    note = "1 s over what it took, in the slowest round"
    return [
        share,
        Figure(f"{label}: back", 1.0, certain(1 / max(back, 0.01)), len(rounds), note, broken=error, event=True),
        Figure(f"{label}: longest pause", 1.0, certain(1 / max(pause, 0.01)), len(rounds), note, event=True),
    ]


def _shared_round(lab: Lab) -> Shared:
    with steady(lab, "tcp", STREAMS, BYTES, 2 * ALONE_S + SHARED_S + 1) as ranks:
        began_ns = time.monotonic_ns()
        time.sleep(ALONE_S)
        came_ns, went_ns, beside = _visit(lab)
        results = [finish(rank) for rank in ranks]
    error = next((str(each["error"]) for each in results if each["error"]), "")
    if any(each["wrong"] for each in results):
        error = "elements were wrong"
    done = [ns for ns in results[0]["done_ns"] if ns > began_ns]
    window = (came_ns + int(SETTLED_S * 1e9), went_ns - int(SETTLED_S * 1e9))
    alone = rate(done, began_ns, came_ns)
    back = next((ns for ns in done if ns >= went_ns and rate(done, ns, ns + WINDOW_NS) >= BACK * alone), None)
    back_s = float("inf") if back is None else max(0.0, (back - went_ns) / 1e9)
    pause = max((b - a for a, b in itertools.pairwise(done)), default=10**12)
    return Shared(rate(done, *window), *_in_our_place(lab, beside), back_s, pause / 1e9, error)


def rate(done_ns: Sequence[int], begin_ns: int, end_ns: int) -> float:
    """Return bits a second between the first and the last all-reduce that completed in a span."""
    inside = [ns for ns in done_ns if begin_ns <= ns <= end_ns]
    return 8e9 * BYTES * (len(inside) - 1) / (inside[-1] - inside[0]) if len(inside) > 2 else 0.0


def _visit(lab: Lab) -> tuple[int, int, float]:
    """Run the neighbour; return its begin and end in ns of the monotonic clock, and its rate."""
    with serving(lab, 5301) as target:
        came_ns = time.monotonic_ns()
        client = lab.popen(0, [*target, "-P", str(STREAMS), "--bidir", "-t", str(SHARED_S), "-J"], **PIPES)
        report, _ = client.communicate(timeout=LIMIT_S)
        went_ns = time.monotonic_ns()
    return came_ns, went_ns, mean_received(report)


def _in_our_place(lab: Lab, beside_ours_bps: float) -> tuple[float, float, float]:
    """Run iperf3, with as many flows as we have, and the neighbour at the same time.

    Returns iperf3's rate, as the mean of both directions, then the neighbour's rate beside us and beside iperf3.
    """
    lead, options = 2.0, ["-P", str(STREAMS), "--bidir", "-i", "0.5", "-J"]
    with serving(lab, 5302) as target:
        began_ns = time.monotonic_ns()
        client = lab.popen(0, [*target, *options, "-t", str(round(lead) + SHARED_S + 2)], **PIPES)
        time.sleep(lead)
        came_ns, went_ns, beside = _visit(lab)
        report, _ = client.communicate(timeout=LIMIT_S)
    mean_received(report)
    begin, end = ((ns - began_ns) / 1e9 for ns in (came_ns, went_ns))
    rates = [
        (each["sum"]["bits_per_second"] + each["sum_bidir_reverse"]["bits_per_second"]) / 2
        for each in json.loads(report)["intervals"]
        if each["sum"]["start"] >= begin + SETTLED_S and each["sum"]["end"] <= end - SETTLED_S
    ]
    if not rates:
        raise Error(0, "iperf3 reported no interval in which both ran")
    return float(sum(rates) / len(rates)), beside_ours_bps, beside


@contextlib.contextmanager
def checked(spec: str) -> Generator[Lab, None, None]:
    """Yield a lab of two hosts whose links have the specified rate. Raises LabError."""
    with Lab(2, spec, ways=("root", "user")) as lab:
        found = lab.verify()
        if not found["ok"]:
            raise LabError(f"the lab does not match its specification: {found}")
        yield lab


@contextlib.contextmanager
def serving(lab: Lab, port: int) -> Generator[list[str], None, None]:
    """Run an iperf3 server for one client on the second host; yield the client's command."""
    server = lab.popen(1, ["iperf3", "-s", "-1", "-p", str(port), "--forceflush"], **PIPES)
    try:
        for line in server.stdout or ():
            if "listening" in line:
                break
        else:
            raise Error(0, "the iperf3 server did not start: is iperf3 installed?")
        yield ["iperf3", "-c", lab.address(1), "-p", str(port)]
    finally:
        server.kill()
        server.communicate()


@contextlib.contextmanager
def steady(
    lab: Lab, transport: str, streams: int, nbytes: int, seconds: float
) -> Generator[list[subprocess.Popen[str]], None, None]:
    """Start ranks that all-reduce for `seconds`; the first all-reduce is complete when this yields."""
    script = [sys.executable, str(Path(__file__).with_name("steady.py"))]
    command = [*script, transport, str(streams), str(nbytes), str(seconds)]
    ranks: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="netbottleneck-steady-") as folder:
        try:
            for rank in range(lab.size):
                names = {"NETBOTTLENECK_RANK": str(rank), "NETBOTTLENECK_SIZE": str(lab.size)}
                names |= {"NETBOTTLENECK_RENDEZVOUS": folder, "OMP_NUM_THREADS": "1"}
                ranks.append(lab.popen(rank, command, {**os.environ, **names}, **PIPES))
            first = ranks[0].stdout
            if first is None or first.readline() != "moving\n":
                ranks[0].kill()
                raise Error(0, (ranks[0].communicate()[1].strip().splitlines() or ["a rank did not start"])[-1])
            yield ranks
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def finish(rank: subprocess.Popen[str]) -> dict[str, Any]:
    """Return a rank's result; if it has none, its last line on stderr is the error."""
    text, errors = rank.communicate(timeout=LIMIT_S)
    try:
        result: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        lines = errors.strip().splitlines()[-1:] or [f"exit code {rank.returncode}"]
        return {"done_ns": [], "wrong": 0, "error": lines[0], "info": {}}
    return result


def two_interfaces(run: Run, spec: str) -> Iterator[Figure]:
    """The second of two interfaces goes down and stays down: the job continues over the first."""
    label = f"{spec}: after the second interface went down"
    try:
        with (
            checked(spec) as lab,
            steady(lab, "tcp", 0, BYTES, DOWN_AFTER_S + DOWN_FOR_S) as ranks,
        ):
            time.sleep(DOWN_AFTER_S)
            down_ns = time.monotonic_ns()
            lab.set_link(1, up=False, link=1)
            results = [finish(rank) for rank in ranks]
    except (LabError, Error, OSError, subprocess.TimeoutExpired) as error:
        yield Figure(label, 1.0, reason=str(getattr(error, "strerror", None) or error))
        return
    yield _continued(label, results, down_ns, parse_lab(spec), run.say)


def _continued(
    label: str, results: Sequence[dict[str, Any]], down_ns: int, spec: LinkSpec, say: Callable[[str], None]
) -> Figure:
    done = results[0]["done_ns"]
    error = next((str(each["error"]) for each in results if each["error"]), "")
    if any(each["wrong"] for each in results):
        error = "elements were wrong"
    after = [ns for ns in done if ns > down_ns]
    end_ns = down_ns + int((DOWN_FOR_S - LAST_S) * 1e9)
    going = rate(after, end_ns, end_ns + int(LAST_S * 1e9))
    pause = max((b - a for a, b in zip([down_ns, *after], after, strict=False)), default=0) / 1e9
    note = f"{going / 1e6:.0f} of {(spec.link_bps or 0) / 1e6:.0f} Mbit/s at the end, longest pause {pause:.1f} s"
    say(f"# {label}: {note} {error}".rstrip())
    return Figure(label, 1.0, certain(float(going > 0 and not error)), 1, note, broken=error, event=True)
