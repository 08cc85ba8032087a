"""SyncBatchNorm: the checks in scripts/ on one, two and three ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Ranks, checks

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "scripts" / "sync_batch_norm_checks.py"
CHECKS = checks(SCRIPT)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_together_are_one_process(warm_ranks: Ranks, size: int) -> None:
    for result in warm_ranks(size, SCRIPT, args=CHECKS):
        assert result.stdout.splitlines() == [f"ok {name}" for name in CHECKS]
