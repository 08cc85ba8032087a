"""What the ranks of a study do: train digits, or replay a model's gradients, in arms that take turns. Needs torch."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from netbottleneck.bench import models
from netbottleneck.bench.models.data import digits
from netbottleneck.bench.models.replay import IdleOptimizer, replay
from netbottleneck.hooks.loop import measure
from netbottleneck.runtime.session import Session
from netbottleneck.study.opening import opened, warm
from netbottleneck.study.task import ACCURACY, Outcome, Task

BATCH = 32  # images a rank and step
SEED = 7
RATE, MOMENTUM = 0.05, 0.9

Batch = Callable[[], torch.Tensor]
Tell = Callable[[int, int, str], None]


@dataclass
class Work:
    """A model with its optimizer and its batches: `step` is the script's own loop body."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: Batch
    accuracy: Callable[[], float] | None = None
    wrapped: torch.nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.wrapped = self.model

    def step(self) -> None:
        """One step, as a user writes it."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()


def make(task: Task, rank: int, size: int) -> Work:
    """Return a job's model, fresh and by the fixed seed."""
    return {"digits": _digits, "replay": _replay}[task.job](task, rank, size)


def _digits(_task: Task, rank: int, size: int) -> Work:
    torch.manual_seed(SEED)
    data = digits(SEED)
    images, labels = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
    held, truth = torch.from_numpy(data.test_images), torch.from_numpy(data.test_labels)
    model = models.build("thin_resnet")
    picks = batches(len(images), rank, size)

    def loss() -> torch.Tensor:
        pick = next(picks)
        return torch.nn.functional.cross_entropy(work.wrapped(images[pick]), labels[pick])

    def accuracy() -> float:
        model.eval()
        with torch.no_grad():
            right = (model(held).argmax(1) == truth).float().mean()
        model.train()
        return float(right)

    work = Work(model, torch.optim.SGD(model.parameters(), RATE, MOMENTUM), loss, accuracy)
    return work


def batches(count: int, rank: int, size: int, batch: int = BATCH) -> Iterator[torch.Tensor]:
    """Yield the indices of a rank's batches for ever: each epoch shuffled by its number, no index on two ranks."""
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


def run(task: Task, tell: Tell) -> Outcome:
    """Run a job on this rank, and all others; every rank calls it. tell(step, steps, arm) is called between blocks.

    Raises what the transports raise, and ValueError for a task that makes no sense.
    """
    torch.set_num_threads(1)
    with opened(task) as session:
        if task.alone:
            _alone(session, task, tell)
        work = make(task, session.place.rank, session.place.size)
        wrapped = DistributedDataParallel(work.model) if _wants_ddp(task) else work.model
        work.wrapped = wrapped
        warm(session)
        measured = measure(session, wrapped, work.optimizer)
        steps, accuracy = _train(session, work, task, tell)
        measured.close()
        digests = session.control.exchange(_digest(work.model))
    shown = tuple(digest.hex() for digest in digests)
    return Outcome(str(session.folder), steps, shown, accuracy)


def _wants_ddp(task: Task) -> bool:
    return bool({"bare", "stock"} & set(task.arms))


def _alone(session: Session, task: Task, tell: Tell) -> None:
    """Rank 0 does the same steps by itself, on a model of its own; the others wait."""
    if session.place.rank == 0:
        work = make(task, 0, session.place.size)
        work.step()
        for number in range(task.alone):
            with session.by_itself(number):
                work.step()
        tell(0, task.steps, "one rank alone")
    session.control.exchange(b"alone".ljust(8))


def _train(session: Session, work: Work, task: Task, tell: Tell) -> tuple[int, float | None]:
    """Return how many steps were done, the same on all ranks, and what rank 0 has learned by then."""
    least, most = task.steps, task.most_steps
    accuracy = None
    while True:
        arm, until = session.arm, min(session.step + task.block_steps, most)
        while session.step < until:
            work.step()
        tell(session.step, least, arm)
        if session.step < least:
            continue
        # Rank 0 judges: running means of norms are its own. What this takes falls into a step that is not counted.
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
