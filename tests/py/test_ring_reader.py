"""Rings become a trace: formats, clocks, ranks that were killed."""

import json
import os
import re
import struct
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic

import pytest

from netbottleneck.analysis.intervals import counted
from netbottleneck.report import caveats
from netbottleneck.runtime import run_folder
from netbottleneck.trace import model as tr
from netbottleneck.trace import ring_file, ring_reader
from netbottleneck.trace.events import Event
from netbottleneck.trace.transports import Arm
from ringwriter import BUCKETS, MS, FakeRun, RingWriter

EVENT_H = Path(__file__).parents[2] / "csrc" / "trace" / "event.h"


def test_event_numbers_are_those_of_the_header():
    found = {name: int(number) for name, number in re.findall(r"NB_EV_(\w+)\s*=\s*(\d+)", EVENT_H.read_text())}
    assert found == dict(ring_file.EVENTS)


def test_event_numbers_are_those_of_the_module():
    core = pytest.importorskip("netbottleneck._core", reason="netbottleneck._core is not built")
    assert dict(ring_file.EVENTS) == core.EVENTS


def test_numbers_within_operations_are_those_of_the_headers():
    from netbottleneck.trace import ring_reader

    csrc = EVENT_H.parents[1]
    kinds = re.search(r"enum nb_op_kind \{(.*?)\}", (csrc / "engine/engine.h").read_text(), re.S)[1]
    assert [k.lower() for k in re.findall(r"^ *NB_OP_(\w+)", kinds, re.M)][:-1] == list(ring_reader.KINDS)
    dtypes = re.search(r"enum nb_dtype \{(.*?)\}", (csrc / "base/dtype.h").read_text(), re.S)[1]
    short = {"u": "uint", "i": "int", "f": "float", "bf": "bfloat"}
    names = [re.fullmatch(r"NB_([A-Z]+)(\d*)", word.strip()) for word in dtypes.split(",")]
    assert [short[n[1].lower()] + n[2] for n in names if n[2]] == list(ring_reader.DTYPES)
    declared = re.findall(r"NB_ALGORITHM_(\w+) = (\d+)", (csrc / "coll/choose.h").read_text())
    labels = {**dict(enumerate(ring_reader.ALGORITHMS)), **ring_reader.IN_MEMORY}
    assert sorted(labels) == sorted(int(number) for _, number in declared)
    for word, number in declared:
        assert word.lower().replace("_", "") in re.sub("[ _-]", "", labels[int(number)] or "none")


def test_events_are_read_in_order_of_time(tmp_path):
    ring = RingWriter(tmp_path / "0.train.ring", rank=3, mono_ns=5, wall_ns=9)
    ring.put(20, "STEP_END", 1)
    ring.put(10, "STEP_BEGIN", 1, a=2, b=1, c=1)
    ring.put(15, "GRAD_READY", 1, key=2**64 - 1, e=2**63)
    ring.close()
    found = ring_file.read_ring(ring.path)
    assert found.events["time_ns"].tolist() == [10, 15, 20]
    assert int(found.events["key"][1]) == 2**64 - 1
    assert int(found.events["e"][1]) == 2**63
    assert (found.rank, found.opened_mono_ns, found.opened_wall_ns, found.closed, found.dropped) == (3, 5, 9, True, 0)


