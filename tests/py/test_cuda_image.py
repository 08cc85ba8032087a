"""Device code in the build: nvcc runs where its source has changed, and a build goes on where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import cbuild

# Writes a file where -o says, its dependencies where -MF says, and a line for each run.
COMPILER = """#!/bin/sh
if [ "$1" = --list-gpu-code ]; then
    echo sm_80
    echo sm_90
    exit
fi
echo "$@" >>"{runs}"
while [ $# -gt 1 ]; do
    [ "$1" != -o ] || printf GPU >"$2"
    [ "$1" != -MF ] || printf '%s : %s\\n' "kernels.fatbin" "{source}" >"$2"
    shift
done
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a compiler in nvcc's place; return the file with a line for each of its runs."""
    runs, compiler, source = tmp_path / "runs", tmp_path / "nvcc", tmp_path / "source"
    runs.touch()
    source.touch()
    compiler.write_text(COMPILER.format(runs=runs, source=source))
    compiler.chmod(0o755)
    monkeypatch.setenv("NVCC", str(compiler))
    return runs


def test_nvcc_runs_once_until_its_source_changes(tmp_path: Path, runs: Path) -> None:
    made = cbuild.cuda_image(tmp_path / "image")
    assert "nb_cuda_image_bytes = 3;" in made.read_text()
    assert "71,80,85" in made.read_text()
    when = made.stat().st_mtime_ns
    assert cbuild.cuda_image(tmp_path / "image").stat().st_mtime_ns == when
    assert len(runs.read_text().splitlines()) == 1
    later = (tmp_path / "image" / "kernels.fatbin").stat().st_mtime_ns + 10**9
    os.utime(tmp_path / "source", ns=(later, later))
    cbuild.cuda_image(tmp_path / "image")
    assert len(runs.read_text().splitlines()) == 2


def test_only_gpus_that_nvcc_knows_get_code(tmp_path: Path, runs: Path) -> None:
    cbuild.cuda_image(tmp_path / "image")
    flags = [word for word in runs.read_text().split() if word.startswith("-gencode=")]
    assert flags == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_80,code=compute_80",
    ]


def test_a_build_without_nvcc_has_an_empty_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC", "")
    assert "nb_cuda_image_bytes = 0;" in cbuild.cuda_image(tmp_path / "image").read_text()


def test_an_nvcc_that_fails_stops_our_own_builds_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC", "false")
    monkeypatch.delenv("NETBOTTLENECK_WERROR", raising=False)
    assert "nb_cuda_image_bytes = 0;" in cbuild.cuda_image(tmp_path / "image").read_text()
    monkeypatch.setenv("NETBOTTLENECK_WERROR", "1")
    with pytest.raises(RuntimeError, match=r"kernels\.fatbin"):
        cbuild.cuda_image(tmp_path / "image")
