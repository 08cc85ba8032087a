"""TCP ports for tests: blocks of consecutive ports, each of one test process, and single ports.

Both are below the ports that the kernel gives to outgoing connections, one of which could have taken a port between
its choice and its use.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Generator
from pathlib import Path

BLOCK = 96  # ports in a block
LOWEST, LEAST, MOST = 1 << 11, 1 << 11, 1 << 14  # the lowest port in use here; number of ports
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def below(outgoing: int) -> tuple[range, range]:
    """Return the first ports of all blocks, and the single ports. outgoing: the lowest port of outgoing connections.

    With less than LEAST ports below that one, outgoing connections may take ports of the tests too.
    """
    end = outgoing if outgoing >= LOWEST + LEAST else 1 << 15
    start = max(LOWEST, end - MOST)
    middle = start + (end - start) * 3 // 4 // BLOCK * BLOCK
    return range(start, middle, BLOCK), range(middle, end)


def here() -> tuple[range, range]:
    """Return `below` for this machine."""
    return below(int(OUTGOING.read_text(encoding="ascii").split()[0]))


def in_use() -> set[int]:
    """Return the TCP ports of this network namespace that have a socket."""
    found = set()
    for table in filter(Path.exists, TABLES):  # without IPv6 there is only the first
        for line in table.read_text(encoding="ascii").splitlines()[1:]:
            found.add(int(line.split()[1].rpartition(":")[2], 16))
    return found


@contextlib.contextmanager
def block() -> Generator[range, None, None]:
    """Provide a block of free ports, which no other caller of any process has until the exit.

    A name that only one socket of a network namespace can have stands for each block.
    """
    firsts, _ = here()
    for first in random.sample(firsts, len(firsts)):
        ports = range(first, first + BLOCK)
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(f"\0netbottleneck-tests-ports-{first}")
            except OSError:
                continue
            if not in_use().intersection(ports):
                yield ports
                return
    raise OSError(f"no block of {BLOCK} ports is free")


def free_port() -> int:
    """Return a TCP port of the loopback address that was free a moment ago."""
    _, singles = here()
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.choice(singles)))
            return int(probe.getsockname()[1])
