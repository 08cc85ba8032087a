"""Jobs of a study's ranks, with arms that take turns. Needs torch.

A job trains on digits, replays a model's gradients, or measures what hooks and traffic cost the compute.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from netbottleneck.bench import models
from netbottleneck.bench.models import digits
from netbottleneck.bench.models.passes import IdleOptimizer, loss_of, random_batch, replay, tensors_of
from netbottleneck.hooks.loop import measure
from netbottleneck.runtime.communicators import gloo_store, key_of
from netbottleneck.runtime.session import Session
from netbottleneck.study.task import ACCURACY, Outcome, Reports, StepProgress, Task, open_task, warm_up
from netbottleneck.torch.gradients import Gradients
from netbottleneck.trace.ring_file import EVENTS
from netbottleneck.trace.transports import BARE, Arm
from netbottleneck.whatif.plan import described

# Training and replays.

BATCH = 32  # images per rank and step
SEED = 7
RATE, MOMENTUM = 0.05, 0.9

Batch = Callable[[], torch.Tensor]


@dataclass
class Work:
    """A model with its optimizer and its loss; `step` is the loop body of a training script."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: Batch
    accuracy: Callable[[], float] | None = None
    wrapped: torch.nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.wrapped = self.model

    def step(self) -> None:
        """Run one step, as in a user's script."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()


def make(task: Task, rank: int, size: int) -> Work:
    """Return a job's model, newly built from the fixed seed."""
    return {"digits": _digits, "replay": _replay}[task.job](task, rank, size)


def _digits(_task: Task, rank: int, size: int) -> Work:
    torch.manual_seed(SEED)
    data = digits(SEED)
    images, labels = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
    test_images, test_labels = torch.from_numpy(data.test_images), torch.from_numpy(data.test_labels)
    model = models.build("thin_resnet")
    picks = batches(len(images), rank, size)

    def loss() -> torch.Tensor:
        pick = next(picks)
        return torch.nn.functional.cross_entropy(work.wrapped(images[pick]), labels[pick])

    def accuracy() -> float:
        model.eval()
        with torch.no_grad():
            right = (model(test_images).argmax(1) == test_labels).float().mean()
        model.train()
        return float(right)

    work = Work(model, torch.optim.SGD(model.parameters(), RATE, MOMENTUM), loss, accuracy)
    return work


def batches(count: int, rank: int, size: int, batch: int = BATCH) -> Iterator[torch.Tensor]:
    """Yield the indices of a rank's batches without end; the epoch number seeds the shuffle, ranks do not overlap."""
    each = min(batch, count // size)
    for epoch in itertools.count():
        order = np.random.default_rng((SEED, epoch)).permutation(count)
        for start in range(0, count - size * each + 1, size * each):
            first = start + rank * each
            yield torch.from_numpy(order[first : first + each])


def _replay(task: Task, rank: int, _size: int) -> Work:
    forward_ms, backward_ms = task.compute_ms
    model = replay(task.model, forward_ms, backward_ms, mode=task.compute, seed=rank)
    nothing = torch.zeros(())
    work = Work(model, IdleOptimizer(model.parameters()), lambda: work.wrapped(nothing))
    return work


def _init_torch(session: Session) -> None:
    """Initialise torch.distributed, as a script with DDP does."""
    limit = timedelta(seconds=session.settings.timeout_s)
    store = gloo_store(session.settings, session.place, session.control.exchange, limit)
    place = session.place
    distributed.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=limit)


