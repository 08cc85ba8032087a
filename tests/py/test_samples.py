"""A host's counters: recorded by a process that ends with its rank, always readable, evaluated over intervals."""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import RANKS_LIMIT_S

from netbottleneck.analysis import traffic, usage
from netbottleneck.analysis.arrivals import BY_OPERATIONS, _moved
from netbottleneck.analysis.intervals import counted, intervals
from netbottleneck.config import settings
from netbottleneck.launch import connect
from netbottleneck.report import Run
from netbottleneck.runtime import monitor, sampler
from netbottleneck.runtime.session import open_session
from netbottleneck.trace import counter_files
from netbottleneck.trace.counter_files import Counters, Samples
from netbottleneck.trace.machine import machine_id
from netbottleneck.trace.model import Clock, Collective, Rank, Step, Trace
from netbottleneck.trace.transports import Arm
from ringwriter import FakeRun

DEADLINE_S = RANKS_LIMIT_S
PLACE = connect.Place(0, 1, 0, 1, 0, 1)
PARENT = """
import sys, time
from pathlib import Path
from netbottleneck.launch import connect
from netbottleneck.runtime import monitor
from netbottleneck.config import settings
end = monitor.watch(settings({"monitor_hz": 200}, {}), connect.Place(0, 1, 0, 1, 0, 1), Path(sys.argv[1]))
print("started", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the process that samples more time to end than a rank gives it: here it shares the processors."""
    monkeypatch.setattr(monitor, "END_S", DEADLINE_S)


def wait_for(true: Callable[[], bool], what: str) -> None:
    """Wait for a condition, with a deadline."""
    until = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < until, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.01)


def sampling(folder: Path) -> list[int]:
    """Return the processes that write counters to a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if b"sampler.py" in line and str(folder).encode() in line:
            found.append(int(path.parent.name))
    return found


def rows(folder: Path, kind: str = "net") -> int:
    """Return the number of rows."""
    try:
        return len(counter_files.read_samples(folder / f"0.{kind}.counters").time_ns)
    except (FileNotFoundError, ValueError):
        return 0


def watching(folder: Path, **options: Any) -> Callable[[], None]:
    """Record to a folder, at a high rate."""
    return monitor.watch(settings({"monitor_hz": 500}, {}), PLACE, folder, **options)


def test_counters_rise_at_true_times_until_the_rank_ends_it(tmp_path: Path) -> None:
    end = watching(tmp_path)
    wait_for(lambda: min(rows(tmp_path), rows(tmp_path, "host")) > 20, "rows")
    end()
    assert sampling(tmp_path) == []
    net, host = (
        counter_files.read_samples(tmp_path / "0.net.counters"),
        counter_files.read_samples(tmp_path / "0.host.counters"),
    )
    assert "lo" in net.owners("rx_bytes")
    assert len(host.owners("softirq")) == os.cpu_count()
    assert "tcp:retransmitted_segments" in host.columns
    for counters in (net, host):
        assert counters.hz == 500
        assert (np.diff(counters.time_ns) > 0).all()
        # The kernel lets iowait decrease: a core that waits for I/O runs other tasks (filesystems/proc.rst).
        rising = [place for place, name in enumerate(counters.columns) if not name.endswith(":iowait")]
        assert (np.diff(counters.values[:, rising], axis=0) >= 0).all()


def test_what_the_loopback_carries_is_counted(tmp_path: Path) -> None:
    import socket

    end = watching(tmp_path)
    wait_for(lambda: rows(tmp_path) > 0, "the first row")
    payload = 8 << 20
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as out:
        came, _ = door.accept()
        with came:
            left = payload
            while left:
                out.sendall(bytes(1 << 16))
                got = 0
                while got < 1 << 16:
                    got += len(came.recv(1 << 16))
                left -= 1 << 16
    end()
    net = counter_files.read_samples(tmp_path / "0.net.counters")
    assert net.column("lo:tx_bytes")[-1] - net.column("lo:tx_bytes")[0] >= payload


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_a_killed_rank_and_its_files_are_valid(tmp_path: Path, signum: int) -> None:
    rank = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "started\n"
    wait_for(lambda: rows(tmp_path) > 3, "rows")
    assert len(sampling(tmp_path)) == 1
    rank.send_signal(signum)
    rank.communicate()
    wait_for(lambda: sampling(tmp_path) == [], "the end of the process")
    assert rows(tmp_path) > 3


def test_it_ends_although_a_child_of_the_rank_lives_on(tmp_path: Path) -> None:
    forking = PARENT.replace("import sys", "import os, sys").replace(
        'print("started"', 'child = os.fork()\nif child == 0:\n    time.sleep(60)\nprint("started", child'
    )
    rank = subprocess.Popen([sys.executable, "-c", forking, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    child = int(rank.stdout.readline().split()[1])
    try:
        wait_for(lambda: rows(tmp_path) > 3, "rows")
        rank.kill()
        rank.wait()
        wait_for(lambda: sampling(tmp_path) == [], "the end of the process")
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)
        rank.communicate()


def test_a_script_that_waits_for_any_child_gets_only_its_own(tmp_path: Path) -> None:
    script = PARENT.replace("time.sleep(60)", "")
    script = "import signal\nsignals = []\nsignal.signal(17, lambda number, _: signals.append(number))\n" + script
    script += """
