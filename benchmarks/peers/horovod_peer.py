"""One rank of Horovod beside one rank of the benchmark, with the protocol of mpi_peer.c.

usage: horovod_peer.py DTYPE OP BYTES PID:MEMORY:ORDERS:ANSWERS…     a group for each rank, or for this one alone

Horovod's variables choose Gloo or MPI. The first answer, sent when all ranks are ready, is this process's number.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import signal
import struct
import sys
import time
from typing import Any

ORDER = struct.Struct("<QQ")  # elements from the beginning of the memory; all-reduces in place, one after another
ANSWER = struct.Struct("<qq")  # ns by this rank's clock; ns of processors, of all threads of this process
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process, even while it is stopped, when its parent ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def serve(orders: int, answers: int, memory: mmap.mmap, dtype: str, op: str) -> None:
    """Carry out orders until there are no more. The clock runs from an order's arrival to its last all-reduce's end.

    An order of no all-reduces is a barrier, after which Horovod's threads of all ranks run again.
    """
    torch: Any = importlib.import_module("torch")
    horovod: Any = importlib.import_module("horovod.torch")
    kind, reduction = getattr(torch, dtype), getattr(horovod, op.capitalize())
    while len(order := os.read(orders, ORDER.size)) == ORDER.size:
        count, times = ORDER.unpack(order)
        tensor = torch.frombuffer(memory, dtype=kind, count=count) if count else torch.empty(0, dtype=kind)
        start, cpu = time.monotonic_ns(), time.process_time_ns()
        for _ in range(times):
            horovod.allreduce_(tensor, name="bench", op=reduction)
        if times == 0:
            horovod.barrier()
        os.write(answers, ANSWER.pack(time.monotonic_ns() - start, time.process_time_ns() - cpu))
        del tensor


def main() -> int:
    """Start Horovod, then carry out orders."""
    end_with_parent()
    dtype, op, nbytes, *ranks = sys.argv[1:]
    horovod: Any = importlib.import_module("horovod.torch")
    horovod.init()
    pid, memory, orders, answers = ranks[horovod.rank() % len(ranks)].split(":")
    place = f"/proc/{pid}/fd"
    with open(f"{place}/{memory}", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), int(nbytes), mmap.MAP_SHARED | mmap.MAP_POPULATE)
    ordered = os.open(f"{place}/{orders}", os.O_RDONLY | os.O_CLOEXEC)
    answered = os.open(f"{place}/{answers}", os.O_WRONLY | os.O_CLOEXEC)
    horovod.barrier()
    os.write(answered, ANSWER.pack(os.getpid(), 0))
    serve(ordered, answered, mapped, dtype, op)
    horovod.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
