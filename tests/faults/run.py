"""Runs the faults matrix: faults × networks × numbers of ranks, prints a line for each cell and the table.

A cell passes if no rank hangs, every result is right bit for bit, the outcome is the row's, its time is within the
row's bound, and nothing is left behind: no process, socket, mapping, thread, or file in /tmp or /dev/shm.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), *(str(HERE.parents[1] / name) for name in ("python", "tools"))]

from matrix.cell import Cell, Outcome  # noqa: E402 - found by the path above
from matrix.place import NETWORKS, Machine  # noqa: E402
from matrix.rows import ROWS  # noqa: E402
from matrix.table import judged, line, page, table, totals  # noqa: E402

FOLDER = HERE.parents[1] / "build" / "faults"
SIZES = (2, 4)
BUDGET_S = 460.0


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    listed = {"type": lambda text: [part for part in text.split(",") if part], "metavar": "NAME,…"}
    parser.add_argument("--only", default=[], help="these rows", **listed)
    parser.add_argument("--networks", default=list(NETWORKS), help=f"of {', '.join(NETWORKS)}", **listed)
    parser.add_argument("--ranks", type=int, action="append", choices=SIZES, help="default: 2 and 4")
    parser.add_argument("--untimed", action="store_true", help="judge no times")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, metavar="S", help="time for all cells; those not run by then fail"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table, as Markdown")
    chosen = parser.parse_args()
    known = {row.name: row for row in ROWS}
    if unknown := sorted(set(chosen.only) - set(known)):
        parser.error(f"--only {','.join(unknown)}: must be of {', '.join(known)}")
    if not chosen.networks:
        parser.error(f"--networks: name at least one of {', '.join(NETWORKS)}")
    if unknown := sorted(set(chosen.networks) - set(NETWORKS)):
        parser.error(f"--networks {','.join(unknown)}: must be of {', '.join(NETWORKS)}")
    chosen.rows = [row for row in ROWS if not chosen.only or row.name in chosen.only]
    chosen.ranks = chosen.ranks or list(SIZES)
    return chosen


def main() -> int:
    """Run the cells. Returns 1 where one failed, or none passed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # processes and namespaces are closed on the way out
    chosen = options()
    until = time.monotonic() + chosen.budget
    outcomes: list[Outcome] = []
    with Machine(FOLDER / str(os.getpid())) as machine:
        if not machine.own_files:
            print(f"files in /tmp and /dev/shm are not looked at: {machine.private}")
        for row in chosen.rows:
            for network in chosen.networks:
                for size in chosen.ranks:
                    if time.monotonic() > until:
                        outcomes.append(
                            Outcome(row.name, network, size, "failed", f"not run after {chosen.budget:g} s")
                        )
                    else:
                        outcomes.append(judged(Cell(machine, row, network, size, timed=not chosen.untimed).outcome()))
                    print(line(outcomes[-1]), flush=True)
    print(table(outcomes))
    if chosen.write:
        chosen.write.write_text(page(chosen.rows, outcomes), encoding="utf-8")
    print(totals(outcomes))
    verdicts = {outcome.verdict for outcome in outcomes}
    return 1 if "failed" in verdicts or "passed" not in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
