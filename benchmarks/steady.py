"""One rank that all-reduces without a pause and reports the end of each all-reduce. A script, started in a lab.

python steady.py TRANSPORT STREAMS BYTES SECONDS; rank and rendezvous come from the environment. Rank 0 prints
"moving" once the first is done. At the end every rank prints {"done_ns": […], "wrong": …, "error": …, "info": {…}}.

Two operations are pending at any time, so that the wire never waits for the check of a result. Rank 0 stops all ranks
by the last element of the data.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netbottleneck import config
from netbottleneck.launch import connect

SLOTS = 2
VALUES = 1009


class Slot:
    """One operation's memory, and its expected result."""

    def __init__(self, name: str, nbytes: int, rank: int, size: int) -> None:
        core = connect.core()
        self.memory: Any = core.Arena(nbytes)
        self.name = name
        self.array: NDArray[np.float32] = np.frombuffer(self.memory, np.float32, nbytes // 4)
        pattern = np.resize(np.arange(1, VALUES, dtype=np.float32), len(self.array) - 1)
        self.mine = pattern * (rank + 1)
        self.right = pattern * (size * (size + 1) // 2)
        self.work: Any = None

    def submit(self, comm: Any, stop: bool) -> None:
        core = connect.core()
        self.array[:-1] = self.mine
        self.array[-1] = float(stop)
        where = [(self.memory.address, self.memory.nbytes // 4 * 4)]
        self.work = comm.submit(self.name, core.ALLREDUCE, where, core.FLOAT32, op=core.SUM, keep=self.memory)


def move(comm: Any, nbytes: int, seconds: float, result: dict[str, Any]) -> None:
    """All-reduce until rank 0 stops, and add the times to `result`. Raises as Work.wait."""
    core = connect.core()
    slots = [Slot(f"steady.{index}", nbytes, comm.rank, comm.size) for index in range(SLOTS)]
    for slot in slots:
        comm.map(slot.memory)
    until = time.monotonic() + seconds
    for slot in slots:
        slot.submit(comm, False)
    index = 0
    while True:
        slot = slots[index % SLOTS]
        slot.work.wait()
        result["done_ns"].append(core.now_ns())
        result["wrong"] += int(np.count_nonzero(slot.array[:-1] != slot.right))
        if slot.array[-1] > 0:
            break
        if index == 0 and comm.rank == 0:
            sys.stdout.write("moving\n")
            sys.stdout.flush()
        slot.submit(comm, comm.rank == 0 and time.monotonic() > until)
        index += 1
    for slot in slots:
        slot.work.wait()


def main() -> int:
    transport, streams, nbytes, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    result: dict[str, Any] = {"done_ns": [], "wrong": 0, "error": None, "info": {}}
    settings = config.settings()
    comm = connect.connect(settings, connect.detect(settings), transport=transport, streams=streams)
    try:
        move(comm, nbytes, seconds, result)
        found = comm.info()
        result["info"] = {name: found.get(name) for name in ("streams_used", "lanes_lost", "provider")}
    except (OSError, RuntimeError) as error:
        result["error"] = str(getattr(error, "strerror", None) or error)
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    comm.close()
    return 1 if result["error"] else 0


if __name__ == "__main__":
    sys.exit(main())
