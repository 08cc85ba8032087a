"""`netbottleneck profile`: what one rank alone computes, tensor by tensor, and what this host's memory costs."""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from netbottleneck.bench import models
from netbottleneck.cli.profiling import host
from netbottleneck.trace import layer_log as layerlog
from netbottleneck.trace import model as tr
from netbottleneck.units import ms, nbytes

VERSION = 1
FINE, USAGE = 0, 2
MEASURED, MODELLED = "measured", "modelled"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"netbottleneck profile: {message}\n")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, 10th and 90th percentile, in seconds, of `count` passes."""

    median_s: float
    p10_s: float
    p90_s: float
    count: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A gradient: ready so long after the backward pass began."""

    name: str
    bytes: int
    ready: Spread


@dataclass(frozen=True, slots=True)
class Profile:
    """A model's step on one rank, of all passes. tensors: in the order in which they are ready."""

    step: Spread
    backward: Spread
    tensors: tuple[Tensor, ...]


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of times in seconds."""
    cuts = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0], values[0]]
    return Spread(statistics.median(values), cuts[0], cuts[-1], len(values))


def profile(trace: tr.Trace) -> Profile:
    """Return what the steps of one rank say of each tensor. Raises ValueError where none tells."""
    steps = [step for step in trace.steps if step.grad_ready and step.rank == 0]
    if not steps:
        raise ValueError(f"run {trace.id}: no step tells when its gradients were ready")
    times: dict[int, list[float]] = defaultdict(list)
    backward = []
    for step in steps:
        begin = step.forward[-1][1] if step.forward else step.begin_ns
        backward.append((max(at for _, at in step.grad_ready) - begin) / 1e9)
        for index, at in step.grad_ready:
            times[index].append((at - begin) / 1e9)
    order = sorted(times, key=lambda index: statistics.median(times[index]))
    tensors = (Tensor(trace.parameters[i].name, trace.parameters[i].bytes, spread(times[i])) for i in order)
    return Profile(spread([step.duration_ns / 1e9 for step in steps]), spread(backward), tuple(tensors))


def layer_log(title: str, found: Profile) -> layerlog.LayerLog:
    """Return the medians as a layer log: each gradient's time since the one before."""
    before, tensors = 0.0, []
    for tensor in found.tensors:
        tensors.append((tensor.ready.median_s - before, tensor.bytes))
        before = tensor.ready.median_s
    return layerlog.LayerLog(title, tuple(tensors), found.step.median_s)


def write(folder: Path, trace: tr.Trace, how: str) -> Profile:
    """Write MODEL.bk.log, MODEL.layers.csv and MODEL.jsonl.gz (all passes, a trace)."""
    found = profile(trace)
    name = trace.model
    title = name if how == MEASURED else f"{name}, {MODELLED}"
    layerlog.write(folder / f"{name}.bk.log", layer_log(title, found))
    with (folder / f"{name}.layers.csv").open("w", encoding="utf-8", newline="") as out:
        rows = csv.writer(out, lineterminator="\n")
        rows.writerow(["tensor", "bytes", "ready_s", "ready_p10_s", "ready_p90_s", "passes", "how"])
        for tensor in found.tensors:
            times = (tensor.ready.median_s, tensor.ready.p10_s, tensor.ready.p90_s)
            rows.writerow([tensor.name, tensor.bytes, *(f"{t:.9f}" for t in times), tensor.ready.count, how])
    tr.write(trace, folder / f"{name}.jsonl.gz")
    return found


def _described(trace: tr.Trace, found: Profile, how: str) -> dict[str, Any]:
    return {
        "model": trace.model,
        "how": how,
        "note": trace.notes[0],
        "step": asdict(found.step),
        "backward": asdict(found.backward),
        "tensors": len(found.tensors),
        "bytes": sum(tensor.bytes for tensor in found.tensors),
    }


