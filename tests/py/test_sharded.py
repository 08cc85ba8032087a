"""FSDP2: a measured training computes what it would, and its communication is recorded in forward and backward."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from conftest import Ranks
from warm import WarmPair

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.fsdp", reason="not run: this torch has no FSDP2")

from netbottleneck.analysis.intervals import Split, compute_intervals, split_steps  # noqa: E402
from netbottleneck.report import Run  # noqa: E402
from netbottleneck.trace.model import Step, Trace  # noqa: E402
from netbottleneck.trace.transports import BARE  # noqa: E402

SCRIPT = Path(__file__).parent / "scripts" / "sharded.py"
ON_DEVICE = Path(__file__).parent / "scripts" / "sharded_device.py"
WIRE_NS = 3_000_000  # its WIRE_S
STEPS, PARAMETERS, GROUPS = 40, 8, 3


def trained(ranks: Ranks, how: str, env: dict[str, str], kind: str = "plain") -> tuple[str, str]:
    """Return the digest that all ranks print, and rank 0's log."""
    results = ranks(2, SCRIPT, env, args=[str(STEPS), how, kind])
    found = {digest for result in results for digest in re.findall(r"^digest (\w+)$", result.stdout, re.MULTILINE)}
    assert len(found) == 1, found
    return found.pop(), results[0].stderr


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, warm: WarmPair) -> str:
    """Return the digest of the training that nothing measures."""
    return trained(Ranks(tmp_path_factory.mktemp("plain"), warm=warm), "unmeasured", {})[0]


def environment(folder: Path, **others: str) -> dict[str, str]:
    names = {"DIR": str(folder), "START_STEP": "2", "BLOCK_STEPS": "6", "SAMPLE_EVERY": "10", **others}
    return {"NETBOTTLENECK": "1", **{f"NETBOTTLENECK_{name}": value for name, value in names.items()}}


def raster(step: Step, trace: Trace, split: Split) -> tuple[int, int, int]:
    """Return compute, exposed and waiting ns of a step, moment by moment between two events.

    A collective counts while the training waits for it, or for any: on a device a wait names none. One of the backward
    pass for which no wait is recorded counts for all of its time.
    """
    assert not split.evaluation_ns
    assert not split.checkpoint_ns
    mine = [c for c in trace.collectives if c.rank == step.rank and c.finished]
    compute = compute_intervals(step, mine).tolist()
    awaited = {key for other in trace.steps if other.rank == step.rank for key, _, _ in other.waits}
    edges = {step.begin_ns, step.end_ns, *itertools.chain(*compute, *(wait[1:] for wait in step.waits))}
    edges |= {at for c in mine for at in (c.submit_ns, c.start_ns or 0, c.done_ns or 0)}
    sums = [0, 0, 0]
    for begin, end in itertools.pairwise(sorted(at for at in edges if step.begin_ns <= at <= step.end_ns)):
        waits = {key for key, low, high in step.waits if low <= begin and end <= high}
        felt = [c for c in mine if waits & {0, c.key} or (c.phase == "backward" and c.key not in awaited)]
        kinds = (
            any(low <= begin and end <= high for low, high in compute),
            any((c.start_ns or 0) <= begin and end <= (c.done_ns or 0) for c in felt),
            any(c.submit_ns <= begin and end <= (c.start_ns or 0) for c in felt),
        )
        if True in kinds:
            sums[kinds.index(True)] += end - begin
    return sums[0], sums[1], sums[2]


