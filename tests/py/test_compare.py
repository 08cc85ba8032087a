"""netbottleneck compare: a run against itself, a slower run, studies, and the gate's exit code."""

import io
import json
import os
import platform
import re
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "scenarios"))

from scenario.job import Clockwork, Job, trace_of

from netbottleneck import cli
from netbottleneck.report import Run, compare, plots, progress
from netbottleneck.trace import model
from netbottleneck.trace.transports import NULL, STOCK
from netbottleneck.units import ms
from ringwriter import PARAMETERS, FakeRun


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


@pytest.mark.parametrize(("second_ms", "code"), [(123, 4), (140, 3)])
def test_a_gate_names_what_it_could_not_judge(made, tmp_path, capsys, second_ms, code):
    short = {"blocks": 2, "block_steps": 2}  # a block's first step does not count
    first = FakeRun(tmp_path / "a", blocks=15, transports=("bare", "stock", "ofi", "tcp")).write()
    folder = FakeRun(tmp_path / "b", blocks=15, transports=("stock", "ofi"), transfer_ms={"stock": (35, second_ms)})
    path = tmp_path / "c.html"
    gate = ["--max-step-time-regression-pct", "5", "--html", str(path)]
    assert cli.main(["compare", str(first), str(folder.write()), *gate]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "netbottleneck compare: not judged: tcp: not in B"
    page = path.read_text()
    assert ("fails: stock exceeds 5.0 %" if code == 3 else "Gate</b> is not decided") in page
    assert "Not judged: tcp: not in B." in page
    brief = FakeRun(tmp_path / "s", transports=("stock",), **short | {"blocks": 1}).write()
    assert cli.main(["compare", str(brief), str(brief), *gate]) == 4
    assert "stock: too few counted steps for an interval" in capsys.readouterr().err
    assert cli.main(["compare", str(first), str(folder.folder)]) == 0  # without a gate


def test_a_gate_names_the_cells_that_it_could_not_judge(tmp_path, capsys):
    for study, cells in (("one", "abc"), ("two", "acd")):
        for cell in cells:
            FakeRun(tmp_path / study / "cells" / cell / "run", blocks=6).write()
            if (study, cell) != ("two", "c"):
                (tmp_path / study / "cells" / cell / "facts.json").write_text("{}")
    arguments = [str(tmp_path / study) for study in ("one", "two")]
    assert cli.main(["compare", *arguments, "--max-step-time-regression-pct", "5"]) == 4
    said = capsys.readouterr().err
    assert said == "netbottleneck compare: not judged: b: not in B; c: not complete in B\n"


def test_simulated_steps_are_not_called_measured(made, tmp_path, capsys):
    run = made("a")
    simulated = tmp_path / "simulated.jsonl.gz"
    model.write(replace(Run(run).trace, origin="simulated"), simulated)
    for before, after, label in (
        (simulated, simulated, "predicted"),
        (run, simulated, "A measured, B predicted"),
        (run, run, "measured"),
    ):
        found = compare.compare(before, after)
        compare.show(found)
        said = " ".join(capsys.readouterr().out.split())
        assert f"block medians; B over A ({label})" in said
        page = compare.page(found, ("A", "B"))
        assert f"95 % intervals ({label})" in page
        assert f"Lengths of the steps ({label})" in page
        assert f"middle half, {label})" in page


@pytest.mark.parametrize("limit", ["nan", "inf", "-inf", "-1"])
def test_a_gate_with_a_negative_limit_or_without_a_finite_one_is_refused(limit, made, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["compare", str(made("a")), str(made("b", 140)), f"--max-step-time-regression-pct={limit}"])
    assert end.value.code == 2
    assert f"{float(limit):g}: must be at least 0, and finite" in capsys.readouterr().err


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
            (folder.parent / "facts.json").write_text("{}")
    for cell in ("interrupted", "empty"):
        folder = tmp_path / "two" / "cells" / cell / "run"
        FakeRun(folder, blocks=1).write()
        (tmp_path / "one" / "cells" / cell / "run").mkdir(parents=True)
        (tmp_path / "one" / "cells" / cell / "run" / "run.json").write_text((folder / "run.json").read_text())
    found = compare.compare(tmp_path / "one", tmp_path / "two")
    assert found.missing == tuple(
        f"{cell}: not complete in {tmp_path / study}" for study in ("one", "two") for cell in ("empty", "interrupted")
    )
    assert {row.cell for row in found.rows} == {"a", "b", "c"}
    assert found.overall["stock"].value == pytest.approx(192.2 / 175.2, rel=0.01)
    assert found.overall["stock"].low > 1


@pytest.mark.parametrize("resumed", [False, True])
def test_a_cell_that_was_resumed_beside_earlier_records_is_compared(tmp_path, resumed):
    for study in ("one", "two"):
        cell = tmp_path / study / "cells" / "a"
        folder = cell / "run" / "2" if resumed and study == "two" else cell / "run"
        FakeRun(folder, blocks=6).write()
        (cell / "facts.json").write_text("{}")
        recorded = f"/elsewhere/{study}/cells/a/{folder.relative_to(cell)}"
        (cell / "cell.json").write_text(json.dumps({"outcome": {"folder": recorded}}))
    found = compare.compare(tmp_path / "one", tmp_path / "two")
    assert found.missing == ()
    assert {row.cell for row in found.rows} == {"a"}


class Uneven(FakeRun):
    """A run over stock whose last two blocks are three times as long as the others, and `slower` ms a step."""

    def __init__(self, folder, slower, **settings):
        super().__init__(folder, **settings)
        self.slower = slower

    def _step(self, rings, begin, index, block, transport):
        self.transfer_ms["stock"] = 35, (123 + self.slower) * (3 if block > 4 else 1)
        return super()._step(rings, begin, index, block, transport)


@pytest.fixture
def uneven(tmp_path):
    """Two studies of four cells; the steps of the second are longer."""
    for study, slower in (("one", 0), ("two", 17)):
        for cell in "abcd":
            folder = tmp_path / study / "cells" / cell / "run"
            Uneven(folder, slower, blocks=7, transports=("stock",)).write()
            (folder.parent / "facts.json").write_text("{}")
    return [str(tmp_path / study) for study in ("one", "two")]


def test_the_change_is_that_of_the_printed_steps(uneven, capsys):
    found = compare.compare(*uneven)
    for row in found.rows:
        assert row.after_ns / row.before_ns == pytest.approx(row.ratio.value)
        times = Run(f"{uneven[0]}/cells/{row.cell}/run").findings.times
        assert row.before_ns > 1.2 * times["stock"].median_ns  # of all steps: that of the short blocks
    assert found.overall["stock"].value == pytest.approx(found.rows[0].ratio.value)
    compare.show(found)
    said = capsys.readouterr().out
    for row in found.rows:
        (line,) = (line for line in said.splitlines() if line.split()[:1] == [f"{row.cell}:"])
        assert f"{ms(row.before_ns)}   {ms(row.after_ns)}" in line


def test_a_regression_over_all_cells_fails_the_gate_and_is_named(uneven, tmp_path):
    found = compare.compare(*uneven)
    assert [one.name for one in found.regressions(0.05)] == ["stock, all cells"]  # single cells are too uneven
    gate = ["--max-step-time-regression-pct", "5", "--html", str(tmp_path / "c.html")]
    assert cli.main(["compare", *uneven, *gate]) == 3
    page = (tmp_path / "c.html").read_text()
    assert "fails: stock, all cells exceeds 5.0 %" in page
    assert "<p>stock, all cells: the step is surely longer in B" in page
    assert "<td>stock, all cells</td><td></td><td></td>" in page


class Stopping(FakeRun):
    """A run over stock in which the steps of some indices take 723 ms, not `usual_ms`, to their last byte."""

    def __init__(self, folder, long, usual_ms=123, **settings):
        super().__init__(folder, blocks=6, block_steps=20, transports=("stock",), **settings)
        self.long, self.usual_ms = long, usual_ms

    def _step(self, rings, begin, index, block, transport):
        self.transfer_ms["stock"] = 35, 723 if index in self.long else self.usual_ms
        return super()._step(rings, begin, index, block, transport)


@pytest.mark.parametrize(
    ("long", "code", "title"),
    [(range(2, 120, 5), 3, "B is slower"), ([45], 4, "No sure change"), ((), 0, "No sure change")],
)
def test_a_gate_does_not_pass_a_run_with_longer_single_steps(tmp_path, capsys, long, code, title):
    first, second = (Stopping(tmp_path / name, steps).write() for name, steps in (("a", ()), ("b", long)))
    gate = ["--max-step-time-regression-pct", "2.5", "--html", str(tmp_path / "c.html")]
    assert cli.main(["compare", str(first), str(second), *gate]) == code
    said = capsys.readouterr()
    (row,) = compare.compare(first, second).rows
    assert row.ratio.value == pytest.approx(1, abs=0.01)  # of medians
    assert (row.means is not None) == (code != 0)
    assert ("! stock: by mean steps +" in said.out) == (code != 0)
    assert ("single steps are much longer in B" in " ".join(said.out.split())) == (code != 0)
    assert ("not judged: stock: by mean steps +" in said.err) == (code == 4)
    page = (tmp_path / "c.html").read_text()
    assert f"<h1>{title}</h1>" in page
    assert ("by mean steps.</p>" in page) == (code == 3)


def test_long_steps_that_both_runs_have_are_not_called_longer_in_the_second(tmp_path):
    """The mean step is shorter by a smaller part than the median, as the long steps of both are equal."""
    first, second = (
        Stopping(tmp_path / name, range(2, 120, 5), usual_ms).write() for name, usual_ms in (("a", 123), ("b", 60))
    )
    found = compare.compare(first, second)
    assert found.missing == ("stock: by mean steps -16 % (-16 % to -16 %), by medians -36 % (-36 % to -36 %)",)
    assert found.regressions(0.0) == ()


def test_a_run_without_the_long_steps_of_the_first_passes_the_gate(tmp_path):
    first, second = (Stopping(tmp_path / n, steps).write() for n, steps in (("a", range(2, 120, 5)), ("b", ())))
    assert cli.main(["compare", str(first), str(second), "--max-step-time-regression-pct", "5"]) == 0


def test_the_mean_step_is_told_also_where_it_alone_is_shorter(tmp_path):
    first, second = (Stopping(tmp_path / n, steps).write() for n, steps in (("a", range(2, 120, 5)), ("b", ())))
    found = compare.compare(first, second)
    (row,) = found.rows
    assert row.ratio.value == pytest.approx(1, abs=0.01)
    assert (row.means.value < 0.6, row.longer) == (True, False)
    assert re.match(r"stock: by mean steps -\d+ % .*, by medians [-+]0.0 %", *found.missing)


def sending(folder, sends):
    """Write a trace of a job that sends in the steps for which `sends` is true."""
    job = Job(blocks=3, block_steps=14, link_bps=1e9, jitter=0.01)
    work = Clockwork(job, 0)
    for index in range(job.blocks * job.block_steps):
        work.step(STOCK if sends(index) else NULL, index // job.block_steps, 1.0)
    steps = tuple(replace(step, arm=STOCK) for step in work.steps)
    model.write(replace(trace_of(job), steps=steps, collectives=tuple(work.collectives)), folder)
    return folder


def test_every_report_of_a_run_that_sends_in_some_steps_shows_its_mean_step(tmp_path):
    run = Run(sending(tmp_path / "rarely.jsonl.gz", lambda index: index % 3 != 0))
    (time,) = run.findings.times.values()
    mean = ms(time.mean_ns)
    assert mean != ms(time.median_ns)
    console = Console(file=io.StringIO(), width=200)
    console.print(progress.frame(run.findings, run.verdict, run.hosts, ["ended"], 500))
    assert f"mean step {mean}" in " ".join(console.file.getvalue().replace("│", " ").split())
    page = run.html
    assert "<th>mean step</th>" in page
    assert f"<tr><td>stock</td><td>{mean}</td>" in page
    axes = plots.transports(run)
    assert axes.get_title(loc="left").startswith("Mean step")
    assert mean in [one.get_text() for one in axes.texts]


def test_a_run_that_sends_in_some_steps_is_compared_by_mean_steps(tmp_path, capsys):
    often = sending(tmp_path / "often.jsonl.gz", lambda _: True)
    rarely = sending(tmp_path / "rarely.jsonl.gz", lambda index: index % 3 != 0)
    gate = ["--max-step-time-regression-pct", "5"]
    for before, after, code, averaged in (
        (often, rarely, 0, "the middle half in A, all steps in B"),
        (rarely, often, 3, "all steps in A, the middle half in B"),
    ):
        found = compare.compare(before, after)
        (row,) = found.rows
        parts = {name: (a, b) for name, a, b in found.parts}["step"]
        assert (row.before_ns, row.after_ns) == pytest.approx(parts, rel=0.01)
        assert row.ratio.value == pytest.approx(row.after_ns / row.before_ns)
        assert row.ratio.high < 0.95 or row.ratio.low > 1.05
        assert (row.means, found.averaged) == (None, averaged)
        assert cli.main(["compare", str(before), str(after), *gate]) == code
        said = " ".join(capsys.readouterr().out.split())
        assert "Steps: mean of all steps; B over A (measured)" in said
        assert f"means of {averaged} (measured)" in said
        assert f"(means of {averaged}, measured)" in compare.page(found, ("A", "B"))
    compare.show(replace(found, rows=(row, replace(row, arm=NULL, mixed=False))))
    assert "geometric mean of block medians, but the mean of all of stock;" in " ".join(capsys.readouterr().out.split())


OTHER_LINK = {"how": "a lab", "link_bps": 4e9, "flow_bps": [5e8], "verified": {}}


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"size": 3}, "ranks: 2 in A, 3 in B"),
        ({"run": {"model": "another net"}}, "model: fake net in A, another net in B"),
        ({"meta": {"parameters": PARAMETERS[:3]}}, "gradients: 9438208 bytes in A, 7341056 bytes in B"),
        (
            {"run": {"network": OTHER_LINK}},
            "link: 2 Gbit/s, a flow 0.5 Gbit/s (a lab) in A, 4 Gbit/s, a flow 0.5 Gbit/s (a lab) in B",
        ),
    ],
)
def test_a_gate_does_not_judge_runs_that_are_not_comparable(made, tmp_path, capsys, settings, what):
    first, second = made("a"), made("b", 140, **settings)
    line = f"not comparable: {what}"
    path = tmp_path / "c.html"
    gate = ["--max-step-time-regression-pct", "5", "--html", str(path)]
    assert cli.main(["compare", str(first), str(second), *gate]) == 4
    captured = capsys.readouterr()
    assert captured.err.startswith(f"netbottleneck compare: not judged: {line}")
    assert f"! {line}" in " ".join(captured.out.split())
    assert "<h1>Not compared</h1>" in path.read_text()
    assert "includes 0" not in path.read_text()
    assert cli.main(["compare", str(first), str(second)]) == 0


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"recorder": "torch.profiler"}, "recorder: netbottleneck in A, torch.profiler in B"),
        ({"origin": "simulated"}, "origin: measured in A, simulated in B"),
    ],
)
def test_a_gate_does_not_judge_a_record_of_another_kind(made, tmp_path, capsys, changed, what):
    other = tmp_path / "other.jsonl.gz"
    model.write(replace(Run(made("b", 140)).trace, **changed), other)
    assert cli.main(["compare", str(made("a")), str(other), "--max-step-time-regression-pct", "5"]) == 4
    assert capsys.readouterr().err == f"netbottleneck compare: not judged: not comparable: {what}\n"


