"""Elastic training: the checks in scripts/, and ranks that die or are added under Horovod's launcher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Ranks, checks, free_port

from elasticdriver import (
    AckResponse,
    Driver,
    HostsUpdatedRequest,
    HostUpdateResult,
    PingRequest,
    PingResponse,
    ask,
)
from netbottleneck.errors import Error
from netbottleneck.torch.elastic import launcher
from netbottleneck.torch.elastic.launcher import Notices

SCRIPT = Path(__file__).parent / "scripts" / "elastic_checks.py"
CHECKS = checks(SCRIPT)


# In parts: what a check leaves in its process would go on in the next.
@pytest.mark.parametrize("names", [CHECKS[start::3] for start in range(3)], ids=["a", "b", "c"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_state_sampler_and_loop(warm_ranks: Ranks, size: int, names: list[str]) -> None:
    for result in warm_ranks(size, SCRIPT, {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, args=names):
        assert result.stdout.splitlines() == [f"ok {name}" for name in names]


@pytest.fixture
def driver() -> Iterator[Driver]:
    started = Driver()
    yield started
    started.close()


WORKER = """
import os, sys
import torch
import netbottleneck.torch as hvd
hvd.init()
who = int(os.environ["HOROVOD_LOCAL_RANK"])
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.constant_(model.weight, 100.0 * (who + 1))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
sampler = hvd.elastic.ElasticSampler(range(24), shuffle=False)
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=0)
state.register_reset_callbacks([lambda: print("ranks", hvd.rank(), hvd.size(), flush=True)])

@hvd.elastic.run
def train(state):
    while state.batch < 8:
        optimizer.zero_grad()
        (model.weight * 2.0 ** -hvd.size()).sum().backward()
        optimizer.step()
        sampler.record_batch(state.batch, 1)
        state.batch += 1
        state.commit()
        print("batch", state.batch, flush=True)
        if state.batch == 3 and hvd.size() == int(os.environ["WAIT_AT"]):
            sys.stdin.readline()
            while True:  # until the others fail, or hosts change
                hvd.barrier()
                state.commit()

train(state)
print("left", sampler.processed_num, "weight", model.weight.item(), flush=True)
hvd.shutdown()
"""


def total(*sizes: int) -> float:
    """Return the weight of rank 0's first worker after batches on these numbers of ranks."""
    return 100.0 - sum(2.0**-size for size in sizes)


def test_the_remaining_ranks_continue_under_horovods_launcher(warm_ranks: Ranks, driver: Driver) -> None:
    driver.expected = 2
    env = {"WAIT_AT": "3"}
    job = warm_ranks.start(3, WORKER, env=lambda rank: {**driver.environment(rank, 3, rank), **env})
    for rank in range(3):
        job.wait_for_line(rank, "batch 3")
    job.kill(0)
    results = job.wait(check=False)
    for rank in (1, 2):
        assert results[rank].code == 0, results[rank].stderr
        lines = results[rank].stdout.splitlines()
        assert lines[3] == f"ranks {rank - 1} 2"
        assert lines[-1] == f"left {3 * 3 + 5 * 2} weight {total(3, 3, 3, 2, 2, 2, 2, 2)}"


@pytest.mark.parametrize("size", [1, 2])
def test_added_ranks_start_from_the_others_state(warm_ranks: Ranks, driver: Driver, size: int) -> None:
    driver.expected, driver.joining = size, [size]
    env = {"WAIT_AT": str(size)}
    first = warm_ranks.start(size, WORKER, env=lambda rank: {**driver.environment(rank, size, rank), **env})
    for rank in range(size):
        first.wait_for_line(rank, "batch 3")
    address, key = driver.service(0)
    assert type(ask(address, key, HostsUpdatedRequest(1, HostUpdateResult.added))) is AckResponse
    driver.dealt()
    late = warm_ranks.start(1, WORKER, env={**driver.environment(size, size + 1, size), **env})
    for result in [*first.wait(), *late.wait()]:
        last = f"left {3 * size + 5 * (size + 1)} weight {total(*[size] * 3, *[size + 1] * 5)}"
        assert result.stdout.splitlines()[-1] == last


