"""The tools: what they report where a program that they call is missing, was killed, or has several words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cbuild
import check_binary
import tidy


def test_the_compiler_may_have_several_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "ccache gcc")
    assert cbuild.c_compiler() == ["ccache", "gcc"]
    monkeypatch.delenv("CC")
    assert cbuild.c_compiler() == ["gcc"]
    assert cbuild.c_compiler("cc -pthread") == ["cc", "-pthread"]


def test_a_killed_clang_tidy_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    killed = tmp_path / "clang-tidy"
    killed.write_text("#!/bin/sh\nkill -9 $$\n", encoding="utf-8")
    killed.chmod(0o755)
    monkeypatch.setattr(tidy, "tool", lambda: str(killed))
    monkeypatch.setattr(tidy, "DONE", tmp_path)
    source = cbuild.CSRC / "base" / "clock.c"
    assert tidy.check(source, fix=False) == f"{source}: clang-tidy ended with -9\n"
    assert list(tmp_path.glob("*.ok")) == []


def test_clang_tidy_of_no_file_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cbuild, "CSRC", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tidy.py"])
    assert tidy.main() == 1


@pytest.mark.parametrize("ci", ["", "true"])
def test_abi3audit_may_be_missing_outside_of_ci_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ci: str) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert check_binary.abi_finding() == ("abi3audit is not installed" if ci else None)


def test_gpu_check_runs_a_python_whose_path_has_a_space(tmp_path: Path) -> None:
    python = tmp_path / "a python"
    python.write_text(f'#!/bin/sh\necho "$1" >>"{tmp_path}/calls"\nexit 3\n', encoding="utf-8")
    python.chmod(0o755)
    subprocess.run(
        ["bash", cbuild.ROOT / "tools" / "gpu_check.sh", "--help"],
        env={"PYTHON": str(python), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=False,
        timeout=100,
    )
    assert (tmp_path / "calls").read_text(encoding="utf-8").splitlines()[0] == "-c"
