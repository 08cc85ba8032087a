"""What a script sets for itself stays: timeout, stdout, threads, exit handlers, and its right to swap tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RANKS_LIMIT_S, Ranks

pytest.importorskip("torch")

# Rank 1 is alive, and does not take part in the third pass until rank 0 has given up.
STUCK = """
import datetime
import netbottleneck
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
dist.barrier()  # the limit of the group below counts from here on, not for the start
group = dist.new_group(timeout=datetime.timedelta(seconds=5))
model = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
store = dist.distributed_c10d._get_default_store()
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
if dist.get_rank() == 1:
    store.wait(["given up"])
else:
    try:
        model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        print("failed:", error, flush=True)
    store.set("given up", "")
    store.wait(["leaves"])
store.set("leaves", "")
__import__("os")._exit(0)
"""


@pytest.mark.parametrize("transport", ["tcp", "ofi"])
def test_a_peer_that_is_stuck_has_the_process_groups_timeout(warm_ranks: Ranks, transport: str) -> None:
    first, _ = warm_ranks(2, STUCK, {"NETBOTTLENECK_TRANSPORT": transport})
    assert "has waited for 5 s. Ranks that have not submitted it: 1" in first.stdout


# As above, in a loop without DDP, whose gradients netbottleneck.profile averages.
STUCK_LOOP = """
import datetime
import netbottleneck
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
store = dist.distributed_c10d._get_default_store()
with netbottleneck.profile(model, optimizer, transport="tcp"):
    dist.barrier()
    if dist.get_rank() == 1:
        store.wait(["given up"], datetime.timedelta(seconds=60))
    else:
        try:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        except Exception as error:
            print("failed:", error, flush=True)
        store.set("given up", "")
        store.wait(["leaves"])
    store.set("leaves", "")
    __import__("os")._exit(0)
"""


def test_a_loop_whose_peer_is_stuck_has_the_process_groups_timeout(ranks: Ranks) -> None:
    first, _ = ranks(2, STUCK_LOOP, {"NETBOTTLENECK_STALL_S": "2"})
    assert "has waited for 20 s. Ranks that have not submitted it: 1" in first.stdout
    assert "has waited for 2 s. Ranks that have not submitted it: 1" in first.stderr


UNREAD = """
import os
import sys
import netbottleneck
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with netbottleneck.profile(model, optimizer):
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    os.write(int(sys.argv[1]), b"trained")
    os.read(int(sys.argv[2]), 1)  # until nobody reads stdout any more
torch.save(model.state_dict(), "final.pt")
"""


def test_a_report_that_nobody_reads_does_not_end_the_script(tmp_path: Path) -> None:
    (said, tell), (wait, go) = os.pipe(), os.pipe()
    script = subprocess.Popen(
        [sys.executable, "-c", UNREAD, str(tell), str(wait)],
        cwd=tmp_path,
        env=os.environ | {"NETBOTTLENECK_START_STEP": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(tell, wait),
    )
    assert script.stdout is not None
    assert script.stderr is not None
    os.close(tell)
    assert os.read(said, 7) == b"trained"
    script.stdout.close()
    os.close(go)
    os.close(wait)
    complaint = script.stderr.read().decode()
    assert script.wait(RANKS_LIMIT_S) == 0, complaint
    assert "BrokenPipe" not in complaint
    assert (tmp_path / "final.pt").exists()
    assert list(tmp_path.glob("netbottleneck-*/report.html"))
    os.close(said)


# The optimizer steps in a thread beside the backward pass, at another time on each rank.
BESIDE = """
import threading
import time
import netbottleneck
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
model = DistributedDataParallel(net, bucket_cap_mb=0.02)
optimizer = torch.optim.SGD(net.parameters(), lr=0.0)


def beside(step):
    time.sleep(0.001 * (step % 7) * (1 + rank))
    optimizer.step()


for step in range(30):
    net.zero_grad()
    loss = model(torch.full((16, 64), 0.1 * (rank + 1))).square().mean()
    thread = threading.Thread(target=beside, args=(step,))
    thread.start()
    loss.backward()
    thread.join()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.01 * parameter.grad
