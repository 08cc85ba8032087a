"""The overhead benchmark: every part runs and prints, and figures are compared with their bars."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RANKS_LIMIT_S

pytest.importorskip("torch")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import overhead  # noqa: E402

LIMIT_S = 2 * RANKS_LIMIT_S  # of a command that starts ranks for several parts
ROUNDS = 12
SMALL = {"hooks": 3, "inflation": 1, "latency": 2, "starts": 3}
FIGURES = {"hooks": 6, "inflation": 3, "latency": 1, "starts": 1}


@pytest.mark.parametrize(
    "parts", [["hooks", "latency", "starts"], pytest.param(["inflation"], marks=pytest.mark.full)], ids=", ".join
)
def test_each_part_runs_and_writes_its_figures(parts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "overhead.json"
    command = [sys.executable, str(BENCHMARKS / "overhead.py"), "--json", str(file)]
    for part in parts:
        command += ["--only", part, f"--{part}", str(SMALL[part])]
    environ = {**os.environ, "HOROVOD": "0"}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert file.exists(), result.stderr
    gates = json.loads(file.read_text(encoding="utf-8"))["gates"]
    assert list(gates) == parts
    for part, figures in gates.items():
        assert len(figures) == FIGURES[part]
        printed = [line for line in result.stdout.splitlines() if line.startswith(part)]
        for figure, line in zip(figures, printed, strict=True):
            assert figure["name"] in line
            assert (figure["verdict"] == "not run") == (figure["value"] is None)
            assert figure["rounds"] == (0 if "horovod" in figure["name"] else SMALL[part])


def figures_of(
    part: str, times: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, str], list[str]]:
    """Return the verdicts of a part for these measurements, and its output."""
    lines: list[str] = []
    monkeypatch.setenv("HOROVOD", "0")
    monkeypatch.setattr(overhead, "started", lambda what, count, horovod=None: times)
    figures = overhead.PARTS[part](ROUNDS, lines.append)
    return {figure.name: figure.verdict for figure in figures}, lines


@pytest.mark.parametrize(
    ("ours", "empty", "ddp"), [(2.4, "pass", "pass"), (2.6, "fail", "pass"), (4.1, "fail", "fail")]
)
def test_a_hook_is_compared_with_an_empty_one_and_ddps(
    monkeypatch: pytest.MonkeyPatch, ours: float, empty: str, ddp: str
) -> None:
    # In ns a gradient, above a plain pass of 10, in rounds of which some are slow for all.
    added = {"plain": 0.0, "empty": 1.0, "ours": ours, "measured": ours, "ddp": 8.0}
    times = {name: [10.0 * (1 + turn % 3) + more for turn in range(ROUNDS)] for name, more in added.items()}
    verdicts, lines = figures_of("hooks", times, monkeypatch)
    assert verdicts["added a gradient by empty over our Horovod API"] == empty
    assert verdicts["added a gradient by ddp over our Horovod API"] == ddp
    assert verdicts["added a gradient by horovod over our Horovod API"] == "not run"
    assert len(lines) == len(added) - 1


@pytest.mark.parametrize(
    ("more", "middle", "end"),
    [
        ([0.002], "pass", "pass"),
        ([0.0, 0.015], "pass", "pass"),
        ([0.0, 0.03], "fail", "fail"),
        ([0.02], "fail", "pass"),
    ],
)
def test_inflation_has_a_bar_for_its_median_and_one_for_its_interval(
    monkeypatch: pytest.MonkeyPatch, more: list[float], middle: str, end: str
) -> None:
    bare = [0.1 * (1 + turn % 2) for turn in range(ROUNDS)]
    measured = [seconds * (1 + more[turn % len(more)]) for turn, seconds in enumerate(bare)]
    verdicts, _ = figures_of("inflation", {"bare": bare, "measured": measured}, monkeypatch)
    assert list(verdicts.values()) == [middle, end, "pass"]


def test_each_start_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"init": [0.03] * ROUNDS, "shutdown": [0.01] * ROUNDS}
    verdicts, lines = figures_of("starts", times, monkeypatch)
    assert list(verdicts.values()) == ["pass"]
    assert lines[-1].endswith(" ".join(["40.0"] * ROUNDS))
