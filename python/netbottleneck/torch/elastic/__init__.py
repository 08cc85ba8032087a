"""Horovod's elastic training: state that outlives a failure, and training that goes on with the ranks that are left."""

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from netbottleneck.torch.basics import init, shutdown
from netbottleneck.torch.elastic import place
from netbottleneck.torch.elastic.loop import run_fn
from netbottleneck.torch.elastic.sampler import ElasticSampler
from netbottleneck.torch.elastic.state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

S = TypeVar("S", bound=State)
P = ParamSpec("P")
R = TypeVar("R")


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Return `func`, called anew with the same state after each failure and each change of hosts.

    Its first argument is a State; sync() comes before each call, so that ranks that are new start where the others
    are. After HorovodInternalError the state is what the last commit left; after HostsUpdatedInterrupt it is as it was.
    Then the job is ended and started, and the state told of it by on_reset(). Every other exception leaves. No
    collective operation may come before the call that a rank which joins later does not take part in.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    place.renew()
    init()
