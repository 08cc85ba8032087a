"""study.toml as tables: which keys there are, what each may hold, and in which line one stands. Pure."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from netbottleneck.config import TRANSPORTS
from netbottleneck.lab import parse_lab

DIGITS, REPLAY, INFLATION = JOBS = ("digits", "replay", "inflation")
MOST_RANKS = 200

Check = Callable[[Any], str]  # of a value: what to write in its place, "": it is fine


def load(text: str, path: str) -> dict[str, Any]:
    """Return a study file's tables, unchecked but for their outline. Raises ValueError naming `path` and the line."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    models = raw.get("model")
    if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
        line = Lines(text, path).of("model")
        raise ValueError(f"{line}: at least one [[model]] must be there, each with a name, a file or a job")
    return raw


def dump(raw: Mapping[str, Any]) -> str:
    """Return tables, as `load` gave them, as TOML."""
    top = [f"{key} = {json.dumps(value)}\n" for key, value in raw.items() if key != "model"]
    models = ["\n[[model]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in table.items()) for table in raw["model"]]
    return "".join([*top, *models])


def checked(raw: Mapping[str, Any], lines: Lines) -> None:
    """Raise ValueError for a key that does not exist or a value that it cannot have; file and line are named."""
    _checked(raw, lines, _TOP, None)
    for number, table in enumerate(raw["model"]):
        _checked(table, lines, _MODEL, number)


class Lines:
    """Where in a text a key stands: in the top part (model None), or in a [[model]] by its number."""

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
        """Return file and line: of a model's key, or of the same at the top, or of the model; as far as known."""
        for place in ((model, key), (None, key), (model, ""), (None, "model")):
            if place in self._found:
                return f"{self._path}, line {self._found[place]}"
        return self._path


def _checked(table: Mapping[str, Any], lines: Lines, known: Mapping[str, Check], model: int | None) -> None:
    for key, value in table.items():
        if key not in known:
            where = "the top of the file" if model is None else "a [[model]]"
            raise ValueError(f"{lines.of(key, model)}: unknown key {key!r}: {where} may hold {', '.join(known)}")
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
            return 'write a text, in "quotes"'
        return "" if not allowed or value in allowed else f"write one of {', '.join(allowed)}"

    return check


def _list(each: Check, example: str) -> Check:
    def check(value: Any) -> str:
        if not isinstance(value, list) or not value:
            return f"write a list, such as {example}"
        if len({json.dumps(item, default=str) for item in value}) != len(value):
            return "name each once"
        return next((f"{item!r}: {why}" for item in value if (why := each(item))), "")

    return check


def _network(value: Any) -> str:
    if not isinstance(value, str):
        return 'write a text such as "2gbit/500mbit"'
    try:
        parse_lab(value)
    except ValueError as error:
        return str(error)
    return ""


def _compute_ms(value: Any) -> str:
    fine = isinstance(value, list) and len(value) == 2 and not any(_number(0, 1e6)(ms) for ms in value)
    return "" if fine and value[1] > 0 else "write [FORWARD, BACKWARD] in ms, such as [133, 267]"


def _word(value: Any) -> str:
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
        "transports": _list(_text(*TRANSPORTS), '["stock", "ofi"]'),
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
        "label": _word,
        "job": _text(*JOBS),
        "compute_ms": _compute_ms,
        "scale": _number(1e-6, 64),
        "stretch": _number(1e-6, 1000),
        "compute": _text("sleep", "spin"),
        **_SHARED,
    }
)
