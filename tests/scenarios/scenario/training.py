"""A training in a lab, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Training:
    """A training in a lab. lab: its link and flow caps; options: the arguments of train.py."""

    lab: str = "none"
    arms: str = "stock,bare"
    options: Mapping[str, Any] = field(default_factory=dict)

    def but(self, lab: str | None = None, **options: Any) -> Training:
        """Return the same training on another lab or with other arguments; None: without the argument."""
        merged = {key: value for key, value in (dict(self.options) | options).items() if value is not None}
        return replace(self, lab=self.lab if lab is None else lab, options=merged)
