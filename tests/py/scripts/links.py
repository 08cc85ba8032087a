"""One rank of the tests of links that go down: verifies long all-reduces."""

from __future__ import annotations

import sys
import time

import numpy as np

import netbottleneck as nb

COUNT = 1 << 19


def main() -> None:
    """All-reduce for a number of rounds, or until an error."""
    rounds = int(sys.argv[1])
    nb.init()
    began = time.monotonic()
    try:
        for number in range(rounds):
            began = time.monotonic()
            data = np.arange(COUNT, dtype=np.float32) % 1000 * (nb.rank() + 1)
            nb.allreduce_(data, name="sum")
            expected = np.arange(COUNT, dtype=np.float32) % 1000 * ((nb.size() + 1) / 2)
            assert (data == expected).all(), f"round {number} is wrong"
            print(f"round {number}", flush=True)
        print("right", flush=True)
    except nb.HorovodInternalError as error:
        print(f"failed {getattr(error, 'peer', None)} {began} {time.monotonic()} {error}", flush=True)
    nb.shutdown()


if __name__ == "__main__":
    main()
