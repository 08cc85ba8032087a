"""An optimizer as an object of another class that has its name, its state and more methods."""

from typing import Any

import torch


def remade(optimizer: torch.optim.Optimizer, added: type[torch.optim.Optimizer]) -> Any:
    """Return an object of a new class of the same name, with the optimizer's own state."""
    made: type[Any] = type(type(optimizer).__name__, (added, type(optimizer)), {"__doc__": type(optimizer).__doc__})
    result: Any = object.__new__(made)
    # A scheduler that was made before has replaced the old one's step; that replacement is not for this one.
    result.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    return result


def positive(passes: int) -> int:
    """Return a number of backward passes; ValueError below 1."""
    if passes < 1:
        raise ValueError(f"backward_passes_per_step={passes}: at least 1 is required")
    return passes
