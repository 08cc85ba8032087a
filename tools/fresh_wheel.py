"""Prints the newest wheel in dist/ that was built from these sources; where there is none, says why and exits with 1.

A wheel is refused if it is of another version or machine, older than a source file, or has another file of the package
that is not built.
"""

from __future__ import annotations

import platform
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import cbuild

BUILD_FILES = ("setup.py", "pyproject.toml", "tools/cbuild.py")
MADE = {".new", ".pyc", ".so"}


def sources(root: Path) -> Iterator[Path]:
    """Yield the files that a wheel is built from."""
    yield from (root / name for name in BUILD_FILES)
    for folder in ("csrc", "python/netbottleneck"):
        yield from (path for path in (root / folder).rglob("*") if path.is_file() and path.suffix not in MADE)


def refusal(wheel: Path, root: Path) -> str:
    """Return why a wheel does not have the sources below root, or ""."""
    if not wheel.name.startswith(f"netbottleneck-{cbuild.version()}-"):
        return f"is not of version {cbuild.version()}"
    if not wheel.name.endswith(f"_{platform.machine()}.whl"):
        return f"is not for {platform.machine()}"
    newest = max(sources(root), key=lambda path: path.stat().st_mtime)
    if newest.stat().st_mtime > wheel.stat().st_mtime:
        return f"is older than {newest.relative_to(root)}"
    python = root / "python"
    ours = {path.relative_to(python).as_posix(): path for path in sources(root) if path.is_relative_to(python)}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith(".so")}
        changed = names ^ ours.keys() or {name for name in names if archive.read(name) != ours[name].read_bytes()}
    return f"has another {min(changed)}" if changed else ""


def main() -> int:
    """Print the wheel, and return the exit code."""
    wheels = sorted((cbuild.ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime, reverse=True)
    for wheel in wheels:
        why = refusal(wheel, cbuild.ROOT)
        if not why:
            print(wheel)
            return 0
        print(f"{wheel.name} {why}", file=sys.stderr)
    print("no wheel of these sources is in dist/", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
