"""Loaded by the process that forks the ranks: gives them a /tmp and a /dev/shm of their own, seen by no other process.

Files that appear there belong to the ranks, and a full disk harms no other process. The mounts end with the last
process. Where the kernel allows no mounts, nothing changes. The file PRIVATE in FAULTS_FOLDER holds "yes" or the
reason.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

NEW_MOUNTS = 0x00020000
BIND, REC, PRIVATE = 0x1000, 0x4000, 0x40000
TMP_BYTES = 32 << 20
TMP, SHM = Path("/tmp"), Path("/dev/shm")


def call(name: str, *args: object) -> None:
    """Call a function of libc that returns 0, or raise OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: Path, kind: bytes | None, flags: int, data: bytes | None = None) -> None:
    call("mount", source.encode(), os.fsencode(target), kind, flags, data)


def needed() -> list[Path]:
    """Return the folders below /tmp that ranks read: the checkout and Python, where they are there."""
    folders = [Path(__file__).resolve().parents[3], Path(sys.prefix), Path(sys.base_prefix)]
    below = sorted({folder for folder in folders if folder.is_relative_to(TMP)})
    return [folder for folder in below if not any(folder != other and folder.is_relative_to(other) for other in below)]


def make_private() -> None:
    """Mount empty file systems over both folders in a mount namespace of this process and its children."""
    call("unshare", NEW_MOUNTS)
    mount("none", Path("/"), None, REC | PRIVATE)
    kept = [(folder, os.open(folder, os.O_PATH)) for folder in needed()]
    mount("tmpfs", SHM, b"tmpfs", 0, b"mode=1777")
    mount("tmpfs", TMP, b"tmpfs", 0, f"mode=1777,size={TMP_BYTES}".encode())
    for folder, descriptor in kept:
        folder.mkdir(parents=True)
        mount(f"/proc/self/fd/{descriptor}", folder, None, BIND | REC)
        os.close(descriptor)


def main() -> None:
    outcome = "yes"
    try:
        make_private()
    except OSError as error:
        outcome = str(error)
    Path(os.environ["FAULTS_FOLDER"], "PRIVATE").write_text(outcome, encoding="utf-8")


main()
