"""What an addition and a copy cost on this host, by size: measured in C, from the caches and from memory."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from netbottleneck.launch import connect
from netbottleneck.trace.layer_log import VecTable

if TYPE_CHECKING:
    from netbottleneck import _core

SIZES = tuple(40 << k for k in range(25))  # bytes, as the 2020 study's table has them
SAMPLES, SAMPLES_LARGE, LARGE_BYTES = 15, 5, 16 << 20
LEAST_NS = 50_000  # of a sample
CACHES = 4  # what goes through so many times the last cache comes from memory
MEMORY_SHARE = 0.25  # of what is free, for both memories
KINDS = ("vector_add", "memcpy")


@dataclass(frozen=True, slots=True)
class Row:
    """One size: median, 10th and 90th percentile of the seconds of a call, over `samples` samples of many calls."""

    bytes: int
    seconds: float
    p10_s: float
    p90_s: float
    samples: int


@dataclass(frozen=True, slots=True)
class Timed:
    """A table. cached: every call is on the same memory; else on memory that no cache holds any more."""

    kind: str
    cached: bool
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        """What its file is called."""
        return f"{self.kind}{'_cached' if self.cached else ''}"

    @property
    def table(self) -> VecTable:
        """The medians."""
        return VecTable(tuple(row.bytes for row in self.rows), tuple(row.seconds for row in self.rows))


def last_cache_bytes() -> int:
    """Return the size of the largest cache that the first core uses; 32 MiB where the kernel does not tell."""
    found = [int(size[:-1]) << {"K": 10, "M": 20}[size[-1]] for _, size in caches() if size[-1:] in ("K", "M")]
    return max(found, default=32 << 20)


def caches() -> list[tuple[str, str]]:
    """Return (level and type, size) of each cache of the first core, as the kernel tells them."""
    found = []
    for path in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        words = [(path / name).read_text(encoding="ascii").strip() for name in ("level", "type", "size")]
        found.append((f"L{words[0]} {words[1]}", words[2]))
    return found


def facts() -> dict[str, Any]:
    """Return what a table is of."""
    return {
        "hostname": platform.node(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "kernels": connect.core().isa(),
        "caches": [{"cache": name, "size": size} for name, size in caches()],
        "memory_bytes": psutil.virtual_memory().total,
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.machine()


def most_bytes() -> int:
    """Return the largest size that memory allows here."""
    return int(psutil.virtual_memory().available * MEMORY_SHARE / 2)


def tables(limit_bytes: int | None = None, tell: Callable[[str, int], None] = lambda *_: None) -> list[Timed]:
    """Measure all tables, of sizes up to limit_bytes (default: what memory allows). tell(table, size): as it goes.

    Raises ValueError where not even the smallest size fits.
    """
    core = connect.core()
    most = min(limit_bytes or SIZES[-1], most_bytes())
    sizes = [size for size in SIZES if size <= most]
    if not sizes:
        raise ValueError(f"tables up to {most} bytes: the smallest size has {SIZES[0]}")
    round_bytes = min(max(sizes[-1], CACHES * last_cache_bytes()), max(most_bytes(), sizes[-1]))
    into, source = core.Arena(round_bytes), core.Arena(round_bytes)
    core.copy_times(into, source, round_bytes)  # so that no page is new any more
    found = []
    for kind in KINDS:
        for cached in (False, True):
            rows = []
            for size in sizes:
                tell(kind, size)
                rows.append(_row(kind, into, source, size, cached))
            found.append(Timed(kind, cached, tuple(rows)))
    return found


def _row(kind: str, into: _core.Arena, source: _core.Arena, size: int, cached: bool) -> Row:
    core = connect.core()
    reach = size if cached else into.nbytes
    to, of = (into.address, reach), (source.address, reach)
    samples = SAMPLES_LARGE if size >= LARGE_BYTES else SAMPLES
    if kind == "memcpy":
        pairs = core.copy_times(to, of, size, samples, LEAST_NS)
    else:
        pairs = core.reduce_times(to, of, size, core.FLOAT32, samples, LEAST_NS)
    times = sorted(ns / calls / 1e9 for calls, ns in pairs)
    low, high = _percentiles(times)
    return Row(size, statistics.median(times), low, high, samples)


def _percentiles(times: list[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return cuts[0], cuts[-1]
