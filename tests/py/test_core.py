"""The C module as Python sees it: values, lifetimes, errors, fork. Two ranks are two threads of this process."""

from __future__ import annotations

import gc
import inspect
import itertools
import mmap
import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import asleep
import numpy as np
import pytest
import torch
from conftest import RANKS_LIMIT_S, on_ranks

from netbottleneck import _core, errors
from netbottleneck.trace import ring_file
from netbottleneck.trace.events import signed

CSRC = Path(__file__).resolve().parents[2] / "csrc"
EVENT_H = CSRC / "trace" / "event.h"
# A method in C without keywords, and the parameters that its docstring says it has.
WITHOUT_KEYWORDS = re.compile(r'\{"(\w+)", \w+, (?:METH_O|METH_VARARGS),\s*"\w+\((.*?)\)\\n--', re.DOTALL)
SECRET = b"sixteen bytes..."
LIMIT_S = RANKS_LIMIT_S
NUMPY = {
    _core.UINT8: np.uint8,
    _core.INT8: np.int8,
    _core.INT32: np.int32,
    _core.INT64: np.int64,
    _core.FLOAT16: np.float16,
    _core.FLOAT32: np.float32,
    _core.FLOAT64: np.float64,
}


class Token:
    """An object that weak references can watch."""


def join(size: int, **options: Any) -> list[_core.Comm]:
    """Return the communicators of `size` ranks on loopback."""
    listener = _core.Listener(ifname="lo")
    comms: list[Any] = list(range(size))

    def open_rank(rank: Any) -> _core.Comm:
        door = {"listener": listener} if rank == 0 else {"address": listener.address}
        return _core.Comm(rank, size, secret=SECRET, ifname="lo", streams=1, timeout_s=LIMIT_S, **door, **options)

    try:
        return on_ranks(comms, open_rank)
    finally:
        listener.close()


@pytest.fixture
def pair() -> Generator[list[_core.Comm], None, None]:
    comms = join(2)
    yield comms
    for comm in comms:
        comm.close()


@pytest.fixture
def alone() -> Generator[_core.Comm, None, None]:
    comm = _core.Comm(0, 1, secret=b"")
    yield comm
    comm.close()


