"""tools/bare.py: a command that runs without the packages that set-up does not install for tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

BARE = Path(__file__).parents[2] / "tools" / "bare.py"
LOOK = "for name; do command -v $name >/dev/null && echo $name; done; :"


def available(*names: str) -> set[str]:
    """Return which of these commands a command under bare.py finds."""
    command = [str(BARE), "sh", "-c", LOOK, "look", *names]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(names) & set(output.splitlines())


@pytest.mark.peers
@pytest.mark.timeout(120)
def test_peers_are_hidden_and_what_set_up_installs_for_tests_stays() -> None:
    peers, tools = {"mpirun", "mpicc", "iperf3", "clang"}, {"gcc", "make", "ip", "tc", "mount"}
    for name in sorted(peers):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
    if os.geteuid() != 0:
        pytest.skip("hiding packages needs root")
    assert available(*peers, *tools) == tools
    # Outside, nothing has changed.
    assert [name for name in peers | tools if shutil.which(name) is None] == []


def test_without_root_it_fails_with_the_reason() -> None:
    command = [str(BARE), "true"]
    if os.geteuid() == 0:
        command = ["setpriv", "--reuid=65534", "--clear-groups", *command]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "bare: hiding packages needs root\n")
