"""Horovod's optimizer under a session: told of it by the job, which knows nothing of sessions."""

import atexit
from typing import Any

from netbottleneck import job, timeline
from netbottleneck.hooks.finish import close, report
from netbottleneck.hooks.measured import Measured
from netbottleneck.records import RANKS
from netbottleneck.session import Session, open_session


class Measuring(job.Observer):
    """Measures the first distributed optimizer of a job, of all its ranks, that has something to move."""

    def __init__(self) -> None:
        self._session: Session | None = None

    def gradients(self, gradients: Any, optimizer: Any) -> None:
        if self._session is not None:
            return
        settings = job.current().settings
        self._session = open_session(settings, model=type(optimizer).__name__)
        gradients.record(self._session.recorder)
        Measured(self._session, gradients, optimizer, own_sync=False)
        atexit.register(job.stop)  # before what was imported earlier is taken down
        _have_arms_followed(self._session)

    def stopping(self, stopping: job.Job) -> None:
        if self._session is not None:
            close(self._session)

    def stopped(self, stopped: job.Job) -> None:
        # Only now: rank 0 waits for the others' records, and they may still wait for it where it leaves early.
        session, self._session = self._session, None
        if session is not None:
            report(session)


def _have_arms_followed(session: Session) -> None:
    """Have Horovod's timeline, where there is one, show what the arms move, too: those of our own, which stamp it."""
    running = timeline.running(job.current())
    for name in session.arms if running is not None else ():
        path = session.folder / RANKS / f"{session.place.rank}.{name}.ring"
        if running is not None and path.exists():
            running.follow(path, name)