def run_python(source: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", source, *args], capture_output=True, text=True, timeout=RANKS_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# constants and functions


def test_the_signature_of_every_callable_can_be_read(tmp_path: Path) -> None:
    recorder = _core.Recorder(str(tmp_path / "0.train.ring"), 10, 0)
    operation = type(recorder.operation(1, 1, 1, 0))
    recorder.close()
    functions = [each for each in vars(_core).values() if callable(each) and each is not _core.Work]
    types = [*filter(inspect.isclass, vars(_core).values()), operation]
    methods = [each for made in types for name, each in vars(made).items() if callable(each) and name[0] != "_"]
    assert len(functions) > 20
    assert len(methods) > 30
    for each in [*functions, *methods]:
        inspect.signature(each)


def test_signatures_name_what_may_not_be_a_keyword() -> None:
    found = {
        name: parameters
        for path in sorted((CSRC / "py").glob("*.c"))
        for name, parameters in WITHOUT_KEYWORDS.findall(path.read_text(encoding="utf-8"))
    }
    assert {"dtype_size", "simulate", "map", "follow", "started", "hook"} <= set(found)
    assert [name for name, parameters in found.items() if not parameters.endswith("/")] == []


def test_events_are_those_of_the_header() -> None:
    found = re.findall(r"^\s*NB_EV_(\w+) =\s*(\d+)", EVENT_H.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name: int(number) for name, number in found} == _core.EVENTS


def test_dtype_sizes() -> None:
    sizes = {dtype: _core.dtype_size(dtype) for dtype in NUMPY}
    assert sizes == {dtype: np.dtype(kind).itemsize for dtype, kind in NUMPY.items()}
    assert _core.dtype_size(_core.BFLOAT16) == 2


@pytest.mark.parametrize(
    ("name", "key"), [("", 0xCBF29CE484222325), ("a", 0xAF63DC4C8601EC8C), ("foobar", 0x85944171F73967E8)]
)
def test_a_names_key_is_its_fnv_1a_hash(name: str, key: int) -> None:
    assert _core.name_key(name) == key


def test_the_clock_is_the_monotonic_one() -> None:
    before, now, after = time.monotonic_ns(), _core.now_ns(), time.monotonic_ns()
    assert before <= now <= after


def test_a_second_module_in_a_process_is_independent() -> None:
    source = """
import importlib.machinery, importlib.util, sys
from netbottleneck import _core as first
loader = importlib.machinery.ExtensionFileLoader(first.__name__, first.__file__)
spec = importlib.util.spec_from_loader(first.__name__, loader)
second = importlib.util.module_from_spec(spec)
loader.exec_module(second)
assert second is not first and second.Arena is not first.Arena
assert second.Arena(8).nbytes == first.Arena(8).nbytes == 8
del second
import gc; gc.collect()
assert first.Arena(8).nbytes == 8
"""
    run_python(source)


@pytest.mark.parametrize("isa", [None, "generic"])
@pytest.mark.parametrize("dtype", sorted(NUMPY))
def test_reduce_adds(dtype: int, isa: str | None) -> None:
    left = np.arange(37).astype(NUMPY[dtype])
    right = np.arange(37)[::-1].astype(NUMPY[dtype]).copy()
    expected = left + right
    _core.reduce(left, right, dtype, _core.SUM, isa)
    assert left.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", sorted(NUMPY))
def test_reduce_pair_adds_into_both(dtype: int) -> None:
    left = np.arange(37).astype(NUMPY[dtype])
    right = np.arange(37)[::-1].astype(NUMPY[dtype]).copy()
    expected = left + right
    _core.reduce_pair(left, right, dtype, _core.SUM)
    assert left.tobytes() == right.tobytes() == expected.tobytes()


def test_interfaces_have_addresses_without_ports() -> None:
    assert ("lo", "127.0.0.1") in _core.interfaces("lo")


# arena


def test_an_arena_is_zeroed_page_aligned_and_writable() -> None:
    arena = _core.Arena(mmap.PAGESIZE + 4)
    with memoryview(arena) as view:
        assert view.nbytes == arena.nbytes == mmap.PAGESIZE + 4
        assert not view.readonly
        assert bytes(view) == bytes(view.nbytes)
    assert arena.address % mmap.PAGESIZE == 0


def test_a_tensor_keeps_the_arena() -> None:
    arena = _core.Arena(4096)
    tensor = torch.frombuffer(arena, dtype=torch.float32, offset=64, count=8)
    assert tensor.data_ptr() == arena.address + 64
    tensor.fill_(3)
    with memoryview(arena) as view:
        assert struct.unpack_from("8f", view, 64) == (3.0,) * 8
    held = sys.getrefcount(arena)
    del tensor
    gc.collect()
    assert sys.getrefcount(arena) < held


def test_a_buffer_outlives_the_name_of_its_arena() -> None:
    arena = _core.Arena(4096)
    view = memoryview(arena)
    del arena
    gc.collect()
    view[:4] = b"kept"
    assert bytes(view[:4]) == b"kept"


def test_another_mapping_of_the_descriptor_is_the_same_memory() -> None:
    arena = _core.Arena(4096)
    assert arena.fd >= 0
    with mmap.mmap(arena.fd, 4096) as other:
        other[7] = 42
        assert memoryview(arena)[7] == 42


# recorder


def events_of(path: Path) -> list[tuple[int, ...]]:
    """(time, kind, step, key, a, b, c, d, e) of each event in a ring file."""
    return ring_file.read_slots(path).events.tolist()


# A recorder over the fake driver. The current stream is `current`, whose address NULL is the default stream's.
FOLLOWING = """
import ctypes, re, sys, threading, types
from netbottleneck import _core

library, header, path = sys.argv[1:]
driver = ctypes.CDLL(library)
names = re.findall(r"\\(\\*(\\w+)\\)\\(", header[header.index("struct fake_controls {"):])
driver.fake_controls.restype = ctypes.POINTER(ctypes.c_void_p)
hold = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_bool)(driver.fake_controls()[names.index("hold")])
context, stream, event = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
assert driver.cuInit(0) == driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert driver.cuCtxPushCurrent_v2(context) == driver.cuStreamCreate(ctypes.byref(stream), 1) == 0
assert driver.cuEventCreate(ctypes.byref(event), 0) == 0
current = stream


class OnDevice:
    is_contiguous = lambda self: True
    data_ptr = lambda self: 64
    numel = lambda self: 4
    element_size = lambda self: 4
    __dlpack_device__ = lambda self: (2, 0)


sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch.cuda"] = types.SimpleNamespace(
    current_stream=lambda number: types.SimpleNamespace(cuda_stream=current.value or 0)
)
recorder = _core.Recorder(path, 64, 0)
recorder.follow(OnDevice(), library)
"""


def run_following(script: str, fake_driver: Path, path: Path) -> str:
    """Run the script after FOLLOWING, with the recorder's file at `path`; return what it prints."""
    header = (EVENT_H.parents[2] / "tests" / "cuda" / "fake.h").read_text(encoding="utf-8")
    return run_python(FOLLOWING + script, str(fake_driver), header, str(path))


def test_a_second_close_leaves_the_file_to_the_one_that_waits_for_the_device(tmp_path: Path, fake_driver: Path) -> None:
    script = """
hold(stream, True)
recorder.put(_core.EVENTS["STEP_BEGIN"])
first = threading.Thread(target=recorder.close)
first.start()
while recorder.device_stream is not None:  # then it waits for the device
    pass
recorder.close()
hold(stream, False)
first.join()
"""
    run_following(script, fake_driver, tmp_path / "ring")
    kinds = [event[1] for event in events_of(tmp_path / "ring")]
    begin, dropped = _core.EVENTS["STEP_BEGIN"], 0
    assert [kind for kind in kinds if kind in (begin, dropped)] in ([begin], [dropped])


def test_a_stamp_of_another_stream_does_not_wait_for_those_of_the_default_stream(
    tmp_path: Path, fake_driver: Path
) -> None:
    script = """
gate, current = stream, ctypes.c_void_p()
recorder.put(_core.EVENTS["FORWARD_BEGIN"])
hold(gate, True)
assert driver.cuEventRecord(event, gate) == driver.cuStreamWaitEvent(None, event, 0) == 0
recorder.put(_core.EVENTS["FORWARD_END"])
other = current = ctypes.c_void_p()
assert driver.cuStreamCreate(ctypes.byref(other), 1) == 0
recorder.put(_core.EVENTS["OP_START"])
assert driver.cuStreamSynchronize(other) == 0
passed_ns = released_ns = _core.now_ns()
while released_ns < passed_ns + 100_000_000:  # beyond the error of the device's clock
    released_ns = _core.now_ns()
hold(gate, False)
recorder.close()
print(passed_ns, released_ns)
"""
    passed_ns, released_ns = map(int, run_following(script, fake_driver, tmp_path / "ring").split())
    found = {event[1]: event for event in events_of(tmp_path / "ring")}
    error_ns = found[_core.EVENTS["DEVICE_CLOCK"]][5]
    assert found[_core.EVENTS["OP_START"]][0] <= passed_ns + error_ns
    assert found[_core.EVENTS["FORWARD_END"]][0] >= released_ns - error_ns


def test_the_error_of_a_devices_clock_is_stated_again_and_again(tmp_path: Path, fake_driver: Path) -> None:
    script = """
recorder.close()
recorder = _core.Recorder(path, 8192, 0)
recorder.follow(OnDevice(), library)
for _ in range(40):
    for _ in range(100):
        recorder.put(_core.EVENTS["OP_START"])
    while recorder.read():
        pass
recorder.close()
"""
    run_following(script, fake_driver, tmp_path / "ring")
    events = events_of(tmp_path / "ring")
    stated = [place for place, event in enumerate(events) if event[1] == _core.EVENTS["DEVICE_CLOCK"]]
    assert max(after - before for before, after in itertools.pairwise([0, *stated, len(events)])) < 1500


def test_a_stamp_whose_stream_lookup_closes_the_recorder_is_dropped(tmp_path: Path, fake_driver: Path) -> None:
    script = """
def current_stream(number):
    recorder.close()
    return types.SimpleNamespace(cuda_stream=stream.value)

sys.modules["torch.cuda"].current_stream = current_stream
recorder.put(_core.EVENTS["STEP_BEGIN"])
recorder.put(_core.EVENTS["STEP_END"])
print(recorder.device_stream)
"""
    assert run_following(script, fake_driver, tmp_path / "ring") == "None\n"
    assert not {_core.EVENTS["STEP_BEGIN"], _core.EVENTS["STEP_END"]} & {e[1] for e in events_of(tmp_path / "ring")}


# Memory of the fake driver. `submitted` counts a stream's operations.
MEMORY = """
def control(name, result, *types):
    return ctypes.CFUNCTYPE(result, *types)(driver.fake_controls()[names.index(name)])

capture = control("capture", None, ctypes.c_void_p, ctypes.c_bool)
submitted = control("submitted", ctypes.c_ulonglong, ctypes.c_void_p)
address = ctypes.c_ulonglong()
assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(32)) == 0
OnDevice.data_ptr = lambda self: address.value
tensor = OnDevice()
"""
ALONE = MEMORY + 'comm = _core.Comm(0, 1, secret=b"", cuda_library=library)\n'


def test_other_threads_run_while_a_submission_waits_for_the_device(tmp_path: Path, fake_driver: Path) -> None:
    script = """
hold(stream, True)
def release():  # it needs the GIL
    while submitted(stream) == 0:
        pass
    hold(stream, False)

other = threading.Thread(target=release)
other.start()
comm.submit("alone", _core.ALLREDUCE, tensor, _core.FLOAT32, prescale=2.0).wait()
other.join()
"""
    run_following(ALONE + script, fake_driver, tmp_path / "ring")


def test_a_wait_beside_a_close_returns_once_the_copies_are_over(tmp_path: Path, fake_driver: Path) -> None:
    script = """
from netbottleneck import errors

class Entry(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int), ("stream", ctypes.c_void_p), ("event", ctypes.c_void_p),
        ("address", ctypes.c_ulonglong), ("bytes", ctypes.c_size_t),
    ]

log = control("log", ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(Entry), ctypes.c_size_t)
listener, comms, released, seen = _core.Listener(ifname="lo"), [None, None], False, []

def join(rank):
    door = {"address": listener.address} if rank else {"listener": listener}
    options = {"secret": b"sixteen bytes...", "ifname": "lo", "streams": 1, "cuda_library": library}
    comms[rank] = _core.Comm(rank, 2, **options, **door)

def in_thread(call, *args):
    thread = threading.Thread(target=call, args=args)
    thread.start()
    return thread

def run():
    works = [comm.submit("sum", _core.ALLREDUCE, tensor, _core.FLOAT32) for comm in comms]
    while not all(work.times()[-1] for work in works):
        pass
    return works

def wait(work):
    work.wait()
    seen.append(released)

joining = in_thread(join, 1)
join(0)
joining.join()
works = run()
assert driver.cuStreamSynchronize(stream) == 0  # it waits for the copies back
entries = (Entry * 1000)()
back = {each.stream for each in entries[: log(0, entries, 1000)] if each.kind == 1}
for each in back:
    hold(each, True)
works = run()
current = ctypes.c_void_p()
closing = in_thread(comms[0].close)
try:
    while True:
        comms[0].missing("sum")
except errors.ClosedError:
    pass
waiting = in_thread(wait, works[0])
waiting.join(0.2)  # to return too early
released = True
for each in back:
    hold(each, False)
waiting.join()
closing.join()
comms[1].close()
print(len(back), seen)
"""
    assert run_following(MEMORY + script, fake_driver, tmp_path / "ring") == "2 [True]\n"


# A hook of two buckets over the memory of `tensor`.
HOOK = """
class Parameter:
    grad = tensor

class View(OnDevice):
    def __init__(self, offset):
        self.data_ptr = lambda: address.value + offset

OnDevice.dtype, OnDevice.nbytes, OnDevice.is_cpu, OnDevice.is_sparse = "float32", 16, False, False
OnDevice.requires_grad = False
OnDevice.copy_ = lambda self, values: self
OnDevice.detach = lambda self: self
parameters = [Parameter(), Parameter()]
buckets = [(f"bucket {i}", _core.FLOAT32, address.value + 16 * i, 16, 0) for i in range(2)]
hook = _core.GradHook(parameters, [View(0), View(16)], [0, 1], [0, 0], buckets)
hook.target(comm, prescale=2.0)
"""


def test_a_refused_bucket_is_sent_again_on_the_streams_that_wrote_it(tmp_path: Path, fake_driver: Path) -> None:
    script = """
capture(stream, True)
try:
    hook.hook(0)()
except ValueError as error:
    print("captured" in str(error))
capture(stream, False)
hook.hook(1)()
current = ctypes.c_void_p()
before = submitted(stream)
hook.flush()
print(submitted(stream) > before)
hook.wait()
"""
    assert run_following(ALONE + HOOK + script, fake_driver, tmp_path / "ring") == "True\nTrue\n"


def test_two_threads_may_send_buckets_at_the_same_time(tmp_path: Path, fake_driver: Path) -> None:
    script = """
hold(stream, True)
threads = [threading.Thread(target=hook.hook(i)) for i in range(2)]
for count, thread in enumerate(threads, 1):
    thread.start()
    while submitted(stream) < count:
        pass
hold(stream, False)
for thread in threads:
    thread.join()
hook.wait()
print(hook.pending)
"""
    for number in range(5):
        assert run_following(ALONE + HOOK + script, fake_driver, tmp_path / f"ring{number}") == "0\n"


def test_stamps_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    recorder = _core.Recorder(str(path), 8, 3)
    recorder.step = 5
    begin, ready = _core.EVENTS["STEP_BEGIN"], _core.EVENTS["GRAD_READY"]
    recorder.put_at(17, begin, 1, -1, c=2**64 - 1)
    stamper = recorder.stamper(ready, key=9, a=8, b=7)
    before = _core.now_ns()
    assert stamper(1, "two", three=3) is None
    recorder.put(begin, e=6)
    after = _core.now_ns()
    recorder.close()
    first, second, third = events_of(path)
    assert first == (17, begin, 5, 1, 2**64 - 1, 0, 2**64 - 1, 0, 0)
    assert second[1:] == (ready, 5, 9, 8, 7, 0, 0, 0)
    assert third[1:] == (begin, 5, 0, 0, 0, 0, 0, 6)
    assert before <= second[0] <= third[0] <= after


def test_an_operation_numbers_its_turns(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    recorder = _core.Recorder(str(path), 16, 0)
    names = ("OP_SUBMIT", "OP_START", "OP_DONE")
    submit, start, done = (_core.EVENTS[name] for name in names)
    operation = recorder.operation(2**64 - 1, 4096, 3, 0x10102)
    submitted = [operation.submitted()]
    ends = [operation.started()]
    submitted.append(operation.submitted())
    ends.append(operation.started())
    assert not recorder.settle()  # two ends are awaited
    ends.pop()("a future")
    ends.pop()("a future")
    assert recorder.settle()
    recorder.close()
    events = events_of(path)
    key = 2**64 - 1
    started = [event[0] for event in events if event[1] == start]
    calls = [end - begin for begin, end in zip(submitted, started, strict=True)]  # ns of each
    assert [event[1:] for event in events] == [
        (submit, 0, key, 0, 4096, 3, 0, 0x10102),
        (start, 0, key, 0, calls[0], 0, 0, 0),
        (submit, 0, key, 1, 4096, 3, 0, 0x10102),
        (start, 0, key, 1, calls[1], 0, 0, 0),
        (done, 0, key, 1, 0, 0, 0, 0),
        (done, 0, key, 0, 0, 0, 0, 0),
    ]
    assert [event[0] for event in events if event[1] == submit] == submitted


@pytest.mark.parametrize("first", [0, 1])
def test_of_a_stamper_and_its_twin_the_first_call_stamps(tmp_path: Path, first: int) -> None:
    recorder = _core.Recorder(str(tmp_path / "ring"), 8, 0)
    event = _core.EVENTS["OP_DONE"]
    stampers = [recorder.stamper(event, 5, awaited=True)]
    stampers += [stampers[0].twin(), stampers[0].twin()]
    stampers[first]()
    between = _core.now_ns()
    for stamper in stampers:
        stamper()
    assert not recorder.settle()
    del stampers[0], stamper
    assert recorder.settle()  # a twin is not awaited
    stampers[0]()
    recorder.close()
    ((time_ns, kind, _, key, *_),) = events_of(tmp_path / "ring")
    assert (kind, key) == (event, 5)
    assert time_ns <= between


def test_an_operation_of_a_closed_recorder_stamps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    recorder = _core.Recorder(str(path), 2, 0)
    operation = recorder.operation(1, 8, 1, 0)
    recorder.close()
    operation.submitted()
    operation.started()()
    assert events_of(path) == []
    with pytest.raises(TypeError):
        type(operation)()
    with pytest.raises(ValueError, match=str(2**65)):
        recorder.operation(2**65, 8, 1, 0)


def test_a_full_ring_keeps_the_first_events_and_the_last_ones(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    recorder = _core.Recorder(str(path), 8, 0)
    for step in range(20):
        recorder.step = step
        recorder.put(_core.EVENTS["STEP_END"], key=step)
        if step == 10:
            recorder.put(_core.EVENTS["LANE_LOST"], key=step)
    assert recorder.overwritten == 12
    recorder.close()
    assert recorder.overwritten == 12
    found = ring_file.read_ring(path)
    assert [key for key, kind in found.events[["key", "kind"]].tolist() if kind == _core.EVENTS["STEP_END"]] == [
        *range(2),
        *range(14, 20),
    ]
    (lost,) = found.events[found.events["kind"] == _core.EVENTS["LANE_LOST"]]
    assert (int(lost["key"]), int(lost["step"])) == (10, 10)
    assert (found.gap, found.overwritten, found.dropped) == ((1, 14), 12, 0)


def test_a_closed_recorder_stamps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    recorder = _core.Recorder(str(path), 2, 0)
    stamper = recorder.stamper(_core.EVENTS["STEP_END"])
    recorder.close()
    recorder.close()
    stamper()
    recorder.put(_core.EVENTS["STEP_END"])
    assert events_of(path) == []


def test_a_comm_keeps_its_recorder_open(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    recorder = _core.Recorder(str(path), 64, 0)
    comm = _core.Comm(0, 1, secret=b"", recorder=recorder)
    recorder.close()
    comm.submit("late", _core.ALLREDUCE, bytearray(4), _core.FLOAT32).wait()
    comm.close()
    kinds = [event[1] for event in events_of(path)]
    assert _core.EVENTS["OP_SUBMIT"] in kinds
    assert _core.EVENTS["OP_DONE"] in kinds


def test_a_comm_that_does_not_open_releases_its_recorder(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    recorder = _core.Recorder(str(path), 64, 0)
    listener = _core.Listener("127.0.0.1")
    listener.close()
    with pytest.raises(ValueError, match="listener is closed"):
        _core.Comm(0, 2, secret=bytes(16), listener=listener, recorder=recorder)
    recorder.close()
    assert ring_file.read_ring(path).closed


# operations


def test_one_rank_needs_no_network(alone: _core.Comm) -> None:
    line = np.arange(8, dtype=np.float32)
    work = alone.submit("scaled", _core.ALLREDUCE, line, _core.FLOAT32, prescale=4.0, postscale=0.5)
    assert work.wait() is True
    assert work.test() is True
    assert line.tolist() == [2.0 * i for i in range(8)]
    times = work.times()
    assert 0 < times[0] <= times[4] <= _core.now_ns()
    assert alone.exchange(b"blob") == [b"blob"]
    assert (alone.rank, alone.size) == (0, 1)


def test_two_ranks_add_over_pieces(pair: list[_core.Comm]) -> None:
    def add(comm: _core.Comm) -> list[float]:
        first = np.full(3, comm.rank + 1, np.float32)
        second = np.full(1000, comm.rank + 2, np.float32)
        memory = [first, (second.ctypes.data, second.nbytes), bytearray(0)]
        comm.submit("pieces", _core.ALLREDUCE, memory, _core.FLOAT32, keep=second).wait()
        return [*set(first.tolist()), *set(second.tolist())]

    assert on_ranks(pair, add) == [[3.0, 5.0]] * 2


class Pinned:
    """A tensor in pinned memory of the host, in a torch without DLPack's table."""

    def __init__(self, line: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        self._line = line

    def __dlpack_device__(self) -> tuple[int, int]:
        return 3, 0

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return self._line.ctypes.data

    def numel(self) -> int:
        return self._line.size

    def element_size(self) -> int:
        return self._line.itemsize


class OnDevice(Pinned):
    """A tensor of 16 bytes in the memory of a GPU."""

    def __init__(self) -> None:
        super().__init__(np.zeros(4, np.float32))

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_pinned_memory_travels_as_memory_of_the_host(pair: list[_core.Comm]) -> None:
    def add(comm: _core.Comm) -> list[float]:
        lines = [np.full(3, comm.rank + 1, np.float32), np.full(2, comm.rank + 2, np.float32)]
        memory: Any = [Pinned(lines[0]), lines[1]]
        comm.submit("pinned", _core.ALLREDUCE, memory, _core.FLOAT32).wait()
        return [*set(lines[0].tolist()), *set(lines[1].tolist())]

    assert on_ranks(pair, add) == [[3.0, 5.0]] * 2


def test_blobs_are_exchanged_by_rank(pair: list[_core.Comm]) -> None:
    for _ in range(3):
        assert on_ranks(pair, lambda comm: comm.exchange(b"rank%d" % comm.rank)) == [[b"rank0", b"rank1"]] * 2
    assert on_ranks(pair, lambda comm: comm.exchange(b"")) == [[b"", b""]] * 2


def test_blobs_of_unequal_length_are_a_mismatch(pair: list[_core.Comm]) -> None:
    with pytest.raises(errors.MismatchError):
        on_ranks(pair, lambda comm: comm.exchange(bytes(comm.rank + 1)))


def test_an_exchange_with_a_name_that_ends_at_its_limit_leaves_the_others_in_order(pair: list[_core.Comm]) -> None:
    for comm in pair:  # one after the other: neither finds what the other has sent
        with pytest.raises(TimeoutError, match="'turns' has waited"):
            comm.exchange(b"alone", limit_s=0.05, name="turns")
    with pytest.raises(TimeoutError):
        pair[1].exchange(b"alone", limit_s=0.05, name="turns")  # the other one leaves this one out
    for name in (None, "turns", None):
        found = on_ranks(pair, lambda comm, name=name: comm.exchange(b"%d" % comm.rank, name=name))
        assert found == [[b"0", b"1"]] * 2


def test_a_limit_below_a_millisecond_is_a_limit(pair: list[_core.Comm]) -> None:
    with pytest.raises(TimeoutError, match="'alone' has waited"):
        pair[0].exchange(b"", limit_s=1e-6, name="alone")


def test_a_barrier_and_a_broadcast(pair: list[_core.Comm]) -> None:
    def broadcast(comm: _core.Comm) -> bytes:
        comm.submit("barrier", _core.BARRIER, None, _core.UINT8).wait()
        line = bytearray(b"rank%d" % comm.rank)
        comm.submit("line", _core.BROADCAST, line, _core.UINT8, root=1).wait()
        return bytes(line)

    assert on_ranks(pair, broadcast) == [b"rank1"] * 2


def test_info_counts_bytes_and_survives_close(pair: list[_core.Comm]) -> None:
    line = 1 << 16

    def add(comm: _core.Comm) -> None:
        comm.submit("bytes", _core.ALLREDUCE, bytearray(line), _core.UINT8).wait()

    on_ranks(pair, add)
    on_ranks(pair, lambda comm: comm.close())
    for comm in pair:
        info = comm.info()
        assert info["bytes_out"] == info["bytes_in"] == line
        assert (info["streams_open"], info["lanes_lost"], info["provider"]) == (1, 0, "tcp")
        assert comm.notices() == []


def test_info_names_the_ports_at_which_the_lanes_listen(pair: list[_core.Comm]) -> None:
    lines = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    listening = {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A"}
    ports = [port for comm in pair for port in comm.info()["ports"]]
    assert len(set(ports)) == 2
    assert set(ports) <= listening


def test_a_mapped_arena_is_sent_without_a_copy(pair: list[_core.Comm]) -> None:
    def add(comm: _core.Comm) -> bytes:
        arena = _core.Arena(4096)
        comm.map(arena)
        memoryview(arena)[:] = bytes([comm.rank + 1]) * 4096
        comm.submit("arena", _core.ALLREDUCE, arena, _core.UINT8).wait()
        return bytes(memoryview(arena))

    assert on_ranks(pair, add) == [b"\3" * 4096] * 2


# lifetimes


def test_memory_and_keep_live_until_a_dropped_work_is_done(pair: list[_core.Comm]) -> None:
    line, token = bytearray(64), Token()
    watch = weakref.ref(token)
    work = pair[0].submit("dropped", _core.ALLREDUCE, line, _core.UINT8, keep=token)
    del work, token
    gc.collect()
    assert watch() is not None
    with pytest.raises(BufferError):
        line.append(1)
    pair[1].submit("dropped", _core.ALLREDUCE, bytearray(b"\1" * 64), _core.UINT8).wait()
    pair[1].submit("after", _core.BARRIER, None, _core.UINT8)
    pair[0].submit("after", _core.BARRIER, None, _core.UINT8).wait()
    pair[0].notices()
    assert watch() is None
    line.append(1)
    assert line == b"\1" * 65


def test_a_completed_work_releases_its_memory(alone: _core.Comm) -> None:
    line, token = bytearray(64), Token()
    watch = weakref.ref(token)
    work = alone.submit("done", _core.ALLREDUCE, line, _core.UINT8, keep=token)
    del token
    work.wait()
    assert watch() is None
    line.append(1)


def test_close_releases_everything(pair: list[_core.Comm]) -> None:
    line, token = bytearray(64), Token()
    watch = weakref.ref(token)
    pair[0].submit("pending", _core.ALLREDUCE, line, _core.UINT8, keep=token)
    del token
    pair[0].close()
    assert watch() is None
    line.append(1)


def test_a_collected_cycle_keeps_the_memory_of_a_pending_work(pair: list[_core.Comm]) -> None:
    memory = np.ones(64, np.uint8)  # the collector does not track it: the weak reference shows when it is freed
    watch = weakref.ref(memory)
    place = (memory.ctypes.data, memory.nbytes)
    box: list[Any] = [memory]
    box.append(pair[0].submit("cycle", _core.ALLREDUCE, place, _core.UINT8, keep=box))
    del memory, box
    gc.collect()
    assert watch() is not None
    pair[1].submit("cycle", _core.ALLREDUCE, bytearray(64), _core.UINT8).wait()
    on_ranks(pair, lambda comm: comm.submit("after", _core.BARRIER, None, _core.UINT8).wait())
    pair[0].notices()
    gc.collect()
    assert watch() is None


def test_a_job_in_a_collected_cycle_ends_before_the_memory_of_its_operations_is_freed() -> None:
    box: list[Any] = []  # made first: the collector clears it before the communicator
    comms, seen = join(2), []

    def freed(_: object) -> None:
        try:
            comms[1].submit("cycle", _core.ALLREDUCE, bytearray(64), _core.UINT8).wait()
            seen.append("rank 0 took part")
        except errors.Error:
            seen.append("rank 0 has ended")

    memory = np.ones(64, np.uint8)
    watch = weakref.ref(memory, freed)
    place = (memory.ctypes.data, memory.nbytes)
    box += [comms[0].submit("cycle", _core.ALLREDUCE, place, _core.UINT8, keep=box), comms[0], memory]
    comms[0] = comms[1]
    del memory, box
    gc.collect()
    assert watch() is None
    assert seen == ["rank 0 has ended"]
    comms[1].close()


def test_a_cycle_through_a_pending_work_is_collected() -> None:
    comms = join(2)
    token = Token()
    watch = weakref.ref(token)
    token.work = comms[0].submit("cycle", _core.ALLREDUCE, bytearray(64), _core.UINT8, keep=token)  # type: ignore[attr-defined]
    token.comm = comms[0]  # type: ignore[attr-defined]
    del token
    comms[0] = comms[1]
    gc.collect()
    assert watch() is None
    comms[1].close()


CLOSED_MEANWHILE = """
import sys, types
from netbottleneck import _core, errors

memory = bytearray(16)


class Number:
    def __index__(self):
        comm.close()
        return 0


class Ranks:
    def __iter__(self):
        comm.close()
        return iter([0])


class OnDevice:
    is_contiguous = lambda self: True
    data_ptr = lambda self: 64
    numel = lambda self: 4
    element_size = lambda self: 4
    __dlpack_device__ = lambda self: (2, 0)


def current_stream(number):
    comm.close()
    return types.SimpleNamespace(cuda_stream=1)


sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch.cuda"] = types.SimpleNamespace(current_stream=current_stream)
calls = [
    lambda: comm.submit("x", _core.ALLREDUCE, memory, _core.FLOAT32, group=Number()),
    lambda: comm.submit("x", _core.ALLREDUCE, memory, _core.FLOAT32, root=Number()),
    lambda: comm.submit("x", _core.ALLREDUCE, OnDevice(), _core.FLOAT32),
    lambda: comm.missing("x", group=Number()),
    lambda: comm.group(1, Ranks()),
    lambda: _core.GradHook([], [], [], [], []).target(comm, group=Number()),
]
for call in calls:
    comm = _core.Comm(0, 1, secret=b"")
    try:
        call()
        print("no error")
    except errors.ClosedError as error:
        print(error.strerror)
memory.append(0)  # nothing keeps it
"""


def test_a_communicator_that_an_argument_closes_is_refused() -> None:
    assert run_python(CLOSED_MEANWHILE).splitlines() == ["communicator is closed"] * 6


def test_a_close_in_which_the_collector_runs_another_close() -> None:
    """The collector may run at any allocation of close(), and a finaliser may call it."""
    source = """
import gc
from netbottleneck import _core

class Closing:
    def __init__(self, comm):
        self.comm, self.myself = comm, self

    def __del__(self):
        self.comm.close()

for allocations in range(1, 40):
    comm = _core.Comm(0, 1, secret=b"")
    gc.collect()
    gc.disable()
    Closing(comm)
    gc.set_threshold(gc.get_count()[0] + allocations)
    gc.enable()
    comm.close()
    gc.set_threshold(700)
    assert comm.info()["streams_open"] == 0, comm.info()
    assert comm.notices() == []
"""
    run_python(source)


def test_nothing_grows_over_ten_thousand_operations() -> None:
    source = """
import gc, resource, sys, tempfile, os
from netbottleneck import _core
comm = _core.Comm(0, 1, secret=b"")
recorder = _core.Recorder(os.path.join(tempfile.mkdtemp(), "ring"), 16, 0)
line, keep = bytearray(4096), object()
def some(times):
    for i in range(times):
        comm.submit("op", _core.ALLREDUCE, [line, (0, 0)], _core.FLOAT32, keep=keep).wait()
        comm.submit("dropped", _core.ALLREDUCE, line, _core.FLOAT32, keep=keep)
        comm.exchange(b"blob"); comm.info(); comm.notices()
        memoryview(_core.Arena(4096)).release()
        recorder.stamper(1)(); recorder.put(1, key=i)
        _core.reduce(line, line, _core.FLOAT32, _core.MAX)
        _core.reduce_pair(line, line, _core.UINT8, _core.SUM)
        for bad in (lambda: comm.submit("", 0, line, 0), lambda: comm.submit("x", 0, [line, b"ro"], 0)):
            try:
                bad()
            except ValueError:
                pass
def count():
    for _ in range(2):  # the dropped operations end, then a submission frees them
        comm.submit("last", _core.ALLREDUCE, bytearray(4), _core.FLOAT32).wait()
    gc.collect(); comm.notices()
    return [sys.getrefcount(x) for x in (line, keep, comm, recorder, _core.Work, _core.Arena, None)]
def rss_kib():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize() // 1024
some(1000)
before, memory = count(), rss_kib()
some(10000)
after, grown = count(), rss_kib() - memory
# A leak is one for each operation of some kind, 10000. The interpreter's own references to None vary by dozens.
assert all(abs(a - b) < 1000 for a, b in zip(before, after)), (before, after)
assert before[:4] == after[:4], (before, after)
assert grown < 1024, grown
"""
    run_python(source)


def test_the_clock_is_recorded_in_another_recorder_too(pair: list[_core.Comm], tmp_path: Path) -> None:
    """A closed or replaced recorder gets no more."""
    kind = _core.EVENTS["CLOCK"]
    first, second = (_core.Recorder(str(tmp_path / name), 64, 1) for name in ("first", "second"))
    for recorder, name in ((first, "first"), (second, "second")):
        pair[1].record_clock(recorder)
        until = time.monotonic() + RANKS_LIMIT_S
        while not any(event[1] == kind for event in events_of(tmp_path / name)):
            assert time.monotonic() < until, f"no measurement in {name}"
            time.sleep(0.01)
    pair[1].record_clock(None)
    second.close()
    first.close()
    offset, trip = next(event[4:6] for event in events_of(tmp_path / "second") if event[1] == kind)
    assert trip > 0
    assert abs(signed(offset)) <= trip  # one host has one clock
    with pytest.raises(ValueError, match="recorder is closed"):
        pair[1].record_clock(first)
    with pytest.raises(TypeError, match="must be a Recorder or None"):
        pair[1].record_clock(3)  # type: ignore[arg-type]


# failures


def test_wait_returns_after_its_timeout(pair: list[_core.Comm]) -> None:
    work = pair[0].submit("alone", _core.BARRIER, None, _core.UINT8)
    assert work.test() is False
    assert work.wait(0) is False
    assert work.wait(0.01) is False
    pair[1].submit("alone", _core.BARRIER, None, _core.UINT8)
    assert work.wait(LIMIT_S) is True


def test_a_signal_ends_a_wait_and_not_the_operation() -> None:
    class Rang(Exception):
        pass

    def ring(*_: object) -> None:
        raise Rang

    pair = join(2, stall_s=0.0)  # no notice of a stall, whose logging would run the handler
    old = signal.signal(signal.SIGUSR1, ring)
    try:
        work = pair[0].submit("long", _core.BARRIER, None, _core.UINT8)
        until = _core.now_ns() + int(LIMIT_S * 1e9)
        with asleep.signalled(signal.SIGUSR1, LIMIT_S) as begin, pytest.raises(Rang):  # noqa: PT012 - nothing between
            begin()
            work.wait(LIMIT_S)
        assert _core.now_ns() < until
    finally:
        signal.signal(signal.SIGUSR1, old)
    pair[1].submit("long", _core.BARRIER, None, _core.UINT8)
    assert work.wait(LIMIT_S) is True
    for comm in pair:
        comm.close()


def test_close_wakes_a_wait_of_another_thread(pair: list[_core.Comm]) -> None:
    work = pair[0].submit("pending", _core.BARRIER, None, _core.UINT8)
    raised: list[BaseException] = []
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        try:
            work.wait(LIMIT_S)
        except errors.ClosedError as failure:
            raised.append(failure)

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(LIMIT_S)
    pair[0].close()
    thread.join(LIMIT_S)
    assert [type(failure) for failure in raised] == [errors.ClosedError]


def test_abort_reaches_the_other_rank(pair: list[_core.Comm]) -> None:
    work = pair[1].submit("pending", _core.BARRIER, None, _core.UINT8)
    pair[0].abort("the disk is full")
    with pytest.raises(errors.PeerError, match="the disk is full") as caught:
        work.wait(LIMIT_S)
    assert caught.value.peer == 0
    assert isinstance(caught.value, errors.HorovodInternalError)


def test_a_dropped_comm_fails_the_others() -> None:
    comms = join(2)
    work = comms[1].submit("pending", _core.BARRIER, None, _core.UINT8)
    del comms[0]
    gc.collect()
    with pytest.raises(errors.PeerError) as caught:
        work.wait(LIMIT_S)
    assert caught.value.peer == 0
    comms[0].close()


def test_calls_after_close_raise_closed_error(alone: _core.Comm) -> None:
    alone.close()
    alone.close()
    for call in (
        lambda: alone.submit("x", _core.BARRIER, None, _core.UINT8),
        lambda: alone.exchange(b""),
        lambda: alone.map(_core.Arena(8)),
    ):
        with pytest.raises(errors.ClosedError, match="closed"):
            call()


def test_a_name_that_is_pending_is_refused(pair: list[_core.Comm]) -> None:
    pair[0].submit("same", _core.BARRIER, None, _core.UINT8)
    with pytest.raises(ValueError, match="same"):
        pair[0].submit("same", _core.BARRIER, None, _core.UINT8)


def test_ranks_that_differ_are_a_mismatch_and_the_job_goes_on(pair: list[_core.Comm]) -> None:
    works = [comm.submit("grads", _core.ALLREDUCE, bytearray(8 * (1 + comm.rank)), _core.UINT8) for comm in pair]
    for work in works:
        with pytest.raises(errors.MismatchError, match="grads"):
            work.wait(LIMIT_S)
    assert on_ranks(pair, lambda comm: comm.exchange(b"on")) == [[b"on", b"on"]] * 2


def test_a_missing_rank_is_named() -> None:
    listener = _core.Listener(ifname="lo")
    with pytest.raises(errors.DeadlineError, match="1") as caught:
        _core.Comm(0, 2, secret=SECRET, listener=listener, timeout_s=0.2)
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, errors.HorovodInternalError)


class HandledError(Exception):
    """Raised by a signal handler."""


def test_the_exception_of_a_signal_handler_ends_a_join(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    listener = _core.Listener(ifname="lo")
    recorder = _core.Recorder(str(path), 64, 0)
    host, _, port = listener.address.rpartition(":")
    handled = threading.Semaphore(0)
    calls: list[int] = []

    def handle(number: int, _: Any) -> None:
        calls.append(number)
        handled.release()
        if len(calls) == 2:
            raise HandledError

    def send_two_signals() -> None:
        for _ in range(2):
            with socket.create_connection((host, int(port)), LIMIT_S) as stranger:
                stranger.sendall(b"?")
                stranger.recv(1)  # the join in progress drops a stranger
            os.kill(os.getpid(), signal.SIGUSR1)
            assert handled.acquire(timeout=LIMIT_S)

    sender = threading.Thread(target=send_two_signals)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        sender.start()
        with pytest.raises(HandledError):
            _core.Comm(0, 2, secret=SECRET, listener=listener, recorder=recorder, timeout_s=LIMIT_S)
        sender.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert calls == [signal.SIGUSR1] * 2
    listener.close()  # neither is in use any more
    recorder.close()
    assert ring_file.read_ring(path).closed


def test_tags_that_differ_are_a_mismatch() -> None:
    listener = _core.Listener(ifname="lo")

    def open_rank(rank: Any) -> _core.Comm:
        door = {"listener": listener} if rank == 0 else {"address": listener.address}
        return _core.Comm(rank, 2, secret=SECRET, tag=f"tag {rank}", timeout_s=2.0, **door)

    with pytest.raises(errors.MismatchError, match="tag"):
        on_ranks([0, 1], open_rank)


def test_errors_can_be_pickled() -> None:
    failure = errors.PeerError(104, "rank 3 is gone")
    failure.peer = 3
    back = pickle.loads(pickle.dumps(failure))
    assert (type(back), back.args, back.peer) == (errors.PeerError, (104, "rank 3 is gone"), 3)


# bad input: the argument and its value are named


def comm_with(**options: Any) -> Callable[[], object]:
    return lambda: _core.Comm(**{"rank": 0, "size": 1, "secret": b"", **options})


BAD_COMMS = [
    ({"size": 0}, "size .* not 0"),
    ({"rank": 1}, "rank .* not 1"),
    ({"rank": -1}, "rank .* not -1"),
    ({"size": 2, "secret": b"short"}, "secret .* not 5"),
    ({"size": 2, "secret": SECRET}, "listener .* rank 0"),
    ({"size": 2, "rank": 1, "secret": SECRET}, "address .* rank 1"),
    ({"size": 2, "rank": 1, "secret": SECRET, "address": "nowhere"}, "nowhere"),
    ({"transport": "pigeon"}, 'transport .*"tcp".* not "pigeon"'),
    ({"streams": 65}, "streams .* 64, not 65"),
    ({"streams": -1}, "streams .* not -1"),
    ({"segment_bytes": 1 << 40}, f"segment_bytes .* not {1 << 40}"),
    ({"segment_bytes": 100}, "100 bytes"),
    ({"timeout_s": 0}, "timeout_s .* not 0"),
    ({"timeout_s": float("nan")}, "timeout_s .* not nan"),
    ({"stall_s": -1.0}, "stall_s .* not -1.0"),
    ({"stall_end_s": -1.0}, "stall_end_s .* not -1.0"),
    ({"ports": (7, 3)}, r"ports .* not \(7, 3\)"),
    ({"ports": (1, 1 << 16)}, r"ports\[1\] .* not 65536"),
    ({"tag": "a\0b"}, "tag .* null"),
]


@pytest.mark.parametrize(("options", "message"), BAD_COMMS)
def test_a_comm_names_a_bad_argument(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        comm_with(**options)()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": "zero"}, "rank .* not 'zero'"),
        ({"secret": "text"}, "bytes"),
        ({"provider": 3}, "provider .* not 3"),
        ({"recorder": "ring"}, "recorder .* not 'ring'"),
        ({"listener": 4, "size": 2, "secret": SECRET}, "listener .* not 4"),
        ({"ports": 5}, "ports .* not 5"),
        ({"timeout_s": "soon"}, "timeout_s .* not 'soon'"),
    ],
)
def test_a_comm_names_a_bad_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        comm_with(**options)()


GOOD_SUBMIT: dict[str, Any] = {"name": "op", "kind": _core.ALLREDUCE, "memory": bytearray(8), "dtype": _core.FLOAT32}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": ""}, "name"),
        ({"name": "n" * 200}, "name"),
        ({"kind": 99}, "kind .* not 99"),
        ({"dtype": 77}, "dtype .* not 77"),
        ({"op": -1}, "op .* not -1"),
        ({"root": 2}, "root .* not 2"),
        ({"prescale": float("nan")}, "prescale .* not nan"),
        ({"postscale": float("inf")}, "postscale .* not inf"),
        ({"priority": 1 << 40}, f"priority .* not {1 << 40}"),
        ({"bucket": -3}, "bucket .* not -3"),
        ({"memory": b"read only"}, r"memory\[0\] .*writable"),
        ({"memory": bytearray(7)}, r"memory\[0\] has 7 bytes"),
        ({"memory": [bytearray(8), np.zeros((4, 4), np.float32)[:, 1]]}, r"memory\[1\] .*contiguous"),
        ({"memory": (0, 8)}, r"memory\[0\] .*\(0, 8\)"),
        ({"memory": (4096, -8)}, r"memory\[0\] .*\(4096, -8\)"),
        ({"memory": [bytearray(4)] * 513}, "513 pieces; the limit is 512"),
    ],
)
def test_submit_names_a_bad_argument(alone: _core.Comm, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        alone.submit(**{**GOOD_SUBMIT, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"memory": 5}, r"memory\[0\] .*int"), ({"memory": [bytearray(4), "text"]}, r"memory\[1\] .*str")],
)
def test_submit_names_a_bad_type(alone: _core.Comm, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        alone.submit(**{**GOOD_SUBMIT, **changed})


def test_a_line_that_ranks_cannot_share_is_refused(pair: list[_core.Comm]) -> None:
    with pytest.raises(ValueError, match='"shared" has 12 bytes, which 2 ranks'):
        pair[0].submit("shared", _core.ALLGATHER, bytearray(12), _core.FLOAT32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _core.Arena(0), "nbytes .* not 0"),
        (lambda: _core.Arena(-5), "nbytes .* not -5"),
        (lambda: _core.dtype_size(8), "dtype .* not 8"),
        (lambda: _core.reduce(bytearray(4), bytearray(8), _core.FLOAT32, _core.SUM), "4 bytes and source 8"),
        (lambda: _core.reduce(bytearray(4), bytearray(4), _core.FLOAT32, _core.SUM, "mmx"), 'not "mmx"'),
        (lambda: _core.reduce_pair(bytearray(4), bytearray(8), _core.FLOAT32, _core.SUM), "4 bytes and the other 8"),
        (lambda: _core.reduce_pair(bytearray(4), bytearray(4), _core.INT8, _core.MAX), "int8 .* by op max"),
        (lambda: _core.reduce_pair(bytearray(4), b"read", _core.FLOAT32, _core.SUM), "writable"),
        (lambda: _core.reduce(OnDevice(), bytearray(16), _core.FLOAT32, _core.SUM), "memory of the host"),
        (lambda: _core.reduce_pair(bytearray(16), OnDevice(), _core.FLOAT32, _core.SUM), "memory of the host"),
        (lambda: _core.reduce_times(OnDevice(), bytearray(16), 16, _core.FLOAT32), "memory of the host"),
        (lambda: _core.copy_times(bytearray(16), OnDevice(), 16), "memory of the host"),
        (lambda: _core.Listener(address="nowhere"), "nowhere"),
        (lambda: _core.Listener(ports=(9, 2)), r"ports .* not \(9, 2\)"),
        (lambda: _core.Recorder("ring", 0, 0), "capacity .* not 0"),
        (lambda: _core.Recorder("ring", 8, -2), "rank .* not -2"),
    ],
)
def test_a_bad_value_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_what_the_system_refuses_is_an_error_with_errno(tmp_path: Path) -> None:
    with pytest.raises(errors.Error, match="missing") as caught:
        _core.Recorder(str(tmp_path / "missing" / "ring"), 8, 0)
    assert caught.value.errno == 2
    with pytest.raises(errors.Error, match="nosuchif0"):
        _core.Listener(ifname="=nosuchif0")
    with pytest.raises(errors.Error, match="/nonexistent"):
        _core.libfabric("/nonexistent")


def test_a_bad_stamp_is_named(tmp_path: Path) -> None:
    recorder = _core.Recorder(str(tmp_path / "ring"), 8, 0)
    for call in (
        lambda: recorder.put(0),
        lambda: recorder.put_at(1, max(_core.EVENTS.values()) + 1),
        lambda: recorder.stamper(-1),
    ):
        with pytest.raises(ValueError, match="kind"):
            call()
    with pytest.raises(ValueError, match=str(1 << 64)):
        recorder.put(1, key=1 << 64)
    with pytest.raises(ValueError, match=r"step .* not -1"):
        recorder.step = -1


# fork


def child_output(work: Callable[[], str]) -> str:
    """Return the result of work in a forked child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, work().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        output = pipe.read()
    os.waitpid(pid, 0)
    return output


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except errors.Error as failure:
        return str(failure)
    return "no error"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_and_leaves_the_job_intact(pair: list[_core.Comm], tmp_path: Path) -> None:
    comm = pair[0]
    work = comm.submit("across", _core.BARRIER, None, _core.UINT8)
    path = tmp_path / "ring"
    recorder = _core.Recorder(str(path), 8, 0)
    stamper = recorder.stamper(_core.EVENTS["STEP_END"])
    calls: list[Callable[[], object]] = [
        lambda: comm.submit("child", _core.BARRIER, None, _core.UINT8),
        lambda: comm.exchange(b""),
        lambda: comm.map(_core.Arena(8)),
        comm.info,
        comm.notices,
        lambda: comm.abort("child"),
        comm.close,
        work.test,
        work.wait,
        lambda: recorder.put(1),
    ]

    def use_all() -> str:
        nonlocal work, recorder
        refusals = [refusal(call) for call in calls]
        calls.clear()
        stamper()
        work = recorder = comm_gone = None  # type: ignore[assignment]  # noqa: F841
        gc.collect()
        return "\n".join(refusals)

    refusals = child_output(use_all).splitlines()
    assert len(refusals) == 10
    assert all(f"made in process {os.getpid()}, used in process" in line for line in refusals), refusals
    pair[1].submit("across", _core.BARRIER, None, _core.UINT8)
    assert work.wait(LIMIT_S) is True
    recorder.put(_core.EVENTS["STEP_BEGIN"])
    recorder.close()
    assert [event[1] for event in events_of(path)] == [_core.EVENTS["STEP_BEGIN"]]
