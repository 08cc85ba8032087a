"""`netbottleneck calibrate`: times of each gradient on one rank, and the cost of additions and copies on this host."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from netbottleneck.bench import models
from netbottleneck.launch import connect
from netbottleneck.trace import layer_log as layerlog
from netbottleneck.trace import model as tr
from netbottleneck.trace.files import check_folder, write_text
from netbottleneck.trace.layer_log import VecTable
from netbottleneck.units import ms, nbytes

if TYPE_CHECKING:
    from netbottleneck import _core


# Cost of an addition and of a copy on this host, by size: measured in C, from the caches and from memory.

SIZES = tuple(40 << k for k in range(25))  # bytes, as in the 2020 study's table
SAMPLES, SAMPLES_LARGE, LARGE_BYTES = 15, 5, 16 << 20
LEAST_NS = 50_000  # minimum length of a sample
CACHES = 4  # a working set of this many last-level caches is read from memory
MEMORY_SHARE = 0.25  # part of the free memory, for both buffers
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
class TimeTable:
    """A table. cached: every call uses the same memory; else memory that is no longer in a cache."""

    kind: str
    cached: bool
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        """The file name, without suffix."""
        return f"{self.kind}{'_cached' if self.cached else ''}"

    @property
    def table(self) -> VecTable:
        """The medians by size."""
        return VecTable(tuple(row.bytes for row in self.rows), tuple(row.seconds for row in self.rows))


def last_cache_bytes() -> int:
    """Return the size of the first core's largest cache; 32 MiB if the kernel does not report it."""
    sizes = [int(size[:-1]) << {"K": 10, "M": 20}[size[-1]] for _, size in caches() if size[-1:] in ("K", "M")]
    return max(sizes, default=32 << 20)


def caches() -> list[tuple[str, str]]:
    """Return (level and type, size) of each cache of the first core, as the kernel reports them."""
    levels = []
    for path in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with contextlib.suppress(OSError):  # of a cache whose size it does not know, it has no such file
            fields = [(path / name).read_text(encoding="ascii").strip() for name in ("level", "type", "size")]
            levels.append((f"L{fields[0]} {fields[1]}", fields[2]))
    return levels


def host_facts() -> dict[str, Any]:
    """Return a description of this host for its tables."""
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
    """Return the largest size that fits into MEMORY_SHARE of the free memory."""
    return int(psutil.virtual_memory().available * MEMORY_SHARE / 2)


def tables(limit_bytes: int | None = None, progress: Callable[[str, int], None] = lambda *_: None) -> list[TimeTable]:
    """Measure all tables up to limit_bytes (default: limited by memory). progress(table, size): called before each.

    Raises ValueError if not even the smallest size fits.
    """
    core = connect.core()
    most = min(limit_bytes or SIZES[-1], most_bytes())
    sizes = [size for size in SIZES if size <= most]
    if not sizes:
        raise ValueError(f"tables up to {most} bytes: the smallest size is {SIZES[0]}")
    round_bytes = min(max(sizes[-1], CACHES * last_cache_bytes()), max(most_bytes(), sizes[-1]))
    into, source = core.Arena(round_bytes), core.Arena(round_bytes)
    core.copy_times(into, source, round_bytes)  # touch all pages
    found = []
    for kind in KINDS:
        for cached in (False, True):
            rows = []
            for size in sizes:
                progress(kind, size)
                rows.append(_row(kind, into, source, size, cached))
            found.append(TimeTable(kind, cached, tuple(rows)))
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
    return Row(size, *_percentiles(times), samples)


