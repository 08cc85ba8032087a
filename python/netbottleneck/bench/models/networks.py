"""ResNet and VGG-16 with torchvision's parameter names, and BERT with those of common checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

# ResNet (He et al., "Deep Residual Learning for Image Recognition", 2015).
#
# The stride of a bottleneck is in its 3 x 3 convolution, as in torchvision.


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut."""

    expansion = 1

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels_in, channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv(channels, channels, 3)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = _shortcut(channels_in, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, channels_in, H, W) to (N, channels, H / stride, W / stride)."""
        y = self.bn1(self.conv1(x)).relu_()
        y = self.bn2(self.conv2(y))
        shortcut = x if self.downsample is None else self.downsample(x)
        result: Tensor = (y + shortcut).relu_()
        return result


class Bottleneck(nn.Module):
    """A 3 x 3 convolution between two of 1 x 1, with a shortcut; the output has four times as many channels."""

    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels_in, channels, 1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv(channels, channels, 3, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = _conv(channels, channels * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(channels * self.expansion)
        self.downsample = _shortcut(channels_in, channels * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, channels_in, H, W) to (N, 4 * channels, H / stride, W / stride)."""
        y = self.bn1(self.conv1(x)).relu_()
        y = self.bn2(self.conv2(y)).relu_()
        y = self.bn3(self.conv3(y))
        shortcut = x if self.downsample is None else self.downsample(x)
        result: Tensor = (y + shortcut).relu_()
        return result


@dataclass(frozen=True)
class ResNetSizes:
    """Blocks per stage, at most four stages; `width` scales all channels, `small` removes the stem's strides."""

    block: type[BasicBlock | Bottleneck]
    depths: tuple[int, ...]
    classes: int = 1000
    channels: int = 3
    width: float = 1.0
    small: bool = False


