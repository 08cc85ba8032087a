"""A study's evidence: read, shown and written from only its facts."""

import json
import sys
from html.parser import HTMLParser

import pytest

import netbottleneck
from netbottleneck import Evidence, cli
from netbottleneck.study.evidence import values
from test_figures import CELLS, PASSES

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
    assert FOUND.html.count("<figure") == 8
    assert [claim.title for claim in FOUND.claims if claim.title not in FOUND.html] == []


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
    assert cli.main(["report", str(tmp_path)]) == 1
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
