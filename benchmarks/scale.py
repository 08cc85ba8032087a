"""Cost of more ranks: memory, connections and set-up time, measured; times with many more ranks, predicted.

python benchmarks/scale.py [--ranks 2,4,8,16] [--lanes 8] [--lab 1gbit] [--predict 1000] [--json FILE]

Each rank is a host of a lab, a network namespace of this machine, on one bridge. Measured on every rank: the memory
(RSS) and connections that a communicator adds, before and after its first all-reduces; the time to open it; the time of
all-reduces of 4 KiB and of 16 MB. Predicted: the same schedules on more ranks, by formula, from the latency and
bandwidth of two ranks. All ranks share the cores of one machine, so times with many ranks say nothing about a network,
and set-up times are upper bounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netbottleneck import config
from netbottleneck.errors import Error
from netbottleneck.lab import Lab, LabError
from netbottleneck.launch import connect

SMALL, LARGE = 4096, 16_000_000
TIMES = {SMALL: 50, LARGE: 3}
LIMIT_S = 300.0
ESTABLISHED = 1  # the state in TCP_INFO


@dataclass(frozen=True)
class Link:
    """alpha_s: time of an empty message; bytes_per_s: rate of a host, one way."""

    alpha_s: float
    bytes_per_s: float


def ring_s(link: Link, ranks: int, nbytes: float) -> float:
    """Return seconds of a ring all-reduce: 2(p-1)(alpha + n/(pB)).

    Source of this and the next formulas: Thakur, Rabenseifner and Gropp, Optimization of collective communication
    operations in MPICH (2005), section 4.5; additions are not counted, as they overlap with the transfer here.
    """
    return 2 * (ranks - 1) * (link.alpha_s + nbytes / ranks / link.bytes_per_s)


def folds_s(link: Link, ranks: int, nbytes: float) -> float:
    """Return seconds for ranks beyond a power of two: each sends its data to a neighbour and receives the result."""
    return 2 * (link.alpha_s + nbytes / link.bytes_per_s) if ranks & (ranks - 1) else 0.0


def doubling_s(link: Link, ranks: int, nbytes: float) -> float:
    """Return seconds of recursive doubling: floor(log2 p)(alpha + n/B), plus folds_s."""
    return math.floor(math.log2(ranks)) * (link.alpha_s + nbytes / link.bytes_per_s) + folds_s(link, ranks, nbytes)


def halving_s(link: Link, ranks: int, nbytes: float) -> float:
    """Return seconds of halving and doubling: 2 log2 q alpha + 2(q-1)/q n/B, plus folds_s; q: power of two up to p."""
    levels = math.floor(math.log2(ranks))
    part = 1 - 1 / (1 << levels)
    return 2 * levels * link.alpha_s + 2 * part * nbytes / link.bytes_per_s + folds_s(link, ranks, nbytes)


SCHEDULES = {"ring": ring_s, "recursive doubling": doubling_s, "halving and doubling": halving_s}


def fitted(small_s: float, large_s: float) -> Link:
    """Return the link that explains two ranks' times: a ring of two has two steps of half the bytes each."""
    alpha_s = small_s / 2
    return Link(alpha_s, LARGE / max(large_s - 2 * alpha_s, 1e-9))


# One rank.


