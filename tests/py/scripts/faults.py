"""One rank of the fault tests. Prints the lines that the test waits for."""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from netbottleneck.errors import HorovodInternalError
from netbottleneck.runtime import job, ops


def killed() -> None:
    """Reduce without end; when the test kills a rank, print the lost rank and how long the last call took."""
    big = np.ones(1 << 20, np.float32)
    print("reducing", flush=True)
    try:
        while True:
            began = time.monotonic()
            ops.allreduce_(big, ops.Average, name="big")
    except HorovodInternalError as error:
        print(f"lost {getattr(error, 'peer', None)}: {error}")
        print(f"after {time.monotonic() - began:.3f}")


def busy() -> None:
    """Rank 0 is busy for longer than the deadline of a silent peer: no error, only a stall report."""
    if job.current().place.rank == 0:
        ops.broadcast_object(name="others wait")  # rank 0 leaves this before the others enter the next
        time.sleep(float(os.environ["BUSY_S"]))
    else:
        ops.broadcast_object(name="others wait")
    assert ops.allreduce(np.ones(3), ops.Sum, name="late").tolist() == [job.current().place.size] * 3
    print("together again")


def main() -> None:
    job.start()
    {"killed": killed, "busy": busy, "nothing": lambda: None}[sys.argv[1]]()
    job.stop()


if __name__ == "__main__":
    main()
