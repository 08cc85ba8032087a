"""NCCL's calls of its profiler, as recorded, are made to our plugin again; the ring has what they say, to the ns.

The calls are those that gpu-check recorded on a GPU, where such results are stored. The tests also record the sequence
written by hand (tests/nccl/profiled.h), and draw recordings.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_calls
from nccl_programs import LIBRARY, compiled

from netbottleneck.trace import nccl_events
from netbottleneck.trace.model import NcclOperation

RESULTS = Path(gpu_calls.__file__).with_name("results") / "gpu-check.json"
LIMIT_S = 120
OPERATIONS, PROXY_OP, PROXY_STEP, KERNEL = (2, 4), 8, 16, 64
SENT_AT, ARRIVED_AT, KERNEL_STOP = (20, 9), (11, 12), 22  # the second and third state of a message
WITH_BYTES = (9, 11)
ELEMENT_BYTES = {"ncclFloat32": 4, "ncclInt8": 1}

Program = Callable[..., Path]
Facts = dict[str, Any]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Return a function that compiles a program of tests/nccl once."""
    folder = tmp_path_factory.mktemp("nccl")

    def get(name: str, *options: str) -> Path:
        target = folder / name
        return target if target.exists() else compiled(f"{name}.c", target, *options)

    return get


def run(*command: object, **variables: object) -> dict[str, Any]:
    """Run a program; return what it prints."""
    env = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    argv = [str(each) for each in command]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def replayed(program: Program, recording: Path, ring: Path) -> tuple[NcclOperation, ...]:
    """Make the calls of a recording to our plugin; return the operations of its ring."""
    replay = program("replay", "-rdynamic")  # our plugin finds its clock
    result = run(replay, "--plugin", gpu_calls.PLUGIN, recording, NETBOTTLENECK_NCCL_EVENTS=ring)
    assert result["calls"] == len(recording.read_text(encoding="utf-8").splitlines())
    return gpu_calls.operations(ring)


def events_of(recording: str) -> list[Facts]:
    """Return what a recording says of each operation, in the plugin's words: its kernel's channels, its messages."""
    tasks: dict[str, Facts] = {}
    below: dict[str, Facts] = {}  # by handle: of an operation of the proxy, a message, a channel of a kernel
    found: list[Facts] = []
    for line in recording.splitlines():
        time, _, call, handle, *words = line.split()
        at_ns = int(time)
        if call == "start":
            started(at_ns, handle, words, tasks, below, found)
        elif call == "state" and handle in below:
            first_ns, _ = below[handle].get(f"state {words[0]}", (at_ns, 0))
            below[handle][f"state {words[0]}"] = (first_ns, int(words[1]))
        elif call == "stop" and handle in below:
            stopped(at_ns, below.pop(handle))
    return found


def started(
    at_ns: int, handle: str, words: list[str], tasks: dict[str, Facts], below: dict[str, Facts], found: list[Facts]
) -> None:
    """Note an event's start."""
    _, kind, parent, *own = words
    if int(kind) in OPERATIONS:
        _, function, count, dtype, *_ = own
        tasks[handle] = {"at": at_ns, "function": function, "bytes": int(count) * ELEMENT_BYTES[dtype]}
        tasks[handle] |= {"network": [], "kernel": []}
        found.append(tasks[handle])
    elif int(kind) == PROXY_OP:
        mine, channel, peer, _, _, sends = map(int, own)
        task = tasks.get(parent) if mine else None
        below[handle] = {"task": task, "sends": bool(sends), "channel": channel, "peer": peer}
    elif int(kind) == PROXY_STEP and below.get(handle, {}).get("number") != int(own[0]):
        below[handle] = {**below[parent], "number": int(own[0]), "begin": at_ns}
    elif int(kind) == KERNEL:
        below[handle] = {"task": tasks.get(parent), "channel": int(own[0]), "seen": at_ns, "start": int(own[1])}


def stopped(at_ns: int, event: Facts) -> None:
    """Add a message, or a kernel's channel, to its operation."""
    if event["task"] is not None and "number" in event:
        first, second = SENT_AT if event["sends"] else ARRIVED_AT
        states = [event.get(f"state {state}") for state in (first, second)]
        second_ns = states[1][0] if states[1] else at_ns
        first_ns = states[0][0] if states[0] else second_ns
        moved = next((event[f"state {state}"][1] for state in WITH_BYTES if f"state {state}" in event), 0)
        place = (event["sends"], event["channel"], event["peer"], event["number"], moved)
        event["task"]["network"].append((*place, (event["begin"], first_ns, second_ns, at_ns)))
    elif event["task"] is not None and "start" in event:
        stop = event.get(f"state {KERNEL_STOP}", (0, 0))[1]
        event["task"]["kernel"].append((event["channel"], event["start"], stop, event["seen"], at_ns))


