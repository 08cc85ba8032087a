"""The loop around an elastic training function: what follows a failure, and what a change of hosts."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from netbottleneck.errors import HorovodInternalError, HostsUpdatedInterrupt
from netbottleneck.torch.elastic.notices import notices
from netbottleneck.torch.elastic.state import State
from netbottleneck.torch.optimizer import mark, number_from, renew

S = TypeVar("S", bound=State)
P = ParamSpec("P")
R = TypeVar("R")


def run_fn(func: Callable[Concatenate[S, P], R], reset: Callable[[], None]) -> Callable[Concatenate[S, P], R]:
    """Return `func` in the loop that elastic.run describes; `reset` ends the job and starts it.

    Distributed optimizers that were made before the loop serve each job that it starts.
    """

    @functools.wraps(func)
    def elastic(state: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        alike = False  # whether all ranks have the same state
        here = mark()
        with notices.told(state.on_hosts_updated):
            while True:
                try:
                    if not alike:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HorovodInternalError:
                    state.restore()
                    alike = False
                except HostsUpdatedInterrupt as change:
                    alike = change.skip_sync
                reset()
                number_from(here)
                state.on_reset()
                renew(here)

    return elastic
