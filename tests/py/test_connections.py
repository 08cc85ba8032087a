"""TCP connections of the ranks: read from the kernel, joined with the operations, reported and judged."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from conftest import RANKS_LIMIT_S, Ranks

from netbottleneck.analysis import findings, usage, verdict
from netbottleneck.analysis.intervals import counted
from netbottleneck.lab import Lab, LabError
from netbottleneck.report import Run, html, summary, text
from netbottleneck.runtime import sampler
from netbottleneck.trace import counter_files, ring_reader
from netbottleneck.trace.counter_files import Samples
from netbottleneck.trace.model import Clock, Collective, Network, Rank, Step, Trace, TransportInfo
from netbottleneck.trace.transports import Arm
from ringwriter import FakeRun

DEADLINE_S = RANKS_LIMIT_S
LO = "127.0.0.1"
NAMES = [name for name, _, _ in sampler.INFO]


def wait_for(true: Callable[[], bool], what: str) -> None:
    """Wait for a condition, with a deadline."""
    until = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < until, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.01)


# The answer of the kernel, made by hand.


def attribute(kind: int, data: bytes, length: int | None = None) -> bytes:
    """Return an attribute of a message; length: what it claims."""
    whole = struct.pack("=HH", 4 + len(data) if length is None else length, kind) + data
    return whole + bytes(-len(whole) % 4)


def message(kind: int, body: bytes, length: int | None = None, sequence: int = 7) -> bytes:
    """Return a message of netlink; length: what it claims."""
    whole = struct.pack("=IHHII", 16 + len(body) if length is None else length, kind, 2, sequence, 0) + body
    return whole + bytes(-len(whole) % 4)


def answer(inode: int, *attributes: bytes, family: int = socket.AF_INET) -> bytes:
    """Return the body of an answer: a socket 10.0.0.1:5000 with the peer 10.0.0.2:6000, or the same mapped to IPv6."""
    head = b"" if family == socket.AF_INET else bytes(10) + b"\xff\xff"
    ends = struct.pack(">HH", 5000, 6000)
    ends += b"".join((head + bytes((10, 0, 0, last))).ljust(16, b"\0") for last in (1, 2))
    return (
        struct.pack("=BBBB", family, 1, 0, 0)
        + ends
        + bytes(12)
        + struct.pack("=IIIII", 0, 11, 22, 0, inode)
        + (b"".join(attributes))
    )


def tcp_info_bytes(length: int = 232, **values: int) -> bytes:
    """Return the first `length` bytes of a struct tcp_info."""
    whole = bytearray(256)
    for name, offset, code in sampler.INFO:
        struct.pack_into("=" + code, whole, offset, values.get(name, 0))
    return bytes(whole[:length])


def parsed(data: bytes) -> list[sampler.Socket]:
    """Return the sockets of a datagram."""
    found = [sampler._socket(body) for kind, body in sampler.messages(data, 7) if kind == 20]
    return [one for one in found if one is not None]


def test_an_answer_has_both_ends_the_queues_and_the_kernels_struct() -> None:
    info = tcp_info_bytes(acked_bytes=1 << 40, resent_segments=3, app_limited=1)
    data = message(20, answer(5, attribute(9, b"x"), attribute(2, info))) + message(
        20, answer(6, family=socket.AF_INET6)
    )
    first, second = parsed(data)
    assert (first.inode, first.unread_bytes, first.queued_bytes, first.info) == (5, 11, 22, info)
    assert (second.inode, second.info) == (6, b"")
    assert first.ends == second.ends
    assert [counter_files._address(*first.ends[:2]), first.ends[2]] == ["10.0.0.1", 5000]
    assert [counter_files._address(*first.ends[3:5]), first.ends[5]] == ["10.0.0.2", 6000]
    values = dict(zip(NAMES, sampler.tcp_info(info), strict=True))
    assert (values["acked_bytes"], values["resent_segments"], values["app_limited"]) == (1 << 40, 3, 1)


def test_an_answer_that_is_cut_short_anywhere_gives_what_is_complete() -> None:
    info = tcp_info_bytes(acked_bytes=9)
    one, other = (message(20, answer(inode, attribute(2, info))) for inode in (5, 6))
    assert [len(parsed((one + other)[:cut])) for cut in range(len(one + other))] == [
        (cut >= len(one)) for cut in range(len(one + other))
    ]


@pytest.mark.parametrize("length", [0, 3, 15, 17, 1 << 31, 0xFFFFFFFF])
def test_a_message_of_a_false_length_gives_no_socket(length: int) -> None:
    body = answer(5, attribute(2, tcp_info_bytes()))
    assert parsed(message(20, body, length) + message(20, body)) in ([], parsed(message(20, body)))


@pytest.mark.parametrize("length", [0, 1, 3, 400, 0xFFFF])
def test_an_attribute_of_a_false_length_ends_the_attributes(length: int) -> None:
    bad = attribute(9, b"abcd", length)
    (found,) = parsed(message(20, answer(5, attribute(2, b"early"), bad, attribute(2, b"later"))))
    assert (found.inode, found.info) == (5, b"early")


def test_messages_of_an_earlier_request_do_not_count() -> None:
    assert parsed(message(20, answer(5), sequence=6) + message(20, answer(8))) == parsed(message(20, answer(8)))


@pytest.mark.parametrize("length", range(0, 256, 4))
def test_what_the_kernel_did_not_return_is_absent_and_never_zero(length: int) -> None:
    given = {name: 5 + number for number, name in enumerate(NAMES)}
    values = sampler.tcp_info(tcp_info_bytes(length, **given))
    for (name, offset, code), value in zip(sampler.INFO, values, strict=True):
        there = offset + struct.calcsize("=" + code) <= length
        whole = 1 if name == NAMES[0] else given[name]  # the first one is a flag
        assert value == (whole if there else sampler.ABSENT)


def test_what_the_kernel_has_not_measured_is_absent() -> None:
    info = tcp_info_bytes(rtt_us=0, least_rtt_us=0xFFFFFFFF, delivery_bytes_per_s=0, sent_bytes=(1 << 64) - 1)
    values = dict(zip(NAMES, sampler.tcp_info(info), strict=True))
    assert [values[name] for name in ("rtt_us", "least_rtt_us", "delivery_bytes_per_s")] == [sampler.ABSENT] * 3
    assert values["acked_bytes"] == 0
    assert values["sent_bytes"] == (1 << 63) - 1  # as much as a row holds


# Real sockets.


@contextlib.contextmanager
def pair(receive_bytes: int = 0) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Provide two connected sockets; receive_bytes: size of the second one's receive buffer."""
    with socket.socket() as door:
        if receive_bytes:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        door.bind((LO, 0))
        door.listen()
        with socket.create_connection(door.getsockname()) as out:
            came, _ = door.accept()
            with came:
                yield out, came


