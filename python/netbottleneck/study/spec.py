"""What a study is asked to do: study.toml to values, cell by cell. Every error names file, line, value and remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from netbottleneck.bench import models
from netbottleneck.lab import LinkSpec, parse_lab
from netbottleneck.study.tables import DIGITS, INFLATION, REPLAY, Lines, checked, load
from netbottleneck.trace.model import BARE, NULL

HERE = "here"  # the network between a launcher's ranks, as it is
COMPUTE_MS = (133.0, 267.0)
REPLAYED = ("file", "compute_ms", "scale", "stretch", "compute")  # keys of a replay alone


@dataclass(frozen=True, slots=True)
class Turns:
    """How often arms take turns, the steps of a block, and how many steps one rank makes by itself before."""

    rounds: int
    block_steps: int
    alone: int


# A claim needs pairs of blocks, and steps that count: the first of a block does not.
TURNS = MappingProxyType({DIGITS: Turns(6, 10, 10), REPLAY: Turns(5, 4, 6), INFLATION: Turns(10, 8, 0)})


@dataclass(frozen=True, slots=True)
class Model:
    """What is trained or played. name: of netbottleneck.bench.models; file: a run, trace or layer log in its place.

    compute_ms: forward and backward of a model that is played by its name; scale: bytes, stretch: times are multiplied
    with it. label: the first word of its cells' keys."""

    name: str
    job: str
    label: str
    file: str = ""
    compute_ms: tuple[float, float] = COMPUTE_MS
    scale: float = 1.0
    stretch: float = 1.0
    compute: str = "sleep"


@dataclass(frozen=True, slots=True)
class Cell:
    """One job on one network and so many ranks.

    same: its weights are compared with those of stock alone; tuned: stock runs once more, over four interfaces.
    ranks_per_host: of a lab's hosts."""

    key: str
    model: Model
    ranks: int
    network: str
    arms: tuple[str, ...]
    rounds: int
    block_steps: int
    alone: int
    same: bool = False
    tuned: bool = False
    ranks_per_host: int = 1

    @property
    def job(self) -> str:
        """Digits, replay or inflation."""
        return self.model.job

    @property
    def link(self) -> LinkSpec:
        """The caps of its network; none inside of one host."""
        return LinkSpec() if _on_one_host(self.ranks, self.ranks_per_host) else caps(self.network)

    @property
    def steps(self) -> int:
        """The least number of steps."""
        return self.alone + self.rounds * self.block_steps * len(self.arms)


@dataclass(frozen=True, slots=True)
class StudySpec:
    """A study: its cells in the order in which they run. fit_key: the cell that forecasts are fitted to; "": none.

    interface: of real hosts, that caps are put on."""

    title: str
    cells: tuple[Cell, ...]
    fit_key: str
    provider: str | None = None
    interface: str = ""


def _on_one_host(ranks: int, ranks_per_host: int) -> bool:
    """Whether several ranks share the only host: nothing leaves it."""
    return 1 < ranks == ranks_per_host


def slug(text: str) -> str:
    """Return a text as part of a path: "2gbit/500mbit" is 2gbit-500mbit."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text)


def caps(network: str) -> LinkSpec:
    """Return the caps that a network's text asks for."""
    return LinkSpec() if network == HERE else parse_lab(network)


def parse(
    text: str,
    path: str,
    *,
    transports: Sequence[str] = ("stock", "ofi"),
    hosts: int = 0,
    done: Callable[[str], bool] = lambda _key: False,
) -> StudySpec:
    """Return the study that a text asks for. Raises ValueError naming `path` and the line.

    transports: where the text names none. hosts: ranks of a launcher, whose hosts have caps on the interface that is
    named, or none; 0: they are simulated. done: of a cell's key: what is done needs no ranks any more."""
    raw = load(text, path)
    lines = Lines(text, path)
    checked(raw, lines)
    cells: list[Cell] = []
    for number, table in enumerate(raw["model"]):
        asked = {"ranks": [2], "networks": ["2gbit/500mbit"], "transports": list(transports), **raw, **table}
        if hosts and "interface" not in raw:
            asked["networks"] = [HERE]
        at = lines.of("ranks", number)
        _together(asked, hosts, lines, number)
        own = list(_cells(asked, _model(table, lines, number, Path(path).parent, asked.get("ranks_per_host", 1)), at))
        if hosts and any(cell.ranks > hosts and not done(cell.key) for cell in own):
            raise ValueError(f"{at}: ranks = {asked['ranks']}: {hosts} were started: start more, or ask for fewer")
        if twice := {cell.key for cell in cells} & {cell.key for cell in own}:
            where = lines.of("", number)
            raise ValueError(f"{where}: a second cell called {min(twice)}: give this [[model]] a label of its own")
        cells += own
    fit_key = _fit(raw.get("fit"), cells, lines.of("fit"))
    return StudySpec(
        raw.get("title", "study"),
        tuple(_ordered(cells, fit_key)),
        fit_key,
        raw.get("provider"),
        raw.get("interface", ""),
    )