def lost(trace, **changed):
    """Return the trace with another description of rank 1."""
    return replace(trace, ranks=tuple(replace(one, **(changed if one.rank == 1 else {})) for one in trace.ranks))


def test_ranks_on_fewer_hosts_are_not_comparable(made, tmp_path):
    run, other = made("a"), tmp_path / "one.jsonl.gz"
    model.write(lost(Run(run).trace, host_id=Run(run).trace.ranks[0].host_id), other)
    assert compare.compare(run, other).unjudged == ("not comparable: hosts: 2 in A, 1 in B",)
    model.write(lost(Run(run).trace, host_id=""), other)
    assert compare.compare(run, other).unjudged == ()


def without(trace, rank):
    """Return the trace without the record of a rank."""
    tables = {name: tuple(row for row in getattr(trace, name) if row.rank != rank) for name in model.BY_RANK}
    return replace(trace, **tables)


@pytest.mark.parametrize(
    ("damaged", "what"),
    [
        (lambda trace: without(trace, 1), "no record of rank 1"),
        (lambda trace: lost(trace, finished=False, error="RuntimeError: lost"), "rank 1 failed"),
        (lambda trace: lost(trace, finished=False), "rank 1 did not finish cleanly"),
    ],
)
def test_a_gate_does_not_pass_a_run_whose_ranks_failed(made, tmp_path, capsys, damaged, what):
    first, second = made("a"), tmp_path / "second.jsonl.gz"
    model.write(damaged(Run(first).trace), second)
    gate = ["--max-step-time-regression-pct", "5"]
    assert cli.main(["compare", str(first), str(second), *gate]) == 4
    captured = capsys.readouterr()
    assert captured.err.startswith(f"netbottleneck compare: not judged: {what} in B")
    assert "".join(f"! {what} in {second}".split()) in "".join(captured.out.split())
    assert cli.main(["compare", str(second), str(first), *gate]) == 4
    assert f"not judged: {what} in A" in capsys.readouterr().err
    assert cli.main(["compare", str(first), str(second)]) == 0


