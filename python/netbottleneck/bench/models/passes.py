"""Times of one rank's step, tensor by tensor: measured here, or modelled from the operations of the layers.

One pass measures all tensors: with timestamps from C callables on a CPU, with stream events on a GPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
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
from netbottleneck.trace.ring_reader import EVENTS, Event, rank_steps, read_ring
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
TOKENS = 1000

Progress = Callable[[int, int], None]


def measured(name: str, *, batch: int, passes: int, device: str, progress: Progress = lambda *_: None) -> tr.Trace:
    """Return `passes` steps of a named model (forward, backward, SGD) on one device, with the time of each gradient.

    Raises ValueError if the model needs more memory than is free.
    """
    needed = COPIES * sum(size for _, size in sizes(name))
    if device == "cpu" and needed > psutil.virtual_memory().available:
        raise ValueError(f"{name} needs at least {needed >> 20} MiB of free memory: --modelled needs no memory")
    torch.manual_seed(7)
    model = models.build(name).to(device)
    shape = (batch, *models.sample_shape(name)[1:])
    images = torch.rand(shape) if len(shape) == 4 else torch.randint(0, TOKENS, shape)
    work = _Work(model, images.to(device))
    steps = (_on_gpu if device.startswith("cuda") else _on_cpu)(work, passes, progress)
    named = [(key, value.numel() * value.element_size()) for key, value in model.named_parameters()]
    note = f"measured on {device}, batch {batch}, {torch.get_num_threads()} threads"
    return _trace(name, named, steps, "measured", note)


def modelled(name: str, forward_ms: float, backward_ms: float) -> tr.Trace:
    """Return one step of a named model; each layer's share of the time is its share of the multiply-adds.

    Nothing runs. All gradients of a layer are ready at the end of its backward. Raises ValueError for invalid times.
    """
    if forward_ms < 0 or backward_ms <= 0:
        raise ValueError(f"a forward pass of {forward_ms} ms and a backward pass of {backward_ms} ms are not valid")
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
        output: Any = self.model(self.batch)
        while not isinstance(output, torch.Tensor):
            output = next(iter(output.values() if isinstance(output, dict) else output))
        return output.float().square().mean()

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
