"""Links that go down, in namespaces: temporarily, permanently, and one of two."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from conftest import RANKS_LIMIT_S

from netbottleneck.lab import Lab, LabError

SCRIPT = Path(__file__).parent / "scripts" / "links.py"
LIMIT_S = RANKS_LIMIT_S
SECOND = "x1"


NETWORKS = ("tcp", "ofi")


class Job:
    """Ranks in a lab, one per host; each host's side of a link can be set down and up. Jobs may share a lab.

    The rounds count from `finish` on: the link is down by then.
    """

    def __init__(self, lab: Lab, folder: Path, rounds: int, env: dict[str, str]) -> None:
        self.lab = lab
        self.folder = folder
        self.folder.mkdir()
        self.counting = folder / "counting"
        secret = secrets.token_hex(16)
        self.processes = []
        for rank in range(lab.size):
            direct = {
                "NETBOTTLENECK_RANK": str(rank),
                "NETBOTTLENECK_SIZE": str(lab.size),
                "NETBOTTLENECK_SECRET": secret,
                "NETBOTTLENECK_STREAMS": "4",
                "NETBOTTLENECK_IFNAME": "=nb0",
                "NETBOTTLENECK_LOG_LEVEL": "info",
            }
            self.processes.append(self._start(rank, rounds, {**direct, **env}))

    def _start(self, rank: int, rounds: int, env: dict[str, str]) -> subprocess.Popen[Any]:
        command = [sys.executable, str(SCRIPT), str(self.counting), str(rounds)]
        with (self.folder / f"{rank}.out").open("wb") as out:
            return self.lab.popen(rank, command, {**os.environ, **env}, stdout=out, stderr=out)

    def output_of(self, rank: int) -> str:
        return (self.folder / f"{rank}.out").read_text(encoding="utf-8", errors="replace")

    def wait_for(self, line: str) -> None:
        until = time.monotonic() + LIMIT_S
        while not all(re.search(f"^{line}$", self.output_of(rank), re.MULTILINE) for rank in range(self.lab.size)):
            assert time.monotonic() < until, self.all_output()
            time.sleep(0.02)

    def all_output(self) -> str:
        return "\n".join(f"--- rank {rank}\n{self.output_of(rank)}" for rank in range(self.lab.size))

    def finish(self) -> None:
        """Have the ranks count their rounds, and wait for their end."""
        self.counting.touch()
        until = time.monotonic() + LIMIT_S
        for process in self.processes:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                pytest.fail(self.all_output(), pytrace=False)


def set_link(lab: Lab, host: int, state: str, name: str = "nb0") -> None:
    """Set a host's side of a link up or down."""
    done = lab.popen(host, ["ip", "link", "set", name, state], stderr=subprocess.PIPE, text=True)
    _, errors = done.communicate(timeout=LIMIT_S)
    assert done.returncode == 0, errors


@pytest.fixture(params=[2])
def lab(request: pytest.FixtureRequest) -> Generator[Lab, None, None]:
    try:
        with Lab(request.param, "200mbit", ways=("root", "user")) as made:
            yield made
    except LabError as error:
        pytest.skip(f"no network namespaces on this machine: {error}")


def started(lab: Lab, folder: Path, rounds: int, timeout_s: int, where: str = "", **more: str) -> list[Job]:
    """Start a job over each network, and wait for its third round. where: the address of rank 0."""
    jobs = []
    for port, name in enumerate(NETWORKS, 29400):
        env = {"NETBOTTLENECK_TRANSPORT": name, "NETBOTTLENECK_TIMEOUT_S": str(timeout_s), **more}
        master = {"NETBOTTLENECK_MASTER": f"{where or lab.address(0)}:{port}"}
        jobs.append(Job(lab, folder / name, rounds, {**env, **master}))
    for job in jobs:
        job.wait_for("round 2")
    return jobs


def test_a_link_that_comes_back_costs_its_downtime(lab: Lab, tmp_path: Path) -> None:
    jobs = started(lab, tmp_path, 12, 15)
    set_link(lab, 0, "down")
    time.sleep(3)  # what is tested: a link that is down for 3 s
    set_link(lab, 0, "up")
    for job in jobs:
        job.finish()
        for rank in range(lab.size):
            assert "right" in job.output_of(rank), job.all_output()


@pytest.mark.parametrize("lab", [pytest.param(2, marks=pytest.mark.full), 3], indirect=True)
def test_a_link_that_stays_down_is_an_error_on_every_rank_that_names_the_peer(lab: Lab, tmp_path: Path) -> None:
    """With three ranks, one loses both others, and the others lose one."""
    cut = lab.size - 1
    jobs = started(lab, tmp_path, 1000, 6)
    set_link(lab, cut, "down")
    for job in jobs:
        job.finish()
        for rank in range(lab.size):
            found = re.search(r"^failed (-?\d+) (\S+) (\S+) (.*)$", job.output_of(rank), re.MULTILINE)
            assert found, job.all_output()
            peer = int(found[1])
            assert peer == cut if rank != cut else peer in range(cut), job.all_output()


def test_with_two_interfaces_one_that_stays_down_costs_its_lanes(lab: Lab, tmp_path: Path) -> None:
    """Hosts detect the interface state, long before the time limit."""
    places, pid = lab._host_namespaces, lab._host_namespaces[1].holder.pid
    assert lab._namespaces is not None
    lab._namespaces.batch("ip", [(places[0], f"link add {SECOND} type veth peer name {SECOND} netns {pid}\n")])
    homes = [f"addr add 10.78.0.{host + 1}/24 dev {SECOND}\nlink set {SECOND} up\n" for host in range(2)]
    lab._namespaces.batch("ip", list(zip(places, homes, strict=True)))
    jobs = started(lab, tmp_path, 30, 8, NETBOTTLENECK_IFNAME=f"=nb0,{SECOND}")
    set_link(lab, 0, "down", SECOND)
    for job in jobs:
        job.finish()
        for rank in range(2):
            assert "right" in job.output_of(rank), job.all_output()
            assert re.search(f"[12] of [34] lanes to rank {1 - rank} lost", job.output_of(rank)), job.all_output()
        assert f"interface {SECOND} is down" in job.all_output(), job.all_output()


def test_hosts_with_ipv6_alone(lab: Lab, tmp_path: Path) -> None:
    assert lab._namespaces is not None
    home = "addr flush dev nb0\naddr add fd77::{}/64 dev nb0 nodad\n"
    lab._namespaces.batch("ip", [(place, home.format(host + 1)) for host, place in enumerate(lab._host_namespaces)])
    for job in started(lab, tmp_path, 3, 8, "[fd77::1]"):
        job.finish()
        for rank in range(2):
            assert "right" in job.output_of(rank), job.all_output()
