"""A training in a lab, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Training:
    """A training in a lab.

    lab: its link and flow caps. flow: how flows are capped. arms: NETBOTTLENECK_TRANSPORT. options: the arguments of
    train.py, and `clock_s`, by which the clock of the last rank is ahead. env: further variables. lost: part of the
    packets that the last host does not get. other_flows: connections of another job, which send all the time from the
    first host to the last. slow_link: a host, and the caps of its link. host_env: further variables by host.
    """

    lab: str = "none"
    arms: str = "stock,bare"
    options: Mapping[str, Any] = field(default_factory=dict)
    hosts: int = 2
    ranks_per_host: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    lost: float = 0.0
    other_flows: int = 0
    flow: str = "htb"
    slow_link: tuple[int, str] | None = None
    host_env: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    def but(self, lab: str | None = None, **options: Any) -> Training:
        """Return the same training on another lab or with other arguments; None: without the argument."""
        merged = {key: value for key, value in (dict(self.options) | options).items() if value is not None}
        return replace(self, lab=self.lab if lab is None else lab, options=merged)
