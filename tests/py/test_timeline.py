"""Horovod's timeline: events, the reader of a ring that is being written, the file, and real ranks."""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import os
import resource
import signal
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import RANKS_LIMIT_S, RankJob, Ranks, on_ranks

from netbottleneck import _core
from netbottleneck.config import settings
from netbottleneck.launch.connect import Place
from netbottleneck.runtime.timeline import Timeline, path_of
from netbottleneck.runtime.timeline_writer import ArrayFile, Chrome, Names, Negotiations, Tail, Writer
from netbottleneck.trace.events import Event
from netbottleneck.trace.ring_file import EVENTS, RING_HEADER_BYTES, read_ring
from netbottleneck.trace.ring_reader import DTYPES, KINDS

US = 1000
LIMIT_S = RANKS_LIMIT_S
RING, STAR, SHARED, TWO_LEVEL = 1, 8, 32, 34
MISMATCH = (1 << 64) - 1003

# events by hand


def event(kind: str, at: int, key: int = 7, *values: int) -> Event:
    """An event at a time in us; values: a, b, c, d, e."""
    return Event(kind, at * US, 0, key, *(*values, 0, 0, 0, 0, 0)[:5])


def named(key: int, name: str) -> list[Event]:
    raw = name.encode()
    return [
        event("OP_NAME", 0, key, at, *struct.unpack("<4Q", raw[at : at + 32].ljust(32, b"\0")))
        for at in range(0, len(raw), 32)
    ]


def submit(at: int, turn: int = 0, key: int = 7, kind: str = "allreduce", dtype: str = "float32") -> Event:
    return event("OP_SUBMIT", at, key, turn, 64, 0, 0, KINDS.index(kind) | DTYPES.index(dtype) << 8)


def ready(at: int, rank: int, turn: int = 0, key: int = 7, kind: str = "allreduce") -> Event:
    return event("OP_READY", at, key, turn, rank, 0, KINDS.index(kind))


def run(at: int, turn: int = 0, key: int = 7, algorithm: int = RING) -> list[Event]:
    """Agreed at `at`, started 1 us later, first byte at 2, done at 5."""
    return [
        event("OP_AGREED", at, key, turn),
        event("OP_START", at + 1, key, turn),
        event("OP_FIRST_BYTE", at + 2, key, turn),
        event("OP_DONE", at + 5, key, turn, 64, 64, algorithm),
    ]


def play(
    events: Iterable[Event], rank: int = 0, network: str = "TCP", mark_cycles: bool = False, names: Names | None = None
) -> list[dict[str, Any]]:
    names = names or Names()
    chrome = Chrome(names, rank=rank, start_ns=0, mark_cycles=mark_cycles)
    made: list[dict[str, Any]] = []
    for one in events:
        names.take(one)
        made += chrome.take(one, network)
    return made


def spans(made: Sequence[dict[str, Any]]) -> list[str]:
    """Return "name begin-end" of each span of all tensors, inner ones with a dot before; they must nest.

    A span that is not closed has no end. X events stand as "=name at".
    """
    lines: list[list[Any]] = []
    open_by_pid: dict[int, list[list[Any]]] = {}
    for one in made:
        stack = open_by_pid.setdefault(one.get("pid", 0), [])
        if one["ph"] == "B":
            lines.append(["." * len(stack) + one["name"], one["ts"], ""])
            assert not stack or one["ts"] >= stack[-1][1], "a span begins before the one around it"
            stack.append(lines[-1])
        elif one["ph"] == "E":
            assert stack, "an end without a begin"
            last = stack.pop()
            assert one["ts"] >= last[1], "a span ends before it begins"
            last[2] = one["ts"]
        elif one["ph"] == "X":
            assert one["dur"] == 0
            lines.append([f"={one['name']}", one["ts"], None])
    return [f"{name} {begin}" if end is None else f"{name} {begin}-{end}" for name, begin, end in lines]


ONE = [*named(7, "allreduce.x"), submit(10), ready(11, 0), ready(14, 1), *run(15)]


