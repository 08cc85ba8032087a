"""Event: one event of a ring, by its name (csrc/trace/event.h)."""

from __future__ import annotations

from typing import NamedTuple

from netbottleneck.trace.model import NAMED_RANKS


class Event(NamedTuple):
    """One timestamped event. a…e: unsigned, see csrc/trace/event.h."""

    kind: str
    time_ns: int
    step: int
    key: int
    a: int
    b: int
    c: int
    d: int
    e: int


def missing_ranks(stall: Event, size: int = NAMED_RANKS) -> tuple[tuple[int, ...], int]:
    """Return the missing ranks that a STALL in a job of this size names, and the number of those that it does not."""
    named = tuple(rank for rank in range(min(size, NAMED_RANKS)) if (stall.c | stall.d << 64) >> rank & 1)
    return named, max(0, stall.e - len(named))


def signed(value: int, bits: int = 64) -> int:
    """Return the two's complement number in the low `bits` of value."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value