def reader(folder: Path, pid: int | None = None, **about: Any) -> sampler.Connections:
    """Return a reader of this process's connections as those of rank 3."""
    return sampler.Connections(folder, {"rank": 3, "host_id": "here", **about}, pid or os.getpid(), 1)


def reading(of: sampler.Connections, one: socket.socket) -> dict[str, int]:
    """Return the row of a socket."""
    inode = os.fstat(one.fileno()).st_ino
    of._look_s = 0.0  # look at once
    rows = [dict(zip(sampler.CONNECTION, row, strict=True)) for row in of.read()]
    return next(row for row in rows if row["inode"] == inode)


# struct tcp_info of linux/tcp.h, whose fields are in order; the two bytes of bit fields are one name each.
IN_BYTES = "state ca_state retransmits probes backoff options scales app_limited"
IN_WORDS = (
    "rto ato segment_bytes rcv_mss unacked sacked lost retrans fackets last_data_sent last_ack_sent last_data_recv "
    "last_ack_recv path_mtu_bytes rcv_ssthresh rtt_us rttvar snd_ssthresh window_segments advmss reordering rcv_rtt "
    "rcv_space resent_segments"
)
THEN = (
    ("pacing_rate max_pacing_rate acked_bytes received_bytes", ctypes.c_uint64),
    ("segs_out segs_in notsent_bytes least_rtt_us data_segs_in sent_segments", ctypes.c_uint32),
    ("delivery_bytes_per_s busy_us receiver_limited_us buffer_limited_us", ctypes.c_uint64),
    ("delivered delivered_ce", ctypes.c_uint32),
    ("sent_bytes bytes_retrans", ctypes.c_uint64),
    ("dsack_dups reord_seen rcv_ooopack peer_window_bytes", ctypes.c_uint32),
)


class TcpInfo(ctypes.Structure):
    """The kernel's struct, by the names of the sampler where it reads a field."""

    _fields_ = [
        (name, kind)
        for names, kind in ((IN_BYTES, ctypes.c_uint8), (IN_WORDS, ctypes.c_uint32), *THEN)
        for name in names.split()
    ]


def kernels(one: socket.socket) -> dict[str, int]:
    """Return the kernel's struct of a socket by getsockopt."""
    raw = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ctypes.sizeof(TcpInfo))
    known = TcpInfo.from_buffer_copy(raw.ljust(ctypes.sizeof(TcpInfo), b"\0"))
    return {name: getattr(known, name) for name in NAMES}


def test_the_fields_are_where_the_kernels_struct_has_them() -> None:
    assert {name: getattr(TcpInfo, name).offset for name in NAMES} == {name: at for name, at, _ in sampler.INFO}
    assert {name: getattr(TcpInfo, name).size for name in NAMES} == {
        name: struct.calcsize("=" + code) for name, _, code in sampler.INFO
    }


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_reading_is_what_getsockopt_says_of_the_same_socket(tmp_path: Path, family: int) -> None:
    try:
        door = socket.create_server(("::1" if family == socket.AF_INET6 else LO, 0), family=family)
    except OSError as error:
        pytest.skip(f"no IPv6 on this machine: {error}")
    with door, socket.create_connection(door.getsockname()[:2]) as out:
        came, _ = door.accept()
        with came:
            out.sendall(bytes(300_000))
            left = 300_000
            while left:
                left -= len(came.recv(left))
            wait_for(lambda: kernels(out)["acked_bytes"] >= 300_000, "the acknowledgement")
            row, other = (reading(reader(tmp_path), one) for one in (out, came))
            known = kernels(out)
    assert (row["rank"], row["local_port"], row["remote_port"]) == (3, other["remote_port"], other["local_port"])
    for name in (
        "acked_bytes",
        "sent_bytes",
        "sent_segments",
        "resent_segments",
        "segment_bytes",
        "rtt_us",
        "path_mtu_bytes",
    ):
        assert row[name] == known[name], name
    for name in ("least_rtt_us", "window_segments", "busy_us", "buffer_limited_us", "receiver_limited_us"):
        assert row[name] == known[name], name
    assert row["acked_bytes"] >= 300_000
    assert other["received_bytes"] == 300_000
    assert other["unread_bytes"] == 0


def test_the_time_in_which_the_receiver_does_not_read_is_limited_by_its_window(tmp_path: Path) -> None:
    with pair() as (out, came):
        of = reader(tmp_path)
        out.setblocking(False)
        before = reading(of, out)
        with contextlib.suppress(BlockingIOError):
            while True:
                out.send(bytes(1 << 16))
        wait_for(lambda: reading(of, out)["receiver_limited_us"] > 100_000, "time limited by the receive window")
        row = reading(of, out)
        assert before["receiver_limited_us"] == 0
        assert row["busy_us"] >= row["receiver_limited_us"]
        assert row["buffer_limited_us"] == 0
        assert reading(of, came)["unread_bytes"] > row["peer_window_bytes"]


