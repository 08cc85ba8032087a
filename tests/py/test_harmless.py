"""A measured DDP model behaves as the script's own: scripts/harmless_checks.py, and ranks that cannot join."""

from __future__ import annotations

import functools
import math
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from conftest import Ranks, by_torchrun, checks

pytest.importorskip("torch")

from netbottleneck import config
from netbottleneck.errors import of_handler
from netbottleneck.hooks import ddp, horovod, run_end
from netbottleneck.report import Run
from netbottleneck.runtime.session import Session

SCRIPT = Path(__file__).parent / "scripts" / "harmless_checks.py"


def test_a_measured_model_behaves_as_the_scripts_own(warm_ranks: Ranks) -> None:
    names = checks(SCRIPT)
    for result in warm_ranks(2, SCRIPT, {}, args=names):
        lines = [line for line in result.stdout.splitlines() if line.startswith("ok ")]
        assert lines == [f"ok {name}" for name in names], result.stderr


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


def test_ranks_without_a_launcher_record_alone_and_name_what_is_unknown(warm_ranks: Ranks) -> None:
    env = {"NETBOTTLENECK": "1", "NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_BLOCK_STEPS": "2"}
    unset = dict.fromkeys(by_torchrun(0, 1, 0), "")
    (job,) = warm_ranks(1, ALONE, {**env, **unset, "NETBOTTLENECK_DIR": "run"})
    assert "the slowest rank and the measurements of other ranks are not known" in job.stderr
    assert [path.name for path in (warm_ranks.folder / "job0").glob("*run*")] == ["run"]
    folders = sorted((warm_ranks.folder / "job0" / "run").iterdir())
    assert [path.name for path in folders] == ["rank0", "rank1"]
    assert [Run(folder).trace.id for folder in folders] == ["job0-run-rank0", "job0-run-rank1"]
    assert "Of your " in job.stdout


OWN_LOOP = """
import netbottleneck, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Linear(4, 4)
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
def test_training_without_a_ddp_model_is_left_alone_or_an_error_in_strict_mode(warm_ranks: Ranks, strict: bool) -> None:
    for result in warm_ranks(2, OWN_LOOP, {"NETBOTTLENECK": "1", "NETBOTTLENECK_STRICT": str(int(strict))}):
        why = "it has no DistributedDataParallel model and no Horovod optimizer. If the script averages gradients"
        if strict:
            assert result.stdout.startswith("refused at step 2")
            assert why in result.stdout
        else:
            assert result.stdout == "trained\n"
            assert result.stderr.count("netbottleneck WARNING: the training is left alone") == 1
            assert why in result.stderr


UNTOLD = """
import os
import netbottleneck
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

number = int(os.environ["NUMBER"])
dist.init_process_group("gloo", init_method=f"file://{os.path.abspath('store')}", rank=number, world_size=2)
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    model(torch.full((2, 4), 1.0 + number)).square().sum().backward()
    optimizer.step()
weights = [torch.zeros_like(p) for p in model.parameters() for _ in range(2)]
for index, p in enumerate(model.parameters()):
    dist.all_gather(weights[2 * index : 2 * index + 2], p.detach())
    assert torch.equal(*weights[2 * index : 2 * index + 2]), "ranks differ"
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_that_differ_from_the_launchers_variables_are_left_alone_over_our_transports(warm_ranks: Ranks) -> None:
    unset = dict.fromkeys(by_torchrun(0, 1, 0), "")
    env = {**unset, "NETBOTTLENECK_TRANSPORT": "tcp"}
    for result in warm_ranks(2, UNTOLD, lambda rank: {**env, "NUMBER": str(rank)}):
        said = f"say rank 0 of 1, torch.distributed says {result.rank} of 2: set RANK and WORLD_SIZE"
        assert said in result.stderr


