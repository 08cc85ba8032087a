"""Ways into a training loop: `with netbottleneck.profile(model, optimizer): …`, and the callbacks of frameworks.

netbottleneck.callbacks documents the callbacks' public names. The first use of a name creates its class, because the
base class belongs to the framework (Lightning, the Hugging Face Trainer, Accelerate).
"""

import gc
import hashlib
import importlib
import logging
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from netbottleneck import config
from netbottleneck.hooks import ddp as ddp_hooks
from netbottleneck.hooks import observed
from netbottleneck.hooks.measured_model import Measured, follow_device, refuse_bare, uncompiled
from netbottleneck.hooks.run_end import finish, finish_at_exit
from netbottleneck.hooks.updates import check_fit
from netbottleneck.launch import connect
from netbottleneck.runtime.async_operations import fitted
from netbottleneck.runtime.session import Session, open_session
from netbottleneck.torch.gradients import Gradients, bucket_limits

COMPARED = 1024  # elements of each tensor, at most
SAID = 8  # ranks

logger = logging.getLogger("netbottleneck")


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

    model: a plain module, a DDP model, one of FSDP2, FSDP, DeepSpeed or tensor parallelism, or the result of
    torch.compile on one of them. A plain module must be the same on all ranks: its parameters and buffers are broadcast
    from rank 0 at the start, as DDP does, and the log says if other ranks had others. A DDP model keeps its own
    reducer, and other models their communication. Arguments override the environment's variables. At the end rank 0
    writes the report into the run folder. Yields None for a model that is left alone. Raises ValueError for a plain
    module that contains a DDP model, and TypeError for an optimizer without step hooks, before anything else is done.
    """
    check_fit(inner(optimizer) if observed.is_moved(uncompiled(model)) else optimizer)
    settings = config.settings({"transports": transport, "streams": streams, "directory": directory})
    found = _begun(model, optimizer, session, settings)
    of = session if found is None else found.session
    try:
        yield of
    except BaseException as error:
        if of is not None and not _ends(error):
            of.fail(error)
        elif found is not None and session is None:
            _leave(found)
        elif found is not None:
            found.close()
        raise
    if found is not None:
        found.close()
    if session is None and of is not None:
        finish(of)


def _ends(error: BaseException) -> bool:
    """Return True if a loop is left without a failure: the script exits with success, or its generator is closed."""
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code)


_left: list[Session] = []  # of loops that were left, whose reports are not written yet


def _leave(measured: Measured) -> None:
    """Stop measuring a loop that was left. Its run finishes with the next one, or at process exit.

    Ranks may be at different places now, as garbage collection closes a generator. An exception that closed it is not
    known yet.
    """
    measured.close()
    finish_at_exit(measured.session)
    _left.append(measured.session)


def _finish_left() -> None:
    """Finish the runs of loops that were left. Every rank calls it."""
    while _left:
        finish(_left.pop())


def _begun(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, session: Session | None, settings: config.Settings
) -> Measured | None:
    """Begin to measure a model; None if it is left alone."""
    _finish_left()
    if isinstance(uncompiled(model), DistributedDataParallel):
        return ddp_hooks.attach(model, optimizer, session=session, settings=settings)
    if observed.is_moved(uncompiled(model)):
        if session is not None:
            raise ValueError("session: a model whose gradients other code moves has one of its own; leave it out")
        return observed.attach(model, inner(optimizer), settings=settings)
    check_plain(model)
    if session is None:
        refuse_bare(settings.transports, settings)
        session = open_session(settings, model=type(model).__name__)
    else:
        refuse_bare(session.blocks.arms, session.settings)
    return measure(session, model, optimizer)


def measure(session: Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Measured:
    """Attach the hooks to a DDP model or a plain one. A failure for a plain one ends the session, and no hook stays.

    Raises ValueError for a model that cannot be measured, and TypeError for an optimizer without step hooks.
    """
    inside = uncompiled(model)
    if isinstance(inside, DistributedDataParallel):
        measured = ddp_hooks.attach(model, optimizer, session=session)
        if measured is None:
            raise ValueError(f"the DDP model of {type(inside.module).__name__} is left alone: the log says why")
        return measured
    check_plain(model)
    check_fit(optimizer)
    try:
        return _measure_plain(session, model, optimizer)
    except BaseException as error:
        session.fail(error)
        raise


def _measure_plain(session: Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Measured:
    _compare(session.control, model)
    broadcast(session.control, model)
    follow_device(session, model.parameters())
    limit_s = _limit(session.settings, model)
    gradients = Gradients(
        model.named_parameters(),
        recorder=session.recorder,
        direct_bytes=session.settings.direct_bytes,
        limits=bucket_limits(session.settings),
        agree=lambda mine: session.control.exchange(mine, limit_s=limit_s)[0],
        flagged=True,
        limit_s=limit_s,
    )
    try:
        return Measured(session, gradients, optimizer, model=model)
    except BaseException:
        gradients.close()
        raise


def check_plain(model: torch.nn.Module) -> None:
    """Raise ValueError if a module contains a DDP model, which moves its gradients."""
    name, ddp = ddp_hooks.inner_ddp(model)
    if ddp is not None:
        raise ValueError(
            f"{type(model).__name__} contains a DistributedDataParallel, {name}, which averages its gradients: "
            f"pass that model instead, netbottleneck.profile(model.{name}, optimizer)"
        )


def _limit(settings: config.Settings, model: torch.nn.Module) -> float:
    """Return for how long a bucket waits for a rank that has not sent it, in s.

    It is the timeout of torch's default process group, or without one the default of such groups. Or the user's timeout
    for a silent peer, if that is longer.
    """
    limit_s = 0.0
    if distributed.is_initialized():
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        limit_s = ddp_hooks.timeout_of(distributed.group.WORLD, device)
    limit_s = limit_s or distributed.default_pg_timeout.total_seconds()
    return max(limit_s, settings.timeout_s) if "timeout_s" in settings.sources else limit_s


def _compare(comm: Any, model: torch.nn.Module) -> None:
    """Log on rank 0 which ranks begin with other parameters or buffers, by the first elements of each."""
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.layout != torch.strided or tensor.is_meta:
            continue
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        first = tensor.detach().reshape(-1)[:COMPARED].cpu().contiguous()
        digest.update(first.view(torch.uint8).numpy().tobytes())
    digests = comm.exchange(digest.digest())
    others = [rank for rank, own in enumerate(digests) if own != digests[0]]
    if others and comm.rank == 0:
        left = f" and {len(others) - SAID} more" if len(others) > SAID else ""
        logger.warning(
            "netbottleneck.profile gives all ranks rank 0's weights, and averages their gradients. Ranks with other "
            "weights: %s%s. Leave it out if ranks train models of their own",
            ", ".join(map(str, others[:SAID])),
            left,
        )


def broadcast(comm: Any, model: torch.nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers to all ranks."""
    core = connect.core()
    works = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        data = tensor.detach()
        if data.numel() == 0:
            continue
        flat = data if data.is_contiguous() else data.contiguous()
        where = (flat.data_ptr(), flat.numel() * flat.element_size()) if flat.device.type == "cpu" else flat
        works.append((comm.submit(fitted(f"state.{name}"), core.BROADCAST, where, core.UINT8, keep=flat), data, flat))
    for work, data, flat in works:
        work.wait()
        if flat is not data:
            data.copy_(flat)


