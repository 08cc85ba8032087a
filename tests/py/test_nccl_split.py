"""NCCL's operations in a run: their buckets, the split of a message by both its ends, and the report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from netbottleneck.analysis import nccl
from netbottleneck.report import Run, summary
from netbottleneck.trace import ring_file, ring_reader
from netbottleneck.trace.events import Event
from netbottleneck.trace.model import Bucket, Collective, NcclKernel, NcclOperation, NcclStep, Step, Trace, read
from netbottleneck.trace.nccl_events import nccl_operations
from netbottleneck.trace.transports import STOCK
from ringwriter import BUCKETS, MS, FakeRun, RingWriter

BYTES = BUCKETS[0]["bytes"]
# Sent: the GPU fills until 10 ms, the network accepts at 12 ms, sent at 40 ms. The other end asks at 2 ms, has it
# all at 42 ms, flushes for 1 ms and empties its buffer for 5 ms.
SENT = NcclStep(True, 0, 1, 0, BYTES, (0, 10 * MS, 12 * MS, 40 * MS))
RECEIVED = NcclStep(False, 0, 0, 0, BYTES, (2 * MS, 42 * MS, 43 * MS, 48 * MS))


def operation(rank: int, *steps: NcclStep, **fields: object) -> NcclOperation:
    """An all-reduce of one communicator of two ranks."""
    plain = NcclOperation(rank, 0xC0FFEE, rank, 2, "AllReduce", "float32", BYTES, 0, sequence=3, network=steps)
    return replace(plain, **fields)  # type: ignore[arg-type]


def split_of(*found: NcclOperation) -> tuple[nccl.NcclSplit, ...]:
    return nccl.splits(Trace("a", 2, (), nccl=found))


def test_a_receivers_wait_is_split_by_what_its_sender_recorded() -> None:
    sender, receiver = split_of(operation(0, SENT), operation(1, RECEIVED))
    assert (sender.gpu_wait_ns, sender.peer_wait_ns, sender.wire_ns) == (10 * MS, 2 * MS, 28 * MS)
    assert (receiver.peer_wait_ns, receiver.wire_ns, receiver.gpu_wait_ns) == (10 * MS, 31 * MS, 5 * MS)
    assert sender.unknown_ns == receiver.unknown_ns == sender.idle_ns == receiver.idle_ns == 0


@pytest.mark.parametrize(
    ("bucket", "name"), [(0, "bucket.0"), (9, "AllReduce"), (-9, "AllReduce"), (None, "AllReduce")]
)
def test_an_operation_without_a_recorded_bucket_has_the_name_of_its_function(bucket: int | None, name: str) -> None:
    steps = (Step(0, 1, 0, STOCK, 0, 60 * MS),)
    own = (operation(0, SENT, step=1, bucket=bucket),)
    trace = Trace("a", 2, (STOCK,), buckets=(Bucket("bucket.0", 1, BYTES, "float32"),), steps=steps, nccl=own)
    assert [mean.name for mean in nccl.means(trace)] == [name]


def test_without_the_other_end_a_receivers_wait_is_not_split() -> None:
    (receiver,) = split_of(operation(1, RECEIVED))
    assert (receiver.unknown_ns, receiver.peer_wait_ns, receiver.wire_ns) == (40 * MS, 0, 1 * MS)


def test_a_late_receiver_is_the_senders_wait() -> None:
    late = replace(RECEIVED, times_ns=(30 * MS, 42 * MS, 43 * MS, 48 * MS))
    sender, receiver = split_of(operation(0, SENT), operation(1, late))
    assert (sender.gpu_wait_ns, sender.peer_wait_ns, sender.wire_ns) == (10 * MS, 20 * MS, 10 * MS)
    assert (receiver.peer_wait_ns, receiver.wire_ns) == (0, 13 * MS)


def test_the_time_until_the_kernel_starts_is_the_gpus_wait() -> None:
    """The proxies post at 0 ms, when the kernel is launched; both kernels start at 10 ms, and the wire takes 1 ms."""
    sent = replace(SENT, times_ns=(0, 10 * MS, 10 * MS, 11 * MS))
    received = replace(RECEIVED, times_ns=(0, 11 * MS, 11 * MS, 11 * MS))
    seen = (NcclKernel(0, 0, 0, 10 * MS, 11 * MS),)
    back = replace(sent, peer=0), replace(received, peer=1)
    for first, second in (((sent, back[1]), (back[0], received)), ((sent,), (received,))):
        kernel = () if len(first) == 2 else seen  # a message that is sent shows the start, too
        for split in split_of(operation(0, *first, kernel=kernel), operation(1, *second, kernel=kernel)):
            assert (split.wire_ns, split.peer_wait_ns, split.gpu_wait_ns) == (1 * MS, 0, 10 * MS)
    (alone,) = split_of(operation(1, received, kernel=seen))
    assert (alone.gpu_wait_ns, alone.unknown_ns) == (10 * MS, 1 * MS)


def test_a_kernel_that_started_waits_for_a_later_one() -> None:
    sent = replace(SENT, times_ns=(0, 10 * MS, 10 * MS, 11 * MS))
    received = replace(RECEIVED, times_ns=(0, 11 * MS, 11 * MS, 11 * MS))
    seen = (NcclKernel(0, 0, 0, 4 * MS, 11 * MS),)
    _, receiver = split_of(operation(0, sent), operation(1, received, kernel=seen))
    assert (receiver.wire_ns, receiver.peer_wait_ns, receiver.gpu_wait_ns) == (1 * MS, 6 * MS, 4 * MS)


@pytest.mark.parametrize("other", [{"sequence": 4}, {"comm": 1}, {"function": "Reduce"}])
def test_ends_of_different_messages_are_not_joined(other: dict[str, object]) -> None:
    _, receiver = split_of(operation(0, SENT, **other), operation(1, RECEIVED))
    assert receiver.unknown_ns == 40 * MS


def test_times_of_messages_in_flight_are_united() -> None:
    """While a message is on the wire, the time is the wire's, whatever the others wait for."""
    second = NcclStep(True, 0, 1, 1, BYTES, (0, 30 * MS, 30 * MS, 60 * MS))
    third = NcclStep(True, 1, 1, 0, BYTES, (70 * MS, 75 * MS, 75 * MS, 80 * MS))
    (split,) = split_of(operation(0, SENT, second, third))
    assert (split.network_ns, split.wire_ns, split.peer_wait_ns) == (80 * MS, 53 * MS, 2 * MS)
    assert (split.gpu_wait_ns, split.idle_ns) == (15 * MS, 10 * MS)


