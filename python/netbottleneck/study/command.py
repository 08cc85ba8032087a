"""`netbottleneck study`: run a study from a file, from the folder of an earlier study, or from options."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from netbottleneck import config
from netbottleneck.lab import parse_lab
from netbottleneck.launch import connect
from netbottleneck.study import cells, report, spec
from netbottleneck.study.cells import FAILED, OWN_NETWORK, STUDY, USAGE, BusyError, parse_request
from netbottleneck.trace.transports import STUDIED

HOOKED = ("NETBOTTLENECK", "NETBOTTLENECK_TRANSPORT")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 fine, 1 failure, 2 usage, 4 inconclusive (with --strict)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = parser().parse_args(arguments)
        detected = connect.detect(config.settings())
        request, lacking = None, ""
        if detected.rank == 0 or cells.names_study(args):  # a study that is resumed may be on rank 0's host alone
            request = parse_request(args, arguments, detected)
            report.check_replay_files(request.spec)
            lacking = cells.missing_packages(request.spec)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"netbottleneck study: {error}\n")
        return USAGE
    except SystemExit as end:
        return int(end.code or 0)
    if lacking:
        sys.stderr.write(f"netbottleneck study: {lacking}\n")
        return FAILED
    if detected.size > 1:
        _without_hooks(arguments)
        from netbottleneck.study import hosts

        return _until_signalled(lambda: hosts.run(request))
    from netbottleneck.study import runner

    assert request is not None
    return _until_signalled(lambda: runner.run_simulated(request))


def _without_hooks(arguments: Sequence[str]) -> None:
    """Re-exec without the variables that install hooks in this process: hooks would measure the study's own models."""
    if any(os.environ.get(name) for name in HOOKED):
        environment = {name: value for name, value in os.environ.items() if name not in HOOKED}
        os.execve(sys.executable, [sys.executable, "-m", "netbottleneck", "study", *arguments], environment)


def _until_signalled(run: Callable[[], int]) -> int:
    # SIGINT too: a libfabric provider may have replaced Python's handler during the probe.
    before = {number: signal.signal(number, _terminated) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return run()
    except BusyError as error:
        sys.stderr.write(f"netbottleneck study: {error}\n")
        return FAILED
    except KeyboardInterrupt as signalled:
        return 128 + (signalled.args[0] if signalled.args else signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminated(signum: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt(signum)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = argparse.ArgumentParser(prog="netbottleneck study", description=__doc__, epilog=OWN_NETWORK)
    add = options.add_argument
    add(
        "file",
        nargs="?",
        metavar="FILE",
        help="study file (docs/how-to/study.md); default: two ranks, three networks",
    )
    add("--directory", help=f"output folder; a folder with a study ({STUDY}) is resumed")
    add("--quick", action="store_true", help="every claim with few steps and small gradients; takes some minutes")
    add("--ranks", type=_each(_count), metavar="N[,N]", help="numbers of ranks, each rank on its own simulated host")
    add(
        "--networks",
        type=_each(_network),
        metavar="LINK[/FLOW]",
        help="links, comma-separated, such as 2gbit/500mbit,none",
    )
    add("--transports", type=_listed(STUDIED), help="arms that take turns; default: stock,ofi")
    add("--jobs", type=_listed(spec.JOBS), help=f"jobs to run, from {','.join(spec.JOBS)}")
    add("--model", help="model whose gradients are replayed; without a replay by name: the one of the job inflation")
    add("--compute", choices=("sleep", "spin"), help="how the replayed model computes")
    add("--compute-ms", type=float, nargs=2, metavar=("FORWARD", "BACKWARD"))
    add("--block-steps", type=_count, help="steps per block")
    add("--rounds", type=_count, help="blocks per arm")
    add("--provider", help="libfabric provider; default: the best available")
    add("--strict", action="store_true", help="exit with code 4 if a verdict is INCONCLUSIVE")
    return options


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
            raise argparse.ArgumentTypeError(f"{text!r}: must be a list of names from {', '.join(allowed)}, each once")
        return names

    return parse