def rss_bytes() -> int:
    """Return this process's resident memory."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) << 10
    return 0


def connections() -> int:
    """Return the number of established TCP connections of this process.

    Each socket is asked itself: /proc/net/tcp can show a connection twice while others of the machine open and close.
    """
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed by now, or no socket of TCP
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry))) as other:
                    count += other.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED
    return count


def rank(transport: str, lanes: int) -> int:
    """Run one rank: open a second communicator, use it, and print its cost."""
    core, settings = connect.core(), config.settings()
    control = connect.connect(settings, connect.detect(settings), transport="tcp", streams=1)
    _together(control)
    before = (rss_bytes(), connections())
    start = time.monotonic()
    comm = connect.connect(settings, connect.detect(settings), transport=transport, streams=lanes)
    took = time.monotonic() - start
    opened = (rss_bytes(), connections())
    memory = core.Arena(LARGE)
    array: NDArray[np.float32] = np.frombuffer(memory, np.float32)
    comm.map(memory)
    array[:] = 1.0
    seconds = {}
    for nbytes, times in TIMES.items():
        _reduce(comm, memory, nbytes)
        _together(control)
        begin = time.monotonic()
        for _ in range(times):
            _reduce(comm, memory, nbytes)
        seconds[nbytes] = (time.monotonic() - begin) / times
    used = (rss_bytes() - LARGE, connections())
    costs = {
        "setup_s": took,
        "memory_open_bytes": opened[0] - before[0],
        "memory_used_bytes": used[0] - before[0],
        "connections": used[1] - before[1],
        "small_s": seconds[SMALL],
        "large_s": seconds[LARGE],
        "wrong": int(np.count_nonzero(array != 1.0)),
    }
    sys.stdout.write(json.dumps(costs) + "\n")
    sys.stdout.flush()
    _together(control)
    comm.close()
    control.close()
    return 0


def _together(comm: Any) -> None:
    core = connect.core()
    comm.submit("scale.barrier", core.BARRIER, [], core.UINT8).wait()


def _reduce(comm: Any, memory: Any, nbytes: int) -> None:
    """All-reduce by max, so that repetitions do not change the data."""
    core = connect.core()
    comm.submit("scale", core.ALLREDUCE, [(memory.address, nbytes)], core.FLOAT32, op=core.MAX, keep=memory).wait()


# All ranks.


def measure(ranks: int, spec: str, transport: str, lanes: int) -> dict[str, Any]:
    """Return the cost of a job: the maximum over ranks. Raises LabError, or Error with a rank's message."""
    command = [sys.executable, __file__, "--rank", transport, "--lanes", str(lanes)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Lab(ranks, spec, ways=("root", "user")) as lab, tempfile.TemporaryDirectory(prefix="netbottleneck-") as folder:
        lab.verify(0.2)
        started = []
        for index in range(ranks):
            names = {"NETBOTTLENECK_RANK": str(index), "NETBOTTLENECK_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
            variables = {**os.environ, **names, "NETBOTTLENECK_RENDEZVOUS": folder}
            started.append(lab.popen(index, command, variables, **pipes))
        costs = []
        for process in started:
            text, errors = process.communicate(timeout=LIMIT_S)
            if process.returncode != 0:
                raise Error(0, (errors.strip().splitlines() or ["a rank failed without a message"])[-1])
            costs.append(json.loads(text.splitlines()[-1]))
    if any(each["wrong"] for each in costs):
        raise Error(0, f"{ranks} ranks: elements were wrong")
    found = {name: max(each[name] for each in costs) for name in costs[0]}
    found["small_s"], found["large_s"] = (
        statistics.median(each[name] for each in costs) for name in ("small_s", "large_s")
    )
    return {"ranks": ranks, "lanes": lanes, "transport": transport, **found}


def line(row: Mapping[str, Any]) -> str:
    """Return a row of the table."""
    moved = 8 * LARGE * 2 * (row["ranks"] - 1) / row["ranks"] / row["large_s"]
    return (
        f"{row['ranks']:>6} {row['lanes']:>6} {row['transport']:>5} {row['setup_s']:>9.2f} {row['connections']:>12} "
        f"{row['memory_open_bytes'] / 1e6:>12.1f} {row['memory_used_bytes'] / 1e6:>12.1f} "
        f"{1e6 * row['small_s']:>11.0f} {moved / 1e9:>14.2f}"
    )


def predicted(link: Link, ranks: int) -> list[dict[str, Any]]:
    """Return each schedule's predicted time for three sizes."""
    found = []
    for nbytes in (SMALL, 1_000_000, 64_000_000):
        times = {name: schedule(link, ranks, nbytes) for name, schedule in SCHEDULES.items()}
        found.append(
            {"ranks": ranks, "bytes": nbytes, "predicted_s": times, "best": min(times, key=lambda n: times[n])}
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", metavar="TRANSPORT", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", default="2,4,8,16", metavar="LIST")
    parser.add_argument("--lanes", type=int, default=8, metavar="N")
    parser.add_argument("--transports", default="tcp,ofi", metavar="LIST")
    parser.add_argument("--lab", default="1gbit", metavar="LINK")
    parser.add_argument("--predict", type=int, default=1000, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.rank:
        return rank(args.rank, args.lanes)
    print(f"# lab {args.lab}, one rank per host; memory and set-up: maximum over ranks; measured")
    print(" ranks  lanes       set-up(s)  connections   opened(MB)     used(MB)   4 KiB(us)  16 MB(Gbit/s)", flush=True)
    rows = []
    for transport in args.transports.split(","):
        for ranks in map(int, args.ranks.split(",")):
            try:
                rows.append(measure(ranks, args.lab, transport, args.lanes))
            except (LabError, Error, subprocess.TimeoutExpired) as error:
                print(f"# {transport}, {ranks} ranks: {getattr(error, 'strerror', None) or error}", flush=True)
                continue
            print(line(rows[-1]), flush=True)
    document: dict[str, Any] = {"version": 1, "lab": args.lab, "rows": rows}
    two = next((row for row in rows if row["ranks"] == 2), None)
    if two is not None:
        link = fitted(two["small_s"], two["large_s"])
        document |= {
            "alpha_s": link.alpha_s,
            "bytes_per_s": link.bytes_per_s,
            "predicted": predicted(link, args.predict),
        }
        print(f"# two ranks, {two['transport']}: {1e6 * link.alpha_s:.0f} us a message, ", end="")
        print(f"{8e-9 * link.bytes_per_s:.2f} Gbit/s")
        for each in document["predicted"]:
            times = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in each["predicted_s"].items())
            print(f"predicted (model, not measured), {args.predict} ranks, {each['bytes']} bytes: {times}")
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
