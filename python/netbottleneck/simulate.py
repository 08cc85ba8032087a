"""A trace as it would have been: the recorded compute, sent by another plan, at another cost."""

from __future__ import annotations

from netbottleneck.cost import Cost
from netbottleneck.plan import Plan
from netbottleneck.trace import Trace


def simulate(
    trace: Trace,
    plan: Plan,
    cost: Cost,
    *,
    workers: int | None = None,
    steps: int | None = None,
    transport: str | None = None,
) -> Trace:
    """Return the run as it would have been with `workers` ranks for `steps` steps. Pure, deterministic, integer ns."""
    raise NotImplementedError
