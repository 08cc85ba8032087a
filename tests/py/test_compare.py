"""netbottleneck compare: a run against itself, a slower run, studies, and the gate's exit code."""

import json

import pytest

from netbottleneck import cli
from netbottleneck.report import compare
from ringwriter import FakeRun


@pytest.fixture
def made(tmp_path):
    """Write a run in which stock's transfers take some ms, and return its folder."""

    def write(name, second_ms=123, **settings):
        return FakeRun(tmp_path / name, blocks=15, transfer_ms={"stock": (35, second_ms)}, **settings).write()

    return write


def test_a_run_is_equal_to_itself(made):
    run = made("a")
    found = compare.compare(run, run)
    assert [row.arm for row in found.rows] == ["bare", "stock", "ofi"]
    for row in found.rows:
        assert row.ratio.value == pytest.approx(1)
        assert row.ratio.low <= 1 <= row.ratio.high
    assert found.regressions(0.0) == ()


def test_a_slower_arm_is_named_with_its_change_and_its_parts(made, capsys):
    found = compare.compare(made("a"), made("b", 140))
    (row,) = found.regressions(0.05)
    assert row.arm == "stock"
    assert row.ratio.value == pytest.approx(192.2 / 175.2, rel=0.01)
    assert row.ratio.low > 1
    parts = {name: after - before for name, before, after in found.parts}
    assert parts["exposed communication"] == pytest.approx(17e6, rel=0.01)
    assert parts["compute"] == pytest.approx(0, abs=1e4)
    compare.show(found)
    text = capsys.readouterr().out
    assert "stock" in text
    assert "+9.7 %" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(("limit", "code"), [("5", 3), ("15", 0), (None, 0)])
def test_the_gate_fails_above_its_limit(made, limit, code):
    gate = [] if limit is None else ["--max-step-time-regression-pct", limit]
    assert cli.main(["compare", str(made("a")), str(made("b", 140)), *gate]) == code


def test_a_faster_run_passes_the_gate(made):
    arguments = [str(made("a", 140)), str(made("b")), "--max-step-time-regression-pct", "0"]
    assert cli.main(["compare", *arguments]) == 0


def test_the_comparison_is_json(made, capsys):
    assert cli.main(["compare", str(made("a")), str(made("b", 140)), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [row["transport"] for row in value["rows"]] == ["bare", "stock", "ofi"]
    assert value["rows"][1]["ratio"]["value"] == pytest.approx(192.2 / 175.2, rel=0.01)


def test_cells_of_a_study_are_paired(tmp_path):
    for study, second_ms in (("one", 123), ("two", 140)):
        for cell in "abc":
            folder = tmp_path / study / "cells" / cell / "run"
            FakeRun(folder, blocks=6, transfer_ms={"stock": (35, second_ms)}).write()
    found = compare.compare(tmp_path / "one", tmp_path / "two")
    assert {row.cell for row in found.rows} == {"a", "b", "c"}
    assert found.overall["stock"].value == pytest.approx(192.2 / 175.2, rel=0.01)
    assert found.overall["stock"].low > 1


def test_arms_that_only_one_run_has_are_named(made):
    found = compare.compare(made("a"), made("b", transports=("bare", "stock")))
    assert [line.partition(":")[0] for line in found.missing] == ["ofi"]


def test_runs_without_a_common_arm_are_refused(made, capsys):
    first, second = made("a", transports=("stock",)), made("b", transports=("tcp",))
    assert cli.main(["compare", str(first), str(second)]) == 1
    assert "no arm in common" in capsys.readouterr().err


def test_a_missing_run_is_named(made, tmp_path, capsys):
    assert cli.main(["compare", str(made("a")), str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err
