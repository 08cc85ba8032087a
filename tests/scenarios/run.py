"""Runs the scenarios: `run.py [--seeds A-B] [--live] [--known N] [--lengths N] [--only TEXT]`. The last line counts.

Each scenario and its twin run with the same seed. A saving is compared with the difference of their steps. `--known`
compares injected lengths of time with those that the report shows, of simulated jobs; `--lengths` of trainings in labs,
and alone without `--live` and `--known`. `--store` keeps the outcome.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from scenario import known, lengths, matrix
from scenario.cases import CASES
from scenario.judge import Result, judge, run
from scenario.live import measure
from scenario.trainings import LIVE


def _drawn(makers: Sequence[Any], seed: int, only: str) -> list[Any]:
    """The scenarios of these makers, drawn by the seed, whose names contain the text."""
    made = [make(random.Random(f"{seed}/{make.__name__}")) for make in makers]
    return [case for case in made if only in case.name]


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


def _lengths_alone(args: argparse.Namespace) -> bool:
    """True if only the lengths of trainings are asked for."""
    return args.lengths > 0 and not (args.live or args.known)


def _results(args: argparse.Namespace) -> Iterator[Result]:
    """Run the scenarios with each seed."""
    for seed in () if _lengths_alone(args) else args.seeds:
        if len(args.seeds) > 1:
            print(f"seed {seed}")
        for case in _drawn(CASES, seed, args.only) if args.live != "only" else ():
            yield _shown(run(case, seed, judge))
        for case in _drawn(LIVE, seed, args.only) if args.live else ():
            yield _shown(run(case, seed, measure))


def _known(args: argparse.Namespace) -> list[known.Answer]:
    """Run the known answers, and print a table of those of simulated jobs and one of those of trainings."""
    found = []
    for what, answers, count in (("jobs", known.answers, args.known), ("trainings", lengths.answers, args.lengths)):
        own = []
        for one in answers(count, args.seeds[0], args.only):
            own.append(one)
            if one.wrong:
                print(f"FAILED  {one.kind}: {one.truth_ms:.3f} ms injected, {one.shown_ms:.3f} ms shown: {one.job}")
        if own:
            print(f"known answers of {what}: an error of at most {known.ERROR_MAX:.0%} passes")
        for row in known.table(own):
            print(
                f"{row['kind']}: {row['runs']} runs of {row['least_part_percent']} % to {row['largest_part_percent']} "
                f"% of the step; error: median {row['median_error_percent']} %, nine of ten "
                f"{row['nine_of_ten_percent']} %, largest {row['largest_error_percent']} %; beyond: {row['beyond']}"
            )
        found += own
    return found


def _seeds(text: str) -> range:
    """The seeds of `A` or `A-B`."""
    first, _, last = text.partition("-")
    found = range(int(first), int(last or first) + 1)
    if not found:
        raise argparse.ArgumentTypeError(f"no seed in {text}")
    return found


def _savings(results: Sequence[Result]) -> dict[str, float | int]:
    """Errors of the savings against twins, in percent; empty without a saving."""
    errors = sorted(100 * abs(result.error) for result in results if result.error is not None)
    if not errors:
        return {}
    ninth = errors[math.ceil(0.9 * len(errors)) - 1]
    return {
        "runs": len(errors),
        "median_error_percent": round(statistics.median(errors), 1),
        "nine_of_ten_percent": round(ninth, 1),
        "largest_error_percent": round(errors[-1], 1),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds", "--seed", type=_seeds, default=range(1, 2), help="A or A-B: draw rates, sizes, ranks and delays (1)"
    )
    parser.add_argument("--known", type=int, default=0, metavar="N", help="also run N known answers of each kind (0)")
    parser.add_argument(
        "--lengths", type=int, default=0, metavar="N", help="run N trainings in labs of each length (0)"
    )
    parser.add_argument(
        "--live", nargs="?", const="also", choices=("also", "only"), help="also, or only, run trainings in labs"
    )
    parser.add_argument("--only", default="", help="run what has this text in its name")
    parser.add_argument("--store", action="store_true", help="write the outcome to benchmarks/results")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run all scenarios. Returns 1 if one failed, or none ran."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.lengths and len(args.seeds) > 1:
        parser.error("--lengths runs with one seed")
    live, alone = args.live == "only", _lengths_alone(args)
    mixed = args.only or args.live == "also" or (args.lengths > 0 and not alone)
    if args.store and (mixed or (live or alone) == bool(args.known)):
        parser.error("--store keeps a run of all simulated scenarios with --known, of the live ones, or of lengths")
    begin = time.monotonic()
    results = list(_results(args))
    answers = _known(args)
    savings = _savings(results)
    if savings:
        print(
            f"savings against twins: median error {savings['median_error_percent']} %, "
            f"nine of ten within {savings['nine_of_ten_percent']} %"
        )
    found = matrix.rows(results)
    for line in matrix.lines(found):
        print(line)
    failed = sum(bool(result.wrong) for result in results) + sum(one.wrong for one in answers)
    passed = len(results) + len(answers) - failed
    if args.store:
        outcome = {
            "seeds": f"{args.seeds[0]} to {args.seeds[-1]}",
            "passed": passed,
            "failed": failed,
            **({} if args.lengths else {"matrix": found, "savings": savings}),
            **({} if live else {"known": known.table(answers)}),
        }
        command = "tests/scenarios/run.py " + " ".join(sys.argv[1:] if argv is None else argv)
        what = matrix.LENGTHS if args.lengths else matrix.LIVE if live else matrix.SIMULATED
        print(f"stored in {matrix.store(outcome, command, time.monotonic() - begin, what)}")
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0 or passed == 0)


if __name__ == "__main__":
    sys.exit(main())
