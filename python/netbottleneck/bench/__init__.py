"""All-reduce benchmark over stock, tcp and ofi: interleaved, verified, with the metrics of nccl-tests."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any, TypedDict, Unpack

from netbottleneck import config
from netbottleneck._version import __version__
from netbottleneck.bench.values import SIZES, Request, Results, heading, line, parse_lanes, parse_sizes
from netbottleneck.lab import Lab, LinkSpec
from netbottleneck.launch import connect
from netbottleneck.trace.transports import BENCHED
from netbottleneck.units import gbit

__all__ = ["Request", "Results", "bench", "measure", "parse_lanes", "parse_sizes"]

Say = Callable[[str], None]


class More(TypedDict, total=False):
    """Further arguments of `bench`; defaults: float32, sum, 0 (by size), 1, NETBOTTLENECK_SHM, no peers, None."""

    dtype: str
    op: str
    iterations: int
    ranks_per_host: int
    shm: str | Sequence[str]
    peers: str
    say: Say | None


def bench(
    ranks: int = 2,
    lab: str | LinkSpec | None = None,
    transports: str | Sequence[str] | None = None,
    streams: str | int | Sequence[int] = "auto",
    sizes: str | int | Sequence[int] = SIZES,
    **more: Unpack[More],
) -> Results:
    """Start `ranks` processes here and measure all-reduce of each size on each transport, in turn on the same memory.

    lab: hosts joined by capped links, such as "2gbit/500mbit"; None: loopback. sizes: in bytes or as "1M,64Mi".
    streams: "auto" or numbers. transports: None: all available ones. shm: "auto", "0", "1" or several: memory shared
    between ranks of one host. peers: a Python file or package with paths of other libraries, which `transports` then
    names too; see CONTRIBUTING.md. say: called with each line of the table.
    Raises ValueError for a bad argument, LabError if no lab is possible, Error with the message of a failed rank.
    """
    named = transports.split(",") if isinstance(transports, str) else transports
    shared = more.get("shm", ())
    request = Request(
        tuple(named) if named is not None else BENCHED,
        parse_lanes(streams) if isinstance(streams, str) else _several(streams),
        parse_sizes(sizes) if isinstance(sizes, str) else _several(sizes),
        more.get("dtype", "float32"),
        more.get("op", "sum"),
        more.get("iterations", 0),
        named is not None,
        shm=tuple(shared.split(",")) if isinstance(shared, str) else tuple(shared),
        peers=more.get("peers", ""),
    )
    return start(request, ranks, lab, more.get("ranks_per_host", 1), more.get("say"))


def _several(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def start(
    request: Request, ranks: int, lab: str | LinkSpec | None = None, ranks_per_host: int = 1, say: Say | None = None
) -> Results:
    """Run a request on ranks started here; see bench."""
    connect.core()
    if ranks < 1 or ranks_per_host < 1 or ranks % ranks_per_host:
        raise ValueError(f"{ranks} ranks cannot be {ranks_per_host} on each host: it must divide the number of ranks")
    results = Results(head(ranks))
    if lab is None:
        if ranks_per_host > 1:
            raise ValueError("several ranks per host need a lab, such as 2gbit/500mbit")
        results.head["network"] = "loopback"
        _work(request, ranks, None, results, say)
        return results
    with Lab(ranks // ranks_per_host, lab, ranks_per_host) as hosts:
        results.head["lab"] = hosts.verify() if hosts.hosts > 1 else {"lab": str(hosts.spec), "how": hosts.how}
        results.head["network"] = f"lab {hosts.spec}"
        if say:
            say(f"# {lab_line(results.head['lab'])}")
        _work(request, ranks, hosts, results, say)
    return results


def _work(request: Request, ranks: int, lab: Lab | None, results: Results, say: Say | None) -> None:
    from netbottleneck.bench.worker import Workers, patience_s

    with Workers(request, ranks, lab) as workers:
        workers.listen(listener(results, say), patience_s(request, lab.spec if lab else None))


def measure(request: Request, settings: config.Settings, place: connect.Place, say: Say | None = None) -> Results:
    """Run a request as one rank of a launcher's job; rank 0's result has the rows."""
    from netbottleneck.bench.worker import Rank

    results = Results(head(place.size))
    results.head["network"] = f"{place.size} ranks of {place.launcher}"
    rank = Rank(request, settings, place, listener(results, say))
    results.head["interface"] = settings.ifname
    rank.run()
    return results


def listener(results: Results, say: Say | None) -> Callable[[Mapping[str, Any]], None]:
    """Return the callback that adds rank 0's lines to the results and prints them."""
    write = say or _silent

    def add(message: Mapping[str, Any]) -> None:
        if "open" in message:
            write(heading())
        elif "left_out" in message:
            results.notes.append(str(message["left_out"]))
            write(f"# {message['left_out']}")
        elif "row" in message:
            results.rows.append(dict(message["row"]))
            write(line(message["row"]))

    return add


def _silent(_: str) -> None:
    """Discard a line."""


def lab_line(lab: Mapping[str, Any]) -> str:
    """Return one line on a lab: its specification and its measured rates."""
    runs = [lab[key] for key in ("one_flow", "many_flows") if lab.get(key)]
    rates = [f"{run['flows']} flow{'s' if run['flows'] > 1 else ''} {gbit(run['measured_bps'])}" for run in runs]
    measured = f"; measured: {', '.join(rates)}" if rates else ""
    bad = "" if lab.get("ok", True) else " (NOT as specified)"
    return f"lab {lab['lab']}: {lab['how']}{measured}{bad}"


def head(ranks: int) -> dict[str, Any]:
    """Return the benchmark's environment: time, command, ranks, machine and versions."""
    versions = {"netbottleneck": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "started_wall_ns": time.time_ns(),
        "command": sys.argv,
        "ranks": ranks,
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "architecture": platform.machine(),
        },
        "versions": versions,
        "lab": None,
    }


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((text.partition(":")[2].strip() for text in file if text.startswith("model name")), "")
    except OSError:
        return ""


class _Callable(ModuleType):
    """A callable module: calling it calls its function `bench`.

    `netbottleneck.bench(…)` therefore works the same before and after an import of the module.
    """

    def __call__(self, *args: Any, **options: Any) -> Results:
        return bench(*args, **options)


sys.modules[__name__].__class__ = _Callable
