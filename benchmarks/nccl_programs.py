"""Compiles the programs and libraries of tests/nccl. They call our plugins as NCCL does, or record its calls."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from netbottleneck.errors import Error

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}")
LIBRARY = ("-shared", "-fPIC")
LIMIT_S = 120


def compiler() -> list[str]:
    """Return the command of the C compiler, $CC or gcc; empty without one."""
    command = shlex.split(os.environ.get("CC", "")) or ["gcc"]
    return command if shutil.which(command[0]) else []


def compiled(source: str, target: Path, *options: str) -> Path:
    """Compile a file of tests/nccl to `target`, and return that. Raises Error with the compiler's message."""
    found = compiler()
    if not found:
        raise Error(0, "no C compiler")
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [*found, *FLAGS, str(ROOT / "tests" / "nccl" / source), "-o", str(target), *options, "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        raise Error(0, f"{found[0]}: {' '.join(done.stderr.split())[:200]}")
    return target
