"""Faults: lost ranks, busy ranks, invalid settings. Every wait ends, with an error that names its cause.

Faults of processes, connections and machines are rows of tests/faults; test_fault_cells.py runs some of their cells.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import asleep
import ports
import pytest
from conftest import RANKS_LIMIT_S, RankJob, RankResult, Ranks

from netbottleneck import _core
from netbottleneck.report import Run
from netbottleneck.trace import ring_reader

SCRIPT = Path(__file__).parent / "scripts" / "e2e_faults.py"
# A peer that is gone is noticed by its connections, from the later of the kill and the start of the wait; only a peer
# that is silent is noticed by this deadline. `make faults` judges how soon.
DEADLINE_S = 60
QUICK = {"NETBOTTLENECK_TIMEOUT_S": str(DEADLINE_S), "NETBOTTLENECK_START_TIMEOUT_S": str(DEADLINE_S)}


def failure(result: RankResult) -> tuple[str, int, float, float, str]:
    """Return (error, peer, began, raised, message) as a rank reports them."""
    found = re.search(r"^failed (\w+) (-?\d+) (\S+) (\S+) (.*)$", result.stdout, re.MULTILINE)
    assert found, (result.stdout, result.stderr)
    return found[1], int(found[2]), float(found[3]), float(found[4]), found[5]


def kill(job: RankJob, rank: int) -> float:
    """Kill a rank during operations; return the time."""
    for each in range(len(job.processes)):
        job.wait_for_line(each, "reducing")
    job.kill(rank)
    return time.monotonic()


def survivors(job: RankJob, victim: int) -> list[RankResult]:
    """Kill a rank during operations; return the other ranks' results, each of which names it before the deadline."""
    killed = kill(job, victim)
    results = [result for result in job.wait(check=False) if result.rank != victim]
    for result in results:
        _, peer, began, raised, message = failure(result)
        assert peer == victim
        assert f"rank {victim}" in message
        assert raised - max(killed, began) < DEADLINE_S
        assert result.code == 0, result.stderr
    return results


def ended(job: RankJob, rank: int) -> int | None:
    """Wait for a rank that must exit by itself; return its exit code, or None."""
    deadline = time.monotonic() + RANKS_LIMIT_S
    while job.processes[rank].poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return job.processes[rank].poll()


def last_line(result: RankResult) -> str:
    """Return a rank's final error."""
    assert result.code == 1, (result.code, result.stderr)
    lines = [line for line in result.stderr.strip().splitlines() if not line.startswith("[rank")]
    return lines[-1]


@pytest.mark.parametrize("transport", ["ofi", "tcp"])
def test_a_rank_killed_in_ddp_is_named_and_the_record_is_readable(
    warm_ranks: Ranks, tmp_path: Path, transport: str
) -> None:
    pytest.importorskip("torch")
    source = f"""
import sys
sys.argv[1:] = ["train"]
import netbottleneck
import runpy
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    run = tmp_path / "run"
    env = {
        **QUICK,
        "NETBOTTLENECK_TRANSPORT": transport,
        "NETBOTTLENECK_DIR": str(run),
        "NETBOTTLENECK_START_STEP": "0",
    }
    job = warm_ranks.start(2, source, env=env)
    killed = kill(job, 1)
    result = job.wait(check=False)[0]
    error, peer, began, raised, message = failure(result)
    assert (error, peer) == ("PeerError", 1)
    assert "rank 1" in message
    assert raised - max(killed, began) < DEADLINE_S
    assert result.code == 1
    trace = ring_reader.load(run)
    ended = {rank.rank: rank for rank in trace.ranks}
    assert set(ended) == {0, 1}
    assert not ended[1].finished
    assert "rank 1" in (ended[0].error or "")
    for rank in (0, 1):
        assert len([step for step in trace.steps if step.rank == rank]) >= 8
    assert all(c.done_ns for c in trace.collectives if c.step is not None and c.step < 8)


def test_a_rank_that_is_busy_is_reported_and_waited_for(plain_ranks: Ranks, tmp_path: Path) -> None:
    env = {**QUICK, "NETBOTTLENECK_STALL_S": "1", "NETBOTTLENECK_TIMEOUT_S": "1", "STALLED": str(tmp_path / "stalled")}
    results = plain_ranks(3, SCRIPT, env, args=["busy"])
    for result in results:
        assert "[1. 1. 1.]" in result.stdout
    logged = [line for result in results for line in result.stdout.splitlines() if line.startswith("logged")]
    assert any("evaluation" in line and re.search(r"not submitted it: 0\b", line) for line in logged), logged


STALLED = """
import time
import numpy as np
from pathlib import Path
from netbottleneck.runtime import job, ops
from netbottleneck.errors import HorovodInternalError
job.start()
over = Path(OVER)
if job.current().place.rank == 1:
    until = time.monotonic() + 100
    while not over.exists() and time.monotonic() < until:
        time.sleep(0.02)