def test_a_kernel_lasts_from_its_first_channel_to_its_last() -> None:
    channels = (NcclKernel(0, 1000, 5000, 0, 9000), NcclKernel(1, 900, 4000, 0, 9000), NcclKernel(2, 1, 0, 0, 0))
    (split,) = split_of(operation(0, kernel=channels))
    assert split.kernel_ns == 4100  # a channel without an end is left out
    assert split_of(operation(0))[0].kernel_ns is None


def test_the_gpus_clock_is_bounded_by_the_host() -> None:
    """GPU minus host is 1000: called at 50, started at 60, seen at 64; stopped at 100, seen at 110."""
    first = operation(0, called_ns=50, kernel=(NcclKernel(0, 1060, 1100, 64, 110),))
    second = operation(0, called_ns=190, kernel=(NcclKernel(0, 1192, 1300, 200, 301),))
    assert nccl.gpu_clock([first]) == nccl.GpuClock(1003, 7)
    assert nccl.gpu_clock([first, second]) == nccl.GpuClock(1000, 2)
    assert nccl.gpu_clock([operation(0)]) is None
    assert nccl.gpu_clock([replace(first, called_ns=None)]) is None
    drifted = operation(0, called_ns=190, kernel=(NcclKernel(0, 1100, 1300, 200, 301),))
    found = nccl.gpu_clock([first, drifted])
    assert found is not None
    assert found.error_ns is None


