"""Specification of a study: parses study.toml and expands it into cells.

Every error names the file, the line, the value and the remedy.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from netbottleneck.bench import models
from netbottleneck.lab import LinkSpec, parse_lab
from netbottleneck.trace.transports import BARE, NULL, STUDIED, Arm

# The tables of study.toml: allowed keys, allowed values, and line numbers. Pure.

DIGITS, REPLAY, INFLATION = JOBS = ("digits", "replay", "inflation")
MOST_RANKS = 200

Check = Callable[[Any], str]  # takes a value, returns what to write instead; "": the value is valid


def load(text: str, path: str) -> dict[str, Any]:
    """Parse a study file; only its outline is checked. Raises ValueError naming `path` and the line."""
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits; too many brackets
        raise ValueError(f"{path}: {error}") from None
    models = raw.get("model")
    if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
        line = Lines(text, path).of("model")
        raise ValueError(f"{line}: add at least one [[model]], each with a name, a file or a job")
    return raw


def dump(raw: Mapping[str, Any]) -> str:
    """Return tables from `load` as TOML."""
    top = [f"{key} = {_toml(value)}\n" for key, value in raw.items() if key != "model"]
    models = ["\n[[model]]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in table.items()) for table in raw["model"]]
    return "".join([*top, *models])


def _toml(value: Any) -> str:
    """Return a value as TOML: JSON, but TOML has no surrogate pairs, and requires an escape for U+007F."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def checked(raw: Mapping[str, Any], lines: Lines) -> None:
    """Raise ValueError for an unknown key or an invalid value; the text names file and line."""
    _checked(raw, lines, _TOP, None)
    for number, table in enumerate(raw["model"]):
        _checked(table, lines, _MODEL, number)


class Lines:
    """Line numbers of keys in a study file: in the top part (model None), or in a [[model]] by its number."""

    def __init__(self, text: str, path: str) -> None:
        self._path = path
        self._found: dict[tuple[int | None, str], int] = {}
        table: int | None = None
        for number, line in enumerate(text.splitlines(), 1):
            if re.match(r"\s*\[\[\s*model\s*\]\]", line):
                table = 0 if table is None else table + 1
                self._found.setdefault((table, ""), number)
            elif key := re.match(r"""\s*\[*\s*["']?([\w-]+)["']?\s*[]=.]""", line):
                self._found.setdefault((table, key[1]), number)

    def of(self, key: str, model: int | None = None) -> str:
        """Return file and line of a model's key, else of the same key at the top, else of the model, if known."""
        for place in ((model, key), (None, key), (model, ""), (None, "model")):
            if place in self._found:
                return f"{self._path}, line {self._found[place]}"
        return self._path


def _checked(table: Mapping[str, Any], lines: Lines, known: Mapping[str, Check], model: int | None) -> None:
    for key, value in table.items():
        if key not in known:
            where = "the top of the file" if model is None else "a [[model]]"
            raise ValueError(f"{lines.of(key, model)}: unknown key {key!r}: {where} may contain {', '.join(known)}")
        if why := known[key](value):
            raise ValueError(f"{lines.of(key, model)}: {key} = {json.dumps(value, default=str)}: {why}")


def _number(low: float, high: float, *, whole: bool = False) -> Check:
    kind = "a whole number" if whole else "a number"

    def check(value: Any) -> str:
        fine = type(value) is int or (type(value) is float and not whole)
        return "" if fine and low <= value <= high else f"write {kind} from {low:g} to {high:g}"

    return check


def _text(*allowed: str) -> Check:
    def check(value: Any) -> str:
        if not isinstance(value, str) or not value:
            return 'write a string in "quotes"'
        return "" if not allowed or value in allowed else f"write one of {', '.join(allowed)}"

    return check


def _list(each: Check, example: str) -> Check:
    def check(value: Any) -> str:
        if not isinstance(value, list) or not value:
            return f"write a list, such as {example}"
        if len({json.dumps(item, default=str) for item in value}) != len(value):
            return "name each value once"
        return next((f"{item!r}: {why}" for item in value if (why := each(item))), "")

    return check


def _network(value: Any) -> str:
    if not isinstance(value, str):
        return 'write a string such as "2gbit/500mbit"'
    try:
        parse_lab(value)
    except ValueError as error:
        return str(error)
    return ""


