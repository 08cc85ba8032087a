"""Passes of a model: the times of each tensor, measured or modelled, and a replay of given times without computation.

One pass measures all tensors: with timestamps from C callables on a CPU, with stream events on a GPU. In a replay every
layer is an autograd function that lasts its share of the given time and returns a gradient for each of its parameters.
Hooks, DDP and optimizers therefore work as with the real model.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from netbottleneck.bench import models
from netbottleneck.bench.models import build, sample_shape
from netbottleneck.launch import connect
from netbottleneck.trace import model as tr
from netbottleneck.trace.events import Event
from netbottleneck.trace.layer_log import LONGEST_NS
from netbottleneck.trace.ring_file import EVENTS, read_ring
from netbottleneck.trace.ring_reader import rank_steps
from netbottleneck.trace.transports import SINGLE

# Layers of a model in execution order, with the operations of each.

_NORM_OPERATIONS = 8  # multiply-adds per element of a norm, which reads and writes its input several times


@dataclass(frozen=True)
class LayerShapes:
    """A module with parameters of its own: their full names and shapes, and its multiply-adds for a batch of one."""

    name: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    operations: int


def layers_of(name: str, **options: Any) -> list[LayerShapes]:
    """Return a named model's layers in forward order, from a run on the meta device: no memory, no arithmetic.

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


# Forward and backward of a model.

WARMUP = 5  # the first passes are much slower: libraries choose algorithms, threads start
EVENTS_A_TENSOR = 1
EVENTS_A_STEP = 8
COPIES = 4  # minimum memory in sizes of the model: parameters, gradients, and temporaries of a step
LEAST_MS = 1e-6  # of a modelled backward pass: a trace has whole ns
TOKENS = 256  # the smallest vocabulary of a model

Progress = Callable[[int, int], None]


def random_batch(name: str, count: int) -> Tensor:
    """Return `count` random inputs of a named model: images, or sequences of tokens of its vocabulary."""
    shape = (count, *models.sample_shape(name)[1:])
    return torch.rand(shape) if len(shape) == 4 else torch.randint(0, TOKENS, shape)


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model's output: a tensor, or a possibly nested sequence or mapping."""
    if isinstance(output, Tensor):
        yield output
    else:
        for part in output.values() if isinstance(output, dict) else output:
            yield from tensors_of(part)


def loss_of(output: Any) -> Tensor:
    """Return a loss of all tensors of an output, so that every parameter that one of them uses has a gradient."""
    return torch.stack([one.float().square().mean() for one in tensors_of(output)]).sum()


def measured(name: str, *, batch: int, passes: int, device: str, progress: Progress = lambda *_: None) -> tr.Trace:
    """Return `passes` steps of a named model (forward, backward, SGD) on one device, with the time of each gradient.

    Raises ValueError if the model needs more memory than is free.
    """
    needed = COPIES * sum(size for _, size in sizes(name))
    if device == "cpu" and needed > psutil.virtual_memory().available:
        raise ValueError(f"{name} needs at least {needed >> 20} MiB of free memory: --modelled needs no memory")
    torch.manual_seed(7)
    model = models.build(name).to(device)
    work = _Work(model, random_batch(name, batch).to(device))
    steps = (_on_gpu if device.startswith("cuda") else _on_cpu)(work, passes, progress)
    named = [(key, value.numel() * value.element_size()) for key, value in model.named_parameters()]
    note = f"measured on {device}, batch {batch}, {torch.get_num_threads()} threads"
    return _trace(name, named, steps, "measured", note)


def modelled(name: str, forward_ms: float, backward_ms: float) -> tr.Trace:
    """Return one step of a named model; each layer's share of the time is its share of the multiply-adds.

    Nothing runs. All gradients of a layer are ready at the end of its backward. Raises ValueError for invalid times.
    """
    most_ms = LONGEST_NS / 1e6
    if not (forward_ms >= 0 and backward_ms >= LEAST_MS and forward_ms + backward_ms <= most_ms):
        passes = f"a forward pass of {forward_ms:g} ms and a backward pass of {backward_ms:g} ms"
        raise ValueError(f"{passes} are not valid: at least 0 and {LEAST_MS:g}, together at most {most_ms:g} ms")
    layers = layers_of(name)
    order = [key for key, _ in sizes(name)]
    index = {key: at for at, key in enumerate(order)}
    weights = [layer.operations for layer in layers]
    total = sum(weights) or len(layers)
    forward_ns, backward_ns = round(forward_ms * 1e6), round(backward_ms * 1e6)
    ready, done = [], 0
    for layer, weight in zip(reversed(layers), reversed(weights if any(weights) else [1] * len(layers)), strict=True):
        done += weight
        at = forward_ns + round(backward_ns * done / total)
        ready += [(index[key], at) for key, _ in reversed(layer.parameters)]
    end = forward_ns + backward_ns
    step = tr.Step(0, 0, 0, SINGLE, 0, end, forward=((0, forward_ns),), grad_ready=tuple(ready))
    note = f"modelled, not measured: {forward_ms:g} and {backward_ms:g} ms spread over the layers by multiply-adds"
    return _trace(name, sizes(name), [step], "simulated", note)