class ResNet(nn.Module):
    """Input (N, channels, H, W), output (N, classes)."""

    def __init__(self, sizes: ResNetSizes) -> None:
        super().__init__()
        block, depths, width, small = sizes.block, sizes.depths, sizes.width, sizes.small
        if not 1 <= len(depths) <= 4 or min(depths) < 1 or width <= 0:
            raise ValueError(f"a ResNet has 1 to 4 stages of at least one block, not {depths} of width {width}")
        stem = max(1, round(64 * width))
        self.conv1 = _conv(sizes.channels, stem, 3) if small else _conv(sizes.channels, stem, 7, 2)
        self.bn1 = nn.BatchNorm2d(stem)
        self.maxpool = None if small else nn.MaxPool2d(3, 2, 1)
        self.stages = len(depths)
        wide = stem
        for stage, depth in enumerate(depths):
            planes = max(1, round(64 * 2**stage * width))
            blocks = []
            for index in range(depth):
                blocks.append(block(wide, planes, 2 if stage > 0 and index == 0 else 1))
                wide = planes * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(wide, sizes.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes."""
        x = self.bn1(self.conv1(x)).relu_()
        if self.maxpool is not None:
            x = self.maxpool(x)
        for stage in range(self.stages):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


def resnet18(*, classes: int = 1000, channels: int = 3, width: float = 1.0, small: bool = False) -> ResNet:
    """Return ResNet-18: 11,689,512 parameters in 62 tensors."""
    return ResNet(ResNetSizes(BasicBlock, (2, 2, 2, 2), classes, channels, width, small))


def resnet34(*, classes: int = 1000, channels: int = 3, width: float = 1.0, small: bool = False) -> ResNet:
    """Return ResNet-34: 21,797,672 parameters in 110 tensors."""
    return ResNet(ResNetSizes(BasicBlock, (3, 4, 6, 3), classes, channels, width, small))


def resnet50(*, classes: int = 1000, channels: int = 3, width: float = 1.0, small: bool = False) -> ResNet:
    """Return ResNet-50: 25,557,032 parameters in 161 tensors."""
    return ResNet(ResNetSizes(Bottleneck, (3, 4, 6, 3), classes, channels, width, small))


def resnet101(*, classes: int = 1000, channels: int = 3, width: float = 1.0, small: bool = False) -> ResNet:
    """Return ResNet-101: 44,549,160 parameters in 314 tensors."""
    return ResNet(ResNetSizes(Bottleneck, (3, 4, 23, 3), classes, channels, width, small))


def resnet152(*, classes: int = 1000, channels: int = 3, width: float = 1.0, small: bool = False) -> ResNet:
    """Return ResNet-152: 60,192,808 parameters in 467 tensors."""
    return ResNet(ResNetSizes(Bottleneck, (3, 8, 36, 3), classes, channels, width, small))


def thin_resnet(*, classes: int = 10, channels: int = 1, width: float = 0.5) -> ResNet:
    """Return a ResNet of three one-block stages for 8 x 8 images, to train in seconds on a core: 308,074 parameters."""
    return ResNet(ResNetSizes(BasicBlock, (1, 1, 1), classes, channels, width, True))


def _conv(channels_in: int, channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels, size, stride, padding=size // 2, bias=False)


def _shortcut(channels_in: int, channels: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and channels_in == channels:
        return None
    return nn.Sequential(_conv(channels_in, channels, 1, stride), nn.BatchNorm2d(channels))


# VGG-16 (Simonyan and Zisserman, 2014), with and without batch norm.

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
        """Return the scores of the classes."""
        x = self.avgpool(self.features(x))
        scores: Tensor = self.classifier(x.flatten(1))
        return scores


def vgg16(*, classes: int = 1000, channels: int = 3, width: float = 1.0) -> VGG:
    """Return VGG-16: 138,357,544 parameters in 32 tensors."""
    return VGG(norm=False, classes=classes, channels=channels, width=width)


def vgg16_bn(*, classes: int = 1000, channels: int = 3, width: float = 1.0) -> VGG:
    """Return VGG-16 with batch norm: 138,365,992 parameters in 58 tensors."""
    return VGG(norm=True, classes=classes, channels=channels, width=width)


# BERT with both heads of its pre-training (Devlin et al., 2018).


@dataclass(frozen=True)
class BertSizes:
    """Sizes of a model; `hidden` is a multiple of `heads`, and the inner layer has four times `hidden`."""

    hidden: int
    layers: int
    heads: int
    words: int = 30522
    positions: int = 512
    kinds: int = 2
    dropout: float = 0.1


class Bert(nn.Module):
    """Input: token numbers (N, T), and their segments or None. Output: scores (N, T, words) and (N, 2)."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        if sizes.hidden % sizes.heads:
            raise ValueError(f"hidden size {sizes.hidden} is not a multiple of {sizes.heads} heads")
        self.bert = _group(
            embeddings=_Embeddings(sizes),
            encoder=_group(layer=nn.ModuleList(_Layer(sizes) for _ in range(sizes.layers))),
            pooler=_group(dense=nn.Linear(sizes.hidden, sizes.hidden)),
        )
        self.cls = _group(predictions=_Predictions(sizes), seq_relationship=nn.Linear(sizes.hidden, 2))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the scores of every word at every position, and of the two orders of the sentences."""
        embeddings = self.bert.get_submodule("embeddings")
        x = embeddings(tokens, segments)
        for layer in self.bert.get_submodule("encoder.layer").children():
            x = layer(x)
        pooled = self.bert.get_submodule("pooler.dense")(x[:, 0]).tanh()
        words = self.bert.get_parameter("embeddings.word_embeddings.weight")
        return self.cls.get_submodule("predictions")(x, words), self.cls.get_submodule("seq_relationship")(pooled)


class _Embeddings(nn.Module):
    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(sizes.words, sizes.hidden)
        self.position_embeddings = nn.Embedding(sizes.positions, sizes.hidden)
        self.token_type_embeddings = nn.Embedding(sizes.kinds, sizes.hidden)
        self.LayerNorm = nn.LayerNorm(sizes.hidden, eps=1e-12)
        self.dropout = sizes.dropout

    def forward(self, tokens: Tensor, segments: Tensor | None) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        kinds = torch.zeros_like(tokens) if segments is None else segments
        x = self.word_embeddings(tokens) + self.position_embeddings(places) + self.token_type_embeddings(kinds)
        return functional.dropout(self.LayerNorm(x), self.dropout, self.training)


class _Layer(nn.Module):
    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.heads = sizes.heads
        self.dropout = sizes.dropout
        self.attention = nn.Module()
        parts = {name: nn.Linear(hidden, hidden) for name in ("query", "key", "value")}
        self.attention.add_module("self", _group(**parts))
        self.attention.add_module("output", _Output(hidden, hidden, sizes.dropout))
        self.intermediate = _group(dense=nn.Linear(hidden, 4 * hidden))
        self.output = _Output(4 * hidden, hidden, sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        query, key, value = (
            part(x).view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
            for part in self.attention.get_submodule("self").children()
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0
        )
        x = self.attention.get_submodule("output")(mixed.transpose(1, 2).reshape(batch, length, hidden), x)
        inner = functional.gelu(self.intermediate.get_submodule("dense")(x))
        result: Tensor = self.output(inner, x)
        return result


class _Output(nn.Module):
    def __init__(self, size_in: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(size_in, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = dropout

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        result: Tensor = self.LayerNorm(functional.dropout(self.dense(x), self.dropout, self.training) + shortcut)
        return result


class _Predictions(nn.Module):
    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(sizes.words))
        self.transform = _group(
            dense=nn.Linear(sizes.hidden, sizes.hidden), LayerNorm=nn.LayerNorm(sizes.hidden, eps=1e-12)
        )

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        dense, norm = self.transform.children()
        return functional.linear(norm(functional.gelu(dense(x))), words, self.bias)


def bert_base() -> Bert:
    """Return BERT-Base with its pre-training heads: 110,106,428 parameters in 206 tensors."""
    return Bert(BertSizes(hidden=768, layers=12, heads=12))


def bert_large() -> Bert:
    """Return BERT-Large with its pre-training heads: 336,226,108 parameters in 398 tensors."""
    return Bert(BertSizes(hidden=1024, layers=24, heads=16))


def thin_bert(*, hidden: int = 64, layers: int = 2, heads: int = 4, words: int = 256, positions: int = 64) -> Bert:
    """Return a BERT over bytes, to train in seconds on one core; without dropout."""
    return Bert(BertSizes(hidden, layers, heads, words, positions, dropout=0.0))


def _group(**modules: nn.Module) -> nn.Module:
    group = nn.Module()
    for name, module in modules.items():
        group.add_module(name, module)
    return group