def test_a_gate_does_not_judge_a_run_in_progress(made, capsys, monkeypatch):
    monkeypatch.setattr("netbottleneck.report._lives", lambda *_: True)
    there = {"finished": False, "hostname": platform.node(), "pid_namespace": os.readlink("/proc/self/ns/pid")}
    first, second = made("a"), made("b", 140, meta=there)
    gate = ["--max-step-time-regression-pct", "5"]
    for one, other, where in ((first, second, "B"), (second, first, "A")):
        assert cli.main(["compare", str(one), str(other), *gate]) == 4
        said = capsys.readouterr()
        assert said.err == f"netbottleneck compare: not judged: not comparable: in progress in {where}\n"
        assert "did not finish cleanly" not in " ".join(said.out.split())


def test_what_only_one_run_knows_makes_no_difference(made):
    unknown = made("b", 140, run={"model": "", "network": None}, meta={"parameters": [], "buckets": []})
    found = compare.compare(made("a"), unknown)
    assert (found.missing, found.unjudged) == ((), ())
    assert len(found.regressions(0.05)) == 1


def test_cells_of_another_model_do_not_count_over_all_cells(tmp_path):
    for study in ("one", "two"):
        for cell in "abcd":
            other = {"run": {"model": "less"}, "transfer_ms": {"stock": (99, 99)}} if study + cell == "twod" else {}
            folder = tmp_path / study / "cells" / cell / "run"
            FakeRun(folder, blocks=6, **other).write()
            (folder.parent / "facts.json").write_text("{}")
    found = compare.compare(tmp_path / "one", tmp_path / "two")
    assert found.missing == ("d: not comparable: model: fake net in A, less in B",)
    assert found.unjudged == found.missing
    assert [row.cell for row in found.rows if not row.comparable] == ["d"] * 3
    assert found.overall["stock"].value == pytest.approx(1)


