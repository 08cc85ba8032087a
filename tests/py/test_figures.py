"""The paper's figures: their values, the published values, and their pictures."""

import csv
import io
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

import cellmaker
from netbottleneck.study.evidence import figures
from netbottleneck.study.evidence.figures import EXACT, paper
from netbottleneck.study.evidence.values import Cpu, Curve, ForecastFacts, Nic, Outlook
from test_chain import cell

MS = cellmaker.MS
about = cellmaker.about


def whole(key, link_bps, stock_ms, size=2):
    """A cell with all facts known."""
    made = cell(key, {"null": 0, "stock": stock_ms}, link_bps, size=size)
    counted = {"nic": Nic("eth0", 1e8, 2e8, 3e8, 4e8), "cpu": Cpu({"user": 0.2, "idle": 0.8}, 0.5)}
    arms = {name: replace(arm, **counted) for name, arm in made.arms.items()}
    outlook = Outlook("stock", 0.9, as_used=Curve("as used", ((1.0, about(0.5)), (10.0, about(0.9)))))
    return replace(made, arms=arms, forecast={"full_use": ForecastFacts(about(125 * MS), about(0.8))}, outlook=outlook)


CELLS = [whole("one-2-1", 1e9, 300), whole("one-2-2", 2e9, 100), whole("one-4-2", 2e9, 150, size=4)]
PASSES = cell("two", {"bare": 0, "null": 0, "stock": 50}, job="inflation", beside_ms=(0, 0))
MADE = figures.figures([*CELLS, PASSES])


def rows(number):
    """Of this study: {(series, x): row}."""
    found = list(csv.DictReader(io.StringIO(figures.to_csv(MADE[number - 1]))))
    assert tuple(found[0]) == figures.COLUMNS
    return {(row["series"], row["x"]): row for row in found if row["panel"] == figures.OWN}


def test_scaling_is_drawn_by_ranks_and_by_link():
    by_ranks, by_link = rows(1), rows(3)
    assert {x: float(row["value"]) for (_, x), row in by_ranks.items()} == {"2": 50.0, "4": 40.0}
    row = by_link["made, 2 ranks: stock", "1"]
    assert (row["value"], row["low"], row["unit"], row["label"]) == ("25", "25", "scaling factor, %", "measured")
    assert row["source"] == "one-2-1"


def test_a_link_with_several_flow_caps_is_several_series():
    free = replace(CELLS[1], key="free", flow_bps=())
    table = figures.to_csv(figures.figures([*CELLS, free])[2])
    assert "made, 2 ranks, 0.50 Gbit/s a flow: stock" in table
    assert '"made, 2 ranks: stock",2,' in table
    assert '"made, 4 ranks: stock",2,' in table


def test_gradients_of_different_sizes_are_different_jobs():
    less = replace(CELLS[0], key="less", tensor_bytes=1_000_000)
    table = figures.to_csv(figures.figures([less, *CELLS[1:]])[2])
    assert '"made of 1 MB, 2 ranks: stock",1,' in table
    assert '"made of 10.5 MB, 2 ranks: stock",2,' in table


def test_forward_and_backward_are_drawn_for_models_with_real_compute():
    assert {(x, row["value"]) for (_, x), row in rows(2).items()} == {("bare", "90"), ("null", "90"), ("stock", "90")}


def test_utilisation_is_drawn_for_the_link_and_the_cores():
    used = {(name.rpartition(", ")[2], x): row["value"] for (name, x), row in rows(4).items() if "2 ranks" in name}
    assert used == {("average", "1"): "20", ("active", "1"): "40", ("average", "2"): "10", ("active", "2"): "20"}
    assert {row["value"] for row in rows(5).values()} == {"20"}


def test_measured_factors_are_drawn_with_the_bound_at_full_use():
    assert rows(6)["made, 2 ranks: full use", "1"]["value"] == "80"
    by_ranks = rows(7)
    assert {row["label"] for (name, _), row in by_ranks.items() if name.endswith("full use")} == {"predicted"}
    assert {row["label"] for (name, _), row in by_ranks.items() if name.endswith("stock")} == {"measured"}
    assert {(x, row["value"]) for (_, x), row in rows(8).items()} == {("1", "50"), ("10", "90")}


def test_every_figure_has_two_panels_even_without_data():
    empty = figures.figures([])
    assert [figure.number for figure in empty] == list(range(1, 9))
    assert not any(figure.panels[0].series for figure in empty)
    assert [figure.number for figure in empty if not figure.panels[1].series] == [5]
    assert "not measured" not in paper(5).note


@pytest.mark.parametrize("figure", MADE, ids=lambda figure: str(figure.number))
def test_a_picture_is_the_same_for_the_same_values(figure):
    text = figures.svg(figure)
    assert text == figures.svg(figure)
    assert ET.fromstring(text).tag.endswith("svg")
    assert "<dc:date>" not in text
    (described,) = (element.text for element in ET.fromstring(text).iter() if element.tag.endswith("}description"))
    assert described.strip() == figures.to_csv(figure).strip()


def test_published_values_match_the_reference_readings(paper1):
    file = (paper1 / "paper_figures.csv").read_text(encoding="utf-8")
    read = [row for row in csv.DictReader(io.StringIO(file)) if row["value"] and not row["figure"].startswith("4b")]
    ours = [
        (float(f"{point.value:g}"), point.source)
        for number in range(1, 9)
        for series in paper(number).series
        for point in series.points
        if point.source != EXACT
    ]
    theirs = [
        (float(row["value"]), f"read from figure {row['figure']}, ± {float(row['uncertainty']):g}") for row in read
    ]
    assert sorted(ours) == sorted(theirs)


def test_simulated_values_match_the_papers_simulator(paper1):
    file = (paper1 / "scaling.csv").read_text(encoding="utf-8")
    known = {
        (row["model"], float(row["N"]), float(row["linkspeed_bps"]) / 1e9): 100 * float(row["scaling_factor"])
        for row in csv.DictReader(io.StringIO(file))
        if float(row["compression"]) == 1
    }
    for number in (6, 7):
        for series in paper(number).series:
            model = series.name.partition(",")[0].lower()
            for point in series.points:
                at = (64, point.x) if number == 6 else (point.x, 100)
                if point.source == EXACT:
                    assert point.value == pytest.approx(known[model, *at], abs=0.006)
