"""An optimizer as an object of another class that has its name, its state and more methods."""

from typing import Any

import torch


def remade(optimizer: torch.optim.Optimizer, added: type[torch.optim.Optimizer]) -> Any:
    """Return an object of a new class of the same name, with the optimizer's own state."""
    base = type(optimizer)
    made: type[Any] = type(base.__name__, (added, base), {"__doc__": base.__doc__, "_made_from": base})
    result: Any = object.__new__(made)
    # A scheduler that was made before has replaced the old one's step; that replacement is not for this one.
    result.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    return result


def own_step(optimizer: torch.optim.Optimizer) -> None:
    """Make a step of the class that an optimizer was made from: no rank waits for another."""
    base = getattr(type(optimizer), "_made_from", None)
    if base is None:
        optimizer.step()
    else:
        base.step(optimizer)


def positive(passes: int) -> int:
    """Return a number of backward passes; ValueError below 1."""
    if passes < 1:
        raise ValueError(f"backward_passes_per_step={passes}: at least 1 is required")
    return passes
