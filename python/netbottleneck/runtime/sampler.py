"""Sampler of a host's counters and TCP connections: `python sampler.py REQUEST`. Uses the standard library only.

It runs beside training and ends with the rank that started it: then its stdin closes or its parent changes. Each row is
written when it is read, so the file is valid whenever the process is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

MAGIC = b"NBCOUNT\0"
VERSION = 1
HEAD = struct.Struct("<8sII")  # magic, version, bytes until the first row
PROC = Path("/proc")
NICE = 5
MOST_INTERFACES = 32
TCP_HZ = 20  # at most, of the TCP counters: the kernel sums them over all cores, which is expensive
CORES_HZ = 800  # readings of a core a second, at most: the cost of a row grows with the cores
READ_BYTES = 1 << 20
NET = ("rx_bytes", "rx_packets", "rx_dropped", "tx_bytes", "tx_packets", "tx_dropped")
_NET_FIELDS = (0, 1, 3, 8, 9, 11)  # of /proc/net/dev
CPU = ("user", "system", "softirq", "iowait", "steal", "idle")
TCP = ("sent_segments", "retransmitted_segments")
_TCP_FIELDS = (b"OutSegs", b"RetransSegs")
CONNECTIONS_HZ = 10  # at most: a reading costs more than one of the interfaces
MOST_CONNECTIONS = 64  # a reading; those with the most bytes are kept, and the others counted
LEAST_PART = 0.001  # of the bytes of the connection with the most; one with less has no row: control messages, a store
OWNERS_S = 1.0  # between two looks at the open files of the ranks
CONNECTIONS_SHARE = 0.02  # of a core, at most: hosts with many sockets or files are read less often


class Table:
    """A file of integer rows, each starting with its time. A full file drops every second reading."""

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

    def put(self, *rows: Sequence[int]) -> None:
        """Write the rows of one reading, which have the same time; left out if the file cannot hold them."""
        if self._count + len(rows) > self._most:
            self._thin()
        if self._count + len(rows) <= self._most:
            _write(self._fd, b"".join(self._row.pack(*values) for values in rows))
            self._count += len(rows)

    def _thin(self) -> None:
        """Keep the rows of every second reading, in a new file that atomically replaces this one."""
        size = self._row.size
        rows = os.pread(self._fd, self._count * size, len(self._head))
        pieces, keep, before = [], False, b""
        for at in range(0, len(rows) - size + 1, size):
            time_ns = rows[at : at + 8]
            keep, before = keep != (time_ns != before), time_ns
            if keep:
                pieces.append(rows[at : at + size])
        kept = b"".join(pieces)
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


def _whole(fd: int) -> bytes:
    """Return a file of the kernel, of which one read returns at most about a page."""
    parts, at = [], 0
    while part := os.pread(fd, READ_BYTES, at):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


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
        for line in _whole(self._fd).split(b"\n")[2:]:
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
    """Processor time by core and kind, in ticks, and TCP segments, which are read every tcp_turns calls."""

    def __init__(self, tcp_turns: int = 1) -> None:
        self._tcp_turns = tcp_turns
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
        """Return the counters."""
        self._cores()
        if self._turn % self._tcp_turns == 0:
            self._tcp = self._segments()
        self._turn += 1
        return [value for values in self._last.values() for value in values] + self._tcp


# TCP connections, by the kernel's sock_diag (linux/inet_diag.h, linux/sock_diag.h, linux/tcp.h).

_MOST = (1 << 63) - 1
ABSENT = -1  # a value that this kernel does not have, or has not measured
_NETLINK_SOCK_DIAG = 4
_BY_FAMILY, _DONE, _ERROR = 20, 3, 2  # types of messages
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_ROOT | NLM_F_MATCH
_ESTABLISHED = 1 << 1  # of the states asked for
_INFO = 2  # INET_DIAG_INFO: struct tcp_info
_ANSWER_S, _ANSWER_BYTES = 1.0, 1 << 16  # the kernel sends at most 32 KiB at once
_NETLINK = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_SOCKET = struct.Struct("=BBBB2s2s16s16s12xIIIII")  # inet_diag_msg: family … ports, addresses, …, queues, uid, inode
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_NUMBER = struct.Struct("=i")
_MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address as IPv6
_APP_LIMITED = 1 if sys.byteorder == "little" else 1 << 7
# Fields of struct tcp_info: name, offset, format. Older kernels return fewer bytes of it.
INFO = (
    ("app_limited", 7, "B"),
    ("segment_bytes", 16, "I"),
    ("path_mtu_bytes", 60, "I"),
    ("rtt_us", 68, "I"),
    ("window_segments", 80, "I"),
    ("resent_segments", 100, "I"),
    ("acked_bytes", 120, "Q"),
    ("received_bytes", 128, "Q"),
    ("least_rtt_us", 148, "I"),
    ("sent_segments", 156, "I"),
    ("delivery_bytes_per_s", 160, "Q"),
    ("busy_us", 168, "Q"),
    ("receiver_limited_us", 176, "Q"),
    ("buffer_limited_us", 184, "Q"),
    ("sent_bytes", 200, "Q"),
    ("peer_window_bytes", 228, "I"),
)
_UNMEASURED = {"path_mtu_bytes": 0, "rtt_us": 0, "least_rtt_us": 0xFFFFFFFF, "delivery_bytes_per_s": 0}
ENDS = ("local_high", "local_low", "local_port", "remote_high", "remote_low", "remote_port")
CONNECTION = ("rank", "inode", *ENDS, "left_out", "unread_bytes", "queued_bytes", *(name for name, _, _ in INFO))
_TOTALS = tuple(CONNECTION.index(name) for name in ("acked_bytes", "received_bytes"))


class Socket(NamedTuple):
    """A TCP socket of the answer. ends: the columns ENDS; info: struct tcp_info as far as the kernel returned it."""

    inode: int
    ends: tuple[int, ...]
    unread_bytes: int
    queued_bytes: int
    info: bytes


@lru_cache(maxsize=8)
def _layout(length: int) -> struct.Struct:
    """Return the format of those fields of INFO that lie within the first `length` bytes."""
    text, at = "=", 0
    for _, offset, code in INFO:
        size = struct.calcsize("=" + code)
        if offset + size > length:
            break
        text += f"{offset - at}x{code}"
        at = offset + size
    return struct.Struct(text)


def tcp_info(info: bytes) -> list[int]:
    """Return the fields of INFO; ABSENT for one that lies beyond the given bytes or was not measured."""
    found = list(_layout(len(info)).unpack_from(info))
    values = [min(value, _MOST) for value in found] + [ABSENT] * (len(INFO) - len(found))
    for number, (name, _, _) in enumerate(INFO[: len(found)]):
        if values[number] == _UNMEASURED.get(name):
            values[number] = ABSENT
    if found:
        values[0] = int(bool(found[0] & _APP_LIMITED))
    return values


def _end(family: int, address: bytes, port: bytes) -> tuple[int, int, int]:
    """Return an end of a connection: the halves of its IPv6 or mapped IPv4 address as signed numbers, and its port."""
    whole = _MAPPED + address[:4] if family == socket.AF_INET else address
    high, low = struct.unpack(">qq", whole)
    return high, low, int.from_bytes(port, "big")


def _socket(body: bytes) -> Socket | None:
    """Return the socket of a message; None if the message is too short."""
    if len(body) < _SOCKET.size:
        return None
    family, _, _, _, port, peer_port, address, peer, _, unread, queued, _, inode = _SOCKET.unpack_from(body)
    info, at = b"", _SOCKET.size
    while at + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        if length < _ATTRIBUTE.size or at + length > len(body):
            break
        if kind == _INFO:
            info = body[at + _ATTRIBUTE.size : at + length]
        at += -(-length // 4) * 4
    ends = (*_end(family, address, port), *_end(family, peer, peer_port))
    return Socket(inode, ends, unread, queued, info)


def messages(data: bytes, sequence: int) -> Iterator[tuple[int, bytes]]:
    """Return type and body of each complete message of this sequence in a datagram of netlink."""
    at = 0
    while at + _NETLINK.size <= len(data):
        length, kind, _, number, _ = _NETLINK.unpack_from(data, at)
        if length < _NETLINK.size or at + length > len(data):
            return
        if number == sequence:
            yield kind, data[at + _NETLINK.size : at + length]
        at += -(-length // 4) * 4


class Connections:
    """Established TCP connections of the ranks on this host, in this network namespace.

    folder: that of the ranks' descriptions, which name their processes. Raises OSError if the kernel refuses sock_diag.
    """

    columns = CONNECTION

    def __init__(self, folder: Path, about: Mapping[str, Any], parent: int, local_size: int) -> None:
        self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
        self._netlink.settimeout(_ANSWER_S)
        self._sequence = 0
        self._folder = folder
        self._host_id = about["host_id"]
        self._pids = {int(about["rank"]): parent}
        self._local_size = local_size
        self._refused: set[int] = set()
        self._known: set[Path] = set()
        self._owners: dict[int, int] = {}
        self._look_s = 0.0  # the next look, by time.monotonic
        self._read_s = 0.0  # the next reading
        self._largest = 0  # bytes of the largest connection so far
        self.read()

    def _find_ranks(self) -> None:
        """Read the processes of this host's ranks from their descriptions of themselves."""
        space = pid_namespace()
        for path in {*self._folder.glob("*.meta.json")} - self._known:
            try:
                meta = json.loads(path.read_bytes())
                if (meta["host_id"], meta["pid_namespace"]) == (self._host_id, space):
                    self._pids[int(meta["rank"])] = int(meta["pid"])
                self._known.add(path)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # not written by this version, or not readable yet

    def _look(self) -> None:
        """Find the sockets that each rank has open, by inode."""
        if len(self._pids) < self._local_size:
            self._find_ranks()
        self._owners = {}
        for rank, pid in self._pids.items():
            try:
                self._owners |= dict.fromkeys(_inodes(pid), rank)
            except (FileNotFoundError, ProcessLookupError):
                continue  # the rank has ended
            except OSError as error:
                if rank not in self._refused:
                    _say(f"the connections of rank {rank} are not recorded: {error}")
                self._refused.add(rank)

    def _sockets(self, family: int) -> Iterator[Socket]:
        """Ask the kernel for the established sockets of a family. Raises OSError."""
        self._sequence += 1
        request = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ESTABLISHED)
        head = _NETLINK.pack(_NETLINK.size + len(request), _BY_FAMILY, _DUMP, self._sequence, 0)
        self._netlink.sendto(head + request, (0, 0))
        while True:
            for kind, body in messages(self._netlink.recv(_ANSWER_BYTES), self._sequence):
                if kind in (_DONE, _ERROR):
                    number = _NUMBER.unpack_from(body)[0] if len(body) >= _NUMBER.size else 0
                    if number < 0:
                        raise OSError(-number, f"sock_diag: {os.strerror(-number)}")
                    return
                found = _socket(body) if kind == _BY_FAMILY else None
                if found is not None:
                    yield found

    def read(self) -> list[list[int]]:
        """Return a row of CONNECTION for each connection of the ranks, those with the most bytes. Raises OSError."""
        before = time.process_time()
        if time.monotonic() >= self._look_s:
            self._look()
            self._look_s = time.monotonic() + max(OWNERS_S, (time.process_time() - before) / CONNECTIONS_SHARE)
            before = time.process_time()
        rows = self._rows()
        self._read_s = time.monotonic() + (time.process_time() - before) / CONNECTIONS_SHARE
        return rows

    @property
    def due(self) -> bool:
        """True if another reading leaves the processor time within its share."""
        return time.monotonic() >= self._read_s

    def _rows(self) -> list[list[int]]:
        rows = []
        for family in (socket.AF_INET, socket.AF_INET6):
            for one in self._sockets(family):
                rank = self._owners.get(one.inode)
                if rank is not None:
                    queues = (one.unread_bytes, one.queued_bytes)
                    rows.append([rank, one.inode, *one.ends, 0, *queues, *tcp_info(one.info)])
        sizes = [sum(row[column] for column in _TOTALS) for row in rows]
        order = sorted(range(len(rows)), key=lambda place: -sizes[place])
        self._largest = max(self._largest, *sizes, 0)  # at the end of a run only idle connections are open
        order = [place for place in order if sizes[place] >= int(LEAST_PART * self._largest)]
        left_out = max(0, len(order) - MOST_CONNECTIONS)
        return [[*rows[place][:8], left_out, *rows[place][9:]] for place in order[:MOST_CONNECTIONS]]


