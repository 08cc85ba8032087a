"""libfabric 2.x: the same binary runs over it, and a job whose ranks have two of them is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import RANKS_LIMIT_S

from netbottleneck import _core

SCRIPT = Path(__file__).parent / "scripts" / "e2e_faults.py"
QUICK = {"NETBOTTLENECK_TIMEOUT_S": "60", "NETBOTTLENECK_START_TIMEOUT_S": "60", "NETBOTTLENECK_TRANSPORT": "ofi"}
MEANS = """
import os
import numpy as np
import netbottleneck as nb
from netbottleneck.runtime import job
nb.init()
for count in (1, 1000, 1 << 20):
    data = np.arange(count, dtype=np.float64) % 1000 * (nb.rank() + 1)
    nb.allreduce_(data, name=f"mean.{count}")
    assert (data == np.arange(count) % 1000 * 2).all()
if "NETBOTTLENECK_PROVIDER" in os.environ:
    print(job.current().comm.info()["provider"])
print("right")
"""


@pytest.fixture(scope="module")
def newer() -> str:
    """Path of the libfabric that the mpich wheel carries."""
    path = Path(sys.prefix, "lib", "mpich", "libfabric.so.1")
    if not path.exists():
        pytest.skip("mpich is not installed")
    return str(path)


def version(path: str | None) -> str:
    """Return a libfabric's version, read in a process that has loaded no other."""
    code = f"from netbottleneck import _core; print(_core.libfabric({path!r})[1])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=RANKS_LIMIT_S, check=False
    )
    if found.returncode != 0:
        pytest.skip(f"there is no other libfabric: {found.stderr.strip().splitlines()[-1]}")
    return found.stdout.strip()


def test_a_wheels_libfabric_is_found_by_its_path(newer: str) -> None:
    path, found = _core.libfabric(newer)
    assert Path(path).resolve() == Path(newer).resolve()
    assert int(found.split(".")[0]) >= 2


def test_means_are_right_over_libfabric_2(plain_ranks: Any, newer: str) -> None:
    for result in plain_ranks(3, MEANS, {**QUICK, "NETBOTTLENECK_LIBFABRIC": newer, "NETBOTTLENECK_STREAMS": "4"}):
        assert result.stdout == "right\n"


@pytest.mark.parametrize("provider", ["tcp;ofi_rxm", "shm"])
@pytest.mark.parametrize("which", ["system", "wheel"])
def test_means_are_right_over_a_provider_that_was_named(
    plain_ranks: Any, newer: str, provider: str, which: str
) -> None:
    path = newer if which == "wheel" else None
    used = f"{provider}/{version(path)}"
    env = {**QUICK, "NETBOTTLENECK_PROVIDER": provider, "NETBOTTLENECK_STREAMS": "2"}
    for result in plain_ranks(3, MEANS, env | ({"NETBOTTLENECK_LIBFABRIC": path} if path else {})):
        assert result.stdout == f"{used}\nright\n"


def test_the_benchmark_runs_over_libfabric_2(plain_ranks: Any, newer: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    arguments = ["bench", "--sizes", "64K,1M", "--transports", "ofi", "--streams", "2", "--iters", "2"]
    env = {"NETBOTTLENECK_IFNAME": "lo", "NETBOTTLENECK_LIBFABRIC": newer}
    plain_ranks(2, "netbottleneck", env, args=[*arguments, "--json", str(rows)])
    found = json.loads(rows.read_text())["rows"]
    assert [row["bytes"] for row in found] == [64000, 1000000]
    assert all(row["transport"] == "ofi" and row["wrong"] == 0 for row in found)


def test_a_mixed_job_is_refused_with_both_versions(plain_ranks: Any, newer: str) -> None:
    older = version(None)
    if older == version(newer):
        pytest.skip("there is no other libfabric: the system's has the same version")
    env = [{**QUICK}, {**QUICK, "NETBOTTLENECK_LIBFABRIC": newer}]
    results = plain_ranks(2, SCRIPT, lambda rank: env[rank], args=["nothing"], check=False)
    for result in results:
        assert result.code == 1, result.stdout
        output = result.stderr.strip().splitlines()[-1]
        assert f"/{older}" in output
        assert f"/{version(newer)}" in output


HANDLERS = """
import os, signal, sys, time
from netbottleneck import _core

try:
    _core.providers()
except OSError as error:
    sys.exit(f"SKIP {error}")
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
except KeyboardInterrupt:
    print("interrupted", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_libfabric_replaces_no_signal_handler() -> None:
    done = subprocess.run([sys.executable, "-c", HANDLERS], capture_output=True, text=True, timeout=60, check=False)
    if done.stderr.startswith("SKIP"):
        pytest.skip(done.stderr.strip().removeprefix("SKIP "))
    assert done.stdout == "interrupted\n"
    assert done.returncode == -signal.SIGTERM