import os
child = os.fork()
if child == 0:
    os._exit(7)
assert os.wait() == (child, 7 << 8)
assert signals == [17]  # of that child
def children():
    try:
        print(os.waitpid(-1, os.WNOHANG))
    except ChildProcessError:
        print("no child")
children()
end()
children()
"""
    rank = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True
    )
    assert rank.stdout == "started\nno child\nno child\n"
    assert sampling(tmp_path) == []


@pytest.mark.parametrize("process_1", [True, False])
def test_a_rank_that_would_adopt_it_starts_none(tmp_path: Path, process_1: bool) -> None:
    command = ["unshare", "--pid", "--fork", sys.executable] if process_1 else [sys.executable]
    if process_1 and subprocess.run([*command, "-c", ""], capture_output=True, check=False, timeout=60).returncode:
        pytest.skip("no PID namespace can be made")
    subreaper = "" if process_1 else "import ctypes\nctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
    script = subreaper + PARENT.replace("time.sleep(60)", "end()")
    rank = subprocess.run(
        [*command, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert "the host's counters are not recorded: this process adopts orphans" in rank.stderr
    assert not list(tmp_path.iterdir())


def test_it_ends_at_once_although_a_child_has_the_socket_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    end = watching(tmp_path)
    child = os.fork()
    if child == 0:
        time.sleep(DEADLINE_S)
        os._exit(0)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda pid, _: killed.append(pid))
            end()
        assert killed == []
        assert sampling(tmp_path) == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_it_says_why_it_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "0.net.counters").mkdir()
    notes: list[str] = []
    end = watching(tmp_path, note=notes.append)
    wait_for(lambda: "recording of the host's counters stops" in capfd.readouterr().err, "its line")
    end()
    (note,) = notes
    assert "counters ended before the run: [Errno 21]" in note
    assert note in caplog.text


def test_a_frozen_script_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    watching(tmp_path)()
    assert "the host's counters are not recorded: " in caplog.text
    assert not list(tmp_path.iterdir())


def test_an_arm_whose_blocks_are_short_for_the_readings_is_left_out() -> None:
    second = 10**9

    def mixed(*arms: str, hz: int) -> list[tuple[str, bool]]:
        times = [round(second / hz * k) for k in range(20 * hz)]
        names = {f"e:{way}_{what}": times for way in usage.WAYS for what in ("bytes", "packets")}
        steps = tuple(
            Step(0, at, at // 4, Arm(arms[at // 4 % len(arms)]), at * second, (at + 1) * second) for at in range(16)
        )
        trace = Trace("r", 2, tuple(map(Arm, arms)), ranks=(Rank(0, host_id="i"),), steps=steps)
        return [(use.arm, use.mixed) for use in usage.hosts(trace, [Samples(0, counters(names, times))])]

    assert mixed("stock", "tcp", hz=3) == [("stock", False), ("tcp", False)]
    assert mixed("stock", "tcp", hz=1) == [("stock", True), ("tcp", True)]
    assert mixed("stock", "bare", hz=1) == [("stock", False), ("bare", False)]  # the same bytes go the same way
    assert mixed("stock", "bare", "tcp", hz=1) == [("stock", False), ("bare", False), ("tcp", True)]


@pytest.mark.parametrize("how", ["evaluation", "checkpoints", "long"])
def test_what_moves_in_an_unusual_step_is_not_in_the_bytes_of_the_others(how: str) -> None:
    """Each 51st step moves 1 MB a second, the others 1 kB a second; two readings a second."""
    ms = 10**6
    steps: list[Step] = []
    moved, at = [(0, 0.0)], 0
    for index in range(204):
        unusual = index % 51 == 0
        length = (300 if unusual and how == "long" else 100) * ms
        known = {how: ((at, at + length),)} if unusual and how != "long" else {}
        steps.append(Step(0, index, index // 51, Arm("stock"), at, at + length, **known))  # type: ignore[arg-type]
        at += length
        moved.append((at, moved[-1][1] + (1e6 if unusual else 1e3) * length / 1e9))
    times = list(range(0, at, 500 * ms))
    values = [round(value) for value in np.interp(times, *zip(*moved, strict=True)).tolist()]
    net = counters({f"e:{way}_{what}": values for way in usage.WAYS for what in ("bytes", "packets")}, times)
    trace = Trace("r", 2, (Arm("stock"),), ranks=(Rank(0, host_id="i"),), steps=tuple(steps))
    (use,) = usage.hosts(trace, [Samples(0, net)])
    assert not use.mixed
    inside = len(usage.steps_inside(counted(trace), use.recorded))
    assert [one.bytes for one in use.interfaces] == pytest.approx([100.0 * inside] * 2, rel=0.01)


@pytest.mark.parametrize("gap_ms", [0, 30])
def test_steps_move_the_same_bytes_however_long_they_take(gap_ms: int) -> None:
    """Two of three steps take 100 ms and the third 300 ms, as on a busy machine; nothing moves between them."""
    ms, arm = 10**6, Arm("tcp")
    steps: list[Step] = []
    moved: list[tuple[int, float]] = []
    at = 0
    for index in range(120):
        length = (300 if index % 3 == 2 else 100) * ms
        steps.append(Step(0, index, 0, arm, at, at + length))
        moved += [(at, 1000.0 * index), (at + length, 1000.0 * (index + 1))]
        at += length + gap_ms * ms
    times = list(range(0, at, 10 * ms))
    values = [round(value) for value in np.interp(times, *zip(*moved, strict=True)).tolist()]
    net = counters({f"e:{way}_{what}": values for way in usage.WAYS for what in ("bytes", "packets")}, times)
    of = [
        Collective(0, arm, 1, s.index, s.begin_ns, 1000, step=s.index, start_ns=s.begin_ns, done_ns=s.end_ns)
        for s in steps
    ]
    ranks = (Rank(0, host_id="i"), Rank(1, host_id="other"))
    trace = Trace("r", 2, (arm,), ranks=ranks, steps=tuple(steps), collectives=tuple(of))
    (found,) = uses = usage.hosts(trace, [Samples(0, net)])
    assert not found.mixed
    unseen = traffic.unseen(trace, arm, uses)
    assert unseen is not None
    assert unseen.part == pytest.approx(0.0, abs=0.02)


def test_a_killed_writer_leaves_complete_rows(tmp_path: Path) -> None:
    end = watching(tmp_path)
    wait_for(lambda: rows(tmp_path) > 5, "rows")
    (pid,) = sampling(tmp_path)
    os.kill(pid, signal.SIGKILL)
    end()
    assert rows(tmp_path) > 5


def test_a_full_file_keeps_every_second_row_over_the_complete_time(tmp_path: Path) -> None:
    limit = 16384
    end = watching(tmp_path, limit_bytes=limit)
    path = tmp_path / "0.net.counters"
    wait_for(path.exists, "the file")
    first = path.stat().st_ino
    wait_for(lambda: rows(tmp_path) > 0, "rows")
    opened = counter_files.read_samples(path).time_ns[0]
    wait_for(lambda: path.stat().st_ino != first, "a thinner file")
    end()
    assert path.stat().st_size <= limit
    assert counter_files.read_samples(path).time_ns[0] == opened


DEV = "Inter-|   Receive |  Transmit\n face |bytes packets\n"


def proc(folder: Path, dev: str, stat: str) -> None:
    """Write the kernel's files."""
    (folder / "net").mkdir(exist_ok=True)
    (folder / "net" / "dev").write_text(DEV + dev)
    (folder / "stat").write_text(stat + "intr 1 2 3\n")
    (folder / "net" / "snmp").write_text("Tcp: OutSegs RetransSegs\nTcp: 70 7\nUdp: A\nUdp: 1\n")


