"""Cells of the faults matrix (tests/faults), checked by outcome only; `make faults` runs all and checks times."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from conftest import RANKS_LIMIT_S

FAULTS = Path(__file__).resolve().parents[1] / "faults"
sys.path.insert(0, str(FAULTS))

from matrix.cell import Cell, Outcome  # noqa: E402 - found by the path above
from matrix.place import Machine  # noqa: E402
from matrix.rows import ROWS  # noqa: E402
from matrix.table import judged  # noqa: E402

BY_NAME = {row.name: row for row in ROWS}
# Links that go down are test_links.py's.
CELLS = [
    ("kill", "tcp", 4),
    ("kill", "ofi", 2),
    ("kill-0", "ofi", 4),
    ("kill-forked", "tcp", 2),
    ("kill-forked", "ofi", 4),
    ("kill-forked", "shm", 2),
    ("forked", "shm", 4),
    ("stop", "tcp", 2),
    ("stop", "shm", 2),
    ("stop-0", "ofi", 4),
    ("stop-continue", "tcp", 4),
    ("stop-continue", "ofi", 2),
    ("stop-continue", "shm", 4),
    ("reset-lane", "tcp", 4),
    ("reset-all", "ofi", 2),
    ("blackhole", "tcp", 2),
    ("outsiders", "tcp", 4),
    ("outsiders", "ofi", 2),
    ("outsider-ofi", "ofi", 2),
    ("strangers-silent", "tcp", 2),
    ("secret-wrong", "tcp", 2),
    ("secret-wrong", "shm", 4),
    ("secret-replayed", "ofi", 4),
    ("descriptors", "shm", 2),
    ("disk-full", "tcp", 2),
    ("clock-set", "ofi", 2),
]


@pytest.fixture(scope="module")
def machine() -> Generator[Machine, None, None]:
    with Machine(FAULTS.parents[1] / "build" / "faults" / f"test-{os.getpid()}") as made:
        yield made


def test_every_row_except_those_of_links_is_tested() -> None:
    left_out = set(BY_NAME) - {name for name, *_ in CELLS}
    assert left_out == {"link-3s", "link-down", "interface-down"}


@pytest.mark.parametrize(("name", "network", "size"), CELLS, ids=str)
def test_a_fault_has_its_outcome_and_leaves_nothing(machine: Machine, name: str, network: str, size: int) -> None:
    outcome = Cell(machine, BY_NAME[name], network, size, timed=False).outcome()
    if outcome.verdict == "not applicable":
        pytest.skip(outcome.details)
    assert outcome.verdict == "passed", (outcome.details, outcome.left)


@pytest.mark.parametrize(
    ("network", "may_lose", "held", "lost"),
    [
        (
            "ofi",
            3,
            ["rank 0: 2 × descriptor socket established", "rank 0: 1 × descriptor socket closed by its peer"],
            3,
        ),
        ("ofi", 3, ["rank 0: 3 × descriptor socket established", "rank 1: 3 × descriptor socket established"], 6),
        ("ofi", 3, ["rank 0: 4 × descriptor socket established"], 0),
        ("ofi", 0, ["rank 0: 1 × descriptor socket established"], 0),
        ("ofi", 3, ["rank 0: 1 × descriptor socket listening", "rank 0: 1 × descriptor socket AF_UNIX"], 0),
        ("tcp", 3, ["rank 0: 1 × descriptor socket established"], 0),
    ],
)
def test_a_rank_may_leave_so_many_connections_of_libfabrics_and_nothing_else(
    machine: Machine, network: str, may_lose: int, held: list[str], lost: int
) -> None:
    class Ended:
        def ended(self, _names: list[str]) -> list[str]:
            return held

    cell = Cell(machine, BY_NAME["kill"], network, 2, may_lose=may_lose)
    cell.ended(Ended(), ["0", "1"])  # type: ignore[arg-type]
    assert cell.lost == lost
    assert cell.left == ([] if lost else held)


@pytest.mark.parametrize(
    ("details", "ci", "verdict"),
    [
        ("no port of libfabric is open", "true", "not applicable"),
        ("no network namespaces on this machine: EPERM", "", "not applicable"),
        ("no network namespaces on this machine: EPERM", "true", "failed"),
        ("the moon is full", "", "failed"),
    ],
)
def test_a_cell_is_left_out_for_a_listed_reason_only(
    monkeypatch: pytest.MonkeyPatch, details: str, ci: str, verdict: str
) -> None:
    monkeypatch.setenv("CI", ci)
    assert judged(Outcome("blackhole", "tcp", 2, "not applicable", details)).verdict == verdict


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--networks", ","], "--networks: name at least one"),
        (["--only", "outsider-ofi", "--networks", "tcp"], "0 passed, 0 failed"),
    ],
)
def test_a_run_in_which_no_cell_passes_fails(arguments: list[str], said: str) -> None:
    argv = [sys.executable, FAULTS / "run.py", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=RANKS_LIMIT_S, check=False)
    assert said in done.stdout + done.stderr
    assert done.returncode != 0
