"""Prints, as Markdown for README.md, what transport.py and scale.py wrote.

python benchmarks/tell.py build/gates.json [build/scale.json]: a line for each gate's worst figure, and for each figure.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ORDER = ("fail", "not run", "undecided", "pass")


def value(figure: Mapping[str, Any]) -> str:
    """Return a figure's number with its interval and rounds."""
    if figure["value"] is None:
        return "–"
    low, high = figure["interval_95"]
    return f"{figure['value']:.3f} [{low:.3f}, {high:.3f}], {figure['rounds']} rounds"


def gates(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield where and when, and the table of all figures, gate by gate."""
    machine, versions = found.get("machine", {}), found.get("versions", {})
    when = time.strftime("%Y-%m-%d", time.gmtime(found["written_wall_ns"] / 1e9))
    where = f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores, Linux {machine.get('kernel', '?')}"
    yield f"{when}, {where}; {', '.join(f'{name} {version}' for name, version in versions.items())}.\n"
    yield "| gate | verdict | value / what it is held against | bar | situation |"
    yield "| --- | --- | --- | --- | --- |"
    for name, figures in found["gates"].items():
        for figure in sorted(figures, key=lambda each: ORDER.index(each["verdict"])):
            words = f"{figure['name']} ({figure['note']})" if figure["note"] else figure["name"]
            yield f"| {name} | {figure['verdict']} | {value(figure)} | {figure['bar']:g} | {words} |"


def scale(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what more ranks cost, measured, then predicted."""
    yield f"\nLab {found['lab']}, one rank a host, the most of any rank; measured:\n"
    yield "| ranks | lanes | transport | set-up | connections | memory, opened | memory, used |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in found["rows"]:
        opened, used = (row[name] / 1e6 for name in ("memory_open_bytes", "memory_used_bytes"))
        words = [row["ranks"], row["lanes"], row["transport"], f"{row['setup_s']:.2f} s", row["connections"]]
        yield f"| {' | '.join(map(str, [*words, f'{opened:.1f} MB', f'{used:.1f} MB']))} |"
    for each in found.get("predicted", []):
        times = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in each["predicted_s"].items())
        yield f"\nPredicted (a model, not measured) for {each['ranks']} ranks, {each['bytes']} bytes: {times}."


def main() -> int:
    if len(sys.argv) < 2:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    for path in sys.argv[1:]:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        print("\n".join(gates(found) if "gates" in found else scale(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
