"""Cost of the what-if engine: CPU time of the 2020 paper's complete sweep, and of a step of many workers.

python benchmarks/whatif.py [FOLDER] [--rounds 21]

FOLDER holds the paper's inputs (*.bk.log and cuda_vec_add.log); without it, three synthetic models with as many tensors
are used. The sweep is that of `--compat paper2020`: three models, 6 compression ratios, 3 numbers of workers, 5 links,
270 rows. The second measurement has as many tensors and bytes as BERT-Large, on 100 000 workers: one row of 15 steps.
Prints the minimum and the median over the rounds, in one process, without reading files.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from netbottleneck.trace import layer_log
from netbottleneck.trace.layer_log import LayerLog, VecTable
from netbottleneck.whatif import compat2020, questions, sweeps
from netbottleneck.whatif.cost import Cost
from netbottleneck.whatif.plan import Plan
from netbottleneck.whatif.sweeps import Codec

GRID = compat2020.Grid((16, 32, 64), (1e11, 4e10, 2.5e10, 1e10, 1e9), (1.0, 2.0, 5.0, 10.0, 50.0, 100.0))
STEP_S = 0.15
# Tensors, bytes of each, seconds between them.
BERT_LARGE = (398, 3_379_157, 0.0005)
WORKERS = 100_000
MADE_UP = ((161, 635_000, 0.0004), (314, 567_500, 0.00034), (58, 9_540_000, 0.0019))


def inputs(folder: Path | None) -> tuple[list[LayerLog], VecTable]:
    """Return the logs and the table of additions."""
    if folder is not None:
        return [layer_log.read(path) for path in sorted(folder.glob("*.bk.log"))], layer_log.read_table(
            folder / "cuda_vec_add.log"
        )
    logs = [LayerLog(f"{count} tensors", ((wait_s, size),) * count) for count, size, wait_s in MADE_UP]
    sizes = tuple(40 << k for k in range(25))
    return logs, VecTable(sizes, tuple(1e-5 + size / 275e9 for size in sizes))


def measure(what: str, work: Callable[[], int], rounds: int) -> None:
    """Print the CPU time of `work`, which returns its number of rows."""
    spent = []
    rows = 0
    for _ in range(rounds):
        begin = time.process_time()
        rows = work()
        spent.append(1e3 * (time.process_time() - begin))
    middle = statistics.median(spent)
    print(f"{what}, {rows} rows: {min(spent):.1f} ms of CPU time at least, {middle:.1f} ms in the median")


def main() -> int:
    """Print both measurements."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    made.add_argument("folder", nargs="?", type=Path)
    made.add_argument("--rounds", type=int, default=21)
    args = made.parse_args()
    logs, table = inputs(args.folder)
    measure(
        "2020 paper's sweep", lambda: sum(len(compat2020.sweep(log, table, STEP_S, GRID)) for log in logs), args.rounds
    )
    count, size, wait_s = BERT_LARGE
    log = LayerLog("BERT-Large", ((wait_s, size),) * count, 2 * count * wait_s)
    job = questions.job(layer_log.to_trace(log), plan=Plan.ddp(), cost=Cost(alpha_ns=20_000))
    measure(
        f"{WORKERS} workers", lambda: len(sweeps.answers(job, sweeps.grid(job, [WORKERS], [1e11], [1.0], Codec()))), 5
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
