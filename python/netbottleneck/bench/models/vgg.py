"""VGG-16 (Simonyan and Zisserman, 2014), with and without batch norm, with torchvision's parameter names."""

from __future__ import annotations

from torch import Tensor, nn

_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
_POOLED = 7


class VGG(nn.Module):
    """Thirteen 3 x 3 convolutions in five stages and three linear layers. `width` scales all hidden sizes.

    Input (N, channels, H, W) with H and W of 32 or more, output (N, classes)."""

    def __init__(self, *, norm: bool, classes: int = 1000, channels: int = 3, width: float = 1.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for full, depth in _STAGES:
            planes = max(1, round(full * width))
            for _ in range(depth):
                layers.append(nn.Conv2d(channels, planes, 3, padding=1))
                layers += [nn.BatchNorm2d(planes)] if norm else []
                layers.append(nn.ReLU(inplace=True))
                channels = planes
            layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(_POOLED)
        hidden = max(1, round(4096 * width))
        self.classifier = nn.Sequential(
            nn.Linear(channels * _POOLED**2, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the classes' scores."""
        x = self.avgpool(self.features(x))
        scores: Tensor = self.classifier(x.flatten(1))
        return scores


def vgg16(*, classes: int = 1000, channels: int = 3, width: float = 1.0) -> VGG:
    """Return VGG-16: 138,357,544 parameters in 32 tensors."""
    return VGG(norm=False, classes=classes, channels=channels, width=width)


def vgg16_bn(*, classes: int = 1000, channels: int = 3, width: float = 1.0) -> VGG:
    """Return VGG-16 with batch norm: 138,365,992 parameters in 58 tensors."""
    return VGG(norm=True, classes=classes, channels=channels, width=width)
