"""The checks of a script, run by name on every rank."""

from __future__ import annotations

import sys
from collections.abc import Callable

import netbottleneck.torch as hvd

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Let a function be named on the command line."""
    CHECKS[function.__name__] = function
    return function


def run_named() -> None:
    """Run the checks that the command line names, and say so of each that passed."""
    for name in sys.argv[1:]:
        CHECKS[name]()
        print("ok", name, flush=True)


def main() -> None:
    """Run them in a job of Horovod's API, which all ranks leave together."""
    hvd.init()
    run_named()
    hvd.barrier()
    hvd.shutdown()
