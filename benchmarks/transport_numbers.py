"""The transports' numbers, each against its bar.

python benchmarks/transport_numbers.py [--only capped,loopback,correct]

capped    2 ranks in a lab of 2 Gbit/s a link and 500 Mbit/s a flow, 64 MB float32: tcp and ofi with streams=auto
          against stock (bar 3.5), and against `iperf3 -P 8 --bidir` on the same link (bar 0.90)
loopback  2 ranks on loopback, 64 MB: tcp and ofi against the better of gloo with one and with four interfaces (bar 1.0)
correct   no wrong element: every type, 1 to 8 ranks, sizes from 0 bytes and 1 element to --largest, odd ones too

One line a figure: measured value, bar, pass, fail or "not run" with the reason. Exit code 1 when a bar is missed.
Ratios are of median times of the same interleaved run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from netbottleneck.bench import Results, bench
from netbottleneck.bench.data import DTYPES
from netbottleneck.errors import Error
from netbottleneck.lab import Lab, LabError
from netbottleneck.values import size as parse_size

LAB = "2gbit/500mbit"
BYTES = 64 * 10**6
NATIVE = ("tcp", "ofi")
PATHS = (*NATIVE, "stock")
IPERF_S = 10


@dataclass(frozen=True)
class Figure:
    """A measured number and the least it may be; None: not run, and why."""

    name: str
    value: float | None
    bar: float
    note: str = ""

    @property
    def passed(self) -> bool | None:
        return None if self.value is None else self.value >= self.bar

    def line(self) -> str:
        word = {None: "NOT RUN", True: "pass", False: "FAIL"}[self.passed]
        value = "-" if self.value is None else f"{self.value:.2f}"
        return f"{word:<8}{self.name:<58}{value:>8}  bar {self.bar:<5g} {self.note}".rstrip()


def seconds(found: Results, transport: str) -> float | None:
    """Return the median time of a transport's row, None where it has none."""
    return next((row["time_s"]["median"] for row in found.rows if row["transport"] == transport), None)


def ratio(found: Results, transport: str, to: Sequence[str]) -> float | None:
    """Return how many times faster than the fastest of `to`."""
    ours, others = seconds(found, transport), [seconds(found, name) for name in to]
    theirs = [each for each in others if each is not None]
    return min(theirs) / ours if ours is not None and theirs else None


def iperf_bps() -> float:
    """Return what iperf3 with 8 connections each way moves in a lab like ours, in the slower direction."""
    tool = shutil.which("iperf3")
    if tool is None:
        raise LabError("iperf3 is not installed")
    with Lab(2, LAB, ways=("root", "user")) as lab:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        server = lab.popen(0, [tool, "-s", "-1", "--forceflush"], **pipes)
        assert server.stdout is not None
        while "listening" not in (line := server.stdout.readline()):
            if not line:
                raise LabError("iperf3's server did not start")
        words = [tool, "-c", lab.address(0), "-P", "8", "--bidir", "-t", str(IPERF_S), "-J"]
        client = lab.popen(1, words, **pipes)
        said, _ = client.communicate(timeout=IPERF_S + 30)
        server.communicate(timeout=10)
    end = json.loads(said)["end"]
    ways = [end[key]["bits_per_second"] for key in ("sum_received", "sum_received_bidir_reverse")]
    return float(min(ways))


def capped(args: argparse.Namespace) -> Iterator[Figure]:
    """The two figures of the capped lab."""
    found = bench(2, LAB, None, "auto", BYTES, iterations=args.iterations, say=say)
    if "namespaces" not in found.head["lab"]["how"] or not found.head["lab"]["ok"]:
        raise LabError(f"the lab is not what it should be: {found.head['lab']['how']} {found.head['lab']['why']}")
    for name in NATIVE:
        for stock in ("stock", "stock x4"):
            yield Figure(f"{name} auto / {stock}, {LAB}, 64 MB, 2 ranks", ratio(found, name, (stock,)), 3.5)
    try:
        line = iperf_bps()
    except (LabError, subprocess.TimeoutExpired, KeyError, ValueError) as error:
        for name in NATIVE:
            yield Figure(f"{name} auto / iperf3 -P 8 --bidir", None, 0.9, str(error))
        return
    for name in NATIVE:
        time_s = seconds(found, name)
        value = None if time_s is None else 8 * BYTES / time_s / line
        yield Figure(f"{name} auto / iperf3 -P 8 --bidir", value, 0.9, f"iperf3: {line / 1e9:.2f} Gbit/s each way")


def loopback(args: argparse.Namespace) -> Iterator[Figure]:
    """The figure of uncapped loopback."""
    found = bench(2, None, None, "auto", BYTES, iterations=2 * args.iterations, say=say)
    for name in NATIVE:
        value = ratio(found, name, ("stock", "stock x4"))
        yield Figure(f"{name} auto / better of gloo x1 and x4, loopback, 64 MB", value, 1.0)


def correct(args: argparse.Namespace) -> Iterator[Figure]:
    """No wrong element; the value is 1 where there was none."""
    largest: int = args.largest
    for name in PATHS:
        wrong, checked, started = 0, 0, time.monotonic()
        reason = ""
        for ranks in range(1, args.ranks + 1):
            for dtype, kind in DTYPES.items():
                item = kind.itemsize
                sizes = [0, item, 3 * item, 1021 * item, (1 << 18) + item, 3_000_001 * item]
                sizes = sorted({n for n in sizes if n <= largest} | ({largest} if dtype == "float32" else set()))
                try:
                    found = bench(ranks, None, name, "auto" if ranks == 2 else "3", sizes, dtype=dtype, iterations=1)
                except Error as error:
                    reason = f"{dtype}, {ranks} ranks: {error.strerror or error}"
                    break
                wrong += found.wrong
                checked += sum(row["count"] * row["ranks"] for row in found.rows)
                say(f"# {name} {dtype} {ranks} ranks: {len(sizes)} sizes, {found.wrong} wrong")
            if reason:
                break
        note = f"{wrong} of {checked} elements wrong, 1 to {args.ranks} ranks, to {largest} bytes, "
        note += f"{time.monotonic() - started:.0f} s"
        absent = "cannot be used" in reason or "can be used here" in reason
        value = None if absent else float(wrong == 0 and not reason)
        yield Figure(f"{name}: every type, rank count and size right", value, 1, reason or note)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Figure]]] = {
    "capped": capped,
    "loopback": loopback,
    "correct": correct,
}


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="LIST", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=8, help="most ranks of `correct`")
    parser.add_argument("--largest", type=parse_size, default=256 * 10**6, help="largest size of `correct` (256M)")
    args = parser.parse_args()
    figures: list[Figure] = []
    for part in args.only.split(","):
        if part not in PARTS:
            parser.error(f"no part {part!r}: {', '.join(PARTS)}")
        try:
            for figure in PARTS[part](args):
                figures.append(figure)
                say(figure.line())
        except (LabError, Error) as error:
            figures.append(Figure(part, None, 0, error.strerror or str(error)))
            say(figures[-1].line())
    say("\n" + "\n".join(figure.line() for figure in figures))
    return 1 if any(figure.passed is False for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