def leave_torch() -> None:
    """Leave torch.distributed after a failed job: its connections may be broken. The next job initialises it again."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def run(task: Task, progress: StepProgress) -> Outcome:
    """Run a job on this rank; every rank calls it. progress: see Reports.

    Raises what the transports raise, and ValueError for an invalid task.
    """
    torch.set_num_threads(1)
    reports = Reports(progress, task.steps)
    with open_task(task) as session:
        if task.alone:
            _alone(session, task, reports)
        work = make(task, session.place.rank, session.place.size)
        if _wants_ddp(task) and not distributed.is_initialized():
            _init_torch(session)
        wrapped = DistributedDataParallel(work.model) if _wants_ddp(task) else work.model
        work.wrapped = wrapped
        warm_up(session)
        measured = measure(session, wrapped, work.optimizer)
        steps, accuracy = _train(session, work, task, reports)
        measured.close()
        digests = session.control.exchange(_digest(work.model))
    shown = tuple(digest.hex() for digest in digests)
    return Outcome(str(session.folder), steps, shown, accuracy)


def _wants_ddp(task: Task) -> bool:
    return bool({"bare", "stock"} & set(task.arms))


def _alone(session: Session, task: Task, reports: Reports) -> None:
    """Run the same steps on rank 0 alone, with a separate model; the other ranks wait."""
    if session.place.rank == 0:
        work = make(task, 0, session.place.size)
        work.step()
        for number in range(task.alone):
            with session.by_itself(number):
                work.step()
            reports.alive(0, "one rank alone")
        reports.block(0, "one rank alone")
    session.control.exchange(b"alone".ljust(8))


def _train(session: Session, work: Work, task: Task, reports: Reports) -> tuple[int, float | None]:
    """Return the number of steps, equal on all ranks, and the accuracy on rank 0."""
    least, most = task.steps, task.most_steps
    accuracy = None
    while True:
        arm, until = session.arm, min(session.step + task.block_steps, most)
        while session.step < until:
            work.step()
            reports.alive(session.step, arm)
        reports.block(session.step, arm)
        if session.step < least:
            continue
        # Rank 0 decides, as running means of norms differ between ranks. This time falls into an uncounted step.
        if work.accuracy is not None and session.place.rank == 0:
            accuracy = work.accuracy()
        enough = accuracy is None or accuracy >= ACCURACY or session.step >= most
        if session.control.exchange(bytes([enough]))[0][0]:
            return session.step, accuracy


def _digest(model: torch.nn.Module) -> bytes:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().contiguous().numpy().tobytes())
    return found.digest()


# Inflation of compute by hooks and traffic: forward and backward bare, with hooks, with hooks and traffic.
#
# In every arm a step is one forward and one backward, from just before the forward to just after the backward. Its
# waits record the time blocked on communication. Nothing is trained.

SAMPLES = 4  # per step, for a model without a data set here
WARMUP = 5

Loss = Callable[[torch.nn.Module], torch.Tensor]
_engine: Any = torch.autograd.Variable._execution_engine


def run_inflation(task: Task, progress: StepProgress) -> Outcome:
    """Run forward and backward passes on this rank; every rank calls it. progress: see Reports.

    Raises what the transports raise, and ValueError for an unknown model.
    """
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    with open_task(task) as session:
        plain = models.build(task.model)
        losses = _losses(task.model, session.place.rank, session.place.size)
        hooked = Hooked(copy.deepcopy(plain), session)
        for model in (plain, hooked.model):
            for _ in range(WARMUP):
                _pass(model, next(losses))
        warm_up(session)
        _turns(session, plain, hooked, losses, task, Reports(progress, task.steps))
        hooked.describe()
        digests = session.control.exchange(b"passes".ljust(8))
    return Outcome(str(session.folder), task.steps, tuple(digest.hex() for digest in digests))


class Hooked:
    """A model with the hooks of a measured run: timestamps in C, and gradients submitted when they are ready."""

    def __init__(self, model: torch.nn.Module, session: Session) -> None:
        self.model = model
        self._session = session
        self._gradients = Gradients(
            model.named_parameters(),
            recorder=session.recorder,
            direct_bytes=session.settings.direct_bytes,
            agree=lambda mine: session.control.exchange(mine)[0],
        )
        stamp = session.recorder.stamper
        model.register_forward_pre_hook(stamp(EVENTS["FORWARD_BEGIN"]))
        model.register_forward_hook(stamp(EVENTS["FORWARD_END"]))
        model.register_forward_hook(self._after_forward)

    def select_arm(self, arm: Arm) -> None:
        """Select the arm that moves the gradients."""
        self._session.arms[arm].target(self._gradients)

    def describe(self) -> None:
        """Record the gradients and their buckets in the trace."""
        tensors = [
            (name, p.numel() * p.element_size(), p.dtype)
            for name, p in zip(self._gradients.names, self._gradients.parameters, strict=True)
        ]
        self._session.describe(modules=[], **described(tensors, self._gradients.buckets, key_of))

    def _after_forward(self, _model: Any, _args: Any, output: Any) -> None:
        next(tensors_of(output)).register_hook(self._backward_begins)

    def _backward_begins(self, _gradient: Any) -> None:
        _engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._gradients.flush()
        self._gradients.wait()


def _turns(
    session: Session,
    plain: torch.nn.Module,
    hooked: Hooked,
    losses: Iterator[Loss],
    task: Task,
    reports: Reports,
) -> None:
    while session.step < task.steps:
        arm = session.arm
        if arm != BARE:
            hooked.select_arm(arm)
        model = plain if arm == BARE else hooked.model
        until = min(session.step + task.block_steps, task.steps)
        while session.step < until:
            loss = next(losses)
            model.zero_grad()
            session.control.exchange(b"together")  # a barrier: all ranks compute at the same time, in every arm
            session.begin()
            loss(model).backward()
            session.end()
            reports.alive(session.step, arm)
        reports.block(session.step, arm)


def _pass(model: torch.nn.Module, loss: Loss) -> None:
    model.zero_grad()
    loss(model).backward()


def _losses(name: str, rank: int, size: int) -> Iterator[Loss]:
    """Yield one loss per step: on digits if the model takes their shape, else on random inputs."""
    if models.sample_shape(name) == models.sample_shape("thin_resnet"):
        data = digits(SEED)
        images, labels = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
        for pick in batches(len(images), rank, size, BATCH):
            yield partial(_entropy, images[pick], labels[pick])
    inputs = random_batch(name, SAMPLES)
    while True:
        yield lambda model: loss_of(model(inputs))


def _entropy(images: torch.Tensor, labels: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(images), labels)
