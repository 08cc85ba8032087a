"""The end of a measured run: every rank closes its records, rank 0 writes and shows the report."""

import contextlib
import functools
import logging
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from netbottleneck.runtime import exits, job
from netbottleneck.runtime.session import FAILED_FINISH_S, FINISH_S, Session, words
from netbottleneck.trace.model import STAYS

logger = logging.getLogger("netbottleneck")


def finish(session: Session, *, show: bool = True) -> None:
    """Close a session on this rank; rank 0 then writes the report and shows it.

    Does nothing if the session was already reported, was closed with an error, or belongs to another process. A failure
    of the report or of the run folder is logged, not raised.
    """
    if session.reported or session.error is not None or session.in_child:
        return
    try:
        close(session)
    except OSError as error:  # of the run folder: the disk may be full
        session.reported = True
        logger.error("%s: the record is not complete, and has no report: %s", session.folder, error)
        return
    report(session, show=show)


def close(session: Session) -> None:
    """Close a session on this rank, which completes its records; copy them to rank 0's host if no folder is shared."""
    failed = job.failure()
    session.close(words(failed) if failed is not None else None)
    session.bring()


def report(session: Session, *, show: bool = True) -> None:
    """Collect the other ranks' records of a closed session; rank 0 then writes the report and shows it."""
    session.reported = True
    session.collect()
    if session.place.rank != 0:
        return
    try:
        with _same_random_numbers(), _at_most(max(1.0, session.until - time.monotonic())):
            _write(session, show)
    except (exits.Told, _Late) as end:
        late, folder = isinstance(end, _Late), session.folder
        why = end if late else "SIGTERM came"
        logger.warning("the report is not complete, as %s: netbottleneck report %s --write %s", why, folder, folder)
        if not late:
            raise
    except Exception as error:
        logger.error("%s: the report failed: %s: %s", session.folder, type(error).__name__, error, exc_info=error)


@contextmanager
def _same_random_numbers() -> Generator[None, None, None]:
    """Restore Python's random state: the script may go on, and the import of rich draws a number."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)


class _Late(BaseException):
    """The limit of _at_most. It is no Exception, so that no handler in the body takes it for a failure of its own."""


@contextmanager
def _at_most(limit_s: float) -> Generator[None, None, None]:
    """Raise _Late in a body that runs longer than limit_s.

    No limit outside the main thread, under a timer, or if the signal has a handler of C code, which cannot be restored.
    """

    def late(*_: object) -> None:
        raise _Late(f"it takes longer than {limit_s:.0f} s")

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getitimer(signal.ITIMER_REAL)[0]
        or signal.getsignal(signal.SIGALRM) is None
    ):
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
    from netbottleneck.report.text import beside_script

    run = Run(session.folder)
    if not run.trace.steps:
        unread = next((note for note in run.trace.notes if "left out" in note), "")
        why = unread or "a step ends where a torch optimizer updates weights"
        if session.step == 0 and session.optimizer and not unread:
            why = (
                f"a step ends where the measured optimizer, {session.optimizer}, updates weights, and it made no "
                "update: measure the one that trains the model"
            )
        if 0 < session.step <= session.settings.start_step:
            steps = f"{session.step} step{'s' * (session.step > 1)}"
            why = f"the run has {steps}, and NETBOTTLENECK_START_STEP={session.settings.start_step}"
        if session.stays is not None:
            given = session.settings.source_of("transports")
            why = f"{STAYS} {session.stays}: {session.why_stays}; leave out {given} to observe this script"
        if session.followed:
            why = "its model was measured in another run from then on, by netbottleneck.profile or netbottleneck.attach"
        logger.warning("%s: no step was recorded: %s", session.folder, why)
        return
    if not show or sys.stdout is None or sys.stdout.closed:
        run.write_all()
        return
    with beside_script() as console:
        run.show_and_write(console)


_freed: list[Path] = []  # run folders of models that the script has freed, whose reports are written at exit
LEAST_S = 1.0  # no report is begun in less time


def report_at_exit(session: Session) -> None:
    """Write the report of a closed session at process exit, if this is rank 0. Keeps the session's folder only."""
    session.reported = True
    if session.place.rank != 0:
        return
    if not _freed:
        exits.register(functools.partial(_report_freed, os.getpid()))
    _freed.append(session.folder)


def _report_freed(pid: int) -> None:
    """Write the reports in the time that the exit may take, and log which are left."""
    if os.getpid() != pid:
        return
    limit_s = exits.left(FINISH_S if job.failure() is None else FAILED_FINISH_S)
    try:
        if limit_s >= LEAST_S:
            with _same_random_numbers(), contextlib.suppress(_Late), _at_most(limit_s):
                while _freed:
                    _write_silently(_freed[0])
                    del _freed[0]
    finally:
        if _freed:
            logger.warning(
                "no report yet of %d models that were freed before the end: netbottleneck report RUN --write RUN, "
                "where RUN is %s",
                len(_freed),
                ", ".join(map(str, _freed)),
            )


def _write_silently(folder: Path) -> None:
    from netbottleneck.report import Run

    try:
        run = Run(folder)
        if run.trace.steps:
            run.write_all()
    except Exception as error:
        logger.error("%s: the report failed: %s: %s", folder, type(error).__name__, error, exc_info=error)


def finish_at_exit(session: Session) -> None:
    """Finish a session at process exit, unless it is finished already. Keeps only a weak reference to it."""
    reference = weakref.ref(session)

    def end() -> None:
        alive = reference()
        if alive is not None:
            finish(alive)

    exits.register(end)
