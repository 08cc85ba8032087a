"""A study's evidence: read, shown and written from only its facts."""

import json
import os
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import netbottleneck
from netbottleneck import Evidence, cli
from netbottleneck.report.drawing import BAR_HEIGHT
from netbottleneck.report.html import colour
from netbottleneck.study.evidence import page as pages
from netbottleneck.study.evidence import values
from test_chain import cell as made_cell
from test_figures import CELLS, PASSES
from test_page import checked, parsed, share, texts_of

FOUND = Evidence([*CELLS, PASSES], "A study of made-up <cells>", ["made & up"])


class Page(HTMLParser):
    """Collects elements, and checks that each opened element is closed."""

    def __init__(self):
        super().__init__()
        self.tags, self.open, self.links = set(), [], []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_everything_is_rebuilt_from_evidence_json(tmp_path):
    paths = FOUND.write(tmp_path / "study")
    names = {path.relative_to(tmp_path / "study").as_posix() for path in paths}
    numbered = {f"figures/figure{number}.{kind}" for number in range(1, 9) for kind in ("csv", "svg")}
    assert names == {"evidence.json", "report.html", *numbered}
    again = Evidence.read(tmp_path / "study")
    assert again.cells == FOUND.cells
    again.write(tmp_path / "again")
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "study" / name).read_bytes()
    by_file = Evidence.read(tmp_path / "study" / "evidence.json")
    assert by_file.cells == FOUND.cells
    assert by_file.to_json() == FOUND.to_json()


def test_a_running_study_is_read_from_its_complete_cells(tmp_path):
    for cell in CELLS:
        (tmp_path / "cells" / cell.key).mkdir(parents=True)
        values.write(tmp_path / "cells" / cell.key / "facts.json", cell)
    (tmp_path / "cells" / "not-done").mkdir()
    assert {cell.key for cell in Evidence.read(tmp_path).cells} == {cell.key for cell in CELLS}
    (tmp_path / "evidence.json").write_text(FOUND.to_json()[:-9])
    assert {cell.key for cell in Evidence.read(tmp_path).cells} == {cell.key for cell in CELLS}


def test_the_evidence_of_a_study_that_goes_on_is_that_of_its_cells(tmp_path):
    first, second = CELLS[1], CELLS[0]
    evidence = tmp_path / "evidence.json"
    evidence.write_text(Evidence([first], "a title", [f"{second.key}: not complete", "a note"]).to_json())
    for cell in (first, second):
        (tmp_path / "cells" / cell.key).mkdir(parents=True)
        values.write(tmp_path / "cells" / cell.key / "facts.json", cell)
    found = Evidence.read(tmp_path)
    assert ([cell.key for cell in found.cells], found.title) == ([first.key, second.key], "a title")
    assert found.notes == ("a note",)

    evidence.write_text(found.to_json())
    facts, written_ns = tmp_path / "cells" / first.key / "facts.json", evidence.stat().st_mtime_ns
    values.write(facts, replace(first, accuracy=0.25))
    for later_ns, accuracy in ((-(10**9), first.accuracy), (10**9, 0.25)):
        os.utime(facts, ns=(written_ns + later_ns,) * 2)
        os.utime(tmp_path / "cells" / second.key / "facts.json", ns=(written_ns - 1,) * 2)
        assert Evidence.read(tmp_path).cells[0].accuracy == accuracy


def test_a_failure_to_write_leaves_the_earlier_evidence(tmp_path, monkeypatch):
    FOUND.write(tmp_path)
    before = (tmp_path / "evidence.json").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(OSError, match="No space"):
        Evidence(CELLS[:1]).write(tmp_path)
    assert (tmp_path / "evidence.json").read_bytes() == before


