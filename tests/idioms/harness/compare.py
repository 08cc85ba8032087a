"""Records of a training run as flat values, and their comparison: by bits, or within the bound of a reordered sum."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

# Bytes of the sign and exponent vary among NaNs; all of them are one value here.
NAN = float("nan")


@dataclass
class Event:
    """One look, or the end of one step. values: digests by name. local: sums of |gradient| of this rank, by name."""

    name: str
    values: dict[str, str]
    local: dict[str, str] = field(default_factory=dict)


@dataclass
class Log:
    """What a rank recorded of one idiom. store: the values themselves, by digest, each once."""

    events: list[Event] = field(default_factory=list)
    store: dict[str, Any] = field(default_factory=dict)

    def keep(self, value: Any) -> str:
        """Store a value, and return its digest."""
        name = digest(value)
        if name not in self.store:
            self.store[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        return name


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of nested dictionaries and sequences."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flatten(item, f"{prefix}/{key}" if prefix else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from flatten(item, f"{prefix}/{index}" if prefix else str(index))
    else:
        yield prefix, value


def digest(value: Any) -> str:
    """Return a text that two values share exactly if they are equal by bits, all NaNs being one value."""
    made = hashlib.blake2b(digest_size=16)
    if not isinstance(value, torch.Tensor):
        made.update(repr(value).encode())
        return made.hexdigest()
    made.update(f"{value.dtype} {tuple(value.shape)} {value.layout}".encode())
    for part in _parts(value):
        made.update(part.contiguous().reshape(-1).view(torch.uint8).numpy())
    return made.hexdigest()


def _parts(value: torch.Tensor) -> list[torch.Tensor]:
    """Return dense tensors that hold the whole value."""
    plain = value.detach().resolve_conj().resolve_neg().cpu()
    if plain.is_sparse:
        joined = plain.coalesce()
        return [joined.indices(), *_parts(joined.values())]
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    if plain.is_floating_point():
        plain = torch.where(plain.isnan(), torch.full_like(plain, NAN), plain)
    return [plain]


def differ(mine: Any, theirs: Any) -> str:
    """Return how a value differs from the untouched run's."""
    if not (isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return f"untouched {_short(theirs)}, here {_short(mine)}"
    for what in ("dtype", "shape", "layout"):
        if getattr(mine, what) != getattr(theirs, what):
            return f"{what}: untouched {getattr(theirs, what)}, here {getattr(mine, what)}"
    a, b = _dense(mine).reshape(-1), _dense(theirs).reshape(-1)
    wrong = ~_same(a, b)
    first = int(wrong.nonzero()[0]) if bool(wrong.any()) else 0
    text = f"{int(wrong.sum())} of {a.numel()} elements"
    if a.numel():
        text += f", [{first}]: untouched {_digits(b[first])}, here {_digits(a[first])}"
    return text


def _digits(element: torch.Tensor) -> str:
    value = element.item()
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _dense(value: torch.Tensor) -> torch.Tensor:
    plain = value.detach().resolve_conj().resolve_neg()
    return plain.to_dense() if plain.is_sparse else plain


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} {value.dtype}"
    return repr(value)[:60]


def apart(mine: torch.Tensor, theirs: torch.Tensor, bound: torch.Tensor) -> float:
    """Return the largest |difference| of an element over its bound; infinity for another shape, or a lone NaN."""
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape or mine.layout != theirs.layout:
        return float("inf")
    a, b = _dense(mine), _dense(theirs)
    wide = torch.complex128 if a.is_complex() else torch.float64
    over = (a.to(wide) - b.to(wide)).abs() / bound
    over = torch.where(_same(a, b), torch.zeros_like(over), torch.nan_to_num(over, nan=float("inf")))
    return float(over.max()) if over.numel() else 0.0


def sum_bound(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return 2 n u S / n for S the sum over n ranks of |gradient|: how far averages in two orders may be apart.

    parts: |gradient| of each rank, float64. u: the unit roundoff of dtype. An average of n numbers has n - 1 rounded
    additions and a rounded division, so each of the two is within n u S / n of the exact one (Higham, Accuracy and
    Stability of Numerical Algorithms, section 4.2).
    """
    total = torch.stack(parts).sum(0)
    return 2 * unit_roundoff(dtype) * total


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return half the distance from 1 to the next number of a floating-point or complex dtype."""
    return torch.finfo(dtype).eps / 2