try:
    ops.allreduce(np.ones(3), ops.Sum, name="late")
except HorovodInternalError as error:
    print("ended", error)
over.touch()
job.stop()
"""


def test_a_rank_that_never_submits_ends_the_job_if_horovods_variable_is_set(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {**QUICK, "HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    for result in warm_ranks(2, STALLED.replace("OVER", repr(str(tmp_path / "over"))), env):
        assert re.search(r"^ended .*'allreduce\.late' has waited for .* not submitted it: 1\b", result.stdout), result
        assert "NETBOTTLENECK_STALL_END_S" in result.stdout


CUT = """
import contextlib
import os
import socket
import time
import torch
import netbottleneck.torch as hvd

def lanes():
    \"\"\"This process' connections that came to one of its doors: rank 1 has doors for its lanes alone.\"\"\"
    doors, met = [], []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=os.dup(fd))
            listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            (doors if listens else met).append(connection)
    ports = [door.getsockname()[1] for door in doors if door.family == socket.AF_INET]
    return [one for one in met if one.family == socket.AF_INET and one.getsockname()[1] in ports]

torch.set_num_threads(1)
hvd.init()
model = torch.nn.Linear(1 << 18, 8)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
for step in range(24):
    if step == 8 and hvd.rank() == 1:
        lanes()[-1].shutdown(socket.SHUT_RDWR)  # of the communicator that was opened last: the gradients'
    optimizer.zero_grad()
    time.sleep(0.03)  # a forward pass: whether a lane or its rank is lost shows a quarter of a second later
    model(torch.full((1, 1 << 18), hvd.rank() + 1.0)).sum().backward()
    optimizer.step()
    assert (model.weight.grad == 1.5).all(), step
hvd.shutdown()
"""


def test_a_lost_lane_costs_no_step_and_is_reported(warm_ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    env = {"NETBOTTLENECK_TRANSPORT": "tcp", "NETBOTTLENECK_STREAMS": "3", "NETBOTTLENECK_START_STEP": "0"}
    for result in warm_ranks(2, CUT, {**QUICK, **env, "NETBOTTLENECK_DIR": str(tmp_path / "run")}):
        line = re.search(
            rf"1 of 3 lanes to rank {1 - result.rank} lost, their segments went over the others", result.stderr
        )
        assert line, result.stderr
    report = " ".join(Run(tmp_path / "run").text.split())
    for rank in range(2):
        lost = rf"rank {rank}: lane [012] to rank {1 - rank} was lost; its segments went over the other lanes\."
        assert re.search(lost, report), report


def stock_job(ranks: Ranks, size: int, tmp_path: Path, timeout_s: float) -> RankJob:
    env = {
        **QUICK,
        "NETBOTTLENECK_TRANSPORT": "stock",
        "NETBOTTLENECK_TIMEOUT_S": str(timeout_s),
        "NETBOTTLENECK_DIR": str(tmp_path / "run"),
        "NETBOTTLENECK_START_STEP": "0",
    }
    job = ranks.start(size, SCRIPT, ["optimize"], env)
    for rank in range(size):
        job.wait_for_line(rank, "reducing")
    return job


AT_THE_LIMIT = re.compile("Timed out|Application timeout")  # what of gloo's wait ends first: the caller's, the pair's


def check_stock_failed(results: list[RankResult]) -> None:
    for result in results:
        failure(result)  # what report_failure saw was a HorovodInternalError
        assert "torch.distributed" in result.stdout, result.stdout
        assert result.code == 1, result.stderr


def test_a_rank_killed_in_a_sum_over_stock_fails_all_others(warm_ranks: Ranks, tmp_path: Path) -> None:
    """By the loss, but for one rank: rarely gloo waits on when both peers are gone, and ends at its time limit."""
    pytest.importorskip("torch")
    job = stock_job(warm_ranks, 3, tmp_path, DEADLINE_S)
    job.kill(1)
    first, killed, third = job.wait(check=False)
    assert killed.code == -signal.SIGKILL
    check_stock_failed([first, third])
    assert not all(AT_THE_LIMIT.search(failure(result)[4]) for result in (first, third))


UNANSWERED = """
import time
from pathlib import Path
import torch
from netbottleneck.config import settings
from netbottleneck.runtime import communicators, job

