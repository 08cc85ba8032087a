"""The notebooks run from top to bottom, use documented names, and store the outputs of their cells."""

import ast
import importlib
import platform
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import nbclient
import nbformat
import pytest

from netbottleneck import Run
from netbottleneck.analysis.verdict import CODES, Verdict
from netbottleneck.report import plots
from netbottleneck.whatif import questions, sweeps
from ringwriter import FakeRun

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "benchmarks" / "notebooks"
BENCH = NOTEBOOKS / "00_stock_vs_multistream.ipynb"
ANSWER = NOTEBOOKS / "01_is_the_network_the_bottleneck.ipynb"
WHAT_IF = NOTEBOOKS / "02_what_if.ipynb"
STORED = '"../traces/resnet50-2gbit-500mbit.jsonl.gz"'
PAPER = NOTEBOOKS / "03_redo_the_paper.ipynb"


def outputs_of(book):
    return [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]


def executed(path):
    book = nbformat.read(path, as_version=4)
    options = {"timeout": 100, "kernel_name": "python3", "resources": {"metadata": {"path": str(path.parent)}}}
    nbclient.NotebookClient(book, coalesce_streams=True, **options).execute()
    return outputs_of(book)


def shown(outputs, kind):
    return [output.data[kind] for output in outputs if kind in output.get("data", {})]


def words(outputs):
    """What the cells printed, and their tables."""
    return [output.get("text") or output.data.get("text/html") for output in outputs]


def check_stored(path, outputs):
    """A notebook about a stored record stores what it prints today."""
    assert words(outputs_of(nbformat.read(path, as_version=4))) == words(outputs), "run tools/notebooks.sh --store"


def test_two_ranks_are_started_from_a_cell_and_drawn():
    outputs = executed(BENCH)
    assert len(shown(outputs, "image/png")) == 1
    (table,) = shown(outputs, "text/html")
    assert {name for name in ("stock", "tcp") if f"<td>{name}</td>" in table} == {"stock", "tcp"}
    rows = [row.split("</td>") for row in table.split("<tr>") if "<td>" in row]
    heads = re.findall(r"<th[^>]*>(.*?)</th>", table)
    wrong = heads.index("#wrong")
    assert {row[wrong].rpartition(">")[2] for row in rows} == {"0"}, "elements were wrong"
    assert re.match(r"(Yes|No|Not decided): .*\(measured\)\.\n", outputs[-1].text)


def test_the_notebook_of_the_stored_trace_runs():
    outputs = executed(ANSWER)
    assert len(shown(outputs, "image/png")) == 4
    assert all("TRANSPORT_LIMITED" in table for table in shown(outputs, "text/html"))
    assert len(shown(outputs, "text/html")) == 2
    printed = "".join(o.text for o in outputs if o.output_type == "stream")
    assert printed.startswith("Yes.\n")
    assert "Verdict: TRANSPORT_LIMITED" in printed
    check_stored(ANSWER, outputs)


@pytest.mark.parametrize("code", CODES)
def test_the_answer_follows_from_every_verdict(code, capsys):
    cells = nbformat.read(ANSWER, as_version=4).cells
    (source,) = (cell.source for cell in cells if cell.cell_type == "code" and "Not decided." in cell.source)
    split = {"stock": {"exposed_communication_s": 1, "wait_s": 1, "step_s": 4}}
    run = SimpleNamespace(verdict=Verdict(code, "", ""), summary={"base": "stock", "split": split})
    exec(source, {"run": run})
    here = ("HOST_LIMITED", "STRAGGLER", "IMBALANCE", "INPUT_LIMITED", "OPTIMIZER_LIMITED", "NOT_NETWORK", "DO_NOTHING")
    unknown = ("INCONCLUSIVE", "NO_COMMUNICATION")
    expected = "No." if code in here else "Not decided." if code in unknown else "Yes."
    assert capsys.readouterr().out.splitlines()[0] == expected


def test_the_what_if_notebook_of_the_stored_trace_runs():
    outputs = executed(WHAT_IF)
    printed = "".join(o.text for o in outputs if o.output_type == "stream")
    for expected in (
        "fully used, the step would be",
        "takes no time, the step would be",
        "a link faster than",
        "x compression at the achieved rate",
    ):
        assert expected in printed
    assert "predicted" in printed
    assert "The largest gain is from: " in printed
    assert len(shown(outputs, "image/png")) == 1
    check_stored(WHAT_IF, outputs)


def sources(path, folder):
    """The code of a notebook, about another run."""
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert STORED in cells[0]
    return [source.replace(STORED, repr(str(folder))) for source in cells]