@pytest.mark.parametrize("how", ["import", "two", "attach", "profile"])
def test_a_sharded_model_is_measured_and_computes_the_same(
    warm_ranks: Ranks, weights: str, tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "run"
    digest, log = trained(warm_ranks, how, environment(folder))
    assert digest == weights
    assert "left alone" not in log
    trace = Run(folder).trace
    assert trace.model == "Sequential"
    steps = [step for step in trace.steps if step.arm != BARE]
    assert len({(step.rank, step.index) for step in steps}) >= 2 * (STEPS - 8) // 2 - 12
    for step in steps:
        assert len(step.forward) == 1
        assert sorted(index for index, _ in step.grad_ready) == list(range(PARAMETERS))
        assert step.optimizer
        inside = [c for c in trace.collectives if c.rank == step.rank and c.step == step.index]
        kinds = [(c.kind, c.phase) for c in inside]
        assert kinds.count(("allgather", "forward")) == GROUPS
        assert kinds.count(("reducescatter", "backward")) == GROUPS
        assert {c.algorithm for c in inside if c.kind == "reducescatter"} == {"gloo's all-reduce"}
        assert kinds.count(("allgather", "backward")) >= GROUPS - 1  # the last one stays unsharded
        assert all(c.finished for c in inside)
    sizes = sum(p.bytes for p in trace.parameters)
    assert sizes == 4 * (96 * 128 + 128 + 128 * 96 + 96 + 96 * 64 + 64 + 64 * 7 + 7)


def test_exposed_time_is_that_of_a_raster(warm_ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trained(warm_ranks, "import", environment(folder))
    trace = Run(folder).trace
    found = split_steps(trace)
    assert found
    for step, split, _ in found:
        assert sum(split.phases().values()) == split.step_ns
        assert raster(step, trace, split) == (split.compute_ns, split.exposed_ns, split.wait_ns)
        assert split.exposed_ns > 0


def test_a_transport_cannot_replace_its_communication(warm_ranks: Ranks, weights: str, tmp_path: Path) -> None:
    digest, log = trained(warm_ranks, "import", environment(tmp_path / "run", TRANSPORT="stock,tcp"))
    assert digest == weights
    assert log.count("the FSDP2 model of Sequential is left alone: ") == 1
    assert "leave out NETBOTTLENECK_TRANSPORT" in log


def test_the_advice_is_possible(warm_ranks: Ranks, tmp_path: Path) -> None:
    """No transport takes turns with FSDP2, so none is named."""
    folder = tmp_path / "run"
    trained(warm_ranks, "import", environment(folder))
    assert "NETBOTTLENECK_TRANSPORT" not in Run(folder).verdict.next


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))])
def test_on_a_device_the_times_are_those_of_its_streams(
    warm_ranks: Ranks, device: dict[str, str], tmp_path: Path, seed: int
) -> None:
    """Each collective runs on a stream of its own, and the training's stream waits for its end where it needs it."""
    folder = tmp_path / "run"
    names = {**environment(folder, SAMPLE_EVERY="5"), **device, "FAKE_CUDA_SEED": str(seed)}
    found = [
        {digest for one in results for digest in re.findall(r"^digest \d \w+$", one.stdout, re.MULTILINE)}
        for results in (
            warm_ranks(2, ON_DEVICE, {**device, "NETBOTTLENECK": "0"}, args=["cpu", "16"]),
            warm_ranks(2, ON_DEVICE, names, args=["fakecuda", "16"]),
        )
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 2
    run = Run(folder)
    trace = run.trace
    error_ns = {rank.rank: rank.device_error_ns for rank in trace.ranks}
    assert None not in error_ns.values()
    assert not [note for note in trace.notes if "measuring ended" in note]
    splits = split_steps(trace)
    assert {step.sampled for step, _, _ in splits} == {False, True}
    for step, split, _ in splits:
        where = (step.rank, step.index)
        apart_ns = 2 * (error_ns[step.rank] or 0)
        assert sum(split.phases().values()) == split.step_ns
        assert raster(step, trace, split) == (split.compute_ns, split.exposed_ns, split.wait_ns)
        stamped = sorted(index for index, _ in step.grad_ready)
        assert stamped == (list(range(PARAMETERS)) if step.sampled else [0, 4, 6]), where
        inside = [c for c in trace.collectives if c.rank == step.rank and c.step == step.index]
        kinds = [(c.kind, c.phase) for c in inside]
        assert kinds.count(("allgather", "forward")) == kinds.count(("reducescatter", "backward")) == GROUPS
        assert all(c.finished and (c.done_ns or 0) - (c.start_ns or 0) >= WIRE_NS - apart_ns for c in inside), where
        begin, end = step.forward[0]
        waits = [(a, b) for _, a, b in step.waits if begin <= a and b <= end]
        gathered = sorted(c.done_ns or 0 for c in inside if c.phase == "forward")
        assert len(waits) == GROUPS, where
        assert all(done <= b + apart_ns for done, (_, b) in zip(gathered, waits, strict=True)), where


def test_parameters_in_host_memory_and_a_device_are_left_alone(
    warm_ranks: Ranks, device: dict[str, str], tmp_path: Path
) -> None:
    names = {**environment(tmp_path / "run"), **device}
    log = warm_ranks(2, ON_DEVICE, names, args=["fakecuda", "4", "offload"])[0].stderr
    assert log.count("is left alone: it is on cpu and fakecuda:0, and one clock is read: leave out the CPUOff") == 1


def test_a_part_that_runs_later_is_stamped_from_then_on(warm_ranks: Ranks, tmp_path: Path) -> None:
    digest, _ = trained(warm_ranks, "unmeasured", {}, "late")
    folder = tmp_path / "run"
    assert trained(warm_ranks, "import", environment(folder), "late")[0] == digest
    trace = Run(folder).trace
    assert not [note for note in trace.notes if "measuring ended" in note]
    found = {step.index: len(step.grad_ready) for step in trace.steps if step.arm != BARE}
    assert found[2] == PARAMETERS
    assert found[max(found)] == PARAMETERS + 2


def test_parameters_on_several_meshes_are_measured(warm_ranks: Ranks, tmp_path: Path) -> None:
    digest, _ = trained(warm_ranks, "unmeasured", {}, "meshes")
    folder = tmp_path / "run"
    measured, log = trained(warm_ranks, "import", environment(folder), "meshes")
    assert measured == digest
    assert "left alone" not in log
    for step in Run(folder).trace.steps:
        assert len(step.grad_ready) == (0 if step.arm == BARE else PARAMETERS)


def test_a_model_that_is_evaluated_is_measured_where_that_leaves_it_sharded_otherwise(
    warm_ranks: Ranks, tmp_path: Path
) -> None:
    plain = warm_ranks(4, SCRIPT, {}, args=["16", "unmeasured", "evaluated"])
    folder = tmp_path / "run"
    results = warm_ranks(4, SCRIPT, environment(folder), args=["16", "import", "evaluated"])
    digests = [re.findall(r"^digest \w+$", result.stdout, re.MULTILINE) for result in (*plain, *results)]
    assert all(found == digests[0] != [] for found in digests)
    assert "left alone" not in results[0].stderr
    steps = [step for step in Run(folder).trace.steps if step.arm != BARE]
    assert steps
    for step in steps:
        assert len(step.grad_ready) == PARAMETERS
    assert {step.index % 5 for step in steps if step.evaluation} == {4}


def test_the_script_may_move_and_convert_a_measured_model(warm_ranks: Ranks, weights: str, tmp_path: Path) -> None:
    assert trained(warm_ranks, "unmeasured", {}, "moved")[0] == weights
    folder = tmp_path / "run"
    digest, log = trained(warm_ranks, "import", environment(folder), "moved")
    assert digest == weights
    assert "left alone" not in log
    trace = Run(folder).trace
    assert not [note for note in trace.notes if "measuring ended" in note]
    for step in trace.steps:
        assert len(step.grad_ready) == (0 if step.arm == BARE else PARAMETERS)


def test_a_compiled_model_gets_no_warning_about_our_hooks(warm_ranks: Ranks, tmp_path: Path) -> None:
    digest, _ = trained(warm_ranks, "unmeasured", {}, "compiled")
    folder = tmp_path / "run"
    measured, log = trained(warm_ranks, "import", environment(folder), "compiled")
    assert measured == digest
    assert "left alone" not in log
    assert Run(folder).trace.steps