def pick_device(name: str) -> str:
    """Return the requested device; "auto" is cuda if available, else cpu. Raises ValueError for an unknown device."""
    there = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if there else "cpu"
    kind, _, number = name.partition(":")
    known = not number or (number.isdecimal() and int(number) < torch.cuda.device_count())
    available = kind == "cuda" and there and known
    if name != "cpu" and not available:
        raise ValueError(
            f"--device {name}: this machine has {f'cuda:0 to {torch.cuda.device_count() - 1}' if there else 'cpu'}"
        )
    return name


def sizes(name: str) -> list[tuple[str, int]]:
    """Return (name, bytes) of each parameter of a model, in its order, as float32."""
    rows = []
    for key, shape in models.shapes(name):
        count = 4
        for length in shape:
            count *= length
        rows.append((key, count))
    return rows


def _trace(name: str, named: list[tuple[str, int]], steps: list[tr.Step], origin: str, note: str) -> tr.Trace:
    return tr.Trace(
        f"profile-{name}",
        1,
        (SINGLE,),
        origin=origin,
        model=name,
        notes=(note,),
        ranks=(tr.Rank(0, finished=True),),
        parameters=tuple(tr.Parameter(key, size, "float32") for key, size in named),
        steps=tuple(steps),
    )


class _Work:
    """A model, its optimizer and one batch."""

    def __init__(self, model: torch.nn.Module, batch: torch.Tensor) -> None:
        self.model = model.train()
        self.batch = batch
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-9)

    def forward(self) -> torch.Tensor:
        """Return the loss of a forward."""
        return loss_of(self.model(self.batch))

    def step(self) -> None:
        """Run one step that is not measured."""
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()


def _on_cpu(work: _Work, passes: int, progress: Progress) -> list[tr.Step]:
    room = (passes + WARMUP) * (EVENTS_A_STEP + EVENTS_A_TENSOR * len(work.parameters))
    for _ in range(WARMUP):
        work.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "0.train.ring"
        recorder = connect.core().Recorder(str(path), room, 0)
        for at, parameter in enumerate(work.parameters):
            parameter.register_post_accumulate_grad_hook(recorder.stamper(EVENTS["GRAD_READY"], at))
        for number in range(passes):
            recorder.step = number
            work.optimizer.zero_grad()
            recorder.put(EVENTS["STEP_BEGIN"])
            recorder.put(EVENTS["FORWARD_BEGIN"])
            loss = work.forward()
            recorder.put(EVENTS["FORWARD_END"])
            loss.backward()
            recorder.put(EVENTS["OPTIMIZER_BEGIN"])
            work.optimizer.step()
            recorder.put(EVENTS["OPTIMIZER_END"])
            recorder.put(EVENTS["STEP_END"])
            progress(number + 1, passes)
        recorder.close()
        rows = read_ring(path).events[["kind", "time_ns", "step", "key", "a", "b", "c", "d", "e"]].tolist()
    names = {number: name for name, number in EVENTS.items()}
    found, _, _ = rank_steps([Event(names[kind], *rest) for kind, *rest in rows], 0, (SINGLE,), None)
    return list(found)


def _on_gpu(work: _Work, passes: int, progress: Progress) -> list[tr.Step]:
    """Measure with stream events: the host sees when it queues the work of a gradient, not when that is ready."""
    for _ in range(WARMUP):
        work.step()
    marks: list[tuple[int, Any]] = []

    def mark(at: int) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append((at, event))
        return event

    for at, parameter in enumerate(work.parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, at=at: mark(at))
    found = []
    clock = 0
    for number in range(passes):
        work.optimizer.zero_grad()
        torch.cuda.synchronize()
        marks.clear()
        begin = mark(-1)
        loss = work.forward()
        forward = mark(-1)
        loss.backward()
        backward = mark(-1)
        work.optimizer.step()
        end = mark(-1)
        torch.cuda.synchronize()
        origin = clock

        def ns(event: Any, begin: Any = begin, origin: int = origin) -> int:
            return origin + round(float(begin.elapsed_time(event)) * 1e6)

        ready = tuple((at, ns(event)) for at, event in marks if at >= 0)
        found.append(
            tr.Step(
                0, number, 0, SINGLE, clock, ns(end), forward=((clock, ns(forward)),),
                optimizer=((ns(backward), ns(end)),), grad_ready=ready,
            )
        )  # fmt: skip
        clock = ns(end)
        progress(number + 1, passes)
    return found


# Replay of a model: exact parameters, timed layers and real gradients, without the model's computation.

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
        layers: Sequence[LayerShapes],
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
    return ReplayModel(layers_of(name), (forward, backward), **options)


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
