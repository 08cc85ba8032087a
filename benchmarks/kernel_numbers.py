"""Speed of the reduction kernels, each compared with a memcpy of as many bytes as it writes.

python benchmarks/kernel_numbers.py [--bytes 256Ki] [--rounds 31] [--bar 0.8] [--json FILE]

One row for each dtype and operation, two columns for each set of kernels that this CPU supports: GB of destination a
second (median of the rounds), and the ratio to a memcpy measured directly after it (median, first and third quartile).
`pair` writes the sum to both places, and counts the GB of one; the generic set's `pair` consists of the best set's
other kernels. `<` marks a ratio of the best set below the bar; the exit code is then 1. Both buffers are in the cache
if twice --bytes fit into it. Builds its own program, with the flags of the extension, and pins it to one core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import cbuild  # noqa: E402
from netbottleneck.config import size  # noqa: E402

BUILD = ROOT / "build" / "kernels"
LIMIT_S = 600
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Speed:
    """One kernel: GB/s, and the quartiles of its ratio to memcpy."""

    gbyte_s: float
    ratio: tuple[float, float, float]
    rounds: int


def program() -> Path:
    """Compile benchmarks/kernels.c with the extension's kernels; return the binary."""
    sources = [*sorted((cbuild.CSRC / "coll").glob("reduce*.c")), cbuild.CSRC / "base" / "dtype.c"]
    compiler = [os.environ.get("CC", "gcc"), *cbuild.base_flags(), "-O3"]
    objects = cbuild.compile_all([*sources, ROOT / "benchmarks" / "kernels.c"], BUILD, compiler)
    target = BUILD / "kernels"
    cbuild.run_compiler([compiler[0], *map(str, objects), "-o", str(target), *cbuild.LIBRARIES])
    return target


def measure(nbytes: int, rounds: int) -> str:
    """Run the program on one core; return its lines."""
    core = max(os.sched_getaffinity(0))
    return subprocess.run(
        ["taskset", "-c", str(core), str(program()), str(nbytes), str(rounds)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=True,
    ).stdout


def speeds(lines: str, nbytes: int) -> dict[Key, Speed]:
    """Return each kernel's speed by (dtype, operation, set)."""
    times: dict[Key, list[tuple[float, float]]] = {}
    for line in lines.splitlines():
        isa, dtype, op, _, kernel_ns, memcpy_ns = line.split()
        times.setdefault((dtype, op, isa), []).append((float(kernel_ns), float(memcpy_ns)))
    found = {}
    for key, pairs in times.items():
        ratios = [copied / reduced for reduced, copied in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        median_ns = statistics.median(reduced for reduced, _ in pairs)
        found[key] = Speed(nbytes / median_ns, (low, middle, high), len(pairs))
    return found


def memcpy_gbyte_s(lines: str, nbytes: int) -> float:
    return nbytes / statistics.median(float(line.split()[-1]) for line in lines.splitlines())


def table(found: Mapping[Key, Speed], bar: float) -> tuple[list[str], int]:
    """Return the rows as text, and how many kernels of the best set are below the bar."""
    sets = list(dict.fromkeys(isa for _, _, isa in found))
    rows = [f"{'':<18}" + "".join(f"{isa:>8} GB/s  of memcpy (quartiles)" for isa in sets)]
    below = 0
    for dtype, op in dict.fromkeys((dtype, op) for dtype, op, _ in found):
        row = f"{dtype:<9}{op:<9}"
        for isa in sets:
            speed = found[dtype, op, isa]
            low, middle, high = speed.ratio
            missed = isa == sets[-1] and middle < bar
            below += missed
            row += f"{speed.gbyte_s:>13.1f}  {middle:>6.2f} ({low:.2f} to {high:.2f}){'<' if missed else ' '}"
        rows.append(row.rstrip())
    return rows, below


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns 1 if a kernel of the best set is below the bar."""
    parser = argparse.ArgumentParser(description="Reduction kernels against memcpy.")
    parser.add_argument("--bytes", type=size, default=size("256Ki"))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--bar", type=float, default=0.8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    lines = measure(options.bytes, options.rounds)
    found = speeds(lines, options.bytes)
    rows, below = table(found, options.bar)
    copied = memcpy_gbyte_s(lines, options.bytes)
    print(f"pieces of {options.bytes} bytes, {options.rounds} rounds; memcpy {copied:.1f} GB/s (median)")
    print("\n".join(rows))
    print(f"{below} kernels of the best set below {options.bar:g} of memcpy")
    if options.json is not None:
        named = [
            {"dtype": dtype, "operation": op, "set": isa, "gbyte_s": speed.gbyte_s, "ratio_quartiles": speed.ratio}
            for (dtype, op, isa), speed in found.items()
        ]
        whole = {"bytes": options.bytes, "rounds": options.rounds, "memcpy_gbyte_s": copied, "kernels": named}
        options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
