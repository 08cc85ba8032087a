"""Faults from outside the job: connections at every port, wrong and replayed secrets, writes over libfabric."""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import socket
import struct
import subprocess
import threading
import time

from matrix import holdings
from matrix.cell import DETECTED_WITHIN_S, Cell, Fault
from matrix.job import Absent, Broken, Job, event_text

GARBAGE = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 400, b"\xff" * 64, secrets.token_bytes(1 << 16))
CONNECT_S = 2.0
CAPTURED_BYTES = 4096  # of each connection, from its first byte
INJECTED = 1000  # writes of an outsider of libfabric's at each port
INJECT_S = 5.0
IP_TYPE, FILTER, RECEIVE_BUFFER = 0x0800, 26, 33


def listening_addresses(job: Job) -> list[tuple[str, int]]:
    """Return the addresses at which the ranks of a job listen."""
    found = {address for process in job.processes.values() for address in holdings.listening(process.pid)}
    return sorted(found)


def ports_of_a_rank(job: Job) -> int:
    """Return the largest number of ports at which one rank listens."""
    return max(len(holdings.listening(process.pid)) for process in job.processes.values())


def connect_and_send(cell: Cell, address: tuple[str, int], payload: bytes) -> socket.socket | None:
    """Connect, send some bytes and keep the connection. Returns None if it is refused."""
    connection = None
    with contextlib.suppress(OSError):
        connection = socket.create_connection(address, timeout=CONNECT_S)
        cell.defer(connection.close)
        connection.sendall(payload)
    return connection


