"""The flight recorder's dumps: of a real hang over gloo, made of known operations, and damaged ones."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

import jsonschema
import pytest
from conftest import RANKS_LIMIT_S, by_torchrun, free_port

from netbottleneck import cli
from netbottleneck.report import Run, summary
from netbottleneck.trace import flight_recorder

HANG = """
import json, os, sys, time
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
pair = dist.new_group([0, 2], group_desc="pair")
dist.all_reduce(torch.ones(1000))
if rank != 1:
    dist.all_reduce(torch.ones(10), group=pair)
dist.broadcast(torch.ones(6, dtype=torch.float64), 0)
store = dist.distributed_c10d._get_default_store()
if rank != 1:
    late = dist.all_reduce(torch.ones(5000), async_op=True)  # rank 1 does not join
while sum(not one["retired"] for one in json.loads(_dump_fr_trace_json())["entries"]) > (rank != 1):
    time.sleep(0.01)
with open(f"{folder}/hang_{rank}", "wb") as file:
    file.write(_dump_fr_trace())
with open(f"{folder}/json/hang_{rank}.json", "wb") as file:
    file.write(_dump_fr_trace_json())
store.set(f"dumped {rank}", "")
store.wait([f"dumped {other}" for other in range(3)])
store.set(f"leaves {rank}", "")
if rank == 0:  # it has the store
    store.wait(["leaves 1", "leaves 2"])
