"""Models whose gradients FSDP, DeepSpeed, tensor parallelism or the script moves: measured, with the same results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Ranks

from test_sharded import environment

pytest.importorskip("torch.distributed.fsdp", reason="not run: this torch has no FSDP2")

from netbottleneck.report import Run
from netbottleneck.trace.transports import BARE

SCRIPT = Path(__file__).parent / "scripts" / "observed.py"
# By what moves the gradients: a collective of every step, and its phase; and what the report calls the model.
KNOWN = {
    "flat": ("reducescatter", "backward", "Sequential"),
    "original": ("reducescatter", "backward", "Sequential"),
    "tensor": ("allreduce", "forward", "Sequential"),
    "engine": ("allreduce", "other", "Sequential"),
    "script": ("allreduce", "other", "Sequential"),
}
WAYS = [(mover, how) for mover in KNOWN for how in ("import", "attach", "profile", "framework")]


def trained(ranks: Ranks, mover: str, how: str, env: dict[str, str]) -> tuple[list[str], str]:
    """Return the digests that the ranks print, and rank 0's log."""
    results = ranks(2, SCRIPT, env, args=[mover, how])
    digests = [digest for result in results for digest in re.findall(r"^digest (\w+)$", result.stdout, re.MULTILINE)]
    assert len(digests) == 2
    return digests, results[0].stderr


# The script's own all-reduces: an import leaves them alone, profile would average again, and a framework has none.
@pytest.mark.parametrize(("mover", "how"), [way for way in WAYS if way[0] != "script" or way[1] == "attach"])
def test_the_training_is_observed_and_computes_the_same(
    warm_ranks: Ranks, tmp_path: Path, mover: str, how: str
) -> None:
    folder = tmp_path / "run"
    plain, _ = trained(warm_ranks, mover, "unmeasured", {})
    measured, log = trained(warm_ranks, mover, how, environment(folder))
    assert measured == plain
    assert "left alone" not in log
    trace = Run(folder).trace
    kind, phase, model = KNOWN[mover]
    assert trace.model == model
    steps = [step for step in trace.steps if step.arm != BARE]
    assert {step.rank for step in steps} == {0, 1}
    for step in steps:
        assert len(step.forward) == 1
        assert step.optimizer
        inside = [c for c in trace.collectives if c.rank == step.rank and c.step == step.index]
        assert (kind, phase) in {(c.kind, c.phase) for c in inside}
        assert all(c.finished for c in inside)


def test_an_own_loop_is_left_alone_with_both_ways_to_measure_it(warm_ranks: Ranks, tmp_path: Path) -> None:
    plain, _ = trained(warm_ranks, "script", "unmeasured", {})
    digests, log = trained(warm_ranks, "script", "import", environment(tmp_path / "run"))
    assert digests == plain
    assert log.count("the training is left alone: ") == 1
    assert "call netbottleneck.attach(model, optimizer), which observes it" in log
    assert "netbottleneck.profile(model, optimizer)" in log


@pytest.mark.parametrize("mover", ["flat", "engine"])
def test_no_transport_replaces_its_communication(warm_ranks: Ranks, tmp_path: Path, mover: str) -> None:
    plain, _ = trained(warm_ranks, mover, "unmeasured", {})
    digests, log = trained(warm_ranks, mover, "import", environment(tmp_path / "run", TRANSPORT="stock,tcp"))
    assert digests == plain
    who = {"flat": "FSDP", "engine": "DeepSpeed"}[mover]
    assert log.count(f"the {who} model of Sequential is left alone: {who} communicates by its own process groups") == 1
    assert "leave out NETBOTTLENECK_TRANSPORT" in log


WRONG = """
import netbottleneck, torch, torch.distributed as dist
model = torch.nn.Linear(4, 4)
try:
    netbottleneck.attach(model)
except ValueError as error:
    print(error)
dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(model)
try:
    netbottleneck.attach(model)
except TypeError as error:
    print(error)
dist.destroy_process_group()
"""


def test_what_cannot_be_observed_is_refused(warm_ranks: Ranks) -> None:
    for result in warm_ranks(2, WRONG, {}):
        no_group, inside = result.stdout.splitlines()
        assert no_group.endswith("there is none: call it after torch.distributed.init_process_group")
        assert inside == "Linear is a part of a DistributedDataParallel model, DistributedDataParallel: pass that one"
