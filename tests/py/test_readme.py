"""The README and docs/ match the code: numbers of the stored trace, variables, files and commands."""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from netbottleneck import Evidence, cli, config
from netbottleneck.analysis.verdict import CODES
from netbottleneck.report import Run, text
from netbottleneck.study.evidence import figures, page
from ringwriter import FakeRun

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLE = (ROOT / "docs" / "explanation" / "example.md").read_text(encoding="utf-8")
TUTORIAL = (ROOT / "docs" / "tutorial" / "ten-minutes.md").read_text(encoding="utf-8")
SECTIONS = ("How it is computed", "Example", "What to do", "How to check that it helped")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stored():
    return Run(tool("readme").TRACE)


@pytest.fixture(scope="module")
def replayed():
    return Run(tool("readme").REPLAY)


def test_the_card_and_the_report_are_what_the_stored_traces_give(stored, replayed):
    readme = tool("readme")
    blocks = {name for _, name, _ in readme.BLOCK.findall(README + EXAMPLE + TUTORIAL)}
    assert blocks == set(readme.BLOCKS)
    assert readme.render(README, stored) == README
    assert readme.render(EXAMPLE, stored) == EXAMPLE
    assert readme.render(TUTORIAL, stored) == TUTORIAL
    (card,) = re.findall(r"<!-- trace: card -->\n```text\n(.*?)```", README[: README.index("\n## ")], re.DOTALL)
    assert " ".join(text.sentences(replayed.findings, replayed.verdict)) in " ".join(card.split())
    assert replayed.text.rstrip().endswith(card[card.index(f"Verdict: {replayed.verdict.code}") :].rstrip())
    assert set(card.splitlines()) <= set(replayed.text.splitlines())
    assert stored.text[stored.text.index("Run ") :] in EXAMPLE


