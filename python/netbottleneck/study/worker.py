"""One rank of a study: `python -m netbottleneck.study.worker TASKS`. Rank 0 reports on stdout, as lines of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from netbottleneck.study.task import INFLATION, PLAY, SAME_STEPS, Outcome, Task, from_json, play_schedule


def send_message(**what: Any) -> None:
    """Report a message to the parent process."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def run(task: Task, progress: Callable[[int, int, str], None]) -> Outcome:
    """Run one task on this rank. A task that only plays a schedule imports no torch."""
    if task.job == PLAY:
        return play_schedule(task, progress)
    if task.job == INFLATION:
        from netbottleneck.study import jobs

        return jobs.run_inflation(task, progress)
    from netbottleneck.study import jobs

    return jobs.run(task, progress)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tasks of the only argument, one after another."""
    (text,) = sys.argv[1:] if argv is None else argv
    steps = 0
    for number, task in enumerate(from_json(text)):

        def progress(step: int, of: int, arm: str, number: int = number) -> None:
            send_message(task=number, step=step, steps=of, arm=arm)

        outcome = run(replace(task, exact_steps=steps) if task.exact_steps == SAME_STEPS else task, progress)
        steps = outcome.steps
        send_message(outcome=outcome.as_dict())
    return 0


if __name__ == "__main__":
    sys.exit(main())