# Callbacks of frameworks, and the measured run that they share.


class Run:
    """A measured run of a framework's model and optimizer. The environment's transports move the gradients until `end`.

    model: the model that the framework trains: a DistributedDataParallel, one of FSDP2, FSDP or DeepSpeed, or a plain
    module in a job of one rank. optimizer: a torch optimizer, or a framework's wrapper around one. Every rank creates a
    Run before its first backward pass. session: None if the model is left alone, and with NETBOTTLENECK=0. Raises
    ValueError for a plain module on several ranks.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        self.session: Session | None = None
        self._measured: Measured | None = None
        if config.settings().off:
            return
        _finish_left()
        wrapped = uncompiled(model)
        earlier = ddp_hooks.measured_by(wrapped)
        self._measured = earlier
        if earlier is not None:  # measured since it was built, by an environment variable
            self.session = earlier.session
            if isinstance(optimizer, Marks):
                earlier.begun_by(optimizer)
            return
        spread = distributed.is_initialized() and distributed.get_world_size() > 1
        moved = not isinstance(wrapped, DistributedDataParallel) and observed.is_moved(wrapped)
        if spread and not moved and not isinstance(wrapped, DistributedDataParallel):
            raise ValueError(
                f"a {type(model).__name__} on {distributed.get_world_size()} ranks: netbottleneck measures models of "
                "DistributedDataParallel, FSDP2, FSDP and DeepSpeed"
            )
        place = {"rank": distributed.get_rank(), "ranks": distributed.get_world_size()} if spread else {}
        settings = config.settings(place)
        found: Measured | None
        if isinstance(wrapped, DistributedDataParallel):
            found = ddp_hooks.attach(model, inner(optimizer), settings=settings)
        elif moved:
            found = observed.attach(model, inner(optimizer), settings=settings)
        else:
            check_plain(model)
            check_fit(inner(optimizer))
            found = measure(open_session(settings, model=type(model).__name__), model, inner(optimizer))
            finish_at_exit(found.session)
        self.session, self._measured = None if found is None else found.session, found

    def end(self, error: BaseException | None = None) -> None:
        """Close the records on this rank, with the error if there is one. Without an error, rank 0 writes the report.

        Rank 0 also shows the report. A second call does nothing.
        """
        measured, self._measured = self._measured, None
        if self.session is None or measured is None:
            return
        if error is not None and _ends(error):
            _leave(measured)
        elif error is not None:
            self.session.fail(error)
        else:
            finish(self.session)


class Marks:
    """Wraps an optimizer whose step() also runs the backward pass: the framework marks the begin of the update."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = self.wraps = inner(optimizer)
        self._begins: list[Any] = []

    def register_step_pre_hook(self, hook: Any) -> "Marks":
        """Register a hook that `begin` calls; return a handle with remove(), which removes all such hooks."""
        self._begins.append(hook)
        return self

    def register_step_post_hook(self, hook: Any) -> Any:
        """Register a hook for the end of the wrapped optimizer's step; return its handle."""
        return self._optimizer.register_step_post_hook(hook)

    def begin(self) -> None:
        """Call the pre-hooks: gradients are complete, and the update of the parameters begins."""
        for hook in self._begins:
            hook()

    def remove(self) -> None:
        """Remove all pre-hooks."""
        self._begins.clear()


