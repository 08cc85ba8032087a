"""One rank of the tests of links that go down: verifies long all-reduces.

links.py FILE ROUNDS: reduces until FILE exists, then in ROUNDS further rounds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

import netbottleneck as nb

COUNT = 1 << 19


def main() -> None:
    """All-reduce until the rounds are over, or until an error."""
    seen, left = Path(sys.argv[1]), int(sys.argv[2])
    nb.init()
    began = time.monotonic()
    number = 0
    try:
        while left:
            began = time.monotonic()
            data = np.arange(COUNT, dtype=np.float32) % 1000 * (nb.rank() + 1)
            data[-1] = seen.exists()  # all ranks count from the same round
            nb.allreduce_(data, name="sum")
            expected = np.arange(COUNT, dtype=np.float32) % 1000 * ((nb.size() + 1) / 2)
            assert (data[:-1] == expected[:-1]).all(), f"round {number} is wrong"
            print(f"round {number}", flush=True)
            number += 1
            left -= bool(data[-1])
        print("right", flush=True)
    except nb.HorovodInternalError as error:
        print(f"failed {getattr(error, 'peer', None)} {began} {time.monotonic()} {error}", flush=True)
    nb.shutdown()


if __name__ == "__main__":
    main()
