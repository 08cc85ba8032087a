"""A study on the ranks of a launcher: no links are made, the network is the one that joins the hosts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from netbottleneck import job
from netbottleneck.env import settings
from netbottleneck.lab import LinkSpec
from netbottleneck.report import Run
from netbottleneck.study import jobs, report
from netbottleneck.study.report import Found, Study
from netbottleneck.study.task import Task
from netbottleneck.study.tell import Teller

HERE = "here"


def main(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run the jobs on this rank, as all others do. Returns the exit code, on rank 0 that of the whole."""
    from netbottleneck import study

    started = job.start(settings())
    first = started.place.rank == 0
    teller = Teller()
    found = Study(Path(args.directory).absolute(), time.time_ns(), ["netbottleneck", "study", *words])
    if first:
        teller.say(
            f"The network is the one between the {started.place.size} ranks of this launcher: none is made here."
        )
    for name in args.jobs:
        task = study.make_task(name, args, LinkSpec(), found.folder / HERE, None)
        with teller.working(f"{name}, {HERE}") if first else nullcontext(_silent) as follow:
            outcome = jobs.run(task, partial(follow, task))
        if first:
            run = Run(outcome.folder)
            run.write_all()
            found.found.append(Found(HERE, name, run, outcome))
            found.write()
    if not first:
        return study.FINE
    report.show(found, teller.console)
    teller.say(f"Written: {found.write()}, and a report in each run's folder beside it.")
    return study.verdict_code(found, args.strict)


def _silent(_task: Task, _step: int, _steps: int, _arm: str) -> None:
    """Rank 0 tells."""
