"""TCP ports for tests: blocks of consecutive ports, each of one test process, and single ports.

Both are below the ports that the kernel gives to outgoing connections, one of which could have taken a port between
its choice and its use.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import socket
from collections.abc import Generator, Iterator
from pathlib import Path

BLOCK = 96  # ports in a block
OWN = 64  # single ports that a process has at a time
LOWEST, LEAST, MOST = 1 << 11, 1 << 11, 1 << 14  # the lowest port in use here; number of ports
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
CLAIMS: list[object] = []  # of this process, until its end
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
        with claimed(first) as mine:
            if mine and not in_use().intersection(ports):
                yield ports
                return
    raise OSError(f"no block of {BLOCK} ports is free")


@contextlib.contextmanager
def claimed(first: int) -> Generator[bool, None, None]:
    """Claim the ports from this one on, until the exit or the end of the process; provide False if they are claimed."""
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(f"\0netbottleneck-tests-ports-{first}")
        except OSError:
            yield False
        else:
            yield True


@functools.cache
def own_ports(_pid: int) -> Iterator[int]:
    """Return the single ports of this process in turn, without end. Other processes get none of them until it ends."""
    _, singles = here()
    firsts = range(singles[0], singles[-1] + 2 - OWN, OWN)
    for first in random.sample(firsts, len(firsts)):
        claim = claimed(first)
        if claim.__enter__():
            CLAIMS.append(claim)
            return itertools.cycle(range(first, first + OWN))
    raise OSError("no single port is free")


def free_port() -> int:
    """Return a TCP port of the loopback address that was free a moment ago; no other process gets it from here.

    Raises OSError if none is free.
    """
    while True:
        for port in itertools.islice(own_ports(os.getpid()), OWN):
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
        own_ports.cache_clear()  # more ports, beside these