def test_an_operation_has_horovods_events() -> None:
    activity = {"algorithm": "ring all-reduce", "bytes_out": 64, "bytes_in": 64, "first_byte_ts": 17}
    assert play(ONE) == [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.x"}},
        {"name": "process_sort_index", "ph": "M", "pid": 1, "args": {"sort_index": 1}},
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 10, "pid": 1},
        {"ph": "X", "name": "0", "ts": 11, "pid": 1, "dur": 0},
        {"ph": "X", "name": "1", "ts": 14, "pid": 1, "dur": 0},
        {"ph": "E", "ts": 15, "pid": 1},
        {"ph": "B", "name": "ALLREDUCE", "ts": 15, "pid": 1},
        {"ph": "B", "name": "QUEUE", "ts": 15, "pid": 1},
        {"ph": "E", "ts": 16, "pid": 1},
        {"ph": "B", "name": "TCP_ALLREDUCE", "ts": 16, "pid": 1, "args": activity},
        {"ph": "E", "ts": 20, "pid": 1},
        {"ph": "E", "ts": 20, "pid": 1, "args": {"dtype": "float32", "shape": "[16]"}},
    ]


def test_ranks_other_than_0_mark_themselves() -> None:
    written = spans(play([*named(7, "x"), submit(10), *run(15)], rank=3))
    assert written[:2] == ["NEGOTIATE_ALLREDUCE 10-15", "=3 10"]


@pytest.mark.parametrize(
    ("kind", "network", "algorithm", "top", "activity"),
    [
        ("allreduce", "TCP", RING, "ALLREDUCE", "TCP_ALLREDUCE"),
        ("allreduce", "OFI", RING, "ALLREDUCE", "OFI_ALLREDUCE"),
        ("allreduce", "OFI", SHARED, "ALLREDUCE", "SHM_ALLREDUCE"),
        ("allreduce", "OFI", SHARED + 1, "ALLREDUCE", "SHM_ALLREDUCE"),
        ("allreduce", "OFI", TWO_LEVEL, "ALLREDUCE", "OFI_ALLREDUCE"),
        ("allreduce", "OFI", STAR, "ALLREDUCE", "TCP_ALLREDUCE"),
        ("allgather", "TCP", 2, "ALLGATHER", "TCP_ALLGATHER"),
        ("reducescatter", "OFI", 3, "REDUCESCATTER", "OFI_REDUCESCATTER"),
        ("broadcast", "TCP", 4, "BROADCAST", "TCP_BCAST"),
        ("alltoall", "TCP", 7, "ALLTOALL", "TCP_ALLTOALL"),
    ],
)
def test_the_activity_names_the_transport(kind: str, network: str, algorithm: int, top: str, activity: str) -> None:
    events = [*named(7, "x"), submit(10, kind=kind), *run(15, algorithm=algorithm)]
    names = [line.split(" ", 1)[0].strip(".") for line in spans(play(events, 1, network))]
    assert names == [f"NEGOTIATE_{top}", "=1", top, "QUEUE", activity]


@pytest.mark.parametrize("kind", ["barrier", "join"])
def test_a_barrier_and_a_join_have_only_a_negotiation(kind: str) -> None:
    written = spans(play([*named(7, f"{kind}.noname"), submit(10, kind=kind), *run(15)], rank=1))
    assert written == [f"NEGOTIATE_{kind.upper()} 10-15", "=1 10"]


def test_pieces_are_joined_before_and_split_at_the_end() -> None:
    joined = event("OP_PACK", 5, 7, 0, 64, 0, 3 * US)
    parted = event("OP_PACK", 18, 7, 0, 64, 1, 1 * US)
    events = [*named(7, "x"), joined, submit(10), *run(15)]
    events.insert(-1, parted)
    assert spans(play(events, rank=1)) == [
        "MEMCPY_IN_FUSION_BUFFER 5-8",
        "NEGOTIATE_ALLREDUCE 10-15",
        "=1 10",
        "ALLREDUCE 15-20",
        ".QUEUE 15-16",
        ".TCP_ALLREDUCE 16-18",
        ".MEMCPY_OUT_FUSION_BUFFER 18-19",
    ]


def test_faster_ranks_appear_in_the_next_negotiation() -> None:
    first = [*named(7, "x"), submit(10), ready(11, 0), ready(14, 1), *run(15)]
    ahead = [*first[:-1], ready(18, 1, 1), first[-1]]  # rank 1 is done, and submits again, before rank 0 is
    second = [submit(30, 1), ready(31, 0, 1), *run(32, 1)]
    assert spans(play([*ahead, *second]))[6:] == [
        "NEGOTIATE_ALLREDUCE 20-32",
        "=1 18",
        "=0 31",
        "ALLREDUCE 32-37",
        ".QUEUE 32-33",
        ".TCP_ALLREDUCE 33-37",
    ]


def test_ranks_that_wait_for_rank_0_are_written_before_it_submits() -> None:
    known = Names()
    for one in [*named(7, "x"), submit(1)]:
        known.take(one)
    assert spans(play([ready(10, 2, 5)], names=known)) == ["NEGOTIATE_ALLREDUCE 10-", "=2 10"]


