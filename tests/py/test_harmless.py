"""A measured DDP model is the script's own: scripts/harmless_checks.py, and ranks that cannot join."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Ranks

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "scripts" / "harmless_checks.py"


def test_a_measured_model_is_the_scripts_own(warm_ranks: Ranks) -> None:
    names = re.findall(r"^@check\ndef (\w+)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    for result in warm_ranks(2, SCRIPT, {}, args=names):
        said = [line for line in result.stdout.splitlines() if line.startswith("ok ")]
        assert said == [f"ok {name}" for name in names], result.stderr


ALONE = """
import os
import sys
import netbottleneck
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.nn.parallel import DistributedDataParallel


def rank(number, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    processes.spawn(rank, (os.path.abspath("store"),), nprocs=2)
"""


def test_ranks_that_no_launcher_joins_record_alone_and_say_what_is_not_known(plain_ranks: Ranks) -> None:
    env = {"NETBOTTLENECK": "1", "NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_BLOCK_STEPS": "2"}
    unset = {name: "" for name in ("NETBOTTLENECK_RANK", "NETBOTTLENECK_SIZE", "NETBOTTLENECK_RENDEZVOUS")}
    (job,) = plain_ranks(1, ALONE, {**env, **unset, "NETBOTTLENECK_DIR": "run"})
    assert "which rank is late and what other ranks measured are not known" in job.stderr
    folders = sorted(path.name for path in (plain_ranks.folder / "job0").glob("*run*"))
    assert folders == ["run-rank0", "run-rank1"]
    assert "Of your " in job.stdout


SHARDED = """
import netbottleneck, torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(1)
model = FullyShardedDataParallel(torch.nn.Linear(4, 4), use_orig_params=True, device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for step in range(5):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    print("trained")
except ValueError as error:
    print("refused at step", step, error)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("strict", [False, True])
def test_a_training_without_a_ddp_model_is_left_alone_and_an_error_where_that_is_asked_for(
    warm_ranks: Ranks, strict: bool
) -> None:
    for result in warm_ranks(2, SHARDED, {"NETBOTTLENECK": "1", "NETBOTTLENECK_STRICT": str(int(strict))}):
        why = "FullyShardedDataParallel shards its parameters, which is not measured yet: use DDP"
        if strict:
            assert result.stdout.startswith("refused at step 2")
            assert why in result.stdout
        else:
            assert result.stdout == "trained\n"
            assert result.stderr.count("netbottleneck WARNING: the training is left alone") == 1
            assert why in result.stderr
