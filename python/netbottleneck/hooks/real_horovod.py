"""The real Horovod, where it is installed: measured as it is and, on request, with its all-reduces moved by us.

Nothing but one attribute of one module of it is replaced, see hooks.horovod_lib.
"""

import importlib
import logging
import sys
from types import FrameType, ModuleType
from typing import Any

import torch

from netbottleneck import config
from netbottleneck.hooks.finish import finish, finish_at_exit
from netbottleneck.hooks.horovod import open_on_all
from netbottleneck.hooks.horovod_lib import Between, Call, Route
from netbottleneck.hooks.left_alone import left_alone
from netbottleneck.hooks.measured import Measured
from netbottleneck.launch import connect
from netbottleneck.runtime import async_operations, job
from netbottleneck.runtime.session import Session
from netbottleneck.torch.gradients import check

ALONE = (
    "each rank trains alone and nothing is reduced, as Horovod does not read these variables (start it by horovodrun "
    "or mpirun, or uninstall it: netbottleneck takes its place under every launcher); "
)
MODULE = "horovod.torch.mpi_ops"
FRAMES = 8  # from the library's caller up to the optimizer that wants a gradient reduced

logger = logging.getLogger("netbottleneck")


class Stock:
    """Horovod's own way, as one of a run's transports."""

    name = "stock"

    def __init__(self, mpi_ops: Any, route: Route) -> None:
        self._mpi_ops = mpi_ops
        self._route = route

    def target(self, _gradients: Any) -> None:
        """Send what the optimizer sends by Horovod."""
        self._route.to_horovod()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._mpi_ops.barrier()

    def info(self) -> dict[str, Any]:
        """Return what the run's record says of Horovod."""
        below = "mpi" if self._mpi_ops.mpi_enabled() else "gloo"
        version = getattr(sys.modules.get("horovod"), "__version__", "")
        return {"provider": f"horovod {version} over {below}", "done": "when it was seen at the wait"}

    def wire(self) -> int | None:
        """Return None: Horovod does not tell."""
        return None

    def close(self) -> None:
        """Nothing: Horovod is the user's."""


class Attached:
    """A Horovod whose library we stand before, and the run that is measured, from its first gradient on."""

    def __init__(self, mpi_ops: Any) -> None:
        self._mpi_ops = mpi_ops
        self._session: Session | None = None
        self._refused = False
        self._looked = False
        self.between = Between(mpi_ops.mpi_lib, self._opened, self.finish, self._look)
        mpi_ops.mpi_lib = self.between

    def finish(self) -> None:
        """End the run, if there is one; the next one begins with the next optimizer's first gradient."""
        session, self._session = self._session, None
        self._refused = self._looked = False
        if session is not None:
            finish(session)
            job.stop()

    def _look(self) -> None:
        """Say once in each run of Horovod's where it is not the job that the launcher has started."""
        if self._looked:
            return
        try:
            rank, size = int(self._mpi_ops.rank()), int(self._mpi_ops.size())
        except ValueError:
            return  # it was not started yet
        self._looked = True
        place = connect.detect(config.settings())
        self._refused = (place.rank, place.size) != (rank, size)
        if self._refused:
            logger.warning(
                "Horovod has %d ranks and takes this one for rank %d, but the launcher's variables (%s) say %d and %d: "
                "%sit is not measured",
                size,
                rank,
                place.launcher,
                place.size,
                place.rank,
                ALONE if size == 1 else "",
            )

    def _opened(self, call: Call) -> Route | None:
        """Begin a run, where the all-reduce is of an optimizer's gradient. Every rank comes here at its first one."""
        if self._refused or call.op not in (async_operations.Average, async_operations.Sum):
            return None
        optimizer = _asking()
        if optimizer is None:
            return None
        settings, size = config.settings(), int(self._mpi_ops.size())
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer._parameter_names]
        named = [(str(optimizer._parameter_names[p]), p) for p in parameters if p.requires_grad and p.numel() > 0]
        route = Route([(name, p) for name, p in named if _can_travel(name, p, settings.strict)], size)
        stock = Stock(self._mpi_ops, route)
        model = type(optimizer).__name__
        session = open_on_all(settings, arms=settings.arms, model=model, stock=stock) if route.names else None
        if session is None:
            self._refused = True
            return None
        route.stock_only = set(session.arms) <= {"stock", "bare"}
        route.open(session.recorder)
        Measured(session, route, optimizer, own_sync=False, bare=lambda on: setattr(route, "plain", on))
        session.on_close.append(route.close)
        finish_at_exit(session)
        self._session = session
        return route


def attach() -> Attached:
    """Stand before the library of the real Horovod, which is imported where it is not. A second call does nothing more.

    Raises ImportError where Horovod is not installed.
    """
    return install(importlib.import_module(MODULE))


def install(mpi_ops: ModuleType) -> Attached:
    """Stand before the library of `horovod.torch.mpi_ops`."""
    library = getattr(mpi_ops, "mpi_lib", None)
    if library is None:
        raise ImportError(f"{MODULE} is not Horovod's own: netbottleneck stands in for it, and measures its optimizers")
    attached: Attached | None = mpi_ops.__dict__.get("_netbottleneck")
    if attached is None:
        attached = mpi_ops.__dict__["_netbottleneck"] = Attached(mpi_ops)
    return attached


def _can_travel(name: str, parameter: torch.Tensor, strict: bool) -> bool:
    """Return whether a gradient can be measured and moved; one that cannot is Horovod's alone, and one line says so."""
    try:
        check(name, parameter)
    except ValueError as error:
        if strict:
            raise
        left_alone("a gradient that only Horovod moves", str(error))
        return False
    return True


def _asking() -> Any:
    """Return the distributed optimizer in whose method we are, if we are in one."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(FRAMES):
        if frame is None:
            return None
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.optim.Optimizer) and hasattr(owner, "_parameter_names"):
            return owner
        frame = frame.f_back
    return None
