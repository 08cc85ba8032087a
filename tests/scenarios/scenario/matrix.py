"""The confusion matrix of causes, and the files that keep it, in benchmarks/results."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from netbottleneck import __version__
from netbottleneck.analysis.verdict import CODES
from scenario.judge import Result

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
sys.path.insert(0, str(RESULTS.parent))

import keep  # noqa: E402

Row = Mapping[str, Any]
REMOVED = " removed"


def rows(results: Sequence[Result]) -> list[Row]:
    """The matrix: by cause, how often which verdict came out.

    cause: the codes that a scenario allows, joined by " or "; of a twin: the code of the cause, and "removed". wrong:
    runs with a verdict that is not allowed; of a twin: with the removed cause.
    """
    found: dict[str, Counter[str]] = defaultdict(Counter)
    wrong: Counter[str] = Counter()
    for result in results:
        cause, code = " or ".join(result.case.expected), result.got.verdict.code
        found[cause][code] += 1
        wrong[cause] += code not in result.case.expected
        if result.twin is not None:
            gone = result.case.cause + REMOVED
            found[gone][result.twin.verdict.code] += 1
            wrong[gone] += result.twin.verdict.code == result.case.cause
    order = sorted(found, key=lambda cause: (cause.endswith(REMOVED), list(CODES).index(cause.split()[0])))
    return [
        {"cause": cause, "runs": found[cause].total(), "wrong": wrong[cause], "verdicts": dict(found[cause])}
        for cause in order
    ]


def lines(matrix: Sequence[Row]) -> Iterator[str]:
    """The matrix as text: a row for each cause, a column for each verdict that came out, by its number."""
    codes = [code for code in CODES if any(code in row["verdicts"] for row in matrix)]
    width = max((len(row["cause"]) for row in matrix), default=0)
    yield f"{'cause':{width}}  runs wrong  verdict:" + "".join(f"{n:5}" for n in range(1, len(codes) + 1))
    for row in matrix:
        cells = "".join(f"{row['verdicts'].get(code, '.'):>5}" for code in codes)
        yield f"{row['cause']:{width}}  {row['runs']:4} {row['wrong']:5}          {cells}"
    yield "verdicts: " + ", ".join(f"{n} {code}" for n, code in enumerate(codes, 1))


def cpu() -> str:
    """Name of the processor."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def _versions(*packages: str) -> dict[str, str]:
    return {package: metadata.version(package) for package in packages}


# By file: the title, what other work on the machine changes, and the packages whose versions are kept.
SIMULATED = (
    "scenarios",
    "Verdicts and lengths of simulated jobs with known causes",
    "simulated, so other work on the machine changes nothing",
    ("numpy",),
)
LIVE = (
    "live_scenarios",
    "Verdicts of trainings with known causes, in labs of network namespaces",
    "all ranks on one machine; otherwise idle",
    ("numpy", "torch"),
)
LENGTHS = (
    "live_lengths",
    "Lengths of time in trainings in labs of network namespaces",
    "all ranks on one machine; otherwise idle",
    ("numpy", "torch"),
)


def store(found: Row, command: str, seconds: float, what: tuple[str, str, str, tuple[str, ...]]) -> Path:
    """Write the outcome, with its origin, to the file of SIMULATED, LIVE or LENGTHS. Returns the path."""
    name, title, load, packages = what
    place = RESULTS / f"{name}.json"
    origin = {
        "title": title,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"cpu": cpu(), "cores": os.cpu_count()},
        "system": keep.system(platform.release()),
        "versions": {
            "netbottleneck": __version__,
            "Python": platform.python_version(),
            **_versions(*packages),
        },
        "command": command,
        "duration": f"{seconds / 60:.1f} minutes",
        "load": load,
        "spread": "counts of runs; errors as median, nine of ten and largest",
    }
    place.write_text(keep.text({**origin, **found}) + "\n", encoding="utf-8")
    return place
