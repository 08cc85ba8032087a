"""Python calls of a backward pass: as many for 1 000 parameters as for 10.

Counted in all threads of a rank, but before Python 3.12 only in those that started after it and in the one that calls.
"""

from __future__ import annotations

import pytest
from conftest import Ranks

pytest.importorskip("torch")

ENV = {"NETBOTTLENECK_TIMEOUT_S": "60", "NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_DIR": "run"}

COUNT = """
import os
import sys
import threading
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import netbottleneck.torch as hvd
from netbottleneck.runtime import job
from netbottleneck.hooks import ddp
from netbottleneck.hooks.horovod import Measuring

how, transport = sys.argv[1:]
torch.set_num_threads(1)
os.environ["NETBOTTLENECK_TRANSPORT"] = transport  # after the import


class Closing(Measuring):
    # Makes no report.

    def stopping(self, stopping):
        self._session.close()
        self._session = None


if how == "hvd":
    job.observe(Closing())
else:
    dist.init_process_group("gloo")


class Many(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.each = torch.nn.ParameterList([torch.ones(3) for _ in range(count)])

    def forward(self, x):
        return torch.cat([p * x for p in self.each]).sum()


seen = []
sessions = []


def look(frame, event, argument):
    if event in ("call", "c_call"):
        seen.append(frame.f_code.co_name)


def prepared(count):
    model = Many(count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if how == "hvd":
        return model, hvd.DistributedOptimizer(optimizer, model.named_parameters())
    model = DistributedDataParallel(model)
    session = ddp.attach(model).session
    if session.joining is not None:
        session.joining.settle()  # its thread makes calls, too
    sessions.append(session)
    return model, optimizer


def calls(count):
    if how == "hvd":
        hvd.init()
    model, optimizer = prepared(count)
    found = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(torch.ones(3))
        seen.clear()
        threading.setprofile_all_threads(look) if hasattr(threading, "setprofile_all_threads") else None
        threading.setprofile(look)
        sys.setprofile(look)
        loss.backward()
        sys.setprofile(None)
        threading.setprofile(None)
        found.append(list(seen))
        optimizer.step()
    assert all(p.grad is not None for p in model.parameters())
    if how == "hvd":
        hvd.shutdown()
    else:
        sessions[-1].close()
    return found[3:]  # the first steps settle the buckets


few, many = calls(10), calls(1000)
print("calls", [len(names) for names in few], [len(names) for names in many], few[0])
assert {len(names) for names in few} == {len(names) for names in many}, (few[0], many[0])
"""


@pytest.mark.parametrize(
    ("how", "transport"), [("hvd", "tcp"), ("hvd", "stock"), ("ddp", "tcp"), ("ddp", "stock"), ("ddp", "ofi")]
)
def test_a_backward_pass_makes_as_many_python_calls_for_1000_parameters_as_for_10(
    warm_ranks: Ranks, how: str, transport: str
) -> None:
    for result in warm_ranks(2, COUNT, ENV, args=[how, transport]):
        assert "calls [" in result.stdout