def test_the_gate_of_the_page_judges_a_run_and_one_without_a_counted_step(tmp_path, monkeypatch, capsys, replayed):
    page = (ROOT / "docs" / "how-to" / "ci-gate.md").read_text(encoding="utf-8")
    (gate,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    bare = FakeRun(tmp_path, transports=("bare",), blocks=1, block_steps=1).write()
    codes = []
    for path in (replayed.path, bare):
        monkeypatch.setattr(sys, "argv", ["gate.py", str(path)])
        with pytest.raises(SystemExit) as ended:
            exec(gate, {})
        codes.append(ended.value.code)
    assert capsys.readouterr().out in page
    assert codes[0] == 1
    assert codes[1].startswith("not judged: No step could be split: ")


def test_the_picture_shows_lines_of_the_stored_report(replayed):
    readme = tool("readme")
    assert f"]({readme.PICTURE.relative_to(ROOT).as_posix()})" in README
    text = readme.PICTURE.read_text(encoding="utf-8")
    assert text == readme.picture(replayed), "run tools/readme.py"
    lines = ["".join(line.itertext()) for line in ElementTree.fromstring(text).iter() if line.tag.endswith("}text")]
    lines = [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
    assert set(lines) <= set(replayed.text.splitlines())
    assert f"Verdict: {replayed.verdict.code}" in lines


def test_the_studys_first_figure_is_shown_and_holds_the_stored_studys_values():
    readme = tool("readme")
    study = Evidence.read(readme.STUDY)
    assert f"]({Path(os.path.relpath(readme.FIGURE, readme.EXAMPLE.parent)).as_posix()})" in EXAMPLE
    picture = ElementTree.fromstring(readme.FIGURE.read_text(encoding="utf-8"))
    (held,) = (element.text for element in picture.iter() if element.tag.endswith("}description"))
    assert held.strip() == figures.to_csv(study.figures[0]).strip()
    assert {cell.job for cell in study.cells} == {"replay", "digits", "inflation"}
    assert readme.STUDY.stat().st_size < 100_000


def test_the_picture_of_the_study_is_that_of_its_page_and_says_its_conclusion():
    readme = tool("readme")
    study = Evidence.read(readme.STUDY)
    written = readme.OPENING.read_text(encoding="utf-8")
    assert written == readme.study_picture(study), "run tools/readme.py"
    shown = page.opening(study.cells)
    assert str(shown.pictures[0]) in study.html
    assert str(shown.pictures[0]) in written
    texts = ["".join(line.itertext()) for line in ElementTree.fromstring(written).iter() if line.tag.endswith("}text")]
    assert {shown.title, *(cell.key for cell in study.cells if cell.job != "inflation")} <= set(texts)
    assert all(any(what in line for line in texts) for _, what in shown.key)
    ((alt, target),) = re.findall(r"!\[([^]]*)\]\((docs/study\.svg)\)", README)
    assert README.index("<!-- trace: card -->") < README.index(target) < README.index("\n## ")
    assert all(claim.verdict in alt for claim in study.claims if claim.name in readme.CONCLUSIONS)
    assert ElementTree.fromstring(written).get("aria-label") == alt


def test_the_picture_of_the_study_has_text_of_the_size_of_the_others_and_a_background():
    readme = tool("readme")
    report, study = (ElementTree.parse(path).getroot() for path in (readme.PICTURE, readme.OPENING))
    assert study.get("viewBox").split()[:3] == report.get("viewBox").split()[:3]
    (size,) = {element.get("font-size") for element in report.iter() if element.get("font-size")}
    classes = {element.get("class") for element in study.iter() if element.tag.endswith("}text")}
    assert classes == {None, "nb-head"}  # of style.css, neither has a size of its own
    assert f".nb-picture text {{ fill: var(--ink); font-size: {size}px;" in readme.STYLE.read_text(encoding="utf-8")
    background = next(element for element in study.iter() if element.tag.endswith("}rect"))
    assert [background.get("width"), background.get("height")] == study.get("viewBox").split()[2:]


def test_the_networks_that_the_readme_names_are_those_of_the_stored_study():
    cells = {cell.key: cell for cell in Evidence.read(tool("readme").STUDY).cells}
    prose = " ".join(README[: README.index("<!-- trace: study -->")].split())
    for key in re.findall(r"`(\w+-\d-[\w-]+)`", prose):
        assert cells[key].ranks_per_host == 1
    capped, free = cells["resnet50-4-2gbit-500mbit"], cells["digits-2-none"]
    caps = f"{capped.link_bps / 1e9:g} Gbit/s on a link and {capped.flow_bps[0] / 1e6:g} Mbit/s on a flow"
    assert f"`{capped.key}` is a replay on {capped.ranks} ranks, with caps of {caps}" in prose
    assert (capped.job, free.job, free.link_bps, free.flow_bps) == ("replay", "digits", None, ())
    assert f"`{free.key}` is a small training without caps" in prose
    arms = [arm.name for cell in cells.values() if cell.job != "inflation" for arm in cell.transports]
    assert f"The steps over stock (gloo) and {' and '.join(sorted({*arms} - {'stock'}))} are measured" in prose


def test_a_stale_number_is_detected(stored):
    readme = tool("readme")
    assert f"Verdict: {stored.verdict.code}" in EXAMPLE
    wrong = EXAMPLE.replace(f"Verdict: {stored.verdict.code}", "Verdict: NOT_NETWORK")
    assert readme.render(wrong, stored) == EXAMPLE


@pytest.mark.parametrize("name", ["TRACE", "REPLAY"])
def test_a_stored_trace_names_no_machine(name):
    path = getattr(tool("readme"), name)
    trace = Run(path).trace
    assert [(rank.hostname, rank.host_id, rank.pid) for rank in trace.ranks] == [
        ("host0", "host0", 0),
        ("host1",) * 2 + (0,),
    ]
    assert trace.command == ("record.py",)
    assert trace.origin == "measured"
    assert path.stat().st_size < 300_000


def test_the_page_of_variables_is_current():
    docs = tool("env_docs")
    assert docs.PAGE.read_text(encoding="utf-8") == docs.page(), "run tools/env_docs.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_and_targets_named_by_a_page_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (page.parent / target).exists(), target
    known = {row.name for row in config.describe(config.Settings(), {})}
    known |= set(re.findall(r"NETBOTTLENECK(?:_[A-Z]+)+", (ROOT / "setup.py").read_text(encoding="utf-8")))
    assert set(re.findall(r"\bNETBOTTLENECK(?:_[A-Z]+)*\b", text)) <= known
    for command in re.findall(r"(?:^|`|-m )netbottleneck ([a-z]+(?:-[a-z]+)*)", text, re.MULTILINE):
        assert command in cli.COMMANDS
    for target in re.findall(r"(?:^|`)make ([a-z-]+)\b", text, re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target


def made():
    """The module that writes generated text into pages."""
    sys.path.insert(0, str(ROOT / "docs" / "_site"))
    return importlib.import_module("made")


@pytest.mark.parametrize("code", CODES)
def test_a_verdict_has_a_page_whose_example_gives_it(code):
    name = f"verdicts/{code.lower().replace('_', '-')}"
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert re.findall(r"^# .*|^## .*", page, re.MULTILINE) == [f"# {code}", *(f"## {title}" for title in SECTIONS)]
    assert all(part.strip() for part in re.split(r"^##? .*", page, flags=re.MULTILINE)[1:]), "a section is empty"
    assert f"\nVerdict: {code}\n" in made().fill(page)
    assert f"\n{name}\n" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_the_stored_runs_of_the_verdicts_name_no_machine():
    for path in (ROOT / "benchmarks" / "traces" / "verdicts").glob("*"):
        trace = Run(path).trace
        assert trace.origin == "measured"
        assert [(rank.hostname, rank.host_id, rank.pid) for rank in trace.ranks] == [
            (f"host{rank}", f"host{rank}", 0) for rank in range(trace.size)
        ]
        assert trace.command == ("record.py",)
        assert path.stat().st_size < 100_000


def test_every_verdict_is_explained():
    page = (ROOT / "docs" / "how-to" / "reading-the-report.md").read_text(encoding="utf-8")
    assert [code for code in CODES if f"`{code}`" not in page] == []


def test_the_speed_in_the_readme_matches_the_gate_results():
    section = README[README.index("## How fast it is") : README.index("## What it cannot do")]
    text = (ROOT / "benchmarks" / "results" / "gates.json").read_text(encoding="utf-8")
    sittings = json.loads(text, parse_float=str)["sittings"]
    rows = [row for sitting in sittings for row in sitting["rows"] if "low" in row]
    known = {f"{row['value']} [{row['low']}, {row['high']}]" for row in rows}
    figures = re.findall(r"\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]", section)
    assert len(figures) > 5
    assert [figure for figure in figures if figure not in known] == []


def test_every_verdict_has_a_row_in_the_reference():
    page = (ROOT / "docs" / "reference" / "verdicts.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `([A-Z_]+)` \| .* \| .* \|$", page, re.MULTILINE)) == sorted(CODES)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/explanation/architecture.md"])
def test_files_that_a_page_names_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:csrc|python|tools|tests|benchmarks|docs)/[\w./-]+)`", text)
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_files_that_the_picture_of_the_architecture_names_exist():
    picture = ElementTree.parse(ROOT / "docs" / "explanation" / "architecture.svg")
    texts = [element.text for element in picture.iter() if element.get("font-family") == "monospace"]
    named = [path for text in texts for path in text.split(", ")]
    homes = [ROOT, ROOT / "python" / "netbottleneck", ROOT / "csrc" / "transport"]
    assert len(named) > 15
    assert [path for path in named if not any((home / path).exists() for home in homes)] == []