@pytest.mark.parametrize("place", range(1, 7))
def test_a_late_submit_event_does_not_change_the_file(place: int) -> None:
    in_order = [submit(10), ready(11, 0), ready(14, 1), *run(15)]
    late = [*in_order[1 : place + 1], in_order[0], *in_order[place + 1 :]]
    written = spans(play([*named(7, "x"), *late]))
    assert written == spans(play([*named(7, "x"), *in_order]))
    assert len(written) == 6


def test_a_mismatched_operation_has_no_activity() -> None:
    refused = event("OP_DONE", 15, 7, 0, 0, 0, 0, MISMATCH)
    made = play([*named(7, "x"), submit(10), ready(11, 0), refused, submit(20, 1), *run(22, 1)])
    assert spans(made)[:2] == ["NEGOTIATE_ALLREDUCE 10-15", "=0 11"]
    assert spans(made)[2] == "NEGOTIATE_ALLREDUCE 20-22"
    assert {"ph": "E", "ts": 15, "pid": 1, "args": {"error": -1003}} in made


def test_one_rank_alone_has_an_empty_negotiation() -> None:
    made = play([*named(7, "x"), submit(10), event("OP_DONE", 12, 7, 0)], rank=0)
    assert spans(made) == ["NEGOTIATE_ALLREDUCE 10-12", "ALLREDUCE 12-12"]


def test_a_failure_is_reported_at_the_end_of_the_operation() -> None:
    events = [*named(7, "x"), submit(10), *run(15)[:-1], event("OP_DONE", 19, 7, 0, 0, 0, RING, (1 << 64) - 104)]
    assert play(events, rank=1)[-1]["args"]["error"] == -104


def test_a_lost_end_leaves_nothing_open() -> None:
    events = [*named(7, "x"), submit(10), *run(15)[:-1], submit(30, 1), *run(35, 1)]
    written = spans(play(events, rank=1))
    assert written[2] == "ALLREDUCE 15-30"
    assert written[3:5] == ["NEGOTIATE_ALLREDUCE 30-35", "=1 30"]


