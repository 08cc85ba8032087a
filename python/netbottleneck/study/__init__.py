"""`netbottleneck study`: the chain of evidence, cell by cell, on networks made here or between a launcher's ranks."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    from netbottleneck.study import command  # not at once: ranks need little of it

    return command.main(argv)
