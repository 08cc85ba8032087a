"""Models that need no download (ResNet, VGG and BERT as published, thin ones to train, replays), and digits.

Importing this package imports no torch; building a model does."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import nn

# Handwritten digits, 1,797 images of 8 x 8, in scikit-learn's wheel.
_DIGITS = Path("datasets", "data", "digits.csv.gz")
NAMES = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "thin_resnet"),
    *("vgg16", "vgg16_bn"),
    *("bert_base", "bert_large", "thin_bert"),
)


def build(name: str, **options: Any) -> nn.Module:
    """Return a model by name, on torch's current default device; `options` are those of its function.

    Raises ValueError for an unknown name, ImportError without torch."""
    if name not in NAMES:
        raise ValueError(f"unknown model {name!r}: must be one of {', '.join(NAMES)}")
    from netbottleneck.bench.models import networks

    model: nn.Module = getattr(networks, name)(**options)
    return model


def sample_shape(name: str) -> tuple[int, ...]:
    """Return the shape of a batch of one: the published size of an image, or of a sequence of token numbers."""
    if name == "thin_resnet":
        return (1, 1, 8, 8)
    if name in ("bert_base", "bert_large", "thin_bert"):
        return (1, 32 if name == "thin_bert" else 128)
    return (1, 3, 224, 224)


def shapes(name: str, **options: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return the parameters' names and shapes in the model's order, without allocating memory for them."""
    import torch

    with torch.device("meta"):
        model = build(name, **options)
    return [(parameter, tuple(value.shape)) for parameter, value in model.named_parameters()]


@dataclass(frozen=True)
class Digits:
    """Images are float32 (N, 1, 8, 8) from 0 to 1, labels int64 (N,) from 0 to 9; a fifth is held out."""

    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]


def digits(seed: int = 0) -> Digits:
    """Return the digits, shuffled by `seed` and split: 1,438 to train on and 359 held out.

    Raises ImportError naming scikit-learn if it is not installed. scikit-learn itself is not imported."""
    table = _digits_table()
    order = np.random.default_rng(seed).permutation(len(table))
    images = (table[order, :64] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    labels = table[order, 64].astype(np.int64)
    held = len(table) // 5
    return Digits(images[held:], labels[held:], images[:held], labels[:held])


def _digits_table() -> NDArray[np.float64]:
    package: Any = importlib.util.find_spec("sklearn")
    for folder in package.submodule_search_locations if package is not None else ():
        path = Path(folder, _DIGITS)
        if path.exists():
            return np.loadtxt(path, delimiter=",")
    raise ImportError(
        "the digits come with scikit-learn, which is not installed here or lacks them: "
        "pip install 'netbottleneck[study]' or pip install scikit-learn",
        name="sklearn",
    )
