"""Checks of the prediction study and the claim study: each bar can fail alone, and sets the exit code."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from netbottleneck.analysis.comparisons import Estimate
from netbottleneck.study.evidence import values
from netbottleneck.study.evidence.values import ArmFacts, CellFacts, ForecastFacts, Outlook, Parts

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import claim  # noqa: E402
import prediction  # noqa: E402

MS = 1e6


def about(value: float) -> Estimate:
    return Estimate(value, 0.99 * value, 1.01 * value)


def arm(name: str, step_ms: float, scaling: float, exposed: float = 0.5) -> ArmFacts:
    parts = Parts(step_ms * MS, 0.0, 0.0, exposed * step_ms * MS, 0.0, 0.0, 0.0)
    step, factor = about(step_ms * MS), about(scaling)
    return ArmFacts(name, step, 9, ((0, step_ms * MS),), scaling=factor, parts=parts, sent_over_model=1.001)


def put(folder: Path, cell: CellFacts, *, written: int = 1, started: int = 2) -> None:
    place = folder / "cells" / cell.key
    (place / "run").mkdir(parents=True)
    values.write(place / "facts.json", cell)
    (place / "cell.json").write_text(json.dumps({"seconds": 60.0}))
    (place / "forecast.json").write_text(json.dumps({"written_wall_ns": written}))
    (place / "run" / "run.json").write_text(json.dumps({"started_wall_ns": started}))


def forecast_cells() -> list[CellFacts]:
    """Twelve cells of two arms, four of them at 8 ranks, each forecast 2 % too long."""
    arms = {name: arm(name, 100.0, 0.5) for name in ("stock", "ofi")}
    forecasts = {name: ForecastFacts(about(102 * MS)) for name in arms}
    return [
        CellFacts(f"m-{at}", "m", "replay", 8 if at < 4 else 2, "1gbit", arms=arms, forecast=forecasts)
        for at in range(12)
    ]


def judged(monkeypatch: pytest.MonkeyPatch, main: Callable[[], int], folder: Path) -> int:
    monkeypatch.setattr(sys, "argv", ["judge", str(folder)])
    return main()


def test_forecasts_that_hold_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for cell in forecast_cells():
        put(tmp_path, cell)
    assert judged(monkeypatch, prediction.main, tmp_path) == 0
    output = capsys.readouterr().out
    assert output.count("+2.00 %") == 25  # each step's, and the worst
    assert "FAIL" not in output


def test_each_bar_of_the_prediction_fails_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = forecast_cells()
    first = good[0]
    spoilt: dict[str, tuple[list[CellFacts], int]] = {
        "at 8 ranks": ([replace(cell, ranks=2) for cell in good], 1),
        "steps forecast": (good[:11], 1),
        "worst error": (
            [replace(first, forecast={"stock": ForecastFacts(about(113 * MS)), "ofi": first.forecast["ofi"]})],
            1,
        ),
        "median error": (
            [replace(cell, forecast=dict.fromkeys(cell.arms, ForecastFacts(about(106 * MS)))) for cell in good],
            1,
        ),
        "of the step exposed": (
            [replace(cell, arms={name: arm(name, 100.0, 0.5, 0.1) for name in cell.arms}) for cell in good],
            1,
        ),
        "bytes counted": (
            [replace(first, arms={**first.arms, "ofi": replace(first.arms["ofi"], sent_over_model=1.02)})],
            1,
        ),
        "before its run": (good, 3),
    }
    for number, (bar, (cells, written)) in enumerate(spoilt.items()):
        folder = tmp_path / str(number)
        for cell in cells + good[len(cells) :] * (bar != "steps forecast"):
            put(folder, cell, written=written)
        assert judged(monkeypatch, prediction.main, folder) == 1
        failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
        assert len(failed) == 1
        assert bar in failed[0]


def claim_cells(model: str, *, ofi: float = 0.93, stock: float = 0.3, bound: float = 0.94) -> list[CellFacts]:
    """The same flows on a slow and on a fast link."""
    arms = {
        name: arm(name, 100.0, factor)
        for name, factor in {"stock": stock, "ofi": ofi, "tcp": 0.94, "null": 1.0}.items()
    }
    full = Outlook("stock", 0.9, full_use=about(bound))
    fast = CellFacts(f"{model}-fast", model, "replay", 2, "2gbit/500mbit", 2e9, (5e8,), arms=arms, outlook=full)
    slow = replace(fast, key=f"{model}-slow", link_bps=5e8, arms={"stock": arms["stock"]})
    return [fast, slow]


def test_a_claim_that_holds_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cell in (*claim_cells("resnet50"), *claim_cells("vgg16_bn")):
        put(tmp_path, cell)
    assert judged(monkeypatch, claim.main, tmp_path) == 0


@pytest.mark.parametrize(
    ("cells", "bars"),
    [
        (claim_cells("resnet50", ofi=0.88), ["ofi"]),
        (claim_cells("resnet50", stock=0.61), ["stock 0.610"]),
        (claim_cells("resnet50", bound=0.79), ["full use"]),
        (claim_cells("resnet50")[:1], ["stock from"]),
        ([], ["0 cells with a null arm"]),
    ],
)
def test_each_bar_of_the_claim_fails_by_itself(cells: list[CellFacts], bars: list[str]) -> None:
    failed = [text for holds, text in claim.judged("resnet50", cells) if not holds]
    assert len(failed) == len(bars)
    assert all(bar in text for bar, text in zip(bars, failed, strict=True))


def test_the_claim_fails_if_stock_still_grows_with_its_link() -> None:
    fast, slow = claim_cells("resnet50")
    slow = replace(slow, arms={"stock": arm("stock", 100.0, 0.2)})
    assert [text[:21] for holds, text in claim.judged("resnet50", [fast, slow]) if not holds] == [
        "resnet50: stock from "
    ]


def test_the_studies_contain_the_judged_cells() -> None:
    requested, claimed = (
        tomllib.loads((BENCHMARKS / "studies" / f"{name}.toml").read_text(encoding="utf-8"))
        for name in ("prediction", "claim")
    )
    ranks = [count for model in requested["model"] for count in model["ranks"] for _ in model["networks"]]
    foretold = len(ranks) - 1  # one is fitted
    assert len(requested["transports"]) * foretold >= prediction.CELLS
    assert len(requested["transports"]) * ranks.count(prediction.MANY_RANKS) >= prediction.AT_MANY
    claims = [model for model in claimed["model"] if "null" in model["transports"]]
    assert sorted(model["name"] for model in claims) == sorted(claim.MODELS)
    assert all({"stock", *claim.OURS} <= set(model["transports"]) for model in claims)