this = job.start(settings())
closed = Path(CLOSED)
stock = communicators.Stock(communicators.stock_group(settings(), this.place, this.comm.exchange), 2, None)
if this.place.rank == 0:
    stock.reduce(torch.ones(3))
    stock.close()
    closed.touch()
else:
    until = time.monotonic() + 40
    while not closed.exists() and time.monotonic() < until:
        time.sleep(0.01)
    print("first" if closed.exists() else "last")
    stock.close()
job.stop()
"""


def test_a_sum_over_stock_that_no_rank_answers_does_not_hold_up_the_end(warm_ranks: Ranks, tmp_path: Path) -> None:
    """Its time limit is 60 s, and the other rank leaves after 40."""
    pytest.importorskip("torch")
    results = warm_ranks(2, UNANSWERED.replace("CLOSED", repr(str(tmp_path / "closed"))), QUICK)
    assert results[1].stdout == "first\n"


def test_a_rank_that_is_stopped_over_stock_fails_all_others_at_the_time_limit(
    warm_ranks: Ranks, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    job = stock_job(warm_ranks, 2, tmp_path, 10.0)
    job.kill(1, signal.SIGSTOP)
    code = ended(job, 0)
    job.kill(1)
    first, killed = job.wait(check=False)
    assert killed.code == -signal.SIGKILL
    assert code == 1, job.describe()
    check_stock_failed([first])
    assert AT_THE_LIMIT.search(failure(first)[4])


def test_one_interrupt_ends_a_wait(plain_ranks: Ranks) -> None:
    job = plain_ranks.start(2, SCRIPT, ["interrupted"], {**QUICK, "NETBOTTLENECK_STALL_S": "0"})
    job.wait_for_line(0, "waiting")
    asleep.wait_for(job.processes[0].pid, RANKS_LIMIT_S)
    job.kill(0, signal.SIGINT)  # the only one: the wait has no deadline, so nothing else ends it
    first, second = job.wait(check=False)
    assert "KeyboardInterrupt" in first.stderr
    assert "interrupted" in first.stdout.splitlines(), (first.stdout, first.stderr)
    _, peer, _, _, _ = failure(second)
    assert peer == 0


@pytest.mark.parametrize(
    ("name", "values"),
    [("NETBOTTLENECK_STREAMS", ("2", "3")), ("NETBOTTLENECK_TRANSPORT", ("tcp", "ofi"))],
)
def test_disagreeing_ranks_get_an_error(plain_ranks: Ranks, name: str, values: tuple[str, str]) -> None:
    results = plain_ranks(2, SCRIPT, lambda rank: {**QUICK, name: values[rank]}, args=["nothing"], check=False)
    for result in results:
        line = last_line(result)
        assert "MismatchError" in line
        key = name.removeprefix("NETBOTTLENECK_").lower()
        assert f"{key}={values[0]}" in line
        assert f"{key}={values[1]}" in line
        assert re.search(r"rank 0\b", line), line
        assert re.search(r"rank 1\b", line), line


@pytest.mark.parametrize(
    ("name", "value", "others", "phrases"),
    [
        ("NETBOTTLENECK_TRANSPORT", "rdma", {}, ["NETBOTTLENECK_TRANSPORT=rdma", "stock, tcp, ofi"]),
        ("NETBOTTLENECK_STREAMS", "0", {}, ["NETBOTTLENECK_STREAMS=0", "1 to 64"]),
        ("NETBOTTLENECK_STREAMS", "65", {}, ["NETBOTTLENECK_STREAMS=65", "1 to 64"]),
        ("NETBOTTLENECK_STREAMS", "abc", {}, ["NETBOTTLENECK_STREAMS=abc", "1 to 64"]),
        ("NETBOTTLENECK_PROVIDER", "nosuch", {"NETBOTTLENECK_TRANSPORT": "ofi"}, ["NETBOTTLENECK_PROVIDER", "nosuch"]),
        ("NETBOTTLENECK_AFFINITY", "0", {}, ["NETBOTTLENECK_AFFINITY=0", "rank 1 has local rank 1, but only 1 CPU"]),
        ("NETBOTTLENECK_AFFINITY", "one", {}, ["NETBOTTLENECK_AFFINITY=one", "numbers of CPUs"]),
        ("NETBOTTLENECK_CONGESTION", "nosuch", {}, ["NETBOTTLENECK_CONGESTION=nosuch", "this host allows", "reno"]),
        ("NETBOTTLENECK_IFNAME", "nosuch0", {}, ["NETBOTTLENECK_IFNAME", "nosuch0"]),
        ("NETBOTTLENECK_IFNAME", "nosuch0", {"NETBOTTLENECK_TRANSPORT": "ofi"}, ["NETBOTTLENECK_IFNAME", "nosuch0"]),
        (
            "NETBOTTLENECK_LIBFABRIC",
            "/nonexistent",
            {"NETBOTTLENECK_TRANSPORT": "ofi"},
            ["NETBOTTLENECK_LIBFABRIC", "/nonexistent"],
        ),
    ],
)
def test_a_setting_that_cannot_work_is_one_clear_error(
    plain_ranks: Ranks, name: str, value: str, others: dict[str, str], phrases: list[str]
) -> None:
    results = plain_ranks(2, SCRIPT, {**QUICK, **others, name: value}, args=["nothing"], check=False)
    for result in results:
        line = last_line(result)
        for phrase in phrases:
            assert phrase in line, result.stderr
        assert "no error" not in result.stdout


def test_a_missing_cpu_is_named_on_all_ranks(plain_ranks: Ranks) -> None:
    there = {**QUICK, "NETBOTTLENECK_AFFINITY": "0,0"}
    absent = {**QUICK, "NETBOTTLENECK_AFFINITY": "0,1023"}
    first, second = plain_ranks(2, SCRIPT, lambda rank: absent if rank else there, args=["nothing"], check=False)
    assert "NETBOTTLENECK_AFFINITY=0,1023: CPU 1023 of a communication thread does not exist" in last_line(second)
    assert "rank 1 could not open its lanes" in last_line(first)


def test_a_communication_thread_runs_on_its_cpu_which_is_recorded(plain_ranks: Ranks, tmp_path: Path) -> None:
    script = """
