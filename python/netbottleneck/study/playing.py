"""What the ranks of a replay do: play a score over transports that take turns. No torch, unless stock is among them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from netbottleneck.bench.replay import Player, Score
from netbottleneck.runtime.session import Session
from netbottleneck.study.opening import opened, warm
from netbottleneck.study.task import Outcome, Task
from netbottleneck.trace import json_codec

VERSION = 1
FORMAT = "netbottleneck-score"


def write(path: Path, score: Score) -> None:
    """Write a score for the ranks to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": FORMAT, "version": VERSION, **asdict(score)}), encoding="utf-8")


def read(path: Path | str) -> Score:
    """Read what `write` wrote. Raises ValueError naming the file."""
    try:
        told = json.loads(Path(path).read_text(encoding="utf-8"))
        if (told.get("format"), told.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"not a {FORMAT} of version {VERSION}")
        score: Score = json_codec.build(Score, told)
        return score
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error


def run(task: Task, tell: Callable[[int, int, str], None]) -> Outcome:
    """Play a task's score on this rank, and all others; every rank calls it. tell(step, steps, arm): between blocks.

    Raises what the transports raise, and ValueError for a score that is none.
    """
    score = read(task.score)
    with opened(task) as session:
        place = session.place
        player = Player(score, place.rank, place.size, spin=task.compute == "spin")
        session.describe(**player.describe())
        if task.alone:
            _alone(session, player, task, tell)
        warm(session)
        _play(session, player, task, tell)
        digests = session.control.exchange(player.digest())
    return Outcome(str(session.folder), task.steps, tuple(digest.hex() for digest in digests))


def _alone(session: Session, player: Player, task: Task, tell: Callable[[int, int, str], None]) -> None:
    """Rank 0 plays by itself, with nothing to send; the others wait."""
    if session.place.rank == 0:
        for number in range(task.alone):
            with session.by_itself(number):
                player.step(session.recorder)
        tell(0, task.steps, "one rank alone")
    session.control.exchange(b"alone".ljust(8))


def _play(session: Session, player: Player, task: Task, tell: Callable[[int, int, str], None]) -> None:
    arm = ""
    while session.step < task.steps:
        if session.arm != arm:
            arm = session.arm
            session.arms[arm].target(player)
            session.arms[arm].barrier()
        until = min(session.step + task.block_steps, task.steps)
        while session.step < until:
            session.begin()
            player.step(session.recorder)
            session.end()
        tell(session.step, task.steps, arm)