@pytest.mark.parametrize("transport", ["stock", "stock,tcp"])
def test_a_launcher_that_sets_no_rank_leaves_it_to_torch(warm_ranks: Ranks, tmp_path: Path, transport: str) -> None:
    env = {"RANK": "", "NETBOTTLENECK_TRANSPORT": transport, "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    env |= {"NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_BLOCK_STEPS": "2"}
    for result in warm_ranks(2, UNTOLD, lambda rank: {**env, "NUMBER": str(rank)}):
        assert "alone" not in result.stderr
    assert {step.rank for step in Run(tmp_path / "run").trace.steps} == {0, 1}


@pytest.mark.parametrize("lacks", [0, 1])
def test_a_rank_with_other_variables_keeps_no_other_waiting(warm_ranks: Ranks, lacks: int) -> None:
    """Every process has the variables of one rank, which agree with torch.distributed on that rank only."""
    same = {**by_torchrun(1 - lacks, 2, 0), "NETBOTTLENECK_TRANSPORT": "stock,tcp"}
    results = warm_ranks(2, UNTOLD, lambda rank: {**same, "NUMBER": str(rank)})  # within much less than a start's limit
    why = f"the launcher's variables say rank {1 - lacks} of 2, torch.distributed says {lacks} of 2: set RANK"
    assert f"is left alone: {why}" in results[lacks].stderr
    assert f"is left alone: rank {lacks} leaves it alone: {why}" in results[1 - lacks].stderr


OTHER_SIZE = """
import os
import netbottleneck, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def trained():
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()

dist.init_process_group("gloo")
trained()
dist.destroy_process_group()
os.environ |= {"WORLD_SIZE": "1", "RANK": "0"}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
trained()
dist.destroy_process_group()
"""


def test_a_second_group_of_another_size_is_left_alone_with_the_reason(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {"NETBOTTLENECK_TRANSPORT": "stock,tcp", "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    for result in warm_ranks(2, OTHER_SIZE, env):
        assert f"measured as rank {result.rank} of 2, torch.distributed says 0 of 1" in result.stderr


NO_FOLDER = """
import os, resource, signal, sys
import netbottleneck, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
if dist.get_rank() == int(os.environ["LACKS"]):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("lacks", [0, 1])
def test_a_rank_that_cannot_record_keeps_no_other_waiting(warm_ranks: Ranks, tmp_path: Path, lacks: int) -> None:
    env = {"NETBOTTLENECK_TRANSPORT": "stock,tcp", "NETBOTTLENECK_DIR": str(tmp_path / "run"), "LACKS": str(lacks)}
    results = warm_ranks(2, NO_FOLDER, env)  # within much less than NETBOTTLENECK_START_TIMEOUT_S
    assert "is left alone" in results[lacks].stderr
    assert "cannot reserve" in results[lacks].stderr
    assert "another rank could not open the run: see that rank's log" in results[1 - lacks].stderr


ONE_AFTER_ANOTHER = """
import os, time
import netbottleneck, torch, torch.distributed as dist
from netbottleneck.hooks import ddp
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def after(number):
    for _ in range(number):
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        for step in range(4):
            model(torch.ones(2, 4)).sum().backward()
        del model
    until = time.monotonic() + 100  # runs that the other rank has not joined are closed later
    while time.monotonic() < until and ddp._of_gone:
        ddp._close_sessions_of_gone()
        time.sleep(0.05)
    return descriptors()

few, many = after(2), after(6)
assert many <= few + 2, (few, many)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("transports", ["stock", "stock,tcp"])
def test_models_one_after_another_leave_no_descriptors(warm_ranks: Ranks, tmp_path: Path, transports: str) -> None:
    warm_ranks(
        2, ONE_AFTER_ANOTHER, {"NETBOTTLENECK_TRANSPORT": transports, "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    )


SWEEP = """
import time
import netbottleneck, torch, torch.distributed as dist
from netbottleneck.hooks import ddp
from netbottleneck.runtime import exits
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
for number in range(3):
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    if number < 2:
        del model
    until = time.monotonic() + 100
    while time.monotonic() < until and ddp._of_gone:  # until the ranks have joined the run
        ddp._close_sessions_of_gone()
        time.sleep(0.05)
exits.left = lambda limit_s: LEFT_S
"""
OBSERVED = {"NETBOTTLENECK": "1", "NETBOTTLENECK_DIR": "run", "NETBOTTLENECK_START_STEP": "0"}


def test_the_reports_of_freed_models_are_written_at_exit(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {**OBSERVED, "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    (result,) = warm_ranks(1, SWEEP.replace("LEFT_S", "100.0"), env)
    assert result.stdout.count("Report: ") == 1  # of the last model
    assert len(list(tmp_path.glob("run/**/report.txt"))) == 3
    assert "no report" not in result.stderr


def test_reports_for_which_no_time_is_left_at_exit_are_named(warm_ranks: Ranks) -> None:
    (result,) = warm_ranks(1, SWEEP.replace("LEFT_S", "0.5"), OBSERVED)
    (line,) = [line for line in result.stderr.splitlines() if "no report yet" in line]
    assert "of 2 models that were freed before the end: netbottleneck report RUN --write RUN, where RUN is " in line
    assert [place.rpartition("/")[2] for place in line.rpartition("RUN is ")[2].split(", ")] == ["run", "2"]


GROUP_GONE = """
import gc, os, weakref
import netbottleneck, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
made = dist.new_group()
model = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=made)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
alive = [weakref.ref(dist.group.WORLD), weakref.ref(made)]
dist.barrier()
del model, optimizer, made
dist.destroy_process_group()
gc.collect()
print("alive:", [reference() for reference in alive])
"""


@pytest.mark.parametrize("env", [{}, {"NETBOTTLENECK": "1"}, {"NETBOTTLENECK_TRANSPORT": "stock,tcp"}])
def test_a_model_that_is_gone_keeps_no_process_group(warm_ranks: Ranks, tmp_path: Path, env: dict[str, str]) -> None:
    for result in warm_ranks(2, GROUP_GONE, {**env, "NETBOTTLENECK_DIR": str(tmp_path / "run")}):
        assert "alive: [None, None]" in result.stdout


UNAWAITED = """
import atexit, sys, time
from pathlib import Path
atexit.register(Path("ending").touch)  # the last handler of all
import netbottleneck, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Raises(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise RuntimeError("in backward")

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(2, 4, requires_grad=True)
for step in range(3):
    model(x).sum().backward()
    optimizer.step()
if dist.get_rank() == 1:
    if sys.argv[1] == "raises":
        model(Raises.apply(x)).sum().backward()
    work = dist.all_reduce(torch.ones(8), async_op=True)
else:
    until = time.monotonic() + 5
    while time.monotonic() < until and not Path("ending").exists():
        time.sleep(0.01)
    if sys.argv[1] == "raises":
        model(x).sum().backward()
    dist.all_reduce(torch.ones(8))
"""


@pytest.mark.parametrize(("how", "code"), [("ends", 0), ("raises", 1)])
def test_an_operation_under_way_at_exit_aborts_no_process(ranks: Ranks, tmp_path: Path, how: str, code: int) -> None:
    env = {"NETBOTTLENECK": "1", "NETBOTTLENECK_DIR": str(tmp_path / "run"), "NETBOTTLENECK_START_STEP": "0"}
    assert ranks(2, UNAWAITED, env, args=[how], check=False)[1].code == code


BY_VALUE = """
import cloudpickle, pickle, sys
import netbottleneck, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Own(DistributedDataParallel):
    pass

dist.init_process_group("gloo")
model = Own(torch.nn.Linear(4, 4))
blob = cloudpickle.dumps(Own)
for name in [name for name in sys.modules if name.startswith("netbottleneck")]:
    del sys.modules[name]
sys.modules["netbottleneck"] = None  # as where it is not installed
again = pickle.loads(blob)
assert callable(again.__call__)
del sys.modules["netbottleneck"]
dist.barrier()
dist.destroy_process_group()
"""


def test_a_class_of_the_scripts_own_is_pickled_by_value_and_read_without_us(warm_ranks: Ranks, tmp_path: Path) -> None:
    warm_ranks(2, BY_VALUE, {"NETBOTTLENECK": "1", "NETBOTTLENECK_DIR": str(tmp_path / "run")})


STOPPED = """
import datetime
import os
import signal
import netbottleneck
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
dist.barrier()  # the limit of the group below counts from here on, not for the start
group = dist.new_group(timeout=datetime.timedelta(seconds=10))
model = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
dist.all_gather(pids, torch.tensor([os.getpid()]))
for _ in range(2):  # DDP rebuilds its buckets over its own group
    model(torch.ones(2, 4)).sum().backward()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)
try:
    model(torch.ones(2, 4)).sum().backward()
except OSError as error:
    print("failed:", error, flush=True)
finally:
    os.kill(int(pids[1]), signal.SIGCONT)
os._exit(0)
"""


def test_a_silent_peer_has_the_process_groups_timeout_by_default(warm_ranks: Ranks) -> None:
    """Both jobs wait at the same time. Our own default is 30 s; the line has the length of the silence or the limit."""
    limits = {"": (10.0, 30.0), "15": (15.0, math.inf)}
    tcp = {"NETBOTTLENECK_TRANSPORT": "tcp"}
    jobs = [warm_ranks.start(2, STOPPED, env={**tcp, "NETBOTTLENECK_TIMEOUT_S": value}) for value in limits]
    for job, (least, most) in zip(jobs, limits.values(), strict=True):
        first, _ = job.wait()
        lines = (r"failed: .*rank 1 .* (\d+\.\d) s", r"waited for (\d+) s\. Ranks that have not submitted it: 1")
        found = [float(value) for line in lines for value in re.findall(line, first.stdout)]
        assert found, first.stdout + first.stderr
        assert least <= found[0] < most


class Untold:
    """A process group whose backend does not expose its options."""

    def _get_backend(self, _device: object) -> object:
        return self

    @property
    def options(self) -> object:
        raise RuntimeError("backend mpi does not implement getBackendOptions")


ON_CPU: object = "cpu"


def test_a_backend_without_a_known_timeout_has_that_of_the_settings() -> None:
    chosen = config.settings(environ={})
    assert ddp._with_timeout_of(Untold(), chosen, ON_CPU) == chosen


DECORATED = """
import functools
import netbottleneck
import torch
import torch.distributed as dist
import torch.fx
from torch.nn.parallel import DistributedDataParallel as DDP

seen = {"made": 0, "called": 0}


def counted(method, what):
    @functools.wraps(method)
    def counting(*args, **kwargs):
        seen[what] += 1
        return method(*args, **kwargs)

    return counting


dist.init_process_group("gloo")
DDP.__init__ = counted(DDP.__init__, "made")
whole = torch.nn.Sequential(DDP(torch.nn.Linear(4, 4)), torch.nn.ReLU())
DDP.__call__ = counted(DDP.__call__, "called")
optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
for _ in range(12):
    optimizer.zero_grad()
    whole(torch.ones(2, 4)).sum().backward()
    optimizer.step()
DDP(torch.nn.Linear(4, 4))
print("seen", seen["made"], seen["called"])
print("graph", [node.op for node in torch.fx.symbolic_trace(whole).graph.nodes])
dist.destroy_process_group()
"""


def test_decorators_of_ddps_methods_stay_and_fx_traces_the_same_graph(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {"NETBOTTLENECK": "1", "NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_BLOCK_STEPS": "2"}
    for result in warm_ranks(2, DECORATED, {**env, "NETBOTTLENECK_DIR": str(tmp_path / "run")}):
        assert "seen 2 12" in result.stdout, result.stdout + result.stderr
        assert "graph ['placeholder', 'call_module', 'call_module', 'output']" in result.stdout


WARNED = """
import functools
import sys
import warnings
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

measured, decorated = sys.argv[1:]


def decorate():
    init = DDP.__init__

    @functools.wraps(init)
    def decorator(*args, **kwargs):
        return init(*args, **kwargs)

    DDP.__init__ = decorator


class Own(DDP):
    def __init__(self, module):
        super().__init__(module, check_reduction=True)


dist.init_process_group("gloo")
if decorated == "before":
    decorate()
if measured == "measured":
    import netbottleneck
if decorated == "after":
    decorate()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    DDP(torch.nn.Linear(4, 4), check_reduction=True)
    Own(torch.nn.Linear(4, 4))
named = [f"{one.filename}:{one.lineno}" for one in caught if "check_reduction" in str(one.message)]
print("named", len(named), *named)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("decorated", ["never", "before", "after"])
def test_a_warning_of_ddp_names_the_line_that_it_names_without_us(warm_ranks: Ranks, decorated: str) -> None:
    script = warm_ranks.folder / "warned.py"
    script.write_text(WARNED, encoding="utf-8")
    lines = []
    for measured in ("untouched", "measured"):
        (result,) = warm_ranks(1, script, {"NETBOTTLENECK": "1"}, args=[measured, decorated])
        assert "named 2 " in result.stdout, result.stdout + result.stderr
        lines.append(next(line for line in result.stdout.splitlines() if line.startswith("named ")))
    assert lines[0] == lines[1]


ALARMED = """
import pathlib, signal, sys, time, torch
import netbottleneck.torch as hvd

hvd.init()
flag = pathlib.Path(sys.argv[1])


def late(*_):
    raise TimeoutError("a limit of the script's")


if hvd.rank() == 0:
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        hvd.allreduce(torch.ones(4), name="late")
    except Exception as error:
        print("raised", type(error).__name__, error)
    flag.touch()
else:
    while not flag.exists():
        time.sleep(0.01)
    print(hvd.allreduce(torch.ones(4), name="late").tolist())
hvd.allreduce(torch.ones(4), name="after")
hvd.shutdown()
"""


def test_an_exception_of_a_signal_handler_in_a_wait_reaches_the_script(warm_ranks: Ranks, tmp_path: Path) -> None:
    first, second = warm_ranks(2, ALARMED, {}, args=[str(tmp_path / "raised")])
    assert "raised TimeoutError a limit of the script's" in first.stdout, first.stdout + first.stderr
    assert "[1.0, 1.0, 1.0, 1.0]" in second.stdout


ALARMED_BETWEEN = """
import pathlib, signal, sys, time, torch
import torch.distributed as dist
import netbottleneck

dist.init_process_group("gloo")
rank, flag = dist.get_rank(), pathlib.Path(sys.argv[1])
torch.manual_seed(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.125)


def late(*_):
    flag.touch()
    raise TimeoutError("a limit of the script's")


signal.signal(signal.SIGALRM, late)
with netbottleneck.profile(model, optimizer, transport="stock,tcp") as run:
    for step in range(8):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + rank)).sum().backward()
        if step == 1 and rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.3)  # while this rank waits for the other one before the next arm
        while step == 1 and rank == 1 and not flag.exists():
            time.sleep(0.01)
        try:
            optimizer.step()
        except TimeoutError as error:
            print("raised at", step, error)
weights = [torch.zeros(4, 4) for _ in range(2)]
dist.all_gather(weights, model.weight.detach())
assert torch.equal(*weights)
print("alike")
dist.destroy_process_group()
"""


def test_an_exception_of_a_signal_handler_between_two_arms_reaches_the_script(
    warm_ranks: Ranks, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    env = {"NETBOTTLENECK_DIR": str(run), "NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_BLOCK_STEPS": "2"}
    first, second = warm_ranks(2, ALARMED_BETWEEN, env, args=[str(tmp_path / "raised")])
    assert "raised at 1 a limit of the script's" in first.stdout, first.stdout + first.stderr
    assert "alike" in first.stdout
    assert "alike" in second.stdout
    trace = Run(run).trace
    assert {step.arm for step in trace.steps} == {"stock", "tcp"}
    assert not [note for note in trace.notes if "measuring ended" in note or "all further steps" in note]


class Handler:
    def __call__(self, *_: object) -> None:
        raise TimeoutError("a limit of the script's")


def test_an_exception_belongs_to_the_script_if_its_signal_handler_raised_it() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    caught = []
    try:
        for handler in (Handler(), Handler().__call__, functools.partial(Handler.__call__, None)):
            signal.signal(signal.SIGUSR1, handler)
            with pytest.raises(TimeoutError) as raised:
                signal.raise_signal(signal.SIGUSR1)
            caught.append(of_handler(raised.value))
        with pytest.raises(ZeroDivisionError) as other:
            _ = 1 // 0
        assert not of_handler(other.value)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught == [True] * 3


ALARMED_WORK = """
import pathlib, signal, sys, time, torch
import torch.distributed as dist
import netbottleneck.torch.backend

dist.init_process_group("nb")
flag = pathlib.Path(sys.argv[1])
tensor = torch.ones(4)


def late(*_):
    raise TimeoutError("a limit of the script's")


if dist.get_rank() == 0:
    signal.signal(signal.SIGALRM, late)
    work = dist.all_reduce(tensor, async_op=True)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        work.wait()
    except TimeoutError as error:
        print("raised", error)
    flag.touch()
    work.wait()
    assert work.is_success()
else:
    while not flag.exists():
        time.sleep(0.01)
    dist.all_reduce(tensor)
print(tensor.tolist())
dist.destroy_process_group()
"""


def test_an_exception_of_a_signal_handler_is_not_the_failure_of_an_operation(warm_ranks: Ranks, tmp_path: Path) -> None:
    first, second = warm_ranks(2, ALARMED_WORK, {}, args=[str(tmp_path / "raised")])
    assert "raised a limit of the script's\n[2.0, 2.0, 2.0, 2.0]" in first.stdout, first.stdout + first.stderr
    assert "[2.0, 2.0, 2.0, 2.0]" in second.stdout


TYPES = """
import torch
import netbottleneck.torch as hvd

hvd.init()
slope = 1.0 + hvd.rank() / 128  # the mean has more bits than bfloat16
for size in (8, 300_000):
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        weight = torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16))
        weight.grad_dtype = torch.float32
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0), compression=compression)
        (weight * slope).sum().backward()
        optimizer.synchronize()
        assert weight.grad.dtype == torch.float32 and (weight.grad == 1 + 1 / 256).all(), weight.grad
    weight = torch.nn.Parameter(torch.zeros(size, dtype=torch.float16))
    weight.register_post_accumulate_grad_hook(lambda p: setattr(p.grad, "data", p.grad.data.float() * 4096))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0))
    try:
        (weight * 20).sum().backward()
        optimizer.synchronize()
        print("no error", weight.grad[0])
    except RuntimeError as error:
        print("raised:", error)