def test_invalid_evidence_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no complete cell"):
        Evidence.read(tmp_path)
    for number, text in enumerate(
        ["", "[]", "{}", '{"format":"netbottleneck-evidence","version":9}', FOUND.to_json()[:-9]]
    ):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"{number}\.json"):
            Evidence.read(path)
    record = json.loads(FOUND.to_json())
    record["cells"][0]["ranks"] = "two"
    (tmp_path / "damaged.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"damaged\.json"):
        Evidence.read(tmp_path / "damaged.json")


def test_the_page_is_one_file_with_every_claim_and_figure():
    page = Page()
    page.feed(FOUND.html)
    assert not page.open
    assert not page.tags & {"script", "link", "img"}
    assert all(link.startswith("#") for link in page.links)
    assert "made-up &lt;cells&gt;" in FOUND.html
    assert FOUND.html.count('<figure class="nb-plot"') == 8
    assert [claim.title for claim in FOUND.claims if claim.title not in FOUND.html] == []


def drawn_cells(cells):
    """By cell: (colour or class, width, ends of the interval as parts of the picture) of each bar, from the top."""
    shown = pages.opening(cells)
    (picture,) = shown.pictures
    elements = list(parsed(picture))
    heads = [(float(e.get("y")), e.text) for e in elements if e.get("class") == "nb-head"]
    ends = {}
    for line in elements:
        if line.get("class") == "nb-line-whisker" and line.get("y1") == line.get("y2"):
            ends[float(line.get("y1"))] = share(line.get("x1")), share(line.get("x2"))
    found = {name: [] for _, name in heads}
    for bar in (e for e in elements if e.tag == "rect"):
        y = float(bar.get("y"))
        name = max((head for head in heads if head[0] < y), key=lambda head: head[0])[1]
        kind = bar.get("class") or bar.get("style").removeprefix("fill:")
        found[name].append((kind, share(bar.get("width")), *ends[y + BAR_HEIGHT / 2]))
    return found


def test_the_page_opens_with_the_steps_of_every_cell_and_their_bounds():
    shown = pages.opening(FOUND.cells)
    page = FOUND.html
    assert page.index(shown.title) < page.index("<ol>")
    opened = re.search(r"<section>.*?</section>", page, re.DOTALL)[0]
    assert str(shown.pictures[0]) in opened
    checked(opened)
    assert "prefers-color-scheme: dark" in page
    found = drawn_cells(FOUND.cells)
    by_key = {one.key: one for one in CELLS}
    assert set(found) == set(by_key), "a cell of passes trains nothing, so it has no step to compare"
    for key, bars in found.items():
        steps = [arm.step_ns for arm in by_key[key].transports] + [by_key[key].forecast["full_use"].step_ns]
        longest = max(step.high for step in steps)
        assert [kind for kind, *_ in bars] == [colour("stock"), f"nb-{pages.BOUND}"]
        drawn = [number for _, *numbers in bars for number in numbers]
        expected = [part / longest for step in steps for part in (step.value, step.low, step.high)]
        assert drawn == pytest.approx(expected, abs=2e-5)
        for step in steps:
            assert values.time(step) in texts_of(shown.pictures[0])


def test_cells_farthest_from_full_use_come_first_and_slower_transports_above_faster_ones():
    unbound = made_cell("no-bound", {"null": 0, "ofi": 30, "stock": 60})
    unbound = replace(unbound, forecast={}, outlook=None)
    found = drawn_cells([unbound, *CELLS])
    full = {one.key: one.forecast["full_use"].step_ns.value / one.arms["stock"].step_ns.value for one in CELLS}
    assert list(found) == [*sorted(full, key=full.get), "no-bound"]
    assert list(full) != sorted(full, key=full.get)
    assert [kind for kind, *_ in found["no-bound"]] == [colour("stock"), colour("ofi")]


def test_the_opening_picture_fits_a_phone_and_escapes_names():
    hostile = replace(CELLS[0], key="<b>&" * 12)
    page = Evidence([hostile, *CELLS]).html
    assert "<b>&<b>" not in page
    for drawn in (pages.opening([hostile, *CELLS]).pictures[0], pages.opening(CELLS).pictures[0]):
        by_line = {}
        for text in parsed(drawn).iter("text"):
            by_line.setdefault(text.get("y"), []).append(text.text)
        assert max(len(" ".join(texts)) for texts in by_line.values()) <= 46  # 7 pixels a character: 322 pixels
        assert all(element.get("width", "100%").endswith("%") for element in parsed(drawn).iter())


def test_a_study_without_steps_over_a_transport_says_so():
    shown = pages.opening([PASSES])
    assert shown.pictures == ()
    assert shown.missing in Evidence([PASSES]).html


def test_the_terminal_gets_one_sentence_per_claim():
    lines = FOUND.text.splitlines()
    assert max(map(len, lines)) <= 80
    assert [
        number for number in range(1, len(FOUND.claims) + 1) if not any(x.startswith(f"{number}. ") for x in lines)
    ] == []
    assert "one-2-1" in FOUND.text
    assert "Not measured: " in FOUND.text


def test_a_notebook_gets_the_chain_and_a_picture():
    assert FOUND._repr_html_().count("<li>") == len(FOUND.claims)
    assert FOUND.draw(3)._repr_svg_() == FOUND.pictures[3]
    with pytest.raises(IndexError, match="figure 9: must be from 1 to 8"):
        FOUND.draw(9)


def test_the_command_reports_a_study(tmp_path, capsys):
    path = tmp_path / "evidence.json"
    path.write_text(FOUND.to_json())
    assert cli.main(["report", str(path), "--json", "--html", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == FOUND.to_json()
    assert (tmp_path / "page.html").read_text() == FOUND.html
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "1. Scaling factor: " in capsys.readouterr().out
    path.write_text("{}")
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "evidence.json: not a netbottleneck-evidence" in capsys.readouterr().err


def test_without_matplotlib_values_are_written_and_the_page_has_a_note(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plain = Evidence(CELLS)
    names = [path.name for path in plain.write(tmp_path)]
    assert not [name for name in names if name.endswith(".svg")]
    assert plain.html.count("plots need matplotlib") == 8
    with pytest.raises(ImportError, match="netbottleneck\\[plot\\]"):
        plain.draw(1)


def test_evidence_is_a_public_name():
    assert "Evidence" in netbottleneck.__all__


def test_the_key_of_the_table_names_cells_whose_factors_are_estimates():
    assert "Step and scaling factor: measured, 95 % by blocks" in FOUND.text.replace("\n", " ")
    estimated = Evidence([made_cell("guessed", {"stock": 60}, alone_ms=0), *CELLS])
    text = estimated.text.replace("\n", " ")
    assert "Step and scaling factor: measured (the factor is estimated in guessed), 95 % by" in text
