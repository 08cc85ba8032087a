"""Copies into and out of a fusion buffer: fitted from operations of one and of several tensors, or from a table."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from netbottleneck.cli import main
from netbottleneck.trace import model as tr
from netbottleneck.trace.layer_log import LayerLog, VecTable, write, write_table
from netbottleneck.trace.model import Parameter, Rank, Step, Trace
from netbottleneck.trace.transports import Arm
from netbottleneck.whatif import questions, sweeps
from netbottleneck.whatif.cost import Cost, Link, Table
from netbottleneck.whatif.fit import copy_cost_from_table, fit
from netbottleneck.whatif.plan import Plan
from netbottleneck.whatif.simulate import simulate

STORED = Path(__file__).parents[2] / "benchmarks" / "traces" / "resnet50-2gbit-500mbit.jsonl.gz"
MS, MB = 1_000_000, 1_000_000
SIZES = (4 * MB, 24 * MB, 9 * MB, 12 * MB, 2 * MB, 16 * MB, 7 * MB, 3 * MB)
ALONE = ((7,), (6,), (5,), (4,), (3,), (2,), (1,), (0,))
MIXED = ((7,), (6, 5), (4,), (3, 2), (1,), (0,))
TOGETHER = ((7, 6), (5, 4), (3, 2, 1), (0,))


def recorded(cost: Cost, buckets: tuple[tuple[int, ...], ...] = MIXED, in_flight: int = 1) -> Trace:
    """A trace as two ranks would record it, with a gradient every 4 ms and a little more at each step."""
    rows = []
    for rank in (0, 1):
        begin = 0
        for index in range(9):
            ready = tuple((7 - at, begin + (5 + 4 * at) * MS + 1000 * (rank + index)) for at in range(len(SIZES)))
            end = ready[-1][1] + 2 * MS
            rows.append(Step(rank, index, 0, Arm("tcp"), begin, end, grad_ready=ready))
            begin = end
    tensors = tuple(Parameter(f"t{at}", size, "float32") for at, size in enumerate(SIZES))
    hosts = tuple(Rank(rank, host_id=f"host{rank}") for rank in (0, 1))
    run = Trace("made", 2, (Arm("tcp"),), ranks=hosts, parameters=tensors, steps=tuple(rows))
    return replace(simulate(run, Plan.explicit(buckets, in_flight), cost), origin="measured")


@pytest.mark.parametrize("copy_byte_ns", [0.05, 0.3, 2.0])
def test_a_fit_recovers_the_copies_that_made_the_run(copy_byte_ns: float) -> None:
    made = Cost(alpha_ns=100_000, link=Link(3e9), copy_byte_ns=copy_byte_ns)
    found = fit(recorded(made))
    assert found.reason == ""
    assert found.cost.copy_byte_ns == pytest.approx(copy_byte_ns, rel=0.01)
    assert found.cost.link.rate_bps == pytest.approx(3e9, rel=0.01)
    assert found.cost.fixed_ns == pytest.approx(200_000, rel=0.05)
    assert any("a copy into a fusion buffer takes" in note for note in found.notes)


@pytest.mark.parametrize("buckets", [ALONE, MIXED, TOGETHER])
def test_a_run_with_other_fusion_is_predicted_with_its_copies(buckets: tuple[tuple[int, ...], ...]) -> None:
    made = Cost(alpha_ns=100_000, link=Link(3e9), copy_byte_ns=0.5)
    source, other = recorded(made), recorded(made, buckets)
    simulated = simulate(source, Plan.explicit(buckets), fit(source).cost)
    want = statistics.median(step.duration_ns for step in other.steps)
    assert statistics.median(step.duration_ns for step in simulated.steps) == pytest.approx(want, rel=1e-3)


def test_a_run_without_copies_fits_no_copy_cost() -> None:
    found = fit(recorded(Cost(alpha_ns=100_000, link=Link(3e9))))
    assert found.cost.copy_byte_ns == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize(
    ("buckets", "in_flight", "note"),
    [
        (ALONE, 1, "is not known, and counts as part of the operations"),
        (TOGETHER, 1, "is not known, and counts as part of the operations"),
        (MIXED, 2, "operations shared the link"),
    ],
)
def test_copies_that_cannot_be_separated_count_as_operations(
    buckets: tuple[tuple[int, ...], ...], in_flight: int, note: str
) -> None:
    run = recorded(Cost(link=Link(3e9), copy_byte_ns=0.3), buckets, in_flight)
    found = fit(run)
    assert found.cost.copy_byte_ns == 0.0
    assert note in found.notes[-1]


def test_the_stored_run_has_one_size_and_no_copy_cost() -> None:
    for transport in ("stock", "ofi"):
        found = fit(tr.read(STORED), transport)
        assert found.cost.copy_byte_ns == 0.0
        assert "is not known" in found.notes[-1]


def test_a_table_is_used_if_the_run_gives_no_copy_cost() -> None:
    made = Cost(link=Link(3e9), copy_byte_ns=0.3)
    run = recorded(made, TOGETHER)
    found = fit(run, copy_byte_ns=0.3)
    assert found.cost.copy_byte_ns == 0.3
    assert found.cost.link.rate_bps == pytest.approx(3e9, rel=0.01)
    assert "from the table" in found.notes[-1]
    job = questions.job(run, copy_byte_ns=0.3)
    now = questions.answer(job, sweeps.now(job)).step_s
    assert now is not None
    measured = statistics.median(step.duration_ns for step in run.steps[1:])
    assert 1e9 * now.value == pytest.approx(measured, rel=1e-3)
    fitted = fit(recorded(made), copy_byte_ns=9.0)  # its own operations tell it
    assert fitted.cost.copy_byte_ns == pytest.approx(0.3, rel=0.01)


def test_copies_longer_than_their_operation_are_refused() -> None:
    run = recorded(Cost(link=Link(3e9)), TOGETHER)
    with pytest.raises(ValueError, match=r"copies of 5 ns a byte would take .* in all: leave --copy-table out"):
        fit(run, copy_byte_ns=5.0)
    with pytest.raises(ValueError, match="copy_byte_ns must be at least 0"):
        fit(run, copy_byte_ns=-1.0)


@pytest.mark.parametrize("buckets", [TOGETHER, MIXED])
def test_a_single_operation_shorter_than_its_copies_is_left_out(buckets: tuple[tuple[int, ...], ...]) -> None:
    run = recorded(Cost(alpha_ns=100_000, link=Link(3e9), copy_byte_ns=0.5), buckets)
    place = next(c for c in run.collectives if c.step == 4 and c.bucket == 1)
    fast = [
        replace(c, done_ns=(c.start_ns or 0) + 100_000) if (c.step, c.bucket) == (place.step, place.bucket) else c
        for c in run.collectives
    ]
    found = fit(replace(run, collectives=tuple(fast)), copy_byte_ns=0.5)
    assert found.cost.copy_byte_ns == pytest.approx(0.5, rel=0.01)
    assert found.cost.link.rate_bps == pytest.approx(3e9, rel=0.01)


def test_a_table_of_copies_is_of_tensors_copied_one_by_one() -> None:
    table = Table((0.0, 1000.0, 2000.0), (50.0, 150.0, 650.0))
    assert copy_cost_from_table(table, [1000, 2000, 0]) == pytest.approx(800 / 3000)
    assert copy_cost_from_table(table, [0]) == 0.0


def test_a_layer_logs_fused_tensors_are_copied_by_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "two.bk.log", LayerLog("two", ((0.001, 10 * MB), (0.0, 10 * MB))))
    write_table(tmp_path / "copy.csv", VecTable((1, 20 * MB), (0.0, 0.02)))
    arguments = ["what-if", f"{tmp_path}/two.bk.log", "--step-s", "1", "--workers", "4", "--link-gbps", "100"]
    steps = []
    for more in ([], ["--copy-table", f"{tmp_path}/copy.csv"]):
        assert main([*arguments, *more, "--json", f"{tmp_path}/rows.json"]) == 0
        (row,) = [row for row in json.loads((tmp_path / "rows.json").read_text()) if row["question"] == "grid"]
        steps.append(row["step_s"])
    assert steps[1] - steps[0] == pytest.approx(2 * 0.020, rel=1e-3)
    capsys.readouterr()
    assert main([*arguments, "--copy-table", f"{tmp_path}/none.csv"]) == 2
    assert f"no such file or folder: {tmp_path}/none.csv" in capsys.readouterr().err
    assert main([*arguments, "--copy-table", f"{tmp_path}/copy.csv", "--json", f"{tmp_path}/copy.csv"]) == 2
    assert "is an input of this command" in capsys.readouterr().err
    (tmp_path / "run.json").touch()
    assert main([*arguments, "--json", f"{tmp_path}/run.json"]) == 2
    assert "is part of the record of the run in" in capsys.readouterr().err