def test_all_interfaces_are_read_though_the_kernel_returns_a_page_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "PROC", tmp_path)
    read = os.pread
    monkeypatch.setattr(sampler.os, "pread", lambda fd, count, at: read(fd, min(count, 500), at))
    names = [f"veth{number}" for number in range(40)]
    proc(tmp_path, "".join(f"{name}: 1 2 0 3 0 0 0 0 4 5 0 6 0 0 0 0\n" for name in names), "")
    assert sampler.Net().interfaces == names[: sampler.MOST_INTERFACES]
    assert sampler.Net().read() == [1, 2, 3, 4, 5, 6] * len(sampler.Net().interfaces)


def test_removed_interfaces_keep_their_last_values_and_new_ones_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "PROC", tmp_path)
    numbers = "1 2 0 3 0 0 0 0 4 5 0 6 0 0 0 0"
    proc(
        tmp_path, f"  lo: {numbers}\neth0:{numbers}\n", "cpu  9 9\ncpu0 1 2 3 4 5 6 7 8 0 0\ncpu5 1 1 1 1 1 1 1 1 0 0\n"
    )
    net, host = sampler.Net(), sampler.Host()
    assert (net.interfaces, host.cores) == (["lo", "eth0"], [0, 5])
    assert net.read() == [1, 2, 3, 4, 5, 6] * 2
    assert host.read() == [3, 9, 7, 5, 8, 4, 2, 2, 1, 1, 1, 1, 70, 7]
    proc(
        tmp_path, f"eth0:9{numbers}\nnew0:{numbers}\n", "cpu  9 9\ncpu0 2 2 3 4 5 6 7 8 0 0\ncpu6 1 1 1 1 1 1 1 1 0 0\n"
    )
    assert net.read() == [1, 2, 3, 4, 5, 6, 91, 2, 3, 4, 5, 6]
    assert host.read()[:7] == [4, 9, 7, 5, 8, 4, 2]


