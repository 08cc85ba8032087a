"""What the machine counts around a measured window: bytes that interfaces sent, seconds that processors were busy."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

_NET = Path("/proc/self/net/dev")
_STAT = Path("/proc/stat")
_SENT = 8  # column of the bytes sent, after the interface's name
_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq: neither idle, nor waiting, nor stolen by another machine


def sent_bytes(interfaces: Collection[str]) -> int:
    """Return what interfaces of this network namespace have sent together; one that is not there counts nothing."""
    found = 0
    for line in _NET.read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() in interfaces:
            found += int(numbers.split()[_SENT])
    return found


def busy_ns() -> int:
    """Return how long all processors of this machine were busy, in ns of the kernel's ticks (10 ms as a rule)."""
    with _STAT.open(encoding="ascii") as file:
        numbers = file.readline().split()[1:]
    return sum(int(numbers[column]) for column in _BUSY) * (10**9 // os.sysconf("SC_CLK_TCK"))


def owed_bytes(hosts: int, nbytes: int) -> int:
    """Return the least that an all-reduce of nbytes puts on the wire, all hosts together: 2(n-1) times its size.

    Reduce-scatter and all-gather send (n-1)/n of it from each of n hosts, a tree up and down n-1 times all of it.
    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, section 3.
    """
    return 2 * (hosts - 1) * nbytes
