"""Replay of a model: exact parameters, timed layers and real gradients, without the model's computation.

Every layer is an autograd function that lasts its share of the given time and returns a gradient for each of its
parameters. Hooks, DDP and optimizers therefore work as with the real model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from netbottleneck.bench.models import passes

MODES = ("sleep", "spin")
VALUES = 15  # gradients are integers from -7 to 7: float32 sums them exactly on any number of ranks
_KNOWN_MS: dict[str, tuple[float | None, float | None]] = {
    "resnet50": (133.0, 267.0)
}  # forward and backward of one batch on one GPU


class ReplayModel(nn.Module):
    """Parameters with the given names and shapes; `compute_ms`: duration of forward and backward.

    Layers run in the given order, in the backward in reverse. Each lasts its share by `operations`. The clock starts
    with each pass, so late sleeps, and hooks that fit into a layer's time, do not make the pass longer. Mode "sleep"
    leaves the CPU idle, as a host does while its GPU computes. Mode "spin" keeps one core busy without holding the GIL.
    Any input is accepted; the result is a scalar loss. Parameters are zeros in untouched pages, which take no memory.
    `seed` makes the gradients of ranks differ; `reuse`: see Gradients.

    Raises ValueError for an unknown mode, a negative time, or no layers."""

    def __init__(
        self,
        layers: Sequence[passes.LayerShapes],
        compute_ms: tuple[float, float],
        *,
        mode: str = "sleep",
        seed: int = 0,
        reuse: bool = True,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode is one of {MODES}, not {mode!r}")
        forward_ms, backward_ms = compute_ms
        if min(forward_ms, backward_ms) < 0 or not layers:
            raise ValueError(f"{len(layers)} layers cannot take {forward_ms} and {backward_ms} ms")
        self.seed = seed
        self.passes = 0
        self._layers: list[_Layer] = []
        clock = _Clock(mode)
        weights = [layer.operations for layer in layers]
        if not any(weights):
            weights = [1] * len(layers)
        total, done, index = sum(weights), 0, 0
        for layer, weight in zip(layers, weights, strict=True):
            parameters = [_register(self, name, shape) for name, shape in layer.parameters]
            backward_s = backward_ms / 1e3 * (total - done) / total
            done += weight
            forward_s = forward_ms / 1e3 * done / total
            self._layers.append(_Layer(self, clock, Gradients(parameters, index, reuse), forward_s, backward_s))
            index += len(parameters)

    def forward(self, *_: Any) -> Tensor:
        """Return a scalar whose backward computes every parameter's gradient."""
        token = torch.zeros(())
        for index, layer in enumerate(self._layers):
            ends = (index == 0, index == len(self._layers) - 1)
            token = _Timed.apply(token, layer, *ends, *layer.gradients.parameters)  # type: ignore[no-untyped-call]
        return token

    def gradient_value(self, index: int, *, seed: int | None = None, passes: int | None = None) -> int:
        """Return the value that fills the gradient of parameter `index` (in layer order) in a pass.

        Default: this rank's seed, and the latest backward pass."""
        seed = self.seed if seed is None else seed
        return (7 * index + 3 * seed + 5 * (self.passes if passes is None else passes)) % VALUES - VALUES // 2

    def in_order(self) -> Iterator[nn.Parameter]:
        """Yield the parameters in layer order, the order of gradient_value's index."""
        for layer in self._layers:
            yield from layer.gradients.parameters


class Gradients:
    """The gradients of one layer, in memory that autograd accepts without a copy: filling them is their only cost.

    With `reuse` the memory is kept between passes: a gradient may be reduced in place, and is valid until the next
    backward. If the parameter still holds the last gradient, the next one gets fresh memory, so accumulation is right.
    Without `reuse` every gradient has fresh memory, as in a real model, at three to seven times the CPU time."""

    def __init__(self, parameters: list[nn.Parameter], first: int, reuse: bool) -> None:
        self.parameters = parameters
        self.first = first
        self._kept: list[Tensor] | None = [torch.empty_like(p) for p in parameters] if reuse else None

    def fill(self, model: ReplayModel) -> tuple[Tensor, ...]:
        """Return this pass's gradients, without other references to them."""
        result = []
        for offset, parameter in enumerate(self.parameters):
            gradient = self._memory(offset, parameter)
            result.append(gradient.fill_(model.gradient_value(self.first + offset)))
        return tuple(result)

    def _memory(self, offset: int, parameter: nn.Parameter) -> Tensor:
        if self._kept is None:
            return torch.empty_like(parameter)
        kept, held = self._kept[offset], parameter.grad
        if held is not None and held.untyped_storage().data_ptr() == kept.untyped_storage().data_ptr():
            return torch.empty_like(parameter)
        return kept.detach()  # a new tensor on kept memory: autograd makes it p.grad without a copy


class IdleOptimizer(torch.optim.Optimizer):
    """An optimizer whose step does nothing: an SGD step over 25 million weights would cost more than the network.

    Wrappers of optimizers, and hooks into the step, work with it as with any other."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        """Return the result of `closure`; the weights do not change."""
        return None if closure is None else closure()


def replay(name: str, forward_ms: float | None = None, backward_ms: float | None = None, **options: Any) -> ReplayModel:
    """Return a named model's replay; the layers share its time by their multiply-adds.

    Times may be left out for resnet50 only (133 and 267 ms). `options`: mode, seed, reuse. Raises ValueError."""
    known = _KNOWN_MS.get(name, (None, None))
    forward, backward = (
        given if given is not None else own for given, own in zip((forward_ms, backward_ms), known, strict=True)
    )
    if forward is None or backward is None:
        raise ValueError(f"how long does {name} compute? give forward_ms and backward_ms")
    return ReplayModel(passes.layers_of(name), (forward, backward), **options)


def gradient_bytes(model: nn.Module) -> int:
    """Return the total bytes of a model's gradients."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


class _Clock:
    """Waits for a given time since the start of a pass."""

    def __init__(self, mode: str) -> None:
        self._spin = mode == "spin"
        self._start = 0.0
        self._matrix = torch.ones(48, 48) if self._spin else None

    def start(self) -> None:
        self._start = time.perf_counter()

    def wait(self, seconds: float) -> None:
        """Return when `seconds` have passed since start()."""
        until = self._start + seconds
        if self._matrix is not None:
            out = torch.empty_like(self._matrix)
            with torch.no_grad():
                while time.perf_counter() < until:
                    torch.mm(self._matrix, self._matrix, out=out)
            return
        while (left := until - time.perf_counter()) > 0:
            time.sleep(left)


@dataclass(frozen=True)
class _Layer:
    """Arguments of one layer's autograd function; forward_s, backward_s: its end, since the start of the pass."""

    model: ReplayModel
    clock: _Clock
    gradients: Gradients
    forward_s: float
    backward_s: float


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, layer: _Layer, first: bool, last: bool, *_: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.last = last
        if first:
            layer.clock.start()
        layer.clock.wait(layer.forward_s)
        return token.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        layer: _Layer = ctx.layer
        if ctx.last:
            layer.model.passes += 1
            layer.clock.start()
        gradients = layer.gradients.fill(layer.model)
        layer.clock.wait(layer.backward_s)
        return grad, None, None, None, *gradients


def _register(root: nn.Module, name: str, shape: Sequence[int]) -> nn.Parameter:
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    parameter = nn.Parameter(torch.zeros(tuple(shape)))
    root.register_parameter(leaf, parameter)
    return parameter
