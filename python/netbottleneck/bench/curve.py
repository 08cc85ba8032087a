"""What each number of streams moved between two hosts, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from netbottleneck.units import gbit

NOTEWORTHY = 1.15  # gain over one plain stream from which the verdict names it
NEARLY = 0.95  # of the best, that fewer streams need to be preferred


@dataclass(frozen=True)
class Point:
    """What `streams` streams moved: bits a second, one way, the median of `count` all-reduces of `bytes`.

    cpu_s_per_gb: processor time of all threads of both sides for each 10^9 bytes of the tensor, as in Samples.row.
    """

    transport: str
    streams: int
    bytes: int
    count: int
    bits_per_s: float
    cpu_s_per_gb: float


def verdict(points: Sequence[Point]) -> str:
    """Return the sentence: the fewest streams of each transport against the best of all that was measured.

    What a job has without us is one plain connection: tcp's fewest streams, or where tcp was not measured the best of
    the others' fewest.
    """
    curves = {name: [p for p in points if p.transport == name] for name in dict.fromkeys(p.transport for p in points)}
    fewest = [_fewest(curve) for curve in curves.values()]
    top, single = _fastest(points), _fastest(fewest)
    plain = next((point for point in fewest if point.transport == "tcp"), single)
    head = "; ".join(map(_moved, fewest))
    if top.bits_per_s < NOTEWORTHY * plain.bits_per_s:
        other = "" if len(curves) == 1 else " and another transport"
        return (
            f"{head}; the best of {len(points)} measurements is {gbit(top.bits_per_s)} ({_amount(top)}): "
            f"more streams{other} buy nothing here. {_keep(plain)}"
        )
    best, lanes = single, str(single.streams)
    if top.bits_per_s >= NOTEWORTHY * single.bits_per_s:
        best, lanes = _fewest([p for p in curves[top.transport] if p.bits_per_s >= NEARLY * top.bits_per_s]), "auto"
    gain = best.bits_per_s / plain.bits_per_s
    who = "a job with one plain connection for each peer" if _like_stock(plain) else f"a job with {_amount(plain)}"
    moved = "" if best in fewest else f"; {_moved(best)}"
    return (
        f"{head}{moved}: {who} leaves a factor of {gain:.1f} of this network unused. "
        f"NETBOTTLENECK_TRANSPORT={best.transport} with NETBOTTLENECK_STREAMS={lanes} takes it."
    )


def _fewest(points: Sequence[Point]) -> Point:
    return min(points, key=lambda point: point.streams)


def _fastest(points: Sequence[Point]) -> Point:
    return max(points, key=lambda point: point.bits_per_s)


def _like_stock(point: Point) -> bool:
    return (point.transport, point.streams) == ("tcp", 1)


def _keep(plain: Point) -> str:
    if _like_stock(plain):
        return "One plain connection, as stock has it, is as good."
    return f"Keep {_amount(plain)}."


def _amount(point: Point) -> str:
    """1 of tcp: "one tcp stream"."""
    return f"one {point.transport} stream" if point.streams == 1 else f"{point.streams} {point.transport} streams"


def _moved(point: Point) -> str:
    return f"{_amount(point)} {'moves' if point.streams == 1 else 'move'} {gbit(point.bits_per_s)}"
