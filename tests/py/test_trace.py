"""The trace format: traces survive their files, and invalid files are refused by name."""

import gzip
import json
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netbottleneck.analysis import findings
from netbottleneck.trace import model as tr
from netbottleneck.trace import ring_reader
from netbottleneck.trace.transports import Arm
from ringwriter import FakeRun

ns = st.integers(0, 2**62)
maybe_ns = st.none() | ns
word = st.text(max_size=8)
u64 = st.integers(0, 2**64 - 1)
span = st.tuples(ns, ns)

names = st.text("abcxyz-é", min_size=1, max_size=8)
arm = st.builds(Arm, names, st.none() | names, st.none() | names)

steps = st.builds(
    tr.Step,
    rank=st.integers(0, 9),
    index=st.integers(0, 99),
    block=st.integers(0, 9),
    arm=arm,
    begin_ns=ns,
    end_ns=ns,
    plan=st.none() | word,
    sampled=st.booleans(),
    forward=st.lists(span, max_size=3).map(tuple),
    optimizer=st.lists(span, max_size=3).map(tuple),
    modules=st.lists(st.tuples(ns, ns, ns), max_size=3).map(tuple),
    grad_ready=st.lists(span, max_size=3).map(tuple),
    waits=st.lists(st.tuples(u64, ns, ns), max_size=3).map(tuple),
    evaluation=st.lists(span, max_size=3).map(tuple),
    checkpoints=st.lists(span, max_size=3).map(tuple),
)
collectives = st.builds(
    tr.Collective,
    rank=st.integers(0, 9),
    arm=arm,
    key=u64,
    round=st.integers(0, 99),
    submit_ns=ns,
    tensor_bytes=maybe_ns,
    name=word,
    ranks=st.none() | st.integers(1, 9),
    phase=word,
    step=st.none() | st.integers(0, 99),
    priority=st.integers(-9, 9),
    bucket=st.none() | st.integers(0, 9),
    algorithm=st.none() | word,
    wire_bytes=maybe_ns,
    agreed_ns=maybe_ns,
    start_ns=maybe_ns,
    first_byte_ns=maybe_ns,
    done_ns=maybe_ns,
    lanes=st.none() | st.lists(st.tuples(ns, ns, ns), max_size=3).map(tuple),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(steps, max_size=4), st.lists(collectives, max_size=4), word)
def test_a_written_trace_is_read_back(tmp_path_factory, some_steps, some_collectives, model):
    path = tmp_path_factory.mktemp("t") / "a.jsonl.gz"
    given_trace = tr.Trace(
        id="x",
        size=2,
        arms=(Arm("stock"),),
        model=model,
        network=tr.Network("lab", 1e9, (5e8,), {"link_bps": 9.5e8}),
        ranks=(
            tr.Rank(
                0,
                transports=(tr.TransportInfo("ofi", probe=(tr.Probe(1, 2, 3),), mtu_bytes=9000),),
                stock_variables={"NCCL_NET": "Socket"},
            ),
        ),
        parameters=(tr.Parameter("w", 4, "float32", 0),),
        buckets=(tr.Bucket("b", 2**63 + 1, 4, "float32", (0,)),),
        steps=tuple(some_steps),
        collectives=tuple(some_collectives),
        faults=(tr.Fault(0, "stall", 5, (1,), waited_ns=3),),
    )
    tr.write(given_trace, path)
    assert tr.read(path) == given_trace


def test_the_same_trace_makes_the_same_bytes(tmp_path):
    run = ring_reader.load(FakeRun(tmp_path / "run", blocks=2).write())
    tr.write(run, tmp_path / "a")
    tr.write(run, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_merged_ranks_are_the_run(tmp_path):
    run = ring_reader.load(FakeRun(tmp_path, size=3, blocks=2).write())
    assert tr.merge(run.of_rank(rank) for rank in range(3)).steps == run.steps
    assert sorted(tr.merge(run.of_rank(rank) for rank in range(3)).collectives, key=lambda c: c.submit_ns) == sorted(
        run.collectives, key=lambda c: c.submit_ns
    )


def test_ranks_of_different_runs_are_not_merged(tmp_path):
    run = ring_reader.load(FakeRun(tmp_path, blocks=2).write())
    with pytest.raises(ValueError, match="different runs"):
        tr.merge([run.of_rank(0), replace(run.of_rank(1), id="other")])
    with pytest.raises(ValueError, match="no trace"):
        tr.merge([])


def packed(path, *lines):
    path.write_bytes(gzip.compress("".join(line + "\n" for line in lines).encode()))
    return path


HEAD = {"format": tr.FORMAT, "version": tr.VERSION, "id": "x", "size": 1, "arms": []}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "not a netbottleneck trace"),
        (("[]",), "not a netbottleneck trace"),
        (('{"format": "else"}',), "not a netbottleneck trace"),
        ((json.dumps(HEAD | {"version": 4}),), "trace version 4; this netbottleneck reads versions 1 to 3"),
        ((json.dumps(HEAD), "{"), "line 2"),
        ((json.dumps(HEAD), '{"step": {"rank": 1}}'), "line 2.*missing"),
        ((json.dumps(HEAD), '{"step": 5}'), "line 2"),
        ((json.dumps(HEAD), '{"a": 1, "b": 2}'), "line 2"),
        ((json.dumps(HEAD | {"size": "two"}),), "line 1: 'two' where int must be"),
        (
            (json.dumps(HEAD), '{"bucket": {"name": "b", "key": 1.5, "bytes": 4, "dtype": "f"}}'),
            "line 2: '1.5' where int",
        ),
    ],
)
def test_unreadable_content_is_refused_by_file_and_line(tmp_path, lines, message):
    path = packed(tmp_path / "bad.jsonl.gz", *lines)
    with pytest.raises(ValueError, match=f"bad.jsonl.gz.*{message}"):
        tr.read(path)