def run_with_nccl(folder: Path, transports: tuple[str, ...] = ("stock",)) -> Path:
    """Write a run of two ranks whose first bucket NCCL moves, 1 µs after its submission, in every recorded step."""
    run = FakeRun(folder, transports=transports).write()
    for rank in range(2):
        train = ring_file.read_ring(run / "ranks" / f"{rank}.train.ring").events
        ring = RingWriter(run / "ranks" / f"{rank}.nccl.ring", rank)
        ring.put(0, "NCCL_COMM", key=0xC0FFEE, a=0, b=rank | 2 << 32, c=2)
        submits = train[(train["kind"] == ring_file.EVENTS["OP_SUBMIT"]) & (train["key"] == BUCKETS[0]["key"])]
        for call, submit in enumerate(submits["time_ns"].tolist()):
            task = call * 3 + 1
            what = 1 | 7 << 8 | 2 << 16 | 3 << 24 | 1 << 32
            ring.put(submit, "NCCL_TASK", key=task, a=0, b=BYTES, c=what, d=call)
            step = SENT if rank == 0 else RECEIVED
            begin, first, second, end = step.times_ns
            waits = {"c": first - begin, "d": second - first, "e": end - second}
            ends = {"a": (1 - rank) << 32, "b": int(step.sent) << 8 | BYTES << 16}
            ring.put(submit + begin, "NCCL_STEP", key=task, **ends, **waits)
            ring.put(submit + 50 * MS, "NCCL_KERNEL", key=task, b=49 * MS, c=7, d=7 + 45 * MS)
        ring.put(1, "NCCL_TASK", key=9999, a=0, b=64, c=4, d=0)  # before the first step
        ring.put(2, "NCCL_STEP", key=0, c=1)  # another process's
        ring.close()
    return run


def test_operations_are_those_of_the_buckets(tmp_path: Path) -> None:
    trace = ring_reader.load(run_with_nccl(tmp_path / "run"))
    own = [found for found in trace.nccl if found.step is not None]
    assert {(found.bucket, found.rank, len(found.network), len(found.kernel)) for found in own} == {
        (0, 0, 1, 1),
        (0, 1, 1, 1),
    }
    assert all(found.called_ns == found.submit_ns for found in own)
    assert [info.name for info in trace.ranks[0].transports] == ["stock"]  # NCCL's events are no transport
    early = [found for found in trace.nccl if found.step is None]
    assert {(found.function, found.bucket, found.called_ns) for found in early} == {("Broadcast", None, None)}


def test_calls_are_found_by_the_hosts_times(tmp_path: Path) -> None:
    """The GPU executes each step 300 ms after the host. The training's times are the GPU's, NCCL's are the host's."""
    late_ns, call_ns = 300 * MS, 1000
    run = run_with_nccl(tmp_path / "run")
    on_host = ring_reader.load(run)
    start, *edges = (ring_file.EVENTS[name] for name in ("OP_START", "STEP_BEGIN", "STEP_END"))
    for rank in range(2):
        path = run / "ranks" / f"{rank}.train.ring"
        ring = RingWriter(path, rank)
        for time_ns, kind, step, key, *rest in ring_file.read_ring(path).events.tolist():
            values = dict(zip("abcde", rest, strict=True))
            values |= {"b": call_ns} if kind == start else {}
            values |= {"e": late_ns} if kind in (start, *edges) else {}
            ring.put(time_ns + late_ns + call_ns * (kind == start), kind, step, key, **values)
        ring.put(0, "DEVICE_CLOCK", b=MS)
        ring.close()
    trace = ring_reader.load(run)
    assert {rank.device_error_ns for rank in trace.ranks} == {MS}
    assert {step.begin_ns for step in trace.steps} == {step.begin_ns + late_ns for step in on_host.steps}

    def known(found: Trace) -> list[tuple[object, ...]]:
        return [(one.rank, one.submit_ns, one.step, one.bucket, one.called_ns) for one in found.nccl]

    assert known(trace) == known(on_host)
    assert sum(one.step is not None for one in trace.nccl) == 72


