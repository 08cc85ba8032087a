"""The report of a run: text, files, schema, and omission of unknown values.

data/report.txt is Run("data/synthetic.jsonl.gz").text, looked through by hand.
"""

import csv
import errno
import io
import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console

from chromecheck import overlaps
from netbottleneck import report
from netbottleneck.analysis import findings, intervals, rule_facts, verdict
from netbottleneck.report import Run, caveats, compare, html, summary, text
from netbottleneck.report import text as terminal
from netbottleneck.trace import model as tr
from netbottleneck.trace import ring_reader
from netbottleneck.trace.run_steps import RunSteps
from netbottleneck.trace.transports import STOCK, Arm
from netbottleneck.units import listed
from ringwriter import MS, FakeRun

sys.path.insert(0, str(Path(__file__).parents[1] / "scenarios"))

from scenario.job import Job, trace_of

DATA = Path(__file__).parent / "data"


@pytest.fixture
def run(tmp_path):
    return Run(FakeRun(tmp_path / "run", blocks=9).write())


def check_schema(value):
    jsonschema.validate(json.loads(json.dumps(value)), summary.schema(), cls=jsonschema.Draft202012Validator)


def test_the_stored_trace_makes_the_stored_report():
    assert Run(DATA / "synthetic.jsonl.gz").text == (DATA / "report.txt").read_text()


def test_the_report_opens_with_the_sentence_and_ends_with_the_verdict(run):
    flat = " ".join(run.text.split())
    assert flat.startswith(
        "Of your 175 ms step, 143 ms is exposed communication (measured). The stock path moved data at 0.48 Gbit/s in "
        "transfer, 0.43 Gbit/s over the step (measured); these hosts can do 1.90 Gbit/s with 4 streams (measured). "
        "At full use the step would be 63.1 ms (predicted). With ofi the step is 64 % shorter, 64 % to 64 % "
        "(measured)."
    )
    assert flat.index("Verdict: TRANSPORT_LIMITED") < flat.index("Why:") < flat.index("Next:")


def test_every_number_of_the_opening_sentence_is_labelled(run):
    for sentence in text.sentences(run.findings):
        assert sentence.endswith(("(measured).", "(predicted)."))


@pytest.mark.parametrize(
    ("probe_bytes", "expected"),
    [
        ((1_000_000, 1_200_000), "a probe of these hosts found nothing faster (measured)."),
        ((5_950_000, 6_100_000), "these hosts can do 0.49 Gbit/s with 4 streams (measured)."),
    ],
)
def test_a_probe_that_is_slower_than_the_run_is_not_what_the_hosts_can_do(tmp_path, probe_bytes, expected):
    one, four = probe_bytes
    probe = [[1, one, 100 * MS], [4, four, 100 * MS]]
    run = Run(FakeRun(tmp_path, blocks=9, probe=probe, transfer_ms={"ofi": (35, 123)}).write())
    moved = text.sentences(run.findings)[1]
    assert moved.startswith("The stock path moved data at 0.48 Gbit/s in transfer")
    assert moved.endswith(f"(measured); {expected}")


def test_an_arm_that_is_faster_than_the_probe_is_what_the_hosts_can_do(tmp_path):
    probe = [[1, 6_000_000, 100 * MS], [4, 20_000_000, 100 * MS]]
    run = Run(FakeRun(tmp_path, blocks=9, probe=probe).write())
    found, full_use = run.findings, run.verdict.full_use
    assert text.sentences(found)[1].endswith("; these hosts can do 1.89 Gbit/s over ofi (measured).")
    assert found.achievable.bps == found.achieved["ofi"].active_bps
    saved_ns = found.parts["stock"].exposed_ns - found.parts["ofi"].exposed_ns
    assert found.parts["stock"].step_ns - full_use.step_ns == pytest.approx(saved_ns, rel=0.05)
    slower_link = replace(found.trace, network=replace(found.trace.network, link_bps=1.8e9))
    assert findings.find(slower_link).achievable.faster is None  # a burst, which is not a rate


def test_a_run_without_a_base_has_no_differences(tmp_path):
    run = Run(FakeRun(tmp_path, blocks=3, transports=("bare",)).write())
    assert "Step by transport (measured)" in run.text
    for shown in (run.text, run.html):
        assert "difference to" not in shown
        assert "paired by block" not in shown


def test_a_comparison_that_single_long_steps_change_says_so(run):
    found = run.findings
    pairs = tuple(replace(pair, note="by mean steps") for pair in found.comparisons)
    said = caveats.warnings(replace(found, comparisons=pairs, handicap=replace(found.handicap, note="by mean steps")))
    assert {"comparison with ofi: by mean steps.", "comparison with bare: by mean steps."} <= set(said)
    assert not any("mean steps" in line for line in caveats.warnings(found))


