"""The words of `netbottleneck what-if`, checked one by one."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

from netbottleneck.whatif.cost import ALGORITHMS

PAPER = "paper2020"
BAD_INPUT = 2
WORKERS_MAX = 10_000_000
PLANS = ("recorded", "ddp", "horovod", PAPER)


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


def _sweeps(made: argparse.ArgumentParser) -> None:
    many = made.add_argument_group("what is swept; without any of these, each in turn")
    many.add_argument("--workers", type=_some(1, WORKERS_MAX, True), metavar="LIST", help="such as 16,32,64")
    many.add_argument("--link-gbps", type=_some(1e-6, 1e6), metavar="LIST", help="Gbit/s (10^9), such as 1,10,25,100")
    many.add_argument("--compression", type=_some(1e-3, 1e9), metavar="LIST", help="ratios of bytes, such as 1,2,5,10")
    many.add_argument(
        "--ranks-per-host", type=_some(1, 1024, True), metavar="LIST", help="in two levels, such as 1,4,8"
    )
    many.add_argument(
        "--fusion-mib", type=_some(1e-3, 1e6), metavar="LIST", help="DDP's buckets, MiB, such as 5,25,100"
    )
    many.add_argument("--cycle-ms", type=_some(1e-3, 1e5), metavar="LIST", help="Horovod's cycle, such as 1,5,20")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own words."""
    made = _Parser(
        prog="netbottleneck what-if",
        description="What other links, more workers or compression would do to the job that was recorded. Every number "
        "is predicted, with its interval, or says that it was measured.",
    )
    made.add_argument("input", metavar="INPUT", help="a run folder, a trace (*.jsonl.gz), or a layer log (*.bk.log)")
    _sweeps(made)
    made.add_argument(
        "--target-scaling", type=_one(0.001, 0.9999), metavar="X", help="least link, ratio, streams for it"
    )
    made.add_argument("--json", metavar="FILE", help="write the rows here")
    known = made.add_argument_group("what the run does not tell, or tells otherwise")
    known.add_argument("--transport", metavar="NAME", help="whose operations are explained (stock, or the first)")
    known.add_argument("--this-link-gbps", type=_one(1e-6, 1e6), metavar="X", help="the link that the run had")
    known.add_argument("--plan", choices=PLANS, help="how gradients are fused (as recorded; of a layer log: horovod)")
    known.add_argument("--algorithm", choices=ALGORITHMS, help="of all-reduces (as recorded; else ring)")
    known.add_argument("--codec-gbytes", type=_one(1e-6, 1e6), metavar="X", help="GB/s of encoding, and of decoding")
    known.add_argument("--step-s", type=_one(1e-9, 1e9), metavar="X", help="seconds of a single device's step")
    known.add_argument("--add-table", metavar="FILE", help="bytes,seconds of a vector addition, a line each")
    known.add_argument(
        "--copy-table", metavar="FILE", help="bytes,seconds of a copy, where tensors that are fused are copied"
    )
    older = made.add_argument_group("as the simulator of the 2020 paper answers")
    older.add_argument("--compat", choices=[PAPER], help="exactly its formulas, whatever they leave out")
    older.add_argument(
        "--slowdown", type=_one(1e-3, 1e9), metavar="X", help="how it stretches time (10): it skips short waits"
    )
    return made