@pytest.mark.parametrize("lost", range(7))
def test_begins_and_ends_pair_after_any_loss(lost: int) -> None:
    rounds = [[submit(10 + t, t // 50), ready(11 + t, 0), *run(15 + t, t // 50)] for t in range(0, 200, 50)]
    events = list(itertools.chain(*rounds))
    assert spans(play([*named(7, "x"), *events[:lost], *events[lost + 1 :]]))
    assert spans(play([*named(7, "x"), *events[:6], *events[6 + lost :]]))


def test_operations_in_progress_at_the_begin_of_the_file_are_left_out() -> None:
    known = Names()
    for one in [*named(7, "x"), submit(1)]:
        known.take(one)
    written = spans(play([*run(15)[1:], submit(30, 1), *run(35, 1)], rank=1, names=known))
    assert written[0] == "NEGOTIATE_ALLREDUCE 30-35"


@pytest.mark.parametrize(
    ("events", "left"),
    [
        ([ready(1, 1), submit(2)], ["OP_READY", "OP_SUBMIT"]),
        ([ready(1, 1), submit(2), *run(5)[:1]], []),
        ([submit(2), *run(5)[:2], ready(8, 1, 1), *run(5)[2:]], ["OP_READY"]),
        ([submit(2), event("OP_DONE", 3, 7, 0)], []),
        ([submit(2), ready(3, 1), event("OP_DONE", 5, 7, 0, 0, 0, 0, MISMATCH)], []),
        ([ready(1, 1), *run(5)[:1], submit(2)], []),
        ([ready(1, 1), *run(5), submit(2)], []),
        ([*run(5), submit(2), submit(12, 1)], ["OP_SUBMIT"]),
    ],
    ids=["open", "agreed", "next", "alone", "refused", "late", "last", "again"],
)
def test_negotiations_in_progress_are_included(events: list[Event], left: list[str]) -> None:
    negotiations = Negotiations()
    for one in events:
        negotiations.take(one)
    assert [one.kind for one in negotiations.events()] == left


def test_cycles_are_marked_on_request() -> None:
    both = [submit(10, key=1), submit(11, key=2), *run(15, key=1), *run(16, key=2), submit(20, 1, 1), *run(25, 1, 1)]
    made = play(both, 1, mark_cycles=True)
    assert [one["ts"] for one in made if one.get("name") == "CYCLE_START"] == [15, 25]
    assert not [one for one in play(both, 1) if one.get("name") == "CYCLE_START"]


@pytest.mark.parametrize("name", ["x", "y" * 31, "z" * 32, "u" * 33, "v" * 64, "w" * 95, "grad.größe"])
def test_names_of_every_length(name: str) -> None:
    assert play([*named(7, name), submit(10)])[0]["args"] == {"name": name}


def test_a_lost_name_is_replaced_by_the_key() -> None:
    assert play([submit(10, key=0xAB)])[0]["args"] == {"name": "00000000000000ab"}


def test_stalls_and_lost_peers_are_written() -> None:
    stall = event("STALL", 10, 7, 0, 61 * 10**9, 0b101)
    made = play([*named(7, "x"), submit(1), stall, event("PEER_LOST", 11, 0, 4)])
    assert made[-2]["args"] == {"name": "x", "waited_ms": 61000, "missing_ranks": [0, 2]}
    (many,) = play([event("STALL", 10, 7, 0, 0, 1, 1 << 16, 9)])
    assert (many["args"]["missing_ranks"], many["args"]["more_missing_ranks"]) == ([0, 80], 7)
    assert (made[-1]["name"], made[-1]["args"]) == ("PEER_LOST", {"rank": 4})


def test_the_clock_is_written_when_its_estimate_improves() -> None:
    beats = [event("CLOCK", at, 0, (1 << 64) - 5, trip) for at, trip in ((1, 900), (2, 950), (3, 400))]
    assert [one["args"] for one in play(beats, rank=1)] == [
        {"before_rank_0_ns": -5, "round_trip_ns": 900},
        {"before_rank_0_ns": -5, "round_trip_ns": 400},
    ]


@pytest.mark.parametrize(
    ("name", "rank", "path"),
    [
        ("/t/run.json", 0, "/t/run.json"),
        ("/t/run.json", 3, "/t/run.3.json"),
        ("/t/tmpab12", 1, "/t/tmpab12.1"),
        ("/t.d/run", 1, "/t.d/run.1"),
        ("/t/run.%r.json", 0, "/t/run.0.json"),
        ("/t/%r/run.json", 2, "/t/2/run.json"),
    ],
)
def test_each_rank_has_its_file(name: str, rank: int, path: str) -> None:
    assert path_of(name, rank) == path


# a ring that is being written


class Ring:
    """A ring in memory, written as csrc/trace/ring.c does."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.fd = os.memfd_create("ring")
        os.ftruncate(self.fd, RING_HEADER_BYTES + 64 * capacity)
        self.memory = mmap.mmap(self.fd, 0)
        self.once = capacity // 4
        head = struct.pack("<8sIIQIIqqQQQQ", b"NBRING1\0", 4, 64, capacity, 0, 1, 0, 0, 0, 0, self.once, 0)
        self.memory[: len(head)] = head
        self.taken = ctypes.c_uint64.from_buffer(self.memory, 48)

    def take(self) -> int:
        self.taken.value += 1
        return self.taken.value - 1

    def fill(self, number: int, key: int, kind: str = "OP_AGREED") -> None:
        times, place = divmod(max(0, number - self.once), self.capacity - self.once)
        at = RING_HEADER_BYTES + 64 * (min(number, self.once) + place)
        self.memory[at : at + 64] = struct.pack("<qIIQ5Q", 1, EVENTS[kind] + 256 * times, 0, key, 0, 0, 0, 0, 0)

    def put(self, key: int, kind: str = "OP_AGREED") -> None:
        self.fill(self.take(), key, kind)


@pytest.fixture
def ring() -> Ring:
    return Ring(8)


def keys(tail: Tail) -> list[int]:
    return [one.key for one in tail.take()]


def test_a_slot_that_is_not_filled_yet_is_waited_for(ring: Ring) -> None:
    tail = Tail(ring.fd)
    ring.put(1)
    empty = ring.take()
    ring.put(3)
    assert keys(tail) == [1]
    assert keys(tail) == []
    ring.fill(empty, 2)
    assert keys(tail) == [2, 3]


def test_events_that_no_timeline_uses_are_left_out(ring: Ring) -> None:
    tail = Tail(ring.fd)
    ring.put(1, "GRAD_READY")
    ring.put(2)
    assert keys(tail) == [2]


def test_an_event_that_an_unfilled_slot_had_before_is_not_read_again(ring: Ring) -> None:
    tail = Tail(ring.fd)
    for key in range(8):
        ring.put(key)
    assert keys(tail) == list(range(8))
    ring.put(8)
    late = ring.take()
    ring.put(10)
    assert keys(tail) == [8]
    ring.fill(late, 9)
    assert keys(tail) == [9, 10]
    assert tail.lost() == 0


@pytest.mark.parametrize("at_a_time", [1, 2, 3, 5, 6])
def test_a_ring_that_is_read_in_time_never_ends(ring: Ring, at_a_time: int) -> None:
    tail = Tail(ring.fd)
    got = []
    for turn in range(100):
        for number in range(at_a_time):
            ring.put(turn * at_a_time + number)
        got += keys(tail)
    assert tail.lost() == 0
    assert got == list(range(100 * at_a_time))


def test_events_that_came_too_fast_are_counted(ring: Ring) -> None:
    tail = Tail(ring.fd)
    for key in range(11):
        ring.put(key)
    assert keys(tail) == [0, 1, *range(5, 11)]  # the first ones and the last ones
    assert tail.lost() == 3
    assert tail.lost() == 0
    ring.put(11)
    assert keys(tail) == [11]


def test_a_file_that_is_not_a_ring_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no").write_bytes(b"x" * 5000)
    with (tmp_path / "no").open("rb") as file, pytest.raises(ValueError, match="not a ring file"):
        Tail(file.fileno())


def test_lost_events_are_reported_in_the_file_but_not_at_every_poll(ring: Ring, tmp_path: Path) -> None:
    writer = Writer(Tail(ring.fd), rank=0)
    assert writer.execute(json.dumps({"do": "start", "path": str(tmp_path / "t"), "mark_cycles": False}).encode()) == {}
    for _ in range(4):
        for key in range(20):
            ring.put(key)
        writer.look()
    assert writer.execute(b'{"do": "stop"}') == {}
    lost = [one["args"]["count"] for one in json.loads((tmp_path / "t").read_text()) if one["name"] == "EVENTS_LOST"]
    assert sum(lost) == 4 * (20 - 6) - 2  # the last six are kept, and once the first two


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (b"what?", "JSONDecodeError"),
        (b'{"do": "start"}', "KeyError"),
        (b'{"do": "start", "path": "/no/such/folder/t", "mark_cycles": false}', "FileNotFoundError"),
        (b'{"do": "follow", "path": "/no/such.ring", "network": "TCP"}', "FileNotFoundError"),
        (b'{"do": "follow", "path": "/dev/null", "network": "TCP"}', "ValueError"),
    ],
)
def test_a_failed_command_is_answered_with_its_error(ring: Ring, command: bytes, error: str) -> None:
    writer = Writer(Tail(ring.fd), rank=0)
    assert writer.execute(command)["error"].startswith(error)


# the file


def test_a_file_is_an_array_after_every_write(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    file = ArrayFile(path)
    assert json.loads(path.read_text()) == []
    so_far: list[Any] = []
    for count in (0, 1, 2, 0, 3000):
        more = [{"number": len(so_far) + i, "text": 'a "quoted" ä'} for i in range(count)]
        file.append(more)
        so_far += more
        assert json.loads(path.read_text()) == so_far
    file.close()
    assert json.loads(path.read_text()) == so_far


def test_a_disk_that_is_full_leaves_an_array(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    file = ArrayFile(path)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        file.append({"number": number} for number in range(20))
        with pytest.raises(OSError, match="File too large"):
            file.append({"number": number, "filler": "x" * 100} for number in range(20, 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert json.loads(path.read_text()) == [{"number": number} for number in range(20)]


# what the engine stamps


def recorded(folder: Path, size: int, **options: float) -> tuple[list[_core.Comm], list[_core.Recorder]]:
    """Open ranks and their rings: of rank 2 for no timeline."""
    listener = _core.Listener(ifname="lo")
    rings = [_core.Recorder(str(folder / f"{rank}.ring"), 4096, rank, timeline=rank < 2) for rank in range(size)]

    def open_rank(rank: Any) -> _core.Comm:
        door = {"listener": listener} if rank == 0 else {"address": listener.address}
        secret = b"sixteen bytes..."
        return _core.Comm(
            rank,
            size,
            secret=secret,
            ifname="lo",
            streams=1,
            timeout_s=LIMIT_S,
            recorder=rings[rank],
            **options,
            **door,
        )

    return on_ranks(list(range(size)), open_rank), rings


def events_of(folder: Path, rank: int) -> list[Event]:
    numbers = {number: kind for kind, number in EVENTS.items()}
    rows = read_ring(folder / f"{rank}.ring").events
    return [Event(numbers[row[1]], row[0], *row[2:]) for row in rows.tolist()]


def names_of(events: Iterable[Event]) -> Names:
    names = Names()
    for one in events:
        names.take(one)
    return names


def test_the_engine_stamps_names_ready_ranks_and_joined_pieces(tmp_path: Path) -> None:
    comms, rings = recorded(tmp_path, 3)
    name = "allreduce.a name of more than thirty-two bytes"
    pieces = 300  # of four bytes: more than a segment can carry

    def work(comm: _core.Comm) -> None:
        for _ in range(5):
            comm.submit(name, _core.ALLREDUCE, bytearray(1 << 16), _core.FLOAT32).wait()
        memory = [bytearray(4) for _ in range(pieces)]
        comm.submit("pieces", _core.ALLREDUCE, memory, _core.FLOAT32).wait()
        if comm.rank > 0:
            comm.group(5, [1, 2])
            comm.submit("apart", _core.ALLREDUCE, bytearray(4), _core.FLOAT32, group=5).wait()
        comm.submit("over", _core.BARRIER, None, _core.UINT8).wait()

    on_ranks(comms, work)
    on_ranks(comms, lambda comm: comm.close())
    for one in rings:
        one.close()
    for rank in range(3):
        events = events_of(tmp_path, rank)
        if rank == 2:  # a ring that is for no timeline
            assert not {one.kind for one in events} & {"OP_NAME", "OP_READY", "OP_PACK"}
            continue
        names = names_of(events)
        submits = [one for one in events if one.kind == "OP_SUBMIT"]
        assert {names.find(one.key) for one in submits} >= {name, "pieces"}
        key = next(one.key for one in submits if names.find(one.key) == name)
        assert sum(one.kind == "OP_NAME" and one.key == key for one in events) == 2, "once, not every round"
        marks = [(one.a, one.b) for one in events if one.kind == "OP_READY" and one.key == key]
        assert sorted(marks) == ([(turn, who) for turn in range(5) for who in range(3)] if rank == 0 else [])
        assert {one.c for one in events if one.kind == "OP_READY"} <= {0}, "of a set that rank 0 is not in, none"
        packs = [(names.find(one.key), one.b, one.c) for one in events if one.kind == "OP_PACK"]
        assert packs == [("pieces", 4 * pieces, 0), ("pieces", 4 * pieces, 1)]


def test_a_joined_rank_stamps_its_own_operations_with_the_rounds_and_names_of_the_others(tmp_path: Path) -> None:
    comms, rings = recorded(tmp_path, 2)

    def work(comm: _core.Comm) -> None:
        for _ in range(3 if comm.rank == 0 else 0):  # rank 1 has joined
            comm.submit("x", _core.ALLREDUCE, bytearray(4), _core.FLOAT32).wait()
        comm.submit("join", _core.JOIN, bytearray(4), _core.INT32).wait()
        comm.submit("x", _core.ALLREDUCE, bytearray(4), _core.FLOAT32).wait()

    on_ranks(comms, work)
    on_ranks(comms, lambda comm: comm.close())
    for one in rings:
        one.close()
    for rank, rounds in enumerate([[0, 1, 2, 3], [3]]):
        events = events_of(tmp_path, rank)
        names = names_of(events)
        for kind in ("OP_SUBMIT", "OP_START", "OP_DONE"):
            assert [one.a for one in events if one.kind == kind and names.find(one.key) == "x"] == rounds


def test_a_rank_that_has_joined_is_not_missing_in_a_stall(tmp_path: Path) -> None:
    comms, rings = recorded(tmp_path, 3, stall_s=0.05)

    def work(comm: _core.Comm) -> None:
        until = time.monotonic() + LIMIT_S
        for name in ("before", "stalled") if comm.rank < 2 else ():  # "before" ends once rank 2 has joined
            while name == "stalled" and comm.rank == 1 and not comm.missing(name):
                assert time.monotonic() < until
            comm.submit(name, _core.ALLREDUCE, bytearray(4), _core.FLOAT32).wait()
        comm.submit("join", _core.JOIN, bytearray(4), _core.INT32).wait()

    on_ranks(comms, work)
    on_ranks(comms, lambda comm: comm.close())
    for one in rings:
        one.close()
    events = events_of(tmp_path, 0)
    names = names_of(events)
    assert [(one.c, one.d, one.e) for one in events if one.kind == "STALL" and names.find(one.key) == "stalled"] == [
        (1 << 1, 0, 1)
    ]


# real ranks

OPERATIONS = """
import torch
import netbottleneck.torch as hvd
hvd.init()
for _ in range(10):
    hvd.allreduce(torch.ones(1000), name="grad")
hvd.broadcast(torch.ones(3), 0, name="weight")
hvd.allgather(torch.ones(2), name="rows")
hvd.grouped_allreduce([torch.ones(1)] * 300, name="many")
hvd.barrier()
hvd.shutdown()
"""


def of_tensor(made: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    pid = next(one["pid"] for one in made if one["ph"] == "M" and one["args"].get("name") == name)
    return [one for one in made if one.get("pid") == pid]


def test_every_rank_writes_its_own_view(warm_ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    warm_ranks(2, OPERATIONS, {"HOROVOD_TIMELINE": str(file), "HOROVOD_TIMELINE_MARK_CYCLES": "1"})
    for rank, path in enumerate((file, tmp_path / "t.1.json")):
        made = json.loads(path.read_text())
        assert made[0]["args"]["rank"] == rank
        assert made[0]["args"]["start_time_since_epoch_in_micros"] > 10**15
        assert any(one.get("name") == "CYCLE_START" for one in made)
        assert not [one for one in made if one.get("name") == "EVENTS_LOST"]
        assert spans(made)
        grad = of_tensor(made, "allreduce.grad")
        marks = [one["name"] for one in grad if one["ph"] == "X"]
        assert [one["name"] for one in grad if one["ph"] == "B" and one["name"] != "QUEUE"] == [
            "NEGOTIATE_ALLREDUCE",
            "ALLREDUCE",
            "TCP_ALLREDUCE",
        ] * 10
        assert sorted(marks) == (["0"] * 10 + ["1"] * 10 if rank == 0 else ["1"] * 10)
        assert grad[-1]["args"] == {"dtype": "float32", "shape": "[1000]"}
        tops = {one["name"] for one in made if one["ph"] == "B"}
        assert tops >= {"BROADCAST", "TCP_BCAST", "ALLGATHER", "TCP_ALLGATHER", "NEGOTIATE_BARRIER"}


MEASURED = """
import torch
import netbottleneck
import netbottleneck.torch as hvd
hvd.init()
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
hvd.shutdown()
"""


@pytest.mark.parametrize("measured", ["0", "1"])
def test_the_timeline_has_gradients(warm_ranks: Ranks, tmp_path: Path, measured: str) -> None:
    file = tmp_path / "t.json"
    run = {"NETBOTTLENECK_TRANSPORT": "tcp", "NETBOTTLENECK_DIR": str(tmp_path / "run")} if measured == "1" else {}
    warm_ranks(2, MEASURED, {"HOROVOD_TIMELINE": str(file), **run})
    for path in (file, tmp_path / "t.1.json"):
        made = json.loads(path.read_text())
        assert sum(one.get("name") == "TCP_ALLREDUCE" for one in made) >= 5
        names = [one["args"].get("name", "") for one in made if one["ph"] == "M"]
        assert any(name.startswith("optimizer.0.") for name in names), names


SPARSE = """
import torch
import netbottleneck.torch as hvd
hvd.init()
table = torch.nn.Embedding(6, 2, sparse=True)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), table.named_parameters())
for _ in range(3):
    optimizer.zero_grad()
    table(torch.tensor([hvd.rank(), 5])).sum().backward()
    optimizer.step()
assert table.weight.grad.is_sparse
hvd.shutdown()
"""


def test_sparse_gradients_stay_sparse_with_a_timeline(warm_ranks: Ranks, tmp_path: Path) -> None:
    warm_ranks(2, SPARSE, {"HOROVOD_TIMELINE": str(tmp_path / "t.json")})
    names = [one["args"].get("name", "") for one in json.loads((tmp_path / "t.json").read_text()) if one["ph"] == "M"]
    assert any(name.startswith("allgather") for name in names), names


SWITCHED = """
import json, os, sys
import torch
import netbottleneck.torch as hvd

def refused(message, call):
    try:
        call()
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)

