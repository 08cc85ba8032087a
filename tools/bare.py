#!/usr/bin/env python3
"""Runs a command as on a fresh machine: hides Debian packages that set-up does not install.

usage: bare.py COMMAND…    as root; the command runs in a mount namespace, and nothing changes outside it

What stays: the packages that Debian calls required, apt, those that tools/setup_env.sh installs at level dev, and what
these depend on. Files of all other packages are not there. Files that belong to no package stay.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYER = ROOT / "build" / "bare"
CLONE_NEWNS = 0x20000
# Configuration and state of a hidden package may stay: the programs that read them are hidden.
SHOWN = ("etc", "var", "boot", "home", "root", "dev", "proc", "run", "sys", "tmp")
FIELDS = "${binary:Package}\t${Package}\t${Provides}\t${Priority}\t${Essential}\t${Pre-Depends}, ${Depends}\n"


def fail(text: str) -> None:
    """Exit with one line on stderr."""
    sys.exit(f"bare: {text}")


def output(*command: str | Path) -> str:
    """Return the output of a command."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def names(relation: str) -> list[str]:
    """Return the package names in a Depends or Provides field, including all alternatives."""
    each = (re.match(r"\s*([a-z0-9][a-z0-9.+-]*)", part) for part in re.split(r"[,|]", relation))
    return [found.group(1) for found in each if found]


def installed() -> tuple[set[str], set[str]]:
    """Return (packages that stay, packages to hide), each with its architecture where dpkg writes that."""
    depends: dict[str, list[str]] = {}
    called: dict[str, list[str]] = {}
    wanted = ["apt", *output(ROOT / "tools" / "setup_env.sh", "--packages").split()]
    for line in output("dpkg-query", "-W", "-f", FIELDS).splitlines():
        package, name, provides, priority, essential, needs = line.split("\t")
        depends[package] = names(needs)
        for alias in (name, *names(provides)):
            called.setdefault(alias, []).append(package)
        if priority == "required" or essential == "yes":
            wanted.append(name)
    kept: set[str] = set()
    while wanted:
        for package in called.get(wanted.pop(), []):
            if package not in kept:
                kept.add(package)
                wanted.extend(depends[package])
    return kept, depends.keys() - kept


def files(packages: set[str]) -> set[Path]:
    """Return the files and links of packages, below the real paths of their folders."""
    if not packages:
        return set()
    real: dict[str, Path] = {}
    found = set()
    for line in output("dpkg-query", "-L", *sorted(packages)).splitlines():
        folder, _, name = line.rpartition("/")
        if not folder or not line.startswith("/") or (os.path.isdir(line) and not os.path.islink(line)):
            continue
        if folder not in real:
            real[folder] = Path(os.path.realpath(folder))
        found.add(real[folder] / name)
    return found


def mount(*arguments: str | Path) -> None:
    """Call mount; exit with its error text on failure."""
    ended = subprocess.run(["mount", *arguments], check=False, stderr=subprocess.PIPE, text=True)
    if ended.returncode != 0:
        fail(f"no overlay can be mounted here: {ended.stderr.strip()}")


def hide(paths: set[Path]) -> None:
    """Enter a mount namespace and remove these files in it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        reason = os.strerror(ctypes.get_errno())
        fail(f"no mount namespace can be made here: {reason} (a container needs CAP_SYS_ADMIN)")
    mount("--make-rprivate", "/")
    LAYER.mkdir(parents=True, exist_ok=True)
    mount("-t", "tmpfs", "tmpfs", LAYER)
    for top in sorted({path.parts[1] for path in paths}):
        if ROOT.is_relative_to(f"/{top}"):
            fail(f"this clone lies in /{top}, where files of packages are hidden: move it elsewhere")
        upper, work = LAYER / top / "upper", LAYER / top / "work"
        upper.mkdir(parents=True)
        work.mkdir()
        mount("-t", "overlay", "overlay", "-o", f"lowerdir=/{top},upperdir={upper},workdir={work}", f"/{top}")
    for path in paths:
        path.unlink(missing_ok=True)


def main() -> None:
    """Hide packages, print a summary, and exec the command."""
    command = sys.argv[1:]
    if not command:
        fail("usage: bare.py COMMAND…")
    if os.geteuid() != 0:
        fail("hiding packages needs root")
    if shutil.which("dpkg-query") is None:
        fail("hiding packages needs Debian's dpkg-query")
    kept, hidden = installed()
    paths = {path for path in files(hidden) - files(kept) if path.parts[1] not in SHOWN}
    hide(paths)
    print(f"bare: {len(kept)} packages stay, {len(hidden)} are hidden ({len(paths)} files)", flush=True)
    os.chdir(Path.cwd())  # resolves the path in the new mounts
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