hvd.shutdown()
"""


def test_gradients_of_another_type_than_their_parameter_are_summed_in_it_or_refused(warm_ranks: Ranks) -> None:
    for result in warm_ranks(2, TYPES, {}, check=False):
        refusals = re.findall(
            r"^raised: a gradient is of type torch.float32, its parameter of torch.float16", result.stdout, re.M
        )
        assert len(refusals) == 2, result.stdout + result.stderr


ENDS = """
import sys
import torch
import netbottleneck
from netbottleneck.runtime import session

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def full(*_, **__):
    raise OSError(28, "No space left on device")


with netbottleneck.profile(model, optimizer):
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    if sys.argv[1] == "exit":
        sys.exit(0)
    session.Session.write = full
    if sys.argv[1] == "full, and raises":
        raise RuntimeError("of the training")
print("after")
"""


def test_a_full_disk_does_not_hide_the_exception_of_the_training(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {"NETBOTTLENECK_DIR": str(tmp_path / "run"), "NETBOTTLENECK_START_STEP": "0"}
    (result,) = warm_ranks(1, ENDS, env, args=["full, and raises"], check=False)
    assert result.code == 1
    assert "the record is not complete: [Errno 28] No space left on device" in result.stderr
    assert "RuntimeError: of the training" in result.stderr
    assert "another exception" not in result.stderr


@pytest.mark.parametrize("end", ["exit", "full"])
def test_a_normal_end_writes_a_report_and_a_full_disk_one_line(warm_ranks: Ranks, tmp_path: Path, end: str) -> None:
    run = tmp_path / "run"
    env = {"NETBOTTLENECK_DIR": str(run), "NETBOTTLENECK_START_STEP": "0"}
    (result,) = warm_ranks(1, ENDS, env, args=[end])
    assert "Traceback" not in result.stderr, result.stderr
    if end == "exit":
        assert '"finished": true' in (run / "ranks" / "0.meta.json").read_text(encoding="utf-8")
        assert (run / "report.html").exists()
    else:
        assert "after" in result.stdout
        assert "the record is not complete, and has no report" in result.stderr


GOES_ON = """
import random
import sys
import numpy as np
import torch
import netbottleneck

