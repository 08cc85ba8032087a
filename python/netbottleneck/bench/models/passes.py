"""A model's step on one rank, tensor by tensor: measured on this machine, or spread over its layers by their work.

What is stamped is stamped by C callables on a CPU and by events of the stream on a GPU, in one go for all tensors: no
pass is made for a single one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from netbottleneck.bench import models
from netbottleneck.bench.models import profile
from netbottleneck.launch import connect
from netbottleneck.trace import events
from netbottleneck.trace import model as tr
from netbottleneck.trace.model import SINGLE
from netbottleneck.trace.recorder import EVENTS
from netbottleneck.trace.ring_files import read_ring

WARMUP = 5  # the first few are slower by orders: libraries choose their ways, threads start
EVENTS_A_TENSOR = 1
EVENTS_A_STEP = 8
COPIES = 4  # parameters, gradients, and what a step holds beside them at least
TOKENS = 1000

Tell = Callable[[int, int], None]


def measured(name: str, *, batch: int, passes: int, device: str, tell: Tell = lambda *_: None) -> tr.Trace:
    """Return `passes` steps of a named model (forward, backward, SGD) on one device, each gradient with its moment.

    Raises ValueError where the model needs more memory than there is.
    """
    needed = COPIES * sum(size for _, size in sizes(name))
    if device == "cpu" and needed > psutil.virtual_memory().available:
        raise ValueError(f"{name} needs {needed >> 20} MiB at least, which are not free: --modelled needs no memory")
    torch.manual_seed(7)
    model = models.build(name).to(device)
    shape = (batch, *models.sample_shape(name)[1:])
    images = torch.rand(shape) if len(shape) == 4 else torch.randint(0, TOKENS, shape)
    work = _Work(model, images.to(device))
    steps = (_on_gpu if device.startswith("cuda") else _on_cpu)(work, passes, tell)
    named = [(key, value.numel() * value.element_size()) for key, value in model.named_parameters()]
    note = f"measured on {device}, batch {batch}, {torch.get_num_threads()} threads"
    return _trace(name, named, steps, "measured", note)


def modelled(name: str, forward_ms: float, backward_ms: float) -> tr.Trace:
    """Return one step of a named model in which each layer takes its part of the time by its multiply-adds.

    Nothing is run; the gradients of a layer are ready together, when it is over. Raises ValueError for times that
    cannot be.
    """
    if forward_ms < 0 or backward_ms <= 0:
        raise ValueError(f"a forward pass of {forward_ms} ms and a backward pass of {backward_ms} ms cannot be")
    layers = profile.layers(name)
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


def pick_device(asked: str) -> str:
    """Return the device that "auto" means here, or the one asked for. Raises ValueError where there is no such one."""
    there = torch.cuda.is_available()
    if asked == "auto":
        return "cuda" if there else "cpu"
    kind, _, number = asked.partition(":")
    known = not number or (number.isdecimal() and int(number) < torch.cuda.device_count())
    fine = kind == "cuda" and there and known
    if asked != "cpu" and not fine:
        raise ValueError(
            f"--device {asked}: there is {f'cuda:0 to {torch.cuda.device_count() - 1}' if there else 'cpu'}"
        )
    return asked


def sizes(name: str) -> list[tuple[str, int]]:
    """Return (name, bytes) of each parameter of a model, in its order, as float32."""
    found = []
    for key, shape in models.shapes(name):
        count = 4
        for length in shape:
            count *= length
        found.append((key, count))
    return found


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
        """Return a loss."""
        output: Any = self.model(self.batch)
        while not isinstance(output, torch.Tensor):
            output = next(iter(output.values() if isinstance(output, dict) else output))
        return output.float().square().mean()

    def step(self) -> None:
        """Make a step that nobody measures."""
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()


def _on_cpu(work: _Work, passes: int, tell: Tell) -> list[tr.Step]:
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
            tell(number + 1, passes)
        recorder.close()
        rows = read_ring(path).events[["kind", "time_ns", "step", "key", "a", "b", "c", "d", "e"]].tolist()
    names = {number: name for name, number in EVENTS.items()}
    found, _, _ = events.steps([events.Event(names[kind], *rest) for kind, *rest in rows], 0, (SINGLE,), None)
    return list(found)


def _on_gpu(work: _Work, passes: int, tell: Tell) -> list[tr.Step]:
    """Stamp by events of the stream: the host sees when a gradient is asked for, not when it is ready."""
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
        tell(number + 1, passes)
    return found
