"""`netbottleneck what-if`: what is asked, of which input, and where the answer goes."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from netbottleneck.cli.what_if import questions
from netbottleneck.cli.what_if.source import Source, layer_log, load
from netbottleneck.cli.what_if.words import BAD_INPUT, PAPER, parser
from netbottleneck.report import answers, predicted
from netbottleneck.trace import layer_log as layerlog
from netbottleneck.whatif import compat2020

FINE = 0
# What the paper's own three programs ask.
WORKERS, LINKS_GBPS = (16, 32, 64), (1.0, 10.0, 25.0, 40.0, 100.0)
RATIOS = (1.0, 2.0, 5.0, 10.0, 50.0, 100.0)
# Words that the 2020 simulator knows nothing of.
NOT_IN_COMPAT = (
    "target_scaling",
    "ranks_per_host",
    "fusion_mib",
    "cycle_ms",
    "plan",
    "algorithm",
    "codec_gbytes",
    "copy_table",
)


def _compat(args: argparse.Namespace, source: Source) -> tuple[compat2020.Prediction, ...]:
    if args.add_table is None:
        raise ValueError(f"--compat {PAPER} needs --add-table FILE: bytes,seconds of a vector addition, a line each")
    for name in NOT_IN_COMPAT:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} does not go with --compat: that simulator has no such thing")
    table = layerlog.read_table(args.add_table)
    log = layer_log(source, args.step_s)
    grid = compat2020.Grid(
        tuple(int(count) for count in args.workers or WORKERS),
        tuple(gbps * 1e9 for gbps in args.link_gbps or LINKS_GBPS),
        args.compression or RATIOS,
        args.slowdown or compat2020.SLOWDOWN,
    )
    return compat2020.sweep(log, table, log.batch_s or 0.0, grid)


def _check_target(target: str, inputs: Sequence[str]) -> Path:
    """Return where the rows go. Raises ValueError where that cannot be, before anything is worked out."""
    path = Path(target)
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--json {target}: must be a file in a folder that exists")
    for used in inputs:
        if path.exists() and Path(used).exists() and path.samefile(used):
            raise ValueError(f"--json {target}: is an input of this very question; name another file")
    return path


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write all rows; the file is there whole, or as it was before."""
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
        target = _check_target(
            args.json, [args.input, *(table for table in (args.add_table, args.copy_table) if table)]
        )
    source = load(Path(args.input))
    if args.compat is not None:
        cells = _compat(args, source)
        if target is not None:
            _write(target, [asdict(cell) for cell in cells])
        predicted.show(cells, "the 2020 paper's simulator")
        return
    if args.slowdown is not None:
        raise ValueError(f"--slowdown {args.slowdown:g} goes with --compat {PAPER} only: nothing is stretched here")
    told = questions.ask(args, source)
    if target is not None:
        _write(target, questions.rows(told))
    answers.show(told)


def main(argv: Sequence[str]) -> int:
    """Run the command; 2 where an input is not what it should be, and then nothing is written."""
    args = parser().parse_args(argv)
    try:
        _answer(args)
    except FileNotFoundError as error:
        said = f"no such file or folder: {error.filename}" if error.filename else str(error)
        sys.stderr.write(f"netbottleneck what-if: {said}\n")
    except IsADirectoryError as error:
        sys.stderr.write(f"netbottleneck what-if: a folder where a file should be: {error.filename}\n")
    except OSError as error:
        sys.stderr.write(f"netbottleneck what-if: {error.strerror or error}: {error.filename or args.input}\n")
    except ValueError as error:
        sys.stderr.write(f"netbottleneck what-if: {' '.join(str(error).split())}\n")
    else:
        return FINE
    return BAD_INPUT