def test_the_connections_of_other_processes_are_not_read(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as other:
        with pair():
            assert reader(tmp_path, other.pid).read() == []
        other.communicate()


def test_the_processes_of_this_hosts_ranks_are_found_by_their_descriptions(tmp_path: Path) -> None:
    own = {"host_id": "here", "pid_namespace": sampler.pid_namespace(), "pid": os.getpid()}
    descriptions: Mapping[int, Any] = {
        4: {"rank": 4, **own},
        5: {"rank": 5, **own, "host_id": "elsewhere", "pid": 1},
        6: {"rank": 6, **own, "pid_namespace": "pid:[1]", "pid": 1},
        7: {"rank": 7},
    }
    for rank, about in descriptions.items():
        (tmp_path / f"{rank}.meta.json").write_text(json.dumps(about))
    (tmp_path / "8.meta.json").write_text("{")
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as other:
        with pair() as (out, _):
            of = sampler.Connections(tmp_path, {"rank": 3, "host_id": "here"}, other.pid, 9)
            assert of._pids == {3: other.pid, 4: os.getpid()}
            assert reading(of, out)["rank"] == 4
        other.communicate()


def test_a_rank_whose_files_may_not_be_read_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    with pair() as (out, _):
        of = reader(tmp_path)
        assert reading(of, out)["rank"] == 3
        monkeypatch.setattr(os, "listdir", refused)
        for _ in range(2):
            of._look_s = 0.0
            assert of.read() == []
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert printed.startswith("netbottleneck: the connections of rank 3 are not recorded: ")


def test_a_rank_that_has_ended_has_no_connections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    with pair():
        assert reader(tmp_path, ended.pid).read() == []
    assert capsys.readouterr().err == ""


def test_the_connections_with_the_most_bytes_are_kept_and_the_others_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "MOST_CONNECTIONS", 2)
    with pair() as (out, came), pair() as (less, least):
        out.sendall(bytes(1000))
        less.sendall(bytes(10))
        wait_for(lambda: kernels(came)["received_bytes"] == 1000, "the bytes")
        wait_for(lambda: kernels(least)["received_bytes"] == 10, "the bytes")
        rows = [dict(zip(sampler.CONNECTION, row, strict=True)) for row in reader(tmp_path).read()]
        assert {row["inode"] for row in rows} == {os.fstat(one.fileno()).st_ino for one in (out, came)}
    assert [row["left_out"] for row in rows] == [2, 2]


def test_a_connection_with_few_bytes_beside_others_has_no_row(tmp_path: Path) -> None:
    with pair() as (out, came), pair() as (less, least):
        less.sendall(bytes(900))
        wait_for(lambda: kernels(least)["received_bytes"] == 900, "the bytes")
        assert len(reader(tmp_path).read()) == 4
        out.sendall(bytes(1 << 20))
        left = 1 << 20
        while left:
            left -= len(came.recv(left))
        wait_for(lambda: kernels(out)["acked_bytes"] > 1 << 20, "the acknowledgement")
        rows = [dict(zip(sampler.CONNECTION, row, strict=True)) for row in reader(tmp_path).read()]
        assert {row["inode"] for row in rows} == {os.fstat(one.fileno()).st_ino for one in (out, came)}
        assert {row["left_out"] for row in rows} == {0}


def test_connections_with_few_bytes_have_no_row_after_the_large_ones_have_closed(tmp_path: Path) -> None:
    with pair() as (less, least):
        less.sendall(bytes(100))
        wait_for(lambda: kernels(least)["received_bytes"] == 100, "the bytes")
        read = reader(tmp_path)
        with pair() as (out, came):
            out.sendall(bytes(1 << 20))
            left = 1 << 20
            while left:
                left -= len(came.recv(left))
            wait_for(lambda: kernels(out)["acked_bytes"] > 1 << 20, "the acknowledgement")
            read._look_s = 0.0  # look at once
            assert len(read.read()) == 2
        assert read.read() == []


def open_lab(*args: Any) -> Lab:
    """Return a lab of namespaces, not yet entered; skips if this machine does not allow one."""
    try:
        with Lab(1, "none", ways=("root", "user")):
            pass
    except LabError as error:
        pytest.skip(f"no network namespaces on this machine: {error}")
    return Lab(*args, ways=("root", "user"))


SMALL_BUFFER = """
import json, os, socket, sys, time
sys.path.insert(0, sys.argv[1])
import sampler
from pathlib import Path
until = time.monotonic() + float(sys.argv[4])
most = 0
# The kernel starts this clock only where an acknowledgement lets the last byte go: not on every connection.
while most < 200_000 and time.monotonic() < until:
    with socket.socket() as out:
        out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 128 * 1024)
        out.connect((sys.argv[2], int(sys.argv[3])))
        of = sampler.Connections(Path("/nonexistent"), {"rank": 0, "host_id": ""}, os.getpid(), 1)
        for _ in range(2):
            out.sendall(bytes(1 << 20))
        row = dict(zip(sampler.CONNECTION, of.read()[0]))
        most = row["buffer_limited_us"]
print(json.dumps(row))
"""
SINK = """
import socket, sys
door = socket.create_server((sys.argv[1], 0))
print(door.getsockname()[1], flush=True)
while True:
    came, _ = door.accept()
    while came.recv(1 << 20):
        pass
"""


