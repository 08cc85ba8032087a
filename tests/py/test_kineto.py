"""Traces of torch.profiler: from a real training, from JSON made of a known run, and damaged ones."""

from __future__ import annotations

import csv
import gzip
import io
import json
from dataclasses import replace
from itertools import pairwise

import pytest
from conftest import Ranks

from netbottleneck import cli
from netbottleneck.report import Run, exporters, summary
from netbottleneck.trace import kineto
from netbottleneck.whatif import questions, sweeps
from ringwriter import BUCKETS, MS, PARAMETERS, FakeRun

TRAINING = """
import sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

folder = sys.argv[1]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(64, 8192), torch.nn.ReLU(), torch.nn.Linear(8192, 64)), bucket_cap_mb=1
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def ready(prof):
    prof.export_chrome_trace(f"{folder}/rank{rank}.pt.trace.json.gz")

with profile(
    activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=16, repeat=1), on_trace_ready=ready,
    record_shapes=True,
) as prof:
    for _ in range(19):
        inputs, targets = torch.randn(8, 64), torch.randint(10, (8,))
        if rank == 1:
            time.sleep(0.2)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        prof.step()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def profiled(tmp_path_factory, warm):
    """Return the folder of two ranks of DDP over gloo under torch.profiler; rank 1 pauses before each forward."""
    folder = tmp_path_factory.mktemp("profiled")
    ranks = Ranks(tmp_path_factory.mktemp("ranks"), warm=warm)
    ranks(2, TRAINING, args=[str(folder)])
    return folder


def test_a_profiled_training_gets_the_verdict_of_its_cause(profiled):
    run = Run(profiled)
    assert run.trace.size == 2
    assert len(run.trace.steps) == 2 * 16
    assert all(step.forward and step.grad_ready and step.optimizer for step in run.trace.steps)
    assert {len([c for c in run.trace.collectives if (c.rank, c.step) == (0, s)]) for s in range(2, 18)} == {2}
    parts = run.findings.parts["stock"]
    assert parts.tensor_bytes == 4 * (64 * 8192 + 8192 + 8192 * 64 + 64)
    assert run.findings.lateness.straggler == 1
    assert run.verdict.code == "STRAGGLER"
    assert run.findings.lateness.persistent_ns.value > 0
    longer = run.findings.lateness.longer
    assert max(longer, key=longer.get) == "input"


def test_gradients_of_a_profiled_training_belong_to_their_buckets(profiled):
    trace = Run(profiled).trace
    assert sorted(p.bytes for p in trace.parameters) == sorted(4 * n for n in (64 * 8192, 8192, 8192 * 64, 64))
    assert sum(bucket.bytes for bucket in trace.buckets) == sum(p.bytes for p in trace.parameters)
    for number, bucket in enumerate(trace.buckets):
        assert sum(trace.parameters[p].bytes for p in bucket.parameters) == bucket.bytes
        assert {trace.parameters[p].bucket for p in bucket.parameters} == {number}


def test_the_command_reports_a_folder_of_profiles_and_one_of_them(profiled, capsys):
    assert cli.main(["report", str(profiled)]) == 0
    assert "Rank 1 makes the others wait" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["report", str(profiled / "rank1.pt.trace.json.gz")]) == 0
    assert "no record of rank 0" in capsys.readouterr().out


# Kineto's JSON of a run whose parts are known.


def event(name, span, category="user_annotation", **args):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": span[0] / 1e3,
        "dur": (span[1] - span[0]) / 1e3,
        "args": args,
    }


def shape(count):
    return {"Input Dims": [[count]], "Input type": ["float"]}


def cpu_events(trace, rank):
    for step in (s for s in trace.steps if s.rank == rank):
        yield event(f"ProfilerStep#{step.index}", (step.begin_ns, step.end_ns))
        for span in step.forward:
            yield event("DistributedDataParallel.forward", span)
        for span in step.optimizer:
            yield event("Optimizer.step#SGD.step", span)
        for index, at in step.grad_ready:
            yield event(kineto.GRADIENT, (at - 1000, at), "cpu_op")
            yield event(
                "torch::autograd::AccumulateGrad", (at - 500, at), "cpu_op", **shape(PARAMETERS[index]["bytes"] // 4)
            )
    for one in (c for c in trace.collectives if c.rank == rank):
        size = shape(one.tensor_bytes // 4)
        yield event(
            "c10d::allreduce_",
            (one.submit_ns, one.submit_ns + 100),
            "cpu_op",
            **{**size, "Input Dims": [[size["Input Dims"][0]]]},
        )
        yield event("gloo:all_reduce", (one.start_ns, one.done_ns), **size)


def gpu_events(trace, rank):
    """The CPU launches everything at the begin of a step. A kernel of NCCL runs from this rank's arrival on."""
    begins = {step.index: step.begin_ns for step in trace.steps if step.rank == rank}
    for step in (s for s in trace.steps if s.rank == rank):
        yield event(f"ProfilerStep#{step.index}", (step.begin_ns, step.end_ns))
        yield event(f"ProfilerStep#{step.index}", (step.begin_ns + 5000, step.end_ns + 5000), "gpu_user_annotation")
        first, last = step.forward[0][0], max(at for _, at in step.grad_ready)
        middle = (first + last) // 2
        yield event("sgemm_128", (first, middle), "kernel", stream=7)
        yield event("sgemm_64", (middle, last), "kernel", stream=7)
        for span in step.optimizer:
            yield event("multi_tensor_apply_kernel", span, "kernel", stream=7)
    for number, one in enumerate(c for c in trace.collectives if c.rank == rank):
        about = {"External id": number, "Collective name": "allreduce", "In msg nelems": one.tensor_bytes // 4}
        about |= {"Out msg nelems": one.tensor_bytes // 4, "dtype": "Float", "Process Group Name": "0"}
        called_ns = begins[one.step] + 200 * number
        yield event("record_param_comms", (called_ns, called_ns + 100), "cpu_op", **about)
        yield event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", (one.submit_ns, one.done_ns), "kernel", **about)


def write(folder, trace, events, ranks=None, base_ns=10**18, **distributed):
    folder.mkdir(exist_ok=True)
    for rank in range(trace.size) if ranks is None else ranks:
        about = {"backend": "gloo", "rank": rank, "world_size": trace.size, **distributed}
        whole = {"schemaVersion": 1, "distributedInfo": about, "host_name": "one", "baseTimeNanoseconds": base_ns}
        whole["traceEvents"] = [*events(trace, rank), {"ph": "i", "name": "end", "ts": 0.0}]
        with gzip.open(folder / f"r{rank}.pt.trace.json.gz", "wt") as file:
            json.dump(whole, file)
    return folder


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """A run of known parts, on three ranks of which one is late."""
    folder = tmp_path_factory.mktemp("known") / "run"
    return Run(FakeRun(folder, size=3, transports=("stock",), blocks=1, block_steps=12, late_ms={2: 9}).write())


@pytest.mark.parametrize("events", [cpu_events, gpu_events])
def test_the_parts_of_a_profiled_step_are_those_of_the_same_run_recorded_by_us(known, tmp_path, events):
    found = Run(write(tmp_path / "k", known.trace, events))
    ours, theirs = known.findings.parts["stock"], found.findings.parts["stock"]
    for name in ("step_ns", "compute_ns", "hidden_ns", "exposed_ns", "wait_ns", "other_ns", "input_ns", "skew_ns"):
        assert getattr(theirs, name) == pytest.approx(getattr(ours, name), abs=2000), name
    assert theirs.tensor_bytes == ours.tensor_bytes
    assert found.findings.achieved["stock"].active_bps == pytest.approx(
        known.findings.achieved["stock"].active_bps, rel=1e-3
    )
    assert found.verdict.code == known.verdict.code
    assert found.findings.lateness.straggler == 2


def test_the_layers_and_the_what_if_work_from_a_profile(known, tmp_path):
    found = Run(write(tmp_path / "k", known.trace, cpu_events))
    assert [bucket.bytes for bucket in found.trace.buckets] == [bucket["bytes"] for bucket in BUCKETS]
    exposed = sum(layer.exposed_ns for layer in found.findings.layers)
    assert exposed == pytest.approx(found.findings.parts["stock"].exposed_ns, rel=0.01)
    assert all(found.trace.buckets[one.bucket].bytes == one.tensor_bytes for one in found.trace.collectives)
    jobs = [questions.job(trace, "stock") for trace in (known.trace, found.trace)]
    for setting in (sweeps.now, sweeps.free):
        recorded, profiled = (questions.answer(job, setting(job)).step_s.value for job in jobs)
        assert profiled == pytest.approx(recorded, rel=0.01)
    (saved,) = (one for one in found.verdict.evidence if one.cause == "bucket sizes")
    (expected,) = (one for one in known.verdict.evidence if one.cause == "bucket sizes")
    assert (saved.saving is None) == (expected.saving is None)


def test_what_if_reads_one_file_of_a_profile_and_names_the_missing_ranks(known, tmp_path, capsys):
    folder = write(tmp_path / "k", known.trace, cpu_events)
    assert cli.main(["what-if", str(folder / "r0.pt.trace.json.gz")]) == 2
    assert "no record of rank 1, 2: waiting for the last rank cannot be told" in capsys.readouterr().err


def test_a_monitored_barrier_is_not_the_call_of_a_later_barrier(known, tmp_path):
    def with_barriers(trace, rank, monitored=()):
        own = [one for one in trace.steps if one.rank == rank]
        called = [event("c10d::barrier", (one.begin_ns + 1000, one.begin_ns + 2000), "cpu_op") for one in own]
        ended = [event("gloo:barrier", (one.begin_ns + 1000, one.begin_ns + 9000)) for one in own]
        return [*cpu_events(trace, rank), *monitored, *called, *ended]

    def with_monitored(trace, rank):
        begin = trace.steps[0].begin_ns
        return with_barriers(trace, rank, [event("c10d::monitored_barrier_", (begin + 10, begin + 900), "cpu_op")])

    plain, found = (Run(write(tmp_path / made.__name__, known.trace, made)) for made in (with_barriers, with_monitored))
    times = [[(one.submit_ns, one.start_ns) for one in run.trace.collectives] for run in (plain, found)]
    assert times[0] == times[1]


def submitted(folder, trace, kind, calls, annotations):
    """Return when each operation of rank 0 was submitted, in us after its step's begin.

    calls, annotations: (place of the step, us after its begin, elements) of those added to the known run.
    """
    own = [one for one in trace.steps if one.rank == 0]

    def events(trace, rank):
        yield from cpu_events(trace, rank)
        for name, times, category in (("c10d::{}_", calls, "cpu_op"), ("gloo:{}", annotations, "user_annotation")):
            for place, at_us, count in times:
                begin = own[place].begin_ns + 1000 * at_us
                yield event(name.format(kind), (begin, begin + 10), category, **shape(count))

    found = Run(write(folder, trace, events, ranks=(0,))).trace
    begins = {step.index: step.begin_ns for step in found.steps}
    return [(one.submit_ns - begins[one.step]) / 1000 for one in found.collectives if one.kind == kind]


def test_an_uneven_all_to_all_begins_with_the_call_of_its_own_step(known, tmp_path):
    """An annotation has the input, a call first the output: each has the size of the other in the next step."""
    calls = [(place, 100, 7 + 2 * (place % 2)) for place in range(4)]
    annotations = [(place, 150, 9 - 2 * (place % 2)) for place in range(4)]
    assert submitted(tmp_path / "k", known.trace, "alltoall", calls, annotations) == [100] * 4


def test_a_call_without_an_annotation_is_not_that_of_a_later_step(known, tmp_path):
    calls, annotations = [(0, 50, 8), (2, 100, 8), (3, 200, 8)], [(2, 150, 8), (3, 250, 8)]
    assert submitted(tmp_path / "k", known.trace, "reduce", calls, annotations) == [100, 200]


def test_operations_in_flight_begin_in_the_order_of_their_calls(known, tmp_path):
    calls = [(1, 10, 8), (1, 20, 8), (1, 40, 8), (2, 10, 8)]
    annotations = [(1, 30, 8), (1, 50, 8), (1, 60, 8), (2, 20, 8)]
    assert submitted(tmp_path / "k", known.trace, "reduce", calls, annotations) == [10, 20, 40, 10]


def test_a_folder_has_its_name_as_the_present_one_too(known, tmp_path, monkeypatch):
    folder = write(tmp_path / "profiles", known.trace, cpu_events)
    monkeypatch.chdir(folder)
    assert Run(".").trace.id == Run(folder).trace.id == "profiles"


def test_a_parameter_of_one_number_belongs_to_its_bucket(known, tmp_path):
    def with_a_number(trace, rank):
        for one in cpu_events(trace, rank):
            if one["name"] == "torch::autograd::AccumulateGrad":
                (count,) = one["args"]["Input Dims"][0]
                yield {**one, "args": shape(count - 1)}
                yield {**one, "args": {"Input Dims": [[]], "Input type": ["float"]}}
            else:
                yield one

    found, plain = (
        Run(write(tmp_path / made.__name__, known.trace, made)).trace for made in (with_a_number, cpu_events)
    )
    assert [one.bytes for one in found.buckets] == [one.bytes for one in plain.buckets]
    assert len(found.parameters) == 2 * len(plain.parameters)


def test_broadcast_buffers_are_no_bucket(known, tmp_path):
    def with_buffers(trace, rank):
        yield from cpu_events(trace, rank)
        for step in (step for step in trace.steps if step.rank == rank):
            begin = step.begin_ns + 1000
            yield event("gloo:broadcast", (begin, begin + 5000), **shape(4))

    found = Run(write(tmp_path / "k", known.trace, with_buffers))
    reduced = [one for one in found.trace.collectives if one.kind == "allreduce"]
    assert len(reduced) < len(found.trace.collectives)
    assert all(found.trace.buckets[one.bucket].bytes == one.tensor_bytes for one in reduced)
    without = Run(write(tmp_path / "w", known.trace, cpu_events)).findings.layers
    *own, rest = (round(layer.exposed_ns) for layer in found.findings.layers)
    assert own == [round(layer.exposed_ns) for layer in without]
    assert rest < 5000  # of the broadcast, which has no layer


def test_what_a_profile_does_not_tell_is_said(known, tmp_path, capsys):
    def without_shapes(trace, rank):
        for one in cpu_events(trace, rank):
            yield {**one, "args": {}}

    found = Run(write(tmp_path / "k", known.trace, without_shapes))
    assert "profile with record_shapes=True" in " ".join(found.text.split())
    assert found.findings.achieved == {}
    assert found.trace.parameters == ()
    cells = exporters.numbers(found.summary, found.trace).tables()["collectives"]
    rows = list(csv.DictReader(io.StringIO(summary.collectives_csv(found.trace))))
    for name in ("tensor_bytes", "lane_bytes_sent"):
        assert set(cells.column(name)) == {None}
        assert {row[name] for row in rows} == {""}
    drawn = [one["args"] for one in summary.chrome_trace(found.trace)["traceEvents"] if "op" in one.get("args", {})]
    assert {one["bytes"] for one in drawn} == {None}
    assert "allreduce.0, exposed: " in found.html
    assert cli.main(["what-if", str(tmp_path / "k")]) == cli.USAGE
    assert "the sizes of the gradients are not known: a profile has none without record_shapes=True" in (
        capsys.readouterr().err
    )
    assert found.findings.parts["stock"].exposed_ns == pytest.approx(known.findings.parts["stock"].exposed_ns, abs=2000)
    on_gpu = Run(write(tmp_path / "g", known.trace, gpu_events))
    assert "forward, backward and optimizer are not distinguished" in " ".join(on_gpu.text.split())


def test_a_profile_without_a_forward_says_that_input_counts_as_compute(known, tmp_path):
    def bare(events):
        return lambda trace, rank: (one for one in events(trace, rank) if "DataParallel" not in one["name"])

    note = "no forward of DDP is in these traces: before the first gradient, input cannot be told from compute."
    for number, (events, said) in enumerate(((bare(cpu_events), 1), (cpu_events, 0), (bare(gpu_events), 0))):
        run = Run(write(tmp_path / f"k{number}", known.trace, events))
        assert run.trace.notes.count(note) == said
        assert run.text.count("no forward") == said


def test_operations_without_a_size_among_others_leave_no_rate(known, tmp_path):
    def some_without(trace, rank):
        for one in gpu_events(trace, rank):
            bare = one["name"].startswith("nccl") and one["args"]["External id"] % 2
            yield {**one, "args": {"External id": one["args"]["External id"]}} if bare else one

    run = Run(write(tmp_path / "k", known.trace, some_without))
    sizes = [one.tensor_bytes for one in run.trace.collectives]
    without = sizes.count(None)
    assert 0 < without < len(sizes)
    assert any(
        note.startswith(f"the sizes of {without} of {len(sizes)} operations are not") for note in run.trace.notes
    )
    assert run.findings.achieved == {}
    assert run.summary["split"]["stock"]["tensor_bytes"] is None


def test_an_operation_of_a_sparse_tensor_has_no_size(known, tmp_path):
    """The shape of a sparse tensor is that of the whole one."""

    def sparse(trace, rank):
        sizes = {one.tensor_bytes // 4 for one in trace.collectives}
        for one in cpu_events(trace, rank):
            largest = one["args"].get("Input Dims") == [[max(sizes)]]
            yield {**one, "name": "gloo:sparse_all_reduce"} if one["name"] == "gloo:all_reduce" and largest else one

    run = Run(write(tmp_path / "k", known.trace, sparse))
    largest = max(one.tensor_bytes for one in known.trace.collectives)
    expected = [None if one.tensor_bytes == largest else one.tensor_bytes for one in known.trace.collectives]
    assert [one.tensor_bytes for one in run.trace.collectives] == expected
    count = expected.count(None)
    assert 0 < count < len(expected)
    (note,) = (note for note in run.trace.notes if "sizes" in note)
    assert (
        note == f"the sizes of {count} operations are not known: they are of sparse tensors. Their steps have no rate."
    )
    assert run.findings.achieved == {}


def test_missing_and_damaged_ranks_are_named(known, tmp_path):
    folder = write(tmp_path / "k", known.trace, cpu_events, ranks=(0, 2))
    assert "no record of rank 1." in Run(folder).text
    path = folder / "r2.pt.trace.json.gz"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    run = Run(folder)
    (damaged,) = (note for note in run.trace.notes if note.startswith("left out: "))
    assert damaged.startswith(f"left out: {path}: damaged")
    assert "no record of rank 1, 2." in " ".join(run.text.split())


def test_folders_that_cannot_be_one_run_are_refused(known, tmp_path, capsys):
    folder = write(tmp_path / "k", known.trace, cpu_events, ranks=(0,))
    (folder / "again.json.gz").write_bytes((folder / "r0.pt.trace.json.gz").read_bytes())
    with pytest.raises(ValueError, match=r"more than one trace of torch\.profiler of rank 0"):
        Run(folder)

    def no_steps(trace, rank):
        return (one for one in cpu_events(trace, rank) if "ProfilerStep" not in one["name"])

    assert cli.main(["report", str(write(tmp_path / "n", known.trace, no_steps, ranks=(0,)))]) == 2
    said = capsys.readouterr().err
    assert "profile with schedule=torch.profiler.schedule(...), and call prof.step() after each step" in said


def test_a_report_may_be_written_beside_the_profiles(known, tmp_path):
    folder = write(tmp_path / "k", known.trace, cpu_events)
    Run(folder).write_all()
    assert (folder / "trace.json.gz").exists()
    assert Run(folder).verdict.code == Run(folder).verdict.code
    assert cli.main(["report", str(folder)]) == 0


# Operations that do not belong together.


def with_extra_call(ranks, steps=None):
    """Return events with an all-reduce of a group of these ranks at the begin of steps: of `steps`, or of all."""

    def events(trace, rank):
        yield from cpu_events(trace, rank)
        for step in (one for one in trace.steps if one.rank == rank):
            if rank in ranks and (steps is None or step.index in steps):
                begin = step.begin_ns + 1000
                yield event("c10d::allreduce_", (begin, begin + 100), "cpu_op", **shape(8))
                yield event("gloo:all_reduce", (begin, begin + 5000), **shape(8))

    return events


def shared_keys(trace):
    """Return the steps in which operations of all ranks have the same key."""
    found = {}
    for one in trace.collectives:
        found.setdefault((one.step, one.key), set()).add(one.rank)
    return {step for (step, _), ranks in found.items() if len(ranks) == trace.size}


def unmatched(run, begin):
    """Assert that a run says `begin`, and nothing that needs to know which operations belong together."""
    (note,) = (note for note in run.trace.notes if "belong together is not known" in note)
    assert note.startswith(begin)
    assert shared_keys(run.trace) == set()
    assert run.verdict.code == "INCONCLUSIVE"
    assert note[1:] in run.verdict.why  # where it begins a sentence
    assert (run.findings.lateness, run.findings.achieved) == (None, {})
    assert run.findings.parts["stock"].skew_ns == 0
    assert note.rstrip(".") in {one.rests for one in run.verdict.evidence if one.cause == "straggler"}
    with pytest.raises(ValueError, match="belong together is not known"):
        questions.job(run.trace, "stock")


def test_operations_of_some_ranks_alone_do_not_shift_the_pairs_of_the_others(known, tmp_path):
    unmatched(Run(write(tmp_path / "k", known.trace, with_extra_call((0, 2)))), "in 12 of 12 steps the ranks'")


def test_clocks_are_not_aligned_by_operations_that_may_not_belong_together(known, tmp_path):
    folder = write(tmp_path / "k", known.trace, with_extra_call((0, 2)))
    path = folder / "r1.pt.trace.json.gz"
    whole = json.loads(gzip.decompress(path.read_bytes()))
    path.write_bytes(gzip.compress(json.dumps({**whole, "host_name": "two"}).encode()))
    run = Run(folder)
    assert [rank.clock.method for rank in run.findings.trace.ranks] == ["rank 0", "wall", "same clock"]
    unmatched(run, "in 12 of 12 steps")


def test_a_single_step_that_differs_is_left_out_and_the_others_are_matched(known, tmp_path):
    run = Run(write(tmp_path / "k", known.trace, with_extra_call((0, 2), {7})))
    steps = {one.index for one in known.trace.steps}
    assert shared_keys(run.trace) == steps - {7}
    assert "in 1 of 12 steps the ranks' operations differ: no rank's waiting is known there." in run.trace.notes
    assert run.findings.lateness.straggler == 2
    assert run.verdict.code == known.verdict.code


def test_groups_of_a_part_of_the_ranks_are_not_told_by_a_profile_of_the_cpu(known, tmp_path):
    def groups(*sizes):
        return [{"pg_name": str(name), "pg_size": size, "ranks": [*range(size)]} for name, size in enumerate(sizes)]

    unmatched(Run(write(tmp_path / "k", known.trace, cpu_events, pg_config=groups(3, 2))), "group 1 of the job")
    for sizes in ((3, 3, 1), ()):
        whole = Run(write(tmp_path / f"w{len(sizes)}", known.trace, cpu_events, pg_config=groups(*sizes)))
        assert whole.verdict.code == known.verdict.code
    on_gpu = Run(write(tmp_path / "g", known.trace, gpu_events, pg_config=groups(3, 2)))
    assert on_gpu.verdict.code == known.verdict.code  # NCCL's kernels name their group


def pair_events(told):
    """Two pairs of ranks, each with a group named "1": rank 1 is late, and the ranks of the other pair call twice."""

    def events(trace, rank):
        pair = [0, 1] if rank < 2 else [2, 3]
        about = {"Collective name": "allreduce", "In msg nelems": 10**6, "dtype": "Float", "Group size": 2}
        about |= {"Process Group Name": "1"} | ({"Process Group Ranks": str(pair)} if told else {})
        for step in range(12):
            begin, late = 200 * MS * step, 60 * MS * (rank == 1)
            yield event(f"ProfilerStep#{step}", (begin, begin + 200 * MS))
            yield event("sgemm_128", (begin + late, begin + late + 60 * MS), "kernel")
            end = begin + (150 if rank < 2 else 90) * MS
            spans = (begin + late + 60 * MS, end), (end + 5 * MS, end + 20 * MS)
            for span in spans[: 1 if rank < 2 else 2]:
                yield event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", span, "kernel", **about)

    return events


def test_groups_of_one_name_are_told_apart_by_their_ranks(known, tmp_path):
    four = replace(known.trace, size=4)

    def groups(rank):
        return [{"pg_name": "1", "pg_size": 2, "ranks": [0, 1] if rank < 2 else [2, 3]}]

    by_kernel = write(tmp_path / "k", four, pair_events(True))
    by_info = write(tmp_path / "i", four, pair_events(False))
    for rank in range(4):
        edited(by_info, lambda whole, rank=rank: whole["distributedInfo"].update(pg_config=groups(rank)), (rank,))
    for folder in (by_kernel, by_info):
        run = Run(folder)
        assert run.findings.lateness.straggler == 1
        assert run.verdict.code == "STRAGGLER"
        ranks = {}
        for one in run.trace.collectives:
            ranks.setdefault(one.match, set()).add(one.rank)
        assert sorted(map(sorted, ranks.values())) == [[0, 1]] * 12 + [[2, 3]] * 24


@pytest.mark.parametrize("name", ["1", None])
def test_groups_whose_ranks_are_not_told_are_not_matched(known, tmp_path, name):
    def events(trace, rank):
        for one in pair_events(False)(trace, rank):
            yield {**one, "args": {**one["args"], "Process Group Name": name}}

    trace = Run(write(tmp_path / "k", replace(known.trace, size=4), events)).trace
    (note,) = (note for note in trace.notes if "belong together is not known" in note)
    assert note.startswith(f"group {name or 'without a name'} of the job has a part of the ranks")
    assert len({one.match for one in trace.collectives}) == len(trace.collectives)


def test_ranks_that_profiled_different_steps_are_named(known, tmp_path):
    def later(trace, rank):
        for one in cpu_events(trace, rank):
            name, _, number = one["name"].partition("#")
            moved = name == "ProfilerStep" and rank == 1
            yield {**one, "name": f"{name}#{int(number) + 100}"} if moved else one

    steps = [one.index for one in known.trace.steps if one.rank == 0]
    begin = f"in 24 of 24 steps the ranks did not all profile the same (rank 0 steps {steps[0]} to {steps[-1]}, rank 1 "
    unmatched(Run(write(tmp_path / "k", known.trace, later)), f"{begin}steps {steps[0] + 100} to {steps[-1] + 100})")


def test_an_operation_that_is_over_before_another_rank_calls_it_is_another_one(known, tmp_path):
    def a_step_later(trace, rank):
        length = trace.steps[1].begin_ns - trace.steps[0].begin_ns
        for one in cpu_events(trace, rank):
            yield {**one, "ts": one["ts"] + (rank == 1) * 3 * length / 1e3}

    begin = "in 12 of 12 steps an operation is over on one rank before another one calls it"
    unmatched(Run(write(tmp_path / "k", known.trace, a_step_later)), begin)


def test_clocks_of_other_hosts_are_not_trusted(known, tmp_path):
    folder = write(tmp_path / "k", known.trace, cpu_events)
    path = folder / "r1.pt.trace.json.gz"
    whole = json.loads(gzip.decompress(path.read_bytes()))
    whole["host_name"], whole["baseTimeNanoseconds"] = "two", 10**18 + 12_000_000
    path.write_bytes(gzip.compress(json.dumps(whole).encode()))
    run = Run(folder)
    assert [rank.clock.method for rank in run.trace.ranks] == ["rank 0", "wall", "same clock"]
    assert run.findings.trace.ranks[1].clock.method == "operations"
    assert run.findings.parts["stock"].skew_ns == pytest.approx(known.findings.parts["stock"].skew_ns, rel=0.05)


def test_kinds_and_sizes_of_operations_are_read_in_every_spelling():
    kinds = {
        "all_reduce": "allreduce",
        "c10d::allreduce_": "allreduce",
        "_allgather_base": "allgather",
        "c10d::_reduce_scatter_base_": "reducescatter",
        "all_gather_into_tensor_coalesced": "allgather",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "allreduce",
        "broadcast": "broadcast",
        "barrier": "barrier",
        "alltoall_base": "alltoall",
        "c10d::reduce_": "reduce",
        "gloo:gather": "gather",
        "scatter": "scatter",
        "c10d::recv_any_source_": "recv",
        "ncclDevKernel_SendRecv(x)": "send",
        "coalesced": None,
    }
    assert {name: kineto.kind_of(name) for name in kinds} == kinds
    listed = {"Input Dims": [[[2, 3], [4]]], "Input type": ["float"]}
    assert kineto._bytes({"args": listed}) == 40
    assert kineto._bytes({"args": {"Input Dims": [[2, 3], [4], []], "Input type": ["float", "double", ""]}}) == 56
    assert kineto._bytes({"args": {"Input Dims": [[]], "Input type": ["float"]}}) == 4  # one number
    assert kineto._elements([[], [2]], False) == 3  # a list of two tensors
    gathered = {"In msg nelems": 4, "Out msg nelems": 32, "dtype": "BFloat16"}
    assert kineto._bytes({"args": gathered}) == 64
    sizes = {"Float8_e4m3fn": 1, "Float8_e5m2": 1, "ComplexHalf": 4, "ComplexFloat": 8, "ComplexDouble": 16}
    sizes |= {"c10::Float8_e5m2": 1, "c10::complex<float>": 8, "c10::complex<c10::Half>": 4, "UInt16": 2}
    assert {name: kineto._bytes({"args": {**gathered, "dtype": name}}) // 32 for name in sizes} == sizes


# Traces that lack a part.


def kernels_of_compute(trace, rank):
    for step in (s for s in trace.steps if s.rank == rank):
        yield event("sgemm_128", (step.forward[0][0], max(at for _, at in step.grad_ready)), "kernel", stream=7)


def test_a_profile_of_nccl_without_kernels_is_refused_by_name(known, tmp_path, capsys):
    def on_cpu(named):
        def events(trace, rank):
            for one in gpu_events(trace, rank):
                if one["cat"] != "kernel":
                    yield one
                if one["name"] == "record_param_comms" and named:
                    yield {**one, "name": "nccl:all_reduce", "cat": "user_annotation"}

        return events

    for named in (True, False):
        folder = write(tmp_path / f"n{named}", known.trace, on_cpu(named))
        assert cli.main(["report", str(folder)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{folder / 'r0.pt.trace.json.gz'}: it has calls of NCCL and no kernel of a GPU: profile with" in line
        assert "ProfilerActivity.CUDA" in line


def without_kernels_of_nccl(trace, rank):
    for one in gpu_events(trace, rank):
        if not one["name"].startswith("nccl"):
            yield one


def test_a_profile_with_calls_of_nccl_and_none_of_its_kernels_is_refused_by_name(known, tmp_path, capsys):
    folder = write(tmp_path / "k", known.trace, without_kernels_of_nccl)
    assert cli.main(["report", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{folder / 'r0.pt.trace.json.gz'}: it has calls of NCCL and kernels of a GPU, but no kernel of NCCL" in line
    assert "profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] and schedule=" in line
    alone = write(tmp_path / "a", replace(known.trace, size=1), without_kernels_of_nccl)
    assert Run(alone).verdict.code == "NO_COMMUNICATION"  # one rank needs no kernel


def test_a_profile_of_several_ranks_without_any_operation_says_what_to_record(known, tmp_path):
    def steps_and_kernels(trace, rank):
        return (one for one in without_kernels_of_nccl(trace, rank) if one["name"] != "record_param_comms")

    run = Run(write(tmp_path / "k", known.trace, steps_and_kernels))
    (note,) = (one for one in run.trace.notes if "no operation" in one)
    assert note.startswith("3 ranks, and no operation of a process group in a step")
    assert "Profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]" in note
    assert run.verdict.code == "INCONCLUSIVE"
    assert note[1:] in run.verdict.why  # where it begins a sentence
    assert "wrapped" not in run.verdict.next


def test_a_profile_of_a_gpu_without_steps_names_the_activities(known, tmp_path, capsys):
    folder = write(tmp_path / "k", known.trace, kernels_of_compute)
    assert cli.main(["report", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no step: profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], schedule=" in line


def test_operations_of_gloo_count_beside_kernels_that_do_not_communicate(known, tmp_path):
    def with_kernels(trace, rank):
        yield from cpu_events(trace, rank)
        yield from kernels_of_compute(trace, rank)

    found, plain = (
        Run(write(tmp_path / name, known.trace, events)) for name, events in (("g", with_kernels), ("c", cpu_events))
    )
    assert [(o.rank, o.kind, o.submit_ns, o.done_ns, o.tensor_bytes) for o in found.trace.collectives] == [
        (o.rank, o.kind, o.submit_ns, o.done_ns, o.tensor_bytes) for o in plain.trace.collectives
    ]
    assert found.trace.collectives != ()
    assert all(step.forward and not step.grad_ready for step in found.trace.steps)  # compute is that of the kernels


def edited(folder, change, ranks=(0,)):
    """Apply `change` to the JSON of these ranks' files."""
    for rank in ranks:
        path = folder / f"r{rank}.pt.trace.json.gz"
        whole = json.loads(gzip.decompress(path.read_bytes()))
        change(whole)
        path.write_bytes(gzip.compress(json.dumps(whole).encode()))
    return folder


def without_place(whole):
    del whole["distributedInfo"]


def of_three(trace, rank):
    for one in gpu_events(trace, rank):
        yield {**one, "args": {**one["args"], "Group size": 3}}


def test_ranks_that_a_trace_does_not_name_are_refused(known, tmp_path, capsys):
    several = edited(write(tmp_path / "s", known.trace, of_three), without_place, (0, 1, 2))
    single = edited(write(tmp_path / "o", known.trace, cpu_events, (0,)), without_place)
    for folder in (several, single):
        assert cli.main(["report", str(folder)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f'{folder / "r0.pt.trace.json.gz"}: no "rank" and "world_size" in "distributedInfo": profile' in line
        assert "after init_process_group" in line


def test_the_group_of_an_operation_tells_the_number_of_ranks(known, tmp_path):
    run = Run(edited(write(tmp_path / "k", known.trace, of_three, (0,)), without_place))
    assert run.trace.size == 3
    said = " ".join(run.text.split())
    assert 'no "rank" in "distributedInfo": rank 0 is assumed.' in said
    assert "no record of rank 1, 2." in said


def test_a_trace_of_one_rank_needs_no_place(known, tmp_path):
    def alone(trace, rank):
        return (one for one in cpu_events(trace, rank) if "allreduce" not in one["name"] and "gloo" not in one["name"])

    assert Run(edited(write(tmp_path / "k", known.trace, alone, (0,)), without_place)).trace.size == 1


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("In msg nelems", None, '"In msg nelems" is null'),
        ("Out msg nelems", [], '"Out msg nelems" is []'),
        ("In msg nelems", -4, '"In msg nelems" is -4'),
        ("Group size", "three", '"Group size" is "three"'),
        ("world_size", "two", '"world_size" is "two"'),
        ("world_size", 10**12, '"world_size" 1000000000000'),
        ("rank", 7, '"rank" is 7 and "world_size" 3'),
        ("rank", None, '"rank" is null'),
        ("dur", "long", '"dur" is "long"'),
        ("dur", 10**400, f'"dur" is 1{"0" * 39}…, which is not a time'),
        ("ts", 1e306, '"ts" is 1e+306, which is not a time'),
        ("ts", 1e16, '"ts" is 1e+16, which is not a time'),
        ("baseTimeNanoseconds", 10**19, '"baseTimeNanoseconds" is 10000000000000000000, which is not a time'),
        ("args", None, '"args" is null'),
    ],
)
def test_a_field_that_has_no_number_is_named_with_its_file(known, tmp_path, field, value, said, capsys):
    def change(whole):
        if field in whole:
            whole[field] = value
        if field in whole["distributedInfo"]:
            whole["distributedInfo"][field] = value
        for one in whole["traceEvents"]:
            if one["name"].startswith("nccl"):
                (one if field in one else one["args"])[field] = value

    folder = edited(write(tmp_path / "k", known.trace, gpu_events, (0,)), change)
    assert cli.main(["report", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"netbottleneck: {folder / 'r0.pt.trace.json.gz'}: damaged trace of torch.profiler: ")
    assert said in line


def test_a_distributed_info_of_another_shape_is_named_with_its_file(known, tmp_path, capsys):
    folder = edited(
        write(tmp_path / "k", known.trace, gpu_events, (0,)), lambda whole: whole.update(distributedInfo=[1])
    )
    assert cli.main(["report", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith('damaged trace of torch.profiler: "distributedInfo" is [1], not an object')


def test_operations_of_an_unknown_type_are_counted(known, tmp_path):
    def events(trace, rank):
        for one in gpu_events(trace, rank):
            unknown = one["args"].get("External id", 0) % 2
            yield {**one, "args": {**one["args"], "dtype": "Float2"}} if unknown else one

    trace = Run(write(tmp_path / "k", known.trace, events)).trace
    count = sum(one.tensor_bytes is None for one in trace.collectives)
    assert 0 < count < len(trace.collectives)
    note = f"the sizes of {count} operations are not known: the bytes of their type are not (Float2)."
    assert note in trace.notes


def pipeline_events(cpu):
    """Stages of a pipeline, rank 0 sends and rank 1 receives, once more: no collective."""

    def events(trace, rank):
        name = ("send", "recv")[rank]
        about = {"In msg nelems": 8, "dtype": "Float", "Process Group Name": "0"}
        for step in (step for step in trace.steps if step.rank == rank):
            yield event(f"ProfilerStep#{step.index}", (step.begin_ns, step.end_ns))
            for number in range(2 + rank):
                begin = step.begin_ns + 1_000_000 * (number + 1)
                span = begin, begin + 500_000
                if cpu:
                    yield event(f"c10d::{name}", (begin - 100, begin), "cpu_op", **shape(8))
                    yield event(f"gloo:{name}", span, **shape(8))
                else:
                    about["Collective name"] = "coalesced" if number else name
                    yield event("ncclDevKernel_SendRecv(x)", span, "kernel", **about)

    return events


@pytest.mark.parametrize("cpu", [True, False])
def test_the_sends_of_a_pipeline_are_operations_of_one_rank_each(known, tmp_path, cpu):
    trace = Run(write(tmp_path / "k", replace(known.trace, size=2), pipeline_events(cpu))).trace
    rows = {rank: [one for one in trace.collectives if one.rank == rank] for rank in (0, 1)}
    assert {rank: len(own) for rank, own in rows.items()} == {0: 2 * 12, 1: 3 * 12}
    assert {one.kind for one in trace.collectives} == {"send", "recv"}
    assert {one.tensor_bytes for one in trace.collectives} == {32}
    assert not {one.match for one in rows[0]} & {one.match for one in rows[1]}
    assert all(one.by_script for one in trace.collectives)


def test_a_collective_of_some_ranks_has_their_number(known, tmp_path):
    def in_a_pair(trace, rank):
        for one in gpu_events(trace, rank):
            yield {**one, "args": {**one["args"], "Group size": 2 if rank else 3}}

    trace = Run(write(tmp_path / "k", known.trace, in_a_pair)).trace
    assert {(one.rank, one.ranks) for one in trace.collectives} == {(0, None), (1, 2), (2, 2)}


def test_an_unknown_kernel_of_nccl_is_an_operation(known, tmp_path):
    def events(trace, rank):
        for one in gpu_events(trace, rank):
            yield {**one, "args": {}, "name": one["name"].replace("AllReduce_Sum_f32_RING_LL", "New")}

    found = Run(write(tmp_path / "k", known.trace, events))
    assert {one.kind for one in found.trace.collectives} == {"other"}
    assert len(found.trace.collectives) == len(known.trace.collectives)


COLLECTIVES = """
import sys
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

dist.init_process_group("gloo")
rank, tensor = dist.get_rank(), torch.ones(100)
parts = [torch.empty(100), torch.empty(100)]
once = schedule(wait=0, warmup=1, active=1, repeat=1)

def ready(prof):
    prof.export_chrome_trace(f"{sys.argv[1]}/{rank}.pt.trace.json")

with profile(activities=[ProfilerActivity.CPU], schedule=once, on_trace_ready=ready, record_shapes=True) as prof:
    for _ in range(2):
        dist.all_gather(parts, tensor)
        dist.all_gather_into_tensor(torch.empty(200), tensor)
        dist.gather(tensor, None if rank else parts)
        dist.scatter(tensor, None if rank else parts)
        dist.reduce(tensor, 0)
        (dist.recv if rank else dist.send)(tensor, 1 - rank)
        dist.barrier()
        prof.step()
dist.destroy_process_group()
"""


def test_collectives_of_gloo_have_their_bytes_and_begin_with_their_call(tmp_path, warm_ranks):
    warm_ranks(2, COLLECTIVES, args=[str(tmp_path)])
    trace = Run(tmp_path).trace
    expected = ["allgather", "allgather", "gather", "scatter", "reduce", "send", "barrier"]
    own = [one for one in trace.collectives if one.rank == 0]
    assert [one.kind for one in own] == expected
    assert [one.tensor_bytes for one in own] == [800, 800, 800, 800, 400, 400, 0]
    assert all(one.submit_ns < one.start_ns for one in own)  # at the call, before gloo's thread begins


def test_events_that_a_trace_does_not_need_are_not_kept(known, tmp_path):
    def with_others(events):
        def both(trace, rank):
            for number, one in enumerate(events(trace, rank)):
                yield {**one, "args": {**one["args"], "block": [1024, 1, 1]}}
                span = 1000 * one["ts"], 1000 * one["ts"] + 10
                yield event("aten::add", span, "cpu_op", **{"External id": 10**6 + number}, **shape(3))
                yield event("cudaLaunchKernel", span, "cuda_runtime")
                yield event("Memcpy HtoD", span, "gpu_memcpy")

        return both

    for name, events in (("cpu", cpu_events), ("gpu", gpu_events)):
        plain, more = (
            write(tmp_path / f"{name}{n}", known.trace, e) for n, e in enumerate((events, with_others(events)))
        )
        (one, *_), (other, *_) = (kineto._read_all(kineto.files(folder))[0] for folder in (plain, more))
        launches = [e for e in other.events if e["name"] == "cudaLaunchKernel"]
        assert len(launches) == 1  # the last
        assert [e["name"] for e in other.events if e not in launches] == [e["name"] for e in one.events]
        assert all(e.get("args", {}).keys() <= {"External id"} for e in other.events if e["name"].startswith("sgemm"))
        ours, theirs = (Run(folder).trace for folder in (plain, more))
        assert (ours.steps, ours.collectives, ours.parameters) == (theirs.steps, theirs.collectives, theirs.parameters)


@pytest.mark.parametrize("events", [cpu_events, gpu_events])
def test_the_empty_step_after_the_last_one_is_left_out(known, tmp_path, events):
    end = max(step.end_ns for step in known.trace.steps)

    def with_tail(work):
        def both(trace, rank):
            yield from events(trace, rank)
            yield event("ProfilerStep#99", (end, end + 50_000))
            if work and rank == 1:
                yield event("DistributedDataParallel.forward", (end + 10, end + 20))
                yield event("sgemm_128", (end + 10, end + 20), "kernel")

        return both

    trace = Run(write(tmp_path / "k", known.trace, with_tail(False))).trace
    assert {step.index for step in trace.steps} == {step.index for step in known.trace.steps}
    assert [one.bytes for one in trace.buckets] == [one["bytes"] for one in BUCKETS if events is cpu_events]
    trace = Run(write(tmp_path / "w", known.trace, with_tail(True))).trace
    assert [step.rank for step in trace.steps if step.index == 99] == [1]


def test_kernels_of_the_last_step_that_begin_after_it_make_no_further_step(known, tmp_path):
    """A GPU is behind: its kernels were launched before the last prof.step()."""
    end = max(step.end_ns for step in known.trace.steps)

    def with_tail(trace, rank):
        for one in gpu_events(trace, rank):
            yield one
            if one.get("cat") == "kernel":
                begin = 1000 * one["ts"] - 5000
                yield event("cudaLaunchKernel", (begin, begin + 10), "cuda_runtime")
        yield event("ProfilerStep#99", (end, end + 50_000))
        yield event("sgemm_128", (end + 10, end + 20), "kernel")

    trace = Run(write(tmp_path, known.trace, with_tail)).trace
    assert {step.index for step in trace.steps} == {step.index for step in known.trace.steps}


def test_the_time_between_profiled_steps_is_no_work_of_ours(known, tmp_path):
    def apart(trace, rank):
        for one in cpu_events(trace, rank):
            yield {**one, "dur": one["dur"] - 2000} if one["name"].startswith("ProfilerStep") else one

    run = Run(write(tmp_path / "k", known.trace, apart))
    run.write_all(tmp_path / "report")
    for found in (run, Run(tmp_path / "report" / "ranks" / "0.jsonl.gz")):
        assert found.trace.recorder == "torch.profiler"
        assert found.findings.parts["stock"].own_ns == 0
        assert "our own work" not in found.text


def test_a_kernel_over_the_end_of_a_step_counts_in_both(known, tmp_path):
    end = max(step.end_ns for step in known.trace.steps)

    def events(trace, rank):
        yield from gpu_events(trace, rank)
        yield event("ProfilerStep#99", (end, end + 50_000))  # opened by the last prof.step()
        for step in (step for step in trace.steps if step.rank == rank):
            yield event("sgemm_long", (step.end_ns - MS, step.end_ns + 3 * MS), "kernel", stream=8)

    trace = Run(write(tmp_path / "k", known.trace, events)).trace
    assert {step.index for step in trace.steps} == {step.index for step in known.trace.steps}
    own = [step for step in trace.steps if step.rank == 2]  # it begins its own work 9 ms after a step's begin
    assert own[0].forward[0][0] > own[0].begin_ns
    for before, after in pairwise(own):
        assert before.forward[-1][1] == pytest.approx(before.end_ns, abs=2)
        assert after.forward[0] == pytest.approx((after.begin_ns, after.begin_ns + 3 * MS), abs=2)


def test_a_study_is_not_taken_for_a_profile(tmp_path):
    (tmp_path / "evidence.json").write_text('{"cells": []}')
    assert kineto.files(tmp_path) == []
    assert kineto.files(tmp_path / "evidence.json") == []
