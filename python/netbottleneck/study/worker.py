"""One rank of a study: `python -m netbottleneck.study.worker TASKS`. Rank 0 tells by lines of JSON on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from netbottleneck.study.task import AS_BEFORE, from_json


def say(**what: Any) -> None:
    """Tell whoever started this rank."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tasks that the only argument lists, one after another."""
    (text,) = sys.argv[1:] if argv is None else argv
    from netbottleneck.study import jobs

    steps = 0
    for number, task in enumerate(from_json(text)):

        def tell(step: int, of: int, arm: str, number: int = number) -> None:
            say(task=number, step=step, steps=of, arm=arm)

        outcome = jobs.run(replace(task, exact_steps=steps) if task.exact_steps == AS_BEFORE else task, tell)
        steps = outcome.steps
        say(outcome=outcome.as_dict())
    return 0


if __name__ == "__main__":
    sys.exit(main())
