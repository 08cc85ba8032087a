"""Horovod's variables under other launchers: scripts can read them, and jobs ignore the exported ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from netbottleneck.config import settings
from netbottleneck.launch.connect import Place, detect, export_place
from netbottleneck.launch.topology import EXPORTED
from test_launch import HOROVOD, HYDRA, MPIRUN, SRUN, TORCHRUN, place
from test_launchers import C10D, needs_torch, open_mpi, script, started

BOTH = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4"}


def handed(environ: dict[str, str]) -> dict[str, str]:
    """Return the environment of a script with an exported place."""
    given = dict(environ)
    export_place(settings(environ=given), given)
    return given


def horovods(environ: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith("HOROVOD_")}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, HOROVOD),
        ({"RANK": "3", "WORLD_SIZE": "4"}, BOTH),
        (MPIRUN, {**BOTH, "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}),
        (
            {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            {**HOROVOD, "HOROVOD_LOCAL_RANK": "3", "HOROVOD_LOCAL_SIZE": "4"}
            | {"HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1"},
        ),
        (HYDRA, {**BOTH, "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}),
        (SRUN, {name: value for name, value in HOROVOD.items() if name != "HOROVOD_LOCAL_SIZE"}),
        (  # the other host has fewer ranks
            {**TORCHRUN, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"},
            {**BOTH, "HOROVOD_LOCAL_RANK": "2", "HOROVOD_LOCAL_SIZE": "3"},
        ),
        ({**SRUN, "SLURM_NNODES": "3"}, {**BOTH, "HOROVOD_LOCAL_RANK": "1"}),
        ({"NETBOTTLENECK_RANK": "3", "NETBOTTLENECK_SIZE": "4"}, BOTH),
        ({**TORCHRUN, "NETBOTTLENECK_HOST_ID": "one"}, BOTH),  # the hosts of all ranks say the rest
        (HOROVOD, HOROVOD),
        ({}, {}),
        ({"HOROVOD_FUSION_THRESHOLD": "0"}, {"HOROVOD_FUSION_THRESHOLD": "0"}),
    ],
)
def test_a_script_finds_horovodruns_variables_as_far_as_they_are_known(
    environ: dict[str, str], expected: dict[str, str]
) -> None:
    assert horovods(handed(environ)) == expected


@pytest.mark.parametrize("environ", [TORCHRUN, MPIRUN, HYDRA, SRUN, HOROVOD, {**SRUN, **MPIRUN}, {}])
def test_exported_variables_do_not_affect_the_job_and_are_exported_again(environ: dict[str, str]) -> None:
    given = handed(environ)
    assert place(given) == place(environ)
    assert handed(given) == given


def test_ranks_that_a_script_starts_form_their_own_job() -> None:
    inner = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    started_inside = {**handed({"RANK": "0", "WORLD_SIZE": "1"}), **inner}
    assert place(started_inside) == place(inner)
    assert horovods(handed(started_inside)) == {
        "HOROVOD_RANK": "5",
        "HOROVOD_SIZE": "8",
        "HOROVOD_LOCAL_RANK": "1",
    }


@pytest.mark.parametrize("rank", ["0", "1"])
def test_horovodrun_inside_such_a_script_takes_precedence(rank: str) -> None:
    outer = handed({"RANK": "0", "WORLD_SIZE": "2"})
    inner = {"HOROVOD_RANK": rank, "HOROVOD_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}
    given = {name: value for name, value in outer.items() if name not in ("RANK", "WORLD_SIZE")} | inner
    assert place(given) == Place(int(rank), 2, launcher="horovodrun")
    assert EXPORTED in given


def test_disagreeing_launchers_are_still_reported() -> None:
    with pytest.raises(ValueError, match="disagree"):
        handed({**SRUN, "RANK": "0", "WORLD_SIZE": "1"})
    with pytest.raises(ValueError, match="disagree"):
        place({**handed(TORCHRUN), "HOROVOD_RANK": "2"})
    with pytest.raises(ValueError, match="HOROVOD_RANK"):
        detect(settings(environ={}), {"HOROVOD_SIZE": "2"})


READS = """
import os, subprocess, sys
named = {name: int(os.environ["HOROVOD_" + name]) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
named |= {name: int(os.environ["HOROVOD_" + name]) for name in ("CROSS_RANK", "CROSS_SIZE")}
import torch
import horovod.torch as hvd

for _ in range(2):
    hvd.init()
    assert named == {name: getattr(hvd, name.lower())() for name in named}
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [named["SIZE"]] * 2
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and named["RANK"] == 1:
        os._exit(3)
    hvd.shutdown()
code = "from netbottleneck.config import settings; from netbottleneck.launch.connect import detect; "
code += "print(detect(settings()))"
child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
os.write(1, f"child: {child.stdout}".encode())
"""


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("mpirun", marks=pytest.mark.peers)])
def test_a_script_that_reads_them_runs_repeatedly_under_other_launchers(launcher: str, tmp_path: Path) -> None:
    needs_torch()
    ours = ["-m", "netbottleneck", "run", script(tmp_path, READS)]
    if launcher == "torchrun":
        agent = ["--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1", *C10D]
        command = [sys.executable, "-m", "torch.distributed.run", *agent, "--no-python", sys.executable, *ours]
    else:
        command = [*open_mpi(), *ours]
    code, output = started(command, tmp_path)
    assert code == 0, output
    for rank in range(2):
        assert f"child: Place(rank={rank}, size=2, local_rank={rank}, local_size=2" in output
    assert output.count(f"launcher='{launcher}'") == 2
