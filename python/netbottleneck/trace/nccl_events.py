"""NCCL's operations, from the events of its profiler plugin. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace

from netbottleneck.trace import model as tr
from netbottleneck.trace.events import Event, signed

# Codes are the index plus 1, 0: another name. csrc/nccl/profiler.c. NCCL has no name for its uint8.
NCCL_FUNCTIONS = (
    *("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AlltoAll", "Send", "Recv"),
    "SendRecv",
)
NCCL_DTYPES = (
    *("int8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16", "float8e4m3"),
    *("float8e5m2", "uint8"),
)
NCCL_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
NCCL_PROTOCOLS = ("LL", "LL128", "SIMPLE")
OF_ONE_RANK = ("AllGather", "ReduceScatter")  # NCCL counts one rank's part
POINT_TO_POINT = ("Send", "Recv", "SendRecv")
# What NCCL reserves of a caller's tag.
TAG_BITS = (1 << 63) - 1


def _coded(table: Sequence[str], code: int) -> str | None:
    return table[code - 1] if 0 < code <= len(table) else None


def _nccl_step(e: Event) -> tr.NcclStep:
    first, second = e.time_ns + e.c, e.time_ns + e.c + e.d
    times_ns = (e.time_ns, first, second, second + e.e)
    return tr.NcclStep(bool(e.b >> 8 & 1), e.b & 0xFF, signed(e.a >> 32, 32), e.a & 0xFFFFFFFF, e.b >> 16, times_ns)


def _nccl_kernel(e: Event) -> tr.NcclKernel:
    return tr.NcclKernel(e.a, e.c, e.d, e.time_ns - e.b, e.time_ns)


def _nccl_task(e: Event, rank: int, comm: Event, step: tr.Step | None) -> tr.NcclOperation:
    function = _coded(NCCL_FUNCTIONS, e.c & 0xFF) or "other"
    alone = function in POINT_TO_POINT
    ranks = comm.b >> 32
    return tr.NcclOperation(
        rank=rank,
        comm=comm.key,
        comm_rank=comm.b & 0xFFFFFFFF,
        comm_size=ranks,
        function=function,
        dtype=_coded(NCCL_DTYPES, e.c >> 8 & 0xFF) or "other",
        bytes=e.b * ranks if function in OF_ONE_RANK else e.b,
        submit_ns=e.time_ns,
        algorithm=_coded(NCCL_ALGORITHMS, e.c >> 16 & 0xFF),
        protocol=_coded(NCCL_PROTOCOLS, e.c >> 24 & 0xFF),
        channels=e.c >> 32 & 0xFF,
        sequence=None if alone else e.d,
        peer=signed(e.d, 32) if alone else None,
        tag=e.e,
        step=step.index if step else None,
    )


class _Calls:
    """Finds the recorded call that enqueued an operation of NCCL, and its bucket: by the tag, else that of the call."""

    def __init__(self, collectives: Sequence[tr.Collective], buckets: Sequence[tr.Bucket]) -> None:
        self._by_tag = {bucket.key & TAG_BITS: index for index, bucket in enumerate(buckets)}
        self._calls = sorted((c for c in collectives if c.start_ns is not None), key=lambda c: c.submit_ns)
        self._submits = [c.submit_ns for c in self._calls]

    def bind(self, task: tr.NcclOperation) -> tr.NcclOperation:
        place = bisect.bisect_right(self._submits, task.submit_ns) - 1
        call = self._calls[place] if place >= 0 and task.submit_ns <= (self._calls[place].start_ns or 0) else None
        # A call may enqueue others, such as the exchange that opens a communicator.
        fits = call is not None and (call.kind, call.tensor_bytes) == (task.function.lower(), task.bytes)
        bucket = self._by_tag.get(task.tag, call.bucket if call is not None and fits else None)
        return replace(task, bucket=bucket, called_ns=None if call is None else call.submit_ns)


def nccl_operations(
    events: Sequence[Event],
    rank: int,
    step_at: Callable[[int], tr.Step | None],
    collectives: Sequence[tr.Collective],
    buckets: Sequence[tr.Bucket],
) -> tuple[tr.NcclOperation, ...]:
    """Return the operations that NCCL enqueued, in order, with their kernels and network steps.

    step_at, collectives: step at a time, and operations, of this rank's training thread, by the host's clock. Messages
    whose operation is another process's, or was not recorded,
    are left out.
    """
    comms = {e.a: e for e in events if e.kind == "NCCL_COMM"}
    calls = _Calls(collectives, buckets)
    kernels: dict[int, list[tr.NcclKernel]] = {}
    steps: dict[int, list[tr.NcclStep]] = {}
    for e in events:
        if e.kind == "NCCL_KERNEL":
            kernels.setdefault(e.key, []).append(_nccl_kernel(e))
        elif e.kind == "NCCL_STEP":
            steps.setdefault(e.key, []).append(_nccl_step(e))
    found = []
    for e in events:
        if e.kind == "NCCL_TASK" and e.a in comms:
            task = _nccl_task(e, rank, comms[e.a], step_at(e.time_ns))
            own = replace(task, kernel=tuple(kernels.get(e.key, ())), network=tuple(steps.get(e.key, ())))
            found.append(calls.bind(own))
    return tuple(found)