def _compute_ms(value: Any) -> str:
    fine = isinstance(value, list) and len(value) == 2 and not any(_number(0, 1e6)(ms) for ms in value)
    return "" if fine and value[1] > 0 else "write [FORWARD, BACKWARD] in ms, such as [133, 267]"


def _label(value: Any) -> str:
    fine = isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value)
    return "" if fine else "write letters, digits, . _ or -"


def _any(_value: Any) -> str:
    return ""


_SHARED: Mapping[str, Check] = MappingProxyType(
    {
        "ranks": _list(_number(1, MOST_RANKS, whole=True), "[2, 4]"),
        "ranks_per_host": _number(1, MOST_RANKS, whole=True),
        "networks": _list(_network, '["2gbit/500mbit", "none"]'),
        "rounds": _number(1, 10_000, whole=True),
        "block_steps": _number(2, 10_000, whole=True),
        "alone": _number(0, 10_000, whole=True),
        "transports": _list(_text(*STUDIED), '["stock", "ofi"]'),
        "tuned": lambda value: "" if isinstance(value, bool) else "write true or false",
    }
)
_TOP: Mapping[str, Check] = MappingProxyType(
    {
        "title": _text(),
        **_SHARED,
        "fit": _text(),
        "provider": _text(),
        "interface": _text(),
        "model": _any,
    }
)
_MODEL: Mapping[str, Check] = MappingProxyType(
    {
        "name": _text(),
        "file": _text(),
        "label": _label,
        "job": _text(*JOBS),
        "compute_ms": _compute_ms,
        "scale": _number(1e-6, 64),
        "stretch": _number(1e-6, 1000),
        "compute": _text("sleep", "spin"),
        **_SHARED,
    }
)


# The cells of a study.

LAUNCHER_NETWORK = "here"  # the network between a launcher's ranks, as found
COMPUTE_MS = (133.0, 267.0)
REPLAYED = ("file", "compute_ms", "scale", "stretch", "compute")  # keys that only a replay has


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns of the arms: number of rounds, steps of a block, and steps that one rank first runs alone."""

    rounds: int
    block_steps: int
    alone: int


# Defaults by job. A claim needs pairs of blocks and counted steps; the first step of a block is not counted.
TURNS = MappingProxyType({DIGITS: Turns(6, 10, 10), REPLAY: Turns(5, 4, 6), INFLATION: Turns(10, 8, 0)})


@dataclass(frozen=True, slots=True)
class Model:
    """A model to train or to replay. name: from netbottleneck.bench.models; file: a run, trace or layer log instead.

    compute_ms: forward and backward of a model replayed by name. scale: factor on bytes; stretch: factor on times.
    label: first word of the keys of its cells."""

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
    """One job on one network with a given number of ranks.

    same: compare its weights with those of stock alone. tuned: run stock once more, over four interfaces.
    ranks_per_host: on each host of a lab."""

    key: str
    model: Model
    ranks: int
    network: str
    arms: tuple[Arm, ...]
    rounds: int
    block_steps: int
    alone: int
    same: bool = False
    tuned: bool = False
    ranks_per_host: int = 1

    @property
    def job(self) -> str:
        """The job: digits, replay or inflation."""
        return self.model.job

    @property
    def link(self) -> LinkSpec:
        """The caps of its network; no caps if all ranks share one host."""
        return LinkSpec() if _on_one_host(self.ranks, self.ranks_per_host) else caps(self.network)

    @property
    def uses_links(self) -> bool:
        """True if its links have the caps of its network; False if all ranks share one host instead."""
        return self.link == caps(self.network)

    @property
    def steps(self) -> int:
        """The minimum number of steps."""
        return self.alone + self.rounds * self.block_steps * len(self.arms)


@dataclass(frozen=True, slots=True)
class StudySpec:
    """A study: its cells in the order of execution. fit_key: the cell that forecasts are fitted to; "": no forecasts.

    interface: the interface to cap on real hosts."""

    title: str
    cells: tuple[Cell, ...]
    fit_key: str
    provider: str | None = None
    interface: str = ""


def _on_one_host(ranks: int, ranks_per_host: int) -> bool:
    """Return whether several ranks share the only host, so that no traffic leaves it."""
    return 1 < ranks == ranks_per_host


def slug(text: str) -> str:
    """Return a text as part of a path: "2gbit/500mbit" becomes 2gbit-500mbit. A "+" stays: it adds a link."""
    return re.sub(r"[^A-Za-z0-9._+]+", "-", text)


def caps(network: str) -> LinkSpec:
    """Return the caps that a network's text requests."""
    return LinkSpec() if network == LAUNCHER_NETWORK else parse_lab(network)


