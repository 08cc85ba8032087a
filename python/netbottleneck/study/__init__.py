"""`netbottleneck study`: the chain of claims, cell by cell, on simulated networks or between a launcher's ranks."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    from netbottleneck.study import command  # late import: ranks need only a part of this package

    return command.main(argv)
