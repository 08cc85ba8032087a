"""Runs the named checks of a script on every rank."""

from __future__ import annotations

import sys
from collections.abc import Callable

import netbottleneck.torch as hvd

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Register a function under its name."""
    CHECKS[function.__name__] = function
    return function


def run_named() -> None:
    """Run the checks that the command line names, and print each that passed."""
    for name in sys.argv[1:]:
        CHECKS[name]()
        print("ok", name, flush=True)


def main() -> None:
    """Run the checks in a job of Horovod's API, which all ranks leave together."""
    hvd.init()
    run_named()
    hvd.barrier()
    hvd.shutdown()
