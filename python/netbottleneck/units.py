"""Formatting of numbers: with units (ms, Gbit/s, MiB, per cent), and lists of them."""

from __future__ import annotations

from collections.abc import Iterable


def _digits(value: float) -> str:
    """Three significant digits, no exponent."""
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def ms(ns: float) -> str:
    """12345678 ns: "12.3 ms"."""
    return f"{_digits(ns / 1e6)} ms"


def short(ns: float) -> str:
    """29812 ns: "29.8 us", three significant digits in the best unit."""
    for unit, size in (("ms", 1e6), ("us", 1e3)):
        if abs(ns) >= size:
            return f"{_digits(ns / size)} {unit}"
    return f"{ns:.3g} ns"


def gbit(bits_per_s: float) -> str:
    """3.1e9: "3.10 Gbit/s"; small rates in Mbit/s."""
    if 0 < abs(bits_per_s) < 1e8:
        return f"{_digits(bits_per_s / 1e6)} Mbit/s"
    return f"{_digits(bits_per_s / 1e9)} Gbit/s"


def spread(low: float, high: float, rate: float) -> str:
    """1.2e8, 1.8e8: "0.12-0.18", in the unit in which `gbit` shows the rate."""
    unit, digits = (1e6, 1) if gbit(rate).endswith(" Mbit/s") else (1e9, 2)
    return f"{low / unit:.{digits}f}-{high / unit:.{digits}f}"


def percent(part: float, *, digits: int | None = None, signed: bool = False) -> str:
    """0.123: "12 %"; digits: decimals, by default one below ten and none from there on; signed: "+12 %"."""
    value, sign = 100 * part, "+" if signed else ""
    decimals = digits if digits is not None else int(abs(value) < 10)
    return f"{value:{sign}.{decimals}f} %"


def nbytes(count: float) -> str:
    """26214400: "25.0 MiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def streams(count: int) -> str:
    """4: "4 streams"."""
    return f"{count} stream{'' if count == 1 else 's'}"


# Entries of a list of numbers; the rest of the numbers is counted.
LISTED_MOST = 8


def listed(numbers: Iterable[int]) -> str:
    """1, 2, 4, 5, 6: "1, 2, 4 to 6"; what is beyond LISTED_MOST entries is counted: "and 12 more"."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    entries: list[tuple[int, int]] = []
    for first, last in ranges:
        entries += [(first, last)] if last - first > 1 else [(one, one) for one in range(first, last + 1)]
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in entries[:LISTED_MOST]]
    left = sum(last - first + 1 for first, last in entries[LISTED_MOST:])
    return ", ".join(texts) + (f" and {left} more" if left else "")
