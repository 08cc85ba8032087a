"""The part of torchvision that Horovod's PyTorch examples use; replaces `torchvision` if that is not installed.

Models are this package's, of the published sizes. Images have MNIST's shape, and show a pattern per class with noise.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from netbottleneck.bench import models as ours

models = types.SimpleNamespace(**{name: lambda name=name: ours.build(name) for name in ("resnet18", "resnet50")})
TRAIN, TEST, SIDE, BLOCK = 8192, 1024, 28, 7


class MNIST(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Images of MNIST's shape, the same on every rank."""

    def __init__(self, root: str, train: bool = True, download: bool = False, transform: Any = None) -> None:
        drawn = torch.Generator().manual_seed(int(train))
        count = TRAIN if train else TEST
        self.targets = torch.randint(10, (count,), generator=drawn)
        coarse = torch.rand(10, SIDE // BLOCK, SIDE // BLOCK, generator=torch.Generator().manual_seed(2)).round()
        patterns = coarse.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
        self.data = (3 * patterns[self.targets] + torch.rand(count, SIDE, SIDE, generator=drawn)) / 4
        self.transform = transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.data[index]
        return (image if self.transform is None else self.transform(image)), int(self.targets[index])


def compose(steps: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def all_of(image: Any) -> Any:
        for step in steps:
            image = step(image)
        return image

    return all_of


def normalize(mean: Sequence[float], deviation: Sequence[float]) -> Callable[[Any], Any]:
    return lambda image: (image - mean[0]) / deviation[0]


datasets = types.SimpleNamespace(MNIST=MNIST)
transforms = types.SimpleNamespace(
    Compose=compose, ToTensor=lambda: lambda image: image.unsqueeze(0), Normalize=normalize
)