def parse(
    text: str,
    path: str,
    *,
    transports: Sequence[str] = ("stock", "ofi"),
    hosts: int = 0,
    done: Callable[[str], bool] = lambda _key: False,
) -> StudySpec:
    """Parse and expand a study file. Raises ValueError naming `path` and the line.

    transports: default if the text has none. hosts: number of a launcher's ranks; only a named interface is capped
    there; 0: hosts are simulated. done: returns whether the cell with a key is complete; such a cell needs no ranks."""
    raw = load(text, path)
    lines = Lines(text, path)
    checked(raw, lines)
    cells: list[Cell] = []
    for number, table in enumerate(raw["model"]):
        keys = {"ranks": [2], "networks": ["2gbit/500mbit"], "transports": list(transports), **raw, **table}
        if hosts and "interface" not in raw:
            keys["networks"] = [LAUNCHER_NETWORK]
        at = lines.of("ranks", number)
        _check_placement(keys, hosts, lines, number)
        own = list(_cells(keys, _model(table, lines, number, Path(path).parent, keys.get("ranks_per_host", 1)), at))
        if hosts and any(cell.ranks > hosts and not done(cell.key) for cell in own):
            raise ValueError(f"{at}: ranks = {keys['ranks']}: only {hosts} were started: start more, or request fewer")
        _check_names(cells, own, lines, number)
        cells += own
    fit_key = _fit(raw.get("fit"), cells, lines.of("fit"))
    return StudySpec(
        raw.get("title", "study"),
        tuple(_ordered(cells, fit_key)),
        fit_key,
        raw.get("provider"),
        raw.get("interface", ""),
    )


def _check_names(before: Sequence[Cell], own: Sequence[Cell], lines: Lines, number: int) -> None:
    """Raise ValueError if two cells share a name, which is that of their folder. before: cells of earlier models."""
    named = Counter(cell.key for cell in own)
    if twice := [key for key, count in named.items() if count > 1]:
        where = lines.of("networks", number)
        raise ValueError(f"{where}: networks: two of them are the same, {min(twice)}: name each network once")
    if duplicates := named.keys() & {cell.key for cell in before}:
        where = lines.of("", number)
        raise ValueError(f"{where}: duplicate cell name {min(duplicates)}: give this [[model]] its own label")


def _check_placement(keys: Mapping[str, Any], hosts: int, lines: Lines, number: int) -> None:
    """Raise ValueError if the ranks cannot be placed on hosts, or a launcher's interface capped, as requested."""
    each = keys.get("ranks_per_host", 1)
    where = f"{lines.of('ranks_per_host', number)}: ranks_per_host = {each}"
    if each > 1 and hosts:
        raise ValueError(f"{where}: the launcher places its ranks: remove this key")
    if bad := next((count for count in keys["ranks"] if count % each), 0):
        raise ValueError(f"{where}: ranks = {bad} is not a multiple of it: change one of the two")
    for text in keys["networks"] if hosts else ():
        link = caps(text)
        if link.more_bps or len(link.flow_bps) > 1:
            raise ValueError(
                f"{lines.of('networks', number)}: networks: {text!r}: a real interface supports one cap for the link "
                'and one cap for all flows: write a network such as "2gbit/500mbit"'
            )