def tensors(name):
    made = json.load(open(f"{sys.argv[1]}/{name}.{hvd.rank()}"))
    return {one["args"].get("name") for one in made if one["ph"] == "M"} - {None}

def reduce(name):
    hvd.allreduce(torch.ones(4), name=name)

refused("has not been initialized", lambda: hvd.start_timeline("x"))
refused("has not been initialized", hvd.stop_timeline)
hvd.init()
refused("Set HOROVOD_TIMELINE=DYNAMIC", lambda: hvd.start_timeline("x"))
hvd.stop_timeline()
hvd.shutdown()
os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
for turn in range(2):
    hvd.init()
    hvd.stop_timeline()
    reduce("before")
    hvd.start_timeline(f"{sys.argv[1]}/a{turn}.%r", mark_cycles=True)
    reduce("one")
    hvd.start_timeline(f"{sys.argv[1]}/b{turn}.%r")
    reduce("two")
    reduce("one")
    hvd.stop_timeline()
    reduce("three")
    assert tensors(f"a{turn}") == {"allreduce.one"}
    assert tensors(f"b{turn}") == {"allreduce.two", "allreduce.one"}
    hvd.start_timeline(f"{sys.argv[1]}/c{turn}.%r")
    reduce("three")
    reduce("before")
    hvd.stop_timeline()
    hvd.barrier()
    assert tensors(f"c{turn}") == {"allreduce.three", "allreduce.before"}
    hvd.start_timeline(f"{sys.argv[1]}/no/such/folder/%r")
    reduce("one")
    hvd.shutdown()
