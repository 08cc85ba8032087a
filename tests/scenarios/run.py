"""Runs the scenarios: `run.py [--seed N] [--only WORDS]`. A line for each; the last line counts them.

Each scenario and its twin run with the same seed. A saving is compared with the difference of their steps.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence

from scenario.cases import CASES
from scenario.judge import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run all scenarios. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="draws rates, sizes, ranks and delays (1)")
    parser.add_argument("--only", default="", help="run the scenarios whose names contain these words")
    args = parser.parse_args(argv)
    made = [make(random.Random(f"{args.seed}/{make.__name__}")) for make in CASES]
    results = [run(case, args.seed) for case in made if args.only in case.name]
    for result in results:
        mark = "FAILED" if result.wrong else "passed"
        expected = "/".join(result.case.expected)
        saved = "" if result.error is None else f"; saving {result.error:+.0%} of the twin's"
        print(f"{mark}  {result.case.name}: expected {expected}, got {result.got.verdict.code}{saved}")
        print(f"        {result.got.verdict.why}")
        for words in result.wrong:
            print(f"        ! {words}")
    errors = sorted(abs(result.error) for result in results if result.error is not None)
    if errors:
        ninth = errors[int(0.9 * (len(errors) - 1))]
        print(f"savings against twins: median error {statistics.median(errors):.1%}, nine of ten within {ninth:.1%}")
    failed = sum(bool(result.wrong) for result in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
