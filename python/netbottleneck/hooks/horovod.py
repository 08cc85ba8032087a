"""Horovod's optimizer under a session: told of it by the job, which knows nothing of sessions."""

import atexit
import logging
from typing import Any

from netbottleneck.config import Settings
from netbottleneck.hooks.finish import close, report
from netbottleneck.hooks.left_alone import left_alone
from netbottleneck.hooks.measured import Measured
from netbottleneck.runtime import job, timeline
from netbottleneck.runtime.run_folder import RANKS
from netbottleneck.runtime.session import Session, open_together

logger = logging.getLogger("netbottleneck")


class Measuring(job.Observer):
    """Measures the first distributed optimizer of a job, of all its ranks, that has something to move."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._refused = False

    def gradients(self, gradients: Any, optimizer: Any) -> None:
        if self._session is not None or self._refused:
            return
        session = open_on_all(job.current().settings, model=type(optimizer).__name__)
        if session is None:
            self._refused = True
            return
        self._session = session
        gradients.record(session.recorder)
        Measured(session, gradients, optimizer, own_sync=False)
        atexit.register(job.stop)  # before what was imported earlier is taken down
        _have_arms_followed(session)

    def stopping(self, stopping: job.Job) -> None:
        self._refused = False
        if self._session is not None:
            try:
                close(self._session)
            except Exception as error:
                logger.error("the run was not recorded to its end: %s: %s", type(error).__name__, error)

    def stopped(self, stopped: job.Job) -> None:
        # Only now: rank 0 waits for the others' records, and they may still wait for it where it leaves early.
        session, self._session = self._session, None
        if session is not None:
            try:
                report(session)
            except Exception as error:
                logger.error("%s: no report: %s: %s", session.folder, type(error).__name__, error)


def open_on_all(settings: Settings, **options: Any) -> Session | None:
    """Return what open_together gives; None, and one line in the log, where a rank cannot.

    With NETBOTTLENECK_STRICT=1 it raises what made it fail.
    """
    try:
        return open_together(settings, **options)
    except Exception as error:
        if settings.strict:
            raise
        left_alone("the training", f"no run can be measured on all ranks: {type(error).__name__}: {error}")
        return None


def _have_arms_followed(session: Session) -> None:
    """Have Horovod's timeline, where there is one, show what the arms move, too: those of our own, which stamp it."""
    running = timeline.running(job.current())
    for name in session.arms if running is not None else ():
        path = session.folder / RANKS / f"{session.place.rank}.{name}.ring"
        if running is not None and path.exists():
            running.follow(path, name)
