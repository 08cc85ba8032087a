"""A run that is longer than its record: what is kept, what is said, and what does not grow."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from conftest import Ranks

from netbottleneck.report import Run, summary
from netbottleneck.trace import model as tr
from netbottleneck.trace import ring_file
from netbottleneck.trace.run_steps import RunSteps, between

torch = pytest.importorskip("torch")

STEPS = 1500
TRAINING = """
import os
import torch
import torch.distributed as dist
import netbottleneck

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(os.environ["STEPS"])):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
print("trained", flush=True)
"""


def test_a_run_longer_than_its_record_has_its_first_and_last_steps_and_sums_of_all(
    warm_ranks: Ranks, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    values = {"NETBOTTLENECK_TRANSPORT": "stock,tcp", "NETBOTTLENECK_DIR": str(folder), "NETBOTTLENECK_START_STEP": "0"}
    job = warm_ranks.start(2, TRAINING, [], {**values, "NETBOTTLENECK_TRACE_EVENTS": "4096", "STEPS": str(STEPS)})
    job.wait()
    run = Run(folder)
    (note,) = [one for one in run.trace.notes if "are left out" in one]
    first, last = map(int, re.match(r"steps (\d+) to (\d+) are left out: ", note).groups())  # type: ignore[union-attr]
    indices = {step.index for step in run.trace.steps}
    assert indices.isdisjoint(range(first, last + 1))
    assert {0, first - 1, last + 1} <= indices
    assert max(indices) >= STEPS - 2
    assert not any(rank.steps_unfinished for rank in run.trace.ranks)
    rows = run.trace.ranks[0].run_steps
    ends = [row.first + row.count for row in rows]
    assert ends[:-1] == [row.first for row in rows[1:]]
    assert (rows[0].first, len(rows)) == (0, pytest.approx(STEPS / 2, abs=2))
    assert ends[-1] >= STEPS - 1
    of_kept = {step.index: step.duration_ns for step in run.trace.steps if step.rank == 0}
    assert rows[0].total_ns == of_kept[0] + of_kept[1]
    assert 0 < rows[0].waited_ns < rows[0].total_ns
    assert between(rows, first, last) in " ".join(run.trace.notes)
    assert f"teps {first} to {last} are left out" in " ".join(run.text.split())
    assert f"mean step of each rank over steps 0 to {ends[-1] - 1}" in run.html
    assert f"steps {last + 1} to {max(indices)}: recorded in detail" in run.html
    run.write_all()
    assert tr.read(folder / "ranks" / "0.jsonl.gz").ranks[0].run_steps == rows
    jsonschema.validate(json.loads(json.dumps(run.summary)), summary.schema(), cls=jsonschema.Draft202012Validator)
    assert sum(row["count"] for row in run.summary["ranks"][0]["run_steps"]) == ends[-1]


def test_a_file_does_not_grow_once_it_is_full(warm_ranks: Ranks, tmp_path: Path) -> None:
    sizes = []
    for steps in (300, 900):
        folder = tmp_path / str(steps)
        values = {"NETBOTTLENECK": "1", "NETBOTTLENECK_DIR": str(folder), "NETBOTTLENECK_START_STEP": "0"}
        more = {"NETBOTTLENECK_TRACE_EVENTS": "1024", "NETBOTTLENECK_PROGRESS_S": "0", "STEPS": str(steps)}
        warm_ranks.start(2, TRAINING, [], {**values, **more}).wait()
        ring = ring_file.read_ring(folder / "ranks" / "0.train.ring")
        assert ring.overwritten > 0
        sizes.append((folder / "ranks" / "0.train.ring").stat().st_size)
    assert sizes[0] == sizes[1]


def test_rows_that_are_wholly_between_two_steps_are_summed() -> None:
    rows = [
        RunSteps(first, 4, 4_000_000 * (place + 1), 2_000_000, 400_000) for place, first in enumerate((0, 4, 8, 12))
    ]
    assert between(rows, 4, 11) == (
        "Steps 4 to 11 took 2.50 ms on average, 0.10 ms of it waiting for communication, and at most 2.00 ms (measured)"
    )
    assert between(rows, 5, 10) == between((), 0, 100) == ""
