"""Stores a run of the gates as data: python benchmarks/keep.py build/gates.json NAME --command '…' --load '…'.

Adds the run to the list `sittings` of results/gates.json (gates N1 to N6: --results nccl), or replaces the one of the
same name. All other digits of the file are kept.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
WIDTH = 118
UNKNOWN = "not recorded"
PATH = re.compile(r"(.+?) ([\d.]+) (Gbit/s|µs|s/GB)")


class Number(str):
    """A number with all digits of the file."""

    __slots__ = ()


def read(text: str) -> Any:
    """Parse a document, with numbers that keep all their digits."""
    return json.loads(text, parse_float=Number, parse_int=Number)


def flat(value: Any) -> str:
    """Return a value on one line."""
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {flat(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flat, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def text(value: Any, depth: int = 0) -> str:
    """Format a value as in the results files: on one line if it fits or is one figure."""
    line = flat(value)
    figure = isinstance(value, dict) and "value" in value and not {"paths", "rows"} & set(value)
    if not isinstance(value, dict | list) or not value or len(line) + 2 * depth <= (330 if figure else WIDTH):
        return line
    inner = "  " * (depth + 1)
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(key)}: {text(each, depth + 1)}" for key, each in value.items()]
    else:
        parts = [f"{inner}{text(each, depth + 1)}" for each in value]
    left, right = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return f"{left}\n" + ",\n".join(parts) + f"\n{'  ' * depth}{right}"


def rows(gates: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each measured figure."""
    for gate, figures in gates.items():
        for figure in figures:
            if figure["value"] is None:
                continue
            low, high = figure["interval_95"]
            found = [PATH.fullmatch(part) for part in figure["note"].split(", ")]
            paths = [{"path": part[1], "value": Number(part[2]), "unit": part[3]} for part in found if part]
            known = len(paths) == len(found)
            yield {
                "gate": gate,
                "situation": figure["name"] + (f" ({figure['note']})" if figure["note"] and not known else ""),
                "verdict": figure["verdict"],
                "value": Number(f"{figure['value']:.3f}"),
                "low": Number(f"{low:.3f}"),
                "high": Number(f"{high:.3f}"),
                "unit": "ratio",
                "rounds": Number(figure["rounds"]),
                "bar": Number(f"{figure['bar']:g}"),
                **({"paths": paths} if known else {}),
            }


def system(release: str) -> str:
    """Return the system of a kernel of this release, without the parts that name its build: "Linux 6.18"."""
    return f"Linux {'.'.join(release.split('.')[:2])}"


def sitting(found: Mapping[str, Any], name: str, command: str, load: str) -> dict[str, Any]:
    """Return a run of the gates as it is stored, with its machine and versions."""
    machine = found.get("machine", {})
    return {
        "name": name,
        "date": time.strftime("%Y-%m-%d", time.gmtime(found["written_wall_ns"] / 1e9)),
        "machine": {"cpu": machine.get("cpu", UNKNOWN), "cores": Number(machine.get("cores", 0))},
        "system": system(machine.get("kernel", UNKNOWN)),
        "versions": dict(found.get("versions", {})),
        "command": command,
        "duration": UNKNOWN,
        "load": load,
        "rows": list(rows(found["gates"])),
    }


def keep(kept: dict[str, Any], new: dict[str, Any]) -> None:
    """Insert a run as the first; remove an earlier one of the same name."""
    kept["sittings"] = [new, *(each for each in kept["sittings"] if each["name"] != new["name"])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE", help="output of transport.py --json")
    parser.add_argument("name", metavar="NAME", help="name of the run: its date and machine")
    parser.add_argument("--command", default=UNKNOWN, help="the command line of the run")
    parser.add_argument("--load", default=UNKNOWN, help="other load on the machine")
    parser.add_argument("--results", default="gates", choices=("gates", "nccl"), help="the results file")
    args = parser.parse_args()
    place = RESULTS / f"{args.results}.json"
    kept = read(place.read_text(encoding="utf-8"))
    found = json.loads(args.file.read_text(encoding="utf-8"))
    keep(kept, sitting(found, args.name, args.command, args.load))
    place.write_text(text(kept) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
