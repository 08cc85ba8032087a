"""Cells of the faults matrix (tests/faults), checked by outcome only; `make faults` runs all and checks times."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

FAULTS = Path(__file__).resolve().parents[1] / "faults"
sys.path.insert(0, str(FAULTS))

from matrix.cell import Cell  # noqa: E402 - found by the path above
from matrix.place import Machine  # noqa: E402
from matrix.rows import ROWS  # noqa: E402

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
