"""Collectives without torch: training in NumPy equals that of one rank, for each rendezvous."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import RANKS_LIMIT_S, Ranks, free_port

SCRIPTS = Path(__file__).parent / "scripts"
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FORGET = dict.fromkeys(LAUNCHER, "")


def explicit(size: int, **more: str) -> Callable[[int], dict[str, str]]:
    """Return the environment of ranks without a launcher."""
    return lambda rank: {**FORGET, "NETBOTTLENECK_RANK": str(rank), "NETBOTTLENECK_SIZE": str(size), **more}


def weights(ranks: Ranks, size: int, env: Callable[[int], dict[str, str]]) -> list[float]:
    """Train on `size` ranks and return the weights, which are equal on all."""
    results = ranks(size, SCRIPTS / "numpy_train.py", env)
    lines = {line for result in results for line in result.stdout.splitlines() if line.startswith("weights")}
    assert len(lines) == 1
    return [float(word) for word in lines.pop().split()[1:]]


@pytest.mark.parametrize("size", [2, 3])
def test_training_in_numpy_equals_one_rank_alone(ranks: Ranks, tmp_path: Path, size: int) -> None:
    alone = weights(ranks, 1, explicit(1))
    together = weights(ranks, size, explicit(size, NETBOTTLENECK_RENDEZVOUS=str(tmp_path / "meet")))
    assert together == pytest.approx(alone, rel=1e-5, abs=1e-5)
    assert list((tmp_path / "meet").iterdir()) == []


def test_ranks_meet_at_an_address_with_a_secret(ranks: Ranks) -> None:
    address = f"127.0.0.1:{free_port()}"
    env = explicit(2, NETBOTTLENECK_MASTER=address, NETBOTTLENECK_SECRET="0123456789abcdef")
    assert len(weights(ranks, 2, env)) == 5


def test_ranks_meet_at_a_loopback_address_without_a_secret(ranks: Ranks, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    env = explicit(2, NETBOTTLENECK_MASTER=f"127.0.0.1:{free_port()}", XDG_RUNTIME_DIR=str(tmp_path))
    assert len(weights(ranks, 2, env)) == 5


def test_ranks_of_one_host_meet_under_mpirun(ranks: Ranks, tmp_path: Path) -> None:
    def env(rank: int) -> dict[str, str]:
        return {
            **FORGET,
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_NAMESPACE": "31415",
            "XDG_RUNTIME_DIR": str(tmp_path),
        }

    assert len(weights(ranks, 2, env)) == 5


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_on_all_others(ranks: Ranks, tmp_path: Path, victim: int) -> None:
    env = explicit(3, NETBOTTLENECK_RENDEZVOUS=str(tmp_path / "meet"))
    job = ranks.start(3, SCRIPTS / "faults.py", ["killed"], env)
    for rank in range(3):
        job.wait_for_line(rank, "reducing")
    job.kill(victim)
    for result in job.wait(check=False):
        if result.rank != victim:
            assert result.code == 0, result.stderr
            assert f"lost {victim}:" in result.stdout


def test_waiting_for_a_busy_rank_is_logged_and_not_an_error(ranks: Ranks, tmp_path: Path) -> None:
    times = {"NETBOTTLENECK_TIMEOUT_S": "1", "NETBOTTLENECK_STALL_S": "0.5", "BUSY_S": "3"}
    env = explicit(2, NETBOTTLENECK_RENDEZVOUS=str(tmp_path / "meet"), **times)
    results = ranks(2, SCRIPTS / "faults.py", env, args=["busy"])
    assert all("together again" in result.stdout for result in results)
    assert any("late" in result.stderr and "0" in result.stderr for result in results)


def test_disagreeing_ranks_get_both_values(ranks: Ranks, tmp_path: Path) -> None:
    env = explicit(2, NETBOTTLENECK_RENDEZVOUS=str(tmp_path / "meet"))
    results = ranks(
        2,
        SCRIPTS / "faults.py",
        lambda rank: {**env(rank), "NETBOTTLENECK_STREAMS": str(2 + rank)},
        args=["nothing"],
        check=False,
    )
    assert all(result.code not in (0, None) for result in results)
    assert any("streams=2" in result.stderr and "streams=3" in result.stderr for result in results)


def test_a_rank_that_does_not_arrive_is_named(ranks: Ranks, tmp_path: Path) -> None:
    env = explicit(3, NETBOTTLENECK_RENDEZVOUS=str(tmp_path / "meet"), NETBOTTLENECK_START_TIMEOUT_S="1")
    results = ranks(2, SCRIPTS / "faults.py", env, args=["nothing"], check=False)
    assert all(result.code not in (0, None) for result in results)
    assert all(re.search(r"(rank|ranks 1,) 2 did not reach", result.stderr) for result in results)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("NETBOTTLENECK_IFNAME", "nosuch", "nosuch"),
        ("NETBOTTLENECK_TRANSPORT", "quic", "NETBOTTLENECK_TRANSPORT=quic"),
    ],
)
def test_a_wrong_variable_ends_the_job_before_it_begins(
    ranks: Ranks, tmp_path: Path, variable: str, value: str, message: str
) -> None:
    env = explicit(2, NETBOTTLENECK_RENDEZVOUS=str(tmp_path / "meet"))
    results = ranks(
        2, SCRIPTS / "faults.py", lambda rank: {**env(rank), variable: value}, args=["nothing"], check=False
    )
    assert all(result.code not in (0, None) for result in results)
    assert any(message in result.stderr for result in results)


def test_a_port_in_use_is_named(ranks: Ranks) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        env = explicit(
            2,
            NETBOTTLENECK_MASTER=f"127.0.0.1:{port}",
            NETBOTTLENECK_SECRET="0123456789abcdef",
            NETBOTTLENECK_START_TIMEOUT_S="3",
        )
        results = ranks(2, SCRIPTS / "faults.py", env, args=["nothing"], check=False)
    assert all(result.code not in (0, None) for result in results)
    assert str(port) in results[0].stderr


def test_without_the_c_module_one_clear_error() -> None:
    code = (
        "import sys; sys.modules['netbottleneck._core'] = None\n"
        "from netbottleneck.runtime import job\n"
        "try: job.start(environ={})\n"
        "except ImportError as error: sys.exit('_core is not built' not in str(error))\n"
        "sys.exit(2)"
    )
    import subprocess

    subprocess.run([sys.executable, "-c", code], check=True, timeout=RANKS_LIMIT_S)
