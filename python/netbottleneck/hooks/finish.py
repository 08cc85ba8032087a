"""The end of a measured run: records closed on every rank, the report written and shown by rank 0."""

import atexit
import sys
import weakref

from netbottleneck.session import Session


def finish(session: Session, *, show: bool = True) -> None:
    """Close a session on this rank; rank 0 then writes the report, and shows it. A second call does nothing."""
    if session.closed:
        return
    failed = getattr(sys, "last_value", None)
    session.close(f"{type(failed).__name__}: {failed}" if failed is not None else None)
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
