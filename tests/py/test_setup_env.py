"""tools/setup_env.sh builds again where something has changed that a build depends on, and only there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RANKS_LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
# In place of .venv's Python: notes what would be installed or built, and runs the rest.
PYTHON = f"""#!/bin/sh
case "$*" in
    "setup.py -q build_ext"*) echo build >>"$CALLS" ;;
    "-m pip install"*" -e .") echo install >>"$CALLS" ;;
    "-m pip install"* | "-c import netbottleneck._core") ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Provide a checkout that is set up, except for what pip and the compiler make."""
    root = tmp_path / "clone"
    for name in ("csrc", "requirements", "tools"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "python/netbottleneck/_version.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "python/netbottleneck/_core.abi3.so").touch()
    python = tmp_path / "python"
    python.write_text(PYTHON, encoding="utf-8")
    python.chmod(0o755)
    (root / ".venv/bin").mkdir(parents=True)
    (root / ".venv/bin/python").symlink_to(python)
    assert calls(root) == ["install"]
    assert calls(root) == []
    return root


def calls(root: Path, **environ: str) -> list[str]:
    """Set a checkout up, and return what was installed or built."""
    log = root / "calls"
    log.write_text("", encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if name != "CC"}
    done = subprocess.run(
        ["bash", "tools/setup_env.sh", "run"],
        cwd=root,
        env={**kept, "APT": "0", "PYTHON": sys.executable, "NVCC": "", "CALLS": str(log), **environ},
        capture_output=True,
        text=True,
        timeout=RANKS_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return log.read_text(encoding="utf-8").split()


def test_a_copy_of_a_checkout_installs_itself(clone: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(clone, copy, symlinks=True)
    assert calls(copy) == ["install"]
    assert calls(copy) == []
    assert calls(clone) == []


def test_the_core_is_built_again_with_another_compiler(clone: Path, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.symlink_to("/bin/true")
    assert calls(clone, NVCC=str(nvcc)) == ["build"]
    assert calls(clone, NVCC=str(nvcc)) == []
    assert calls(clone, NVCC=str(nvcc), CC="cc") == ["build"]
    assert calls(clone, NVCC=str(nvcc), CC="cc") == []
    assert calls(clone) == ["build"]


def test_the_core_is_built_again_from_another_source(clone: Path) -> None:
    with (clone / "csrc/base/clock.c").open("a", encoding="utf-8") as source:
        source.write("// more\n")
    assert calls(clone) == ["build"]
    assert calls(clone) == []
