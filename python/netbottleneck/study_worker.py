"""One rank of a study's job: `python -m netbottleneck.study_worker TASK`. Rank 0 tells by lines of JSON on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from netbottleneck.study_task import Task


def say(**what: Any) -> None:
    """Tell whoever started this rank."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the task that the only argument is."""
    (text,) = sys.argv[1:] if argv is None else argv
    from netbottleneck import study_jobs

    def tell(step: int, steps: int, arm: str) -> None:
        say(step=step, steps=steps, arm=arm)

    say(outcome=study_jobs.run(Task.from_json(text), tell).as_dict())
    return 0


if __name__ == "__main__":
    sys.exit(main())