def test_disabled_it_starts_no_process(tmp_path: Path) -> None:
    monitor.watch(settings({"monitor_hz": 0}, {}), PLACE, tmp_path / "none")()
    monitor.watch(settings({"monitor_hz": 100}, {}), connect.Place(1, 2, 1, 2, 0, 1), tmp_path / "none")()
    assert not (tmp_path / "none").exists()


def test_training_continues_if_the_host_cannot_be_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    monitor.watch(settings({"monitor_hz": 100}, {}), PLACE, tmp_path / "file" / "ranks")()
    assert "not recorded" in caplog.text


COLUMNS = ["time_ns", "eth0:rx_bytes", "eth0:rx_packets", "eth0:tx_bytes", "eth0:tx_packets"]


def written(path: Path, about: dict[str, Any] | None = None, body: bytes = b"", version: int = 1) -> Path:
    """Write a file of counters."""
    head = {"hostname": "h", "host_id": "i", "rank": 0, "hz": 100, "ticks_per_s": 100, "columns": ["time_ns", "a:b"]}
    text = json.dumps(head | (about or {})).encode()
    path.write_bytes(struct.pack("<8sII", b"NBCOUNT\0", version, 16 + len(text)) + text + body)
    return path


def test_a_row_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    found = counter_files.read_samples(
        written(tmp_path / "0.net.counters", body=struct.pack("<4q", 1, 2, 3, 4) + b"1234567")
    )
    assert found.time_ns.tolist() == [1, 3]
    assert found.column("a:b").tolist() == [2, 4]


def test_the_end_of_a_file_is_read_without_the_rest(tmp_path: Path) -> None:
    rows = b"".join(struct.pack("<2q", at, 2 * at) for at in range(9))
    path = written(tmp_path / "0.net.counters", body=rows + b"cut")
    assert counter_files.read_samples(path).time_ns.tolist() == list(range(9))
    assert counter_files.read_samples(path, 3 * 16 + 5).time_ns.tolist() == [6, 7, 8]
    assert counter_files.read_samples(path, 10**6).column("a:b").tolist() == [2 * at for at in range(9)]


