"""The exceptions of live calls. The C module raises them; each carries errno, text and the rank at fault."""

import signal
from typing import Any


class HorovodInternalError(RuntimeError):
    """A collective failed. Elastic training catches it, restores the state and continues."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed: training continues from its current state on the new set of ranks.

    `skip_sync`: hosts have only left, so every remaining rank already has the state.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


class Error(OSError):
    """A call failed: `errno` and `strerror` say why.

    `peer` is the rank at fault, -1 if unknown.
    """

    peer: int = -1


class PeerError(Error, HorovodInternalError):
    """A peer died or left in the middle of an operation; `peer` is its rank."""


class WireError(Error, HorovodInternalError):
    """A peer violated the protocol, or does not know the job's secret."""


class MismatchError(Error, HorovodInternalError):
    """Ranks disagree on the meaning of a name, or on a setting that must be the same on all."""


class ClosedError(Error, HorovodInternalError):
    """The communicator was closed or aborted, here or on another rank."""


class DeadlineError(TimeoutError, HorovodInternalError):
    """A peer was silent, or bytes did not move, for longer than the deadline; `peer` is the first such rank, or -1."""

    peer: int = -1


# Exceptions of a failed call of the core. A signal handler may raise any other OSError (TimeoutError is one) out of the
# same call; that exception belongs to the script.
FAILURES = (Error, DeadlineError)


def of_handler(error: BaseException) -> bool:
    """Return True if a signal handler of the script raised it: it belongs to the script, whatever call it cut short."""
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in handlers:
        trace = trace.tb_next
    return trace is not None


def _code(handler: Any) -> Any:
    """Return the code that runs first in a handler; None if it is no Python code."""
    while hasattr(handler, "func"):  # functools.partial
        handler = handler.func
    if callable(handler) and not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)
