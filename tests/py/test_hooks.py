"""Loops of a user's own under netbottleneck.profile: the checks in scripts/e2e_loops.py, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Ranks

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "scripts" / "e2e_loops.py"
ENV = {"NETBOTTLENECK_TIMEOUT_S": "10", "NETBOTTLENECK_BLOCK_STEPS": "1", "NETBOTTLENECK_START_STEP": "0"}


def checks() -> list[str]:
    return re.findall(r"^@check\ndef (\w+)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)


ALL = [name for name in checks() if name != "arms_take_turns"]


def run(ranks: Ranks, names: list[str], transport: str) -> None:
    env = {**ENV, "E2E_TRANSPORT": transport}
    for result in ranks(2, SCRIPT, env, args=names):
        said = [line for line in result.stdout.splitlines() if line.startswith(("ok ", "failed "))]
        assert said == [f"ok {name}" for name in names], result.stderr


@pytest.mark.parametrize("names", [ALL[start::5] for start in range(5)], ids=list("abcde"))
def test_loops_train_as_they_do_without_us(ranks: Ranks, names: list[str]) -> None:
    run(ranks, names, "tcp")


@pytest.mark.parametrize("transport", ["stock", "ofi"])
def test_other_transports_train_alike(ranks: Ranks, transport: str) -> None:
    names = ["a_rank_skips_a_parameter", "a_parameter_lies_channels_last", "gradients_are_replaced"]
    run(ranks, names, transport)


def test_arms_that_take_turns_train_alike(ranks: Ranks) -> None:
    run(ranks, ["arms_take_turns"], "stock,tcp")
