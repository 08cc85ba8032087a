"""Horovod's elastic training: state that survives a failure, and training that continues with the remaining ranks."""

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from netbottleneck.runtime.horovod_common import init, shutdown
from netbottleneck.torch.elastic import launcher
from netbottleneck.torch.elastic.sampler import ElasticSampler
from netbottleneck.torch.elastic.state import ObjectState, State, TorchState, run_fn

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

S = TypeVar("S", bound=State)
P = ParamSpec("P")
R = TypeVar("R")


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Return `func` in a loop that calls it again with the same state after each failure and each change of hosts.

    Its first argument is a State. sync() precedes each call, so that new ranks start from the others' state. After
    HorovodInternalError the state is that of the last commit; after HostsUpdatedInterrupt it is unchanged. Then the job
    is stopped and started, and on_reset() is called on the state. Every other exception propagates. Before the call, no
    collective operation may run that a rank which joins later would miss.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    launcher.renew_place()
    init()
