"""Gates N1 to N6: our net plugin for NCCL against NCCL's own Socket network, on host memory of two processes."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import random
import resource
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import nccl_programs
from cases import BUSY, Case, Run, others_busy, settle
from gates import PAYLOAD, bits_s
from judge import Figure, certain
from sharing import PIPES, checked
from table import Table, against

from netbottleneck import _core
from netbottleneck.bench import Results, head
from netbottleneck.bench.worker import busy_ns
from netbottleneck.errors import Error
from netbottleneck.lab import Lab, parse_lab

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = Path(_core.__file__).with_name("libnccl-net-netbottleneck.so")
LIMIT_S = 60.0
QUIET_WAITS = 40  # of half a second, for the machine to become quiet
TRIES = 2  # of a round that other processes disturb

EQUAL = "800mbit/200mbit"
UNEQUAL = "none/200mbit,200mbit,200mbit,50mbit"
MIB = 1 << 20
MESSAGE, DEPTH, WARM = MIB // 2, 8, 32  # NCCL's default buffer of 4 MiB, in its 8 steps
CAPPED_BYTES, LOOPBACK_BYTES = 64 * MIB, 1024 * MIB
TRIPS = {8: 4000, 64 * 1024: 1000}  # round trips by size

OURS = ("tcp x4", "ofi x4")
ONE_SOCKET = ("stock",)
FOUR_SOCKETS = ("stock 1x4", "stock 4x1")
MORE_SOCKETS = ("stock 4x4", "stock 2x8")
STOCK = (*ONE_SOCKET, *FOUR_SOCKETS, *MORE_SOCKETS)
TIMEOUT_S = 2.0  # NETBOTTLENECK_TIMEOUT_S of N6
# By fault: until when an error must be seen, and the number of rounds.
FAULTS = {"kill": (2.0, 6), "stop": (TIMEOUT_S + 1.0, 3)}


def library() -> Path | None:
    """Return NCCL's library of this interpreter's packages (requirements/nccl.txt), or None."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(place, "nccl", "lib", "libnccl.so.2")
        if path.is_file():
            return path
    return None


def compiled(folder: Path) -> Path:
    """Compile tests/nccl/measure.c. Raises Error with the compiler's message."""
    return nccl_programs.compiled("measure.c", folder / "measure", "-lm")


def way(name: str) -> tuple[list[str], dict[str, str]]:
    """Return options of measure.c and variables of a path: "tcp x4", lanes; "stock 4x1", threads x their sockets."""
    network, _, numbers = name.partition(" ")
    if network != "stock":
        # A fixed port range: the lanes' flow caps are dealt by port, as in T2.
        ours = {"TRANSPORT": network, "STREAMS": numbers.removeprefix("x"), "PORTS": "41000-41127"}
        return ["--plugin", str(PLUGIN)], {f"NETBOTTLENECK_{key}": value for key, value in ours.items()}
    threads, _, sockets = numbers.partition("x")
    names = {"NCCL_SOCKET_NTHREADS": threads, "NCCL_NSOCKS_PERTHREAD": sockets}
    return ["--stock", str(library())], names if numbers else {}


