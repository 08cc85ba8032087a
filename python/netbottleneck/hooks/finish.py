"""The end of a measured run: records closed on every rank, the report written and shown by rank 0."""

import atexit
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager

from netbottleneck.runtime.session import Session

logger = logging.getLogger("netbottleneck")


def finish(session: Session, *, show: bool = True) -> None:
    """Close a session on this rank; rank 0 then writes the report, and shows it.

    Does nothing where that was done, and where the session was closed with an error. A failure of the report, or of the
    run folder, is logged, not raised.
    """
    if session.reported or session.error is not None or os.getpid() != session.pid:
        return
    try:
        close(session)
    except OSError as error:  # of the run folder: the disk may be full
        session.reported = True
        logger.error("%s: the record is not complete, and has no report: %s", session.folder, error)
        return
    report(session, show=show)


def close(session: Session) -> None:
    """Close a session on this rank: its records are complete, and on rank 0's host where that shares no folder."""
    failed = getattr(sys, "last_value", None)
    session.close(f"{type(failed).__name__}: {failed}" if failed is not None else None)
    session.bring()


def report(session: Session, *, show: bool = True) -> None:
    """Have rank 0 write the report of a closed session, and show it, once it has the others' records."""
    session.reported = True
    session.collect()
    if session.place.rank != 0:
        return
    try:
        with _at_most(max(1.0, session.until - time.monotonic())):
            _write(session, show)
    except TimeoutError as error:
        logger.warning("no report yet, as %s: netbottleneck report %s", error, session.folder)
    except Exception as error:
        logger.error("%s: the report failed: %s: %s", session.folder, type(error).__name__, error, exc_info=error)


@contextmanager
def _at_most(limit_s: float) -> Generator[None, None, None]:
    """Raise TimeoutError in what takes longer, where a signal can say so."""

    def late(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {limit_s:.0f} s")

    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _write(session: Session, show: bool) -> None:
    from netbottleneck.report import Run

    run = Run(session.folder)
    if not run.trace.steps:
        logger.warning("%s: no step was recorded: a step ends where a torch optimizer updates weights", session.folder)
        return
    run.write_all()
    if show:
        run.show()


def finish_at_exit(session: Session) -> None:
    """Have a session finished when the process ends, unless that happened before."""
    reference = weakref.ref(session)

    def end() -> None:
        alive = reference()
        if alive is not None:
            finish(alive)

    atexit.register(end)
