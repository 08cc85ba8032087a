"""One all-reduce of more than 2^32 bytes, over each network."""

from __future__ import annotations

import psutil
import pytest
from conftest import Ranks

NEEDED = 12 << 30
LIMIT_S = 300.0

# Each byte encodes its position, so misplaced or missing data changes the sum. Rank r adds r.
SCRIPT = """
import numpy as np
import netbottleneck as nb
from netbottleneck.runtime.ops import Sum

CHUNK = (1 << 26) + 9
COUNT = 64 * CHUNK  # 4 GiB and 576 bytes

nb.init()
place = np.arange(CHUNK, dtype=np.uint32) * np.uint32(2654435761)
wide = np.empty_like(place)
mine, theirs = np.empty(CHUNK, np.uint8), np.empty(CHUNK, np.uint8)

def fill(out, chunk, rank):
    np.add(place, np.uint32(chunk * 40503), out=wide)
    np.right_shift(wide, np.uint32(24), out=wide)
    np.add(wide, np.uint32(rank), out=out, casting="unsafe")

line = np.empty(COUNT, np.uint8)
for chunk in range(64):
    fill(line[chunk * CHUNK : (chunk + 1) * CHUNK], chunk, nb.rank())
nb.allreduce_(line, op=Sum, name="line")
wrong = 0
for chunk in range(64):
    fill(mine, chunk, 0)
    fill(theirs, chunk, 1)
    mine += theirs
    wrong += np.count_nonzero(line[chunk * CHUNK : (chunk + 1) * CHUNK] != mine)
print(line.nbytes > 1 << 32, wrong)
nb.shutdown()
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"NETBOTTLENECK_TRANSPORT": "tcp", "NETBOTTLENECK_SHM": "0"}, id="tcp"),
        pytest.param({"NETBOTTLENECK_TRANSPORT": "ofi", "NETBOTTLENECK_SHM": "0"}, id="ofi"),
        pytest.param({"NETBOTTLENECK_TRANSPORT": "tcp", "NETBOTTLENECK_SHM": "1"}, id="shm"),
    ],
)
def test_a_buffer_beyond_4_gib_is_summed(plain_ranks: Ranks, variables: dict[str, str]) -> None:
    if psutil.virtual_memory().available < NEEDED:
        pytest.skip("less than 12 GiB of memory are free")
    for result in plain_ranks(2, SCRIPT, variables, limit_s=LIMIT_S):
        assert result.stdout == "True 0\n", result.stderr