def connect_locally(cell: Cell, name: str) -> None:
    """Connect to a local socket by its abstract name, and keep the connection."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    cell.defer(connection.close)
    connection.settimeout(CONNECT_S)
    with contextlib.suppress(OSError):
        connection.connect("\0" + name)
        connection.sendall(b"\xff" * 64)


def garbage_connections(cell: Cell) -> str:
    """Send garbage to every port, and keep the connections."""
    job = cell.job()
    job.start()
    at, found = time.monotonic(), listening_addresses(job)
    cell.may_lose = len(GARBAGE) * ports_of_a_rank(job)
    for address in found:
        for payload in GARBAGE:
            connect_and_send(cell, address, payload)
            job.more_rounds(0)
    for process in job.processes.values():
        for name in holdings.local_names(process.pid):
            connect_locally(cell, name)
    details = cell.right(job, at)
    return f"{details}, {len(found)} ports" if found else f"{details}, no port is open"


def silent(cell: Cell) -> str:
    """Hold more silent connections at every port than a rank has descriptors; the user's code must still get some.

    Over ofi libfabric listens, and accepts every connection: there only the sums are judged.
    """
    free, each = 40, 30
    job = cell.job()
    job.start()
    found = listening_addresses(job)
    cell.may_lose = each * ports_of_a_rank(job)
    for rank in range(job.size):
        job.call(rank, f"limit {free}")
    at = time.monotonic()
    held = sum(connect_and_send(cell, address, b"") is not None for address in found for _ in range(each))
    job.more_rounds(2)
    refused = {rank: why for rank in range(job.size) if (why := job.call(rank, "try"))}
    details = f"{held} connections held"
    if refused and cell.network != "ofi":
        raise Broken(f"{details} at {len(found)} ports: ranks can open nothing: {refused}")
    if refused:
        details += ", libfabric has taken all descriptors"
    return f"{cell.right(job, at)}, {details}"


def injector(cell: Cell) -> str:
    """Send libfabric writes with guessed completion data to every port, without a secret or a key."""
    if cell.network != "ofi":
        raise Absent("no port of libfabric is open")
    program = cell.machine.compiled("outsider.c", "-lfabric")
    job = cell.job()
    job.start()
    at, found = time.monotonic(), listening_addresses(job)
    cell.may_lose = ports_of_a_rank(job)
    provider = libfabrics(job)
    running = [
        subprocess.Popen(
            [str(program), host, str(port), provider, str(INJECTED)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**cell.machine.environ, "FI_LOG_LEVEL": "none"},
        )
        for host, port in found
    ]
    for each in running:
        cell.defer(each.wait)
        cell.defer(each.kill)
    until = time.monotonic() + INJECT_S
    job.until_true("", lambda: all(each.poll() is not None for each in running) or time.monotonic() > until)
    job.more_rounds(0)
    written, outputs = 0, []
    for each in running:
        each.kill()
        outputs.append(each.communicate()[0].strip()[:120])
        fields = outputs[-1].split()
        written += int(fields[1]) if fields[:1] == ["written"] else 0
    if not written:
        raise Broken(f"the outsider wrote nothing: this cell showed nothing ({'; '.join(outputs)})")
    return f"{cell.right(job, at)}, {written} writes"


def libfabrics(job: Job) -> str:
    """Return the provider that a job uses."""
    del job
    from netbottleneck import _core

    return _core.providers()[0][0]


def wrong_secret(cell: Cell) -> str:
    """Start a process with another secret as the last rank, then the last rank itself."""
    job = cell.job()
    job.start(*range(job.size - 1), under_way=False)
    job.until_true("rank 0 does not listen", lambda: bool(holdings.listening(job.processes["0"].pid)))
    connect_and_send(cell, ("127.0.0.1", job.ports[0]), GARBAGE[2])
    intruder = job.start_one(cell.victim, {"NETBOTTLENECK_SECRET": secrets.token_hex(16)}, "intruder")
    refused = job.wait_for(intruder, "refused", "joined")
    if refused["event"] != "refused" or "secret" not in refused["message"].lower():
        raise Broken(f"a process with another secret: {event_text(refused)}")
    job.processes.pop(intruder).wait(cell.until - time.monotonic())
    at = time.monotonic()
    job.start(cell.victim)
    return f"{cell.right(job, at)}, the intruder is refused"


class Capture:
    """Captures the first bytes of each connection to a range of ports on loopback, until it is closed."""

    def __init__(self, ports: range) -> None:
        try:
            self.raw = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(IP_TYPE))
        except PermissionError:
            raise Absent("packets cannot be captured without CAP_NET_RAW") from None
        self.raw.setsockopt(socket.SOL_SOCKET, RECEIVE_BUFFER, 64 << 20)
        self._filter(ports)
        self.raw.bind(("lo", IP_TYPE))
        self.raw.settimeout(0.05)
        self.payloads: dict[tuple[int, int], dict[int, bytes]] = {}
        self.closed = False
        self.ports = ports
        self.thread = threading.Thread(target=self._take, daemon=True)
        self.thread.start()

    def _filter(self, ports: range) -> None:
        """Have the kernel drop all but TCP packets to these ports."""
        program = [
            (0x30, 0, 0, 9),  # A = protocol
            (0x15, 0, 5, 6),  # not TCP: none
            (0xB1, 0, 0, 0),  # X = length of the IP header
            (0x48, 0, 0, 2),  # A = destination port
            (0x35, 0, 2, ports[0]),
            (0x25, 1, 0, ports[-1]),
            (0x06, 0, 0, CAPTURED_BYTES + 120),
            (0x06, 0, 0, 0),
        ]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
        self.raw.setsockopt(socket.SOL_SOCKET, FILTER, struct.pack("HL", len(program), ctypes.addressof(code)))

    def _take(self) -> None:
        while not self.closed:
            with contextlib.suppress(TimeoutError):
                packet = self.raw.recv(1 << 16)
                tcp = packet[(packet[0] & 15) * 4 :]
                source, target, number = struct.unpack_from("!HHI", tcp)
                payload = tcp[(tcp[12] >> 4) * 4 :]
                if payload and target in self.ports:
                    parts = self.payloads.setdefault((source, target), {})
                    if sum(map(len, parts.values())) < CAPTURED_BYTES:
                        parts[number] = payload

    def close(self) -> dict[int, list[bytes]]:
        """Return the bytes of each connection, by port."""
        self.closed = True
        self.thread.join()
        self.raw.close()
        result: dict[int, list[bytes]] = {}
        for (_, target), parts in self.payloads.items():
            result.setdefault(target, []).append(b"".join(part for _, part in sorted(parts.items())))
        return result


def replayed(cell: Cell) -> str:
    """Replay captured connections to the ports of the same job, and to rank 0 of a second job with the same secret.

    Over ofi only rank 0's port is tried. libfabric's ports check no secret, and a capture of their traffic contains the
    keys of granted memory: docs/explanation/lanes.md excludes networks that others can read.
    """
    job = cell.job()
    capture = Capture(job.ports)
    try:
        job.start()
    finally:
        captured = capture.close()
    if job.ports[0] not in captured:
        raise Broken("nothing was captured of the ranks' joining: this cell showed nothing")
    if cell.network == "ofi":
        captured = {job.ports[0]: captured[job.ports[0]]}
    at = time.monotonic()
    for port, payloads in captured.items():
        for payload in payloads:
            connect_and_send(cell, ("127.0.0.1", port), payload)
            job.more_rounds(0)
    cell.right(job, at)

    again = cell.job(job.values)
    again.start(0, under_way=False)
    again.until_true("rank 0 does not listen", lambda: bool(holdings.listening(again.processes["0"].pid)))
    for payload in captured[job.ports[0]]:
        connection = connect_and_send(cell, ("127.0.0.1", job.ports[0]), payload)
        if connection is not None and not dropped(again, connection):
            raise Broken("rank 0 did not drop a replayed joining")
    at = time.monotonic()
    again.start(*range(1, again.size))
    return f"{cell.right(again, at)}, {sum(map(len, captured.values()))} connections replayed"


def dropped(job: Job, connection: socket.socket) -> bool:
    """Wait until the other side ends a connection; False if the cell's deadline passes first."""
    connection.setblocking(False)
    ended = False

    def look() -> bool:
        nonlocal ended
        try:
            ended = connection.recv(1 << 16) == b""
        except BlockingIOError:
            ended = False
        except OSError:
            ended = True
        return ended

    with contextlib.suppress(Broken):
        job.until_true("", look)
    return ended


ROWS = [
    Fault(
        "outsiders",
        "outsiders connect to each port and send nothing or garbage",
        "sums right",
        garbage_connections,
        DETECTED_WITHIN_S,
    ),
    Fault("outsider-ofi", "an outsider sends libfabric writes to each port", "sums right", injector, DETECTED_WITHIN_S),
    Fault("secret-wrong", "a process with another secret joins as a rank", "refused, sums right", wrong_secret),
    Fault("secret-replayed", "captured handshakes are replayed", "dropped, sums right", replayed),
    Fault(
        "strangers-silent",
        "silent connections at each port, more than a rank has descriptors",
        "sums right, descriptors left (not over ofi: libfabric accepts all)",
        silent,
        DETECTED_WITHIN_S,
    ),
]