def test_lost_lanes_of_one_pair_of_ranks_form_one_line(run):
    lost = [tr.Fault(0, "lane_lost", n, (1,), lane=n) for n in (0, 3)]
    faults = (*lost, tr.Fault(1, "peer_lost", 5, (0,)), tr.Fault(1, "lane_lost", 6, (0,), lane=2))
    found = replace(run.findings, trace=replace(run.findings.trace, faults=faults))
    assert [line for line in caveats.warnings(found) if "lost" in line] == [
        "rank 1: peer lost, rank 0",
        "rank 0: lanes 0, 3 to rank 1 were lost; their segments went over the other lanes.",
        "rank 1: lane 2 to rank 0 was lost; its segments went over the other lanes.",
    ]


@pytest.mark.parametrize("first", [False, True])
def test_what_single_steps_add_is_in_the_opening_sentences(first):
    """Also if they are the first ones of blocks, which do not count."""
    trace = trace_of(Job(saves_ms={0: 2000.0}, every=10, blocks=6, block_steps=10))
    steps = [replace(step, block=(step.index + first) // 10) for step in trace.steps]
    found = findings.find(replace(trace, steps=tuple(steps)))
    assert found.parts[STOCK].checkpoint_ns == 0
    (line,) = [one for one in text.sentences(found) if "Single" in one]
    assert line.startswith("Single steps are much longer: the mean of all recorded steps is 293 ms, with 100")
    assert " ms more checkpoints" in line
    assert " ms more exposed communication (most of it waiting for the slowest rank)" in line
    assert line.endswith(" (measured).")
    assert not any("Single" in one for one in text.sentences(findings.find(trace_of(Job(blocks=6)))))


def test_the_mean_of_a_run_that_is_longer_than_its_record_is_that_of_the_steps_in_detail():
    trace = trace_of(Job(saves_ms={0: 2000.0}, every=10, blocks=6, block_steps=10))
    ranks = tuple(replace(rank, run_steps=(RunSteps(0, 9000, 9000 * MS, MS, 0),)) for rank in trace.ranks)
    (line,) = [one for one in text.sentences(findings.find(replace(trace, ranks=ranks))) if "Single" in one]
    assert line.startswith("Single steps are much longer: the mean of the steps recorded in detail is 293 ms, with 100")


def test_what_falls_into_steps_of_the_untouched_script_is_in_the_opening_sentences():
    job = Job(arms=("stock", "bare"), saves_ms={0: 2000.0, 1: 2000.0}, every=30, blocks=4, block_steps=10)
    plain, trace = trace_of(replace(job, saves_ms={})), trace_of(job)
    assert {step.arm for step in trace.steps if step.duration_ns > 1000 * MS} == {"bare"}
    (line,) = [one for one in text.sentences(findings.find(trace)) if "Single" in one]
    assert line.startswith("Single steps are much longer: the mean of all recorded steps is 143 ms (measured). Most of")
    assert line.endswith("steps of the untouched script (bare), whose parts are not known.")
    assert not any("Single" in one for one in text.sentences(findings.find(plain)))


def test_stock_with_too_few_steps_is_not_the_base_where_another_transport_has_enough():
    """An automatic run may leave stock after a block."""
    trace = trace_of(Job(arms=("stock", "tcp"), blocks=3))
    left = [step for step in trace.steps if step.arm != STOCK or step.index < 3]
    assert findings.find(trace).base == STOCK
    assert findings.find(replace(trace, steps=tuple(left))).base == "tcp"
    few = [step for step in left if step.arm == STOCK]
    assert findings.find(replace(trace, steps=tuple(few))).base == STOCK


def test_a_large_part_of_each_step_is_in_the_opening_sentences():
    found = findings.find(trace_of(Job(saves_ms=dict.fromkeys(range(2), 50.0))))
    assert "50.0 ms of the step go to checkpoints (measured)." in text.sentences(found)


def test_unknown_values_are_left_out_of_the_sentence(tmp_path):
    found = Run(FakeRun(tmp_path, transports=("stock",), blocks=2, run={"network": None}).write())
    assert "can do" not in found.text
    assert "At full use" not in found.text
    assert "of link" not in found.text
    assert found.summary["probe"] is None
    assert found.summary["predicted"] is None
    assert found.summary["bandwidth"]["stock"]["active_utilization"] is None
    assert found.summary["bandwidth"]["stock"]["wire_bits_per_s"] is None


COSTS = (29_812_000_000, 412_345, 50_000)


@pytest.mark.parametrize(
    ("costs_fs", "more", "two_level_s", "two_level_byte_s"),
    [
        (COSTS, "", None, None),
        (
            (*COSTS, 81_500_000_000, 25_000),
            ", two levels add 81.5 us and 0.025 ns a byte",
            81.5e-6,
            2.5e-11,
        ),
    ],
)
def test_costs_of_a_transport_are_one_line(tmp_path, costs_fs, more, two_level_s, two_level_byte_s):
    found = Run(FakeRun(tmp_path, transports=("stock", "tcp"), blocks=2, costs_fs=costs_fs).write())
    line = f"Costs over tcp (measured): a step 29.8 us, a byte on the wire 0.412 ns, a byte added 0.05 ns{more}."
    assert line in " ".join(found.text.split())
    assert line in html.page(found.findings, found.verdict)
    (costs,) = found.summary["costs"].values()
    known = {"step_s": 29.812e-6, "byte_s": 0.412345e-9, "added_byte_s": 0.05e-9}
    assert costs == pytest.approx({**known, "two_level_s": two_level_s, "two_level_byte_s": two_level_byte_s})
    check_schema(found.summary)


def test_all_reduce_algorithms_are_listed_by_size(run):
    line = "All-reduces over ofi (measured): ring 2.0 MiB to 7.0 MiB x36."
    assert line in " ".join(run.text.split())
    assert line in html.page(run.findings, run.verdict)
    (row,) = run.summary["algorithms"]["ofi"]
    assert (row["algorithm"], row["operations"]) == ("ring all-reduce", 36)
    assert "over stock" not in " ".join(text.algorithms(run.findings))
    assert run.summary["costs"] == {}


@pytest.mark.parametrize(
    ("link_bps", "burst_bytes", "expected"), [(1e6, 10**6, True), (1e6, None, False), (9e12, 1, False)]
)
def test_data_that_moved_faster_than_the_link_is_explained_by_the_cap(tmp_path, link_bps, burst_bytes, expected):
    verified = {"many_flows": {"link_burst_bytes": burst_bytes}}
    network = {"how": "a lab", "link_bps": link_bps, "flow_bps": [], "verified": verified}
    found = Run(FakeRun(tmp_path, blocks=2, run={"network": network}).write())
    line = "stock moved data faster than the link: after a pause its cap passes a burst of 976.6 KiB."
    assert (line in " ".join(found.text.split())) == expected
    assert (line in html.page(found.findings, found.verdict)) == expected
    assert ("moved data faster than the link" in found.text) == expected


@pytest.mark.parametrize(
    ("transports", "streams_asked", "words_of_it"),
    [
        (("bare", "stock"), None, "not probed (transport stock only)"),
        (("stock", "ofi"), 4, "not probed (streams fixed by NETBOTTLENECK_STREAMS=4)"),
        (("tcp",), 4, "not probed (streams fixed by NETBOTTLENECK_STREAMS=4)"),
        (("stock", "ofi"), 0, "not probed (no transfer was large enough, and smaller ones took less than 10 s)"),
        (("stock", "ofi"), None, "not probed (the record gives no reason)"),
    ],
)
def test_a_missing_probe_is_reported_with_its_reason(tmp_path, transports, streams_asked, words_of_it):
    about = {name: {"streams_asked": streams_asked} for name in transports if name in ("tcp", "ofi")}
    found = Run(FakeRun(tmp_path, transports=transports, blocks=2, probe=[], about=about).write())
    assert words_of_it in " ".join(found.text.split())
    assert words_of_it in html.page(found.findings, found.verdict)


def test_shared_memory_is_given_as_the_reason_for_a_missing_probe(tmp_path):
    about = {"tcp": {"streams_asked": 4, "shm": "on"}}
    found = Run(FakeRun(tmp_path, transports=("stock", "tcp"), blocks=2, probe=[], about=about).write())
    assert "not probed (the ranks of one host shared memory; with NETBOTTLENECK_SHM=0" in " ".join(found.text.split())
    assert found.summary["ranks"][0]["transports"][1]["shm"] == "on"
    check_schema(found.summary)


def rated(folder, bps, **settings):
    about = {"stock": {"interface": "eth0", "link_bps": bps}}
    return Run(FakeRun(folder, transports=("stock",), blocks=2, run={"network": None}, about=about, **settings).write())


def test_the_interface_rating_is_reported_as_the_link(tmp_path):
    found = rated(tmp_path / "known", 10**9)
    (row,) = found.summary["ranks"][1]["transports"]
    assert (row["interface"], row["link_bits_per_s"]) == ("eth0", 10**9)
    achieved = found.findings.achieved["stock"].active_bps
    assert found.summary["bandwidth"]["stock"]["active_utilization"] == pytest.approx(achieved / 1e9)
    assert "the link is 1.00 Gbit/s, as its interface states or as declared" in " ".join(found.text.split())
    check_schema(found.summary)
    unknown = rated(tmp_path / "unknown", None)
    assert "link unknown" in unknown.text
    assert unknown.summary["ranks"][1]["transports"][0]["link_bits_per_s"] is None


def test_ranks_of_one_host_are_not_compared_with_its_interface(tmp_path):
    assert rated(tmp_path, 10**9, meta={"host_id": "one"}).findings.link_bps is None


def test_a_configured_link_takes_precedence_over_the_interface_rating(tmp_path):
    about = {"stock": {"interface": "eth0", "link_bps": 10**11}}
    assert Run(FakeRun(tmp_path, blocks=3, about=about).write()).findings.link_bps == 2e9


def test_active_and_average_utilisation_share_a_cell(run):
    for found in run.summary["bandwidth"].values():
        assert found["active_utilization"] >= found["average_utilization"] > 0
    assert "24 %, 22 %" in run.text


def test_no_line_is_wider_than_80_columns(run):
    assert max(map(len, run.text.splitlines())) <= 80
    assert not any(line != line.rstrip() for line in run.text.splitlines())


def test_a_pipe_gets_no_escape_codes_and_no_color_is_obeyed(run, monkeypatch):
    pipe = Console(file=io.StringIO())
    run.show(pipe)
    assert "\x1b" not in pipe.file.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Console(file=io.StringIO(), force_terminal=True, width=200)
    run.show(screen)
    assert "\x1b[3" not in screen.file.getvalue()
    monkeypatch.delenv("NO_COLOR")
    screen = Console(file=io.StringIO(), force_terminal=True, width=200, color_system="standard")
    run.show(screen)
    assert "\x1b[3" in screen.file.getvalue()


def test_names_of_layers_are_not_taken_for_markup(run):
    renamed = tuple(replace(p, name=f"[red]{p.name}") for p in run.trace.parameters)
    found = findings.find(replace(run.trace, parameters=renamed))
    assert "[red]layer1" in terminal.text(found, verdict.decide(found))


def test_text_of_a_run_is_not_taken_for_an_emoji(run, capsys):
    found = findings.find(replace(run.trace, model=":100: net", notes=("left out: ::a:b",)))
    assert ":100: net" in " ".join(terminal.text(found, verdict.decide(found)).split())
    terminal.show(found, verdict.decide(found))
    compare.show(compare.Comparison((), {}, missing=(":100: only in A",)))
    shown = capsys.readouterr().out
    assert ":100: net" in " ".join(shown.split())
    assert "! left out: ::a:b" in shown
    assert "! :100: only in A" in shown


def test_the_parts_in_the_summary_add_up_to_the_step(run):
    for parts in run.summary["split"].values():
        added = parts["compute_s"] + parts["exposed_communication_s"] + parts["wait_s"] + parts["other_s"]
        assert added == pytest.approx(parts["step_s"], rel=1e-9)
    exposed = sum(layer["exposed_communication_s"] for layer in run.summary["layers"])
    assert exposed == pytest.approx(run.summary["split"]["stock"]["exposed_communication_s"], rel=0.01)


@pytest.mark.parametrize(
    "settings",
    [
        {"blocks": 9},
        {"blocks": 3, "killed": 1},
        {"transports": ("bare",), "blocks": 1},
        {"transports": ("null", "stock", "single"), "blocks": 9},
        {"size": 1, "blocks": 3},
        {"blocks": 9, "bare_ms": 150},
        {"size": 3, "blocks": 9, "late_ms": {2: 40}},
        {"run": {"network": None}, "blocks": 3, "block_steps": 1},
    ],
)
def test_every_run_has_a_report_and_a_valid_summary(tmp_path, settings):
    found = Run(FakeRun(tmp_path, **settings).write())
    check_schema(found.summary)
    assert "Verdict: " in found.text
    assert found.verdict.code in html.page(found.findings, found.verdict)
    assert overlaps(summary.chrome_trace(found.trace)) == []


def test_an_operation_of_some_ranks_has_the_rate_of_its_group(tmp_path):
    trace = Run(FakeRun(tmp_path, size=4, blocks=3).write()).trace
    some = replace(trace, collectives=tuple(replace(one, ranks=2) for one in trace.collectives))
    rows = [row["args"] for row in summary.chrome_trace(some)["traceEvents"] if "algbw_gbs" in row.get("args", {})]
    assert rows
    assert all(row["n_ranks"] == 2 for row in rows)
    assert all(row["busbw_gbs"] == pytest.approx(row["algbw_gbs"]) for row in rows)  # 2(n-1)/n


def test_the_schema_rejects_unknown_keys(run):
    with pytest.raises(jsonschema.ValidationError):
        check_schema({**run.summary, "mood": "good"})
    with pytest.raises(jsonschema.ValidationError):
        check_schema({k: v for k, v in run.summary.items() if k != "verdict"})


def test_a_measuring_that_costs_too_much_is_a_caveat_in_a_run_without_a_comparison(tmp_path):
    def lines(bare_ms):
        made = FakeRun(tmp_path / str(bare_ms), transports=("bare", "stock"), blocks=9, bare_ms=bare_ms).write()
        return [line for line in caveats.warnings(Run(made).findings) if "hooks" in line]

    assert lines(172) == []
    (line,) = lines(150)
    assert line.startswith("Our hooks slow the stock path by ")
    assert line.endswith(": the untouched script's steps are shorter.")


def test_a_handicapped_stock_withholds_every_gain(tmp_path):
    found = Run(FakeRun(tmp_path, blocks=9, bare_ms=150).write())
    assert "Our hooks slow the stock path by 17 %, so no gain is reported" in " ".join(found.text.split())
    assert "withheld" in found.text
    assert "shorter" not in found.text
    (pair,) = found.summary["comparisons"]
    assert (pair["gain"], pair["ratio"], pair["difference_s"]) == (None, None, None)
    (rule,) = (one for one in found.summary["verdict"]["evidence"] if one["code"] == "TRANSPORT_LIMITED")
    assert (rule["saving_s"], rule["margin"], rule["why"], rule["next"]) == (None, None, "", "")
    assert rule["rests"].startswith("Our hooks slow the stock path")
    check_schema(found.summary)


def test_the_report_is_printed_before_its_files_are_written(run, monkeypatch):
    class Late(BaseException):
        """As a limit of the time raises it."""

    def late(*_):
        raise Late

    monkeypatch.setattr(Run, "write_all", late)
    with pytest.raises(Late):
        run.show_and_write(console := Console(record=True, width=80))
    assert "Verdict: " in console.export_text()


def test_files_are_written_though_nothing_can_be_printed(run, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(terminal, "show", full)
    with pytest.raises(OSError, match="no space"):
        run.show_and_write(Console(record=True, width=80))
    assert (run.path / report.PAGE).exists()


def test_null_warns_that_training_is_not_valid(tmp_path):
    found = Run(FakeRun(tmp_path, transports=("null", "stock"), blocks=8).write())
    assert "the training of this run is not valid" in found.text
    assert found.summary["headroom"]["difference_s"]["value"] == pytest.approx(-0.143, abs=0.001)


def test_a_killed_rank_is_named(tmp_path):
    text = Run(FakeRun(tmp_path, blocks=3, killed=1).write()).text
    assert "rank 1: 1 step(s) began and did not end" in text
    assert "rank 1: 1 event(s) dropped" in text
    assert "rank 1 did not finish cleanly" in text


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("KeyboardInterrupt", "! rank 0 was interrupted"),
        ("KeyboardInterrupt: ", "! rank 0 was interrupted"),
        ("KeyError: 'mine'", "! rank 0 failed: KeyError: 'mine'"),
        ("MemoryError: ", "! rank 0 failed: MemoryError"),
        ("ValueError: \x1b[31mred\x1b[0m\r\n line 2\x00", "! rank 0 failed: ValueError: ?[31mred?[0m line 2?"),
    ],
)
def test_the_error_of_a_rank_has_no_empty_message(tmp_path, error, line):
    found = Run(FakeRun(tmp_path, blocks=3, meta={"finished": False, "error": error}).write())
    assert line in found.text.splitlines()
    assert "\x1b" not in found.text + found.html


def test_the_row_of_the_untouched_script_has_our_own_cost(tmp_path):
    found = Run(FakeRun(tmp_path, transports=("bare", "stock"), blocks=12).write())
    cost = found.findings.handicap.difference_ns
    shown = text.differences(found.findings)["bare"]
    assert (shown.ns.value, shown.ns.low, shown.ns.high) == (-cost.value, -cost.high, -cost.low)
    (row,) = (line for line in found.text.splitlines() if line.split()[:1] == ["bare"])
    assert f"{terminal.bare_ms(shown.ns.value)} ms (" in row


def test_the_saving_of_a_whole_part_of_the_step_is_an_upper_bound(run):
    known = next(one for one in run.verdict.evidence if one.applies and one.saving is not None)
    for bound in (True, False):
        rule = replace(known, at_most=bound)
        assert text.saving_text(rule).startswith("at most ") == bound
        judged = verdict.Verdict(rule.code, "", "", evidence=(rule,))
        (shown,) = summary.summary(run.findings, judged)["verdict"]["evidence"]
        assert shown["at_most"] == bound


def test_mtus_and_variables_that_differ_are_notes(tmp_path):
    class Differing(FakeRun):
        def _meta(self, rank):
            meta = super()._meta(rank)
            meta["transports"]["stock"] |= {"interface": "eth0", "mtu_bytes": (1500, 9000)[rank]}
            return meta | {"stock_variables": {"GLOO_SOCKET_IFNAME": ("eth0", "eth0,eth0")[rank]}}

    found = Run(Differing(tmp_path, transports=("stock",), blocks=3).write())
    assert found.summary["notes"] == [
        "the MTUs of stock's interfaces differ: 1500 bytes on rank 0 (eth0); 9000 bytes on rank 1 (eth0). Set the same "
        "MTU on all hosts and on the switches between them; ping -M do -s SIZE, with SIZE 28 below the MTU, shows what "
        "passes.",
        "ranks differ in GLOO_SOCKET_IFNAME: eth0 on rank 0; eth0,eth0 on rank 1",
    ]
    check_schema(found.summary)
    flat = " ".join(found.text.split())
    assert "! the MTUs of stock's interfaces differ: 1500 bytes on rank 0" in flat
    assert "! ranks differ in GLOO_SOCKET_IFNAME" in flat
    assert Run(FakeRun(tmp_path / "equal", blocks=3).write()).summary["notes"] == []


def test_a_rank_that_left_before_another_failed_is_named(tmp_path):
    run = FakeRun(tmp_path, blocks=3).write()
    assert "without an exception" not in Run(run).text
    path = run / "ranks" / "0.meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"finished": False, "error": "peer lost"}))
    found = [line for line in caveats.warnings(Run(run).findings) if line.startswith("rank")]
    assert found == [
        "rank 0 failed: peer lost",
        "rank 1 ended without an uncaught exception: it reached its end, called sys.exit or shutdown(), "
        "or elastic training restarted its job.",
    ]


UNFINISHED = {"finished": False, "hostname": platform.node(), "pid_namespace": os.readlink("/proc/self/ns/pid")}


def test_a_run_whose_ranks_are_there_is_in_progress(tmp_path, monkeypatch):
    monkeypatch.setattr("netbottleneck.report._lives", lambda *_: True)
    found = Run(FakeRun(tmp_path / "runs", blocks=3, meta=UNFINISHED).write())
    assert "! in progress: 18 steps so far." in found.text
    assert "did not finish cleanly" not in found.text
    found.write_all(tmp_path / "files")
    assert tr.read(tmp_path / "files" / "ranks" / "0.jsonl.gz").in_progress is False


@pytest.mark.parametrize(
    "other", [{"hostname": "elsewhere"}, {"machine_id": "00"}, {"pid_namespace": "pid:[1]"}, {"error": "out of memory"}]
)
def test_a_run_is_in_progress_only_where_its_processes_are_seen(tmp_path, monkeypatch, other):
    monkeypatch.setattr("netbottleneck.report._lives", lambda *_: True)
    assert "in progress" not in Run(FakeRun(tmp_path, blocks=3, meta=UNFINISHED | other).write()).text


def test_a_rank_without_a_record_is_named(run):
    alone = run.trace.of_rank(0)
    assert "no record of rank 1." in caveats.warnings(findings.find(alone))


def test_the_missing_ranks_of_a_large_run_are_ranges(run):
    found = findings.find(replace(run.trace.of_rank(1), size=1024))
    line = "no record of rank 0, 2 to 1023"
    assert f"{line}." in caveats.warnings(found)
    assert rule_facts.Facts(found, found.base, rule_facts.Predicted(), ()).missing.startswith(f"{line}: ")
    assert report._missing(found.trace) == [f"{line} in this folder"]
    assert listed((6, 5, 0, 1, 4, 9)) == "0, 1, 4 to 6, 9"
    assert listed(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, 12, 14 and 12 more"


@pytest.mark.parametrize(
    ("settings", "advised"),
    [
        ({}, True),
        ({"recorder": "torch.profiler"}, False),
        ({"network": tr.Network("a lab")}, False),  # of a study or replay
        ({"origin": "simulated"}, False),
    ],
)
def test_a_variable_is_advised_only_where_it_counts(settings, advised):
    ends = [(at, 1000 * MS * at, 1000 * MS * at + (100 if at < 20 else 200) * MS) for at in range(40)]
    steps = tuple(tr.Step(0, at, 0, STOCK, begin, end) for at, begin, end in ends)
    trace = tr.Trace("r", 1, (STOCK,), ranks=(tr.Rank(0, finished=True),), steps=steps, **settings)
    (line,) = caveats.warnings(findings.find(trace))
    assert line.startswith("the step time changed at step 20, the median by +100 %: this report has both states")
    assert ("NETBOTTLENECK_START_STEP=20" in line) == advised
    assert list(compare._changed("", (trace, "A"))) == [f"in A {line.partition(':')[0]}: its steps are of both states"]
    found = verdict._of_one_state(trace, verdict.Verdict("INCONCLUSIVE", "", "Measure 30 more steps."))
    alone = "Record the state since step 20 alone: NETBOTTLENECK_START_STEP=20. " if advised else ""
    assert found.next == f"{alone}Measure 30 more steps."


@pytest.mark.parametrize("after", [15, 17, 20, 24])
def test_a_change_near_steps_without_detail_may_be_within_them(after):
    """The change of the recorded steps is up to 5 steps from those that are left out after step 19."""
    places = [*range(20), *range(900, 920)]
    ends = [(at, 1000 * MS * at, 1000 * MS * at + (100 if n < after else 200) * MS) for n, at in enumerate(places)]
    steps = tuple(tr.Step(0, at, 0, STOCK, begin, end) for at, begin, end in ends)
    trace = tr.Trace("r", 1, (STOCK,), ranks=(tr.Rank(0, finished=True),), steps=steps)
    (line,) = caveats.warnings(findings.find(trace))
    assert line.startswith("the step time changed between steps 19 and 900, the median by ")
    assert "NETBOTTLENECK_START_STEP=900" in line


@pytest.mark.parametrize(("cycles", "earlier"), [(9, False), (6, True)])
def test_a_probe_that_changes_the_streams_is_named_as_the_cause(cycles, earlier):
    """Steps over tcp take 200 ms with 2 streams, and 50 ms with 8 from the probe in step 47 on; over stock 100 ms."""
    tcp, steps, operations = Arm("tcp"), [], []
    for at in range(cycles * 10):
        arm = (STOCK, tcp)[at % 10 >= 5]
        ms = 100 if arm == STOCK else 200 if at <= 47 else 50
        begin = 1000 * MS * at
        forward = ((begin, begin + MS),)
        steps.append(tr.Step(0, at, at // 5, arm, begin, begin + ms * MS, forward=forward, probed=at == 47))
        lanes = tuple((lane, 1, 1) for lane in range(2 if at < 47 else 8)) if arm == tcp else None
        times = {"start_ns": begin + MS, "done_ns": begin + 10 * MS}
        operations.append(tr.Collective(0, arm, at, 0, begin + MS, 1 << 20, step=at, bucket=0, lanes=lanes, **times))
    ranks = (tr.Rank(0, finished=True),)
    trace = tr.Trace("r", 1, (STOCK, tcp), ranks=ranks, steps=tuple(steps), collectives=tuple(operations))
    found = findings.find(trace)
    (line,) = caveats.warnings(found)
    assert line.startswith("a probe changed the streams of tcp from 2 to 8 at step 47")
    assert "NETBOTTLENECK_STREAMS=8 records the later one alone" in line
    assert line.endswith(f"Comparisons with tcp are of the steps {'before' if earlier else 'after'}.")
    (pair,) = found.comparisons
    assert pair.ratio.value == pytest.approx(2 if earlier else 0.5)


def test_a_late_rank_is_named_in_the_sentence(tmp_path):
    found = Run(FakeRun(tmp_path, blocks=9, size=3, late_ms={2: 40}).write())
    assert "Rank 2 makes the others wait 40.0 ms (measured)." in text.sentences(found.findings)
    assert found.summary["late"] == [{"rank": 2, "others_wait_s": pytest.approx(0.04, rel=0.1)}]


def test_what_the_others_wait_for_any_rank_is_told_if_it_is_more():
    trace = trace_of(Job(slower={1: 1.05}, saves_ms={0: 60.0}, every=10, blocks=12, block_steps=10))
    found = findings.find(trace)
    assert "Rank 1 makes the others wait 3.99 ms; for whichever rank is last in a step, 6.17 ms more (measured)." in (
        text.sentences(found)
    )


def test_all_files_are_written_and_hold_the_same_numbers(run):
    written = {path.name for path in run.write_all()}
    assert written == {
        "summary.json",
        "layers.csv",
        "collectives.csv",
        "report.txt",
        "report.html",
        "trace.json.gz",
        "0.jsonl.gz",
        "1.jsonl.gz",
    }
    check_schema(json.loads((run.path / "summary.json").read_text()))
    assert (run.path / "report.txt").read_text() == run.text
    rows = list(csv.DictReader((run.path / "layers.csv").open()))
    assert [row["layer"] for row in rows] == ["conv1", "layer1", "fc"]
    assert sum(int(row["exposed_ns_attributed_by_bytes"]) for row in rows) == pytest.approx(
        run.findings.parts["stock"].exposed_ns, rel=0.01
    )
    assert tr.merge(tr.read(run.path / "ranks" / f"{r}.jsonl.gz") for r in (0, 1)).steps == run.trace.steps


def test_a_run_in_a_folder_whose_name_is_not_utf_8_has_its_report(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xffn"))
    FakeRun(folder, blocks=9, run={"id": folder.name}).write()
    (folder / "ranks" / "1.net.counters").write_bytes(b"")
    run = Run(folder)
    run.write_all()
    assert (folder / "report.txt").read_text(encoding="utf-8") == run.text
    assert json.loads((folder / "summary.json").read_text(encoding="utf-8"))["id"] == "r?n"
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    run.show(Console(file=stream))
    stream.flush()
    shown = "".join(stream.buffer.getvalue().decode().split())
    for line in ("Run r?n:", "r?n/ranks/1.net.counters: not a file", "r?n/report.html"):
        assert "".join(line.split()) in shown


@pytest.mark.parametrize("cut", [(summary, "chrome_trace"), (tr, "encode")])
def test_a_report_that_is_cut_off_leaves_the_earlier_files(run, monkeypatch, cut):
    def late(*_):
        raise KeyboardInterrupt

    run.write_all()
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    monkeypatch.setattr(*cut, late)
    with pytest.raises(KeyboardInterrupt):
        run.write_all()
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_unknown_values_of_stock_are_empty_cells_in_collectives_csv(run):
    rows = list(csv.DictReader(io.StringIO(summary.collectives_csv(run.trace))))
    assert len(rows) == len(run.trace.collectives)
    stock = next(row for row in rows if row["transport"] == "stock")
    assert (stock["first_byte_ns"], stock["wire_bytes"], stock["lane_bytes_sent"], stock["agreed_ns"]) == ("",) * 4
    native = next(row for row in rows if row["transport"] == "ofi")
    assert native["lane_bytes_sent"] == "0:1048576 1:1048576"
    assert int(native["done_ns"]) > int(native["start_ns"]) > 0


def test_the_page_is_one_file_in_both_themes(run):
    page = html.page(run.findings, run.verdict)
    assert "<script" not in page
    assert "http" not in page
    assert "prefers-color-scheme: dark" in page
    assert "&amp;" in html.page(findings.find(replace(run.trace, model="a & b")), run.verdict)


def test_a_run_shows_itself_in_a_notebook(run):
    assert "TRANSPORT_LIMITED" in run._repr_html_()
    assert "<svg" in run._repr_html_()
    assert len(run._repr_html_()) < 10_000


def test_a_missing_run_is_named_in_the_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="pass the folder to write to"):
        Run(DATA / "synthetic.jsonl.gz").write_all()


def test_a_saved_run_is_reported_without_the_c_module(run):
    code = (
        "import sys\n"
        "sys.modules['netbottleneck._core'] = None\n"
        "from netbottleneck.report import Run\n"
        "print(Run(sys.argv[1]).verdict.code)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, run.path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "TRANSPORT_LIMITED"


def test_rings_and_readable_traces_give_the_same_report(run):
    run.write_all()
    text = run.text
    for path in (run.path / "ranks").glob("*.ring"):
        path.unlink()
    assert Run(run.path).text == text


def test_no_number_of_a_simulated_trace_is_called_measured(run):
    found = findings.find(replace(run.trace, origin="simulated"))
    text = terminal.text(found, verdict.decide(found))
    assert "simulated" in text
    assert "measured" not in text
    assert "Measured" not in text


def test_the_split_agrees_with_the_settings_of_the_run(run):
    parts = run.findings.parts["stock"]
    assert parts.hidden_ns == 15 * MS
    assert parts.exposed_ns == 143 * MS
    native = run.findings.parts["ofi"]
    assert (native.hidden_ns, native.exposed_ns) == (9 * MS, 31 * MS)
    assert run.summary["warmup_steps"] == intervals.WARMUP_STEPS
    assert ring_reader.load(run.path) == run.trace
