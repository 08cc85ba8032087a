"""Runs the gates of the transports, against bars and peers, and a check of every type for wrong elements.

python benchmarks/transport.py --gates [--only T1,T3] [--rounds N] [--batches N] [--json FILE] [--plot FILE]
python benchmarks/transport.py --correct [--ranks N] [--largest SIZE]

--gates    one line for each of T1 to T10, and of N1 to N6 (NCCL) if --only names them: verdict, value, its 95 %
           interval (paired bootstrap over interleaved rounds), bar. "pass": the interval's lower end is at the bar or
           above; "fail": its upper end is below; "undecided": neither, after --batches times the rounds; "not run": a
           peer or the lab is missing. The worst of its figures decides a gate. Exit code 0 only if all ten pass; if
           only gates of NCCL are named, if these pass
--correct  checks all elements: every type, 1 to --ranks ranks, sizes from 0 bytes to --largest, odd ones too
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cases import Run
from gates import GATES
from judge import Figure, certain, worst
from nccl_gates import GATES as NCCL_GATES

from netbottleneck.bench import bench
from netbottleneck.bench.values import DTYPES
from netbottleneck.config import size as parse_size
from netbottleneck.errors import Error

PATHS = ("tcp", "ofi", "stock")


def gates(names: Sequence[str], run: Run) -> dict[str, list[Figure]]:
    """Measure gates one after another, and print each figure as soon as it is known."""
    found: dict[str, list[Figure]] = {}
    for name in names:
        began = time.monotonic()
        found[name] = []
        for figure in {**NCCL_GATES, **GATES}[name](run):
            found[name].append(figure)
            run.say(figure.line(f"{name:<4}"))
        run.say(f"# {name}: {time.monotonic() - began:.0f} s")
    return found


def summary(found: dict[str, list[Figure]]) -> Iterator[str]:
    """Yield one line for each of the ten gates, and for each other that was measured."""
    for name in dict.fromkeys((*GATES, *found)):
        figures = found.get(name)
        if not figures:
            yield f"{name:<4}{'not run:':<10}not requested"
            continue
        passed = sum(figure.verdict == "pass" for figure in figures)
        yield f"{worst(figures).line(f'{name:<4}')} ({passed} of {len(figures)} figures pass)"


def document(found: dict[str, list[Figure]], run: Run) -> dict[str, Any]:
    """Return the content of the JSON file."""
    named = {name: [figure.to_json() for figure in figures] for name, figures in found.items()}
    return {"version": 1, "written_wall_ns": time.time_ns(), **run.heads, "gates": named, "rows": run.rows}


def judged(args: argparse.Namespace) -> int:
    """Run --gates."""
    run = Run(say, args.rounds, args.batches)
    found: dict[str, list[Figure]] = {}
    try:
        for name in args.only:
            found |= gates([name], run)
    finally:  # keep the results of an interrupted run
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(document(found, run), indent=1) + "\n", encoding="utf-8")
        say("\n" + "\n".join(summary(found)))
    if args.plot:
        from picture import draw

        draw(document(found, run), args.plot)
    needed = args.only if set(args.only) <= set(NCCL_GATES) else (*GATES, *args.only)
    return 0 if all(found.get(name) and worst(found[name]).verdict == "pass" for name in needed) else 1


def correct(args: argparse.Namespace) -> int:
    """Run --correct: the value is 1 if no element was wrong."""
    code = 0
    for name in PATHS:
        figure = _right(name, args.ranks, args.largest)
        say(figure.line())
        code |= figure.verdict != "pass"
    return code


def _right(name: str, most: int, largest: int) -> Figure:
    wrong, checked, reason, began = 0, 0, "", time.monotonic()
    for ranks, dtype in ((ranks, dtype) for ranks in range(1, most + 1) for dtype in DTYPES):
        item = DTYPES[dtype].itemsize
        sizes = [0, item, 3 * item, 1021 * item, (1 << 18) + item, 3_000_001 * item]
        sizes = sorted({n for n in sizes if n <= largest} | ({largest} if dtype == "float32" else set()))
        try:
            found = bench(ranks, None, name, "auto" if ranks == 2 else "3", sizes, dtype=dtype, iterations=1)
        except Error as error:
            reason = f"{dtype}, {ranks} ranks: {error.strerror or error}"
            break
        wrong += found.wrong
        checked += sum(row["count"] * row["ranks"] for row in found.rows)
        say(f"# {name} {dtype} {ranks} ranks: {len(sizes)} sizes, {found.wrong} wrong")
    absent = "cannot be used" in reason or "can be used here" in reason
    note = f"{wrong} of {checked} elements wrong, to {largest} bytes, {time.monotonic() - began:.0f} s"
    return Figure(
        f"{name}: every type, 1 to {most} ranks, every size right",
        1.0,
        certain(float(wrong == 0 and not reason)),
        note=note,
        reason=reason if absent else "",
        broken="" if absent else reason,
        event=True,
    )


def say(text: str) -> None:
    """Print a line now."""
    print(text, flush=True)


def _names(text: str) -> list[str]:
    names = text.upper().split(",")
    known = (*GATES, *NCCL_GATES)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"no gate {', '.join(unknown)}: {', '.join(known)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--gates", action="store_true")
    what.add_argument("--correct", action="store_true")
    parser.add_argument("--only", type=_names, metavar="LIST", default=list(GATES), help="gates, such as T1,T3")
    parser.add_argument("--rounds", type=int, default=0, metavar="N", help="rounds of each batch (by gate: 6 to 40)")
    parser.add_argument("--batches", type=int, default=4, metavar="N", help="most batches of rounds (4)")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write every figure, and the rows that it is computed from, to this file",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures against their bars (matplotlib)")
    parser.add_argument("--ranks", type=int, default=8, help="largest number of ranks of --correct")
    parser.add_argument("--largest", type=parse_size, default=256 * 10**6, help="largest size of --correct (256M)")
    args = parser.parse_args()
    return judged(args) if args.gates else correct(args)


if __name__ == "__main__":
    sys.exit(main())