def inner(optimizer: Any) -> torch.optim.Optimizer:
    """Return the innermost optimizer below a framework's wrappers; a Marks is returned as it is."""
    while not isinstance(optimizer, Marks) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return cast(torch.optim.Optimizer, optimizer)


def framework(user: str, *modules: str) -> ModuleType:
    """Return the first of these modules whose package is loaded, else the first that is installed.

    If none is installed, raises ImportError, which names the packages and `user`, the callback that needs them.
    """
    for name in sorted(modules, key=lambda name: name.partition(".")[0] not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            package = name.partition(".")[0]
            if error.name is None or error.name.partition(".")[0] != package:
                raise
    packages = " or ".join(dict.fromkeys(name.partition(".")[0].replace("_", "-") for name in modules))
    raise ImportError(f"netbottleneck.callbacks.{user} needs {packages}, which is not installed: pip install it")


def _lightning_callback() -> type:
    """Return the callback for Lightning 2."""
    lightning: Any = framework("LightningCallback", "lightning.pytorch", "pytorch_lightning")

    class LightningCallback(lightning.Callback):  # type: ignore[misc]
        """Measures `Trainer.fit` with one optimizer, in one process or with the strategy "ddp".

        A step ends with the optimizer's step and includes its accumulated batches. The report is written when the fit
        ends. If the fit fails, the records contain the error.
        """

        __qualname__ = "LightningCallback"

        def __init__(self) -> None:
            self._run: Run | None = None
            self._marks: Marks | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Begin the run. Raises ValueError unless there is exactly one optimizer, and the errors of Run."""
            if config.settings().off:
                return
            if len(trainer.optimizers) != 1:
                raise ValueError(f"{len(trainer.optimizers)} optimizers: netbottleneck measures loops with one")
            self._marks = Marks(trainer.optimizers[0])
            self._run = Run(trainer.strategy.model, self._marks)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            """Mark the end of the backward pass, which Lightning runs inside the closure of the optimizer's step."""
            if self._marks is not None:
                self._marks.begin()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            """End the run."""
            self._end(None)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            """End the run with the error."""
            self._end(exception)

        def _end(self, error: BaseException | None) -> None:
            run, self._run, self._marks = self._run, None, None
            if run is not None:
                run.end(error)

    return LightningCallback


def _transformers_callback() -> type:
    """Return the callback for the Hugging Face Trainer."""
    transformers: Any = framework("TransformersCallback", "transformers")

    class TransformersCallback(transformers.TrainerCallback):  # type: ignore[misc]
        """Measures `Trainer.train` in one process, or in several processes with torchrun.

        A step is a step of the trainer and includes its accumulated batches. The report is written when training ends.
        """

        __qualname__ = "TransformersCallback"

        def __init__(self) -> None:
            self._run: Run | None = None

        def on_train_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **others: Any
        ) -> None:
            """Begin the run; an earlier one ends, as the trainer may begin again with smaller batches.

            Raises the errors of Run.
            """
            if self._run is not None:
                self._run.end(RuntimeError("the trainer began again"))
                self._run = None
            self._run = Run(wrapper(model), optimizer)

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            """End the run."""
            run, self._run = self._run, None
            if run is not None:
                run.end()

    return TransformersCallback


def wrapper(model: torch.nn.Module) -> torch.nn.Module:
    """Return the DistributedDataParallel around a model, or the model itself. The trainer hides the wrapper."""
    around = (thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel))
    return next((ddp for ddp in around if ddp.__dict__.get("_modules", {}).get("module") is model), model)


@contextmanager
def _measured_loop(model: torch.nn.Module, optimizer: Any) -> Generator[Run, None, None]:
    """Measure the loop inside; model and optimizer are the results of `Accelerator.prepare`.

    A step ends with the optimizer's step and includes the batches inside `Accelerator.accumulate`. The report is
    written at the end. After an exception the records contain the error; a generator that is closed, and an exit with
    success, are no failure. Raises the errors of Run.
    """
    run = Run(model, optimizer)
    try:
        yield run
    except BaseException as error:
        run.end(error)
        raise
    run.end()


def _accelerate() -> Callable[..., Any]:
    """Return the context manager for a loop with Accelerate's model and optimizer."""
    framework("accelerate", "accelerate")
    _measured_loop.__name__ = _measured_loop.__qualname__ = "accelerate"
    return _measured_loop


_MAKERS: dict[str, Callable[[], Any]] = {
    "LightningCallback": _lightning_callback,
    "TransformersCallback": _transformers_callback,
    "accelerate": _accelerate,
}


def __getattr__(name: str) -> Any:
    if name not in _MAKERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, _MAKERS[name]())
