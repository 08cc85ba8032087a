"""`netbottleneck what-if`: rows and tables from a log or a run; one clear line for an unanswerable question."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import RANKS_LIMIT_S
from rich.console import Console

from netbottleneck.cli import main, what_if
from netbottleneck.report import Run
from netbottleneck.report import what_if as report
from netbottleneck.trace import layer_log
from netbottleneck.trace import model as tr
from netbottleneck.trace.layer_log import LayerLog, VecTable
from netbottleneck.whatif import compat2020, questions, sweeps
from netbottleneck.whatif.compat2020 import Grid
from ringwriter import FakeRun

sys.path.insert(0, str(Path(__file__).parents[1] / "scenarios"))

from scenario.job import Job as SimulatedJob
from scenario.job import trace_of

TRACE = Path(__file__).parents[2] / "benchmarks" / "traces" / "resnet50-2gbit-500mbit.jsonl.gz"
LOG = LayerLog("small", ((0.0005, 4000), (0.004, 40 << 20), (0.002, 30 << 20), (0.001, 1 << 20)))
TABLE = VecTable((40, 1 << 20, 1 << 28), (1e-5, 1.2e-5, 1e-3))
STEP_S = 0.02
ROW = [
    "model",
    "workers",
    "link_bps",
    "compression",
    "compute_end_s",
    "communication_end_s",
    "overhead_s",
    "step_s",
    "scaling_factor",
    "buckets",
]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    layer_log.write(tmp_path / "small.bk.log", LOG)
    layer_log.write_table(tmp_path / "add.log", TABLE)
    return str(tmp_path / "small.bk.log"), str(tmp_path / "add.log")


def command(*args: str) -> subprocess.CompletedProcess[str]:
    values = {name: value for name, value in os.environ.items() if not name.startswith("NETBOTTLENECK")}
    return subprocess.run(
        [sys.executable, "-m", "netbottleneck", "what-if", *args],
        capture_output=True,
        text=True,
        timeout=RANKS_LIMIT_S,
        env=values,
        check=False,
    )


def test_rows_are_those_of_the_simulator_and_the_terminal_shows_them(files: tuple[str, str], tmp_path: Path) -> None:
    log, add = files
    target = tmp_path / "rows.json"
    done = command(
        *(log, "--compat", "paper2020", "--add-table", add, "--step-s", f"{STEP_S}", "--slowdown", "1000"),
        *("--workers", "2,16", "--link-gbps", "1,10", "--compression", "1,5", "--json", str(target)),
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(target.read_text())
    want = compat2020.sweep(layer_log.read(log), TABLE, STEP_S, Grid((2, 16), (1e9, 10e9), (1.0, 5.0), 1000.0))
    assert [list(row) for row in found] == [ROW] * 8
    assert [compat2020.Prediction(**row) for row in found] == list(want)
    assert "predicted" in done.stdout
    for word in ("1 Gbit/s", "10 Gbit/s", *(f"{100 * row.scaling_factor:.1f} %" for row in want)):
        assert word in done.stdout


def test_compat_defaults_to_the_sweep_of_the_paper(paper1: Path, tmp_path: Path) -> None:
    table = (paper1 / "scaling.csv").read_text(encoding="utf-8").splitlines()
    rows = [row for row in csv.DictReader(table) if row["model"] == "vgg16"]
    target = tmp_path / "rows.json"
    args = ["--compat", "paper2020", "--add-table", f"{paper1}/inputs/cuda_vec_add.log"]
    log = f"{paper1}/inputs/vgg16.bk.log"
    assert main(["what-if", log, *args, "--step-s", rows[0]["batch_t_s"], "--json", str(target)]) == 0
    found = {(row["compression"], row["workers"], row["link_bps"]): row for row in json.loads(target.read_text())}
    assert len(found) == len(rows) == 90
    for row in rows:
        got = found[float(row["compression"]), int(row["N"]), float(row["linkspeed_bps"])]
        assert got["communication_end_s"] == pytest.approx(float(row["bk_coll_time_s"]), rel=0, abs=1e-12)
        assert got["scaling_factor"] == pytest.approx(float(row["scaling_factor"]), rel=0, abs=1e-12)


def test_runs_and_logs_with_a_step_need_no_step_s_option(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, add = files
    target = tmp_path / "rows.json"
    args = ["--compat", "paper2020", "--add-table", add, "--link-gbps", "10", "--workers", "2", "--json", str(target)]
    assert main(["what-if", str(TRACE), *args, "--compression", "1"]) == 0
    (row,) = json.loads(target.read_text())
    assert row["step_s"] - row["overhead_s"] == pytest.approx(0.402, rel=0.01)
    layer_log.write(tmp_path / "model.log", LayerLog("model", LOG.tensors, 0.5))
    assert main(["what-if", str(tmp_path / "model.log"), *args, "--compression", "1"]) == 0
    (row,) = json.loads(target.read_text())
    assert (row["model"], row["step_s"] - row["overhead_s"]) == ("model", pytest.approx(0.5))
    assert "step" in capsys.readouterr().out


def test_a_run_of_one_rank_gives_the_step_of_a_single_device(files: tuple[str, str], tmp_path: Path) -> None:
    run, target = FakeRun(tmp_path / "run", size=1).write(), tmp_path / "rows.json"
    args = ["--compat", "paper2020", "--add-table", files[1], "--link-gbps", "10", "--workers", "2"]
    assert main(["what-if", str(run), *args, "--compression", "1", "--json", str(target)]) == 0
    (row,) = json.loads(target.read_text())
    assert row["step_s"] - row["overhead_s"] == pytest.approx(0.032, rel=0.01)  # its compute


def test_a_run_gives_sentences_tables_and_json_rows(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    done = command(str(TRACE), "--target-scaling", "0.9", "--json", str(target))
    assert (done.returncode, done.stderr) == (0, "")
    output = " ".join(done.stdout.split())
    for expected in (
        "The step of stock took 1849 ms, 1845 ms to 1867 ms (measured).",
        "The model of this run predicts",
        "At the probe's rate, 1.91 Gbit/s, the step would be",
        "With this link, 2.00 Gbit/s, fully used, the step would be",
        "With communication that takes no time, the step would be",
        "does not help: a faster link gains at most 1 % (predicted).",
        "2 workers: a scaling factor of 0.9 needs 2.6",
        "2 workers, a scaling factor of 0.9: no number of streams is enough: at most 7",
        "100000 workers",
        "compression 100x",
        "8 ranks per host",
        "buckets of 25.0 MiB",
        "Horovod, cycle 5.00 ms",
    ):
        assert expected in output
    rows = json.loads(target.read_text())
    kinds = {row["question"] for row in rows}
    assert kinds == {
        *("measured", "now", "achievable", "full use", "overlap", "free", "link", "workers", "ranks per host"),
        *("fusion", "cycle", "compression", "enough link", "least link", "least compression", "least lanes"),
    }
    assert [row["label"] for row in rows] == ["measured"] + ["predicted"] * (len(rows) - 1)
    for row in rows[1:]:
        if "step_s" in row:
            assert set(ROW) <= set(row)
            if row["step_low_s"] is not None:
                assert row["step_low_s"] <= row["step_s"] <= row["step_high_s"]
                assert row["scaling_low"] <= row["scaling_factor"] <= row["scaling_high"]
        elif row["value"] is not None:
            assert row["low"] <= row["value"] <= row["high"]
        else:
            assert row["reason"]
    links = [row["step_s"] for row in rows if row["question"] == "link"]
    assert links == sorted(links, reverse=True)


def test_a_refused_value_is_not_called_unreachable() -> None:
    job = questions.job(Run(TRACE).trace)
    small = replace(job, cost=replace(job.cost, poor="only 4 operations", fitted_bytes=(1, 2)))
    (line,) = report.sentences(sweeps.Answers(small, (), (sweeps.least_link(small, 0.9),)))[-1:]
    assert "a scaling factor of 0.9: not answered: refused to extrapolate a poor fit: only 4 operations" in line


def test_answers_from_a_poor_fit_are_marked() -> None:
    fitted = questions.job(Run(TRACE).trace)
    job = replace(fitted, cost=replace(fitted.cost, poor="half of the operations deviate by 23 %"))
    kinds = ("links", "free")
    rows = [sweeps.answers(job, sweeps.links(job, [1e9])), sweeps.answers(job, [sweeps.free(job)])]
    least = sweeps.enough_link(job)
    assert [own[0].label for own in rows] == ["predicted from a poor fit", "predicted"]
    assert least.label == "predicted from a poor fit"
    shown = Console(file=io.StringIO(), width=80)
    report.show(sweeps.Answers(job, tuple(zip(kinds, rows, strict=True)), (least,)), shown)
    printed = " ".join(shown.file.getvalue().split())
    assert "links (predicted from a poor fit)" in printed
    assert "free (predicted)" in printed
    assert "gains at most 1 % (predicted from a poor fit)." in printed


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ([], "plan: Horovod's fusion, at most 64.0 MiB every 5.00 ms (predicted)"),
        (["--plan", "ddp"], "plan: DDP's buckets of 25.0 MiB (predicted)"),
    ],
)
def test_the_tables_of_a_layer_log_name_the_plan_that_they_assume(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], plan: list[str], words: str
) -> None:
    arguments = ["--step-s", str(STEP_S), "--workers", "4,8", "--link-gbps", "10", *plan]
    assert main(["what-if", files[0], *arguments]) == 0
    assert words in " ".join(capsys.readouterr().out.split())


def test_remarks_follow_the_table_that_they_are_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", str(TRACE), "--target-scaling", "0.9"]) == 0
    output = capsys.readouterr().out
    general, *parts = re.split(r"\n\n(?=[A-Z].*\(predicted\)\n)", output)
    by_title = {part.partition(",")[0].partition(" (")[0]: " ".join(part.split()) for part in parts}
    assert "! encoding and decoding are assumed to take no time: pass" in " ".join(general.split())
    assert "formula of" not in general
    assert "! 4 workers, measured 2: scaled by the formula of ring" in by_title["Other numbers of workers"]
    assert "scaled by the formula of two_level" in by_title["Ranks per host"]
    assert output.count("! encoding and decoding") == 1
    assert "!" not in by_title["Other links"]


def test_grid_rows_follow_the_order_of_the_options(files: tuple[str, str], tmp_path: Path) -> None:
    log, add = files
    target = tmp_path / "rows.json"
    args = ["--step-s", "0.02", "--add-table", add, "--workers", "4,2", "--link-gbps", "1,10", "--compression", "1,3"]
    assert main(["what-if", log, *args, "--ranks-per-host", "1,2", "--json", str(target)]) == 0
    rows = [row for row in json.loads(target.read_text()) if row["question"] == "grid"]
    assert [(row["ranks_per_host"], row["compression"], row["workers"], row["link_bps"]) for row in rows] == [
        (hosts, ratio, workers, gbps * 1e9)
        for hosts in (1, 2)
        for ratio in (1, 3)
        for workers in (4, 2)
        for gbps in (1, 10)
    ]
    assert all(row["step_low_s"] is None for row in rows)
    whole = [row["overhead_s"] for row in rows if row["ranks_per_host"] == 2 and row["workers"] == 2]
    assert max(whole) < 0.001 < min(row["overhead_s"] for row in rows if (row["workers"], row["link_bps"]) == (4, 1e9))


@pytest.mark.parametrize("links", ["10", "1,10,40,100"])
def test_products_of_values_have_intervals_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], links: str
) -> None:
    target = tmp_path / "rows.json"
    assert main(["what-if", str(TRACE), "--workers", "2,16", "--link-gbps", links, "--json", str(target)]) == 0
    output = capsys.readouterr().out
    rows = [row for row in json.loads(target.read_text()) if row["question"] == "grid"]
    assert len(rows) == 2 * len(links.split(","))
    for row in rows:
        value, low, high = (100 * row[name] for name in ("scaling_factor", "scaling_low", "scaling_high"))
        assert f"{value:.1f} %" in output
        assert f"({low:.1f}-{high:.1f})" in output
    assert output.count("intervals in brackets (predicted)") == (1 if links == "10" else 2)


def test_codec_time_is_included_if_its_rate_is_given(files: tuple[str, str], tmp_path: Path) -> None:
    log, _ = files
    target = tmp_path / "rows.json"
    args = ["what-if", log, "--step-s", "0.02", "--workers", "4", "--link-gbps", "1", "--compression", "4"]
    steps = []
    for more in ([], ["--codec-gbytes", "10"]):
        assert main([*args, *more, "--json", str(target)]) == 0
        steps.append(json.loads(target.read_text())[0]["step_s"])
    assert steps[1] - steps[0] == pytest.approx(2 * LOG.bytes / 10e9, rel=0.25)


def rows_of(target: Path, *words: str) -> list[dict[str, object]]:
    assert main(["what-if", *words, "--json", str(target)]) == 0
    return json.loads(target.read_text())  # type: ignore[no-any-return]


def test_a_chosen_plan_or_algorithm_leaves_the_recorded_run_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def own(*words: str) -> dict[str, dict[str, object]]:
        rows = rows_of(tmp_path / "rows.json", str(TRACE), "--workers", "2", *words)
        return {str(row["question"]): row for row in rows}

    recorded = own()
    assert "chosen" not in recorded
    chosen = own("--plan", "horovod", "--algorithm", "tree")
    assert chosen["now"] == {**recorded["now"], "notes": chosen["now"]["notes"]}
    assert (chosen["chosen"]["plan"], chosen["chosen"]["algorithm"]) == ("horovod", "tree")
    assert chosen["chosen"]["step_s"] != chosen["now"]["step_s"]
    assert chosen["free"]["plan"] == "horovod"
    output = " ".join(capsys.readouterr().out.split())
    assert "With the plan horovod and the algorithm tree, the step would be" in output


def test_operations_of_a_chosen_plan_share_the_link_as_those_of_the_run() -> None:
    source = what_if.load(TRACE)
    args = what_if.parser().parse_args([str(TRACE), "--plan", "ddp"])
    recorded = what_if.make_job(args, source)
    job, name = what_if.with_choices(args, recorded)
    assert (job.plan.rule, job.plan.in_flight, name) == ("ddp", recorded.plan.in_flight, "the plan ddp")
    assert recorded.fit is not None
    assert recorded.plan.in_flight == recorded.fit.in_flight


def test_sweeps_of_plans_are_at_the_named_workers_links_and_ratios(tmp_path: Path) -> None:
    words = [str(TRACE), "--fusion-mib", "5,25", "--cycle-ms", "5"]
    named = ["--workers", "4,8", "--link-gbps", "10", "--compression", "4", "--ranks-per-host", "2"]
    kinds = ("fusion", "cycle")
    plain = [row for row in rows_of(tmp_path / "a.json", *words) if row["question"] in kinds]
    rows = [row for row in rows_of(tmp_path / "b.json", *words, *named) if row["question"] in kinds]
    assert [(row["workers"], row["question"]) for row in rows] == [
        (workers, kind) for workers in (4, 8) for kind in ("fusion", "fusion", "cycle")
    ]
    for row in rows:
        assert (row["link_bps"], row["compression"], row["ranks_per_host"]) == (10e9, 4, 2)
        assert "encoding and decoding are assumed to take no time" in row["notes"]  # type: ignore[operator]
    assert all((row["workers"], row["compression"], row["ranks_per_host"]) == (2, 1, 1) for row in plain)


@pytest.fixture
def flat_ring(tmp_path: Path) -> str:
    """A run of 8 ranks on 2 hosts, whose ring has no levels, as gloo's."""
    trace = trace_of(SimulatedJob(ranks=8, ranks_per_host=4, link_bps=1e9, flow_bps=1e12))
    tr.write(trace, tmp_path / "ring.jsonl.gz")
    return str(tmp_path / "ring.jsonl.gz")


