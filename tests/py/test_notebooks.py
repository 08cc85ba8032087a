"""The notebooks run from top to bottom, show pictures, and contain no logic and no outputs."""

import ast
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "benchmarks" / "notebooks"
BENCH = NOTEBOOKS / "00_stock_vs_multistream.ipynb"
ANSWER = NOTEBOOKS / "01_is_the_network_the_bottleneck.ipynb"
WHAT_IF = NOTEBOOKS / "02_what_if.ipynb"
PAPER = NOTEBOOKS / "03_redo_the_paper.ipynb"


def executed(path):
    book = nbformat.read(path, as_version=4)
    options = {"timeout": 100, "kernel_name": "python3", "resources": {"metadata": {"path": str(path.parent)}}}
    nbclient.NotebookClient(book, **options).execute()
    return [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]


def shown(outputs, kind):
    return [output.data[kind] for output in outputs if kind in output.get("data", {})]


def test_two_ranks_are_started_from_a_cell_and_drawn():
    outputs = executed(BENCH)
    assert len(shown(outputs, "image/png")) == 1
    (table,) = shown(outputs, "text/html")
    assert {name for name in ("stock", "tcp") if f"<td>{name}</td>" in table} == {"stock", "tcp"}
    rows = [row.split("</td>") for row in table.split("<tr>") if "<td>" in row]
    heads = re.findall(r"<th[^>]*>(.*?)</th>", table)
    wrong = heads.index("#wrong")
    assert {row[wrong].rpartition(">")[2] for row in rows} == {"0"}, "elements were wrong"


def test_the_notebook_of_the_stored_trace_runs():
    outputs = executed(ANSWER)
    assert len(shown(outputs, "image/png")) == 4
    assert all("TRANSPORT_LIMITED" in table for table in shown(outputs, "text/html"))
    assert len(shown(outputs, "text/html")) == 2
    assert "Verdict: TRANSPORT_LIMITED" in "".join(o.text for o in outputs if o.output_type == "stream")


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
    assert len(shown(outputs, "image/svg+xml")) == 1


def test_the_papers_figures_are_drawn_from_the_stored_study():
    outputs = executed(PAPER)
    assert len(shown(outputs, "image/svg+xml")) == 7
    (chain,) = shown(outputs, "text/html")
    assert "was not measured" not in chain
    assert "11. Loss budget: " in "".join(o.text for o in outputs if o.output_type == "stream")


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_cells_are_calls_and_store_no_outputs(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    for cell in book.cells:
        if cell.cell_type != "code":
            continue
        assert not cell.outputs
        for statement in ast.parse(cell.source).body:
            assert isinstance(statement, ast.Import | ast.ImportFrom | ast.Assign | ast.Expr), cell.source