def _arguments() -> argparse.ArgumentParser:
    parser = _Parser(prog="netbottleneck profile", description=__doc__)
    add = parser.add_argument
    add("model", nargs="?", choices=[*models.NAMES], metavar="MODEL", help=f"{', '.join(models.NAMES)}; none: tables")
    add("--batch", type=_whole(1, 65536), default=8, help="samples of a step (8)")
    add("--passes", type=_whole(2, 10000), default=10, help="steps that count (10); a few more come before them")
    add("--device", default="auto", help="cpu, cuda or cuda:N; default: cuda where there is one")
    add("--modelled", type=float, nargs=2, metavar=("FORWARD_MS", "BACKWARD_MS"), help="run nothing: these times")
    add("--no-tables", action="store_true", help="leave out what an addition and a copy cost here")
    add("--most-bytes", type=_whole(host.SIZES[0], 1 << 40), help="the largest size of a table")
    add("--directory", help="where the files go; default: profile-MODEL. It must be new or empty")
    return parser


def _whole(low: int, high: int) -> Any:
    def parse(text: str) -> int:
        value = int(text) if text.isdecimal() else -1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from {low} to {high}")
        return value

    return parse


def _run_model(args: argparse.Namespace) -> tuple[tr.Trace, str]:
    from netbottleneck.bench.models import passes

    if args.modelled:
        return passes.modelled(args.model, *args.modelled), MODELLED
    device = passes.pick_device(args.device)

    def tell(done: int, of: int) -> None:
        _progress(f"{args.model} on {device}: pass {done} of {of}")

    return passes.measured(args.model, batch=args.batch, passes=args.passes, device=device, tell=tell), MEASURED


def _progress(text: str) -> None:
    """Show how far it is, on a terminal alone."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")


def _tables(folder: Path, most_bytes: int | None) -> Mapping[str, Any]:
    found = host.tables(most_bytes, lambda kind, size: _progress(f"{kind}, {size} bytes"))
    _progress("")
    for timed in found:
        layerlog.write_table(folder / f"{timed.name}.csv", timed.table)
    return {timed.name: [asdict(row) for row in timed.rows] for timed in found}


def main(argv: Sequence[str]) -> int:
    """Run the command line. Bad input is told in one line, exit code 2, and nothing is written."""
    args = _arguments().parse_args(argv)
    folder = Path(args.directory or f"profile-{args.model or 'host'}")
    told: dict[str, Any] = {"version": VERSION, "host": host.facts()}
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} is there already: name an empty folder by --directory")
        if args.model is None and args.no_tables:
            raise ValueError("nothing to do: no model, and no tables")
        made = _run_model(args) if args.model else None
    except ValueError as error:
        sys.stderr.write(f"netbottleneck profile: {error}\n")
        return USAGE
    folder.mkdir(parents=True, exist_ok=True)
    if made is not None:
        found = write(folder, *made)
        told["profile"] = _described(made[0], found, made[1])
        sys.stdout.write(_words(args.model, found, made[1]))
    if not args.no_tables:
        told["tables"] = _tables(folder, args.most_bytes)
        sys.stdout.write(_table_words(told["tables"]))
    (folder / "profile.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"Written: {folder}\n")
    return FINE


def _words(model: str, found: Profile, how: str) -> str:
    step, back = found.step, found.backward
    moved = nbytes(sum(tensor.bytes for tensor in found.tensors))
    return (
        f"{model}: {len(found.tensors)} gradients, {moved}; step {ms(step.median_s * 1e9)}, p10-p90 "
        f"{ms(step.p10_s * 1e9)}-{ms(step.p90_s * 1e9)}; backward {ms(back.median_s * 1e9)} ({how}, "
        f"{step.count} {'pass' if step.count == 1 else 'passes'}, one rank)\n"
    )


def _table_words(tables: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    last = {name: rows[-1] for name, rows in tables.items()}
    words = (f"{name} {row['bytes'] / row['seconds'] / 1e9:.2f} GB/s" for name, row in last.items())
    largest = nbytes(next(iter(last.values()))["bytes"])
    return f"At {largest} (measured, one core): {', '.join(words)}\n"
