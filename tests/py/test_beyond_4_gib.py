"""One all-reduce of more than 2^32 bytes, over each network."""

from __future__ import annotations

import psutil
import pytest
from conftest import Ranks

NEEDED = 12 << 30

# Each byte encodes its position, so misplaced or missing data changes the sum. Rank r adds r.
SCRIPT = """
import numpy as np
import netbottleneck as nb
from netbottleneck.runtime.ops import Sum

CHUNK = (1 << 26) + 9
COUNT = 64 * CHUNK  # 4 GiB and 576 bytes

nb.init()
place = np.arange(CHUNK, dtype=np.uint32)

def own(chunk, rank):
    return ((place * 2654435761 + chunk * 40503) >> 24).astype(np.uint8) + np.uint8(rank)

line = np.empty(COUNT, np.uint8)
for chunk in range(64):
    line[chunk * CHUNK : (chunk + 1) * CHUNK] = own(chunk, nb.rank())
nb.allreduce_(line, op=Sum, name="line")
wrong = 0
for chunk in range(64):
    expected = own(chunk, 0) + own(chunk, 1)
    wrong += np.count_nonzero(line[chunk * CHUNK : (chunk + 1) * CHUNK] != expected)
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
    for result in plain_ranks(2, SCRIPT, variables):
        assert result.stdout == "True 0\n", result.stderr