def test_a_file_with_damaged_compression_is_refused(tmp_path):
    path = FakeRun(tmp_path / "run", blocks=2).write()
    tr.write(ring_reader.load(path), tmp_path / "whole.jsonl.gz")
    whole = (tmp_path / "whole.jsonl.gz").read_bytes()
    for at in range(20, len(whole), len(whole) // 40):
        (tmp_path / "bad.jsonl.gz").write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"bad\.jsonl\.gz, line"):
            tr.read(tmp_path / "bad.jsonl.gz")


def test_a_file_that_is_cut_short_is_refused(tmp_path):
    run = ring_reader.load(FakeRun(tmp_path / "run", blocks=2).write())
    tr.write(run, tmp_path / "a.jsonl.gz")
    whole = (tmp_path / "a.jsonl.gz").read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz"):
        tr.read(tmp_path / "a.jsonl.gz")
    (tmp_path / "a.jsonl.gz").write_bytes(b"plain text")
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz"):
        tr.read(tmp_path / "a.jsonl.gz")
    with pytest.raises(FileNotFoundError):
        tr.read(tmp_path / "none.jsonl.gz")


def test_keys_that_a_later_writer_adds_are_left_out(tmp_path):
    path = packed(tmp_path / "a.jsonl.gz", json.dumps(HEAD | {"mood": 1}), '{"weather": 2}')
    assert tr.read(path) == tr.Trace(id="x", size=1, arms=())


def test_a_trace_of_version_2_has_no_calls_of_the_script(tmp_path):
    path = tmp_path / "old.jsonl.gz"
    rows = (
        {"format": tr.FORMAT, "version": 2, "id": "x", "size": 1, "arms": ["stock"]},
        {"step": {"rank": 0, "index": 0, "block": 0, "arm": "stock", "begin_ns": 0, "end_ns": 5, "forward": [[1, 2]]}},
        {"collective": {"rank": 0, "arm": "stock", "key": 1, "round": 0, "submit_ns": 1, "tensor_bytes": 8}},
    )
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    found = tr.read(path)
    assert (found.steps[0].forward, found.steps[0].evaluation, found.steps[0].checkpoints) == (((1, 2),), (), ())
    assert (found.collectives[0].by_script, found.collectives[0].ranks) == (False, None)


def test_a_trace_of_version_1_names_its_arms_by_transport(tmp_path):
    path = tmp_path / "old.jsonl.gz"
    rows = (
        {"format": tr.FORMAT, "version": 1, "id": "x", "size": 1, "transports": ["stock", "tcp"]},
        {"rank": {"rank": 0, "transports": [{"name": "tcp", "provider": "sockets"}]}},
        {"step": {"rank": 0, "index": 0, "block": 0, "transport": "tcp", "begin_ns": 0, "end_ns": 5}},
        {"collective": {"rank": 0, "transport": "tcp", "key": 1, "round": 0, "submit_ns": 1, "tensor_bytes": 8}},
    )
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    found = tr.read(path)
    assert (found.arms, found.steps[0].arm, found.collectives[0].arm) == (("stock", "tcp"), "tcp", "tcp")
    assert found.steps[0].arm.transport == found.ranks[0].transports[0].name == "tcp"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("tcp", ("tcp", None, None)),
        ("tcp:fp16", ("tcp", "fp16", None)),
        ("tcp@priority", ("tcp", None, "priority")),
        ("nccl+tcp:powersgd-4@priority", ("nccl+tcp", "powersgd-4", "priority")),
    ],
)
def test_an_arm_is_its_name_and_has_its_parts(name, parts):
    arm = Arm.parse(name)
    assert (arm.transport, arm.compression, arm.schedule) == parts
    assert arm == Arm(*parts) == name
    assert pickle.loads(pickle.dumps(arm)).schedule == parts[2]


@pytest.mark.parametrize("name", ["", ":fp16", "tcp:", "tcp@", "tcp:a:b", "tcp@a@b", "tcp,ofi", "tcp@a:b"])
def test_an_arm_with_an_empty_part_is_refused(name):
    with pytest.raises(ValueError, match="part"):
        Arm.parse(name)


def test_arms_of_one_transport_are_separate_and_share_its_record(tmp_path):
    """Operations belong to the arm of their step, and costs and streams to the transport that both arms use."""
    folder = FakeRun(tmp_path, transports=("stock", "ofi"), blocks=6).write()
    document = json.loads((folder / "run.json").read_text())
    document["arms"] = ["stock", "ofi:half"]
    (folder / "run.json").write_text(json.dumps(document))
    trace = ring_reader.load(folder)
    assert trace.arms == ("stock", "ofi:half")
    assert {c.arm for c in trace.collectives if c.step is not None} == {"stock", "ofi:half"}
    found = findings.find(trace)
    assert [pair.other for pair in found.comparisons] == ["ofi:half"]
    assert found.comparisons[0].other.compression == "half"
    assert set(found.times) == {"stock", "ofi:half"}
