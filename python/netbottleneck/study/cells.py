"""The folder of a study: what was asked, and of each cell what is there. A cell is done when its facts are written."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from netbottleneck.study.spec import Cell
from netbottleneck.study.task import Outcome
from netbottleneck.trace import json_codec

STUDY = "study.toml"
FACTS, FORECAST, TOLD = "facts.json", "forecast.json", "cell.json"


@dataclass(frozen=True)
class Done:
    """What the ranks of a cell came to. seconds: all of it.

    again: digits over stock alone; tuned: the folder of stock with four interfaces, "" where there was none.
    """

    cell: Cell
    outcome: Outcome
    again: Outcome | None = None
    tuned: str = ""
    seconds: float = 0.0

    @property
    def same_as_stock(self) -> bool | None:
        """Whether the weights are those of the run over stock alone, bit for bit; None where there was none."""
        return None if self.again is None else self.again.digests == self.outcome.digests


class Folder:
    """A study's folder. Files appear whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / STUDY

    def claim(self, text: str) -> None:
        """Make the folder, and write down what is asked, once."""
        if not self.file.exists():
            put(self.file, text)

    def of(self, key: str) -> Path:
        """Return a cell's folder."""
        return self.path / "cells" / key

    def done(self, key: str) -> bool:
        """Whether a cell's facts are there."""
        return (self.of(key) / FACTS).exists()

    def fresh(self, key: str) -> Path:
        """Return a cell's folder, new and empty: what an earlier attempt left is moved aside."""
        place = self.of(key)
        if place.exists():
            aside = self.path / "aside"
            aside.mkdir(exist_ok=True)
            numbers = (number for number in range(1, 1 << 20) if not (aside / f"{key}.{number}").exists())
            place.rename(aside / f"{key}.{next(numbers)}")
        place.mkdir(parents=True)
        return place

    def tell(self, done: Done) -> None:
        """Write down what came of a cell."""
        told = asdict(done) | {"outcome": done.outcome.as_dict(), "again": done.again and done.again.as_dict()}
        put(self.of(done.cell.key) / TOLD, json.dumps(told, indent=1) + "\n")

    def told(self, key: str) -> Done:
        """Return what `tell` wrote. Raises ValueError naming the file, OSError."""
        path = self.of(key) / TOLD
        try:
            told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            again = told["again"] and Outcome.from_dict(told["again"])
            cell = json_codec.build(Cell, told["cell"])
            return Done(cell, Outcome.from_dict(told["outcome"]), again, told["tuned"], told["seconds"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: {error!r}") from error


def put(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
