"""Drawing of SVG pictures that keep the size of their text at any width: bars, curves and spans on scales.

A place along a picture is a part of its width, from 0 to 1; a height is in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from xml.etree import ElementTree

TEXT_HEIGHT = 17
BAR_HEIGHT = 16
STRIP_HEIGHT = 9
GAP = 9
PLOT_HEIGHT = 170
CURVE_WIDTH = 1000  # units of a curve's own coordinates, stretched to the width of its picture
NAME_MOST = 26  # characters of a name that fit beside a value on a phone
HEAD_MOST = 38  # characters of a name that fit alone on a phone, in bold


def _share(part: float) -> str:
    return f"{100 * part:.3f}".rstrip("0").rstrip(".") + "%"


def _pixels(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def short_name(name: str, most: int = NAME_MOST) -> str:
    """A name with at most `most` characters; the end is kept, because it is what differs."""
    return name if len(name) <= most else "…" + name[1 - most :]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a bar. kind: class of its colour, or a colour (#…); note: shown beside the pointer."""

    kind: str
    length: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A named bar. strips: bars below each other, each of pieces; none: a heading. whisker: ends of an interval.

    limit: a value that is marked by a line across the row.
    """

    name: str
    value: str
    strips: tuple[tuple[Piece, ...], ...]
    whisker: tuple[float, float] | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """Values to places. low < high; log: equal ratios are equally far apart."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """The place of a value; values beyond an end are at that end."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values within the scale, at most `most`, ascending."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps in ((1, 2, 5), (1, 3), (1,)):
                found = [s * 10.0**d for d in decades for s in steps if self.low <= s * 10.0**d <= self.high]
                if len(found) <= most:
                    return found
            return found[:: math.ceil(len(found) / most)]
        span = self.high - self.low
        size = 10.0 ** math.floor(math.log10(span / most))
        step = next(size * factor for factor in (1, 2, 5, 10, 20) if span / (size * factor) <= most - 1)
        first = math.ceil(self.low / step - 1e-9)
        return [step * n for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def with_unit(values: Sequence[float], unit: str) -> list[tuple[float, str]]:
    """Ticks with their labels; the last has the unit."""
    return [(value, f"{value:g} {unit}" if value == values[-1] else f"{value:g}") for value in values]


class Picture:
    """An SVG element that is as wide as its place. label: what it shows, for readers that do not see it."""

    def __init__(self, label: str, height: float = 0) -> None:
        self.height = height
        self._root = ElementTree.Element("svg", {"class": "nb-picture", "width": "100%", "role": "img"})
        self._root.set("aria-label", label)
        self._texts: list[ElementTree.Element] = []  # above everything else
        self._behind = 0  # how many elements of the root are behind everything else

    def __str__(self) -> str:
        whole = ElementTree.Element("svg", self._root.attrib | {"height": _pixels(self.height)})
        whole.extend([*self._root, *self._texts])
        return ElementTree.tostring(whole, encoding="unicode")

    def bar(self, x: tuple[float, float], y: tuple[float, float], kind: str, note: str = "", colour: str = "") -> None:
        """A filled bar. x: begin and end; y: top and height; kind: class of its colour, unless `colour` is given."""
        if x[1] <= x[0]:
            return
        place = {"x": _share(x[0]), "width": _share(x[1] - x[0]), "y": _pixels(y[0]), "height": _pixels(y[1])}
        about = {"style": f"fill:{colour}"} if colour else {"class": f"nb-{kind}"}
        element = ElementTree.SubElement(self._root, "rect", about | place)
        if note:
            ElementTree.SubElement(element, "title").text = note

    def line(self, x: tuple[float, float], y: tuple[float, float], kind: str = "grid") -> None:
        """A straight line between (x[0], y[0]) and (x[1], y[1]); a grid line is behind everything else."""
        ends = {"x1": _share(x[0]), "x2": _share(x[1]), "y1": _pixels(y[0]), "y2": _pixels(y[1])}
        drawn = ElementTree.Element("line", {"class": f"nb-line-{kind}"} | ends)
        if kind == "grid":
            self._root.insert(self._behind, drawn)
            self._behind += 1
        else:
            self._root.append(drawn)

    def dot(self, x: float, y: float, kind: str, note: str = "", radius: float = 4) -> None:
        """A filled circle."""
        place = {"cx": _share(x), "cy": _pixels(y), "r": _pixels(radius)}
        element = ElementTree.SubElement(self._root, "circle", {"class": f"nb-{kind}"} | place)
        if note:
            ElementTree.SubElement(element, "title").text = note

    def text(self, x: float, y: float, content: str, anchor: str = "start", kind: str = "") -> None:
        """Text whose base line is at y."""
        about = {"x": _share(x), "y": _pixels(y)}
        if anchor != "start":
            about["text-anchor"] = anchor
        if kind:
            about["class"] = f"nb-{kind}"
        drawn = ElementTree.Element("text", about)
        drawn.text = content
        self._texts.append(drawn)

    def curve(
        self, points: Iterable[tuple[float, float]], kind: str, colour: str = "", *, filled: bool = False
    ) -> None:
        """A line through (place, y) points; filled: the area that they enclose."""
        own = ElementTree.SubElement(
            self._root,
            "svg",
            {"width": "100%", "height": _pixels(self.height), "preserveAspectRatio": "none"}
            | {"viewBox": f"0 0 {CURVE_WIDTH} {_pixels(self.height)}"},
        )
        about = {"class": f"nb-{'area' if filled else 'curve'}-{kind}"}
        if colour:
            about["style"] = f"{'fill' if filled else 'stroke'}:{colour}"
        about["points"] = " ".join(f"{_pixels(CURVE_WIDTH * x)},{_pixels(y)}" for x, y in points)
        ElementTree.SubElement(own, "polygon" if filled else "polyline", about)

    def axis(self, scale: Scale, y: float, labels: Sequence[tuple[float, str]], top: float = 0) -> None:
        """Ticks below y, with lines up to `top`."""
        for value, label in labels:
            x = scale.at(value)
            self.line((x, x), (top, y + 4))
            self.text(x, y + TEXT_HEIGHT, label, "start" if x < 0.08 else "end" if x > 0.92 else "middle", "tick")

    def levels(self, scale: Scale, top: float, bottom: float, labels: Sequence[tuple[float, str]]) -> None:
        """Horizontal grid lines between y = top and bottom, each with its value on the line."""
        for value, label in labels:
            y = bottom - (bottom - top) * scale.at(value)
            self.line((0, 1), (y, y))
            self.text(0, y - 3, label, kind="tick")


@dataclass(frozen=True, slots=True)
class Shown:
    """A picture with its sentence.

    missing: why there is no picture; key: (class of a colour, or a colour, label); folded: shown when it is opened.
    """

    title: str
    pictures: tuple[Picture, ...] = ()
    key: tuple[tuple[str, str], ...] = ()
    note: str = ""
    missing: str = ""
    folded: bool = False


def _longest(rows: Sequence[Row]) -> float:
    """The end of the longest bar or whisker."""
    ends = [sum(max(piece.length, 0.0) for piece in strip) for row in rows for strip in row.strips]
    ends += [end for row in rows if row.whisker for end in row.whisker if math.isfinite(end)]
    return max(ends, default=0.0)


def _row(picture: Picture, row: Row, scale: Scale) -> None:
    if not row.strips:
        picture.text(0, picture.height + 13, short_name(row.name, HEAD_MOST), kind="head")
        picture.height += TEXT_HEIGHT
        return
    picture.text(0, picture.height + 13, short_name(row.name))
    picture.text(1, picture.height + 13, row.value, "end")
    y = picture.height + TEXT_HEIGHT
    thick = BAR_HEIGHT if len(row.strips) == 1 else STRIP_HEIGHT
    for number, strip in enumerate(row.strips):
        x = 0.0
        for piece in strip:
            end = x + max(piece.length, 0.0) / scale.high
            colour = piece.kind if piece.kind.startswith("#") else ""
            picture.bar((x, min(end, 1)), (y + number * (thick + 1), thick), piece.kind, piece.note, colour)
            x = end
    if row.whisker is not None:
        middle = y + thick / 2
        low, high = (scale.at(end) for end in row.whisker)
        picture.line((low, high), (middle, middle), "whisker")
        for end in (low, high):
            picture.line((end, end), (middle - 4, middle + 4), "whisker")
    picture.height = y + len(row.strips) * (thick + 1) + GAP


def bars(label: str, rows: Sequence[Row], longest: float = 0.0) -> Picture:
    """Rows of bars on a common scale from 0 to `longest`, by default the end of the longest row and of its limit.

    Neighbouring rows with the same limit share a line.
    """
    limits = [row.limit for row in rows if row.limit is not None]
    scale = Scale(0.0, longest or max(_longest(rows), *limits, 0.0) or 1.0)
    picture = Picture(label)
    for limit, alike in groupby(rows, key=lambda row: row.limit):
        top = picture.height
        for row in alike:
            _row(picture, row, scale)
        if limit is not None:
            picture.line((scale.at(limit),) * 2, (top, picture.height - GAP), "limit")
    return picture