def facts(operations: tuple[NcclOperation, ...]) -> Iterator[Facts]:
    """Yield the same of the operations of a ring."""
    for each in operations:
        network = [(s.sent, s.channel, s.peer, s.number, s.bytes, s.times_ns) for s in each.network]
        kernel = [(k.channel, k.start_gpu_ns, k.stop_gpu_ns, k.start_seen_ns, k.stop_seen_ns) for k in each.kernel]
        parts = each.comm_size if each.function in nccl_events.OF_ONE_RANK else 1  # a recording has NCCL's count
        yield {"at": each.submit_ns, "function": each.function, "bytes": each.bytes // parts} | {
            "network": sorted(network),
            "kernel": sorted(kernel),
        }


def in_order(operations: list[Facts]) -> list[Facts]:
    return [{**each, **{what: sorted(each[what]) for what in ("network", "kernel")}} for each in operations]


@pytest.fixture
def recorded(program: Program, tmp_path: Path) -> Callable[[int], tuple[Path, Path]]:
    """Return a function that records the calls of tests/nccl/profile.c; its result is the recording and our ring."""

    def record(version: int) -> tuple[Path, Path]:
        recorder = program("recorder", *LIBRARY)
        calls, ring = tmp_path / "calls.txt", tmp_path / "first.ring"
        options = {"RECORDED_PROFILER": gpu_calls.PLUGIN, "RECORDING": calls, "NETBOTTLENECK_NCCL_EVENTS": ring}
        run(program("profile"), "--plugin", recorder, "--version", version, **options)
        return calls, ring

    return record


@pytest.mark.parametrize("version", [4, 5, 6, 7])
def test_a_recording_comes_back(
    program: Program, recorded: Callable[[int], tuple[Path, Path]], tmp_path: Path, version: int
) -> None:
    calls, ring = recorded(version)
    (again,) = replayed(program, calls, tmp_path / "again.ring")
    assert list(facts((again,))) == in_order(events_of(calls.read_text(encoding="utf-8")))
    (first,) = gpu_calls.operations(ring)
    same = ("function", "dtype", "bytes", "algorithm", "protocol", "channels", "sequence", "peer", "tag", "comm")
    assert [getattr(again, name) for name in same] == [getattr(first, name) for name in same]
    assert len(again.network) == len(first.network) == 2
    gpu = [(each.kernel[0].start_gpu_ns, each.kernel[0].stop_gpu_ns) for each in (again, first)]
    assert gpu[0] == gpu[1]


class Drawn:
    """Calls as NCCL makes them, drawn by a seed: operations of two communicators, and their messages in any order."""

    IN_FLIGHT = 8

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.time_ns = 10**12
        self.last = 0

    def call(self, name: str, *words: object) -> None:
        """Add a call some time after the one before."""
        self.time_ns += self.random.randrange(1, 100_000)
        self.lines.append(" ".join(map(str, (self.time_ns, self.random.randrange(9), name, *words))))

    def start(self, context: int, kind: int, parent: int, *words: object) -> int:
        """Start an event; return its handle."""
        self.last += 1
        self.call("start", self.last, context, kind, parent, *words)
        return self.last

    def recording(self, count: int) -> str:
        """Return `count` operations, one after the other."""
        for context in (1, 2):
            self.call("init", context, 100 + context, 2, 2, 0, 94, 6)
        for sequence in range(count):
            self.operation(self.random.choice((1, 2)), sequence)
        for context in (1, 2):
            self.call("finalize", context)
        return "".join(f"{line}\n" for line in self.lines)

    def operation(self, context: int, sequence: int) -> None:
        """Add an operation, its kernel and its messages."""
        function = self.random.choice((*gpu_calls.CALLED, "Send"))
        channels = self.random.randrange(1, 4)
        what = (0, function, self.random.randrange(1, 10**6), "ncclFloat32", channels, 0)
        alone = function == "Send"
        task = self.start(context, 4 if alone else 2, 0, *what, *((1,) if alone else (sequence, "RING", "SIMPLE", 0)))
        kernels = [self.start(context, KERNEL, task, at, self.time_ns) for at in range(channels)]
        self.call("stop", task)
        for channel in range(channels):
            for sends in (0, 1):
                own = self.random.random() < 0.9  # else of another process
                steps = self.random.randrange(1, 40)
                op = self.start(context, PROXY_OP, task, int(own), channel, 1, steps, 1 << 20, sends)
                self.messages(context, op, steps, SENT_AT if sends else ARRIVED_AT)
                self.call("stop", op)
        for kernel in kernels:
            self.call("state", kernel, KERNEL_STOP, self.time_ns)
            self.call("stop", kernel)

    def messages(self, context: int, op: int, steps: int, states: tuple[int, int]) -> None:
        """Add messages, with up to IN_FLIGHT unfinished, each of which ends in its order."""
        handles: list[int] = []
        ended = 0
        while ended < steps:
            if len(handles) < steps and len(handles) < ended + self.IN_FLIGHT and self.random.random() < 0.6:
                handles.append(self.start(context, PROXY_STEP, op, len(handles)))
            elif ended < len(handles):
                for state in states:
                    for _ in range(self.random.choice((0, 1, 1, 2))):
                        self.call("state", handles[ended], state, self.random.randrange(10**6))
                self.call("stop", handles[ended])
                ended += 1


