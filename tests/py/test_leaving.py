"""A rank of Horovod's API that dies, leaves or raises in training: the others get an error at once. Forked children."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Ranks

from test_faults import DEADLINE_S, QUICK

pytest.importorskip("torch")

LEAVING = """
import os, signal, sys, time

import torch
import horovod.torch as hvd

hvd.init()
leaver, how = int(os.environ["LEAVER"]), os.environ["HOW"]
model = torch.nn.Linear(1 << 12, 4)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())


def step():
    optimizer.zero_grad()
    model(torch.ones(1, 1 << 12)).sum().backward()
    optimizer.step()


for _ in range(3):
    step()
    hvd.allreduce(torch.ones(2), name="metric")
if hvd.rank() == leaver:
    print("leaves", time.monotonic(), flush=True)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raises":
        raise ValueError("this rank cannot go on")
    elif how == "shuts down":
        hvd.shutdown()
    sys.exit(0)
try:
    began = time.monotonic()
    while True:
        began = time.monotonic()
        if os.environ["WHERE"] == "step":
            step()
        else:
            hvd.allreduce(torch.ones(2), name="metric")
except hvd.HorovodInternalError as error:
    print("record", began, time.monotonic(), error, flush=True)
"""


@pytest.mark.parametrize(
    ("transport", "how", "leaver", "where"),
    [
        ("", "killed", 1, "step"),
        ("", "returns", 0, "metric"),
        ("", "raises", 1, "metric"),
        ("tcp", "killed", 1, "metric"),
        ("tcp", "raises", 0, "metric"),
        ("tcp", "returns", 0, "metric"),
        ("tcp", "shuts down", 0, "step"),
        ("stock", "killed", 1, "step"),
        ("stock", "raises", 0, "metric"),
        ("stock", "returns", 0, "step"),
    ],
)
def test_remaining_ranks_get_an_error_at_once(
    warm_ranks: Ranks, tmp_path: Path, transport: str, how: str, leaver: int, where: str
) -> None:
    """transport: of a measured run; "": not measured."""
    env = {**QUICK, "LEAVER": str(leaver), "HOW": how, "WHERE": where}
    if transport:
        env |= {"NETBOTTLENECK_TRANSPORT": transport, "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    module = "netbottleneck, horovod.torch" if transport else "netbottleneck.torch"
    results = warm_ranks(2, LEAVING.replace("horovod.torch", module), env, check=False)
    left = re.search(r"leaves (\S+)", results[leaver].stdout)
    match = re.search(r"^record (\S+) (\S+) (.*)$", results[1 - leaver].stdout, re.MULTILINE)
    assert left, results[leaver].stderr
    assert match, results[1 - leaver].stderr
    assert float(match[2]) - max(float(match[1]), float(left[1])) < DEADLINE_S, match[0]
    if transport != "stock" or where == "metric":  # gloo names nobody
        assert f"rank {leaver} " in match[3]
    assert results[1 - leaver].code == 0
    assert results[leaver].code == {"killed": -9, "raises": 1}.get(how, 0)


STOPPED = """
import os, signal, sys
import netbottleneck.torch as hvd
from netbottleneck.launch import connect


def end(*_):
    hvd.shutdown()
    print("shut down", flush=True)
    sys.exit(3)


def connecting(*_args, **_options):
    os.kill(os.getpid(), signal.SIGTERM)  # as a scheduler may, while ranks wait for each other
    raise AssertionError("the handler has not ended the process")


signal.signal(signal.SIGTERM, end)
connect.connect = connecting
signal.alarm(60)
hvd.init()
"""


def test_a_signal_handler_may_shut_down_while_init_waits_for_other_ranks(warm_ranks: Ranks) -> None:
    (result,) = warm_ranks(1, STOPPED, check=False)
    assert (result.code, result.stdout) == (3, "shut down\n"), result.stderr


FORKING = """
import os, sys
import torch
import netbottleneck.torch as hvd

hvd.init()
weight = torch.nn.Parameter(torch.zeros(2))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
data = torch.utils.data.TensorDataset(torch.arange(8.0))
loader = torch.utils.data.DataLoader(data, 2, num_workers=2, multiprocessing_context="fork")
for epoch in range(2):
    for (batch,) in loader:  # its workers are forked while the communication thread runs
        optimizer.zero_grad()
        (weight * batch.sum() * (1 + hvd.rank())).sum().backward()
        optimizer.step()
mean = (1 + hvd.size()) / 2
assert weight.tolist() == [-2 * 28 * mean] * 2, weight

child = os.fork()
if child == 0:
    messages = []
    for call in (
        lambda: hvd.allreduce(torch.ones(2), name="child"),
        lambda: hvd.broadcast_object("x"),
        lambda: hvd.barrier(),
        lambda: (weight.sum().backward(), optimizer.step()),
    ):
        try:
            call()
            messages.append("nothing")
        except Exception as error:
            messages.append(str(error))
    os.write(1, ("\\n".join(f"child: {each}" for each in messages) + "\\n").encode())
    sys.exit(0)  # with all that is to be done at exit
_, status = os.waitpid(child, 0)
assert status == 0
assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="after").tolist() == [hvd.size()] * 2
hvd.shutdown()
print("done")
"""


def test_forking_leaves_the_job_intact_and_a_child_is_refused_with_the_reason(warm_ranks: Ranks) -> None:
    for result in warm_ranks(2, FORKING):
        lines = [line for line in result.stdout.splitlines() if line.startswith("child: ")]
        assert len(lines) == 4, result.stdout
        assert [line for line in lines if "after fork" not in line] == []
        assert "done" in result.stdout