@pytest.mark.parametrize(("version", "kept", "gap"), [(3, [0, 1, 2, 3], (3, None)), (4, [0, 4, 5, 6], (0, 4))])
def test_a_full_ring_keeps_the_first_events_and_the_last_ones(tmp_path, version, kept, gap):
    ring = RingWriter(tmp_path / "0.train.ring", capacity=4, version=version)
    for at in range(7):
        ring.put(at, "STEP_BEGIN", at)
    ring.close()
    found = ring_file.read_ring(ring.path)
    assert found.events["time_ns"].tolist() == kept
    assert found.events["kind"].tolist() == [1] * 4
    assert (found.dropped, found.overwritten, found.gap) == (0, 3, gap)


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 8, 13])
def test_any_part_of_a_full_ring_has_its_last_events(tmp_path, capacity):
    ring = RingWriter(tmp_path / "0.train.ring", capacity=capacity)
    once = capacity // 4
    for at in range(50):
        ring.put(at, "STEP_BEGIN", at)
        ring.close()
        there = [one for one in range(at + 1) if one < once or one > at - (capacity - once)]
        for begin in (0, at // 2, at):
            for end in (None, at + 1, at):
                slots = ring_file.read_slots(ring.path, begin, end)
                expected = [one for one in there if begin <= one < (at + 1 if end is None else end)]
                assert slots.numbers.tolist() == slots.events["time_ns"].tolist() == expected
                assert set(slots.events["kind"].tolist()) <= {1}


def test_a_killed_writer_leaves_its_complete_events(tmp_path):
    ring = RingWriter(tmp_path / "0.train.ring", capacity=64)
    ring.put(1, "STEP_BEGIN")
    ring.tear()
    ring.put(2, "STEP_END")
    ring.close(orderly=False)
    found = ring_file.read_ring(ring.path)
    assert found.events["kind"].tolist() == [1, 2]
    assert (found.closed, found.dropped) == (False, 1)


def test_a_file_cut_within_an_event_loses_only_that_event(tmp_path):
    ring = RingWriter(tmp_path / "0.train.ring")
    for at in range(5):
        ring.put(at + 1, "GRAD_READY")
    ring.close(cut_bytes=30)
    found = ring_file.read_ring(ring.path)
    assert (len(found.events), found.dropped) == (4, 1)


def test_a_part_of_a_ring_is_read_with_the_slots_that_are_not_filled(tmp_path):
    ring = RingWriter(tmp_path / "0.train.ring", capacity=8)
    for at in (10, 11, 12):
        ring.put(at, "STEP_BEGIN", at)
    ring.tear()
    ring.close(orderly=False)
    slots = ring_file.read_slots(ring.path, 1)
    assert (slots.taken, slots.overwritten, slots.numbers.tolist()) == (4, 0, [1, 2, 3])
    assert slots.events["time_ns"].tolist() == [11, 12, 0]
    assert slots.events["kind"].tolist() == [1, 1, 0]
    assert ring_file.read_slots(ring.path, 1, 2).events["time_ns"].tolist() == [11]
    assert len(ring_file.read_slots(ring.path, 4).events) == 0


def test_a_run_is_read_from_the_rings_that_the_caller_gives(tmp_path):
    folder = FakeRun(tmp_path).write()

    def last_events(path):
        slots = ring_file.read_slots(path, 60)
        return ring_file.ring_of(slots.head, slots.events, 7)

    found = ring_reader.load(folder, last_events)
    assert 0 < len(found.steps) < len(ring_reader.load(folder).steps)
    assert all(rank.events_dropped >= 7 for rank in found.ranks)


def test_steps_whose_operations_a_full_ring_has_no_room_for_are_left_out(tmp_path):
    settings = {"transports": ("stock", "tcp"), "clock_skew_ns": {1: 5 * MS}, "version": 3}
    whole = ring_reader.load(FakeRun(tmp_path / "whole", blocks=12, **settings).write())
    per_step, blocks = 14, 3  # of tcp, all of whose operations have room
    room = {"tcp": 1 + blocks * 6 * per_step + 3}
    found = ring_reader.load(FakeRun(tmp_path / "full", blocks=12, room=room, **settings).write())
    first = (2 * blocks + 1) * 6  # the last complete step is left out, too: its events may be written later
    assert {step.index for step in found.steps} == set(range(1, first))
    assert found.collectives == tuple(one for one in whole.collectives if one.step < first)
    (note,) = set(found.notes) - set(whole.notes)
    assert note.startswith(f"steps from {first} on are left out: rank 0's file of events of tcp is full, and ")
    assert "NETBOTTLENECK_TRACE_EVENTS" in note
    assert [rank.events_dropped for rank in found.ranks] == [0, 0]


@pytest.mark.parametrize("ring", ["train", "tcp"])
def test_of_a_run_longer_than_its_files_the_first_and_the_last_steps_are_kept(tmp_path, ring):
    settings = {"transports": ("stock", "tcp"), "clock_skew_ns": {1: 5 * MS}}
    made = FakeRun(tmp_path / "whole", blocks=12, **settings).write()
    whole = ring_reader.load(made)
    events = len(ring_file.read_ring(made / "ranks" / f"1.{ring}.ring").events)
    found = ring_reader.load(FakeRun(tmp_path / "long", blocks=12, room={ring: events * 2 // 3}, **settings).write())
    (note,) = set(found.notes) - set(whole.notes)
    first, last = map(int, re.match(r"steps (\d+) to (\d+) are left out: ", note).groups())
    assert re.search(rf"rank \d's file of events of {ring} keeps only the first and the last events, and \d+ ", note)
    assert 3 <= first < last <= 69
    assert 72 / 3 <= last - first + 1 <= 72 / 2  # a third, and of the other arm what is between

    def is_kept(step):
        return not first <= step <= last

    assert found.steps == tuple(step for step in whole.steps if is_kept(step.index))
    assert found.collectives == tuple(one for one in whole.collectives if is_kept(one.step))
    assert [(rank.events_dropped, rank.steps_unfinished) for rank in found.ranks] == [
        (0, rank.steps_unfinished) for rank in whole.ranks
    ]


WRITE = """
import sys
from netbottleneck import _core

recorder = _core.Recorder(sys.argv[1], 64, 0)
print("open", flush=True)
number = 0
while True:
    recorder.put(_core.EVENTS["OP_DONE"], key=number, a=number, c=number, e=number)
    number += 1
"""


def test_an_event_is_whole_while_the_file_is_overwritten(tmp_path):
    path, read, laps = tmp_path / "0.train.ring", 0, set()
    with subprocess.Popen([sys.executable, "-c", WRITE, str(path)], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout.readline() == b"open\n"
            while len(laps) < 1000:
                slots = ring_file.read_slots(path)
                filled = slots.events["kind"] != 0
                events, numbers = slots.events[filled], slots.numbers[filled]
                assert set(events["kind"].tolist()) <= {ring_file.EVENTS["OP_DONE"]}
                for name in ("key", "a", "c", "e"):
                    assert events[name].tolist() == numbers.tolist()
                read += len(events)
                laps.add(slots.taken // 48)
        finally:
            writer.kill()
    assert read > 1000


def test_lasting_events_are_read_from_the_first_page(tmp_path):
    ring = RingWriter(tmp_path / "0.train.ring", capacity=8)
    for at in range(20):
        ring.put(at, "STEP_BEGIN", at)
    ring.close()
    raw = bytearray(ring.path.read_bytes())
    lost = struct.pack("<qIIQ5Q", 11, ring_file.EVENTS["LANE_LOST"], 11, 0, 1, 2, 3, 0, 0)
    raw[ring_file.LASTING_AT : ring_file.LASTING_AT + len(lost)] = lost
    ring.path.write_bytes(bytes(raw))
    found = ring_file.read_ring(ring.path)
    assert found.events["time_ns"].tolist() == [0, 1, 11, *range(14, 20)]
    assert (found.gap, found.overwritten, found.dropped) == ((1, 14), 12, 0)


@pytest.mark.parametrize("content", [b"", b"\0" * 5000, b"NBRING2\0" + b"\0" * 5000, b"NBRING1\0" + b"\0" * 10])
def test_a_file_that_is_not_a_ring_is_refused_by_name(tmp_path, content):
    path = tmp_path / "0.train.ring"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"train\.ring: not a ring file"):
        ring_file.read_ring(path)


def test_a_ring_of_another_version_is_refused(tmp_path):
    ring = RingWriter(tmp_path / "0.train.ring")
    ring.close()
    data = bytearray(ring.path.read_bytes())
    data[8] = 9
    ring.path.write_bytes(data)
    with pytest.raises(ValueError, match="ring version 9"):
        ring_file.read_ring(ring.path)


def test_a_call_of_the_script_has_its_kind_its_phase_and_its_ranks():
    def call(at, key, kind, phase, ranks=0, transport="stock"):
        about = kind | 6 << 8 | ring_reader.PHASES.index(phase) << 16
        put = [("OP_SUBMIT", 64, 0, ranks << 32, about), ("OP_START", 0, 0, 0, 0), ("OP_DONE", 0, 0, 0, 0)]
        return [Event(name, at + i, 0, key, 0, b, c, d, e) for i, (name, b, c, d, e) in enumerate(put)]

    events = [*call(1, 5, 0, "forward", 2), *call(5, 6, 33, "other", 4), *call(9, 7, 0, "reduce")]
    rows = ring_reader.collectives(events, 0, None, ring_reader.StepIndex([]), ring_reader.BucketIndex([]))
    assert [(c.kind, c.phase, c.ranks, c.dtype, c.by_script, c.comm) for c in rows] == [
        ("allreduce", "forward", 2, "float32", True, 0),
        ("gather", "other", 4, "float32", True, 0),
        ("allreduce", "reduce", None, "float32", False, 0),
    ]
    assert [c.name for c in rows[:2]] == ["forward/allreduce", "other/gather"]


@pytest.mark.parametrize(("transport", "nbytes"), [("tcp", 32), (None, 64)])
def test_an_all_to_all_has_the_bytes_of_its_input(transport, nbytes):
    number = ring_reader.KINDS.index("alltoall")
    submit = Event("OP_SUBMIT", 1, 0, 5, 0, 64, 0, 0, number | 6 << 8)
    (row,) = ring_reader.collectives([submit], 0, transport, ring_reader.StepIndex([]), ring_reader.BucketIndex([]))
    assert (row.kind, row.tensor_bytes) == ("alltoall", nbytes)


def test_a_pass_without_gradients_is_evaluation_and_a_save_a_checkpoint():
    kinds = ("STEP_BEGIN", "FORWARD_BEGIN", "FORWARD_END", "FORWARD_BEGIN", "FORWARD_END")
    kinds += ("CHECKPOINT_BEGIN", "CHECKPOINT_END", "STEP_END")
    events = [Event(kind, at, 0, 0, int(at == 1), 0, 0, 0, 0) for at, kind in enumerate(kinds)]
    (step,), _, _ = ring_reader.rank_steps(events, 0, [Arm("stock")], None)
    assert (step.evaluation, step.forward, step.checkpoints) == (((1, 2),), ((3, 4),), ((5, 6),))


def test_a_pass_inside_the_optimizer_s_step_is_no_part_of_its_time():
    kinds = ["STEP_BEGIN", "OPTIMIZER_BEGIN", "FORWARD_BEGIN", "FORWARD_END", "GRAD_READY", "OPTIMIZER_END", "STEP_END"]
    events = [Event(kind, at, 0, 0, 0, 0, 0, 0, 0) for at, kind in enumerate(kinds)]
    (step,), _, _ = ring_reader.rank_steps(events, 0, [Arm("stock")], None)
    assert step.optimizer == ((1, 2), (4, 5))
    events = [event for event in events if not event.kind.startswith("FORWARD")]
    (step,), _, _ = ring_reader.rank_steps(events, 0, [Arm("stock")], None)
    assert step.optimizer == ((1, 5),)


def test_a_run_is_read_as_steps_and_operations(tmp_path):
    trace = ring_reader.load(FakeRun(tmp_path, blocks=3, block_steps=4).write())
    assert [len([s for s in trace.steps if s.rank == r]) for r in (0, 1)] == [12, 12]
    step = next(s for s in trace.steps if s.arm == "stock")
    assert (step.block, len(step.forward), len(step.optimizer), len(step.waits)) == (1, 1, 1, 1)
    assert [parameter for parameter, _ in step.grad_ready] == [3, 2, 1, 0]
    sampled = next(s for s in trace.steps if s.sampled and s.arm != "bare")
    assert [module for module, _, _ in sampled.modules] == [0, 1, 2]
    assert {s.arm for s in trace.steps} == {"bare", "stock", "ofi"}
    assert {c.arm for c in trace.collectives} == {"stock", "ofi"}


def test_values_that_stock_does_not_report_are_null(tmp_path):
    trace = ring_reader.load(FakeRun(tmp_path, blocks=3).write())
    stock = next(c for c in trace.collectives if c.arm == "stock")
    assert stock.finished
    assert (stock.agreed_ns, stock.first_byte_ns, stock.lanes, stock.wire_bytes, stock.algorithm) == (None,) * 5
    native = next(c for c in trace.collectives if c.arm == "ofi")
    assert native.agreed_ns is not None
    assert native.first_byte_ns == native.start_ns + 1000
    assert native.lanes == ((0, 1 << 20, 1 << 20), (1, 1 << 20, 1 << 20))
    assert (native.wire_bytes, native.algorithm) == (2 << 20, "ring all-reduce")
    assert (native.name, native.key, native.bucket, native.priority, native.dtype) == (
        BUCKETS[0]["name"],
        BUCKETS[0]["key"],
        0,
        3,
        "float32",
    )


def test_events_of_the_training_thread_are_not_counted_twice(tmp_path):
    run = FakeRun(tmp_path, transports=("stock", "ofi"), blocks=2, block_steps=2)
    run.write()
    before = ring_reader.load(tmp_path)
    native = next(s for s in before.steps if s.arm == "ofi" and s.rank == 0)
    path = tmp_path / "ranks" / "0.train.ring"
    ring = RingWriter(path, capacity=1 << 16)
    for event in ring_file.read_ring(path).events.tolist():
        time_ns, kind, step, key, *rest = event
        ring.put(time_ns, kind, step, key, **dict(zip("abcde", rest, strict=True)))
    ring.put(native.begin_ns + 1, "OP_SUBMIT", native.index, 0x22, a=1, b=5, e=6 << 8)
    ring.close()
    after = ring_reader.load(tmp_path)
    assert after.collectives == before.collectives


@pytest.mark.parametrize(
    ("late_ms", "error_ms", "found"), [(0, 1, True), (40, 40, True), (-25, 30, True), (100, 20, False)]
)
def test_an_operation_belongs_to_the_step_of_its_submission_where_a_device_has_another_clock(
    tmp_path, late_ms, error_ms, found
):
    folder = FakeRun(tmp_path, transports=("ofi",), blocks=2, block_steps=4).write()
    on_one_clock = ring_reader.load(folder)
    path = folder / "ranks" / "0.train.ring"
    ring = RingWriter(path)
    for time_ns, kind, step, key, *rest in ring_file.read_ring(path).events.tolist():
        if kind not in (ring_file.EVENTS["GRAD_READY"], ring_file.EVENTS["GRADS_READY"]):
            ring.put(time_ns - late_ms * MS, kind, step, key, **dict(zip("abcde", rest, strict=True)))
    ring.put(0, "DEVICE_CLOCK", b=error_ms * MS)
    ring.close()
    trace = ring_reader.load(folder).of_rank(0)
    assert trace.ranks[0].device_error_ns == error_ms * MS
    steps = [c.step for c in on_one_clock.collectives if c.rank == 0]
    assert [c.step for c in trace.collectives] == (steps if found else [None] * len(steps))
    for step in trace.steps:
        assert sorted(index for index, _ in step.grad_ready) == ([0, 1, 2, 3] if found else [])
        assert all(step.begin_ns <= at_ns <= step.end_ns for _, at_ns in step.grad_ready)


def test_operations_without_a_round_are_counted_on(tmp_path):
    folder = FakeRun(tmp_path, transports=("stock",), blocks=1).write()
    numbered = ring_reader.load(folder)
    for rank in (0, 1):
        path = folder / "ranks" / f"{rank}.train.ring"
        ring = RingWriter(path, rank)
        for time_ns, kind, step, key, a, *rest in ring_file.read_ring(path).events.tolist():
            is_op = kind >= ring_file.EVENTS["OP_SUBMIT"]
            ring.put(time_ns, kind, step, key, a=0 if is_op else a, **dict(zip("bcde", rest, strict=True)))
        ring.close()
    counted = ring_reader.load(folder)
    assert [c.done_ns for c in counted.collectives] == [c.done_ns for c in numbered.collectives]
    assert len({(c.rank, *c.match) for c in counted.collectives}) == len(counted.collectives) == 24


def test_events_of_the_same_time_are_read_in_their_logical_order(tmp_path):
    folder = FakeRun(tmp_path, transports=("ofi",), blocks=1, block_steps=1).write()
    step = ring_reader.load(folder).steps[0]
    ring = RingWriter(folder / "ranks" / "0.ofi.ring")
    at = step.begin_ns + 1
    ring.put(at, "OP_LANE", key=5, b=0, c=7, d=7)
    ring.put(at, "OP_DONE", key=5, b=7, c=7, d=1)
    ring.put(at, "OP_START", key=5)
    ring.put(at, "OP_AGREED", key=5)
    ring.put(at, "OP_SUBMIT", key=5, b=7)
    ring.close()
    (found,) = (c for c in ring_reader.load(folder).collectives if c.rank == 0)
    assert (found.agreed_ns, found.start_ns, found.done_ns) == (at, at, at)
    assert (found.wire_bytes, found.lanes) == (7, ((0, 7, 7),))


def test_clocks_are_aligned_with_rank_0_by_heartbeat(tmp_path):
    plain = ring_reader.load(FakeRun(tmp_path / "a", blocks=2).write())
    skewed = ring_reader.load(FakeRun(tmp_path / "b", blocks=2, clock_skew_ns={1: -7_000_000_123}).write())
    assert skewed.steps == plain.steps
    assert skewed.collectives == plain.collectives
    clock = next(r.clock for r in skewed.ranks if r.rank == 1)
    assert (clock.method, clock.offset_ns) == ("heartbeat", -7_000_000_123)


@pytest.mark.parametrize(("skew_ns", "method", "offset_ns"), [(12 * MS, "heartbeat", 12 * MS), (300, "same clock", 0)])
def test_hosts_that_booted_together_have_one_clock_only_if_heartbeats_agree(tmp_path, skew_ns, method, offset_ns):
    """The heartbeats' error is 500 ns; wall clocks are compared to 20 ms."""
    trace = ring_reader.load(FakeRun(tmp_path, blocks=2, clock_skew_ns={1: skew_ns}).write())
    clock = next(r.clock for r in trace.ranks if r.rank == 1)
    assert (clock.method, clock.offset_ns) == (method, offset_ns)


def test_a_drifting_clock_is_aligned(tmp_path):
    folder = FakeRun(tmp_path, transports=("stock", "ofi"), blocks=2, block_steps=2).write()
    straight = ring_reader.load(folder)
    drift = 50e-6

    def theirs(time_ns):
        return time_ns + 10**9 + round(drift * time_ns)

    for name in ("train", "ofi"):
        path = folder / "ranks" / f"1.{name}.ring"
        ring = RingWriter(path, rank=1)
        for time_ns, kind, step, key, *rest in ring_file.read_ring(path).events.tolist():
            if kind != ring_file.EVENTS["CLOCK"]:
                ring.put(theirs(time_ns), kind, step, key, **dict(zip("abcde", rest, strict=True)))
        if name == "ofi":
            for at in range(0, 1000, 50):
                ring.put(theirs(at * MS), "CLOCK", a=theirs(at * MS) - at * MS, b=1000 + at)
        ring.close()
    followed = ring_reader.load(folder)
    for a, b in zip(straight.steps, followed.steps, strict=True):
        assert abs(a.begin_ns - b.begin_ns) < 1000
        assert abs(a.end_ns - b.end_ns) < 1000


def test_without_heartbeats_clocks_are_aligned_by_wall_time_which_is_recorded(tmp_path):
    folder = FakeRun(tmp_path, transports=("bare", "stock"), blocks=2, clock_skew_ns={1: 3 * 10**9}).write()
    plain = ring_reader.load(FakeRun(tmp_path / "plain", transports=("bare", "stock"), blocks=2).write())
    trace = ring_reader.load(folder)
    assert [r.clock.method for r in trace.ranks] == ["rank 0", "wall"]
    assert trace.steps == plain.steps
    assert [r.clock.method for r in plain.ranks] == ["rank 0", "same clock"]


def test_the_steps_of_a_killed_rank_are_kept_and_the_last_is_counted(tmp_path):
    trace = ring_reader.load(FakeRun(tmp_path, blocks=3, killed=1).write())
    alive, killed = trace.ranks
    assert (alive.finished, alive.steps_unfinished, alive.events_dropped) == (True, 0, 0)
    assert (killed.finished, killed.steps_unfinished, killed.events_dropped) == (False, 1, 1)
    assert len([s for s in trace.steps if s.rank == 1]) == len([s for s in trace.steps if s.rank == 0])


def test_an_unfinished_last_step_of_a_normal_end_is_not_counted_as_lost(tmp_path):
    folder = FakeRun(tmp_path, blocks=3, killed=1).write()
    meta = folder / "ranks" / "1.meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"finished": True}))
    assert ring_reader.load(folder).ranks[1].steps_unfinished == 0


def test_the_type_of_a_bucket_is_that_of_its_description(tmp_path):
    folder = FakeRun(tmp_path, transports=("stock",), blocks=1).write()
    for path in (folder / "ranks").glob("*.meta.json"):
        path.write_text(path.read_text().replace("float32", "bfloat16"))
    assert {c.dtype for c in ring_reader.load(folder).collectives} == {"bfloat16"}


def test_a_rank_without_a_description_is_read_with_the_others(tmp_path):
    folder = FakeRun(tmp_path, blocks=2).write()
    whole = ring_reader.load(folder)
    (folder / "ranks" / "0.meta.json").unlink()
    (folder / "ranks" / "1.ofi.ring").write_bytes(b"torn")
    trace = ring_reader.load(folder)
    assert trace.parameters == whole.parameters
    assert trace.steps == tuple(step for step in whole.steps if step.arm != "ofi")
    assert {step.rank for step in trace.steps} == {0, 1}
    assert any("rank 0 left no description" in note for note in trace.notes)
    assert "steps over ofi are left out: ranks/1.ofi.ring cannot be read" in trace.notes


@pytest.mark.parametrize("name", ["train", "ofi"])
def test_a_missing_file_of_events_is_named_and_own_traces_are_read_instead(tmp_path, name):
    folder = FakeRun(tmp_path, blocks=2).write()
    whole = ring_reader.convert(folder)
    (folder / "ranks" / f"1.{name}.ring").unlink()
    trace = ring_reader.load(folder)
    assert (trace.steps, trace.collectives) == (whole.steps, whole.collectives)
    assert f"ranks/1.{name}.ring cannot be read: ranks/<rank>.jsonl.gz are read instead" in trace.notes
    (folder / "ranks" / "1.jsonl.gz").unlink()
    trace = ring_reader.load(folder)
    if name == "train":
        assert {step.rank for step in trace.steps} == {rank.rank for rank in trace.ranks} == {0}
        assert "rank 1 is left out: ranks/1.train.ring cannot be read" in trace.notes
    else:
        assert {step.arm for step in trace.steps} == {step.arm for step in whole.steps} - {"ofi"}
    (folder / "ranks" / "0.train.ring").unlink()
    if name == "train":
        with pytest.raises(FileNotFoundError, match=r"no rank has left a record of its steps: ranks/0\.train\.ring"):
            ring_reader.load(folder)


def test_a_rank_without_any_file_of_events_is_read_from_its_own_trace(tmp_path):
    folder = FakeRun(tmp_path, blocks=2).write()
    whole = ring_reader.convert(folder)
    for path in (folder / "ranks").glob("1.*.ring"):
        path.unlink()
    assert ring_reader.load(folder).steps == whole.steps


def test_a_folder_in_place_of_a_file_of_events_is_left_out(tmp_path):
    folder = FakeRun(tmp_path, blocks=2).write()
    path = folder / "ranks" / "1.ofi.ring"
    path.unlink()
    path.mkdir()
    assert f"left out: {path}: Is a directory" in ring_reader.load(folder).notes


@pytest.mark.parametrize(("place", "value"), [(16, 2**60), (16, 0), (48, 2**60), (64, 2**62)])
def test_a_damaged_header_is_named(tmp_path, place, value):
    path = FakeRun(tmp_path, blocks=2).write() / "ranks" / "1.train.ring"
    content = bytearray(path.read_bytes())
    content[place : place + 8] = value.to_bytes(8, "little")
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"1\.train\.ring: its header is damaged"):
        ring_file.read_ring(path)


def test_faults_name_the_missing_ranks(tmp_path):
    folder = FakeRun(tmp_path, size=4, transports=("stock", "ofi"), blocks=2).write()
    ring = RingWriter(folder / "ranks" / "0.ofi.ring")
    ring.put(1, "STALL", key=4, a=1, b=5 * MS, c=~0b0101)
    ring.put(2, "PEER_LOST", a=3, b=-104)
    ring.put(3, "LANE_LOST", a=1, b=2, c=-5)
    ring.close()
    stall, peer, lane = ring_reader.load(folder).faults
    assert (stall.kind, stall.peers, stall.waited_ns) == ("stall", (1, 3), 5 * MS)
    assert (peer.kind, peer.peers, peer.code) == ("peer_lost", (3,), -104)
    assert (lane.kind, lane.lane, lane.code) == ("lane_lost", 2, -5)


@pytest.mark.parametrize(
    ("masks", "count", "named", "said"),
    [
        ((1 << 5, 1 << 16), 2, (5, 80), "rank 5, 80"),
        ((1 << 5, 0), 3, (5,), "rank 5 and 2 ranks above 127"),
        ((0, 0), 1, (), "1 rank above 127"),
        ((1 << 5, 0), 0, (5,), "rank 5"),  # of a version that did not count them
    ],
)
def test_a_stall_names_its_missing_ranks_and_counts_the_others(masks, count, named, said):
    (fault,) = ring_reader.faults([Event("STALL", 9, 3, 7, 0, 61, *masks, count)], 0, 200)
    assert (fault.peers, fault.others) == (named, max(0, count - len(named)))
    assert caveats._faults(tr.Trace("", 200, (), faults=(fault,))) == [f"rank 0: stall, {said}"]


def test_the_probe_of_a_rank_that_left_no_description_is_in_its_ring(tmp_path):
    folder = FakeRun(tmp_path, transports=("stock", "ofi"), blocks=2, probe=[]).write()
    ring = RingWriter(folder / "ranks" / "0.ofi.ring")
    ring.put(1, "PROBE", a=4, b=1000, c=2000)
    ring.close()
    info = next(i for i in ring_reader.load(folder).ranks[0].transports if i.name == "ofi")
    assert [(p.lanes, p.bytes, p.ns, p.bits_per_s) for p in info.probe] == [(4, 1000, 2000, 4e9)]


def test_a_step_in_which_a_probe_ran_is_noted_and_does_not_count(tmp_path):
    folder = FakeRun(tmp_path, transports=("stock", "ofi"), blocks=2).write()
    plain = ring_reader.load(folder)
    chosen = [step for step in plain.steps if (step.rank, step.arm.transport) == (0, "ofi")][3]
    ring = RingWriter(folder / "ranks" / "0.ofi.ring")
    for lanes in (1, 2):
        ring.put(chosen.end_ns - 1, "PROBE", a=lanes, b=1000, c=2000)
    ring.close()
    trace = ring_reader.load(folder)
    assert [(step.rank, step.index) for step in trace.steps if step.probed] == [(0, chosen.index)]
    counts = [{(step.rank, step.index) for step in counted(each)} for each in (plain, trace)]
    assert counts[0] - counts[1] == {(0, chosen.index)}


def test_the_costs_of_a_rank_that_left_no_description_are_in_its_ring(tmp_path):
    folder = FakeRun(tmp_path, transports=("stock", "ofi"), blocks=2).write()
    ring = RingWriter(folder / "ranks" / "0.ofi.ring")
    ring.put(1, "COSTS", a=30_000_000_000, b=500_000, c=50_000)
    ring.put(2, "COSTS", a=30_000_000_000, b=412_345, c=50_000)
    ring.close(orderly=False)
    (folder / "ranks" / "0.meta.json").unlink()
    infos = {i.name: i.costs for i in ring_reader.load(folder).ranks[0].transports}
    assert infos["ofi"] == (30_000.0, 0.412345, 0.05)  # what was known last
    assert infos.get("stock", ()) == ()


def test_the_readable_form_replaces_the_rings(tmp_path):
    folder = FakeRun(tmp_path, blocks=3, clock_skew_ns={1: 10**9}).write()
    trace = ring_reader.convert(folder)
    for path in (folder / "ranks").glob("*.ring"):
        path.unlink()
    assert ring_reader.load(folder) == trace


def test_a_path_that_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no run\.json"):
        ring_reader.load(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"version": 2}))
    with pytest.raises(ValueError, match=r"run\.json"):
        ring_reader.load(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "size": 2, "transports": ["stock"]}))
    with pytest.raises(FileNotFoundError, match="no rank"):
        ring_reader.load(tmp_path)


