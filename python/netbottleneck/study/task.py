"""What a study asks its ranks to do and what comes back: values that travel as JSON. No torch here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

PLAY = "play"  # a score, without a model
INFLATION = "inflation"
ACCURACY = 0.95  # of the held-out fifth, that the digits are trained to
AS_BEFORE = -1
MOST_ROUNDS = 8  # times the rounds asked for, after which training ends whatever was learned


@dataclass(frozen=True)
class Task:
    """One job on one network. arms take turns by blocks of block_steps steps, in `rounds` rounds.

    job: "digits", "replay" (a model of torch's that waits), PLAY or INFLATION. alone: steps that rank 0 does by itself
    before. exact_steps: so many steps instead of rounds, whatever is learned by then; AS_BEFORE: as many as the task
    before this one needed. compute_ms, compute, model: of the replay. network, notes: see open_session.
    """

    job: str
    arms: tuple[str, ...]
    folder: str
    block_steps: int = 10
    rounds: int = 6
    alone: int = 10
    exact_steps: int = 0
    compute: str = "sleep"
    compute_ms: tuple[float, float] = (133.0, 267.0)
    model: str = "resnet50"
    provider: str | None = None
    network: dict[str, Any] | None = None
    score: str = ""  # the file of what is played, see playing.py
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """The least number of steps."""
        return self.exact_steps or self.block_steps * len(self.arms) * self.rounds

    @property
    def most_steps(self) -> int:
        """The greatest number of steps."""
        return self.exact_steps or self.steps * MOST_ROUNDS

    @property
    def title(self) -> str:
        """What is trained, in words."""
        if self.job == PLAY:
            return self.model
        if self.job == INFLATION:
            return f"{self.model}, forward and backward passes"
        return "thin ResNet on digits" if self.job == "digits" else f"{self.model}, replayed ({self.compute})"

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Task:
        """Return what asdict, and JSON, made of a task."""
        for name in ("arms", "compute_ms", "notes"):
            told[name] = tuple(told[name])
        return cls(**told)


def to_json(tasks: Sequence[Task]) -> str:
    """Return tasks as one line."""
    return json.dumps([asdict(task) for task in tasks])


def from_json(text: str) -> list[Task]:
    """Return what to_json wrote."""
    return [Task.from_dict(told) for told in json.loads(text)]


@dataclass(frozen=True)
class Outcome:
    """What a job came to. digests: SHA-256 of each rank's weights; accuracy: on held-out data, None: none asked."""

    folder: str
    steps: int
    digests: tuple[str, ...]
    accuracy: float | None = None

    @property
    def equal(self) -> bool:
        """Whether all ranks hold the same weights, bit for bit."""
        return len(set(self.digests)) == 1

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Outcome:
        """Return what as_dict made."""
        return cls(told["folder"], told["steps"], tuple(told["digests"]), told["accuracy"])

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {**asdict(self), "digests": list(self.digests), "equal_on_all_ranks": self.equal}
