"""One rank of a study: `python -m netbottleneck.study.worker TASKS`. Rank 0 tells by lines of JSON on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from netbottleneck.study.task import AS_BEFORE, INFLATION, PLAY, Outcome, Task, from_json


def say(**what: Any) -> None:
    """Tell whoever started this rank."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def run(task: Task, tell: Callable[[int, int, str], None]) -> Outcome:
    """Run one task on this rank. What is only played needs no torch."""
    if task.job == PLAY:
        from netbottleneck.study import playing

        return playing.run(task, tell)
    if task.job == INFLATION:
        from netbottleneck.study import inflation

        return inflation.run(task, tell)
    from netbottleneck.study import jobs

    return jobs.run(task, tell)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tasks that the only argument lists, one after another."""
    (text,) = sys.argv[1:] if argv is None else argv
    steps = 0
    for number, task in enumerate(from_json(text)):

        def tell(step: int, of: int, arm: str, number: int = number) -> None:
            say(task=number, step=step, steps=of, arm=arm)

        outcome = run(replace(task, exact_steps=steps) if task.exact_steps == AS_BEFORE else task, tell)
        steps = outcome.steps
        say(outcome=outcome.as_dict())
    return 0


if __name__ == "__main__":
    sys.exit(main())
