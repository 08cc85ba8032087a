"""Processes end as a user's do, without the wait of tests/py/site, before the deadline, in each mode."""

from __future__ import annotations

import signal

import pytest
from conftest import Ranks

pytest.importorskip("torch")

TRAINING = """
import os
import torch
import torch.distributed as dist
import netbottleneck.torch as hvd
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
if os.environ["API"] == "hvd":
    hvd.init()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
else:
    dist.init_process_group(os.environ["API"])
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    optimizer.zero_grad()
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
print("trained", flush=True)
"""
# What a thread of torch's says that asks for the interpreter while it is taken down, with or without us
# (https://github.com/pytorch/pytorch/issues/190489).
OF_TORCH = ("terminate called without an active exception", "FATAL: exception not rethrown")


@pytest.mark.parametrize(
    ("api", "env"),
    [
        ("gloo", {"NETBOTTLENECK": "0"}),
        ("gloo", {"NETBOTTLENECK": "1"}),
        ("gloo", {"NETBOTTLENECK_TRANSPORT": "stock"}),
        ("gloo", {"NETBOTTLENECK_TRANSPORT": "tcp"}),
        ("gloo", {"NETBOTTLENECK_TRANSPORT": "ofi"}),
        ("gloo", {"NETBOTTLENECK_TRANSPORT": "stock,tcp", "NETBOTTLENECK_BLOCK_STEPS": "1"}),
        ("nb", {"NETBOTTLENECK": "1"}),
        ("hvd", {"NETBOTTLENECK": "1"}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value.values()),
)
def test_a_process_ends_well_or_by_the_known_abort_of_torch(ranks: Ranks, api: str, env: dict[str, str]) -> None:
    values = {"NB_TESTS_OWN_EXIT": "1", "NETBOTTLENECK_START_STEP": "0", "API": api, **env}
    for result in ranks(2, TRAINING, values, check=False):
        assert "trained" in result.stdout.splitlines(), result.stderr
        if result.code != 0:
            assert result.code == -signal.SIGABRT, (result.code, result.stderr)
            assert any(text in result.stderr for text in OF_TORCH), result.stderr


INTERRUPTED = """
import os
import signal
import time
import netbottleneck
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.ones(4, 4)).sum().backward()
    optimizer.step()
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""


def test_an_interrupted_process_ends_by_the_signal_for_its_shell(ranks: Ranks) -> None:
    """The report of rank 0, which is made at exit, does not turn the end by SIGINT into one by exit code 1."""
    values = {"NB_TESTS_OWN_EXIT": "1", "NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK": "1"}
    assert [result.code for result in ranks(2, INTERRUPTED, values, check=False)] == [-signal.SIGINT] * 2
