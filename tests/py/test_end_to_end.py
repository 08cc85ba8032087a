"""Users' scripts with one changed line or none, under every transport."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import RANKS_LIMIT_S, RankResult, Ranks
from warm import WarmPair

pytest.importorskip("torch")

SCRIPTS = Path(__file__).parent / "scripts"
FILES = ("run.json", "env.json", "summary.json", "layers.csv", "collectives.csv", "trace.json.gz", "report.txt")
STEPS = 12  # of the scripts
LINEAR_BYTES = 4 * (20 * 300 + 300 + 300 * 600 + 600 + 600 * 4 + 4)
MEASURED = {"NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_BLOCK_STEPS": "3", "NETBOTTLENECK_TIMEOUT_S": "60"}


def torchrun(ranks: Ranks, script: str, out: Path, env: Mapping[str, str]) -> RankResult:
    """Run a script on two ranks as `torchrun --nproc-per-node 2` does."""
    out.mkdir(exist_ok=True)
    arguments = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    # What a rank's environment would hold is torchrun's to set.
    none = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "")
    whole = {**none, **env, "E2E_OUT": str(out)}
    return ranks(1, "torch.distributed.run", whole, args=[*arguments, str(SCRIPTS / script)])[0]


def directly(ranks: Ranks, script: str, out: Path, env: Mapping[str, str]) -> RankResult:
    """Run a script on two ranks with torchrun's variables, without torchrun; return both outputs."""
    out.mkdir(exist_ok=True)
    both = ranks(2, SCRIPTS / script, {**env, "E2E_OUT": str(out)})
    return RankResult(0, 0, "".join(each.stdout for each in both), "".join(each.stderr for each in both))


def states(out: Path) -> list[bytes]:
    """Return each rank's final parameters and buffers."""
    return [(out / f"{rank}.weights").read_bytes() for rank in range(2)]


def weights(out: Path) -> bytes:
    """Return the final weights, which are equal on both ranks."""
    first, second = states(out)
    assert first == second
    return first


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory, warm: WarmPair) -> bytes:
    """Return the final weights of the untouched DDP script."""
    folder = tmp_path_factory.mktemp("untouched")
    Ranks(folder, warm=warm)(2, SCRIPTS / "e2e_ddp.py", {"E2E_IMPORT": "never", "E2E_OUT": str(folder)})
    return weights(folder)


@pytest.fixture(scope="module")
def untouched_buffers(tmp_path_factory: pytest.TempPathFactory, warm: WarmPair) -> list[bytes]:
    """Return each rank's final parameters and buffers of the untouched script, for a model with buffers."""
    folder = tmp_path_factory.mktemp("untouched")
    env = {"E2E_IMPORT": "never", "E2E_MODEL": "norm", "E2E_OUT": str(folder)}
    Ranks(folder, warm=warm)(2, SCRIPTS / "e2e_ddp.py", env)
    return states(folder)


def record(folder: Path, transports: list[str]) -> list[dict[str, Any]]:
    """Check that a run folder is complete; return each rank's record of its transports."""
    for name in FILES:
        assert (folder / name).stat().st_size > 0, name
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["transports"] == transports
    assert [(rank["finished"], rank["error"], rank["events_dropped"]) for rank in summary["ranks"]] == [
        (True, None, 0)
    ] * 2
    assert json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    assert (folder / "report.txt").read_text().startswith("Of your ")
    for rank in range(2):
        assert gzip.decompress((folder / "ranks" / f"{rank}.jsonl.gz").read_bytes())
    by_transport = [{entry["name"]: entry for entry in rank["transports"]} for rank in summary["ranks"]]
    assert [list(entry) for entry in by_transport] == [transports] * 2
    return by_transport


