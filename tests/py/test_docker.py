"""The Dockerfiles and the compose file, as far as they can be checked without a Docker engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
PLACE = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "rank0", "MASTER_PORT": "29500"}


def run(*argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script of docker/ or a tool, with these variables of the job and no others."""
    env = {name: value for name, value in os.environ.items() if name not in PLACE} | variables
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=env)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """Return the compose file, its anchors resolved."""
    found: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    done = run(str(Path(sys.executable).parent / "hadolint"), str(path))
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_a_dockerfile_copies_and_runs_exists(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    named = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    named += [line.split()[1] for line in lines if line.startswith("RUN")]
    assert [name for name in named if not (ROOT / name).exists()] == []
    runs = [ROOT / line.split()[1] for line in lines if line.startswith("RUN")]
    assert all(os.access(script, os.X_OK) for script in runs)
    assert path.with_name(f"{path.name}.dockerignore").is_file()


def test_the_base_image_is_the_one_the_page_names() -> None:
    lines = (DOCKER / "cuda.Dockerfile").read_text(encoding="utf-8").splitlines()
    base = next(line for line in lines if line.startswith("FROM"))
    assert re.fullmatch(r"FROM nvidia/cuda:13\.0\.\d+-devel-ubuntu24\.04", base)


def test_four_ranks_find_each_other(compose: dict[str, Any]) -> None:
    services = compose["services"]
    places = [service["environment"] for service in services.values()]
    assert [place["RANK"] for place in places] == [str(rank) for rank in range(4)]
    assert {place["WORLD_SIZE"] for place in places} == {str(len(services))}
    assert {place["MASTER_ADDR"] for place in places} <= set(services)
    for service in services.values():
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert os.access(ROOT / service["command"][0], os.X_OK)
        assert service["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


def test_a_rank_is_a_host_of_its_own_to_nccl() -> None:
    done = run(str(DOCKER / "cuda_rank.sh"), "--print", **PLACE)
    assert done.stdout.split() == [
        *("RANK=2", "WORLD_SIZE=4", "NCCL_HOSTID=rank2", ".venv/bin/python"),
        "benchmarks/examples/cuda_ddp.py",
    ]
    assert (ROOT / done.stdout.split()[-1]).is_file()


@pytest.mark.parametrize("missing", sorted(PLACE))
def test_a_rank_without_its_place_says_what_is_missing(missing: str) -> None:
    done = run(str(DOCKER / "cuda_rank.sh"), "--print", **{n: v for n, v in PLACE.items() if n != missing})
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{missing} is not set" in done.stderr


def test_the_set_up_replaces_torch_for_cpus_by_the_same_version() -> None:
    done = run(str(DOCKER / "cuda_setup.sh"), "--print")
    assert done.returncode == 0, done.stderr
    steps = done.stdout.splitlines()
    assert steps.index("tools/setup_env.sh run") < steps.index(".venv/bin/pip uninstall -y torch")
    assert re.search(r"pip install --no-cache-dir torch==(\d+\.\d+|VERSION)", done.stdout)
