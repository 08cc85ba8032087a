"""The descriptors, mappings and threads of a process, and what a job leaves: processes, sockets, files."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections import Counter
from collections.abc import Collection
from pathlib import Path

# States of a socket that a process holds; the others are the kernel's own, after the process has closed it.
HELD = {"01": "established", "02": "connecting", "08": "closed by its peer", "0A": "listening"}


def kind_of(descriptor: int) -> str:
    """Return what a descriptor is, without its number. Raises OSError where there is none."""
    target = os.readlink(f"/proc/self/fd/{descriptor}")
    if not target.startswith("socket:"):
        return "pipe" if target.startswith("pipe:") else target
    with socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return f"socket {one.family.name}"
        state = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return f"socket {HELD.get(f'{state:02X}', 'without a connection')}"


def descriptors() -> Counter[str]:
    """Return this process's descriptors by what they are."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[kind_of(int(name))] += 1
    return found


def connections(held: str) -> int:
    """Return how many connections one of `more`'s descriptions names; 0 if it names something else."""
    found = re.search(r"(\d+) × descriptor socket (established|closed by its peer)$", held)
    return int(found[1]) if found else 0


def mappings() -> Counter[str]:
    """Return this process's shared mappings by the name of their file."""
    found: Counter[str] = Counter()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        fields = line.split(maxsplit=5)
        if fields[1].endswith("s"):
            found[fields[5] if len(fields) > 5 else "anonymous"] += 1
    return found


def threads() -> Counter[str]:
    """Return this process's threads by name."""
    found: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found[(task / "comm").read_text(encoding="utf-8").strip()] += 1
    return found


def held() -> dict[str, Counter[str]]:
    """Return what this process holds."""
    return {"descriptor": descriptors(), "mapping": mappings(), "thread": threads()}


def more(before: dict[str, Counter[str]], after: dict[str, Counter[str]]) -> list[str]:
    """Return descriptions of what is held after and was not held before."""
    return [
        f"{number} × {kind} {name}"
        for kind, counted in after.items()
        for name, number in sorted((counted - before[kind]).items())
    ]


def sockets(ports: Collection[int], process: int | str = "self") -> list[str]:
    """Return the TCP sockets with one of these ports that some process of `process`'s network namespace holds."""
    found = []
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/{process}/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        for fields in map(str.split, lines):
            local, remote = (int(fields[at].rpartition(":")[2], 16) for at in (1, 2))
            if fields[3] in HELD and (local in ports or remote in ports):
                found.append(f"socket {local}-{remote} {HELD[fields[3]]}")
    return found


def listening(pid: int) -> list[tuple[str, int]]:
    """Return the addresses at which a process listens for TCP connections."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(entry)))
    found = []
    for fields in map(str.split, Path(f"/proc/{pid}/net/tcp").read_text(encoding="ascii").splitlines()[1:]):
        if fields[3] == "0A" and fields[9] in inodes:
            address, _, port = fields[1].partition(":")
            numbers = reversed(bytes.fromhex(address))
            found.append((".".join(map(str, numbers)), int(port, 16)))
    return sorted(found)


def local_names(pid: int) -> list[str]:
    """Return the abstract names at which a process listens for connections of its own host."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(entry)))
    lines = map(str.split, Path(f"/proc/{pid}/net/unix").read_text(encoding="utf-8").splitlines()[1:])
    return [fields[7][1:] for fields in lines if len(fields) > 7 and fields[6] in inodes and fields[7].startswith("@")]


def processes(sessions: Collection[int], folder: Path) -> list[str]:
    """Return the processes of these sessions, and those that run in this folder; none that has ended counts."""
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            name, _, rest = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8").rpartition(")")
            fields = rest.split()
            there = int(fields[3]) in sessions or os.readlink(f"/proc/{entry}/cwd") == str(folder)
            if there and fields[0] not in "ZX":
                found.append(f"process {entry}{name.partition(' ')[2]})")
    return found


def files(folder: Path) -> list[str]:
    """Return the files below a folder that are on its own file system."""
    device, found = folder.stat().st_dev, []
    for root, names, leaves in os.walk(folder):
        names[:] = [name for name in names if Path(root, name).lstat().st_dev == device]
        found += [f"file {Path(root, leaf)}" for leaf in leaves]
    return found
