"""The command line of a study: what is asked, by a file, a folder that holds a study, or words; and where it runs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from netbottleneck import config
from netbottleneck.config import TRANSPORTS
from netbottleneck.lab import parse_lab
from netbottleneck.launch import connect
from netbottleneck.study import needs, tables, work
from netbottleneck.study.asked import FAILED, OWN, USAGE, ask
from netbottleneck.study.cells import STUDY

HOOKED = ("NETBOTTLENECK", "NETBOTTLENECK_TRANSPORT")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 fine, 1 failure, 2 usage, 4 inconclusive (with --strict)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = parser().parse_args(words)
        place = connect.detect(config.settings())
        asked = ask(args, words, place.size)
        work.readable(asked.spec)
        lacking = needs.missing(asked.spec)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"netbottleneck study: {error}\n")
        return USAGE
    except SystemExit as end:
        return int(end.code or 0)
    if lacking:
        sys.stderr.write(f"netbottleneck study: {lacking}\n")
        return FAILED
    if place.size > 1:
        _without_hooks(words)
        from netbottleneck.study import hosts

        return _until_signalled(lambda: hosts.run(asked))
    from netbottleneck.study import simulated

    return _until_signalled(lambda: simulated.run(asked))


def _without_hooks(words: Sequence[str]) -> None:
    """Begin again without the variables that put hooks into this process: they would measure the study's own models."""
    if any(os.environ.get(name) for name in HOOKED):
        kept = {name: value for name, value in os.environ.items() if name not in HOOKED}
        os.execve(sys.executable, [sys.executable, "-m", "netbottleneck.study", *words], kept)


def _until_signalled(run: Callable[[], int]) -> int:
    # Ctrl-C as well: a provider of libfabric that was looked for may have put a handler of its own in Python's place.
    before = {number: signal.signal(number, _terminated) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return run()
    except KeyboardInterrupt as signalled:
        return 128 + (signalled.args[0] if signalled.args else signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminated(signum: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt(signum)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="netbottleneck study", description=__doc__, epilog=OWN)
    add = made.add_argument
    add("file", nargs="?", metavar="FILE", help="what to study, see docs/study.md; default: two ranks, three networks")
    add("--directory", help=f"where all goes; one that holds a study ({STUDY}): it goes on where it was")
    add("--quick", action="store_true", help="all steps of the chain with few steps and small gradients: some minutes")
    add("--ranks", type=_each(_count), metavar="N[,N]", help="ranks, each on a simulated host of its own")
    add("--networks", type=_each(_network), metavar="LINK[/FLOW]", help="comma-separated: 2gbit/500mbit,none")
    add("--transports", type=_listed(TRANSPORTS), help="arms that take turns; default: stock,ofi")
    add("--jobs", type=_listed(tables.JOBS), help=f"some of {','.join(tables.JOBS)}")
    add("--model", help="the model whose gradients are replayed")
    add("--compute", choices=("sleep", "spin"), help="how the replayed model computes")
    add("--compute-ms", type=float, nargs=2, metavar=("FORWARD", "BACKWARD"))
    add("--block-steps", type=_count, help="steps of a block")
    add("--rounds", type=_count, help="how often each arm has its turn")
    add("--provider", help="libfabric provider; default: the best there is")
    add("--strict", action="store_true", help="exit code 4 where a verdict is INCONCLUSIVE")
    return made


def _each(one: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [one(part.strip()) for part in text.split(",")]


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number above 0")
    return int(text)


def _network(text: str) -> str:
    try:
        return str(parse_lab(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _listed(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if len(set(names)) != len(names) or not set(names) <= set(allowed):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of {', '.join(allowed)}")
        return names

    return parse
