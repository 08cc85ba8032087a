"""What hooks and traffic make of compute: forward and backward passes, bare, with hooks, with hooks and traffic.

A step of such a run is one forward and one backward pass, from just before the one to just after the other, in every
arm; what it was blocked for the sake of communication stands in its waits. Nothing is learned. Needs torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from netbottleneck.bench import models
from netbottleneck.bench.models.data import digits
from netbottleneck.runtime.communicators import key_of
from netbottleneck.runtime.session import Session
from netbottleneck.study.jobs import BATCH, SEED, batches
from netbottleneck.study.opening import opened, warm
from netbottleneck.study.task import Outcome, Task
from netbottleneck.torch.gradients import Gradients
from netbottleneck.trace.model import BARE
from netbottleneck.trace.recorder import EVENTS
from netbottleneck.whatif.plan import described

SAMPLES = 4  # a step of a model that has no data here
TOKENS = 1000
WARMUP = 5

Loss = Callable[[torch.nn.Module], torch.Tensor]
Tell = Callable[[int, int, str], None]
_engine: Any = torch.autograd.Variable._execution_engine


def run(task: Task, tell: Tell) -> Outcome:
    """Run the passes on this rank, as all others do. tell(step, steps, arm): between blocks.

    Raises what the transports raise, and ValueError for an unknown model.
    """
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    with opened(task) as session:
        plain = models.build(task.model)
        losses = _losses(task.model, session.place.rank, session.place.size)
        hooked = Hooked(copy.deepcopy(plain), session)
        for model in (plain, hooked.model):
            for _ in range(WARMUP):
                _pass(model, next(losses))
        warm(session)
        _turns(session, plain, hooked, losses, task, tell)
        hooked.describe()
        digests = session.control.exchange(b"passes".ljust(8))
    return Outcome(str(session.folder), task.steps, tuple(digest.hex() for digest in digests))


class Hooked:
    """A model with the hooks of a measured run: stamps of C, gradients that are sent when they are ready."""

    def __init__(self, model: torch.nn.Module, session: Session) -> None:
        self.model = model
        self._session = session
        self._gradients = Gradients(
            model.named_parameters(),
            recorder=session.recorder,
            direct_bytes=session.settings.direct_bytes,
            agree=lambda mine: session.control.exchange(mine)[0],
        )
        put = session.recorder.stamper
        model.register_forward_pre_hook(put(EVENTS["FORWARD_BEGIN"]))
        model.register_forward_hook(put(EVENTS["FORWARD_END"]))
        model.register_forward_hook(self._after_forward)

    def turn_to(self, arm: str) -> None:
        """Let an arm move the gradients."""
        self._session.arms[arm].target(self._gradients)

    def describe(self) -> None:
        """Write down which gradients there are, and how they travelled."""
        tensors = [
            (name, p.numel() * p.element_size(), p.dtype)
            for name, p in zip(self._gradients.names, self._gradients.parameters, strict=True)
        ]
        self._session.describe(modules=[], **described(tensors, self._gradients.buckets, key_of))

    def _after_forward(self, _model: Any, _args: Any, output: Any) -> None:
        _tensor_of(output).register_hook(self._backward_begins)

    def _backward_begins(self, _gradient: Any) -> None:
        _engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._gradients.flush()
        self._gradients.wait()


def _turns(
    session: Session, plain: torch.nn.Module, hooked: Hooked, losses: Iterator[Loss], task: Task, tell: Tell
) -> None:
    while session.step < task.steps:
        arm = session.arm
        if arm != BARE:
            hooked.turn_to(arm)
        model = plain if arm == BARE else hooked.model
        until = min(session.step + task.block_steps, task.steps)
        while session.step < until:
            loss = next(losses)
            model.zero_grad()
            session.control.exchange(b"together")  # so that all ranks compute at one time, in every arm
            session.begin()
            loss(model).backward()
            session.end()
        tell(session.step, task.steps, arm)


def _pass(model: torch.nn.Module, loss: Loss) -> None:
    model.zero_grad()
    loss(model).backward()


def _losses(name: str, rank: int, size: int) -> Iterator[Loss]:
    """Yield a step's loss after another: of the digits, or where the model takes others, of noise."""
    if models.sample_shape(name) == models.sample_shape("thin_resnet"):
        data = digits(SEED)
        images, labels = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
        for pick in batches(len(images), rank, size, BATCH):
            yield partial(_entropy, images[pick], labels[pick])
    shape = (SAMPLES, *models.sample_shape(name)[1:])
    inputs = torch.rand(shape) if len(shape) == 4 else torch.randint(0, TOKENS, shape)
    while True:
        yield lambda model: _tensor_of(model(inputs)).float().square().mean()


def _entropy(images: torch.Tensor, labels: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(images), labels)


def _tensor_of(output: Any) -> torch.Tensor:
    """Return the first tensor of an output: alone, or in a sequence or a mapping."""
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output