def pid_namespace() -> str:
    """Return the name of this process's PID namespace; "" if it is not known."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _inodes(pid: int) -> list[int]:
    """Return the inodes of the sockets that a process has open. Raises OSError."""
    folder = f"{PROC}/{pid}/fd"
    found = []
    for name in os.listdir(folder):
        try:
            target = os.readlink(f"{folder}/{name}")
        except FileNotFoundError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            found.append(int(target[8:-1]))
    return found


def _say(text: str) -> None:
    """Say it to the rank's standard error, which may be closed."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"netbottleneck: {text}\n")


def _record(table: Table, source: Net | Host | Connections) -> bool:
    """Read a source and write its rows. Returns False if connections can no longer be read. Raises OSError."""
    now = time.monotonic_ns()
    if not isinstance(source, Connections):
        table.put([now, *source.read()])
        return True
    if not source.due:
        return True
    try:
        rows = source.read()
    except OSError as error:
        _say(f"TCP connections are not recorded: {error}")
        return False
    table.put(*([now, *row] for row in rows))
    return True


def run(request: Mapping[str, Any], ended: Callable[[float], bool]) -> None:
    """Read and write until `ended(seconds)`, which waits that long, returns True. request: made by monitor.watch."""
    net, host = Net(), Host(max(1, round(request["hz"] / TCP_HZ)))
    about = {
        **request["about"],
        "hz": request["hz"],
        "opened_mono_ns": time.monotonic_ns(),
        "opened_wall_ns": time.time_ns(),
        "ticks_per_s": os.sysconf("SC_CLK_TCK"),
    }
    at = Path(request["folder"]) / str(request["about"]["rank"])
    limit = int(request["limit_bytes"])
    seldom = max(1, round(request["hz"] * len(host.cores) / CORES_HZ))
    tables: list[tuple[Table, Net | Host | Connections, int]] = [
        (Table(at.with_suffix(".net.counters"), {**about, "left_out": net.left_out}, net.columns, limit), net, 1),
        (Table(at.with_suffix(".host.counters"), about, host.columns, limit), host, seldom),
    ]
    try:
        connections = Connections(at.parent, about, int(request["parent"]), int(request["local_size"]))
    except OSError as error:
        _say(f"TCP connections are not recorded: {error}")
    else:
        table = Table(at.with_suffix(".tcp.counters"), about, connections.columns, limit)
        tables.append((table, connections, max(1, round(request["hz"] / CONNECTIONS_HZ))))
    period_ns = round(1e9 / request["hz"])
    turn, due = 0, time.monotonic_ns()
    while True:
        for entry in tuple(tables):
            table, source, every = entry
            if turn % (every * table.every) == 0 and not _record(table, source):
                tables.remove(entry)
        turn += 1
        now = time.monotonic_ns()
        due += period_ns * max(1, -(-(now - due) // period_ns))  # missed turns are skipped
        if ended((due - now) / 1e9):
            break
    for table, source, _ in tables:
        _record(table, source)


def _ends_with(parent: int) -> Callable[[float], bool]:
    """Return a function that waits some seconds and returns True if the recording is to end.

    It ends with the rank's end of stdin, or with the rank: a child of the rank may hold its end of stdin, too.
    """
    sources = [0]
    with contextlib.suppress(OSError, AttributeError):  # Linux before 5.3, or a C library without the call
        sources.append(os.pidfd_open(parent))

    def ended(seconds: float) -> bool:
        if select.select(sources, [], [], seconds)[0]:
            return True
        return len(sources) == 1 and not (PROC / str(parent)).exists()

    return ended


def _own_descriptors() -> None:
    """Close what the rank left open for the programs that it starts."""
    for name in os.listdir(PROC / "self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(int(name))


def main(argv: Sequence[str]) -> int:
    """Run as a process, started by monitor.watch with a socket as stdin. At the end, that gets the reason if any."""
    request = json.loads(argv[0])
    try:
        os.nice(NICE)
        _own_descriptors()
        run(request, _ends_with(int(request["parent"])))
    except OSError as error:
        _say(f"recording of the host's counters stops: {error}")
        with contextlib.suppress(OSError):
            os.write(0, str(error).encode())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