def moved(folder: Path, transport: str) -> list[dict[str, str]]:
    """Return the gradients' operations of a transport, of all ranks."""
    with (folder / "collectives.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["transport"] == transport and row["kind"] == "allreduce"]


# Before torch is imported, one way of measuring is enough here: what waits for torch is the same for all.
@pytest.mark.parametrize(
    ("transports", "where"),
    [
        *(("stock", "after"), ("tcp", "after"), ("ofi", "after"), ("stock,ofi", "before"), ("stock,ofi", "after")),
        *(pytest.param(name, "before", marks=pytest.mark.full) for name in ("stock", "tcp")),
    ],
)
def test_one_line_measures_a_ddp_script_and_changes_no_weight(
    ranks: Ranks, warm_ranks: Ranks, tmp_path: Path, untouched: bytes, transports: str, where: str
) -> None:
    run = tmp_path / "run"
    env = {
        **MEASURED,
        "E2E_IMPORT": where,
        "NETBOTTLENECK_TRANSPORT": transports,
        "NETBOTTLENECK_STREAMS": "2",
        "NETBOTTLENECK_DIR": str(run),
    }
    start = torchrun if (transports, where) == ("stock,ofi", "before") else directly
    ended = start(warm_ranks if where == "after" else ranks, "e2e_ddp.py", tmp_path / "out", env)
    assert weights(tmp_path / "out") == untouched
    assert "Of your " in ended.stdout
    observed = transports == "stock"  # the untouched script takes turns with it
    names = ["stock", "bare"] if observed else transports.split(",")
    steps = STEPS // len(names)
    for by_transport in record(run, names):
        for name, entry in by_transport.items():
            if name in ("stock", "bare"):
                assert (entry["provider"], entry["bytes_out"]) == ("gloo", None)
            else:
                # 2(n-1)/n of each tensor byte, n = 2; a fixed number of streams is not probed for.
                assert entry["bytes_out"] == entry["bytes_in"] == steps * LINEAR_BYTES
                assert entry["streams_open"] == entry["streams_used"] == 2
                assert entry["provider"] if name == "tcp" else "/" in entry["provider"]
    assert not moved(run, "bare")
    for name in transports.split(","):
        rows = moved(run, name)
        assert sum(int(row["tensor_bytes"]) for row in rows) == 2 * steps * LINEAR_BYTES
        assert {row["first_byte_ns"] != "" for row in rows} == {name != "stock"}
        assert all(row["submit_ns"] and row["start_ns"] and row["done_ns"] for row in rows)


@pytest.mark.parametrize("transports", ["ofi", "tcp"])
def test_streams_auto_sends_the_gradients_and_counts_its_probe_separately(
    plain_ranks: Ranks, tmp_path: Path, transports: str
) -> None:
    script = """
import os
import numpy as np
import netbottleneck as nb
from netbottleneck.runtime import job
this = job.start()
nb.allreduce_(np.ones((1 << 20) - 1, np.float32), name="below 4 MiB")
info = this.comm.info()
assert not info["probe"] and info["streams_used"] == 0, info
before = info["bytes_out"]
big = np.ones(3 << 20, np.float32)
for _ in range(3):
    nb.allreduce_(big)
info = this.comm.info()
assert info["probe"], info
assert info["streams_used"] in [lanes for lanes, _, _ in info["probe"]], info
owed = 3 * big.nbytes  # what the probe moved is not the job's
assert info["bytes_out"] - before == owed, (before, owed, info)
print(info["streams_used"], info["probe"])
job.stop()
"""
    first, second = plain_ranks(2, script, {"NETBOTTLENECK_TRANSPORT": transports})
    assert first.stdout == second.stdout  # agreed


@pytest.mark.parametrize("where", ["before", "after"])
def test_without_a_variable_nothing_changes_and_nothing_is_printed(
    ranks: Ranks, warm_ranks: Ranks, tmp_path: Path, untouched: bytes, where: str
) -> None:
    given = ranks if where == "before" else warm_ranks
    ended = directly(given, "e2e_ddp.py", tmp_path / "out", {"E2E_IMPORT": where})
    assert weights(tmp_path / "out") == untouched
    assert ended.stdout == ""
    assert "bottleneck" not in ended.stderr
    assert [path for path in given.folder.rglob("*") if path.is_dir() and "bottleneck" in path.name] == []


def test_ranks_know_torchs_threads_and_sleep_before_they_end_or_free_a_group(ranks: Ranks) -> None:
    script = """
import sitecustomize
import torch.distributed as dist
assert not sitecustomize.gloo_threads()
dist.init_process_group("gloo")
dist.barrier()
assert sitecustomize.gloo_threads()
sitecustomize.LIMIT_S = 1e9
waited, wait = [], sitecustomize.wait_for_torch
sitecustomize.wait_for_torch = lambda: waited.append(wait())
dist.destroy_process_group()
assert waited == [None]
"""
    ranks(2, script)


@pytest.mark.parametrize(("transport", "where"), [("tcp", "before"), ("stock", "after")])
def test_buffers_follow_rank_0_as_with_plain_ddp(
    warm_ranks: Ranks, tmp_path: Path, untouched_buffers: list[bytes], transport: str, where: str
) -> None:
    env = {**MEASURED, "E2E_MODEL": "norm", "E2E_OUT": str(tmp_path)}
    warm_ranks(2, SCRIPTS / "e2e_ddp.py", {**env, "E2E_IMPORT": where, "NETBOTTLENECK_TRANSPORT": transport})
    assert states(tmp_path) == untouched_buffers


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_optimizer_may_be_made_before_ddp_wraps(
    warm_ranks: Ranks, tmp_path: Path, untouched: bytes, where: str
) -> None:
    run = tmp_path / "run"
    env = {
        **MEASURED,
        "E2E_IMPORT": where,
        "E2E_OPTIMIZER": "first",
        "E2E_OUT": str(tmp_path),
        "NETBOTTLENECK_TRANSPORT": "tcp",
        "NETBOTTLENECK_DIR": str(run),
    }
    warm_ranks(2, SCRIPTS / "e2e_ddp.py", env)
    assert weights(tmp_path) == untouched
    record(run, ["tcp"])


# The alias needs its place in the order of imports, once. A run by torchrun is also that of a DDP script above.
@pytest.mark.parametrize(
    ("how", "transports", "start"),
    [
        ("alias", "stock,tcp", directly),
        ("instead", "tcp", directly),
        pytest.param("alias", "tcp", directly, marks=pytest.mark.full),
        pytest.param("instead", "stock,tcp", torchrun, marks=pytest.mark.full),
    ],
)
def test_a_horovod_script_is_measured_and_trains_as_with_horovod(
    ranks: Ranks, warm_ranks: Ranks, tmp_path: Path, how: str, transports: str, start: Callable[..., RankResult]
) -> None:
    run = tmp_path / "run"
    env = {
        **MEASURED,
        "E2E_IMPORT": how,
        "NETBOTTLENECK_TRANSPORT": transports,
        "NETBOTTLENECK_DIR": str(run),
    }
    whole = how == "alias" or start is torchrun  # else the order of imports is of no matter
    start(ranks if whole else warm_ranks, "e2e_hvd.py", tmp_path, env)
    assert weights(tmp_path) == (tmp_path / "reference").read_bytes()
    for by_transport in record(run, transports.split(",")):
        assert by_transport["tcp"]["bytes_out"] > 0


def test_under_mpiruns_variables_ranks_find_each_other(warm_ranks: Ranks, tmp_path: Path) -> None:
    torchs = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "")

    def env(rank: int) -> dict[str, str]:
        return {
            **torchs,
            "PMIX_NAMESPACE": tmp_path.name,
            "XDG_RUNTIME_DIR": str(tmp_path),
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "E2E_IMPORT": "instead",
            "E2E_OUT": str(tmp_path),
            "NETBOTTLENECK_TRANSPORT": "tcp",
            "NETBOTTLENECK_DIR": str(tmp_path / "run"),
        }

    warm_ranks(2, SCRIPTS / "e2e_hvd.py", env)
    assert weights(tmp_path) == (tmp_path / "reference").read_bytes()


@pytest.mark.peers
def test_mpirun_starts_a_horovod_script(tmp_path: Path) -> None:
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("mpirun is not installed")
    command = [mpirun, "-n", "2", sys.executable, str(SCRIPTS / "e2e_hvd.py")]
    if "Open MPI" in subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=True).stdout:
        command[1:1] = ["--allow-run-as-root", "--oversubscribe"]
    env = {"E2E_IMPORT": "instead", "E2E_OUT": str(tmp_path), "NETBOTTLENECK_TRANSPORT": "tcp"}
    assigned = [f"{name}={value}" for name, value in env.items()]
    subprocess.run(["env", *assigned, *command], cwd=tmp_path, check=True, capture_output=True, timeout=RANKS_LIMIT_S)
    assert weights(tmp_path) == (tmp_path / "reference").read_bytes()