def _together(asked: Mapping[str, Any], hosts: int, lines: Lines, number: int) -> None:
    """Raise ValueError for ranks that cannot be put on hosts as is asked."""
    each = asked.get("ranks_per_host", 1)
    where = f"{lines.of('ranks_per_host', number)}: ranks_per_host = {each}"
    if each > 1 and hosts:
        raise ValueError(f"{where}: a launcher's ranks are where it started them: take this away")
    if odd := next((count for count in asked["ranks"] if count % each), 0):
        raise ValueError(f"{where}: ranks = {odd} are no multiple of that: give each host as many, or leave one out")


def _model(table: Mapping[str, Any], lines: Lines, number: int, folder: Path, together: int) -> Model:
    job, file = table.get("job", REPLAY), table.get("file", "")
    name = table.get("name", {DIGITS: "digits", INFLATION: "thin_resnet"}.get(job, ""))

    def refuse(key: str, why: str) -> ValueError:
        shown = f"{key} = {json.dumps(table[key])}" if key in table else f"no {key}"
        return ValueError(f"{lines.of(key, number)}: {shown}: {why}")

    if job != REPLAY and (odd := next((key for key in REPLAYED if key in table), "")):
        raise refuse(odd, f'this is for a replay: take it away, or write job = "{REPLAY}"')
    if file:
        if "name" in table or "compute_ms" in table:
            raise refuse("file", "it stands in the place of name and compute_ms: take these away")
        path = (folder / file).absolute()
        if not path.exists():
            raise refuse("file", f"{path} is not there")
        file, name = str(path), path.name.split(".")[0]
    elif job == DIGITS and name != "digits":
        raise refuse("name", "the job digits has a model of its own: take the name away")
    elif job != DIGITS and name not in models.NAMES:
        raise refuse("name", f"write one of {', '.join(models.NAMES)}; or give a file")
    forward, backward = table.get("compute_ms", COMPUTE_MS)
    usual = slug(name) + ("-inflation" if job == INFLATION else "") + (f"-{together}-a-host" if together > 1 else "")
    label = table.get("label", usual)
    factors = float(table.get("scale", 1)), float(table.get("stretch", 1))
    return Model(name, job, label, file, (float(forward), float(backward)), *factors, table.get("compute", "sleep"))


def _cells(asked: Mapping[str, Any], model: Model, ranks_at: str) -> Iterable[Cell]:
    """Yield a model's cells. asked: the top of the file, and over it what the model says for itself."""
    usual = TURNS[model.job]
    if model.job != REPLAY and min(asked["ranks"]) < 2:
        raise ValueError(f"{ranks_at}: ranks = {asked['ranks']}: the job {model.job} needs 2 at least")
    networks = [text if text == HERE else str(parse_lab(text)) for text in asked["networks"]]
    same = next((text for text in networks if not caps(text).capped), networks[-1])
    arms = _arms(model.job, asked["transports"])
    tuned = model.job == REPLAY and "stock" in arms and asked.get("tuned", True)
    together = asked.get("ranks_per_host", 1)
    for ranks, network in product(asked["ranks"], networks):
        yield Cell(
            f"{model.label}-{ranks}-{slug(network)}",
            model,
            ranks,
            network,
            arms,
            asked.get("rounds", usual.rounds),
            asked.get("block_steps", usual.block_steps),
            0 if model.job == INFLATION else asked.get("alone", usual.alone),
            model.job == DIGITS and network == same,
            tuned and bool(caps(network).flow_bps) and not _on_one_host(ranks, together),
            together,
        )


def _arms(job: str, transports: Sequence[str]) -> tuple[str, ...]:
    """The arms of a job: the transports, and what it has beside them."""
    if job == REPLAY:
        return tuple(transports)
    moving = [name for name in transports if name != NULL]
    return (BARE, *moving) if job == DIGITS else (BARE, NULL, *moving)


def _fit(wanted: str | None, cells: Sequence[Cell], where: str) -> str:
    played = [cell for cell in cells if cell.job == REPLAY and cell.ranks > 1 and cell.ranks_per_host == 1]
    if wanted is None:
        return min(played, key=lambda cell: cell.ranks).key if played else ""
    if wanted not in {cell.key for cell in played}:
        there = ", ".join(cell.key for cell in played) or "none"
        raise ValueError(
            f"{where}: fit = {json.dumps(wanted)}: name a replayed cell of 2 hosts or more, one rank each: {there}"
        )
    return wanted


def _ordered(cells: Sequence[Cell], fit_key: str) -> list[Cell]:
    """The fitted cell first, then those that share its ranks and network and so its lab, then lab by lab."""
    first = sorted(cells, key=lambda cell: cell.key != fit_key)
    labs = list(dict.fromkeys(ground(cell) for cell in first))
    return sorted(first, key=lambda cell: labs.index(ground(cell)))


def ground(cell: Cell) -> tuple[int, int, str]:
    """What cells that run in one lab have in common."""
    return cell.ranks, cell.ranks_per_host, cell.network