random.seed(3)
np.random.seed(3)
torch.manual_seed(3)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(optimizer):
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

if {kind!r} == "profile":
    torch.distributed.init_process_group("gloo")
    with netbottleneck.profile(model, optimizer):
        train(optimizer)
else:
    import netbottleneck.torch as hvd
    hvd.init()
    train(hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()))
    hvd.shutdown()
print("rich", "rich.style" in sys.modules)
print("next", random.random(), np.random.random(), torch.rand(1).item())
"""


@pytest.mark.parametrize("kind", ["profile", "horovod"])
def test_the_script_draws_the_same_random_numbers_after_a_report(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """The first report in a process imports rich, whose import draws a number. Rank 1 has no report."""
    env = {"NETBOTTLENECK": "1", "NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    results = ranks(2, GOES_ON.format(kind=kind), env)
    assert (tmp_path / "run" / "report.html").exists()
    lines = [result.stdout.splitlines() for result in results]
    assert ["rich True" in each for each in lines] == [True, False]
    assert len({line for each in lines for line in each if line.startswith("next")}) == 1


def test_a_report_that_fails_ends_with_one_line_and_not_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("the disk is full")

    place = SimpleNamespace(rank=0, size=2)
    session = SimpleNamespace(place=place, until=0.0, folder=tmp_path, collect=lambda: None)
    monkeypatch.setattr(run_end, "_write", fails)
    run_end.report(cast(Any, session))
    monkeypatch.setattr(horovod, "report", fails)
    measuring = horovod.Measuring()
    measuring._session = cast(Any, session)
    measuring.stopped(cast(Any, None))
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: the report failed: RuntimeError: the disk is full",
        f"{tmp_path}: no report: RuntimeError: the disk is full",
    ]


def test_ranks_without_a_complete_record_are_named(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    place = SimpleNamespace(rank=0, size=2)
    session = SimpleNamespace(comm=object(), place=place, shared=True, folder=tmp_path, until=0.0)
    Session.collect(cast(Any, session))
    assert [record.getMessage() for record in caplog.records] == [f"no complete record of ranks [0, 1] in {tmp_path}"]
