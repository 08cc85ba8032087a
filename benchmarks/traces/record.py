"""Records the stored trace: ResNet-50's gradients over bare DDP, stock and ofi, on two ranks with caps per flow.

python benchmarks/traces/record.py [FILE [RUN]]

RUN: a finished run folder, which is stored instead; its name becomes that of the file.
Compute is timed (133 ms forward, 267 ms backward, spread over the layers); transfers and timestamps are
real. Names of machines, folders and processes are removed before the file is written.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from netbottleneck.lab import Lab
from netbottleneck.report import Run
from netbottleneck.study.ranks import run_in_lab
from netbottleneck.study.task import Task
from netbottleneck.trace import model as tr

LAB = "2gbit/500mbit"
NAME = "resnet50-2gbit-500mbit"
ARMS = ("bare", "stock", "ofi")
STEPS, ROUNDS, ALONE = 4, 6, 6


def record(folder: Path) -> tr.Trace:
    """Run the job in a lab with the run folder `folder`; return the trace."""
    with Lab(2, LAB) as lab:
        network = {
            "how": lab.how,
            "link_bps": lab.spec.link_bps,
            "flow_bps": list(lab.spec.flow_bps),
            "verified": lab.verify(),
        }
        task = Task("replay", ARMS, str(folder), block_steps=STEPS, rounds=ROUNDS, alone=ALONE, network=network)
        run_in_lab(lab, [task], lambda _task, step, steps, arm: print(f"step {step} of {steps}, {arm}"))
    return Run(folder).trace


def scrub(found: tr.Trace, name: str) -> tr.Trace:
    """Return the trace with this name, without the names of hosts, folders and processes."""
    ranks = tuple(
        replace(rank, hostname=f"host{rank.rank}", host_id=f"host{rank.rank}", pid=0, error=None)
        for rank in found.ranks
    )
    return replace(found, id=name, command=("record.py",), ranks=ranks)


def main() -> None:
    """Record, and write the file."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name(f"{NAME}.jsonl.gz")
    with tempfile.TemporaryDirectory() as folder:
        found = Run(sys.argv[2]).trace if len(sys.argv) > 2 else record(Path(folder) / NAME)
        tr.write(scrub(found, path.name.partition(".")[0]), path)
    Run(path).show()


if __name__ == "__main__":
    main()