def _model(table: Mapping[str, Any], lines: Lines, number: int, folder: Path, together: int) -> Model:
    job, file = table.get("job", REPLAY), table.get("file", "")
    name = table.get("name", {DIGITS: "digits", INFLATION: "thin_resnet"}.get(job, ""))

    def refuse(key: str, why: str) -> ValueError:
        shown = f"{key} = {json.dumps(table[key])}" if key in table else f"no {key}"
        return ValueError(f"{lines.of(key, number)}: {shown}: {why}")

    if job != REPLAY and (bad := next((key for key in REPLAYED if key in table), "")):
        raise refuse(bad, f'only a replay has this key: remove it, or write job = "{REPLAY}"')
    if file:
        if "name" in table or "compute_ms" in table:
            raise refuse("file", "a file replaces name and compute_ms: remove these keys")
        path = (folder / file).absolute()
        if not path.exists():
            raise refuse("file", f"{path} does not exist")
        file, name = str(path), path.name.split(".")[0]
    elif job == DIGITS and name != "digits":
        raise refuse("name", "the job digits has its own model: remove the name")
    elif job != DIGITS and name not in models.NAMES:
        raise refuse("name", f"write one of {', '.join(models.NAMES)}; or give a file")
    forward, backward = table.get("compute_ms", COMPUTE_MS)
    default_label = (
        slug(name) + ("-inflation" if job == INFLATION else "") + (f"-{together}-a-host" if together > 1 else "")
    )
    label = table.get("label", default_label)
    factors = float(table.get("scale", 1)), float(table.get("stretch", 1))
    return Model(name, job, label, file, (float(forward), float(backward)), *factors, table.get("compute", "sleep"))


def _cells(keys: Mapping[str, Any], model: Model, ranks_at: str) -> Iterable[Cell]:
    """Yield a model's cells. keys: the top of the file, overridden by the model's own table."""
    defaults = TURNS[model.job]
    if model.job != REPLAY and min(keys["ranks"]) < 2:
        raise ValueError(f"{ranks_at}: ranks = {keys['ranks']}: the job {model.job} needs at least 2")
    networks = [text if text == LAUNCHER_NETWORK else str(parse_lab(text)) for text in keys["networks"]]
    same = next((text for text in networks if not caps(text).capped), networks[-1])
    arms = _arms(model.job, keys["transports"])
    tuned = model.job == REPLAY and "stock" in arms and keys.get("tuned", True)
    together = keys.get("ranks_per_host", 1)
    for ranks, network in product(keys["ranks"], networks):
        yield Cell(
            f"{model.label}-{ranks}-{slug(network)}",
            model,
            ranks,
            network,
            arms,
            keys.get("rounds", defaults.rounds),
            keys.get("block_steps", defaults.block_steps),
            0 if model.job == INFLATION else keys.get("alone", defaults.alone),
            model.job == DIGITS and network == same,
            tuned and bool(caps(network).flow_bps) and not _on_one_host(ranks, together),
            together,
        )


def _arms(job: str, transports: Sequence[str]) -> tuple[Arm, ...]:
    """Return the arms of a job: the transports, and the arms that the job adds."""
    requested = [Arm.parse(name) for name in transports]
    if job == REPLAY:
        return tuple(requested)
    moving = [arm for arm in requested if arm != NULL]
    return (BARE, *moving) if job == DIGITS else (BARE, NULL, *moving)


def _fit(requested: str | None, cells: Sequence[Cell], where: str) -> str:
    played = [cell for cell in cells if cell.job == REPLAY and cell.ranks > 1 and cell.ranks_per_host == 1]
    if requested is None:
        return min(played, key=lambda cell: cell.ranks).key if played else ""
    if requested not in {cell.key for cell in played}:
        candidates = ", ".join(cell.key for cell in played) or "none"
        raise ValueError(
            f"{where}: fit = {json.dumps(requested)}: name a replayed cell of at least 2 hosts with one rank each: "
            f"{candidates}"
        )
    return requested


def _ordered(cells: Sequence[Cell], fit_key: str) -> list[Cell]:
    """Return the fitted cell first, then the cells of the same lab, then the rest, lab by lab."""
    first = sorted(cells, key=lambda cell: cell.key != fit_key)
    labs = list(dict.fromkeys(lab_key(cell) for cell in first))
    return sorted(first, key=lambda cell: labs.index(lab_key(cell)))


def lab_key(cell: Cell) -> tuple[int, int, str]:
    """Return the key of a cell's lab: cells with equal keys run in the same lab."""
    return cell.ranks, cell.ranks_per_host, cell.network
