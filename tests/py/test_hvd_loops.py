"""Horovod's API in the loops of scripts/training_loops.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Ranks

pytest.importorskip("torch")

SCRIPTS = Path(__file__).parent / "scripts"
ENV = {"NETBOTTLENECK_TIMEOUT_S": "60", "NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_DIR": "run"}
LOOPS = re.findall(
    r"^def (\w+)\(way: Way\) -> int", (SCRIPTS / "training_loops.py").read_text(encoding="utf-8"), re.MULTILINE
)
COMPILED = [name for name in LOOPS if "compiled" in name]
EAGER = [name for name in LOOPS if name not in COMPILED]


@pytest.mark.parametrize("names", [EAGER[::2], EAGER[1::2], COMPILED], ids=["eager-a", "eager-b", "compiled"])
def test_training_loops_end_as_with_plain_ddp(warm_ranks: Ranks, names: list[str]) -> None:
    for result in warm_ranks(2, SCRIPTS / "hvd_loops.py", {**ENV, "LOOPS_TRANSPORT": "tcp"}, args=names):
        said = [line for line in result.stdout.splitlines() if line.startswith(("ok ", "failed "))]
        assert said == [f"ok {name}" for name in names], result.stderr
