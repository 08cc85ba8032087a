"""Models that need no download: ResNet, VGG and BERT with their published sizes, thin ones to train, and replays.

Importing this package imports no torch; building a model does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_HOMES = {
    "resnet18": "resnet",
    "resnet34": "resnet",
    "resnet50": "resnet",
    "resnet101": "resnet",
    "resnet152": "resnet",
    "thin_resnet": "resnet",
    "vgg16": "vgg",
    "vgg16_bn": "vgg",
    "bert_base": "bert",
    "bert_large": "bert",
    "thin_bert": "bert",
}
NAMES = tuple(_HOMES)


def build(name: str, **options: Any) -> nn.Module:
    """Return a model by name, on torch's current default device; `options` are those of its function.

    Raises ValueError for an unknown name, ImportError without torch."""
    if name not in _HOMES:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(NAMES)}")
    module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    model: nn.Module = getattr(module, name)(**options)
    return model


def sample_shape(name: str) -> tuple[int, ...]:
    """Return the shape of one batch of one as the model was published for: an image, or token numbers."""
    if name == "thin_resnet":
        return (1, 1, 8, 8)
    if _HOMES.get(name) == "bert":
        return (1, 32 if name == "thin_bert" else 128)
    return (1, 3, 224, 224)


def shapes(name: str, **options: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return the parameters' names and shapes in the model's order, without memory for any of them."""
    import torch

    with torch.device("meta"):
        model = build(name, **options)
    return [(parameter, tuple(value.shape)) for parameter, value in model.named_parameters()]