def test_a_removed_rank_ends_with_the_reason(driver: Driver) -> None:
    driver.expected, driver.leaving = 1, [4]
    with pytest.raises(Error, match=r"here:4 has been removed from the elastic job"):
        launcher.renew_place(driver.environment(4, 5, 4))


@pytest.mark.parametrize("missing", ["HOROVOD_ELASTIC", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"])
def test_without_an_elastic_launcher_there_are_no_requests_and_no_notices(driver: Driver, missing: str) -> None:
    environ = {**driver.environment(0, 2, 0), missing: ""}
    before = dict(environ)
    launcher.renew_place(environ)
    assert environ == before
    with Notices().listening(lambda *_: None, environ):
        assert driver.keys == {}


def test_a_lost_launcher_is_named(driver: Driver) -> None:
    environ = {**driver.environment(0, 2, 0), "HOROVOD_GLOO_RENDEZVOUS_PORT": str(free_port())}
    with pytest.raises(Error, match=environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]):
        launcher.renew_place(environ)
    with (
        pytest.raises(ConnectionError, match=environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]),
        Notices().listening(print, environ),
    ):
        pass


def test_the_service_accepts_only_the_launchers_messages(driver: Driver) -> None:
    messages: list[tuple[float, int]] = []
    with Notices().listening(lambda time, change: messages.append((time, int(change))), driver.environment(0, 2, 0)):
        address, key = driver.service(0)
        ping = ask(address, key, PingRequest())
        assert (type(ping), ping.service_name) == (PingResponse, "worker notification service")
        for number, change in enumerate(HostUpdateResult):
            assert type(ask(address, key, HostsUpdatedRequest(number, change))) is AckResponse
        ask(address, key, HostsUpdatedRequest(9, HostUpdateResult.mixed))
        assert ask(address, key, HostsUpdatedRequest(10, HostUpdateResult.added), signed_with=bytes(32)) is None
        assert ask(address, key, print) is None
    assert messages == [*((number, int(change)) for number, change in enumerate(HostUpdateResult)), (9, 3)]
    with pytest.raises(ConnectionRefusedError):
        ask(address, key, PingRequest())


RESTARTED = """
import os, signal
from pathlib import Path
import torch
import netbottleneck.torch as hvd
hvd.init()
kept = Path(os.environ["KEPT"])
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
saved = torch.load(kept) if kept.exists() else {"model": model.state_dict(), "batch": 0}
model.load_state_dict(saved["model"])
state = hvd.elastic.TorchState(model, optimizer, batch=saved["batch"])

@hvd.elastic.run
def train(state):
    print(f"from {state.batch}\\n", end="")
    while state.batch < 6:
        optimizer.zero_grad()
        (model.weight * float(hvd.rank() + 1)).sum().backward()
        optimizer.step()
        state.batch += 1
        state.commit()
        if hvd.rank() == 0:
            torch.save({"model": model.state_dict(), "batch": state.batch}, kept)
        hvd.barrier()
        if state.batch == 3 and hvd.rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

train(state)
print(f"weight {model.weight.item()}\\n", end="")
hvd.shutdown()
"""


@pytest.mark.full
def test_under_torchrun_all_ranks_restart_from_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED, encoding="utf-8")
    arguments = ["--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-backend", "c10d"]
    none = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "")
    job = ranks.start(
        1,
        "torch.distributed.run",
        [*arguments, "--rdzv-endpoint", "127.0.0.1:0", str(script)],
        {**none, "KEPT": str(tmp_path / "kept")},
    )
    lines = job.wait(100)[0].stdout.splitlines()
    assert sorted(lines) == ["from 0", "from 0", "from 3", "from 3", "weight -9.0", "weight -9.0"]