def test_a_send_buffer_below_what_the_path_holds_limits_the_connection() -> None:
    with open_lab(2, "20mbit") as lab:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
        sink = lab.popen(1, [sys.executable, "-I", "-c", SINK, lab.address(1)], **pipes)
        assert sink.stdout is not None
        port = sink.stdout.readline().strip()
        place = str(Path(sampler.__file__).parent)
        words = [sys.executable, "-I", "-c", SMALL_BUFFER, place, lab.address(1), port, str(DEADLINE_S / 2)]
        text, _ = lab.popen(0, words, **pipes).communicate(timeout=DEADLINE_S)
    row = json.loads(text)
    assert row["buffer_limited_us"] >= 200_000
    assert row["busy_us"] >= row["buffer_limited_us"] + row["receiver_limited_us"]
    assert row["rtt_us"] > 2 * row["least_rtt_us"]  # the bytes in flight wait in a queue
    assert row["delivery_bytes_per_s"] > 0


# The process that records.


def recorded(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    turns: int,
    capsys: pytest.CaptureFixture[str],
    limit: int = 1 << 20,
    share: float = 1e9,
) -> str:
    """Record this process's connections for some turns without a pause; return what was printed.

    share: of a core that they may use; the default reads them every tenth turn.
    """
    monkeypatch.setattr(sampler, "CONNECTIONS_SHARE", share)
    about = {"rank": 0, "hostname": "h", "host_id": "i"}
    request = {"about": about, "hz": 100, "folder": str(folder), "limit_bytes": limit, "parent": os.getpid()}
    left = iter(range(turns))
    sampler.run({**request, "local_size": 1}, lambda _: next(left, None) is None)
    return capsys.readouterr().err


def test_a_host_without_sock_diag_records_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: Any) -> socket.socket:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "socket", refused)
    printed = recorded(tmp_path, monkeypatch, 30, capsys)
    assert printed.count("\n") == 1
    assert printed.startswith("netbottleneck: TCP connections are not recorded: ")
    assert len(counter_files.read_samples(tmp_path / "0.net.counters").time_ns) > 30
    assert not (tmp_path / "0.tcp.counters").exists()


@pytest.mark.parametrize("kind", [2, 3])
def test_an_error_of_the_kernel_ends_only_the_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: int
) -> None:
    real = sampler.messages

    def later_refused(data: bytes, sequence: int) -> Iterator[tuple[int, bytes]]:
        # Two requests a reading: the first reading opens, the second is recorded.
        yield from real(data, sequence) if sequence <= 4 else [(kind, struct.pack("=i", -2))]

    monkeypatch.setattr(sampler, "messages", later_refused)
    with pair():
        printed = recorded(tmp_path, monkeypatch, 100, capsys)
    assert (
        printed == "netbottleneck: TCP connections are not recorded: [Errno 2] sock_diag: No such file or directory\n"
    )
    assert len(counter_files.read_samples(tmp_path / "0.net.counters").time_ns) > 100
    assert len(counter_files.read_samples(tmp_path / "0.tcp.counters").time_ns) > 0


@pytest.mark.parametrize(("share", "readings"), [(1e-9, 0), (1e9, 22)])
def test_readings_are_as_far_apart_as_their_share_of_a_core_asks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    share: float,
    readings: int,
) -> None:
    with pair():
        assert recorded(tmp_path, monkeypatch, 200, capsys, share=share) == ""
    assert len(set(counter_files.read_samples(tmp_path / "0.tcp.counters").time_ns.tolist())) == readings


def test_a_full_file_keeps_whole_readings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pair(), pair(), pair():
        assert recorded(tmp_path, monkeypatch, 900, capsys, limit=8192) == ""
    found = counter_files.read_samples(tmp_path / "0.tcp.counters")
    assert (tmp_path / "0.tcp.counters").stat().st_size <= 8192
    times, rows = np.unique(found.time_ns, return_counts=True)
    assert len(times) > 2
    assert set(rows.tolist()) == {6}


def rows_of(*rows: Mapping[str, int]) -> counter_files.Counters:
    """Return counters of connections; what a row leaves out is 0."""
    values = np.array([[row.get(name, 0) for name in sampler.CONNECTION] for row in rows], np.int64)
    times = np.array([row["time_ns"] for row in rows], np.int64)
    return counter_files.Counters("h", "i", 0, 100, 100, sampler.CONNECTION, times, values)


def test_rows_become_connections_with_nan_for_what_is_absent() -> None:
    low = int.from_bytes(b"\xff\xff" + bytes((10, 0, 0, 1)), "big")
    one = {"rank": 1, "inode": 5, "local_low": low, "local_port": 70, "remote_high": -1, "remote_low": -1}
    found = counter_files.connections(
        rows_of(
            {**one, "time_ns": 1, "sent_segments": (1 << 32) - 1, "rtt_us": -1, "acked_bytes": 3},
            {"rank": 2, "inode": 6, "time_ns": 1},
            {**one, "time_ns": 2, "sent_segments": 4, "rtt_us": 8, "acked_bytes": 5},
        )
    )
    first = found[0]
    assert (first.rank, first.local, first.remote) == (1, ("10.0.0.1", 70), ("ffff:" * 7 + "ffff", 0))
    assert first.time_ns.tolist() == [1, 2]
    assert np.isnan(first.readings["rtt_us"]).tolist() == [True, False]
    assert np.diff(first.readings["sent_segments"]).tolist() == [5]  # a counter of 32 bits went round
    assert first.readings["acked_bytes"].tolist() == [3, 5]
    assert [(each.rank, len(each.time_ns)) for each in found] == [(1, 2), (2, 1)]


