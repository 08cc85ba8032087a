"""Which layers a model has, in the order in which they run, and how much arithmetic each one does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from netbottleneck.bench.models import build, sample_shape

_NORM_OPERATIONS = 8  # a norm reads and writes its input a few times: it counts as that many multiply-adds an element


@dataclass(frozen=True)
class LayerShapes:
    """A module with parameters of its own: their full names and shapes, and its multiply-adds for a batch of one."""

    name: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    operations: int


def layers(name: str, **options: Any) -> list[LayerShapes]:
    """Return a named model's layers in forward order, run on the meta device: no memory, no arithmetic.

    A parameter that two layers share belongs to the first. Raises ValueError for an unknown name."""
    with torch.device("meta"):
        model = build(name, **options)
        shape = sample_shape(name)
        sample = torch.zeros(shape, dtype=torch.float32 if len(shape) == 4 else torch.int64)
    operations: dict[str, int] = {}
    for path, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(_counter(operations, path))
    with torch.no_grad():
        model(sample)
    own: dict[str, list[tuple[str, tuple[int, ...]]]] = {path: [] for path in operations}
    for path, value in model.named_parameters():
        own.setdefault(path.rpartition(".")[0], []).append((path, tuple(value.shape)))
    return [LayerShapes(path, tuple(held), operations.get(path, 0)) for path, held in own.items() if held]


def _counter(operations: dict[str, int], path: str) -> Callable[[nn.Module, Any, Any], None]:
    def count(module: nn.Module, _: Any, output: Any) -> None:
        result = output if isinstance(output, Tensor) else output[0]
        operations[path] = operations.get(path, 0) + _multiply_adds(module, result)

    return count


def _multiply_adds(module: nn.Module, output: Tensor) -> int:
    if isinstance(module, nn.Conv2d | nn.Linear):
        return output.numel() * module.weight[0].numel()
    return output.numel() * (1 if isinstance(module, nn.Embedding) else _NORM_OPERATIONS)