print("weights:", sum(float(parameter.double().sum()) for parameter in net.parameters()), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_an_optimizer_that_steps_beside_the_backward_pass_changes_no_transport_in_it(warm_ranks: Ranks) -> None:
    (plain, _), (mixed, _) = (
        warm_ranks(2, BESIDE, {"NETBOTTLENECK_TRANSPORT": arms, "NETBOTTLENECK_BLOCK_STEPS": "1"})
        for arms in ("", "stock,tcp")
    )
    (expected,) = (line for line in plain.stdout.splitlines() if line.startswith("weights:"))
    assert expected in mixed.stdout.splitlines()


# The optimizer steps at the end of the backward pass, in it. Then rank 0 evaluates the model.
EVALUATED = """
import netbottleneck
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from netbottleneck.hooks import ddp

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = ddp.measured_by(model).session
later = torch.autograd.Variable._execution_engine.queue_callback
for step in range(4):
    optimizer.zero_grad()
    output = model(torch.ones(2, 4))
    output.register_hook(lambda gradient: later(lambda: later(optimizer.step)))  # after DDP's callback
    output.sum().backward()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(torch.ones(2, 4))
    dist.barrier()
    assert session.step == step, session.step
assert session.stays is None, session.why_stays
print("done")
dist.barrier()
dist.destroy_process_group()
"""


def test_an_evaluation_on_one_rank_ends_no_step(warm_ranks: Ranks) -> None:
    env = {"NETBOTTLENECK_TRANSPORT": "stock,tcp", "NETBOTTLENECK_BLOCK_STEPS": "1"}
    for result in warm_ranks(2, EVALUATED, env):
        assert "done" in result.stdout


SWAPPED = """
import gc
import netbottleneck
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.__future__.set_swap_module_params_on_conversion(True)
net = torch.nn.Linear(4, 4)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(6):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
del model, optimizer
gc.collect()
net.to(torch.float64)
assert net.weight.dtype is torch.float64
net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()})
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("transport", ["stock", "tcp"])
def test_parameters_may_be_swapped_once_the_model_is_gone(warm_ranks: Ranks, transport: str) -> None:
    warm_ranks(2, SWAPPED, {"NETBOTTLENECK_TRANSPORT": transport, "NETBOTTLENECK_START_STEP": "0"})


# A launcher that has seen another rank fail ends this one while it makes the report.
ENDED = """
import atexit
import os
import signal
import tempfile
import time

import netbottleneck
import torch
import torch.distributed as dist
from netbottleneck.hooks import run_end
from torch.nn.parallel import DistributedDataParallel

def end(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

run_end._write = end
atexit.register(print, "the script's handler", flush=True)
folder = tempfile.TemporaryDirectory(dir=".")
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
{more}
"""
HANDLES = "signal.signal(signal.SIGTERM, lambda *_: (print('handled', flush=True), run_end.sys.exit(7)))"


@pytest.mark.parametrize(("more", "said"), [("", []), (HANDLES, ["handled"])], ids=["default", "the script's"])
def test_sigterm_during_the_report_leaves_the_scripts_exit_handlers(
    ranks: Ranks, tmp_path: Path, more: str, said: list[str]
) -> None:
    env = {"NB_TESTS_OWN_EXIT": "1", "NETBOTTLENECK": "1", "NETBOTTLENECK_START_STEP": "0"}
    script = f"import os; os.chdir({str(tmp_path)!r})\n{ENDED.format(more=more)}"
    (result,) = ranks(1, script, env, check=False)
    assert result.stdout.splitlines() == [*said, "the script's handler"]
    assert result.code == 0
    assert said or "the report is not complete, as SIGTERM came: netbottleneck report " in result.stderr
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("tmp")]


# Rank 1 ends when rank 0 has. A rank 0 that is told to end does not wait for it until then.
WAITS = """
import atexit
import os
import signal
import threading
import time
from pathlib import Path

import netbottleneck
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ended = Path({folder!r}, "ended")
rank = int(os.environ["RANK"])
atexit.register(lambda: ended.touch() if rank == 0 else None)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
while rank == 1 and not ended.exists():
    time.sleep(0.01)
if rank == 0:
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
else:
    os._exit(0)
"""


@pytest.mark.parametrize("transport", ["stock", "tcp"])
def test_sigterm_during_the_wait_for_another_rank_leaves_the_scripts_exit_handlers(
    ranks: Ranks, tmp_path: Path, transport: str
) -> None:
    env = {"NB_TESTS_OWN_EXIT": "1", "NETBOTTLENECK_TRANSPORT": transport, "NETBOTTLENECK_START_STEP": "0"}
    first, _ = ranks(2, WAITS.format(folder=str(tmp_path)), env, check=False)
    assert first.code == 0
    assert (tmp_path / "ended").exists()
    assert "no complete record" not in first.stderr  # which it says after the whole wait