def test_columns_that_a_file_lacks_are_unknown_and_those_that_name_a_connection_are_required() -> None:
    whole = rows_of({"rank": 1, "time_ns": 1, "acked_bytes": 3}, {"rank": 1, "time_ns": 2, "acked_bytes": 4})
    (one,) = counter_files.connections(without(whole, "rtt_us"))
    assert np.isnan(one.readings["rtt_us"]).all()
    assert one.readings["acked_bytes"].tolist() == [3, 4]
    with pytest.raises(ValueError, match=r"rank 0: TCP connections without a column of .*remote_port"):
        counter_files.connections(without(whole, "remote_port"))


def without(counters: counter_files.Counters, column: str) -> counter_files.Counters:
    """Return counters without a column."""
    at = counters.columns.index(column)
    columns = (*counters.columns[:at], *counters.columns[at + 1 :])
    return replace(counters, columns=columns, values=np.delete(counters.values, at, axis=1))


def test_the_reader_knows_every_value_that_the_sampler_writes() -> None:
    assert set(counter_files.READINGS) == {*NAMES, "unread_bytes", "queued_bytes"}


# Use of the connections, and what a report says of them. Two ranks on two hosts; rank 1's clock is 5 s ahead.

SECOND = 10**9
AHEAD_NS = 5 * SECOND
STOCK, TCP = Arm("stock"), Arm("tcp")
LANE, GLOO = 7001, 6001
ADDRESSES = ("10.0.0.1", "10.0.0.2")


