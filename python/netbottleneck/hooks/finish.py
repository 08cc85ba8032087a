"""The end of a measured run: records closed on every rank, the report written and shown by rank 0."""

import atexit
import sys
import weakref

from netbottleneck.session import Session


def finish(session: Session, *, show: bool = True) -> None:
    """Close a session on this rank; rank 0 then writes the report, and shows it. A second call does nothing."""
    if not session.closed:
        close(session)
        report(session, show=show)


def close(session: Session) -> None:
    """Close a session on this rank: its records are complete, and on rank 0's host where that shares no folder."""
    failed = getattr(sys, "last_value", None)
    session.close(f"{type(failed).__name__}: {failed}" if failed is not None else None)
    session.bring()


def report(session: Session, *, show: bool = True) -> None:
    """Have rank 0 write the report of a closed session, and show it, once it has the others' records."""
    session.collect()
    if session.place.rank != 0:
        return
    from netbottleneck.report import Run

    run = Run(session.folder)
    if not run.trace.steps:
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