@pytest.mark.parametrize("path", [ANSWER, WHAT_IF], ids=lambda path: path.stem)
@pytest.mark.parametrize("transport", ["stock", "tcp"])
def test_a_notebook_of_a_run_takes_one_of_a_single_transport_on_an_unknown_link(path, transport, tmp_path, capsys):
    names = {}
    folder = FakeRun(tmp_path, transports=(transport,), run={"network": None}, probe=None).write()
    for source in sources(path, folder):
        exec(source, names)
    printed = capsys.readouterr().out
    if path == ANSWER:
        assert f"of the step over {transport} (measured)." in printed
    else:
        assert "The model differs from the measured step by " in printed
        assert "The largest gain is from: " in printed
        assert not re.search("this link,|streams", printed, re.IGNORECASE)


def test_the_answer_of_a_run_without_a_counted_step_is_a_sentence(tmp_path, capsys):
    names = {}
    for source in sources(ANSWER, FakeRun(tmp_path, transports=("bare",), blocks=1, block_steps=1).write()):
        exec(source, names)
    assert "Not decided.\nNo step could be split: " in capsys.readouterr().out


@pytest.mark.parametrize("place", [0, -1, None])
def test_what_was_refused_is_named_beside_the_other_answers(place, tmp_path, capsys):
    *_, changes, answer = sources(WHAT_IF, "")
    job = questions.job(Run(FakeRun(tmp_path, transports=("stock",)).write()).trace)
    this_job = list(sweeps.answers(job, [sweeps.now(job), *sweeps.links(job, [1e9]), sweeps.free(job)]))
    fewer = sweeps.answers(job, sweeps.compression(job, [50], sweeps.Codec()))
    refused = replace(fewer[0], step_s=None, scaling=None, outcome=None, refused="too far")
    if place is not None:
        this_job[place] = replace(refused, setting=this_job[place].setting)
    names = {"job": job, "this_job": this_job, "faster": this_job[1:2], "fewer": [refused], "plots": plots}
    exec(changes, names)
    exec(answer, names)
    printed = capsys.readouterr().out
    assert "Refused, compression 50x: too far.\n" in printed
    assert ("The model differs" in printed) == (place != 0)
    assert ("The largest gain is from: 1 Gbit/s.\n" in printed) == (place is None)


def test_the_papers_figures_are_drawn_from_the_stored_study():
    outputs = executed(PAPER)
    assert len(shown(outputs, "image/svg+xml")) == 7
    (chain,) = shown(outputs, "text/html")
    assert "was not measured" not in chain
    printed = "".join(o.text for o in outputs if o.output_type == "stream")
    assert "11. Loss budget: " in printed
    assert "The argument holds in " in printed
    check_stored(PAPER, outputs)


every = pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)


def documented():
    """Modules and names of the page of the Python API."""
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    return {
        name: importlib.import_module(name).__all__ for name in re.findall(r"^<!-- made: api (\S+)", page, re.MULTILINE)
    }


@every
def test_cells_are_calls_of_documented_names(path):
    book, public = nbformat.read(path, as_version=4), documented()
    nbformat.validate(book)
    modules = {}
    for statement in (s for cell in book.cells if cell.cell_type == "code" for s in ast.parse(cell.source).body):
        assert isinstance(statement, ast.Import | ast.ImportFrom | ast.Assign | ast.Expr), ast.unparse(statement)
        if isinstance(statement, ast.Import):
            modules |= {name.name: name.name for name in statement.names}
        for name in statement.names if isinstance(statement, ast.ImportFrom) else ():
            whole = f"{statement.module}.{name.name}"
            assert whole in public or name.name in public[statement.module], whole
            if whole in public:
                modules[name.name] = whole
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                assert node.attr in public[modules[node.value.id]], ast.unparse(node)
            assert not (isinstance(node, ast.Attribute) and node.attr.startswith("_")), ast.unparse(node)


@every
def test_every_cell_stores_its_output_and_no_place_of_a_machine(path):
    book = nbformat.read(path, as_version=4)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert [cell.source for cell in cells if not cell.outputs and not cell.source.startswith("from ")] == []
    outputs = outputs_of(book)
    assert "error" not in {output.output_type for output in outputs}
    assert "stderr" not in {output.get("name") for output in outputs}
    texts = [text for text in words(outputs) if text] + shown(outputs, "image/svg+xml") + shown(outputs, "text/plain")
    for text in texts:
        assert not re.search(r"(?<![\w/.<])/(?:home|root|tmp|work|usr|var|opt)/", text)
        assert not re.search(rf"\b{re.escape(platform.node())}\b", text)
    assert path.stat().st_size < 1_500_000


@every
def test_prose_has_a_question_and_no_result(path):
    """Numbers are in code and its outputs: a number of prose is a year, or part of code."""
    prose = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    assert re.match(r"# .+\?\n", prose[0])
    assert [text for text in prose if text.startswith("**The answer of this ")] != []
    for text in prose:
        assert not re.search(r"\d", re.sub(r"`[^`]*`|\b20\d\d\b|ResNet-50", "", text)), text
