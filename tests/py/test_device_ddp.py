"""DDP on a torch device over the fake CUDA driver: weights, and the record, whose times are the device's."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Ranks

pytest.importorskip("torch")

from netbottleneck.report import Run
from netbottleneck.trace.transports import Arm

SCRIPT = Path(__file__).parent / "scripts" / "device_ddp.py"
STEPS = 24


def trained(ranks: Ranks, where: str, env: dict[str, str]) -> str:
    """Return the digest that all ranks print."""
    printed = {result.stdout.splitlines()[0] for result in ranks(2, SCRIPT, env, args=[where, str(STEPS)])}
    assert len(printed) == 1, printed
    return printed.pop()


@pytest.mark.parametrize("transports", ["stock", "stock,tcp", "stock,tcp,ofi"])
def test_weights_are_those_of_the_cpu(
    warm_ranks: Ranks, device: dict[str, str], tmp_path: Path, transports: str
) -> None:
    env = {**device, "FAKE_CUDA_SEED": "1", "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    env |= {"NETBOTTLENECK_TRANSPORT": transports, "NETBOTTLENECK_BLOCK_STEPS": "4", "NETBOTTLENECK_SAMPLE_EVERY": "5"}
    bare = trained(warm_ranks, "cpu", {"NETBOTTLENECK_LOG": "error"})
    assert trained(warm_ranks, "fakecuda", env) == bare
    run = Run(next(tmp_path.glob("run*")))
    assert run.trace.notes == ()
    from netbottleneck.trace.ring_reader import read_ring, EVENTS; N={v:k for k,v in EVENTS.items()}; r=read_ring(next(tmp_path.glob("run*"))/"ranks"/"0.train.ring"); print(r.dropped); [print(N[int(e["kind"])], e) for e in r.events[:120]]
    for step in run.trace.steps[:9]: print(step)
    for c in run.trace.collectives[:12]: print(c)
    run.show()
    assert 0
