"""The exceptions of live calls. The C module raises them; each carries errno, text and the rank at fault."""


class HorovodInternalError(RuntimeError):
    """A collective failed: what elastic training catches in order to restore and go on."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed: training goes on from where it is, on the new set of ranks.

    `skip_sync`: hosts have only left, so every rank that remains has the state already."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


class Error(OSError):
    """A call that could not be carried out: `errno` and `strerror` say why.

    `peer` is the rank at fault, -1 where none is known."""

    peer: int = -1


class PeerError(Error, HorovodInternalError):
    """A peer died or left in the middle of an operation; `peer` is its rank."""


class WireError(Error, HorovodInternalError):
    """A peer sent what the protocol does not allow, or does not know the job's secret."""


class MismatchError(Error, HorovodInternalError):
    """Ranks disagree: on what one name means, or on what all must agree on."""


class ClosedError(Error, HorovodInternalError):
    """The communicator was closed or aborted, here or on another rank."""


class DeadlineError(TimeoutError, HorovodInternalError):
    """A peer was silent, or bytes did not move, for longer than the deadline; `peer` is the first such rank, or -1."""

    peer: int = -1


# What a call of the core raises where it fails. A handler of a signal may raise any other OSError, as TimeoutError is,
# out of the same call: that one is the script's.
FAILURES = (Error, DeadlineError)
