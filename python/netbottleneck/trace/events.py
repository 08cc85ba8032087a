"""Event: one event of a ring, by its name (csrc/trace/event.h)."""

from __future__ import annotations

from typing import NamedTuple


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


def signed(value: int, bits: int = 64) -> int:
    """Return the two's complement number in the low `bits` of value."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value