def test_an_invalid_file_of_counters_is_named(tmp_path: Path) -> None:
    path = tmp_path / "0.net.counters"
    for make, message in (
        (lambda: path.write_bytes(b""), "not a file of counters"),
        (lambda: path.write_bytes(b"NBRING1\0" + bytes(100)), "not a file of counters"),
        (lambda: written(path, version=2), "version 2"),
        (lambda: written(path, {"columns": []}), "damaged"),
        (lambda: written(path, {"columns": None}), "damaged"),
        (lambda: path.write_bytes(written(path).read_bytes()[:40]), "damaged"),
        (lambda: path.write_bytes(struct.pack("<8sII", b"NBCOUNT\0", 1, 1 << 30) + b"{}"), "damaged"),
    ):
        make()
        with pytest.raises(ValueError, match=message) as raised:
            counter_files.read_samples(path)
        assert str(path) in str(raised.value)


def test_a_report_is_made_without_counters_that_cannot_be_read(tmp_path: Path) -> None:
    ranks = FakeRun(tmp_path, size=3, blocks=6).write() / "ranks"
    damaged = [ranks / name for name in ("1.net.counters", "2.net.counters", "0.tcp.counters")]
    damaged[0].write_bytes(b"")
    written(damaged[1], version=2)
    damaged[2].write_bytes(written(damaged[2]).read_bytes()[:40])
    written(ranks / "0.net.counters", {"columns": COLUMNS}, struct.pack("<10q", *range(1, 11)))
    run = Run(tmp_path)
    run.write_all()
    notes = [note for note in run.summary["notes"] if note.startswith("left out: ")]
    assert sorted(note.split(": ")[1] for note in notes) == sorted(map(str, damaged))
    (sample,) = counter_files.of_run(tmp_path)
    assert (sample.rank, sample.host, sample.tcp) == (0, None, None)


@pytest.mark.parametrize(
    ("kind", "columns", "missing"),
    [
        ("net", ["lo:rx_dropped", "lo:rx_dropqed", *COLUMNS[1:]], "eth0:rx_dropped"),
        ("net", [*COLUMNS[1:4], "eth0:ux_packets"], "eth0:tx_packets"),
        ("host", ["cpu0:user", "cpu0:idle", "cpu1:user", "cpu1:hdle"], "cpu0:hdle"),
        ("tcp", ["rank", "hnode", *counter_files.CONNECTION_COLUMNS[2:]], "inode"),
    ],
)
def test_counters_with_a_damaged_name_of_a_column_are_left_out(
    kind: str, columns: list[str], missing: str, tmp_path: Path
) -> None:
    path = FakeRun(tmp_path, size=2, blocks=2).write() / "ranks" / f"0.{kind}.counters"
    written(path, {"columns": ["time_ns", *columns]}, bytes(16 * (1 + len(columns))))
    run = Run(tmp_path)
    run.write_all()
    (note,) = (note for note in run.summary["notes"] if note.startswith("left out: "))
    assert note == f"left out: {path}: damaged head: no column {missing}"


def test_counters_that_were_reset_go_on_from_their_last_value(tmp_path: Path) -> None:
    ranks = FakeRun(tmp_path, size=2, blocks=1).write() / "ranks"
    rising = [100, 300, 10, 60, 60]
    body = b"".join(struct.pack("<5q", 10 * at, value, 0, at, 0) for at, value in enumerate(rising))
    written(ranks / "0.net.counters", {"hostname": "host0", "columns": COLUMNS}, body)
    (sample,) = counter_files.of_run(tmp_path)
    assert sample.net is not None
    assert sample.net.column("eth0:rx_bytes").tolist() == [100, 300, 300, 350, 350]
    assert sample.net.column("eth0:tx_bytes").tolist() == [0, 1, 2, 3, 4]
    (note,) = (note for note in Run(tmp_path).findings.trace.notes if "backwards" in note)
    assert note == "counters of host0 went backwards, and count as 0 there: eth0:rx_bytes"


def covering(folder: Path, part: float, left_out: int = 0) -> tuple[str, ...]:
    """Return the notes of a run whose host 0 has readings over a part of its time."""
    ranks = FakeRun(folder, size=2, blocks=2).write() / "ranks"
    steps = [step for step in Run(folder).trace.steps if step.rank == 0]
    begin, end = min(step.begin_ns for step in steps), max(step.end_ns for step in steps)
    body = b"".join(struct.pack("<5q", at, 0, 0, 0, 0) for at in (begin, begin + round(part * (end - begin))))
    written(ranks / "0.net.counters", {"hostname": "host0", "columns": COLUMNS, "left_out": left_out}, body)
    return Run(folder).findings.trace.notes