os._exit(0)
"""


@pytest.fixture(scope="module")
def hang(tmp_path_factory):
    """Dumps of three ranks over gloo, of which rank 1 does not join the third operation of the default group."""
    folder = tmp_path_factory.mktemp("dumps")
    (folder / "json").mkdir()
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", HANG, str(rank), folder],
            env=os.environ | by_torchrun(rank, 3, port) | {"TORCH_FR_BUFFER_SIZE": "100"},
            stderr=subprocess.PIPE,
        )
        for rank in range(3)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=2 * RANKS_LIMIT_S)
        assert rank.returncode == 0, said.decode()[-2000:]
    return folder


@pytest.mark.parametrize("place", [".", "hang_", "json"])
def test_the_rank_that_did_not_join_is_named(hang, place):
    run = Run(hang / place)
    (open_one,) = [one for one in run.findings.joins if one.waiting or one.missing]
    assert (open_one.group.description, open_one.number, open_one.kind) == ("default_pg", 3, "allreduce")
    assert open_one.missing == (1,)
    assert open_one.waiting == (0, 2)
    assert open_one.bytes == 20000
    said = " ".join(run.text.split())
    assert "Rank 1 has not joined operation 3 of group 0 (default_pg), all_reduce" in said
    assert "waiting: rank 0, 2" in said
    assert run.verdict.code == "INCONCLUSIVE"
    assert "Steps and compute are missing" in run.verdict.why


def test_operations_have_their_size_and_no_time_that_a_dump_does_not_have(hang):
    trace = Run(hang).trace
    assert trace.size == 3
    assert trace.steps == ()
    assert {(c.kind, c.tensor_bytes, c.dtype) for c in trace.collectives if c.rank == 0} == {
        ("allreduce", 4000, "float32"),
        ("allreduce", 40, "float32"),
        ("broadcast", 48, "float64"),
        ("allreduce", 20000, "float32"),
    }
    assert {(c.start_ns, c.done_ns, c.start_seen_ns, c.done_seen_ns) for c in trace.collectives} == {(None,) * 4}
    assert [c.submit_ns for c in trace.collectives if c.rank == 0] == sorted(
        c.submit_ns for c in trace.collectives if c.rank == 0
    )


def test_every_file_of_the_report_is_made_of_dumps(hang, tmp_path, capsys):
    run = Run(hang)
    jsonschema.validate(json.loads(json.dumps(run.summary)), summary.schema())
    assert "Rank 1 has not joined" in run.html
    run.write_all(tmp_path)
    again = Run(tmp_path / "ranks" / "0.jsonl.gz")
    assert again.trace.groups == run.trace.groups
    assert again.trace.collectives == run.trace.of_rank(0).collectives
    assert cli.main(["report", str(hang / "hang_")]) == 0
    assert cli.main(["report", str(hang / "json" / "hang_0.json")]) == 0
    assert "not over on rank 0" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["report", str(hang), "--strict"]) == cli.INCONCLUSIVE


def test_a_comparison_and_a_what_if_say_that_steps_are_missing(hang, capsys):
    assert cli.main(["compare", str(hang), str(hang)]) == 2
    assert "no step" in capsys.readouterr().err
    assert cli.main(["what-if", str(hang)]) == cli.USAGE
    assert "finished in a step" in capsys.readouterr().err


# Dumps of known operations, as NCCL's process group writes them.


def operation(number, name="nccl:all_reduce", state="completed", size=8, **changed):
    row = {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("7", "experts"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": name,
        "time_created_ns": 10**18 + 1000 * number,
        "input_sizes": [[size]],
        "input_dtypes": ["Float"],
        "output_sizes": [[size]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None if state == "scheduled" else 10**18 + 1000 * number + 300,
        "time_discovered_completed_ns": 10**18 + 1000 * number + 700 if state == "completed" else None,
        "retired": state == "completed",
        "is_p2p": False,
        "frames": [
            {"name": "all_reduce", "filename": "/lib/torch/distributed/distributed_c10d.py", "line": 1},
            {"name": "step", "filename": "/home/me/train.py", "line": 88},
        ],
    }
    return row | changed


def write(folder, rank, entries, ranks="[0, 1]", version="2.10", last=0, **changed):
    folder.mkdir(exist_ok=True)
    whole = {
        "version": version,
        "pg_config": {"7": {"name": "7", "desc": "experts", "ranks": ranks}},
        "pg_status": {"0": {"last_enqueued_collective": last, "last_completed_collective": -1}},
        "entries": entries,
    }
    (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(whole | changed, protocol=2))
    return folder


def test_times_that_a_watchdog_noticed_are_kept_apart_from_begin_and_end(tmp_path):
    write(tmp_path, 0, [operation(1), operation(2, state="started")])
    done, begun = Run(write(tmp_path, 1, [operation(1), operation(2, state="started")])).trace.collectives[:2]
    assert (done.submit_ns, done.start_ns, done.done_ns, done.start_seen_ns, done.done_seen_ns) == (
        *(0, None, None),
        *(300, 700),
    )
    assert (begun.state, begun.done_seen_ns, begun.ranks) == ("started", None, 2)
    run = Run(tmp_path)
    assert "All recorded ranks joined operation 2 of group 7 (experts), all_reduce, train.py:88, 32 B" in " ".join(
        run.text.split()
    )
    assert run.findings.joins[1].waiting == (0, 1)


def test_operations_that_differ_between_ranks_are_named(tmp_path):
    write(tmp_path, 0, [operation(1, state="started"), operation(2, state="scheduled")])
    write(tmp_path, 1, [operation(1, state="started", size=9), operation(2, "nccl:broadcast", state="scheduled")])
    first, second = Run(tmp_path).findings.joins
    assert first.differs == "rank 0: allreduce float32 32 bytes; rank 1: allreduce float32 36 bytes"
    assert second.differs == "rank 0: allreduce float32 32 bytes; rank 1: broadcast float32 32 bytes"
    assert "Ranks differ in operation 1" in Run(tmp_path).summary["sentence"]


def test_one_sentence_names_the_first_difference_of_a_group(tmp_path):
    write(tmp_path, 0, [operation(n) for n in range(1, 40)])
    write(tmp_path, 1, [operation(n, size=9 if n > 5 else 8) for n in range(1, 40)])
    said = Run(tmp_path).summary["sentence"]
    assert said.count("Ranks differ in") == 1
    assert "Ranks differ in operation 6 of group 7" in said
    assert "33 later operation(s) differ too" in said


def test_members_are_taken_from_a_dump_that_has_them(tmp_path):
    write(tmp_path, 0, [operation(1, state="started")], pg_config={})
    write(tmp_path, 1, [operation(2, pg_id=1, process_group=("8", "others"))], ranks="[0, 1]")
    (first, _) = Run(tmp_path).findings.joins
    assert first.group.ranks == (0, 1)
    assert (first.missing, first.unknown) == ((), (1,))


def test_the_size_of_an_unknown_type_is_not_known(tmp_path):
    rows = [operation(1, state="started", input_dtypes=["Float2"], output_dtypes=["Float2"])]
    write(tmp_path, 0, rows)
    run = Run(write(tmp_path, 1, rows))
    assert [one.tensor_bytes for one in run.trace.collectives] == [None, None]
    assert "all_reduce, train.py:88, size not known" in " ".join(run.text.split())
    assert run.summary["joins"][0]["bytes"] is None
    jsonschema.validate(json.loads(json.dumps(run.summary)), summary.schema())
    run.write_all(tmp_path / "report")
    assert Run(tmp_path / "report" / "ranks" / "1.jsonl.gz").trace.collectives == run.trace.of_rank(1).collectives


def test_uneven_operations_may_have_different_sizes(tmp_path):
    write(tmp_path, 0, [operation(1, "nccl:all_to_all")])
    assert Run(write(tmp_path, 1, [operation(1, "nccl:all_to_all", size=9)])).findings.joins[0].differs == ""


def test_an_operation_that_left_the_buffer_was_joined(tmp_path):
    write(tmp_path, 0, [operation(n) for n in (1, 2, 3)])
    write(tmp_path, 1, [operation(3)])
    assert [one.missing for one in Run(tmp_path).findings.joins] == [(), (), ()]
    other = operation(9, process_group=("8", "others"), pg_id=1, collective_seq_id=1)
    write(tmp_path, 1, [other])  # the group's operations are overwritten
    one = Run(tmp_path).findings.joins[0]
    assert (one.missing, one.unknown) == ((), (1,))
    write(tmp_path, 1, [operation(1)], last=3)  # the status says that it submitted three
    assert [one.missing for one in Run(tmp_path).findings.joins] == [(), (), ()]


@pytest.mark.parametrize("kept", [(6, 5), (3, 4), (3, 3)])
def test_coalesced_operations_that_left_the_buffer_in_part_do_not_differ(tmp_path, kept):
    """Each number has operations of 8 and 9 elements. kept: how many operations the buffer of each rank holds."""
    rows = [operation(1 + at // 2, size=8 + at % 2, record_id=at) for at in range(6)]
    for rank, last in enumerate(kept):
        write(tmp_path, rank, rows[-last:])
    joins = Run(tmp_path).findings.joins
    assert [one.differs for one in joins] == [""] * max(kept)
    assert [one.submitted for one in joins[-min(kept) :]] == [(0, 1)] * min(kept)


def test_a_coalesced_operation_that_one_rank_left_out_differs(tmp_path):
    write(tmp_path, 0, [operation(1, record_id=0), operation(1, size=9, record_id=1)])
    write(tmp_path, 1, [operation(1, size=9, record_id=0)])
    assert Run(tmp_path).findings.joins[0].differs


DEFAULT = {"process_group": ("0", "default_pg")}
WHOLE = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
# What torch 2.13 writes for a rank that has called no operation.
IDLE = '{"comm_lib_version":"","nccl_comm_state":{},"pg_config":{"":{"desc":"","name":"","ranks":"[0, 1]"}},'
IDLE += '"pg_status":{},"version":"2.10"}'


def test_a_rank_that_called_no_operation_has_not_joined(tmp_path):
    open_one = [operation(1, state="started")]
    write(tmp_path / "empty", 0, open_one)
    write(tmp_path / "empty", 1, [])
    write(tmp_path / "pickled", 0, [operation(1, state="started", **DEFAULT)], pg_config=WHOLE)
    whole = pickle.loads((tmp_path / "pickled" / "nccl_trace_rank_0").read_bytes())
    (tmp_path / "pickled" / "nccl_trace_rank_1").write_bytes(
        pickle.dumps({key: value for key, value in whole.items() if key != "entries"}, protocol=2)
    )
    folder = tmp_path / "json"
    folder.mkdir()
    (folder / "trace_0.json").write_text(json.dumps({**whole, "comm_lib_version": ""}))
    (folder / "trace_1.json").write_text(IDLE)
    for name, path in (("empty", ""), ("pickled", ""), ("json", "trace_")):
        run = Run(tmp_path / name / path)
        (one,) = run.findings.joins
        assert (one.missing, one.unknown, one.waiting) == ((1,), (), (0,)), name
        assert "Rank 1 has not joined operation 1" in " ".join(run.text.split())
        assert any("rank 1 called none" in note for note in run.trace.notes)
        assert not any("TORCH_FR_BUFFER_SIZE" in note for note in run.trace.notes)


def test_a_dump_of_operations_under_way_alone_tells_which_its_rank_joined(tmp_path):
    about = {"pg_config": WHOLE}
    write(tmp_path, 0, [operation(3, state="started", **DEFAULT), operation(4, state="scheduled", **DEFAULT)], **about)
    write(tmp_path, 1, [], last=3, **about)
    joined, open_one = Run(tmp_path).findings.joins
    assert (joined.missing, joined.unknown) == ((), ())
    assert (open_one.missing, open_one.unknown) == ((1,), ())


def test_a_dump_of_a_recorder_that_was_off_tells_nothing(tmp_path):
    write(tmp_path, 0, [operation(1, state="started")])
    write(tmp_path, 1, [], pg_config={})
    run = Run(tmp_path)
    (one,) = run.findings.joins
    assert (one.missing, one.unknown) == ((), (1,))
    assert any("set TORCH_FR_BUFFER_SIZE before the training" in note for note in run.trace.notes)


def test_an_open_send_is_named_on_its_rank(tmp_path):
    message = operation(1, "nccl:send 0->1", "started", is_p2p=True, p2p_seq_id=4, collective_seq_id=0)
    write(tmp_path, 0, [message])
    run = Run(write(tmp_path, 1, [operation(1)]))
    assert "On rank 0, send 0->1, train.py:88 (number 4) of group 7 (experts) is not over" in run.summary["sentence"]


def batch(*names, state, p2p=True, number=4):
    """Rows of batch_isend_irecv: NCCL follows the last alone, which some versions of torch do not mark is_p2p."""
    numbers = {"collective_seq_id": 1, "p2p_seq_id": number}
    rows = [operation(5 + at, f"nccl:{name}", "scheduled", is_p2p=True, **numbers) for at, name in enumerate(names)]
    return [*rows, operation(9, "nccl:coalesced", state, is_p2p=p2p, input_dtypes=[], input_sizes=[], **numbers)]


@pytest.mark.parametrize("p2p", [True, False])
def test_a_batch_of_sends_has_the_state_of_its_last_row(tmp_path, p2p):
    write(tmp_path, 0, [operation(1), *batch("send 0->1", "recv 0<-1", state="completed", p2p=p2p)])
    write(tmp_path, 1, [operation(1), *batch("recv 1<-0", state="completed", p2p=p2p, number=7)])
    run = Run(tmp_path)
    assert run.summary["sentence"].startswith("Every recorded operation was joined by its ranks and is over")
    assert [one.kind for one in run.findings.joins] == ["allreduce"]
    sent = [one for one in run.trace.collectives if one.kind in ("send", "recv")]
    assert [(one.state, one.done_seen_ns is None) for one in sent] == [("completed", False)] * 3
    write(tmp_path, 1, [operation(1), *batch("recv 1<-0", state="started", p2p=p2p, number=7)])
    said = Run(tmp_path).summary["sentence"]
    assert "On rank 1, recv 1<-0, train.py:88 (number 7) of group 7 (experts) is not over" in said
    assert "On rank 0" not in said
    assert "has not joined" not in said


def test_missing_damaged_and_mixed_dumps_are_named_in_one_line_each(tmp_path):
    write(tmp_path, 0, [operation(1, state="started")], ranks="[0, 1, 2, 3]")
    write(tmp_path, 1, [operation(1, state="started")], ranks="[0, 1, 2, 3]", version="2.4")
    path = tmp_path / "nccl_trace_rank_2"
    whole = (tmp_path / "nccl_trace_rank_0").read_bytes()
    for damaged in (b"", whole[:9], whole[:-20], b"[]"):
        path.write_bytes(damaged)
        run = Run(tmp_path)
        (note,) = (note for note in run.trace.notes if note.startswith("left out: "))
        assert note.startswith(f"left out: {path}: unreadable dump of the flight recorder: ")
        assert "\n" not in note
        said = " ".join(run.text.split())
        assert "no record of rank 2, 3." in said
        assert "no record of it from rank 2, 3" in said
        assert "the dumps have different versions (2.10: rank 0; 2.4: rank 1)" in said


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"version": "3.0"}, "version 3.0; this netbottleneck reads versions 2.x"),
        ({"entries": [{}]}, "no 'profiling_name'"),
        ({"entries": 7}, "not iterable"),
        ({"entries": [operation(1, state="lost")]}, "unknown state 'lost'"),
        ({"pg_config": {"7": {"ranks": "[0, "}}}, "unreadable dump"),
    ],
)
def test_a_dump_that_cannot_be_read_is_refused_by_name(tmp_path, changed, said, capsys):
    write(tmp_path, 0, **({"entries": [operation(1)]} | changed))
    assert cli.main(["report", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "nccl_trace_rank_0") in line
    assert said in line


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_runs_no_code(tmp_path):
    write(tmp_path / "dumps", 0, [operation(1)])
    write(tmp_path / "dumps", 1, [operation(1)], frames=Hostile(tmp_path / "made"))
    run = Run(tmp_path / "dumps")
    assert any("a dump has only plain values" in note for note in run.trace.notes)
    assert not (tmp_path / "made").exists()


def test_two_dumps_of_a_rank_are_refused(tmp_path):
    write(tmp_path, 0, [operation(1)])
    (tmp_path / "older_0").write_bytes((tmp_path / "nccl_trace_rank_0").read_bytes())
    with pytest.raises(ValueError, match="more than one dump of the flight recorder of rank 0: give"):
        Run(tmp_path)
    assert Run(tmp_path / "older_").trace.ranks[0].rank == 0


def test_other_files_are_not_taken_for_dumps(tmp_path):
    (tmp_path / "run1").write_bytes(b"\x80\x04other")
    (tmp_path / "evidence.json").write_text('{"cells": []}')
    assert flight_recorder.dumps(tmp_path) == []
    assert flight_recorder.dumps(tmp_path / "evidence.json") == []
    assert flight_recorder.dumps(tmp_path / "nothing" / "x") == []


@pytest.mark.parametrize(
    ("config", "said"), [({}, "a rank is below 1048576"), (None, "its pg_config has ranks below 2")]
)
def test_a_number_that_is_no_rank_is_refused_by_name(tmp_path, config, said, capsys):
    changed = {} if config is None else {"pg_config": config}
    write(tmp_path, 1718000000, [operation(1)], **changed)
    path = tmp_path / "nccl_trace_rank_1718000000"
    assert cli.main(["report", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: its name ends with 1718000000, but {said}: end the name of each dump with its rank" in line
    write(tmp_path, 0, [operation(1)], **changed)
    run = Run(tmp_path)
    assert run.trace.size == (1 if config == {} else 2)
    assert any(note.startswith(f"left out: {path}") for note in run.trace.notes)
    path.write_bytes(b"")
    assert Run(tmp_path).trace.size == (1 if config == {} else 2)


def test_ranks_of_a_group_beyond_any_job_are_refused(tmp_path, capsys):
    write(tmp_path, 0, [operation(1)], ranks="[0, 1718000000]")
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "pg_config of group 7 has ranks outside 0 to 1048575" in capsys.readouterr().err