def test_a_ring_over_hosts_of_several_ranks_stays_one_in_every_sweep(flat_ring: str, tmp_path: Path) -> None:
    now = next(row for row in rows_of(tmp_path / "0.json", flat_ring) if row["question"] == "now")
    for words in (["--workers", "8"], ["--link-gbps", "1"], ["--compression", "1"], ["--ranks-per-host", "4"]):
        *_, row = (row for row in rows_of(tmp_path / "1.json", flat_ring, *words) if "step_s" in row)
        assert (row["algorithm"], row["ranks_per_host"]) == ("ring", 4)
        assert row["step_s"] == pytest.approx(now["step_s"], rel=0.001)
    assert {row["algorithm"] for row in rows_of(tmp_path / "2.json", flat_ring) if "algorithm" in row} == {"ring"}


def test_the_least_link_is_the_same_with_and_without_a_sweep(flat_ring: str, tmp_path: Path) -> None:
    words = [flat_ring, "--target-scaling", "0.6"]
    plain, swept = (rows_of(tmp_path / "rows.json", *words, *more) for more in ([], ["--workers", "8"]))
    assert [row for row in plain if "aim" in row] == [row for row in swept if "aim" in row]


@pytest.mark.parametrize(("words", "algorithm"), [([], "two_level"), (["--algorithm", "ring"], "ring")])
def test_a_ring_of_one_rank_a_host_becomes_two_level_unless_it_is_asked_for(
    words: list[str], algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "2 ranks per host" + (", two levels" if algorithm == "two_level" else "")
    asked = [str(TRACE), "--ranks-per-host", "2", *words]
    (row,) = (row for row in rows_of(tmp_path / "rows.json", *asked) if row["question"] == "ranks per host")
    assert (row["algorithm"], row["setting"]) == (algorithm, name)
    capsys.readouterr()
    *_, row = rows_of(tmp_path / "rows.json", *asked, "--workers", "8", "--fusion-mib", "25")[:-1]
    assert (row["algorithm"], row["workers"], row["question"]) == (algorithm, 8, "fusion")
    output = capsys.readouterr().out
    assert f"Workers, link at the achieved rate, {name} (predicted)" in output
    assert f"DDP bucket size, 8 workers, {name} (predicted)" in output


def test_rows_of_a_grid_say_that_the_codec_is_free(files: tuple[str, str], tmp_path: Path) -> None:
    log = ["--step-s", "0.02", "--workers", "4", "--link-gbps", "1"]
    for words in ([files[0], *log], [str(TRACE), "--workers", "4"], [str(TRACE), "--link-gbps", "10"]):
        for more, free in ([], True), (["--codec-gbytes", "10"], False):
            rows = rows_of(tmp_path / "rows.json", *words, "--compression", "1,4", *more)
            said = {
                row["compression"]: "encoding and decoding are assumed to take no time" in row["notes"]  # type: ignore[operator]
                for row in rows
                if row["question"] in ("grid", "workers")
            }
            assert said == {1: False, 4: free}


def bad_inputs() -> list[tuple[list[str], str]]:
    compat_ = ["--compat", "paper2020"]
    add = ["--add-table", "{add}"]
    return [
        (["{log}", *compat_, *add], "does not record the step of a single device: pass its seconds as --step-s"),
        (["{log}", *compat_], "needs --add-table FILE"),
        (["{log}", "--compat", "paper2019"], "paper2019"),
        (["{log}", *compat_, *add, "--step-s", "0"], "--step-s: '0': must be a number from 1e-09"),
        (["{log}", *compat_, *add, "--step-s", "nan"], "--step-s: 'nan'"),
        (["{log}", *compat_, *add, "--workers", "16,0"], "--workers: '0': must be a whole number from 1 to 10000000"),
        (["{log}", *compat_, *add, "--workers", "2.5"], "--workers: '2.5'"),
        (["{log}", *compat_, *add, "--workers", ""], "--workers: ''"),
        (["{log}", *compat_, *add, "--link-gbps", "0"], "--link-gbps: '0': must be a number"),
        (["{log}", *compat_, *add, "--link-gbps=-10"], "--link-gbps: '-10'"),
        (["{log}", *compat_, *add, "--compression", "1,x"], "--compression: 'x'"),
        (["{log}", *compat_, *add, "--slowdown", "-1"], "--slowdown"),
        (["{log}", *compat_, *add, "--step-s", "1", "--target-scaling", "0.9"], "--target-scaling cannot be combined"),
        (["{log}", "--step-s", "1", "--slowdown", "10"], "--slowdown 10 needs --compat paper2020"),
        (["{log}"], "small.bk.log does not record the step of a single device"),
        (["{log}", "--step-s", "0.001"], "a step of 0.001 s, but 0.0075 s of backward pass"),
        (["{log}", "--step-s", "1", "--target-scaling", "1"], "--target-scaling: '1': must be a number from 0.001"),
        (["{log}", "--step-s", "1", "--fusion-mib", "5"], "need --workers and --link-gbps"),
        (["{log}", "--step-s", "1", "--transport", "ofi"], "--transport: {log} records no network"),
        (["{log}", "--step-s", "1", "--this-link-gbps", "1"], "--this-link-gbps: {log} records no network"),
        (["{log}", *compat_, *add, "--step-s", "1", "--this-link-gbps", "1"], "--this-link-gbps cannot be combined"),
        (["{log}", "--step-s", "1", "--ranks-per-host", "0"], "--ranks-per-host: '0'"),
        ([str(TRACE), "--transport", "nccl"], "no all-reduce over nccl"),
        (["{newer}"], "{newer}, line 1: trace version 99"),
        (["{torn}"], "{torn}, line"),
        (["{log}", *compat_, *add, "--speed", "9"], "unrecognized arguments: --speed 9"),
        ([*compat_, *add], "required: INPUT"),
        (["{folder}/none.bk.log", *compat_, *add], "no such file or folder: {folder}/none.bk.log"),
        (["{log}", *compat_, "--add-table", "{folder}/none.log"], "no such file or folder: {folder}/none.log"),
        (["{log}", *compat_, "--add-table", "{folder}"], "is a folder, not a file: {folder}"),
        (["{folder}", *compat_, *add], "{folder}: no run.json here; give the folder of a run"),
        (["{add}", *compat_, *add], "{add}, line 2: number of batches '1048576,1.2e-05': must be a whole number"),
        (["{log}", *compat_, "--add-table", "{log}", "--step-s", "1"], "{log}, line 1: 'netbottleneck layer log"),
        (["{cut}", *compat_, *add], "{cut}, line 6: the last line has no end"),
        (["{torn}", *compat_, *add], "{torn}, line"),
        (["{newer}", *compat_, *add], "{newer}, line 1: trace version 99; this netbottleneck reads versions 1 to 3"),
    ]


@pytest.mark.parametrize(("args", "message"), bad_inputs())
def test_bad_input_is_one_line_and_exit_code_2_and_nothing_is_overwritten(
    args: list[str], message: str, files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, add = files
    names = {"log": log, "add": add, "folder": str(tmp_path)}
    names |= {name: str(tmp_path / f"{name}.jsonl.gz") for name in ("torn", "newer")} | {"cut": f"{tmp_path}/cut.log"}
    Path(names["cut"]).write_bytes(Path(log).read_bytes()[:-20])
    Path(names["torn"]).write_bytes(TRACE.read_bytes()[:5000])
    with gzip.open(names["newer"], "wt") as file:
        file.write('{"format": "netbottleneck-trace", "version": 99}\n')
    kept = tmp_path / "kept.json"
    kept.write_text("precious")
    before = sorted(tmp_path.iterdir())
    try:
        code: object = main(["what-if", *(word.format(**names) for word in args), "--json", str(kept)])
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith("netbottleneck what-if: ")
    assert captured.err.count("\n") == 1
    assert message.format(**names) in captured.err
    assert kept.read_text() == "precious"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("was", "becomes", "message"),
    [
        ('"begin_ns":', '"begin_ns":"soon","x":', "'soon' where int must be"),
        ('"grad_ready":[[', '"grad_ready":[[4000,5],[', "has a gradient 4000; there are 4"),
        ('"bytes":1048576', '"bytes":-1', "parameter conv1.weight has -1 bytes"),
        ('"bytes":1048576', f'"bytes":{1 << 62}', f"parameter conv1.weight has {1 << 62} bytes: must be from 0 to"),
        ('"size":2', '"size":0', "a run of 0 ranks"),
        ('{"step":{"rank":0,"index":1,', '{"step":{"rank":,', "line"),
    ],
)
def test_an_edited_trace_gives_one_error_line(
    was: str, becomes: str, message: str, files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with gzip.open(Path(__file__).parent / "data" / "synthetic.jsonl.gz", "rt") as whole:
        text = whole.read()
    assert was in text
    path = tmp_path / "damaged.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(text.replace(was, becomes))
    for args in ([], ["--compat", "paper2020", "--add-table", files[1]]):
        assert main(["what-if", str(path), *args]) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1)
        assert str(path) in captured.err
        assert message in captured.err


def test_a_randomly_damaged_file_gives_an_answer_or_one_error_line(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(7)
    with gzip.open(Path(__file__).parent / "data" / "synthetic.jsonl.gz", "rb") as file:
        run = file.read()
    ends = set()
    for turn in range(60):
        text = bytearray(run if turn % 2 else Path(files[0]).read_bytes())
        for _ in range(draw.randrange(1, 4)):
            text[draw.randrange(len(text))] = draw.choice(b'0123456789-,:"[]{}.e')
        path = tmp_path / ("a.jsonl.gz" if turn % 2 else "a.bk.log")
        path.write_bytes(gzip.compress(text, 1) if turn % 2 else text)
        code = main(["what-if", str(path), "--step-s", "0.02", "--workers", "4", "--link-gbps", "1"])
        ends.add(code)
        assert capsys.readouterr().err.count("\n") == (1 if code == 2 else 0)
    assert ends == {0, 2}


def test_values_of_a_log_are_refused_for_a_run_and_those_of_a_run_for_a_log(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(FakeRun(tmp_path / "run", transports=("stock",), blocks=1, block_steps=10).write())
    assert main(["what-if", run, "--step-s", "9"]) == 2
    assert "has its own step" in capsys.readouterr().err
    assert main(["what-if", files[0], "--step-s", str(STEP_S), "--plan", "recorded"]) == 2
    assert "--plan recorded: " in capsys.readouterr().err


def test_a_run_of_one_rank_keeps_its_recorded_buckets(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "one", size=1, transports=("stock",), blocks=1, block_steps=10).write()
    for words in ([], ["--plan", "recorded"]):
        job = what_if.make_job(what_if.parser().parse_args([str(run), *words]), what_if.load(run))
        assert job.plan.rule == "explicit"
    job = what_if.make_job(what_if.parser().parse_args([str(run), "--plan", "horovod"]), what_if.load(run))
    assert job.plan.rule != "explicit"


RATED = {"run": {"network": None}, "blocks": 1, "block_steps": 12, "transports": ("stock",)}


def full_use(run: FakeRun, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str | None, bool]:
    """Return the link that the answer calls fully used, and whether it asks for the speed of the link."""
    assert main(["what-if", str(run.write()), "--workers", "4", *words]) == 0
    output = " ".join(capsys.readouterr().out.split())
    found = re.search(r"With this link, (.*?), fully used", output)
    return found and found[1], "pass --this-link-gbps X" in output


@pytest.mark.parametrize(
    ("meta", "transfer_ms", "link"),
    [
        ({}, (35, 123), "1.00 Gbit/s"),
        ({"host_id": "one"}, (35, 123), None),  # the ranks share a host
        ({}, (3, 3), None),  # more moved than the interface states
    ],
)
def test_the_link_of_a_run_is_the_one_that_its_report_believes(
    meta: dict[str, str],
    transfer_ms: tuple[int, int],
    link: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    about = {"stock": {"interface": "eth0", "link_bps": 10**9}}
    run = FakeRun(tmp_path, meta=meta, about=about, transfer_ms={"stock": transfer_ms}, **RATED)
    assert full_use(run, capsys) == (link, link is None)
    assert Run(run.folder).findings.link_bps == (1e9 if link else None)
    assert full_use(run, capsys, "--this-link-gbps", "25") == ("25.0 Gbit/s", False)


@pytest.mark.parametrize(("gbps", "too_slow"), [("0.01", True), ("25", False)])
def test_a_link_that_is_slower_than_what_moved_is_a_remark(
    gbps: str, too_slow: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun(tmp_path, transfer_ms={"stock": (35, 123)}, **RATED)
    assert main(["what-if", str(run.write()), "--workers", "4", "--this-link-gbps", gbps]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert (
        re.search(f"! --this-link-gbps {gbps}: the run moved .* Gbit/s over the mean step", output) is not None
    ) == (too_slow)


def test_a_run_that_moved_more_than_its_link_reaches_what_full_use_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(FakeRun(tmp_path / "run", transfer_ms={"stock": (35, 123)}, **RATED).write())
    step = questions.answer(job := questions.job(Run(run).trace, "stock"), sweeps.now(job))
    assert step.scaling is not None
    # The link's rate: above what moved over the mean step, and below what moved in transfer.
    moved = Run(run).findings.achieved["stock"]
    gbps = (moved.active_bps + moved.average_bps) / 2e9
    aim = f"{step.scaling.value - 1e-4:.4f}"
    words = ["what-if", run, "--target-scaling", aim, "--this-link-gbps", f"{gbps:.4f}"]
    assert main([*words, "--json", f"{tmp_path}/rows.json"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"! --this-link-gbps {gbps:.4g}" in output
    assert "Gbit/s in transfer, more than that, such as in bursts after a pause" in output
    reached = f"a scaling factor of {aim} is reached as recorded, at {100 * step.scaling.value:.1f} %"
    assert f"{reached}: no faster link is needed (predicted)" in output
    rows = {row["question"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert (rows["least link"]["value"], rows["least link"]["reason"][:19]) == (None, "reached as recorded")
    # An aim that full use of the link reaches has its least link.
    assert main(["what-if", run, "--target-scaling", "0.01", "--this-link-gbps", f"{gbps:.4f}"]) == 0
    assert "a scaling factor of 0.01 is reached" not in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("transfer_ms", "link"), [((9, 31), "10.0 Gbit/s"), ((3, 3), None)])
def test_the_link_of_a_transport_is_that_of_its_own_interface(
    transfer_ms: tuple[int, int], link: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"stock": {"interface": "eth0", "link_bps": 10**9}}
    about["tcp"] = {"interface": "eth1", "link_bps": 10**10 if link else 10**9}
    settings = {**RATED, "transports": ("stock", "tcp"), "blocks": 4}
    run = FakeRun(tmp_path, about=about, transfer_ms={"stock": (35, 123), "tcp": transfer_ms}, **settings)
    assert full_use(run, capsys) == ("1.00 Gbit/s", False)
    assert full_use(run, capsys, "--transport", "tcp") == (link, link is None)


def test_a_run_folder_and_its_trace_are_both_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = FakeRun(tmp_path / "run")
    run.write()
    outputs = []
    for path in (run.folder, TRACE):
        assert main(["what-if", str(path), "--workers", "2,8"]) == 0
        outputs.append(capsys.readouterr().out)
    assert all("8 workers" in text and "(measured)" in text for text in outputs)


def test_an_output_that_fails_is_no_bad_input(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, blocks=4).write()
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "netbottleneck", "what-if", str(run)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "netbottleneck: No space left on device\n")


def test_json_may_be_a_pipe_or_a_link_which_stay(files: tuple[str, str], tmp_path: Path) -> None:
    log, _ = files
    rows, link, pipe = tmp_path / "rows.json", tmp_path / "link", tmp_path / "pipe"
    rows.write_text("old")
    rows.chmod(0o640)
    link.symlink_to(rows)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for target in (link, pipe):
            words = ("--workers", "2", "--link-gbps", "1", "--compression", "1")
            assert main(["what-if", log, "--step-s", "1", *words, "--json", str(target)]) == 0
        assert json.loads(os.read(reader, 1 << 16)) == json.loads(rows.read_text())
    finally:
        os.close(reader)
    assert link.is_symlink()
    assert pipe.is_fifo()
    assert rows.stat().st_mode & 0o777 == 0o640


def test_json_must_be_a_writable_file_other_than_the_input(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, add = files
    args = ["what-if", log, "--compat", "paper2020", "--add-table", add, "--step-s", "1"]
    for target in (log, add, str(tmp_path), str(tmp_path / "none" / "rows.json")):
        assert main([*args, "--json", target]) == 2
        assert f"--json {target}: " in capsys.readouterr().err
    assert layer_log.read(log) == layer_log.read(log)
    assert layer_log.read_table(add) == TABLE


def test_damaged_records_are_named_beside_the_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = FakeRun(tmp_path, size=2, blocks=6, transports=("stock", "tcp")).write()
    damaged = tmp_path / "ranks" / "1.tcp.ring"
    assert damaged.exists()
    damaged.write_bytes(b"")
    assert main(["what-if", str(folder)]) == 0
    assert str(damaged) in "".join(capsys.readouterr().out.split("\n"))