def test_a_report_says_what_the_counters_of_a_host_lack(tmp_path: Path) -> None:
    assert covering(tmp_path / "whole", 0.98) == ()
    (note,) = covering(tmp_path / "half", 0.5)
    assert note.startswith("the counters of host0 cover 50 % of its steps' time")
    assert covering(tmp_path / "many", 1.0, 3) == ("3 interfaces of host0 are not recorded",)


def test_a_sampler_that_ended_before_the_run_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notes: list[str] = []
    end = monitor.watch(settings({"monitor_hz": 500}, {}), PLACE, tmp_path, note=notes.append)
    wait_for(lambda: rows(tmp_path) > 0, "the first row")
    (process,) = sampling(tmp_path)
    handle = os.pidfd_open(process)
    os.kill(process, signal.SIGKILL)
    wait_for(lambda: bool(select.select([handle], [], [], 0)[0]), "its end")  # its files are closed by then
    os.close(handle)
    end()
    (note,) = notes
    assert note.endswith("counters ended before the run, because its process was killed")
    assert note in caplog.text
    notes.clear()
    watching(tmp_path / "well", note=notes.append)()
    assert notes == []


def counters(columns: dict[str, list[int]], time_ns: list[int], offset_ns: int = 0) -> Counters:
    """Return counters by column."""
    return Counters(
        *("h", "i", 0, 100, 100),
        tuple(columns),
        np.array(time_ns, np.int64) + offset_ns,
        np.array(list(columns.values()), np.int64).T.reshape(len(time_ns), len(columns)),
    )


def test_average_and_active_are_rates_over_their_own_spans() -> None:
    net = counters({"e:tx_bytes": [7, 1007, 1007, 2007], "e:tx_packets": [0, 1, 1, 2]}, [0, 100, 200, 300])
    use = usage.interface(net, "e", "tx", intervals([(0, 400)]), intervals([(0, 100), (200, 250)]))
    # As far as it was recorded: 300 ns, and 150 ns with 1500 bytes in them.
    assert use.bytes == 2000
    assert use.average_bps == pytest.approx(8 * 2000 / 300e-9)
    assert use.active_bps == pytest.approx(8 * 1500 / 150e-9)
    assert usage.interface(net, "e", "tx", intervals([(0, 400)]), intervals([(900, 999)])).active_bps is None


def test_cores_are_shares_by_kind() -> None:
    ticks = {f"cpu{core}:{kind}": [0, 0] for core in (0, 1) for kind in sampler.CPU}
    ticks |= {"cpu0:user": [5, 65], "cpu0:softirq": [0, 40], "cpu1:idle": [0, 100]}
    found = usage.cores(counters(ticks, [0, 10**9]), intervals([(0, 10**9)]))
    assert found is not None
    assert found.mean["user"] == 0.3
    assert (found.busiest, found.busiest_share, found.softirq_most) == ("cpu0", 1.0, 0.4)
    assert usage.cores(counters(ticks, [0, 10**9]), intervals([(0, 10)])) is None


