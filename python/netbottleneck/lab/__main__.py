"""python -m netbottleneck.lab LINK[+LINK…][/FLOW[,FLOW…]] HOSTS [-- COMMAND…]: run a command on each rank of a lab.

Without a command the lab only measures itself. With one, ranks get RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT and NETBOTTLENECK_HOST_ID. If a rank fails, the others are killed; the first failure gives the exit code."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent import futures
from typing import Any, NoReturn

from netbottleneck.lab.lab import Lab, LabError

MOST_RANKS_PER_HOST = 1024


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. 2: a bad argument, or no lab is possible."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    args, command = _arguments().parse_args(arguments[:split]), arguments[split + 1 :]
    signal.signal(signal.SIGTERM, _terminated)
    if sys.stdout is None:  # closed at the start
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open to the end
    try:
        return _run_lab(args, command)
    except (LabError, ValueError) as error:
        _message(f"lab: {error}")
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of stdout has closed it: nothing may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run_lab(args: argparse.Namespace, command: Sequence[str]) -> int:
    with Lab(args.hosts, args.lab, args.ranks_per_host, flow=args.flow) as lab:
        _message(f"lab: {lab.hosts} hosts, {lab.spec}, {lab.how}, flows capped by {lab.flow_cap}")
        if lab.why:
            _message(f"lab: {lab.why}")
        if args.verify or not command:
            sys.stdout.write(json.dumps(lab.verify(), indent=2) + "\n")
            sys.stdout.flush()
        return run(lab, command) if command else 0


def run(lab: Lab, command: Sequence[str]) -> int:
    """Run a command on every rank; returns the exit code of the first to fail, or 0. A signal gives 128 + number."""
    ranks = [lab.popen(rank, command) for rank in range(lab.size)]
    first = 0
    with futures.ThreadPoolExecutor(lab.size) as pool:
        waiting = {pool.submit(process.wait): rank for rank, process in enumerate(ranks)}
        try:
            for done in futures.as_completed(waiting):
                code = done.result()
                if code != 0 and first == 0:
                    first = code if code > 0 else 128 - code
                    _message(f"lab: rank {waiting[done]} exited with {code}; the other ranks are killed")
                    _end(ranks)
        except BaseException:
            _end(ranks)
            raise
    _message("lab: exit codes " + " ".join(str(process.returncode) for process in ranks))
    return first


def _end(ranks: Sequence[subprocess.Popen[Any]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.kill()


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def _message(text: str) -> None:
    sys.stderr.write(text + "\n")


def _ranks_per_host(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_RANKS_PER_HOST:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from 1 to {MOST_RANKS_PER_HOST}")
    return int(text)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m netbottleneck.lab",
        usage="%(prog)s [options] LINK[+LINK…][/FLOW[,FLOW…]] HOSTS [-- COMMAND…]",
        description="Run a command on each rank of simulated hosts. Without a command, measure the links.",
    )
    parser.add_argument("lab", metavar="LINK[/FLOW]", help='such as "2gbit/500mbit", "2gbit/400mbit,100mbit", "none"')
    parser.add_argument("hosts", type=int, help="number of simulated hosts")
    parser.add_argument("--ranks-per-host", type=_ranks_per_host, default=1, metavar="K")
    parser.add_argument("--flow", choices=["htb", "pacing"], default="htb", help="mechanism of a single cap per flow")
    parser.add_argument("--verify", action="store_true", help="measure the lab before the command")
    return parser


if __name__ == "__main__":
    sys.exit(main())
