"""`netbottleneck what-if`: what is asked, of which input, and where the answer goes."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from netbottleneck import compat, layerlog
from netbottleneck import trace as tr
from netbottleneck.findings import find
from netbottleneck.layerlog import LayerLog
from netbottleneck.report import Run, predicted
from netbottleneck.trace import Trace

PAPER = "paper2020"
WORKERS_MAX = 10_000_000
FINE, BAD_INPUT = 0, 2
# What the paper's own three programs ask.
PAPER_WORKERS, PAPER_LINKS, PAPER_RATIOS = (
    (16, 32, 64),
    (1.0, 10.0, 25.0, 40.0, 100.0),
    (1.0, 2.0, 5.0, 10.0, 50.0, 100.0),
)


class _Parser(argparse.ArgumentParser):
    """Tells a wrong word in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"netbottleneck what-if: {message}; netbottleneck what-if --help lists what there is\n")


def _number(word: str, low: float, high: float, whole: bool = False) -> float:
    try:
        value: float = int(word) if whole else float(word)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        kind = f"a whole number from {low:.0f} to {high:.0f}" if whole else f"a number from {low:g} to {high:g}"
        raise argparse.ArgumentTypeError(f"{word.strip()[:40]!r}: must be {kind}")
    return value


def _one(low: float, high: float) -> Callable[[str], float]:
    return lambda text: _number(text, low, high)


def _some(low: float, high: float, whole: bool = False) -> Callable[[str], tuple[float, ...]]:
    """A list, each value once."""
    return lambda text: tuple(dict.fromkeys(_number(word, low, high, whole) for word in text.split(",")))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own words."""
    made = _Parser(
        prog="netbottleneck what-if",
        description="What other links, more workers or compression would do to the job that was recorded.",
    )
    made.add_argument(
        "input", metavar="INPUT", help="a run folder, a single trace (*.jsonl.gz), or a layer log (*.bk.log)"
    )
    made.add_argument("--workers", type=_some(1, WORKERS_MAX, True), metavar="LIST", help="such as 16,32,64")
    made.add_argument(
        "--link-gbps", type=_some(1e-6, 1e6), metavar="LIST", help="Gbit/s (10^9), such as 1,10,25,40,100"
    )
    made.add_argument("--compression", type=_some(1e-3, 1e9), metavar="LIST", help="ratios of bytes, such as 1,2,5,10")
    made.add_argument("--step-s", type=_one(1e-9, 1e9), metavar="X", help="seconds of a single device's step")
    made.add_argument("--json", metavar="FILE", help="write the rows here")
    older = made.add_argument_group("as the simulator of the 2020 paper answers")
    older.add_argument("--compat", choices=[PAPER], help="exactly its formulas, whatever they leave out")
    older.add_argument("--add-table", metavar="FILE", help="bytes,seconds of a vector addition, a line each")
    older.add_argument(
        "--slowdown",
        type=_one(1e-3, 1e9),
        metavar="X",
        help="how it stretches time (10): it skips short waits",
    )
    return made


@dataclass(frozen=True, slots=True)
class Source:
    """What was recorded, in the form that it came in."""

    path: Path
    trace: Trace | None = None
    log: LayerLog | None = None


def load(path: Path) -> Source:
    """A run folder, a trace or a layer log. Raises OSError; ValueError naming file and line for what cannot be read."""
    if path.is_dir():
        return Source(path, trace=Run(path).trace)
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    if packed or path.name.endswith(".gz"):
        return Source(path, trace=tr.read(path))
    return Source(path, log=layerlog.read(path))


def _step_alone_s(trace: Trace) -> float | None:
    """A single device's step: measured alone, else what is left of a step without communication and waiting."""
    found = find(trace)
    known = found.scaling.get(found.base or "") or next(iter(found.scaling.values()), None)
    return None if known is None else known.t1_ns / 1e9


def _layer_log(source: Source, step_s: float | None) -> tuple[LayerLog, float]:
    if source.log is not None:
        log, known = source.log, source.log.batch_s
    else:
        assert source.trace is not None
        log, known = layerlog.of_trace(source.trace), _step_alone_s(source.trace)
    step = step_s or known
    if step is None:
        raise ValueError(f"{source.path} tells no step of a single device: give its seconds by --step-s")
    return log, step


def _compat(args: argparse.Namespace, source: Source) -> tuple[compat.Prediction, ...]:
    if args.add_table is None:
        raise ValueError(f"--compat {PAPER} needs --add-table FILE: bytes,seconds of a vector addition, a line each")
    table = layerlog.read_table(args.add_table)
    log, step_s = _layer_log(source, args.step_s)
    grid = compat.Grid(
        tuple(int(count) for count in args.workers or PAPER_WORKERS),
        tuple(gbps * 1e9 for gbps in args.link_gbps or PAPER_LINKS),
        args.compression or PAPER_RATIOS,
        args.slowdown or compat.SLOWDOWN,
    )
    return compat.sweep(log, table, step_s, grid)


def _check_target(target: str, inputs: Sequence[str]) -> Path:
    """Where the rows go. Raises ValueError where that cannot be, before anything is worked out."""
    path = Path(target)
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--json {target}: must be a file in a folder that exists")
    for used in inputs:
        if path.exists() and path.samefile(used):
            raise ValueError(f"--json {target}: is an input of this very question; name another file")
    return path


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """The file is there whole, or as it was before."""
    text = "[\n" + ",\n".join(json.dumps(row, allow_nan=False) for row in rows) + "\n]\n"
    handle, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _answer(args: argparse.Namespace) -> None:
    target = None
    if args.json is not None:
        target = _check_target(args.json, [args.input, *([args.add_table] if args.add_table else [])])
    if args.compat is None:
        raise ValueError(f"say which rules: --compat {PAPER}")
    rows = _compat(args, load(Path(args.input)))
    if target is not None:
        _write(target, [asdict(row) for row in rows])
    predicted.show(rows, "the 2020 paper's simulator")


def main(argv: Sequence[str]) -> int:
    """Run the command; 2 where an input is not what it should be, and then nothing is written."""
    args = parser().parse_args(argv)
    try:
        _answer(args)
    except FileNotFoundError as error:
        sys.stderr.write(f"netbottleneck what-if: no such file or folder: {error.filename or error}\n")
    except IsADirectoryError as error:
        sys.stderr.write(f"netbottleneck what-if: a folder where a file should be: {error.filename}\n")
    except ValueError as error:
        sys.stderr.write(f"netbottleneck what-if: {' '.join(str(error).split())}\n")
    else:
        return FINE
    return BAD_INPUT