print("done")
"""


def test_the_script_can_start_and_stop_the_timeline(warm_ranks: Ranks, tmp_path: Path) -> None:
    for result in warm_ranks(2, SWITCHED, args=[str(tmp_path)]):
        assert result.stdout == "done\n"
        assert result.stderr.count("the timeline is not written") == 2
        assert "No such file" in result.stderr


def test_the_timeline_is_written_by_a_process_with_many_open_files(
    many_open_files: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timeline = Timeline(settings({}), Place(0, 1))
    timeline.start(str(tmp_path / "t.json"), mark_cycles=False)
    timeline.close()
    assert json.loads((tmp_path / "t.json").read_text())
    assert not caplog.messages


def test_the_writer_ends_with_the_timeline_while_a_fork_of_its_process_lives(tmp_path: Path) -> None:
    timeline = Timeline(settings({}), Place(0, 1))
    timeline.start(str(tmp_path / "t.json"), mark_cycles=False)
    writer = timeline._writer
    assert writer is not None
    fork = os.fork()
    if fork == 0:
        signal.pause()
        os._exit(0)
    try:
        timeline.close()
        assert writer.returncode == 0
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)


ENDLESS = """
import torch
import netbottleneck.torch as hvd
hvd.init()
print("started", flush=True)
turn = 0
try:
    while True:
        hvd.allreduce(torch.ones(100), name="grad")
        turn += 1
        if turn % 500 == 0:
            print(turn, flush=True)
