"""What Zhang et al. published (Is Network the Bottleneck of Distributed Training?, NetAI 2020), by figure. Pure.

Facts that were read from its figures, each with how far that may be off, or that its own simulator gives exactly.
8 GPUs a server; links are caps of a 100 Gbit/s interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

MODELS = ("ResNet50", "ResNet101", "VGG16")
GPUS = (8.0, 16.0, 32.0, 64.0)
LINKS = (1.0, 10.0, 25.0, 40.0, 100.0)
RATIOS = (1.0, 2.0, 5.0, 10.0, 50.0, 100.0)
EXACT = "exact output of its simulator"
PUBLISHED = "published"


@dataclass(frozen=True, slots=True)
class Point:
    """One value and its interval. label: measured, predicted, estimated or published; source: the cell, or where."""

    x: float | str
    value: float
    low: float
    high: float
    label: str
    source: str


@dataclass(frozen=True, slots=True)
class Series:
    """Points that belong together. arm: whose colour they have, "" of none."""

    name: str
    arm: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Paper:
    """A figure of the paper. note: what to know of it, or why there is nothing."""

    x: str
    unit: str
    series: tuple[Series, ...]
    note: str = ""


def _read(
    figure: str, name: str, xs: Sequence[float | str], values: Sequence[float | None], off: float | Sequence[float]
) -> Series:
    """A series that was read from a figure; None: hidden under another marker."""
    offs = off if isinstance(off, Sequence) else [off] * len(xs)
    points = [
        Point(x, value, value - error, value + error, PUBLISHED, f"read from figure {figure}, ± {error:g}")
        for x, value, error in zip(xs, values, offs, strict=True)
        if value is not None
    ]
    return Series(name, "", tuple(points))


def _exact(name: str, xs: Sequence[float], values: Sequence[float]) -> Series:
    return Series(name, "", tuple(Point(x, v, v, v, PUBLISHED, EXACT) for x, v in zip(xs, values, strict=True)))


_FACTORS = ((85.56, 75.07, 74.25, 71.62), (82.74, 68.93, 66.3, 67.02), (88.74, 55.98, 63.04, 59.94))
_PASSES = ((97.54, 109.61, 110.02, 110.18), (159.24, 184.17, 184.17, 185.4), (161.02, 171.33, 175.8, 173.56))
_BY_LINK = MappingProxyType(
    {
        "ResNet50, 2 servers": ((13.2, 68.4, 74.6, 75.0, 75.07), (0.5, 0.5, 0.8, 0.8, 0.2)),
        "ResNet50, 4 servers": ((7.7, 49.8, 73.5, 74.1, 74.25), (1.2, 0.5, 0.5, 0.5, 0.2)),
        "ResNet50, 8 servers": ((7.3, 47.1, 69.0, 71.0, 71.62), (0.5, 0.5, 0.5, 0.5, 0.2)),
    }
)
_RECEIVED = (
    (95.64, 65.71, 33.4, 21.51, 8.78),
    (97.14, 78.38, 50.21, 33.42, 12.35),
    (99.49, 92.56, 81.47, 67.71, 31.69),
)
_SIMULATED_BY_LINK = ((6.60, 49.98, 88.97, 99.68, 99.69), (2.21, 20.13, 43.87, 62.21, 99.35))
_SIMULATED_BY_GPUS = ((99.87, 99.75, 99.46), (99.92, 99.84, 99.69), (99.85, 99.69, 99.35))
_COMPRESSED: Mapping[str, Sequence[float | None]] = MappingProxyType(
    {
        "ResNet50, 10 Gbit/s": (53.9, 81.6, None, None, None, None),
        "ResNet101, 10 Gbit/s": (49.7, 78.4, 98.9, None, None, None),
        "VGG16, 10 Gbit/s": (20.2, 36.6, 72.1, 98.7, 98.7, 98.7),
    }
)
_FACTOR = "scaling factor, %"


def _sixth() -> Paper:
    simulated = [f"{name}, 64 GPUs, simulated" for name in MODELS]
    series = (
        _read("6a", "ResNet50, 64 GPUs, measured", LINKS, (7.3, 47.1, 69.0, 71.1, 71.6), (0.8, 0.5, 0.5, 0.5, 0.5)),
        _read("6a", simulated[0], LINKS, (7.8, 53.9, 90.3, 98.9, 99.0), (0.8, 0.5, 0.8, 0.8, 0.8)),
        *(_exact(name, LINKS, values) for name, values in zip(simulated[1:], _SIMULATED_BY_LINK, strict=True)),
    )
    return Paper("Gbit/s", _FACTOR, series, "What it measured of ResNet101 and VGG16 is not known.")


def _eighth() -> Paper:
    rows = [_read("8a", f"{name}, 64 GPUs", RATIOS, values, 0.6) for name, values in _COMPRESSED.items()]
    rows.append(_read("8b", "all three, 100 Gbit/s, 64 GPUs", RATIOS, (98.7,) * len(RATIOS), 0.8))
    return Paper("compression ratio", _FACTOR, tuple(rows), "Points that markers hide are left out.")


def paper(number: int) -> Paper:
    """A figure by its number, 1 to 8. Raises KeyError for another."""
    named = list(zip(MODELS, range(len(MODELS)), strict=True))
    arms = ("1 GPU", "16 GPUs", "32 GPUs", "64 GPUs")
    return {
        1: Paper("GPUs", _FACTOR, tuple(_read("1", name, GPUS, _FACTORS[at], 0.2) for name, at in named)),
        2: Paper("GPUs", "ms", tuple(_read("2", name, arms, _PASSES[at], 0.8) for name, at in named)),
        3: Paper("Gbit/s", _FACTOR, tuple(_read("3", name, LINKS, *row) for name, row in _BY_LINK.items())),
        4: Paper(
            "Gbit/s",
            "% of the link",
            tuple(_read("4a", f"{name}, average, receiving", LINKS, _RECEIVED[at], 0.3) for name, at in named),
            "Averages over whole steps.",
        ),
        5: Paper("", "% of all cores", (), "Its text says that processors are used little; no value is known."),
        6: _sixth(),
        7: Paper(
            "GPUs",
            _FACTOR,
            tuple(_exact(f"{name}, 100 Gbit/s, simulated", GPUS[1:], _SIMULATED_BY_GPUS[at]) for name, at in named),
            "What it measured is not known; its simulator gives these.",
        ),
        8: _eighth(),
    }[number]
