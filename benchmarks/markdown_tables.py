"""Prints the JSON files of transport.py, scale.py and `netbottleneck bench --json` as Markdown tables.

python benchmarks/markdown_tables.py FILE…, such as build/gates.json, build/scale.json, build/peers.json: a table for
each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keep

ORDER = ("fail", "not run", "undecided", "pass")


def value(figure: Mapping[str, Any]) -> str:
    """Return a figure's number with its interval and rounds."""
    if figure["value"] is None:
        return "–"
    low, high = figure["interval_95"]
    return f"{figure['value']:.3f} [{low:.3f}, {high:.3f}], {figure['rounds']} rounds"


def made(found: Mapping[str, Any], wall_ns: int) -> str:
    """Return date, machine and versions of a document."""
    machine, versions = found.get("machine", {}), found.get("versions", {})
    when = time.strftime("%Y-%m-%d", time.gmtime(wall_ns / 1e9))
    where = f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores, {keep.system(machine.get('kernel', '?'))}"
    return f"{when}, {where}; {', '.join(f'{name} {version}' for name, version in versions.items())}.\n"


def gates(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield date and machine, and the table of all figures by gate."""
    yield made(found, found["written_wall_ns"])
    yield "| gate | verdict | value / compared value | bar | situation |"
    yield "| --- | --- | --- | --- | --- |"
    for name, figures in found["gates"].items():
        for figure in sorted(figures, key=lambda each: ORDER.index(each["verdict"])):
            label = f"{figure['name']} ({figure['note']})" if figure["note"] else figure["name"]
            yield f"| {name} | {figure['verdict']} | {value(figure)} | {figure['bar']:g} | {label} |"


def scale(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the cost of more ranks, measured, then predicted."""
    yield f"\nLab {found['lab']}, one rank per host, maximum over ranks; measured:\n"
    yield "| ranks | lanes | transport | set-up | connections | memory, opened | memory, used |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in found["rows"]:
        opened, used = (row[name] / 1e6 for name in ("memory_open_bytes", "memory_used_bytes"))
        cells = [row["ranks"], row["lanes"], row["transport"], f"{row['setup_s']:.2f} s", row["connections"]]
        yield f"| {' | '.join(map(str, [*cells, f'{opened:.1f} MB', f'{used:.1f} MB']))} |"
    for each in found.get("predicted", []):
        times = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in each["predicted_s"].items())
        yield f"\nPredicted (a model, not measured) for {each['ranks']} ranks, {each['bytes']} bytes: {times}."


def peers(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield, for each path, busbw and processor time at each size: medians, and busbw at p10 and p90 of the times."""
    yield made(found, found["started_wall_ns"])
    sizes = sorted({row["bytes"] for row in found["rows"]})
    yield f"| path | {' | '.join(f'{size / 1e6:g} MB' for size in sizes)} |"
    yield f"| --- |{' --- |' * len(sizes)}"
    for name in dict.fromkeys(row["transport"] for row in found["rows"]):
        rows = {row["bytes"]: row for row in found["rows"] if row["transport"] == name}
        yield f"| {name} | {' | '.join(_moved(rows[size]) if size in rows else '–' for size in sizes)} |"


def _moved(row: Mapping[str, Any]) -> str:
    gbit, times = 8 * row["busbw_bytes_per_s"] / 1e9, row["time_s"]
    low, high = (gbit * times["median"] / times[name] for name in ("p90", "p10"))
    used = "" if row["cpu_s_per_gb"] is None else f"; {row['cpu_s_per_gb']:.2f} s/GB"
    return f"{gbit:.1f} ({low:.1f} to {high:.1f}) Gbit/s{used}"


def table(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of any of these documents."""
    if "gates" in found:
        return gates(found)
    return scale(found) if "predicted" in found else peers(found)


def main() -> int:
    if len(sys.argv) < 2:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    for path in sys.argv[1:]:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        print("\n".join(table(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
