"""The measured run of a loop that somebody else runs: from its first step to the report."""

from typing import Any, cast

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from netbottleneck import config
from netbottleneck.hooks import ddp
from netbottleneck.hooks.finish import finish, finish_at_exit
from netbottleneck.hooks.loop import measure
from netbottleneck.hooks.measured import Measured
from netbottleneck.runtime.session import Session, open_session


class Run:
    """A model and its optimizer, measured, and gradients moved by the transports of the environment, until `end`.

    model: what the framework trains with: a DistributedDataParallel, or a plain module in a job of one rank. optimizer:
    torch's, or what a framework put around it. Every rank makes one, before its first backward pass. session: None
    where the model is left alone. Raises ValueError for a model that is spread over ranks in any other way.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        earlier = ddp.measured_by(model)
        self.session: Session | None
        if earlier is not None:  # by a variable of the environment, when the model was built
            self.session = earlier.session
            if isinstance(optimizer, Marks):
                earlier.begun_by(optimizer)
            return
        spread = distributed.is_initialized() and distributed.get_world_size() > 1
        if spread and not isinstance(model, DistributedDataParallel):
            raise ValueError(
                f"a {type(model).__name__} on {distributed.get_world_size()} ranks: netbottleneck measures models that "
                "DistributedDataParallel wraps"
            )
        place = {"rank": distributed.get_rank(), "ranks": distributed.get_world_size()} if spread else {}
        settings = config.settings(place)
        found: Measured | None
        if isinstance(model, DistributedDataParallel):
            found = ddp.attach(model, inner(optimizer), settings=settings)
        else:
            found = measure(open_session(settings, model=type(model).__name__), model, inner(optimizer))
            finish_at_exit(found.session)
        self.session = None if found is None else found.session

    def end(self, error: BaseException | None = None) -> None:
        """Close the records on this rank, with the error if there is one; without, rank 0 writes and shows the report.

        A second call does nothing.
        """
        if self.session is None:
            return
        if error is not None:
            self.session.close(f"{type(error).__name__}: {error}")
        else:
            finish(self.session)


class Marks:
    """An optimizer whose step begins when the framework says: what it calls a step runs the backward pass too."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = inner(optimizer)
        self._begins: list[Any] = []

    def register_step_pre_hook(self, hook: Any) -> "Marks":
        """Have a hook called by `begin`; what is returned has remove()."""
        self._begins.append(hook)
        return self

    def register_step_post_hook(self, hook: Any) -> Any:
        """Have a hook called at the end of the real optimizer's step."""
        return self._optimizer.register_step_post_hook(hook)

    def begin(self) -> None:
        """Gradients are complete: parameters change from here on."""
        for hook in self._begins:
            hook()

    def remove(self) -> None:
        """Call no hook any more."""
        self._begins.clear()


def inner(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that a framework has wrapped, however often."""
    while not isinstance(optimizer, Marks) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return cast(torch.optim.Optimizer, optimizer)