def test_unknown_intervals_have_no_ends(tmp_path):
    brief = FakeRun(tmp_path / "s", transports=("stock",), blocks=1, block_steps=2).write()
    found = compare.compare(brief, brief)
    assert found.as_dict()["rows"][0]["ratio"] == {"value": 1.0, "low": None, "high": None}
    single = Run(FakeRun(tmp_path / "p", transports=("stock", "ofi"), blocks=2).write())
    (pair,) = single.summary["comparisons"]
    for name in ("difference_s", "ratio", "gain"):
        assert pair[name]["value"] is not None
        assert (pair[name]["low"], pair[name]["high"]) == (None, None)
    drawn = str(compare._changes(found, None).pictures[0])
    assert "nb-line-whisker" not in drawn
    assert "-100 %" not in drawn  # the scale is that of the value


def test_arms_that_only_one_run_has_are_named(made):
    found = compare.compare(made("a"), made("b", transports=("bare", "stock")))
    assert [line.partition(":")[0] for line in found.missing] == ["ofi"]


def test_an_arm_that_only_one_cell_has_is_named_with_its_cell(tmp_path):
    for study, arms in (("one", ("stock", "ofi")), ("two", ("stock",))):
        FakeRun(tmp_path / study / "cells" / "a" / "run", transports=arms).write()
        (tmp_path / study / "cells" / "a" / "facts.json").write_text("{}")
    assert compare.compare(tmp_path / "one", tmp_path / "two").missing == (f"a: ofi: only in {tmp_path / 'one'}",)