from pathlib import Path
import numpy as np
import netbottleneck as nb
from netbottleneck.runtime import job
info = job.start().comm.info()
held = []
for status in Path("/proc/self/task").glob("*/status"):
    held += [line.split()[1] for line in status.read_text().splitlines() if line.startswith("Cpus_allowed_list")]
assert held.count(str(info["cpu"])) == 1, (info["cpu"], held)
print("cpu", info["cpu"], float(nb.allreduce(np.ones(3))[0]))
"""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("this machine has one CPU")
    given = f"{cpus[-1]},{cpus[0]}"
    results = plain_ranks(2, script, {**QUICK, "NETBOTTLENECK_TRANSPORT": "tcp", "NETBOTTLENECK_AFFINITY": given})
    assert [result.stdout.split() for result in results] == [["cpu", cpu, "1.0"] for cpu in given.split(",")]


@pytest.mark.parametrize("requested", [True, False])
def test_tcp_lanes_have_the_requested_congestion_control(plain_ranks: Ranks, requested: bool) -> None:
    with socket.socket() as plain:
        host = plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    if host == "reno":
        pytest.skip("this host has reno, which lanes on loopback have anyway")
    script = f"""
import os, socket
import psutil
import numpy as np
import netbottleneck as nb
nb.init()
found = []
for here in psutil.Process().net_connections("tcp"):
    with socket.socket(fileno=os.dup(here.fd)) as one:
        found += [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode()]
print(found.count({host!r}), float(nb.allreduce(np.ones(3))[0]))
nb.shutdown()
"""
    env = {**QUICK, "NETBOTTLENECK_TRANSPORT": "tcp", "NETBOTTLENECK_STREAMS": "2", "NETBOTTLENECK_SHM": "0"}
    results = plain_ranks(2, script, env | ({"NETBOTTLENECK_CONGESTION": host} if requested else {}))
    # Each rank has made a connection for each lane; whatever else it has is on loopback, with reno.
    assert [result.stdout.split() for result in results] == [["2" if requested else "0", "1.0"]] * 2


def test_a_rank_without_descriptors_reports_it_and_does_not_busy_loop(plain_ranks: Ranks) -> None:
    script = """
import os
import resource
import time
import numpy as np
import netbottleneck as nb

