"""What a study has found: each cell's facts, the chain of claims that they bear out or not, figures and a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.console import Console

from netbottleneck.study.evidence import budget, chain, figures, page, prediction, terminal, values
from netbottleneck.study.evidence.chain import Step
from netbottleneck.study.evidence.figures import Figure
from netbottleneck.study.evidence.values import CellFacts
from netbottleneck.trace import json_codec

__all__ = ["Evidence", "Picture"]

FORMAT = "netbottleneck-evidence"
VERSION = 1
FILE = "evidence.json"


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure as SVG, which a notebook shows."""

    svg: str

    def write(self, path: Path | str) -> None:
        """Write it as a file."""
        Path(path).write_text(self.svg, encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg


class Evidence:
    """All that a study's cells bear out. The facts are enough: no run folder is read."""

    def __init__(self, cells: Sequence[CellFacts], title: str = "", notes: Sequence[str] = ()) -> None:
        self.cells, self.title, self.notes = tuple(cells), title, tuple(notes)

    @classmethod
    def read(cls, path: Path | str) -> Evidence:
        """Read evidence.json, or a study's folder: its evidence.json, else the facts of the cells that are done.

        Raises FileNotFoundError where there is neither, ValueError naming the file for what is no evidence.
        """
        place = Path(path)
        if place.is_dir():
            if not (place / FILE).exists():
                return cls.of_cells(place)
            place /= FILE
        try:
            told = json.loads(place.read_text(encoding="utf-8"))
            if not isinstance(told, dict) or (told.get("format"), told.get("version")) != (FORMAT, VERSION):
                raise ValueError(f"not a {FORMAT} of version {VERSION}")
            cells = [json_codec.build(CellFacts, cell) for cell in told["cells"]]
            return cls(cells, str(told.get("title", "")), told.get("notes", ()))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{place}: {error}") from error

    @classmethod
    def of_cells(cls, folder: Path | str, title: str = "") -> Evidence:
        """Read the facts of a study's cells that are done. Raises FileNotFoundError where none is."""
        paths = sorted(Path(folder).glob("cells/*/facts.json"))
        if not paths:
            raise FileNotFoundError(f"{folder}: no {FILE}, and no cell that is done")
        return cls([values.read(path) for path in paths], title)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The chain of claims."""
        return chain.chain(self.cells)

    @cached_property
    def figures(self) -> tuple[Figure, ...]:
        """The paper's figures 1 to 8."""
        return figures.figures(self.cells)

    @cached_property
    def budgets(self) -> tuple[budget.Budget, ...]:
        """Where the loss goes, arm by arm."""
        return budget.budgets(self.cells)

    @cached_property
    def predictions(self) -> prediction.Record:
        """What was forecast, against what was measured."""
        return prediction.record(self.cells)

    def draw(self, number: int) -> Picture:
        """Draw a figure by its number. Raises IndexError for none of 1 to 8, ImportError without matplotlib."""
        from netbottleneck.study.evidence import draw

        if not 1 <= number <= len(self.figures):
            raise IndexError(f"figure {number}: there are 1 to {len(self.figures)}")
        return Picture(draw.svg(self.figures[number - 1]))

    def to_json(self) -> str:
        """What evidence.json holds: a cell a line."""
        head = {"format": FORMAT, "version": VERSION, "title": self.title, "notes": list(self.notes)}
        rows = ",\n".join(json_codec.dump(cell) for cell in self.cells)
        return f'{json.dumps(head)[:-1]}, "cells": [\n{rows}\n]}}\n'

    @property
    def text(self) -> str:
        """What the terminal shows, plain."""
        return terminal.text(self)

    def show(self, console: Console | None = None) -> None:
        """Print the chain of claims, and what each cell came to."""
        terminal.show(self, console)

    @cached_property
    def pictures(self) -> dict[int, str]:
        """Each figure as SVG, by number; {} without matplotlib."""
        try:
            from netbottleneck.study.evidence import draw

            return {figure.number: draw.svg(figure) for figure in self.figures}
        except ImportError:
            return {}

    @property
    def html(self) -> str:
        """What report.html holds: one file without a script or a link."""
        return page.page(self)

    def write(self, folder: Path | str) -> list[Path]:
        """Write evidence.json, the figures as CSV and (with matplotlib) SVG, report.html; returns their paths."""
        place = Path(folder)
        files: dict[str, str] = {FILE: self.to_json()}
        files |= {f"figures/figure{figure.number}.csv": figures.to_csv(figure) for figure in self.figures}
        files |= {f"figures/figure{number}.svg": text for number, text in self.pictures.items()}
        files["report.html"] = self.html
        for name, text in files.items():
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return [place / name for name in files]

    def _repr_html_(self) -> str:
        return page.fragment(self)