def test_a_run_without_a_counted_step_is_not_judged(made, tmp_path, capsys):
    first = made("a", transports=("stock",))
    begun = FakeRun(tmp_path / "b", transports=("stock",), blocks=1, block_steps=1).write()
    gate = ["--max-step-time-regression-pct", "5", "--html", str(tmp_path / "c.html")]
    assert cli.main(["compare", str(first), str(begun), *gate]) == 4
    captured = capsys.readouterr()
    assert captured.err == "netbottleneck compare: not judged: stock: no counted step in B\n"
    said = "".join(captured.out.split())  # a long path is cut at the end of a line
    assert said == "".join(f"! stock: no counted step in {begun}".split())
    assert "No arm has a counted step in both." in (tmp_path / "c.html").read_text()


def test_runs_without_a_common_arm_are_refused(made, capsys):
    first, second = made("a", transports=("stock",)), made("b", transports=("tcp",))
    assert cli.main(["compare", str(first), str(second)]) == cli.USAGE
    assert "no arm in common" in capsys.readouterr().err


def test_studies_without_a_common_cell_and_a_study_with_a_run_are_refused(made, tmp_path, capsys):
    for study, cell in (("one", "a"), ("two", "b")):
        FakeRun(tmp_path / study / "cells" / cell / "run", blocks=3).write()
        (tmp_path / study / "cells" / cell / "facts.json").write_text("{}")
    one, two, run = str(tmp_path / "one"), str(tmp_path / "two"), str(made("run"))
    assert cli.main(["compare", one, two]) == 2
    assert "have no cell in common" in capsys.readouterr().err
    for pair in ((one, run), (run, one)):
        assert cli.main(["compare", *pair]) == 2
        advice = f"{one} is a study and {run} a run: compare the run with {one}/cells/CELL/run"
        assert advice in capsys.readouterr().err


