"""The README and docs/ say what the code does: numbers of the stored trace, variables, files and commands."""

import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from netbottleneck import Evidence, cli, config
from netbottleneck.analysis.verdict import CODES
from netbottleneck.report import Run, words
from netbottleneck.study.evidence import figures

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stored():
    return Run(tool("readme").TRACE)


def test_the_sentence_and_the_report_are_what_the_stored_trace_gives(stored):
    readme = tool("readme")
    assert {name for _, name, _ in readme.BLOCK.findall(README)} == {"sentence", "report", "answers", "chain"}
    assert readme.render(README, stored) == README
    assert README.index(" ".join(words.sentences(stored.findings))) < README.index("## ")
    assert stored.text[stored.text.index("Run ") :] in README


def test_the_studys_first_figure_is_shown_and_holds_the_stored_studys_values():
    readme = tool("readme")
    study = Evidence.read(readme.STUDY)
    assert f"]({readme.FIGURE.relative_to(ROOT).as_posix()})" in README
    picture = ElementTree.fromstring(readme.FIGURE.read_text(encoding="utf-8"))
    (held,) = (element.text for element in picture.iter() if element.tag.endswith("}description"))
    assert held.strip() == figures.to_csv(study.figures[0]).strip()
    assert {cell.job for cell in study.cells} == {"replay", "digits", "inflation"}
    assert readme.STUDY.stat().st_size < 100_000


def test_a_number_that_is_not_the_traces_is_noticed(stored):
    readme = tool("readme")
    assert f"Verdict: {stored.verdict.code}" in README
    assert readme.render(README.replace(f"Verdict: {stored.verdict.code}", "Verdict: NOT_NETWORK"), stored) == README


def test_the_stored_trace_names_no_machine(stored):
    trace = stored.trace
    assert [(rank.hostname, rank.host_id, rank.pid) for rank in trace.ranks] == [
        ("host0", "host0", 0),
        ("host1",) * 2 + (0,),
    ]
    assert trace.command == ("record.py",)
    assert trace.origin == "measured"
    assert tool("readme").TRACE.stat().st_size < 300_000


def test_the_page_of_variables_is_current():
    docs = tool("env_docs")
    assert docs.PAGE.read_text(encoding="utf-8") == docs.page(), "run tools/env_docs.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (page.parent / target).exists(), target
    known = {row.name for row in config.describe(config.Settings(), {})}
    assert set(re.findall(r"\bNETBOTTLENECK(?:_[A-Z]+)*\b", text)) <= known
    for command in re.findall(r"(?:^|`|-m )netbottleneck ([a-z]+(?:-[a-z]+)*)", text, re.MULTILINE):
        assert command in cli.COMMANDS
    for target in re.findall(r"(?:^|`)make ([a-z-]+)\b", text, re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target


def test_every_verdict_is_explained():
    page = (ROOT / "docs" / "reading-the-report.md").read_text(encoding="utf-8")
    assert [code for code in CODES if f"`{code}`" not in page] == []


def test_what_it_says_of_its_speed_stands_in_the_table_of_gates():
    told = README[README.index("## How fast it is") : README.index("## tcp or ofi")]
    rows = [line for line in (ROOT / "benchmarks" / "README.md").read_text().splitlines() if line.startswith("| T")]
    figures = re.findall(r"\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]", told)
    assert len(figures) > 5
    assert [figure for figure in figures if not any(figure in row for row in rows)] == []
