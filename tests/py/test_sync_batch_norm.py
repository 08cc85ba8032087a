"""SyncBatchNorm: the checks in scripts/ on one, two and three ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Ranks

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "scripts" / "sync_batch_norm_checks.py"
CHECKS = re.findall(r"^@check\ndef (\w+)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)


# In parts, each short enough for one test.
@pytest.mark.parametrize("names", [CHECKS[start::3] for start in range(3)], ids=["a", "b", "c"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_together_are_one_process(ranks: Ranks, size: int, names: list[str]) -> None:
    for result in ranks(size, SCRIPT, args=names):
        assert result.stdout.splitlines() == [f"ok {name}" for name in names]
