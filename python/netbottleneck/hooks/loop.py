"""Profile: measures the user's own training loop, `with netbottleneck.profile(model, optimizer): …`."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from netbottleneck import config
from netbottleneck.hooks import ddp as ddp_hooks
from netbottleneck.hooks.measured_model import Measured, finish, finish_at_exit
from netbottleneck.launch import connect
from netbottleneck.runtime.session import Session, open_session
from netbottleneck.torch.gradients import Gradients


@contextmanager
def profile(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    transport: str | None = None,
    streams: int | str | None = None,
    directory: str | None = None,
    session: Session | None = None,
) -> Generator[Session | None, None, None]:
    """Measure the loop inside, and average its gradients over all ranks by the named transports.

    model: a plain module or a DDP model. A plain module's parameters and buffers are broadcast from rank 0 at the
    start, as DDP does; a DDP model keeps its own reducer. Arguments override the environment's variables. At the end
    rank 0 writes the report into the run folder. Yields None for a DDP model that is left alone.
    """
    settings = config.settings({"transports": transport, "streams": streams, "directory": directory})
    if isinstance(model, DistributedDataParallel):
        found = ddp_hooks.attach(model, optimizer, session=session, settings=settings)
    else:
        chosen = session or open_session(settings, directory=directory, model=type(model).__name__)
        found = measure(chosen, model, optimizer)
    of = session if found is None else found.session
    try:
        yield of
    except BaseException as error:
        ended = isinstance(error, SystemExit) and not error.code  # the script exits with success
        if of is not None and not ended:
            of.close(f"{type(error).__name__}: {error}")
        elif found is not None:
            found.close()
            if session is None:
                finish_at_exit(found.session)
        raise
    if found is not None:
        found.close()
    if session is None and of is not None:
        finish(of)


def measure(session: Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Measured:
    """Attach the hooks to a DDP model or a plain one. Raises ValueError for a DDP model that is left alone."""
    if isinstance(model, DistributedDataParallel):
        measured = ddp_hooks.attach(model, optimizer, session=session)
        if measured is None:
            raise ValueError(f"the DDP model of {type(model.module).__name__} is left alone: the log says why")
        return measured
    broadcast(session.control, model)
    gradients = Gradients(
        model.named_parameters(),
        recorder=session.recorder,
        direct_bytes=session.settings.direct_bytes,
        agree=lambda mine: session.control.exchange(mine)[0],
    )
    return Measured(session, gradients, optimizer, model=model)


def broadcast(comm: Any, model: torch.nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers to all ranks."""
    core = connect.core()
    works = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        data = tensor.detach()
        if data.numel() == 0:
            continue
        flat = data if data.is_contiguous() else data.contiguous()
        where = (flat.data_ptr(), flat.numel() * flat.element_size())
        works.append((comm.submit(f"state.{name}"[-90:], core.BROADCAST, where, core.UINT8, keep=flat), data, flat))
    for work, data, flat in works:
        work.wait()
        if flat is not data:
            data.copy_(flat)
