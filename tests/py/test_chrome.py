"""trace.json.gz is valid for Perfetto: lanes have names, and events on a lane do not overlap."""

import gzip
import json
from dataclasses import replace

import pytest

from chromecheck import overlaps
from netbottleneck.report import Run, summary
from netbottleneck.trace import model as tr
from netbottleneck.trace.transports import Arm
from ringwriter import MS, FakeRun


@pytest.fixture
def run(tmp_path):
    return Run(FakeRun(tmp_path / "run", blocks=9).write())


def test_the_chrome_trace_names_its_lanes_and_none_overlaps(run):
    run.write_all()
    document = json.loads(gzip.decompress((run.path / "trace.json.gz").read_bytes()))
    assert overlaps(document) == []
    assert document["schemaVersion"] == 1
    assert document["distributedInfo"]["world_size"] == 2
    # Holistic Trace Analysis drops spans without a category, and cannot open a file that has no others.
    assert all(event.get("cat") for event in document["traceEvents"] if event["ph"] == "X")
    events = document["traceEvents"]
    assert all(isinstance(event["pid"], int) for event in events)
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == named
    begun, ended = ([e["id"] for e in events if e["ph"] == phase] for phase in "be")
    assert sorted(begun) == sorted(ended)
    assert len(set(begun)) == len(begun) == len(run.trace.collectives)


@pytest.mark.frameworks
def test_holistic_trace_analysis_reads_every_span(run):
    reader = pytest.importorskip("hta.common.trace", reason="HolisticTraceAnalysis is not installed")
    run.write_all()
    path = run.path / "trace.json.gz"
    trace = reader.Trace(trace_files={0: str(path)}, trace_dir="")
    trace.parse_traces(use_multiprocessing=False)
    spans = [event for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if event["ph"] == "X"]
    found = trace.get_trace(0)
    assert len(spans) == len(found) > 0
    lost_us = sum(event["dur"] for event in spans) - found["dur"].sum()  # it reads whole microseconds
    assert 0 <= lost_us <= 2 * len(spans)
    assert set(found["pid"]) == {0, 1}


def test_overlapping_operations_and_nested_modules_get_separate_lanes(run):
    step = replace(
        run.trace.steps[0], modules=((0, 100, 900), (1, 200, 300), (2, 250, 800)), waits=((1, 5, 9), (2, 7, 12))
    )
    stock = Arm("stock")
    operations = tuple(
        tr.Collective(0, stock, key, 1, 100 * key, 8, start_ns=100 * key, done_ns=100 * key + 250) for key in range(5)
    )
    document = summary.chrome_trace(replace(run.trace, steps=(step,), collectives=operations))
    assert overlaps(document) == []
    spans = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert len({e["tid"] for e in spans if e["tid"] >= summary.TRANSFERS}) == 3
    assert len({e["tid"] for e in spans if summary.MODULES <= e["tid"] < summary.TRANSFERS}) == 3


def test_the_overlap_check_finds_an_overlap():
    events = [{"ph": "X", "pid": 0, "tid": 1, "ts": ts, "dur": 2.0, "name": "x"} for ts in (0.0, 1.5)]
    assert overlaps({"traceEvents": events})


def test_a_truncated_chrome_trace_has_a_note(run):
    document = summary.chrome_trace(run.trace, events_max=100)
    assert document["steps_cut"] > 0
    assert summary.chrome_trace(run.trace)["steps_cut"] == 0


def test_operations_count_for_the_cut_and_go_with_their_steps(run):
    many = tuple(replace(c, round=1000 * c.round + n) for c in run.trace.collectives for n in range(50))
    most = 2000
    document = summary.chrome_trace(replace(run.trace, collectives=many), events_max=most)
    events = [event for event in document["traceEvents"] if event["ph"] != "M"]
    of_a_step = 100 * summary.OPERATION_EVENTS + 100
    assert len(events) < most + 2 * of_a_step  # the last step of each rank is whole
    kept = sum(event["name"].startswith("step ") for event in events)
    assert kept + document["steps_cut"] == len(run.trace.steps)
    begun = [event for event in events if event["ph"] == "b"]
    for rank in (0, 1):
        spans = [e for e in events if (e["pid"], e.get("tid"), e["ph"]) == (rank, summary.STEP, "X")]
        end = max(span["ts"] + span["dur"] for span in spans)
        assert 0 < max(event["ts"] for event in begun if event["pid"] == rank) < end


def test_a_root_that_is_done_before_all_ranks_have_begun_has_waited_for_none():
    """A broadcast: its parts lie within it on each rank."""
    calls = tuple(
        tr.Collective(
            rank,
            Arm("stock"),
            5,
            1,
            at,
            1 << 20,
            "forward/broadcast",
            1,
            kind="broadcast",
            start_ns=at,
            done_ns=at + 2 * MS,
        )
        for rank, at in enumerate((10 * MS, 50 * MS))
    )
    steps = tuple(tr.Step(rank, 1, 0, Arm("stock"), 0, 100 * MS) for rank in (0, 1))
    trace = tr.Trace("a run", 2, (Arm("stock"),), ranks=(tr.Rank(0), tr.Rank(1)), steps=steps, collectives=calls)
    spans = [
        event for event in summary.chrome_trace(trace)["traceEvents"] if event["ph"] == "X" and "op" in event["args"]
    ]
    assert len(spans) == 2
    for span in spans:
        parts = [span["args"][name] for name in ("wait_us", "transfer_us")]
        assert min(parts) >= 0
        assert sum(parts) <= span["dur"]
