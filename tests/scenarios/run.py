"""Runs the scenarios: `run.py [--seed N] [--only TEXT]`. A line for each; the last line counts them.

Each scenario and its twin run with the same seed. A saving is compared with the difference of their steps.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from scenario.cases import CASES, LIVE
from scenario.judge import Result, judge, run
from scenario.live import measure


def _drawn(makers: Sequence[Any], args: argparse.Namespace) -> list[Any]:
    """The scenarios of these makers, drawn by the seed, whose names contain the text."""
    made = [make(random.Random(f"{args.seed}/{make.__name__}")) for make in makers]
    return [case for case in made if args.only in case.name]


def _shown(result: Result) -> Result:
    """Print a result."""
    mark = "FAILED" if result.wrong else "passed"
    expected = "/".join(result.case.expected)
    saved = "" if result.error is None else f"; saving {result.error:+.0%} of the twin's"
    print(f"{mark}  {result.case.name}: expected {expected}, got {result.got.verdict.code}{saved}")
    print(f"        {result.got.verdict.why}")
    for difference in result.wrong:
        print(f"        ! {difference}", flush=True)
    return result


def confusion(results: Sequence[Result]) -> list[str]:
    """Lines of the confusion matrix: the code of each scenario's cause, and how often which verdict came out."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        code = result.got.verdict.code
        found[code if code in result.case.expected else result.case.expected[0]][code] += 1
    return [
        f"{code}: {', '.join(f'{n} x {got}' for got, n in row.most_common())}" for code, row in sorted(found.items())
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all scenarios. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="draws rates, sizes, ranks and delays (1)")
    parser.add_argument("--live", action="store_true", help="also run the trainings in labs of network namespaces")
    parser.add_argument("--only", default="", help="run the scenarios whose names contain this text")
    args = parser.parse_args(argv)
    results = [_shown(run(case, args.seed, judge)) for case in _drawn(CASES, args)]
    if args.live:
        results += [_shown(run(case, args.seed, measure)) for case in _drawn(LIVE, args)]
    errors = sorted(abs(result.error) for result in results if result.error is not None)
    if errors:
        ninth = errors[int(0.9 * (len(errors) - 1))]
        print(f"savings against twins: median error {statistics.median(errors):.1%}, nine of ten within {ninth:.1%}")
    for line in confusion(results):
        print(line)
    failed = sum(bool(result.wrong) for result in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
