"""Measurements as data: contents of benchmarks/results, and storage of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs" / "_site")]

import keep  # noqa: E402

import made  # noqa: E402
import results  # noqa: E402
from netbottleneck.analysis import thresholds  # noqa: E402

FILES = sorted(keep.RESULTS.glob("*.json"))
ORIGIN = ("title", "date", "machine", "system", "versions", "command", "duration", "load", "spread")


def each_row(found: Any) -> Iterator[dict[str, Any]]:
    """Every row of a document, at any depth."""
    for value in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        if isinstance(value, dict) and "value" in value:
            yield value
        yield from each_row(value)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_keeps_its_digits_when_it_is_rewritten(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert keep.text(keep.read(text)) + "\n" == text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_names_the_origin_of_its_figures(path: Path) -> None:
    found = keep.read(path.read_text(encoding="utf-8"))
    for part in found.get("sittings", found.get("experiments", [found])):
        both = {**found, **part}
        needed = ORIGIN if path.stem != "experiments" else ("title", "date", "machine", "setting", "runs", "spread")
        assert [name for name in needed if not both.get(name)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_interval_holds_its_value(path: Path) -> None:
    rows = [row for row in each_row(keep.read(path.read_text(encoding="utf-8"))) if "low" in row]
    assert [row for row in rows if not float(row["low"]) <= float(row["value"]) <= float(row["high"])] == []


def test_every_table_and_plot_can_be_made() -> None:
    for name, arguments in {
        "gates": ("2026-11-22, AMD EPYC",),
        "nccl": ("2026-11-27, Intel Xeon",),
        "gates_plot": ("2026-11-22, AMD EPYC",),
        "peers_plot": ("64",),
    }.items():
        assert "\n".join(results.MAKERS[name](*arguments)).strip()
    for each in results.load("experiments")["experiments"]:
        assert "\n".join(results.experiment(each["topic"])).count("\n| ") == len(each["rows"]) + 2
    assert "1.000 [1.000, 1.000]" in "\n".join(results.gates("2026-11-22, AMD EPYC"))


def test_the_matrix_and_the_known_lengths_can_be_made() -> None:
    for name in ("scenarios", "live_scenarios"):
        found = results.load(name)
        matrix = "\n".join(results.matrix(name))
        assert matrix.count("\n| ") == len(found["matrix"]) + 2
        for row in found["matrix"]:
            assert int(row["runs"]) == sum(map(int, row["verdicts"].values()))
        assert " savings: " in "\n".join(results.verdict_savings(name))
    for name in ("scenarios", "live_lengths"):
        known = results.load(name)["known"]
        assert "\n".join(results.known_lengths(name)).count("\n| ") == len(known) + 1 + (name == "live_lengths")
        assert sum(int(row["runs"]) for row in known) >= (200 if name == "scenarios" else 50)


def test_a_run_of_the_gates_is_stored_with_its_origin() -> None:
    note = "tcp 1.94 Gbit/s, iperf3-4 1.90 Gbit/s"
    figure = {"name": "tcp 64 MB", "bar": 0.97, "value": 1.02, "interval_95": [1.0, 1.04], "rounds": 8, "note": note}
    skipped = {**figure, "value": None, "interval_95": None, "verdict": "not run"}
    found = {
        "written_wall_ns": 0,
        "machine": {"cpu": "a CPU", "cores": 2, "kernel": "6.1.0-13-cloud"},
        "versions": {"numpy": "2"},
        "gates": {"T1": [{**figure, "verdict": "pass"}, skipped]},
    }
    new = keep.sitting(json.loads(json.dumps(found)), "1970-01-01, a CPU", "make gates", "none")
    kept = {"sittings": [{"name": "1970-01-01, a CPU"}, {"name": "older"}]}
    keep.keep(kept, new)
    assert [each["name"] for each in kept["sittings"]] == ["1970-01-01, a CPU", "older"]
    (row,) = json.loads(keep.text(new))["rows"]
    assert (row["value"], row["low"], row["high"], row["rounds"]) == (1.02, 1.0, 1.04, 8)
    assert '"low": 1.000' in keep.text(new)
    assert row["paths"][1] == {"path": "iperf3-4", "value": 1.90, "unit": "Gbit/s"}
    assert (new["date"], new["system"], new["versions"]) == ("1970-01-01", "Linux 6.1", {"numpy": "2"})


def test_the_page_of_verdicts_lists_every_threshold() -> None:
    names = [row.split("`")[1] for row in made.limits() if "`" in row]
    assert names == [name for name in vars(thresholds) if name.isupper()]