except hvd.HorovodInternalError:
    print("the other is gone", flush=True)
"""


def child_of(pid: int) -> int:
    """The writer of a rank."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if int(fields[1]) == pid and b"timeline_writer" in command:
                return int(folder.name)
    raise AssertionError("no writer")


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def wait_for_state(pid: int, states: set[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while state_of(pid) not in states:
        assert time.monotonic() < deadline, state_of(pid)


@pytest.fixture
def endless(warm_ranks: Ranks, tmp_path: Path) -> RankJob:
    job = warm_ranks.start(2, ENDLESS, env={"HOROVOD_TIMELINE": str(tmp_path / "t.json")})
    job.wait_for_line(0, "500")
    return job


def test_the_file_is_an_array_whenever_the_writer_is_stopped(endless: RankJob, tmp_path: Path) -> None:
    writer = child_of(endless.processes[0].pid)
    lengths = []
    for _ in range(20):
        os.kill(writer, signal.SIGSTOP)
        wait_for_state(writer, {"T"})
        lengths.append(len(json.loads((tmp_path / "t.json").read_text())))
        os.kill(writer, signal.SIGCONT)
        wait_for_state(writer, {"S", "R", "D"})
    assert lengths == sorted(lengths)


def test_a_rank_that_is_killed_leaves_its_last_operations(endless: RankJob, tmp_path: Path) -> None:
    writers = [child_of(process.pid) for process in endless.processes]
    endless.kill(0)
    wait_for_state(writers[0], {"gone", "Z"})
    grad = of_tensor(json.loads((tmp_path / "t.json").read_text()), "allreduce.grad")
    assert sum(one.get("name") == "ALLREDUCE" for one in grad) >= 500
    endless.wait_for_line(1, "the other is gone")
    wait_for_state(writers[1], {"gone", "Z"})
    assert spans(json.loads((tmp_path / "t.1.json").read_text()))


def test_training_continues_without_the_writer(endless: RankJob, tmp_path: Path) -> None:
    os.kill(child_of(endless.processes[0].pid), signal.SIGKILL)
    count = len(endless.output(0).splitlines())
    endless.wait_for_line(0, str(500 * (count + 2)))
    assert json.loads((tmp_path / "t.json").read_text())