@pytest.mark.parametrize("seed", range(5))
def test_drawn_calls_come_back(program: Program, tmp_path: Path, seed: int) -> None:
    calls = tmp_path / "calls.txt"
    calls.write_text(Drawn(seed).recording(60), encoding="utf-8")
    operations = replayed(program, calls, tmp_path / "a.ring")
    assert list(facts(operations)) == in_order(events_of(calls.read_text(encoding="utf-8")))
    assert len(operations) == 60
    assert sum(len(each.network) for each in operations) > 2000


def test_the_calls_of_nccl_on_a_gpu_come_back(program: Program, tmp_path: Path) -> None:
    if not RESULTS.exists():
        pytest.skip("no GPU has recorded calls yet")
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["parts"].get("events", {}).get("rows", [])
    recordings = [row["calls"] for row in rows if "calls" in row] or pytest.skip("no GPU has recorded calls yet")
    for number, text in enumerate(recordings):
        calls = tmp_path / f"{number}.txt"
        calls.write_text(text, encoding="utf-8")
        operations = replayed(program, calls, tmp_path / f"{number}.ring")
        assert list(facts(operations)) == in_order(events_of(text))
        assert any(each.network for each in operations)


def test_gpu_check_says_what_a_recording_shows(program: Program, tmp_path: Path) -> None:
    text = Drawn(0).recording(60)
    for rank in range(2):
        calls = tmp_path / f"calls.{rank}.txt"
        calls.write_text(text, encoding="utf-8")
        replayed(program, calls, tmp_path / f"events.{rank}.ring")
    rows = gpu_calls.rows(tmp_path)
    assert [row["value"] for row in rows[:2]] == [60, 60]
    assert not any("broken" in row for row in rows)
    assert rows[-1]["calls"] == text
    for function in gpu_calls.CALLED:
        named = [row["condition"] for row in rows if row["condition"].startswith(f"{function} of ")]
        assert [each.split(", ")[1] for each in named] == ["kernel", *gpu_calls.PARTS]


def test_gpu_check_fails_for_what_is_not_recorded(
    program: Program, recorded: Callable[[int], tuple[Path, Path]], tmp_path: Path
) -> None:
    calls, _ = recorded(6)
    lines = calls.read_text(encoding="utf-8").splitlines()
    kernel = next(line.split()[3] for line in lines if line.split()[2] == "start" and line.split()[5] == str(KERNEL))
    kept = [line for line in lines if line.split()[3] != kernel]
    (tmp_path / "calls.0.txt").write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    replayed(program, tmp_path / "calls.0.txt", tmp_path / "events.0.ring")
    wanted = "1 AllReduce of 6, 0 AllGather of 2, 0 ReduceScatter of 2, 0 Broadcast of 2, 0 messages of 2, no kernel"
    assert [row["broken"] for row in gpu_calls.rows(tmp_path) if "broken" in row] == [f"rank 0 recorded {wanted}"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("start 524290", "start 0"), "a handle where it gave none"),
        (("AllReduce", ""), "a word is no number"),
        (("init", "open"), "a call is not known"),
        (("94 6\n", "95 6\n"), "the plugin wants other events"),
    ],
)
def test_a_recording_that_does_not_fit_is_refused(
    program: Program,
    recorded: Callable[[int], tuple[Path, Path]],
    tmp_path: Path,
    change: tuple[str, str],
    why: str,
) -> None:
    calls, _ = recorded(6)
    text = calls.read_text(encoding="utf-8")
    assert change[0] in text
    calls.write_text(text.replace(*change), encoding="utf-8")
    command = [program("replay", "-rdynamic"), "--plugin", gpu_calls.PLUGIN, calls]
    env = {**os.environ, "NETBOTTLENECK_NCCL_EVENTS": str(tmp_path / "again.ring")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env)
    assert done.returncode == 1
    assert why in done.stderr
