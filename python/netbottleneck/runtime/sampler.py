"""Sampler of a host's counters: `python sampler.py REQUEST`. Uses the standard library only.

It runs beside training and ends with the rank that started it: then its stdin closes or its parent changes. Each row is
written when it is read, so the file is valid whenever the process is killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MAGIC = b"NBCOUNT\0"
VERSION = 1
HEAD = struct.Struct("<8sII")  # magic, version, bytes until the first row
PROC = Path("/proc")
NICE = 5
MOST_INTERFACES = 32
TCP_TURNS = 5  # TCP counters are read every TCP_TURNS turns: the kernel sums them over all cores, which is expensive
CORES_A_TURN = 8  # a host with more cores gets fewer rows, because the cost of a row grows with the cores
READ_BYTES = 1 << 20
NET = ("rx_bytes", "rx_packets", "rx_dropped", "tx_bytes", "tx_packets", "tx_dropped")
_NET_FIELDS = (0, 1, 3, 8, 9, 11)  # of /proc/net/dev
CPU = ("user", "system", "softirq", "iowait", "steal", "idle")
TCP = ("sent_segments", "retransmitted_segments")
_TCP_FIELDS = (b"OutSegs", b"RetransSegs")


class Table:
    """A file of integer rows, each starting with its time. A full file drops every second row."""

    def __init__(self, path: Path, about: Mapping[str, Any], columns: Sequence[str], limit_bytes: int) -> None:
        text = json.dumps({**about, "columns": ["time_ns", *columns]}).encode()
        length = -(HEAD.size + len(text)) % 8 + HEAD.size + len(text)
        self._path = path
        self._head = (HEAD.pack(MAGIC, VERSION, length) + text).ljust(length)
        self._row = struct.Struct(f"<{1 + len(columns)}q")
        self._most = max(2, (limit_bytes - length) // self._row.size)
        self._count = 0
        self.every = 1  # turns per row
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        _write(self._fd, self._head)

    def put(self, values: Sequence[int]) -> None:
        """Write a row."""
        if self._count >= self._most:
            self._thin()
        _write(self._fd, self._row.pack(*values))
        self._count += 1

    def _thin(self) -> None:
        """Keep every second row, in a new file that atomically replaces this one."""
        size = self._row.size
        rows = os.pread(self._fd, self._count * size, len(self._head))
        kept = b"".join(rows[at : at + size] for at in range(0, len(rows) - size + 1, 2 * size))
        beside = self._path.with_suffix(".new")
        fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        _write(fd, self._head + kept)
        beside.replace(self._path)
        os.close(self._fd)
        self._fd, self._count = fd, len(kept) // size
        self.every *= 2


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


class Net:
    """Counters of the interfaces in this network namespace that exist at the start."""

    def __init__(self) -> None:
        self._fd = os.open(PROC / "net/dev", os.O_RDONLY | os.O_CLOEXEC)
        names = [name for name, _ in self._lines()]
        self.interfaces = [name.decode() for name in names[:MOST_INTERFACES]]
        self.left_out = len(names) - len(self.interfaces)
        self.columns = [f"{name}:{what}" for name in self.interfaces for what in NET]
        self._last = {name: [0] * len(NET) for name in names[:MOST_INTERFACES]}

    def _lines(self) -> list[tuple[bytes, bytes]]:
        lines = []
        for line in os.pread(self._fd, READ_BYTES, 0).split(b"\n")[2:]:
            name, colon, rest = line.rpartition(b":")
            if colon:
                lines.append((name.strip(), rest))
        return lines

    def read(self) -> list[int]:
        """Return the counters; an interface that disappeared keeps its last values."""
        last = self._last
        for name, rest in self._lines():
            if name in last:
                fields = rest.split()
                last[name] = [int(fields[i]) for i in _NET_FIELDS]
        return [value for values in last.values() for value in values]


class Host:
    """Processor time by core and kind, in ticks, and TCP segments."""

    def __init__(self) -> None:
        self._stat = os.open(PROC / "stat", os.O_RDONLY | os.O_CLOEXEC)
        self._snmp = os.open(PROC / "net/snmp", os.O_RDONLY | os.O_CLOEXEC)
        self._last: dict[bytes, list[int]] = {}
        self._tcp: list[int] = []
        self._turn = 0
        self._cores()
        self.cores = [int(name[3:]) for name in self._last]
        self.columns = [f"cpu{core}:{kind}" for core in self.cores for kind in CPU]
        self.columns += [f"tcp:{what}" for what in TCP]

    def _cores(self) -> None:
        """Read the cores; one that is offline keeps its last values. Skips the first line, the sum over all."""
        fixed = len(self._last)
        for line in os.pread(self._stat, READ_BYTES, 0).split(b"\n")[1:]:
            if not line.startswith(b"cpu"):
                break
            name, user, nice, system, idle, iowait, irq, softirq, steal, *_ = line.split()
            if not fixed or name in self._last:
                hard = int(system) + int(irq)
                self._last[name] = [int(user) + int(nice), hard, int(softirq), int(iowait), int(steal), int(idle)]

    def _segments(self) -> list[int]:
        lines = [row for row in os.pread(self._snmp, READ_BYTES, 0).split(b"\n") if row.startswith(b"Tcp:")]
        if len(lines) < 2:
            return [0] * len(TCP)
        counters = dict(zip(lines[0].split(), lines[1].split(), strict=False))
        return [int(counters.get(name, 0)) for name in _TCP_FIELDS]

    def read(self) -> list[int]:
        """Return the counters. TCP counters are read every TCP_TURNS calls."""
        self._cores()
        if self._turn % TCP_TURNS == 0:
            self._tcp = self._segments()
        self._turn += 1
        return [value for values in self._last.values() for value in values] + self._tcp


def run(request: Mapping[str, Any], ended: Callable[[float], bool]) -> None:
    """Read and write until `ended(seconds)`, which waits that long, returns True. request: made by monitor.watch."""
    net, host = Net(), Host()
    about = {
        **request["about"],
        "hz": request["hz"],
        "opened_mono_ns": time.monotonic_ns(),
        "opened_wall_ns": time.time_ns(),
        "ticks_per_s": os.sysconf("SC_CLK_TCK"),
    }
    at = Path(request["folder"]) / str(request["about"]["rank"])
    limit = int(request["limit_bytes"])
    seldom = max(1, len(host.cores) // CORES_A_TURN)
    tables: list[tuple[Table, Net | Host, int]] = [
        (Table(at.with_suffix(".net.counters"), {**about, "left_out": net.left_out}, net.columns, limit), net, 1),
        (Table(at.with_suffix(".host.counters"), about, host.columns, limit), host, seldom),
    ]
    period_ns = round(1e9 / request["hz"])
    turn, due = 0, time.monotonic_ns()
    while True:
        for table, source, every in tables:
            if turn % (every * table.every) == 0:
                table.put([time.monotonic_ns(), *source.read()])
        turn += 1
        now = time.monotonic_ns()
        due += period_ns * max(1, -(-(now - due) // period_ns))  # missed turns are skipped
        if ended((due - now) / 1e9):
            break
    for table, source, _ in tables:
        table.put([time.monotonic_ns(), *source.read()])


def main(argv: Sequence[str]) -> int:
    """Run as a process."""
    request = json.loads(argv[0])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, which then closes stdin
    os.nice(NICE)
    parent = int(request["parent"])

    def ended(seconds: float) -> bool:
        # A child of the rank may also hold the other end of stdin, so the parent is checked as well.
        return bool(select.select([0], [], [], seconds)[0]) or os.getppid() != parent

    try:
        run(request, ended)
    except OSError as error:
        sys.stderr.write(f"netbottleneck: recording of the host's counters stops: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