def test_a_hosts_counters_are_on_the_clock_of_rank_0_in_the_steps_of_its_ranks() -> None:
    second = 10**9
    still = [0] * 9
    bytes_in = {"e:rx_bytes": [100 * k for k in range(9)], "e:rx_packets": list(range(9))}
    times = [second // 2 * k for k in range(9)]
    net = counters({**bytes_in, "e:tx_bytes": still, "e:tx_packets": still}, times, 77 * second)
    trace = Trace(
        "r",
        2,
        (Arm("tcp"),),
        ranks=(Rank(0, host_id="i", clock=Clock("heartbeat", 77 * second)), Rank(1, host_id="other")),
        steps=tuple(Step(rank, 1, 0, Arm("tcp"), at, at + second) for rank in (0, 1) for at in (0, second, 9 * second)),
        collectives=(Collective(0, Arm("tcp"), 1, 0, 0, 8, start_ns=second, done_ns=2 * second),),
    )
    (found,) = usage.hosts(trace, [Samples(0, net)])
    # The first step of the block does not count; the last one was not recorded.
    assert (found.arm, found.seconds, found.active_s) == ("tcp", 2.0, 1.0)
    (use, _) = found.interfaces
    assert (use.way, use.average_bps, use.active_bps) == ("rx", 1600.0, 1600.0)
    short = replace(trace, collectives=(replace(trace.collectives[0], done_ns=second + second // 3),))
    (found,) = usage.hosts(short, [Samples(0, net)])
    assert found.active_s == pytest.approx(1 / 3)
    assert found.interfaces[0].active_bps is None  # shorter than two readings are apart
    # Whatever a rank of the same host moves is the host's.
    ranks = (trace.ranks[0], replace(trace.ranks[1], host_id="i"))
    beside = replace(trace, ranks=ranks, collectives=(replace(trace.collectives[0], rank=1),))
    assert [host.active_s for host in usage.hosts(beside, [Samples(0, net)])] == [1.0]
    apart = replace(beside, ranks=trace.ranks)
    assert [host.active_s for host in usage.hosts(apart, [Samples(0, net)])] == [0.0]


@pytest.mark.parametrize("foreign", [0, 1000])
def test_bytes_are_compared_with_the_operations_of_the_steps_that_were_read(foreign: int) -> None:
    second = 10**9
    steps = tuple(Step(0, at, 0, Arm("tcp"), at * second, (at + 1) * second) for at in range(10))
    times = [second // 2 * k for k in range(13, 22)]  # from the middle of step 6 on
    rising = [(1000 + foreign) // 2 * k for k in range(9)]
    net = counters({f"e:{way}_{what}": rising for way in usage.WAYS for what in ("bytes", "packets")}, times)
    moved = [
        Collective(0, Arm("tcp"), 1, s.index, s.begin_ns, 1000, step=s.index, start_ns=s.begin_ns, done_ns=s.end_ns)
        for s in steps
    ]
    ranks = (Rank(0, host_id="i"), Rank(1, host_id="other"))
    trace = Trace("r", 2, (Arm("tcp"),), ranks=ranks, steps=steps, collectives=tuple(moved))
    (found,) = uses = usage.hosts(trace, [Samples(0, net)])
    assert {use.bytes for use in found.interfaces} == {3 * (1000 + foreign)}  # steps 7 to 9
    unseen = traffic.unseen(trace, Arm("tcp"), uses)
    assert unseen is not None
    assert unseen.part == pytest.approx(foreign / (1000 + foreign))
    assert traffic.carriers(trace, Arm("tcp"), uses) == {("i", "e")}


def test_counters_are_compared_with_steps_on_the_aligned_clock(tmp_path: Path) -> None:
    ranks = FakeRun(tmp_path, transports=("stock",)).write() / "ranks"
    times = range(0, 60 * 10**9, 10**7)
    columns = ["time_ns", "eth0:rx_bytes", "eth0:rx_packets", "eth0:tx_bytes", "eth0:tx_packets"]
    body = b"".join(struct.pack("<5q", at, *(4 * [at])) for at in times)
    written(ranks / "1.net.counters", {"rank": 1, "hostname": "host1", "host_id": "h1", "columns": columns}, body)
    run = Run(tmp_path)
    right = run.hosts
    # The clock of rank 1 as its wall time gives it, 100 s from the one that the operations show.
    wrong = _moved(run.trace, 1, -100 * 10**9, 0)
    clock = replace(wrong.ranks[1].clock, method="wall", error_ns=None)
    moved = Run(tmp_path)
    moved.trace = replace(wrong, ranks=(wrong.ranks[0], replace(wrong.ranks[1], clock=clock)))
    assert moved.findings.trace.ranks[1].clock.method == BY_OPERATIONS
    assert [host.recorded for host in moved.hosts] == [host.recorded for host in right]
    base = right[0].arm
    assert traffic.unseen(moved.findings.trace, base, moved.hosts) == traffic.unseen(run.findings.trace, base, right)


def test_a_run_is_recorded_and_reported(tmp_path: Path) -> None:
    chosen = settings(
        {"monitor_hz": 200, "transports": "null", "directory": str(tmp_path / "run"), "start_step": 0}, {}
    )
    session = open_session(chosen)
    for _ in range(4):  # each with readings enough, as a step of twice the median counts as unusual
        session.begin()
        enough = rows(session.folder / "ranks") + 2 * usage.ARM_READINGS
        wait_for(lambda enough=enough: rows(session.folder / "ranks") > enough, "rows")  # type: ignore[misc]
        session.end()
    session.close()
    assert sampling(session.folder) == []
    run = Run(session.folder)
    (host,) = run.hosts
    assert host.seconds > 0
    assert run.summary["hosts"][0]["samples_per_s"] > 0
    assert run.trace.ranks[0].machine_id == machine_id() != connect.machine_digest().hex()
    run.write_all()
    assert Run(session.folder).hosts == run.hosts
