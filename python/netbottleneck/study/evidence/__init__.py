"""Evidence of a study: each cell's facts, the chain of claims with verdicts, the figures and the HTML page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.console import Console

from netbottleneck.study.evidence import chain, facts, figures, page, values
from netbottleneck.study.evidence.chain import Claim
from netbottleneck.study.evidence.figures import Figure
from netbottleneck.study.evidence.values import CellFacts
from netbottleneck.trace.files import write_text
from netbottleneck.trace.model import decode, encode

__all__ = ["Evidence", "Picture"]

FORMAT = "netbottleneck-evidence"
VERSION = 1
FILE = "evidence.json"
FACTS = "cells/*/facts.json"


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure as SVG; a notebook displays it."""

    svg: str

    def write(self, path: Path | str) -> None:
        """Write the SVG to a file."""
        write_text(path, self.svg)

    def _repr_svg_(self) -> str:
        return self.svg


def incomplete(key: str) -> str:
    """Return the note on a cell without facts."""
    return f"{key}: not complete"


def _is_current(folder: Path, cells: Sequence[CellFacts]) -> bool:
    """Return whether evidence.json has all facts of a folder; also if the folder has none."""
    paths = list(folder.glob(FACTS))
    written_ns = (folder / FILE).stat().st_mtime_ns
    same = {path.parent.name for path in paths} == {cell.key for cell in cells}
    return not paths or (same and all(path.stat().st_mtime_ns <= written_ns for path in paths))


class Evidence:
    """The results of a study, computed from its cells' facts alone; no run folder is read."""

    def __init__(self, cells: Sequence[CellFacts], title: str = "", notes: Sequence[str] = ()) -> None:
        self.cells, self.title, self.notes = tuple(cells), title, tuple(notes)

    @classmethod
    def read(cls, path: Path | str) -> Evidence:
        """Read evidence.json, or a study's folder: its evidence.json, else the facts of its completed cells.

        So are the facts that changed after evidence.json was written, as in a study that goes on. Raises
        FileNotFoundError if neither exists, and ValueError naming the file if it is not valid evidence, and is not in a
        folder with facts.
        """
        folder = Path(path)
        if not folder.is_dir():
            return cls._of_file(folder)
        if not (folder / FILE).exists():
            return cls.of_cells(folder)
        try:
            stored = cls._of_file(folder / FILE)
        except ValueError:
            if not any(folder.glob(FACTS)):
                raise
            return cls.of_cells(folder)
        return stored if _is_current(folder, stored.cells) else stored._updated(cls.of_cells(folder).cells)

    def _updated(self, cells: Sequence[CellFacts]) -> Evidence:
        """Return the evidence with other facts, in the order of its cells, then further ones."""
        places = {cell.key: place for place, cell in enumerate(self.cells)}
        complete = {incomplete(cell.key) for cell in cells}
        notes = [note for note in self.notes if note not in complete]
        return Evidence(sorted(cells, key=lambda cell: places.get(cell.key, len(places))), self.title, notes)

    @classmethod
    def _of_file(cls, file: Path) -> Evidence:
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(document, dict) or (document.get("format"), document.get("version")) != (FORMAT, VERSION):
                raise ValueError(f"not a {FORMAT} of version {VERSION}")
            cells = [decode(CellFacts, cell) for cell in document["cells"]]
            return cls(cells, str(document.get("title", "")), document.get("notes", ()))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{file}: {error}") from error

    @classmethod
    def of_cells(cls, folder: Path | str, title: str = "") -> Evidence:
        """Read the facts of a study's completed cells. Raises FileNotFoundError if there are none."""
        paths = sorted(Path(folder).glob(FACTS))
        if not paths:
            raise FileNotFoundError(f"{folder}: no {FILE} and no complete cell")
        return cls([values.read(path) for path in paths], title)

    @cached_property
    def claims(self) -> tuple[Claim, ...]:
        """The chain of claims."""
        return chain.chain(self.cells)

    @cached_property
    def figures(self) -> tuple[Figure, ...]:
        """The paper's figures 1 to 8."""
        return figures.figures(self.cells)

    @cached_property
    def budgets(self) -> tuple[facts.Budget, ...]:
        """The parts of the loss, by arm."""
        return facts.budgets(self.cells)

    @cached_property
    def predictions(self) -> facts.ForecastRecord:
        """Forecasts with their measurements."""
        return facts.forecast_record(self.cells)

    def draw(self, number: int) -> Picture:
        """Draw a figure by its number. Raises IndexError for none of 1 to 8, ImportError without matplotlib."""
        if not 1 <= number <= len(self.figures):
            raise IndexError(f"figure {number}: must be from 1 to {len(self.figures)}")
        return Picture(figures.svg(self.figures[number - 1]))

    def to_json(self) -> str:
        """Return the content of evidence.json, one cell per line."""
        head = {"format": FORMAT, "version": VERSION, "title": self.title, "notes": list(self.notes)}
        rows = ",\n".join(encode(cell) for cell in self.cells)
        return f'{json.dumps(head)[:-1]}, "cells": [\n{rows}\n]}}\n'

    @property
    def text(self) -> str:
        """The terminal's form as plain text."""
        return page.text(self)

    def show(self, console: Console | None = None) -> None:
        """Print the chain of claims and the result of each cell."""
        page.show(self, console)

    @cached_property
    def pictures(self) -> dict[int, str]:
        """Each figure as SVG, by number; {} without matplotlib."""
        try:
            return {figure.number: figures.svg(figure) for figure in self.figures}
        except ImportError:
            return {}

    @property
    def html(self) -> str:
        """The content of report.html: one file without scripts or links."""
        return page.page(self)

    def write(self, folder: Path | str) -> list[Path]:
        """Write evidence.json, the figures as CSV and (with matplotlib) SVG, and report.html; returns their paths."""
        target = Path(folder)
        files: dict[str, str] = {FILE: self.to_json()}
        files |= {f"figures/figure{figure.number}.csv": figures.to_csv(figure) for figure in self.figures}
        files |= {f"figures/figure{number}.svg": text for number, text in self.pictures.items()}
        files["report.html"] = self.html
        for name, text in files.items():
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
        return [target / name for name in files]

    def _repr_html_(self) -> str:
        return page.fragment(self)