nb.init()
nb.allreduce(np.ones(1))  # all lanes are connected
rank, opened = nb.rank(), max(map(int, os.listdir("/proc/self/fd")))
nb.shutdown()
os.environ["NETBOTTLENECK_START_TIMEOUT_S"] = "4"  # from here on: the first start may take longer
if rank == 1:
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened - 4, opened - 4))
spent = time.process_time()
try:
    nb.init()
finally:
    print("spent", time.process_time() - spent)
"""
    env = {**QUICK, "NETBOTTLENECK_SHM": "0", "NETBOTTLENECK_STREAMS": "8"}
    results = plain_ranks(2, script, env, check=False)
    assert "this rank could not accept connections (Too many open files: see `ulimit -n`)" in last_line(results[1])
    assert float(results[1].stdout.split()[1]) < 2  # of four seconds, most of which a thread could turn without end
    assert "rank 1" in last_line(results[0])


def test_different_numbers_of_interfaces_are_an_error_on_all_ranks(plain_ranks: Ranks) -> None:
    names = [name for name, _ in _core.interfaces("^nothing")]
    if len(names) < 2 and names != ["lo"]:
        names = ["lo", *names]
    if len(names) < 2:
        pytest.skip("this machine has one interface")
    env = [{**QUICK, "NETBOTTLENECK_IFNAME": f"=lo,{names[-1]}"}, {**QUICK, "NETBOTTLENECK_IFNAME": "=lo"}]
    results = plain_ranks(3, SCRIPT, lambda rank: env[rank // 2], args=["nothing"], check=False)
    for result in results:
        line = last_line(result)
        assert "MismatchError" in line
        assert f"rank 0 spreads its lanes over 2 interfaces (lo,{names[-1]}), rank 2 over 1 (lo)" in line
        assert "NETBOTTLENECK_IFNAME" in line


@pytest.mark.parametrize("transport", ["tcp", "ofi"])
def test_every_listener_takes_a_port_of_the_range(warm_ranks: Ranks, transport: str) -> None:
    env = {**QUICK, "NETBOTTLENECK_TRANSPORT": transport, "NETBOTTLENECK_STREAMS": "3"}
    script = """
import psutil
import numpy as np
import netbottleneck as nb
nb.init()
here = psutil.Process().net_connections("all")
print("doors", *sorted({c.laddr.port for c in here if c.laddr and getattr(c.laddr, "port", 0) and not c.raddr}))
assert (nb.allreduce(np.arange(1 << 20), nb.runtime.ops.Sum) == 2 * np.arange(1 << 20)).all()
nb.shutdown()
"""
    with ports.block() as given:
        results = warm_ranks(2, script, {**env, "NETBOTTLENECK_PORTS": f"{given[0]}-{given[-1]}"})
    doors = [[int(word) for word in result.stdout.split()[1:]] for result in results]
    assert all(port in given for each in doors for port in each), (given, doors)
    assert all(len(each) >= 3 for each in doors), doors  # one for each lane


def test_a_port_in_use_is_named(warm_ranks: Ranks) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        results = warm_ranks(
            2, SCRIPT, {**QUICK, "NETBOTTLENECK_PORTS": f"{port}-{port}"}, args=["nothing"], check=False
        )
    for result in results:
        line = last_line(result)
        assert str(port) in line
        assert "NETBOTTLENECK_PORTS" in line


def test_unsupported_values_of_operations_are_refused_by_name(plain_ranks: Ranks) -> None:
    for result in plain_ranks(2, SCRIPT, QUICK, args=["refused"]):
        assert result.stdout == "refused\n"


def test_twenty_jobs_in_sequence_use_one_port(warm_ranks: Ranks) -> None:
    for result in warm_ranks(2, SCRIPT, QUICK, args=["rounds"]):
        assert result.stdout == "twenty\n"


def test_a_rank_that_never_arrives_is_named(warm_ranks: Ranks) -> None:
    env = {**QUICK, "NETBOTTLENECK_START_TIMEOUT_S": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    results = warm_ranks(2, SCRIPT, env, args=["nothing"], check=False)
    assert re.search(r"(rank|ranks 1,) 2 did not reach", last_line(results[0]))  # rank 1 may come late
    assert results[1].code == 1


def test_nothing_is_left_when_a_run_was_killed() -> None:
    """The fixture kills running ranks; those of the tests above must have exited by themselves."""
    assert not [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _is_ours(pid)]


def _is_ours(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return False
    return str(SCRIPT).encode() in command and int(parent) in (1, os.getpid())