@pytest.mark.parametrize(
    ("code", "kind", "parts"), [(1, "allreduce", 1), (2, "allgather", 4), (3, "reducescatter", 4), (4, "broadcast", 1)]
)
def test_an_operation_has_the_bytes_of_its_call(code: int, kind: str, parts: int) -> None:
    """NCCL counts one rank's part of an all-gather and of a reduce-scatter; the recorded call has the whole tensor."""
    call = Collective(0, STOCK, 1, 0, 10, BYTES, kind=kind, bucket=3, start_ns=20)
    opened = Event("NCCL_COMM", 0, 0, 0xC0FFEE, 0, 4 << 32, 1, 0, 0)
    task = Event("NCCL_TASK", 15, 0, 1, 0, BYTES // parts, code, 0, 0)
    (found,) = nccl_operations([opened, task], 0, lambda _: None, [call], ())
    assert (found.function.lower(), found.bytes, found.bucket) == (kind, BYTES, 3)


def test_a_tag_names_the_bucket(tmp_path: Path) -> None:
    """By the caller's tag, which is the bucket's key without its highest bit, whenever NCCL enqueues it."""
    run = run_with_nccl(tmp_path / "run")
    ring = RingWriter(run / "ranks" / "0.nccl.ring")
    ring.put(0, "NCCL_COMM", key=0xC0FFEE, a=0, b=2 << 32)
    ring.put(5, "NCCL_TASK", key=1, a=0, b=1, c=1, e=BUCKETS[0]["key"] & (1 << 63) - 1)
    ring.close()
    assert [found.bucket for found in ring_reader.load(run).of_rank(0).nccl] == [0]


def test_the_readable_form_holds_all_of_it(tmp_path: Path) -> None:
    run = run_with_nccl(tmp_path / "run")
    trace = ring_reader.convert(run)
    assert read(run / "ranks" / "1.jsonl.gz").nccl == trace.of_rank(1).nccl


def test_the_report_shows_the_split(tmp_path: Path) -> None:
    run = Run(run_with_nccl(tmp_path / "run"))
    (mean,) = run.findings.nccl
    assert (mean.name, mean.bytes, mean.kernel_ns) == ("bucket.0", BYTES, 45 * MS)
    assert (mean.network_ns, mean.wire_ns) == (43 * MS, 29.5 * MS)
    assert (mean.peer_wait_ns, mean.gpu_wait_ns, mean.unknown_ns) == (6 * MS, 7.5 * MS, 0)
    assert "NCCL's operations: kernel, and parts of the network time" in run.text
    assert any("bucket.0 2.0 MiB" in line and "45.0 ms" in line and "69 %" in line for line in run.text.splitlines())
    assert run.summary["nccl"][0]["peer_wait_s"] == pytest.approx(0.006)
    jsonschema.validate(json.loads(json.dumps(run.summary)), dict(summary.schema()))
    run.write_all(tmp_path / "out")
    assert "bucket.0, 2.0 MiB" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_arms_that_are_compared_have_means_of_their_own(tmp_path: Path) -> None:
    run = Run(run_with_nccl(tmp_path / "run", ("stock", "nccl+tcp")))
    assert {(mean.name, mean.arm, mean.operations) for mean in run.findings.nccl} == {
        ("bucket.0", "stock", 36),
        ("bucket.0", "nccl+tcp", 36),
    }
    for arm in ("stock", "nccl+tcp"):
        assert f"bucket.0 ({arm}) 2.0" in run.text
    assert {row["transport"] for row in run.summary["nccl"]} == {"stock", "nccl+tcp"}
    jsonschema.validate(json.loads(json.dumps(run.summary)), dict(summary.schema()))
    run.write_all(tmp_path / "out")
    assert "bucket.0 (nccl+tcp), 2.0 MiB" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_a_run_without_them_says_nothing_of_nccl(tmp_path: Path) -> None:
    run = Run(FakeRun(tmp_path / "run", transports=("stock",)).write())
    assert run.findings.nccl == ()
    assert "NCCL" not in run.text
