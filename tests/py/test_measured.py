"""What a measured loop records of itself: its modules, and where its steps begin and end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Ranks

pytest.importorskip("torch")

LOOP = """
import json
import torch
from torch.utils.checkpoint import checkpoint
import netbottleneck
from netbottleneck.trace import recorder

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inside = {inside}
updates = 0


def update(_):
    global updates
    updates += 1
    optimizer.step()
    optimizer.zero_grad()


if inside:
    model[0].weight.register_post_accumulate_grad_hook(update)
with netbottleneck.profile(model, optimizer):
    for _ in range(6):
        x = torch.ones(2, 4, requires_grad=True)
        if inside:  # each half of the loss runs the model once more, within the backward pass
            loss = sum(checkpoint(model, x, use_reentrant=True).square().mean() for _ in range(2))
        else:
            loss = model(x).square().mean()
        loss.backward()
        if not inside:
            update(None)
trace = recorder.load({run!r})
print(json.dumps({{"updates": updates, "steps": len(trace.steps), "modules": list(trace.modules)}}))
"""


@pytest.mark.parametrize(("inside", "updates"), [(False, 6), (True, 12)])
def test_a_step_is_one_pass_of_the_loop_wherever_its_updates_are(
    warm_ranks: Ranks, tmp_path: Path, inside: bool, updates: int
) -> None:
    run = tmp_path / "run"
    env = {"NETBOTTLENECK_DIR": str(run), "NETBOTTLENECK_START_STEP": "0"}
    result = warm_ranks(1, LOOP.format(inside=inside, run=str(run)), env)[0]
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["updates"] == updates
    assert told["steps"] in (5, 6)  # the last may have no end
    assert told["modules"] == ["0", "1", "2"]