TWO_SESSIONS = """
import sys
from pathlib import Path
from time import monotonic
from netbottleneck import config
from netbottleneck.runtime import job
from netbottleneck.runtime.session import open_session

def measured(steps):
    session = open_session(config.settings({"transports": "tcp", "start_step": 0}))
    for _ in range(steps):
        session.begin()
        session.end()
    session.close()
    session.collect()
    job.stop()
    return session.folder

print(measured(2))
print(measured(3))
"""


def test_a_folder_with_a_run_is_kept_and_the_next_run_uses_a_subfolder(warm_ranks, tmp_path):
    run = tmp_path / "mine"
    folders = [run, run / "2", run / "3", run / "4"]
    alone = {
        name: "" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    alone |= {"NETBOTTLENECK_SIZE": "2", "NETBOTTLENECK_RENDEZVOUS": str(tmp_path), "NETBOTTLENECK_DIR": str(run)}
    for time in range(2):
        results = warm_ranks(2, TWO_SESSIONS, lambda rank: {**alone, "NETBOTTLENECK_RANK": str(rank)})
        for result in results:
            assert result.stdout.split() == [str(folder) for folder in folders[2 * time : 2 * time + 2]]
        assert f"{run} already holds a run: this run is written to {run}/" in results[0].stderr
    found = [ring_reader.load(folder) for folder in folders]
    assert [len([s for s in trace.steps if s.rank == 1]) for trace in found] == [2, 3, 2, 3]
    for rank in found[0].ranks:
        assert (rank.transports[0].streams_asked, rank.cores) == (0, tuple(sorted(os.sched_getaffinity(0))))
    assert all(step.cpu_ns is not None and step.cpu_ns >= 0 for trace in found for step in trace.steps)
    assert [trace.id for trace in found] == ["mine", "mine-2", "mine-3", "mine-4"]
    assert [sorted(path.name for path in folder.glob("ranks/*")) for folder in folders[1:]] == 3 * [
        sorted(path.name for path in run.glob("ranks/*"))
    ]


LIMIT_S = 7.0


class OtherHost:
    """Rank 1's side of a job whose rank 0, on another host, finds every folder free."""

    rank = 1

    def __init__(self, wanted):
        self.wanted = wanted
        self.sent = []

    def exchange(self, mine, limit_s):
        assert limit_s == LIMIT_S
        self.sent.append(mine)
        return [b"1" if len(mine) == 1 else str(self.wanted).encode().ljust(len(mine)), mine]


@pytest.mark.parametrize("left", ["ranks/1.train.ring", "run.json"])
def test_a_folder_that_another_host_holds_a_run_in_is_not_free(tmp_path, left):
    left = tmp_path / "run" / left
    left.parent.mkdir(parents=True)
    left.write_bytes(b"kept")
    comm = OtherHost(tmp_path / "run")
    assert run_folder.claim(comm, tmp_path / "else", LIMIT_S) == tmp_path / "run" / "2"
    assert comm.sent[1:] == [b"0", b"1"]


def test_a_rank_that_cannot_create_rank_0s_folder_uses_its_own_free_one(tmp_path):
    (tmp_path / "file").touch()
    wanted = tmp_path / "own"
    for folder in (wanted, wanted / "2", wanted / "3"):
        assert run_folder.claim(OtherHost(tmp_path / "file" / "run"), wanted, LIMIT_S) == folder
        assert (folder / "ranks").is_dir()
        run_folder.write_meta(folder, 1, {})
    with pytest.raises(OSError, match="file"):
        run_folder.claim(OtherHost(tmp_path / "file" / "run"), tmp_path / "file" / "own", LIMIT_S)


class Alone:
    """Rank 0's side of a job of one rank."""

    rank = 0

    def exchange(self, mine, limit_s):
        return [mine]


def test_a_folder_may_have_a_name_that_is_not_utf_8(tmp_path):
    wanted = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xffn"))
    assert run_folder.claim(Alone(), wanted, LIMIT_S) == wanted
    assert (wanted / "ranks").is_dir()


def test_complete_records_are_found_after_the_deadline_too(tmp_path):
    for rank in range(2):
        run_folder.write_meta(tmp_path, rank, {"finished": True})
    assert run_folder.incomplete(tmp_path, 2, until=0.0) == []
    assert run_folder.incomplete(tmp_path, 3, until=0.0) == [2]


class Meeting:
    """Ranks in threads: each has a folder of its own, or that of rank 0. lost: broadcasts do not end."""

    def __init__(self, folders, lost=False):
        self.folders, self.lost = folders, lost
        self.blobs = [b""] * len(folders)
        self.met = threading.Barrier(len(folders), timeout=60)
        self.sent = []  # ranks whose records were broadcast
        self.outcomes = [None] * len(folders)

    def gather(self, untils):
        ranks = [threading.Thread(target=self._rank, args=(rank, until)) for rank, until in enumerate(untils)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        return self.outcomes

    def _rank(self, rank, until):
        try:
            run_folder.gather(Member(self, rank), self.folders[rank], until)
        except OSError as error:
            self.outcomes[rank] = error

    def swap(self, rank, blob):
        self.blobs[rank] = blob
        self.met.wait()
        blobs = list(self.blobs)
        self.met.wait()
        return blobs


class Member:
    def __init__(self, meeting, rank):
        self.meeting, self.rank, self.size = meeting, rank, len(meeting.folders)

    def exchange(self, blob, limit_s):
        return self.meeting.swap(self.rank, blob)

    def submit(self, name, kind, memory, dtype, root):
        blobs = self.meeting.swap(self.rank, bytes(memory))
        if self.rank == root:
            self.meeting.sent.append(root)
        memory[:] = blobs[root]
        return self

    def wait(self, timeout_s=None):
        return not self.meeting.lost


@pytest.fixture
def apart(tmp_path):
    """Folders of four ranks: ranks 0 and 1 share a host and a folder, 2 and 3 have others, 3 with the same identity."""
    pytest.importorskip("netbottleneck._core", reason="netbottleneck._core is not built")
    folders = [tmp_path / name for name in ("a", "a", "b", "c")]
    for rank, (folder, host) in enumerate(zip(folders, ("0a", "0a", "0b", "0a"), strict=True)):
        run_folder.write_meta(folder, rank, {"host_id": host * 16})
        (folder / "ranks" / f"{rank}.train.ring").write_bytes(b"ring %d" % rank)
    run_folder.write_run(folders[0], {})
    return folders


def test_records_of_ranks_without_the_folder_are_copied_to_rank_0(apart):
    meeting = Meeting(apart)
    assert meeting.gather([monotonic() + 60] * 4) == [None] * 4
    assert meeting.sent == [2, 3]
    assert sorted(path.read_bytes() for path in apart[0].glob("ranks/*.ring")) == [b"ring %d" % n for n in range(4)]


def test_records_are_copied_if_the_hosts_are_not_known(apart):
    for rank, folder in enumerate(apart):
        run_folder.write_meta(folder, rank, {})
    meeting = Meeting(apart)
    meeting.gather([monotonic() + 60] * 4)
    assert meeting.sent == [1, 2, 3]


def test_all_ranks_stop_copying_when_the_time_of_one_is_over(apart):
    meeting = Meeting(apart)
    outcomes = meeting.gather([monotonic() + 60] * 3 + [monotonic()])
    assert [type(one) for one in outcomes] == [TimeoutError] * 4
    assert meeting.sent == []
    outcomes = Meeting(apart, lost=True).gather([monotonic() + 60] * 4)
    assert [type(one) for one in outcomes] == [TimeoutError] * 4


def test_the_written_part_of_an_open_ring_is_copied_to_rank_0(tmp_path):
    ring = RingWriter(tmp_path / "1" / "ranks" / "1.nccl.ring", 1)
    for at in range(3):
        ring.put(at, "STEP_BEGIN", at)
    ring.close(orderly=False)
    cut = tmp_path / "1" / "ranks" / "1.train.ring"
    cut.write_bytes(b"cut short")
    meta = tmp_path / "1" / "ranks" / "1.meta.json"
    meta.write_text("{}")
    folders = [tmp_path / "0", tmp_path / "1"]
    run_folder.write_run(folders[0], {})
    run_folder.write_meta(folders[0], 0, {})
    assert Meeting(folders).gather([monotonic() + LIMIT_S] * 2) == [None] * 2
    ranks = folders[0] / "ranks"
    assert (ranks / "1.nccl.ring").read_bytes() == ring.path.read_bytes()[: 4096 + 3 * 64]
    copied, own = (ring_file.read_ring(path) for path in (ranks / "1.nccl.ring", ring.path))
    assert (copied.events == own.events).all()
    assert copied.dropped == own.dropped == 0
    assert (ranks / "1.train.ring").read_bytes() == b"cut short"
    assert (ranks / "1.meta.json").read_text() == "{}"


def test_a_description_that_cannot_be_opened_is_a_note(tmp_path):
    folder = FakeRun(tmp_path, blocks=3).write()
    meta = folder / "ranks" / "1.meta.json"
    meta.unlink()
    meta.mkdir()
    trace = ring_reader.load(folder)
    assert {step.rank for step in trace.steps} == {0, 1}
    assert f"{meta}: Is a directory" in trace.notes


@pytest.mark.parametrize("transports", [("stock", "ofi"), ("stock",)])
def test_a_rank_of_another_time_is_left_out(tmp_path, transports):
    folder = FakeRun(tmp_path / "one", blocks=3, transports=transports).write()
    other = FakeRun(tmp_path / "other", blocks=3, transports=transports, begin_ns=10**13).write()
    for path in (other / "ranks").glob("1.*"):
        path.replace(folder / "ranks" / path.name)
    trace = ring_reader.load(folder)
    assert {step.rank for step in trace.steps} == {0}
    assert [rank.rank for rank in trace.ranks] == [0]
    assert any("rank 1 is left out" in note and "no time in common" in note for note in trace.incomplete)


@pytest.mark.parametrize("skew_ns", [0, 10**13])
def test_a_rank_of_another_clock_or_that_was_killed_is_kept(tmp_path, skew_ns):
    folder = FakeRun(tmp_path, blocks=3, killed=1, clock_skew_ns={1: skew_ns}).write()
    assert {step.rank for step in ring_reader.load(folder).steps} == {0, 1}