def test_a_missing_run_is_named(made, tmp_path, capsys):
    assert cli.main(["compare", str(made("a")), str(tmp_path / "none")]) == cli.USAGE
    assert "none" in capsys.readouterr().err


def test_the_page_of_a_comparison_shows_each_change_and_the_gate(made, tmp_path):
    path = tmp_path / "c.html"
    gate = ["--html", str(path), "--max-step-time-regression-pct", "5"]
    assert cli.main(["compare", str(made("a")), str(made("b", 140)), *gate]) == 3
    page = path.read_text()
    assert "<h1>B is slower</h1>" in page
    assert "fails: stock exceeds 5.0 %" in page
    assert "<script" not in page
    assert "http" not in page
    found = compare.compare(made("a"), made("b", 140))
    for row in found.rows:
        assert f"<td>{ms(row.before_ns)}</td><td>{ms(row.after_ns)}</td>" in page
    changes, split, lengths = (ElementTree.fromstring(text) for text in re.findall(r"<svg class.*?</svg>(?=\n)", page))
    dots = {dot.find("title").text: dot for dot in changes.iter("circle")}
    slower = next(dot for title, dot in dots.items() if title.startswith("+9.7 %"))
    assert slower.get("class") == "nb-exposed"
    assert {dot.get("cx") for dot in dots.values() if dot is not slower} == {"50%"}
    widths = [float(r.get("width")[:-1]) for r in split.iter("rect") if r.get("class") == "nb-exposed"]
    exposed = {name: (before, after) for name, before, after in found.parts}
    longest = exposed["step"][1]
    assert widths == pytest.approx([100 * ns / longest for ns in exposed["exposed communication"]], abs=0.01)
    assert [text.text for text in lengths.iter("text") if text.text.endswith((", A", ", B"))] == [
        f"{row.arm}, {which}" for row in found.rows for which in "AB"
    ]


def test_the_page_of_equal_runs_and_of_studies_claims_nothing(made, tmp_path):
    for cell in "abc":
        FakeRun(tmp_path / "study" / "cells" / cell / "run", blocks=6).write()
        (tmp_path / "study" / "cells" / cell / "facts.json").write_text("{}")
    for path in (made("a"), tmp_path / "study"):
        page = compare.page(compare.compare(path, path), ("A", "B"), 0.05)
        assert "<h1>No sure change</h1>" in page
        assert "passes" in page
    assert "The parts are compared for two single runs" in page


def test_a_reference_that_changed_is_named_beside_transports_that_did_not(made):
    page = compare.page(compare.compare(made("a"), made("b", bare_ms=190)), ("A", "B"))
    assert "<h1>No sure change</h1>" in page
    assert "The interval of every transport's change includes 0." in page
    assert "<p>Reference bare: the step is surely longer in B, +10 %" in page


def test_runs_that_are_not_comparable_have_no_sure_change_in_the_picture(tmp_path):
    first = FakeRun(tmp_path / "a", blocks=9).write()
    second = FakeRun(tmp_path / "b", blocks=9, run={"model": "another net"}, transfer_ms={"stock": (70, 250)}).write()
    path = tmp_path / "page.html"
    assert cli.main(["compare", str(first), str(second), "--html", str(path)]) == 0
    page = path.read_text()
    assert "no sure change, or not comparable" in page
    picture = page[page.index("change of each step, B over A") :].partition("</svg>")[0]
    assert "nb-dot-exposed" not in picture