def _percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the 10th and the 90th percentile, in this order also where interpolation rounds."""
    median = statistics.median(values)
    cuts = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [median, median]
    return median, min(cuts[0], median), max(cuts[-1], median)


# The command.

VERSION = 1
SUCCESS, USAGE = 0, 2
BATCH, PASSES = 8, 10
MEASURED, MODELLED = "measured", "modelled"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"netbottleneck calibrate: {message}\n")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, 10th and 90th percentile, in seconds, of `count` passes."""

    median_s: float
    p10_s: float
    p90_s: float
    count: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A gradient; ready: time since the start of the backward."""

    name: str
    bytes: int
    ready: Spread


@dataclass(frozen=True, slots=True)
class Profile:
    """A model's step on one rank, over all passes. tensors: in the order of readiness."""

    step: Spread
    backward: Spread
    tensors: tuple[Tensor, ...]


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of times in seconds."""
    return Spread(*_percentiles(values), len(values))


def profile(trace: tr.Trace) -> Profile:
    """Return the times of each tensor over rank 0's steps. Raises ValueError if no step records them."""
    steps = [step for step in trace.steps if step.grad_ready and step.rank == 0]
    if not steps:
        raise ValueError(f"run {trace.id}: no step records when its gradients were ready")
    times: dict[int, list[float]] = defaultdict(list)
    backward = []
    for step in steps:
        begin = step.backward_begin_ns
        backward.append((max(at for _, at in step.grad_ready) - begin) / 1e9)
        for index, at in step.grad_ready:
            times[index].append((at - begin) / 1e9)
    order = sorted(times, key=lambda index: statistics.median(times[index]))
    tensors = (Tensor(trace.parameters[i].name, trace.parameters[i].bytes, spread(times[i])) for i in order)
    return Profile(spread([step.duration_ns / 1e9 for step in steps]), spread(backward), tuple(tensors))


def layer_log(title: str, measured: Profile) -> layerlog.LayerLog:
    """Return the medians as a layer log: each gradient's time since the previous one."""
    before, tensors = 0.0, []
    for tensor in measured.tensors:
        tensors.append((tensor.ready.median_s - before, tensor.bytes))
        before = tensor.ready.median_s
    return layerlog.LayerLog(title, tuple(tensors), measured.step.median_s)


def write(folder: Path, trace: tr.Trace, how: str) -> Profile:
    """Write MODEL.bk.log, MODEL.layers.csv and MODEL.jsonl.gz (all passes, a trace)."""
    measured = profile(trace)
    name = trace.model
    title = name if how == MEASURED else f"{name}, {MODELLED}"
    layerlog.write(folder / f"{name}.bk.log", layer_log(title, measured))
    with (folder / f"{name}.layers.csv").open("w", encoding="utf-8", newline="") as out:
        rows = csv.writer(out, lineterminator="\n")
        rows.writerow(["tensor", "bytes", "ready_s", "ready_p10_s", "ready_p90_s", "passes", "how"])
        for tensor in measured.tensors:
            times = (tensor.ready.median_s, tensor.ready.p10_s, tensor.ready.p90_s)
            rows.writerow([tensor.name, tensor.bytes, *(f"{t:.9f}" for t in times), tensor.ready.count, how])
    tr.write(trace, folder / f"{name}.jsonl.gz")
    return measured


def _profile_document(trace: tr.Trace, measured: Profile, how: str) -> dict[str, Any]:
    return {
        "model": trace.model,
        "how": how,
        "note": trace.notes[0],
        "step": asdict(measured.step),
        "backward": asdict(measured.backward),
        "tensors": len(measured.tensors),
        "bytes": sum(tensor.bytes for tensor in measured.tensors),
    }


def _arguments() -> argparse.ArgumentParser:
    parser = _Parser(prog="netbottleneck calibrate", description=__doc__)
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        choices=[*models.NAMES],
        metavar="MODEL",
        help=f"{', '.join(models.NAMES)}; without: only the tables",
    )
    add("--batch", type=_whole_number(1, 65536), help=f"samples per step ({BATCH})")
    add("--passes", type=_whole_number(2, 10000), help=f"measured steps ({PASSES}), after a few warm-up steps")
    add("--device", help="cpu, cuda or cuda:N; default: cuda if available")
    add(
        "--modelled",
        type=float,
        nargs=2,
        metavar=("FORWARD_MS", "BACKWARD_MS"),
        help="run nothing and assume these times",
    )
    add("--no-tables", action="store_true", help="do not measure the cost of additions and copies")
    add("--most-bytes", type=_whole_number(SIZES[0], 1 << 40), help="the largest size of a table")
    add("--directory", help="output folder, new or empty; default: profile-MODEL")
    return parser


