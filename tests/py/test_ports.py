"""Ports for tests: their ranges, and who has a block."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import ports
import pytest

PORTS = "import ports, sys; print(*(ports.free_port() for _ in range(100)), flush=True); sys.stdin.read()"
CLAIM = "import ports, sys; held = ports.block(); print(held.__enter__()[0], flush=True); sys.stdin.read()"


@pytest.mark.parametrize("outgoing", [32768, 20000, 16384, 10000, 4096])
def test_blocks_and_single_ports_are_apart_and_below_those_of_outgoing_connections(outgoing: int) -> None:
    firsts, singles = ports.below(outgoing)
    assert len(firsts) >= 15
    assert len(singles) >= 500
    assert firsts.step == ports.BLOCK
    assert firsts[0] > 1024
    assert firsts[-1] + ports.BLOCK <= singles[0]
    assert singles[-1] < outgoing


def test_ports_are_found_where_nearly_all_are_for_outgoing_connections() -> None:
    assert ports.below(1024) == ports.below(32768)


def test_a_block_is_its_callers_alone_until_it_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    firsts = ports.here()[0][:2]
    monkeypatch.setattr(ports, "here", lambda: (firsts, range(0)))
    monkeypatch.setattr(ports, "in_use", set)
    with ports.block() as one:
        with ports.block() as other:
            assert {one[0], other[0]} == set(firsts)
            with pytest.raises(OSError, match="no block of 96 ports is free"), ports.block():
                pass
        with ports.block() as again:
            assert again == other


def test_a_block_of_another_process_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"PYTHONPATH": str(Path(ports.__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "-c", CLAIM], env=where, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first = int(process.stdout.readline())
        monkeypatch.setattr(ports, "here", lambda: (range(first, first + 1), range(0)))
        with pytest.raises(OSError, match="no block"), ports.block():
            pass
        process.communicate("")
        with ports.block() as mine:
            assert mine[0] == first


def test_a_block_with_a_port_in_use_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    firsts = ports.here()[0][:2]
    monkeypatch.setattr(ports, "here", lambda: (firsts, range(0)))
    monkeypatch.setattr(ports, "in_use", lambda: {firsts[0] + 5})
    with ports.block() as given:
        assert given[0] == firsts[1]


def test_ports_in_use_are_found_on_a_machine_without_ipv6(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ports, "TABLES", (ports.TABLES[0], tmp_path / "tcp6"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert server.getsockname()[1] in ports.in_use()


def test_processes_get_other_single_ports_as_long_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that nobody binds yet is free for a probe, so only the claim keeps it from the others."""
    where = {"PYTHONPATH": str(Path(ports.__file__).parent)}
    argv = [sys.executable, "-c", PORTS]
    running, given = [], []
    for _ in range(8):
        process = subprocess.Popen(argv, env=where, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        given.append(set(map(int, process.stdout.readline().split())))
    for process in running:
        process.communicate("")
    assert [len(each) for each in given] == [ports.OWN] * 8
    assert len(set.union(*given)) == 8 * ports.OWN
    first = min(given[0])
    ports.own_ports.cache_clear()
    monkeypatch.setattr(ports, "here", lambda: (range(0), range(first, first + ports.OWN)))
    assert ports.free_port() in given[0]
    ports.own_ports.cache_clear()


def test_a_process_whose_ports_are_all_in_use_gets_others() -> None:
    with contextlib.ExitStack() as held:
        for _ in range(ports.OWN + 1):
            held.enter_context(socket.create_server(("127.0.0.1", ports.free_port())))
