"""Runs clang-tidy over csrc, in parallel, and only over files whose preprocessed text has changed."""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cbuild

CONFIG = cbuild.ROOT / ".clang-tidy"
DONE = cbuild.ROOT / "build" / "lint" / "tidy"
LIMIT_S = 120


def tool() -> str:
    """Return clang-tidy next to this interpreter, else the one on the path."""
    beside = Path(sys.executable).parent / "clang-tidy"
    found = str(beside) if beside.is_file() else shutil.which("clang-tidy")
    if found is None:
        raise SystemExit("clang-tidy is missing: tools/setup_env.sh dev")
    return found


def flags() -> list[str]:
    """Return the compiler flags of csrc, with Python's headers as system headers."""
    python = [f"-isystem{sysconfig.get_path('include')}", f"-DPy_LIMITED_API={cbuild.LIMITED_API}"]
    return [*cbuild.base_flags(), *python]


def digest(source: Path) -> str | None:
    """Return a hash of a file's preprocessed text and settings, or None if preprocessing fails."""
    seen = subprocess.run(["gcc", "-E", *flags(), str(source)], capture_output=True, check=False)
    if seen.returncode != 0:
        return None
    whole = hashlib.sha256(seen.stdout)
    for part in (source.read_bytes(), CONFIG.read_bytes()):
        whole.update(part)
    return whole.hexdigest()


def check(source: Path, fix: bool) -> str:
    """Return clang-tidy's findings in a file; "" if there are none."""
    seen = digest(source)
    stamp = DONE / f"{source.relative_to(cbuild.CSRC).as_posix().replace('/', '.')}.ok"
    if seen is not None and stamp.is_file() and stamp.read_text(encoding="ascii") == seen:
        return ""
    argv = [tool(), "--quiet", *(["--fix"] if fix else []), str(source), "--", *flags()]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{source}: clang-tidy did not finish within {LIMIT_S} s\n"
    if done.returncode != 0:
        return done.stdout or done.stderr or f"{source}: clang-tidy ended with {done.returncode}\n"
    if seen is not None and not fix:
        DONE.mkdir(parents=True, exist_ok=True)
        stamp.write_text(seen, encoding="ascii")
    return ""


def main() -> int:
    """Check every C file of csrc. Returns 1 if one has findings, or if there is none."""
    parser = argparse.ArgumentParser(description="clang-tidy over csrc.")
    parser.add_argument("--fix", action="store_true", help="apply clang-tidy's fixes, one file after another")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    sources = [path.resolve() for path in options.files] or sorted(cbuild.CSRC.glob("**/*.c"))
    with ThreadPoolExecutor(1 if options.fix else options.jobs) as pool:
        findings = [text for text in pool.map(lambda source: check(source, options.fix), sources) if text]
    sys.stdout.write("".join(findings))
    print(f"clang-tidy: {len(sources)} files, {len(findings)} with findings")
    return 1 if findings or not sources else 0


if __name__ == "__main__":
    sys.exit(main())
