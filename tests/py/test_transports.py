"""Transports: the package's list and the core's table name the same networks, and a new row is enough."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Ranks

from netbottleneck import _core, config
from netbottleneck.runtime.nccl import refusal
from netbottleneck.trace.transports import ALL, NATIVE, OVER_NCCL, STUDIED, Arm

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "netbottleneck"
ROW = '    Transport("new", native=True, benched=True, colour="#123456"),\n'

# Runs with a list that has one row more.
USES = """
from netbottleneck.bench.values import Request
from netbottleneck.config import settings
from netbottleneck.report import plots
from netbottleneck.trace.transports import Arm

chosen = settings({}, {"NETBOTTLENECK_TRANSPORT": "stock,new"})
assert chosen.transports == ("stock", "new"), chosen.transports
assert chosen.transports[1].native and chosen.transports[1].real and not chosen.transports[1].own_path
assert "new" in Request().transports and Request(("new",)).transports == ("new",)
assert plots.TRANSPORT_COLOURS["new"] == "#123456"
assert Arm.parse("new").native
"""


def test_the_native_rows_are_the_cores_table_in_its_order() -> None:
    assert list(NATIVE) == _core.transports()
    assert len({row.name for row in ALL}) == len(ALL)


def test_a_new_row_is_enough_for_the_environment_the_bench_and_the_reports(tmp_path: Path) -> None:
    copy = tmp_path / "netbottleneck"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    source = copy / "trace" / "transports.py"
    before, end, after = source.read_text(encoding="utf-8").partition('    Transport("null"')
    source.write_text(before + ROW + end + after, encoding="utf-8")
    environ = {key: value for key, value in os.environ.items() if not key.startswith("NETBOTTLENECK_")}
    done = subprocess.run(
        [sys.executable, "-c", USES],
        env={**environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_list_needs_neither_the_extension_nor_torch() -> None:
    """Analysis of a saved trace imports the list on a machine that has neither."""
    code = (
        "import sys; sys.modules['netbottleneck._core'] = sys.modules['torch'] = None; "
        "from netbottleneck.trace.transports import NATIVE; print(*NATIVE)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == list(NATIVE), done.stderr


def test_arms_over_nccl_are_named_in_settings_and_not_in_studies() -> None:
    chosen = config.settings({}, {"NETBOTTLENECK_TRANSPORT": "stock,nccl+tcp,nccl+ofi,tcp"})
    assert chosen.transports == ("stock", "nccl+tcp", "nccl+ofi", "tcp")
    assert not chosen.observes
    kinds = [(arm.native, arm.over_nccl, arm.own_path, arm.real) for arm in map(Arm.parse, OVER_NCCL)]
    assert kinds == [(False, True, False, True)] * 2
    assert not set(STUDIED) & set(OVER_NCCL)


OBSERVED = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import netbottleneck
from netbottleneck.hooks import ddp

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(3, 2))  # measured from here on, if that is possible
assert ddp.measured_by(model) is None
assert ddp.attach(model) is None
model(torch.full((1, 3), dist.get_rank() + 1.0)).sum().backward()
assert model.module.weight.grad.tolist() == [[1.5] * 3] * 2, model.module.weight.grad
os.environ["NETBOTTLENECK_STRICT"] = "1"
try:
    ddp.attach(model)
except ValueError as error:
    print("strict:", error, flush=True)
dist.destroy_process_group()
"""

OWN_CALL = """
import torch
import netbottleneck

model = torch.nn.Linear(3, 2)
try:
    with netbottleneck.profile(model, torch.optim.SGD(model.parameters(), lr=1.0)):
        raise AssertionError("it was measured")
except ValueError as error:
    print("own call:", error, flush=True)
"""


def _reason() -> str:
    torch = pytest.importorskip("torch")
    why = refusal(["nccl+ofi"], config.settings({}, {}))
    none = f"nccl+ofi: torch {torch.__version__} has no NCCL: use tcp or ofi"
    assert why == none or torch.distributed.is_nccl_available()
    return why


def test_a_training_over_nccl_runs_untouched_with_one_warning_or_raises_if_strict(warm_ranks: Ranks) -> None:
    why = _reason()
    for result in warm_ranks(2, OBSERVED, {"NETBOTTLENECK_TRANSPORT": "stock,nccl+ofi"}):
        assert result.stderr.count(f"the DDP model of Linear is left alone: {why}") == 1
        assert f"strict: {why}" in result.stdout


def test_our_own_calls_raise_the_reason_on_every_rank(warm_ranks: Ranks) -> None:
    for result in warm_ranks(2, OWN_CALL, {"NETBOTTLENECK_TRANSPORT": "nccl+ofi,tcp"}):
        assert f"own call: {_reason()}" in result.stdout