def _whole_number(low: int, high: int) -> Any:
    def parse(text: str) -> int:
        value = int(text) if text.isdecimal() else -1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from {low} to {high}")
        return value

    return parse


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for an option that has no effect beside the others."""
    if args.model is None and args.no_tables:
        raise ValueError("nothing to do: name a model, or leave out --no-tables")
    if args.no_tables and args.most_bytes is not None:
        raise ValueError("--most-bytes has no effect with --no-tables")
    for name in ("modelled", "batch", "passes", "device"):
        if getattr(args, name) is not None and args.model is None:
            raise ValueError(f"--{name} needs a model")
        if getattr(args, name) is not None and args.modelled and name != "modelled":
            raise ValueError(f"--{name} has no effect with --modelled, which runs nothing")


def _run_model(args: argparse.Namespace) -> tuple[tr.Trace, str]:
    from netbottleneck.bench.models import passes

    if args.modelled:
        try:
            return passes.modelled(args.model, *args.modelled), MODELLED
        except ValueError as error:
            raise ValueError(f"--modelled: {error}") from error
    device = passes.pick_device(args.device or "auto")
    batch, count = args.batch or BATCH, args.passes or PASSES

    def progress(done: int, of: int) -> None:
        _progress(f"{args.model} on {device}: pass {done} of {of}")

    return passes.measured(args.model, batch=batch, passes=count, device=device, progress=progress), MEASURED


def _progress(text: str) -> None:
    """Show progress, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")


def _tables(folder: Path, most_bytes: int | None) -> Mapping[str, Any]:
    found = tables(most_bytes, lambda kind, size: _progress(f"{kind}, {size} bytes"))
    _progress("")
    for timed in found:
        layerlog.write_table(folder / f"{timed.name}.csv", timed.table)
    return {timed.name: [asdict(row) for row in timed.rows] for timed in found}


def main(argv: Sequence[str]) -> int:
    """Run the command line. Bad input gives one line on stderr and exit code 2, and nothing is written."""
    args = _arguments().parse_args(argv)
    folder = Path(args.directory or f"profile-{args.model or 'host'}")
    document: dict[str, Any] = {"version": VERSION, "host": host_facts()}
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} already exists: pass an empty folder as --directory")
        check_folder("--directory", folder)
        _check(args)
        measured = _run_model(args) if args.model else None
    except ValueError as error:
        sys.stderr.write(f"netbottleneck calibrate: {error}\n")
        return USAGE
    folder.mkdir(parents=True, exist_ok=True)
    if measured is not None:
        found = write(folder, *measured)
        document["profile"] = _profile_document(measured[0], found, measured[1])
        _write_document(folder, document)  # before the tables, which take long
        sys.stdout.write(_summary_line(args.model, found, measured[1]))
    if not args.no_tables:
        document["tables"] = _tables(folder, args.most_bytes)
        _write_document(folder, document)
        sys.stdout.write(_table_line(document["tables"]))
    sys.stdout.write(f"Written: {folder}\n")
    return SUCCESS


def _write_document(folder: Path, document: Mapping[str, Any]) -> None:
    write_text(folder / "profile.json", json.dumps(document, indent=1) + "\n")


def _summary_line(model: str, measured: Profile, how: str) -> str:
    step, back = measured.step, measured.backward
    moved = nbytes(sum(tensor.bytes for tensor in measured.tensors))
    return (
        f"{model}: {len(measured.tensors)} gradients, {moved}; step {ms(step.median_s * 1e9)}, p10-p90 "
        f"{ms(step.p10_s * 1e9)}-{ms(step.p90_s * 1e9)}; backward {ms(back.median_s * 1e9)} ({how}, "
        f"{step.count} {'pass' if step.count == 1 else 'passes'}, one rank)\n"
    )


def _table_line(tables: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    last = {name: rows[-1] for name, rows in tables.items()}
    rates = (f"{name} {row['bytes'] / row['seconds'] / 1e9:.2f} GB/s" for name, row in last.items())
    largest = nbytes(next(iter(last.values()))["bytes"])
    return f"At {largest} (measured, one core): {', '.join(rates)}\n"