def sample(
    program: Path, name: str, options: Sequence[str], lab: Lab | None = None, timeout_s: float = 0.0
) -> dict[str, Any]:
    """Run the two processes of measure.c on loopback or in a lab; return their result.

    Raises Error, and TimeoutError after LIMIT_S.
    """
    network, names = way(name)
    environ = {**os.environ, **names}
    if timeout_s:
        environ["NETBOTTLENECK_TIMEOUT_S"] = f"{timeout_s:g}"
    if lab is None:
        environ |= {"NETBOTTLENECK_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    sides: list[subprocess.Popen[str]] = []
    with contextlib.ExitStack() as ends:
        for rank, end in enumerate(socket.socketpair()):
            ends.enter_context(end)
            command = [str(program), *network, *options, "--side", str(rank), "--socket", str(end.fileno())]
            more = {**PIPES, "pass_fds": [end.fileno()]}
            sides.append(lab.popen(rank, command, environ, **more) if lab else _popen(command, environ, more))
    try:
        texts = [side.communicate(timeout=LIMIT_S) for side in sides]
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{name}: no result within {LIMIT_S:g} s") from None
    finally:
        for side in sides:
            side.kill()
            side.wait()
    lines = [line for text, _ in texts for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise Error(0, f"{name}: " + ("; ".join(errors.strip() for _, errors in texts) or "no output"))
    record: dict[str, Any] = json.loads(lines[-1])
    if "not_run" in record:
        raise Error(0, f"{name}: {record['not_run']}")
    return record


def _popen(command: Sequence[str], environ: Mapping[str, str], more: Mapping[str, Any]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=environ, **more)


def words(**options: int) -> list[str]:
    """Return options of measure.c."""
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def stream(case: Case, sizes: Sequence[int], run: Run) -> Results:
    """Move `sizes` bytes one way over each path of a case, in messages of NCCL's size."""

    def options(size: int) -> list[str]:
        return words(bytes=MESSAGE, depth=DEPTH, warm=WARM, count=size // MESSAGE, rounds=1)

    return measured(case, sizes, run, options)


def trips(case: Case, sizes: Sequence[int], run: Run, ahead: int = 0) -> Results:
    """Send messages of `sizes` bytes forth and back over each path. ahead: receives posted before they are due."""

    def options(size: int) -> list[str]:
        return words(ping=size, rounds=TRIPS[size], ahead=ahead, bytes=MESSAGE, count=DEPTH)

    found = measured(case, sizes, run, options)
    for row in found.rows:
        row["rounds"]["time_s"] = [2e-6 * each for each in row["rounds"].pop("latency_us")]
    return found


def measured(case: Case, sizes: Sequence[int], run: Run, options: Callable[[int], list[str]]) -> Results:
    """Measure the paths of a case in rounds, each in a random order. Raises LabError and Error."""
    if library() is None:
        raise Error(0, "NCCL is not installed (requirements/nccl.txt)")
    program = compiled(ROOT / "build" / "nccl")
    order = random.Random(len(run.rows))
    rows = {(size, name): _row(case, size, name) for size in sizes for name in case.transports}
    run.say(f"# {case.where}: {', '.join(case.transports)}")
    with checked(case.lab) if case.lab else contextlib.nullcontext() as lab:
        for _ in range(run.rounds or case.rounds):
            for size in sizes:
                records, busy = _round(lambda name: sample(program, name, options(size), lab), case.transports, order)  # noqa: B023
                for name, record in records.items():
                    row = rows[size, name]
                    row["wrong"] += record["wrong"]
                    for what, key in (("time_s", "time_s"), ("busy_s", "cpu_s"), ("latency_us", "latency_us")):
                        row["rounds"][what].append(record[key])
                    row["rounds"]["sent_bytes"].append(0)
                    row["rounds"]["others_busy"].append(busy)
    run.rows += rows.values()
    environment = head(2)
    run.heads.setdefault("machine", environment["machine"])
    run.heads.setdefault("versions", {**environment["versions"], "nccl": _version()})
    return Results(rows=list(rows.values()))


def _row(case: Case, size: int, name: str) -> dict[str, Any]:
    network, _, numbers = name.partition(" ")
    native = network != "stock"
    return {
        "where": case.where,
        "transport": network if native else name,
        "streams": numbers.removeprefix("x") if native else "auto",
        "bytes": size,
        "ranks": 2,
        "wrong": 0,
        "owed_bytes": 0,
        "rounds": {name: [] for name in ("time_s", "busy_s", "latency_us", "sent_bytes", "others_busy")},
    }


def _round(
    one: Callable[[str], dict[str, Any]], names: Sequence[str], order: random.Random
) -> tuple[dict[str, dict[str, Any]], float]:
    """Measure each path once; return records, and the number of CPUs that other processes kept busy meanwhile.

    Two processes that poll need both cores of a small machine. So a round waits for a quiet machine, and all paths of a
    disturbed round are measured again.
    """
    for _ in range(TRIES):
        _await_quiet()
        began_ns, busy, ours = time.monotonic_ns(), busy_ns(), _children_s()
        records = {name: one(name) for name in order.sample(names, len(names))}
        passed = (time.monotonic_ns() - began_ns) / 1e9
        others = max(((busy_ns() - busy) / 1e9 - (_children_s() - ours)) / passed, 0.0)
        if others <= BUSY:
            break
    return records, others


def _await_quiet() -> None:
    for _ in range(QUIET_WAITS):
        if others_busy() <= BUSY:
            return


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _version() -> str:
    found = library()
    packages = found.parents[3].glob("nvidia_nccl*.dist-info") if found else ()
    return next((path.name.removesuffix(".dist-info").split("-")[1] for path in packages), "not installed")


# Gates


def n1(run: Run) -> Iterator[Figure]:
    """Compare with the payload rate of a link that four capped flows fill, and with stock's best setting."""
    bound_bps = PAYLOAD * (parse_lab(EQUAL).link_bps or 0)

    def judge(table: Table, size: int) -> list[Figure]:
        bound = bits_s(size, bound_bps)
        return [
            *(against(table, size, x, (), 0.97, constant=bound, label=f"{x} against the flows' sum") for x in OURS),
            *(against(table, size, x, STOCK, 0.97, label=f"{x} against the best of stock") for x in OURS),
        ]

    yield from settle(Case(EQUAL, EQUAL, (*OURS, *STOCK), (CAPPED_BYTES,), judge, rounds=6, measure=stream), run)


def n2(run: Run) -> Iterator[Figure]:
    """Compare with the sum of four flows of which one is slow, and with stock on as many sockets."""
    flow_bps = parse_lab(UNEQUAL).flow_bps
    many = ("tcp x16", "ofi x16")

    def judge(table: Table, size: int) -> list[Figure]:
        bound = bits_s(size, float(sum(flow_bps)))
        few, label = (*ONE_SOCKET, *FOUR_SOCKETS), "against the best of stock with up to"
        return [
            *(against(table, size, x, (), 0.85, constant=bound, label=f"{x} against the flows' sum") for x in OURS),
            *(against(table, size, x, few, 2.5, label=f"{x} {label} 4 sockets") for x in OURS),
            *(against(table, size, x, STOCK, 2.5, label=f"{x} {label} 16 sockets") for x in many),
        ]

    case = Case(UNEQUAL, UNEQUAL, (*OURS, *many, *STOCK), (CAPPED_BYTES,), judge, rounds=6, measure=stream)
    yield from settle(case, run)


def n3(run: Run) -> Iterator[Figure]:
    """Compare with stock's best setting without a cap."""

    def judge(table: Table, size: int) -> list[Figure]:
        return [against(table, size, ours, STOCK, 1.0, label=f"{ours} against the best of stock") for ours in OURS]

    case = Case("loopback", None, (*OURS, *STOCK), (LOOPBACK_BYTES,), judge, rounds=10, measure=stream)
    yield from settle(case, run)


def n4(run: Run) -> Iterator[Figure]:
    """Compare round trips with stock's best setting: a receive is posted when it is due, or before, as NCCL does."""

    def judge(table: Table, size: int) -> list[Figure]:
        label = f"round trips of {size} bytes against the best of stock"
        return [against(table, size, ours, STOCK, 1 / 1.2, label=f"{ours} {label}") for ours in OURS]

    for where, ahead in (("loopback", 0), ("loopback, receives ahead", 1)):
        measure = functools.partial(trips, ahead=ahead)
        yield from settle(Case(where, None, (*OURS, *STOCK), tuple(TRIPS), judge, rounds=10, measure=measure), run)


def n5(run: Run) -> Iterator[Figure]:
    """Compare the CPU time of both processes with stock's for as many sockets."""
    one = ("tcp x1", "ofi x1")

    def figures(table: Table, size: int, names: Sequence[str], stock: Sequence[str]) -> list[Figure]:
        label = f"busy seconds against {' and '.join(stock)}"
        return [against(table, size, x, stock, 1.0, what="busy_s", label=f"{x} {label}") for x in names]

    def four(table: Table, size: int) -> list[Figure]:
        return figures(table, size, OURS, FOUR_SOCKETS)

    def all_of(table: Table, size: int) -> list[Figure]:
        return [*four(table, size), *figures(table, size, one, ONE_SOCKET)]

    uncapped = (*OURS, *one, *ONE_SOCKET, *FOUR_SOCKETS)
    capped = (*OURS, *FOUR_SOCKETS)
    yield from settle(Case("loopback", None, uncapped, (LOOPBACK_BYTES,), all_of, rounds=10, measure=stream), run)
    yield from settle(Case(EQUAL, EQUAL, capped, (CAPPED_BYTES,), four, rounds=6, measure=stream), run)


def n6(run: Run) -> Iterator[Figure]:
    """Kill or stop the peer: the time until `test` returns an error."""
    for fault, (limit_s, rounds) in FAULTS.items():
        for name in OURS:
            yield _fault(run, name, fault, limit_s, rounds)


def _fault(run: Run, name: str, fault: str, limit_s: float, rounds: int) -> Figure:
    label = f"{name}: peer {'killed' if fault == 'kill' else 'stopped'}, error within {limit_s:g} s"
    try:
        program = compiled(ROOT / "build" / "nccl")
        command = (program, name, ["--fault", fault], None, TIMEOUT_S)
        times = [sample(*command)["error_after_s"] for _ in range(run.rounds or rounds)]
    except TimeoutError as error:
        return Figure(label, 1.0, certain(0.0), 1, broken=str(error), event=True)
    except OSError as error:
        return Figure(label, 1.0, reason=error.strerror or str(error))
    slowest = max(times)
    note = f"{slowest:.3f} s in the slowest of {len(times)} rounds"
    return Figure(label, 1.0, certain(limit_s / max(slowest, 0.001)), len(times), note, event=True)


GATES: Mapping[str, Callable[[Run], Iterator[Figure]]] = {"N1": n1, "N2": n2, "N3": n3, "N4": n4, "N5": n5, "N6": n6}
