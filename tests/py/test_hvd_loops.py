"""Horovod's API in the loops of scripts/training_loops.py."""

from __future__ import annotations

import pytest
from conftest import Ranks

from test_ddp_loops import COMPILED, EAGER, end_alike

pytest.importorskip("torch")


@pytest.mark.parametrize("names", [EAGER[::2], EAGER[1::2], COMPILED], ids=["eager-a", "eager-b", "compiled"])
def test_training_loops_end_as_with_plain_ddp(warm_ranks: Ranks, names: list[str]) -> None:
    end_alike(warm_ranks, "hvd_loops.py", names)