def run_of(arms: tuple[Arm, ...] = (STOCK, TCP), hosts: tuple[str, str] = ("a", "b")) -> Trace:
    """A run whose arms have two steps of one second each, in turn; an operation fills the second half of a step."""
    ranks = tuple(
        Rank(
            rank,
            host_id=hosts[rank],
            clock=Clock("heartbeat", AHEAD_NS * rank),
            transports=(TransportInfo("stock"), TransportInfo("tcp", ports=(LANE,))),
        )
        for rank in (0, 1)
    )
    steps, moved = [], []
    for number in range(2 * len(arms)):
        arm, begin = arms[number // 2], number * SECOND
        for rank in (0, 1):
            steps.append(Step(rank, number, number // 2, arm, begin, begin + SECOND))
            middle = begin + SECOND // 2
            moved.append(
                Collective(rank, arm, 1, number, middle, 8, step=number, start_ns=middle, done_ns=begin + SECOND)
            )
    return Trace("r", 2, arms, ranks=ranks, steps=tuple(steps), collectives=tuple(moved))


def end_rows(
    rank: int, ports: tuple[int, int], begin_s: float, every: Mapping[str, int] | None = None, **grow: int
) -> list[dict[str, int]]:
    """Return the readings of one end, each tenth of a second of four seconds, by its own clock.

    grow: what a value grows by in a second, from begin_s on for two seconds; every: values of each reading.
    """
    own, other = (int.from_bytes(b"\xff\xff" + socket.inet_aton(ADDRESSES[r]), "big") for r in (rank, 1 - rank))
    fixed = {"rank": rank, "inode": 10 + rank + ports[0], "local_low": own, "remote_low": other}
    fixed |= {"local_port": ports[0], "remote_port": ports[1]}
    fixed |= {
        "rtt_us": 1000,
        "least_rtt_us": 900,
        "delivery_bytes_per_s": -1,
        "window_segments": 10,
        "segment_bytes": 1000,
        **(every or {}),
    }
    rows = []
    for tenth in range(41):
        passed = min(max(tenth / 10 - begin_s, 0.0), 2.0)
        values = {name: round(by * passed) for name, by in grow.items()}
        rows.append({**fixed, **values, "time_ns": tenth * SECOND // 10 + AHEAD_NS * rank})
    return rows


def samples_of(*ends: list[dict[str, int]]) -> list[Samples]:
    """Return the two hosts' recordings."""
    rows = [row for end in ends for row in end]
    found = []
    for rank in (0, 1):
        own = sorted((row for row in rows if row["rank"] == rank), key=lambda row: row["time_ns"])
        found.append(Samples(rank, tcp=rows_of(*own)))
    return found


def both_ends(
    ports: tuple[int, int], begin_s: float, receiver: Mapping[str, int] | None = None, **grow: int
) -> list[list[dict[str, int]]]:
    """Return the two ends of a connection on which rank 0 sends."""
    return [
        end_rows(0, ports, begin_s, {"peer_window_bytes": 5000}, **grow),
        end_rows(1, (ports[1], ports[0]), begin_s, receiver, received_bytes=grow["acked_bytes"]),
    ]


SENT = {"acked_bytes": 10_000_000, "sent_segments": 10_000, "resent_segments": 50, "busy_us": 500_000}


def test_a_connection_belongs_to_the_arm_of_its_port_or_of_its_bytes() -> None:
    lane, gloo = both_ends((40000, LANE), 2, **SENT), both_ends((40001, GLOO), 0, **SENT)
    connected = usage.connections(run_of(), samples_of(*lane, *gloo), warmup=0)
    first, second = connected.ends
    assert [(end.arm, end.rank, end.peer, end.remote) for end in connected.ends] == [
        (STOCK, 0, 1, ("10.0.0.2", GLOO)),
        (TCP, 0, 1, ("10.0.0.2", LANE)),
    ]
    for end in (first, second):
        assert end.seconds == 1.0  # two operations of half a second
        assert end.sent_bytes == pytest.approx(20_000_000)
        assert end.segments == pytest.approx(20_000)
        assert end.resent_share == pytest.approx(0.005)
        assert (end.rtt_s, end.least_rtt_s, end.window_bytes) == (1e-3, 9e-4, 10_000)
        assert (end.busy_s, end.receiver_s, end.buffer_s) == (pytest.approx(1.0), 0.0, 0.0)
        assert end.network_share == 1.0
        assert end.reader_late is False


def test_a_connection_without_a_known_port_belongs_to_one_arm_only() -> None:
    gloo = both_ends((40001, GLOO), 0, **SENT)
    connected = usage.connections(run_of((STOCK, Arm("ofi"))), samples_of(*gloo), warmup=0)
    assert [end.arm for end in connected.ends] == [STOCK]
    later = both_ends((40001, GLOO), 2, **SENT)
    connected = usage.connections(run_of((STOCK, Arm("ofi"))), samples_of(*later), warmup=0)
    assert [end.arm for end in connected.ends] == ["ofi"]


def test_a_connection_that_is_not_between_ranks_is_left_out() -> None:
    gloo, other = both_ends((40001, GLOO), 0, **SENT), end_rows(0, (40002, 443), 0, **SENT)
    assert len(usage.connections(run_of(), samples_of(*gloo, other), warmup=0).ends) == 1
    # The other end may be on the host that was not recorded.
    alone = [samples_of(*gloo, other)[0]]
    ends = usage.connections(run_of(), alone, warmup=0).ends
    assert sorted((end.remote[1], end.peer, end.reader_late) for end in ends) == [(443, None, None), (GLOO, None, None)]


def test_a_connection_to_a_rank_that_the_sampler_does_not_see_is_kept() -> None:
    gloo, hidden = both_ends((40001, GLOO), 0, **SENT), end_rows(0, (40002, 7777), 0, **SENT)
    samples, whole = samples_of(*gloo, hidden), run_of()
    assert len(usage.connections(whole, samples, warmup=0).ends) == 1
    third = replace(whole.ranks[1], rank=2)  # on a recorded host, as another user or in another PID namespace
    more = replace(whole, size=3, ranks=(*whole.ranks, third))
    assert sorted(end.remote[1] for end in usage.connections(more, samples, warmup=0).ends) == [GLOO, 7777]


def test_connections_with_few_bytes_do_not_count() -> None:
    gloo, control = both_ends((40001, GLOO), 0, **SENT), both_ends((40003, 6002), 0, acked_bytes=90_000)
    assert [end.remote[1] for end in usage.connections(run_of(), samples_of(*gloo, *control), warmup=0).ends] == [GLOO]


def test_values_that_the_kernel_does_not_have_stay_unknown() -> None:
    old = {
        "least_rtt_us": -1,
        "peer_window_bytes": -1,
        "busy_us": -1,
        "receiver_limited_us": -1,
        "buffer_limited_us": -1,
    }
    ends = [end_rows(0, (40001, GLOO), 0, {**old, "delivery_bytes_per_s": -1}, acked_bytes=1000, sent_segments=5)]
    ends.append(end_rows(1, (GLOO, 40001), 0, received_bytes=1000))
    connected = usage.connections(run_of(), samples_of(*ends), warmup=0)
    (end,) = connected.ends
    unknown = (end.least_rtt_s, end.delivery_bps, end.busy_s, end.receiver_s, end.buffer_s, end.network_share)
    assert unknown == (None,) * 6
    assert end.reader_late is None
    limit = usage.limited(connected, STOCK)
    assert limit is not None
    assert limit.share == 0.0
    (row,) = text.connection_rows(connected)
    assert row[-2:] == ("-", "-")


def test_the_delivery_rate_is_of_readings_that_the_program_does_not_limit() -> None:
    rows = end_rows(0, (40001, GLOO), 0, **SENT)
    for number, row in enumerate(rows):
        row |= {"app_limited": number % 2, "delivery_bytes_per_s": 125_000 if number % 2 else 1_250_000}
    ends = (rows, end_rows(1, (GLOO, 40001), 0, received_bytes=10))
    (end,) = usage.connections(run_of(), samples_of(*ends), warmup=0).ends
    assert end.delivery_bps == 10_000_000


LIMITS = {"receive window": "receiver_limited_us", "send buffer": "buffer_limited_us"}


def limit_of(what: str, us: int, receiver: Mapping[str, int] | None = None, **every: int) -> usage.Limited:
    """Return the limit of a connection that is limited for `us` of each second of its steps, half of which are idle."""
    ends = both_ends((40001, GLOO), 0, receiver, **SENT, **{LIMITS[what]: us})
    for row in ends[0]:
        row.update(every)
    found = usage.limited(usage.connections(run_of(), samples_of(*ends), warmup=0), STOCK)
    assert found is not None
    return found


@pytest.mark.parametrize("what", LIMITS)
def test_limits_are_a_part_of_communication_time(what: str) -> None:
    found = limit_of(what, 200_000)
    assert (found.what, found.worst.rank) == (what, 0)
    assert found.share == pytest.approx(0.4)


@pytest.mark.parametrize("what", LIMITS)
def test_a_queue_in_the_network_is_no_small_buffer(what: str) -> None:
    assert limit_of(what, 200_000, rtt_us=1801).share == 0.0
    assert limit_of(what, 200_000, rtt_us=1800).share > 0.0


def test_a_receiver_that_does_not_read_in_time_has_no_small_window() -> None:
    assert limit_of("receive window", 200_000, {"unread_bytes": 5001}).share == 0.0
    assert limit_of("receive window", 200_000, {"unread_bytes": 5000}).share > 0.0
    assert limit_of("send buffer", 200_000, {"unread_bytes": 5001}).share > 0.0


@pytest.fixture
def unexplained(tmp_path: Path) -> findings.Findings:
    """A run with exposed communication, far below the link, that no other rule explains."""
    run = ring_reader.load(FakeRun(tmp_path, transports=("stock",), blocks=1, block_steps=12).write())
    return findings.find(replace(run, network=Network(link_bps=1e10)))


@pytest.mark.parametrize(
    ("what", "setting"), [("receive window", "tcp_rmem on rank 1's"), ("send buffer", "tcp_wmem on rank 0's")]
)
def test_buffers_that_limit_communication_are_a_wrong_configuration(
    unexplained: findings.Findings, what: str, setting: str
) -> None:
    def decided(us: int) -> verdict.Verdict:
        ends = both_ends((40001, GLOO), 0, **SENT, **{LIMITS[what]: us})
        return verdict.decide(unexplained, None, (), usage.connections(run_of(), samples_of(*ends), warmup=0))

    assert decided(95_000).code == "INCONCLUSIVE"
    found = decided(105_000)
    assert found.code == "MISCONFIGURED"
    assert f"The {what} limits stock's connections for 21 % of communication time" in found.why
    # 2 x 10 Gbit/s x 1 ms
    assert f"net.ipv4.{setting} host to 2 x link rate x round trip, here 2.4 MiB" in found.next
    without = verdict.decide(unexplained)
    assert without.code == "INCONCLUSIVE"


def test_packet_loss_is_named_from_its_share_on(unexplained: findings.Findings) -> None:
    def connected(**grow: int) -> usage.Connected:
        ends = both_ends((40001, GLOO), 0, **{**SENT, **grow})
        return usage.connections(run_of(), samples_of(*ends), warmup=0)

    def lines(**grow: int) -> list[str]:
        return text.connection_lines(connected(**grow))

    assert lines(resent_segments=99) == []
    assert lines(resent_segments=4, sent_segments=400) == []  # too few segments
    (line,) = lines(resent_segments=230)
    assert line.startswith("Packet loss: stock sent 2.3 % of 20000 segments from rank 0 to rank 1 again")
    found = verdict.decide(unexplained, None, (), connected(resent_segments=230))
    assert found.code == "INCONCLUSIVE"
    assert found.why.endswith(f"no rule explains them. {line}")
    assert "Packet loss" not in verdict.decide(unexplained, None, (), connected()).why


def test_the_report_has_the_worst_connections_and_the_total_of_each_arm(unexplained: findings.Findings) -> None:
    ends = []
    for number in range(5):
        limited = {"buffer_limited_us": 50_000 * number}
        ends += both_ends((40001 + number, GLOO), 0, **SENT, **limited)
    connected = usage.connections(run_of(), samples_of(*ends, *both_ends((40009, LANE), 2, **SENT)), warmup=0)
    rows = text.connection_rows(connected)
    assert [row[0] for row in rows] == [
        *(f"stock 0:{port} to 1" for port in (40005, 40004, 40003)),
        "stock, all 5",
        "tcp, all 1",
    ]
    assert rows[0][1:] == ("19.1 MiB", "0.50 %", "1.00", "-", "0%", "40%")
    assert rows[3][1] == "95.4 MiB"
    assert rows[3][-2:] == ("0%", "20%")
    judged = verdict.decide(unexplained)
    printed = text.text(unexplained, judged, (), connected)
    assert "stock 0:40005 to 1" in printed
    assert max(map(len, printed.splitlines())) <= text.WIDTH
    page = html.page(unexplained, judged, html.Recorded(connected=connected))
    assert "<td>stock 0:40005 to 1</td>" in page
    assert text.CONNECTIONS_TITLE not in html.page(unexplained, judged) + text.text(unexplained, judged)


def test_a_host_without_a_record_of_its_connections_is_named_and_lanes_to_it_stay_lanes() -> None:
    lane, gloo = both_ends((40000, LANE), 2, **SENT), both_ends((40001, GLOO), 0, **SENT)
    samples = samples_of(*lane, *gloo)
    whole = usage.connections(run_of(), samples, warmup=0)
    assert not whole.missing
    part = usage.connections(run_of(), [samples[0], replace(samples[1], tcp=None)], warmup=0)
    assert [(end.arm, end.remote) for end in part.ends] == [(end.arm, end.remote) for end in whole.ends]
    assert part.missing == (1,)
    assert text.connection_lines(part)[-1] == "Connections of rank 1's host were not recorded."


def test_connections_that_were_not_recorded_are_counted() -> None:
    ends = both_ends((40001, GLOO), 0, **SENT)
    for row in ends[0]:
        row["left_out"] = 3
    connected = usage.connections(run_of(), samples_of(*ends), warmup=0)
    assert text.connection_lines(connected) == ["3 connections with the fewest bytes were not recorded."]


# A run.

TRAINING = """
import os, time
import netbottleneck
import torch, torch.distributed as dist
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel
from netbottleneck.trace import counter_files

counters = Path(os.environ["NETBOTTLENECK_DIR"], "ranks", "0.tcp.counters")


def rows():
    try:
        return len(set(counter_files.read_samples(counters).time_ns.tolist()))
    except (FileNotFoundError, ValueError):
        return 0

def wait_for_readings(count):
    before = rows()
    while rows() < before + count:
        time.sleep(0.05)

torch.set_num_threads(1)
dist.init_process_group("gloo")
model_ = DistributedDataParallel(torch.nn.Linear(1000, 1000))
optimizer = torch.optim.SGD(model_.parameters(), lr=0.01)
length = int(os.environ["NETBOTTLENECK_BLOCK_STEPS"])
for step in range(4 * length):
    optimizer.zero_grad()
    model_(torch.randn(4, 1000)).sum().backward()
    # All bytes before the counted steps of a block, and all in them, are in a reading of the same steps.
    if step % length in (0, length - 1):
        wait_for_readings(5)
    optimizer.step()
dist.barrier()  # rank 0 keeps the readings that the others wait for
dist.destroy_process_group()
"""


def test_the_report_of_a_run_has_the_connections_of_both_arms(warm_ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    env = {
        "NETBOTTLENECK_TRANSPORT": "stock,tcp",
        "NETBOTTLENECK_STREAMS": "2",
        "NETBOTTLENECK_MONITOR_HZ": "100",
        "NETBOTTLENECK_START_STEP": "0",
        "NETBOTTLENECK_BLOCK_STEPS": "40",
        "NETBOTTLENECK_DIR": str(tmp_path / "run"),
    }
    warm_ranks(2, TRAINING, env)
    run = Run(tmp_path / "run")
    found = run.connections
    for rank in (0, 1):
        ports = {info.name: info.ports for info in run.trace.ranks[rank].transports}
        assert (len(ports["tcp"]), ports["stock"]) == (2, ())
        own = [end for end in found.ends if end.rank == rank]
        lanes = [end for end in own if end.arm == "tcp"]
        # Each rank sends over its own connections to the peer's lanes.
        assert {end.remote[1] for end in lanes} == set(run.trace.ranks[1 - rank].transports[1].ports)
        assert {end.peer for end in own} == {1 - rank}
        assert [end.arm for end in own].count(STOCK) >= 1
        for arm in (STOCK, TCP):
            steps = [step for step in counted(run.trace) if step.rank == rank and step.arm == arm]
            sent = sum(end.sent_bytes for end in own if end.arm == arm)
            # Two ranks: each sends the whole gradient once a step.
            assert sent == pytest.approx(len(steps) * 4 * (1000 * 1000 + 1000), rel=0.25)
    assert {name.partition(",")[0] for name, *_ in text.connection_rows(found)} >= {"stock", "tcp"}
    assert "stock, all" in run.text
    assert "tcp, all" in run.text
    assert text.CONNECTIONS_TITLE in run.html
    jsonschema.validate(run.summary, summary.schema())
    assert {end["transport"] for end in run.summary["connections"]} == {"stock", "tcp"}
    written = Run(run.path)
    written.write_all()
    assert Run(run.path).connections == found


OVER_A_DELAY = """
import netbottleneck
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(63, 1000))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(6):
    optimizer.zero_grad()
    model(torch.randn(4, 63)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def run_over_a_delay(folder: Path, setting: str = "", lost: int = 0) -> Run:
    """Return a run of two hosts with a round trip of 0.2 s: long beside the time that a busy machine adds to it.

    setting: of net.ipv4, whose maximum is 64 KiB; lost: every `lost`-th full packet is dropped. With small receive
    windows nothing is paced: while the kernel holds a packet back for its pace, it counts no full window.
    """
    pytest.importorskip("torch")
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("no TUN device on this machine")
    script = folder / "train.py"
    script.write_text(OVER_A_DELAY)
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "NETBOTTLENECK_TRANSPORT": "stock",
        "NETBOTTLENECK_MONITOR_HZ": "100",
        "NETBOTTLENECK_START_STEP": "0",
        "NETBOTTLENECK_DIR": str(folder / "run"),
        "GLOO_SOCKET_IFNAME": "tun0",
        "RES_OPTIONS": "timeout:1 attempts:1",  # torch looks up names, and there is no name server
    }
    with open_lab(2, "none") as lab:
        for rank in (0, 1):
            delay = [sys.executable, "-I", str(Path(__file__).parent / "scripts" / "delay.py")]
            delay += [lab.address(rank), lab.address(1 - rank), f"10.99.0.{rank + 1}", "0.1", str(lost)]
            started = lab.popen(rank, delay, stdout=subprocess.PIPE, text=True)
            assert started.stdout is not None
            assert started.stdout.readline() == "ready\n"
            values = {setting: "4096 16384 65536"} if setting else {}
            if setting == "tcp_rmem":
                values["tcp_congestion_control"] = "reno"
            for name, value in values.items():
                change = ["sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}"]
                assert lab.popen(rank, change).wait(DEADLINE_S) == 0
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        running = [lab.popen(rank, [sys.executable, str(script)], env, **pipes) for rank in (0, 1)]
        errors = [process.communicate(timeout=DEADLINE_S)[1] for process in running]
        assert [process.returncode for process in running] == [0, 0], errors
    run = Run(folder / "run")
    assert {end.peer for end in run.connections.ends} == {0, 1}
    # Of packets that were sent again, the kernel takes the time by timestamps, which count ms.
    assert all(end.least_rtt_s is not None and end.least_rtt_s >= 0.199 for end in run.connections.ends)
    return run


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("tcp_rmem", "The receive window limits stock's connections"),
        pytest.param("tcp_wmem", "The send buffer limits stock's connections", marks=pytest.mark.full),
        pytest.param("", "", marks=pytest.mark.full),
    ],
)
def test_small_buffers_over_a_long_path_are_found_in_a_run(tmp_path: Path, setting: str, words: str) -> None:
    run = run_over_a_delay(tmp_path, setting)
    (cause,) = [one for one in run.verdict.evidence if one.code == "MISCONFIGURED"]
    assert cause.applies == bool(setting), run.connections.ends
    assert words in cause.why
    assert f"net.ipv4.{setting}" in cause.next or not setting
    assert text.connection_lines(run.connections) == []


@pytest.mark.full
def test_packets_lost_in_a_run_are_named(tmp_path: Path) -> None:
    run = run_over_a_delay(tmp_path, lost=40)
    lines = text.connection_lines(run.connections)
    assert len(lines) == 1
    assert lines[0].startswith("Packet loss: stock sent ")
    for end in run.connections.ends:
        assert end.resent_segments is not None
        assert end.segments is not None
        assert end.resent_segments >= 0.9 * end.segments / 40  # nothing lost arrives but by being sent again
