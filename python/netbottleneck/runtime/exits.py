"""Exit handlers of this package, which give way to those of the script when the process is told to end.

atexit calls what was registered last first, so ours run before most of the script's. They may take seconds: ranks wait
for each other, and rank 0 writes the report. A launcher that sees another rank fail sends SIGTERM meanwhile, whose
default action would end the process before the script's handlers. So SIGTERM ends ours only, and the exit goes on.

A process that multiprocessing forks ends without atexit. There a finalizer of multiprocessing calls the handlers.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType


class Told(BaseException):
    """SIGTERM in a handler of ours. It is no Exception, so that no handler takes it for a failure of its own."""


_told: list[int] = []  # the signal, once it has come
_begun: list[float] = []  # when the first handler was called, by time.monotonic
_registered: dict[Callable[[], None], Callable[[], None]] = {}  # what is to be called, by what atexit calls
_finalized: list[int] = []  # the processes that have the finalizer: this one, or those that it was forked from
_raised: list[BaseException] = []  # the exception that ends a child of multiprocessing


def register(call: Callable[[], None]) -> None:
    """Call this at exit, until the process is told to end."""

    def at_exit() -> None:
        if _registered.pop(at_exit, None) is not None:
            _give_way(call)
            _stay_interrupted()

    _registered[at_exit] = call
    atexit.register(at_exit)
    if _ends_without_atexit() and os.getpid() not in _finalized:
        _finalized.append(os.getpid())
        # Priority 0: after the script's queues and pools have begun to close, before its child processes are joined.
        sys.modules["multiprocessing.util"].Finalize(None, _finalize, exitpriority=0)


def unregister(call: Callable[[], None]) -> None:
    """Do not call this at exit any more. Does nothing if it is not registered."""
    for at_exit in [at_exit for at_exit, own in _registered.items() if own == call]:
        del _registered[at_exit]
        atexit.unregister(at_exit)


def raised() -> BaseException | None:
    """Return the exception that ends this child of multiprocessing, while its handlers run; None elsewhere."""
    return _raised[-1] if _raised else None


def _ends_without_atexit() -> bool:
    """Return whether this is a child of multiprocessing, and not a new interpreter, which has atexit."""
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None:
        return False
    method = getattr(process.current_process(), "_start_method", None)  # None: the default one
    method = method or sys.modules["multiprocessing"].get_start_method(allow_none=True)
    return bool(method != "spawn")


def _finalize() -> None:
    error = sys.exc_info()[1]
    if error is not None:
        _raised.append(error)
    for at_exit in reversed(list(_registered)):
        at_exit()


def left(limit_s: float) -> float:
    """Return what is left of a time limit that counts from the first handler on, in s."""
    return limit_s - (time.monotonic() - _begun[0] if _begun else 0.0)


def _give_way(call: Callable[[], None]) -> None:
    """Make a call that SIGTERM ends, unless the script handles or ignores that. None is made after it."""
    if _told:
        return
    if not _begun:
        _begun.append(time.monotonic())
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        call()
        return
    try:
        signal.signal(signal.SIGTERM, _tell)
        try:
            call()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    except Told:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _stay_interrupted() -> None:
    """Let the process still end by SIGINT after an uncaught KeyboardInterrupt: a shell then ends the script's loop.

    The interpreter keeps a mark of that exception. It clears the mark when it runs the code of a string, as the import
    of a dataclass does, and sets it again when such code ends by a KeyboardInterrupt.
    """
    if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt) and not hasattr(sys, "ps1"):
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def _tell(number: int, _frame: FrameType | None) -> None:
    _told.append(number)
    raise Told
