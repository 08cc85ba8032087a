"""JSON codec for frozen dataclasses, by their type hints. Tuples are lists in JSON; unknown keys are ignored.

A class derived from str is text in JSON, and is built by its class method `parse`.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any


def shallow(value: Any) -> dict[str, Any]:
    """Return one level of a dataclass or mapping as a dictionary; json calls it for nested dataclasses."""
    if isinstance(value, Mapping):
        return dict(value)
    return {item.name: getattr(value, item.name) for item in fields(value)}


def dump(value: Any) -> str:
    """Return a value as one line of JSON."""
    return json.dumps(value, separators=(",", ":"), default=shallow)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


WORD = 1 << 64
_SCALARS: Mapping[Any, tuple[type, ...]] = types.MappingProxyType(
    {int: (int,), float: (int, float), str: (str,), bool: (bool,)}
)


def _scalar(kind: Any, value: Any) -> Any:
    if type(value) not in _SCALARS[kind]:
        raise TypeError(f"{str(value)[:40]!r} where {kind.__name__} must be")
    if kind is int and not -WORD <= value < WORD:
        raise TypeError(f"{str(value)[:40]} where a number of 64 bits must be")
    return value


def _tuple(inner: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if inner[-1] is not Ellipsis:
        return tuple(build(i, v) for i, v in zip(inner, value, strict=True))
    if inner[0] in _SCALARS:
        return tuple(_scalar(inner[0], v) for v in value)
    return tuple(build(inner[0], v) for v in value)


def _nothing(kind: Any) -> None:
    """Raise TypeError unless the type allows None."""
    if kind is not Any and type(None) not in typing.get_args(kind):
        raise TypeError(f"nothing where {getattr(kind, '__name__', kind)} must be")


def build(kind: Any, value: Any) -> Any:
    """Convert `value`, as parsed from JSON, to the type `kind`.

    Raises TypeError for a scalar of another type, or for None where a value is required."""
    if value is None:
        return _nothing(kind)
    if is_dataclass(kind):
        hints = _hints(typing.cast(type, kind))
        return typing.cast(Any, kind)(**{k: build(hints[k], v) for k, v in value.items() if k in hints})
    origin = typing.get_origin(kind)
    if origin is tuple:
        return _tuple(typing.get_args(kind), value)
    if origin in (dict, Mapping):
        inner = typing.get_args(kind)[1]
        return {k: build(inner, v) for k, v in value.items()}
    if origin in (types.UnionType, typing.Union):
        return build(next(k for k in typing.get_args(kind) if k is not type(None)), value)
    if isinstance(kind, type) and issubclass(kind, str) and kind is not str:
        return typing.cast(Any, kind).parse(_scalar(str, value))
    return _scalar(kind, value) if kind in _SCALARS else value
