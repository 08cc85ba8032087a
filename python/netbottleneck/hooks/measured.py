"""Measured: steps, phases and arms of one model and its optimizer, recorded into a session.

Python runs a few times a step, never once a gradient: C callables make the stamps inside a step.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from netbottleneck.hooks.calls import Calls
from netbottleneck.hooks.updates import Updates
from netbottleneck.runtime.communicators import Buckets, key_of
from netbottleneck.runtime.session import Session
from netbottleneck.trace.model import BARE
from netbottleneck.trace.recorder import EVENTS
from netbottleneck.whatif.plan import described

_engine: Any = torch.autograd.Variable._execution_engine
_c: Any = torch._C

logger = logging.getLogger("netbottleneck")


class Moving(Buckets, Protocol):
    """Gradients of a model on their way: torch's Gradients, DDP's reducer or Horovod's library."""

    paused: bool

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """Those that have a gradient."""

    @property
    def tensors(self) -> Sequence[tuple[str, int, torch.dtype]]:
        """Name, bytes and type of each of them."""

    @property
    def pending(self) -> int:
        """What was sent and not waited for."""

    def flush(self) -> None:
        """Send what is not sent."""

    def wait(self) -> None:
        """Wait until all gradients are back."""

    def close(self) -> None:
        """Remove the hooks."""


class Measured:
    """One model, its gradients and its optimizer under a session.

    own_sync: these hooks send the gradients and wait for them at the end of each backward pass; False: somebody else
    does. bare: switches the user's own path on and off, where there is one; the arm "bare" then runs it with nothing of
    ours between. agree: asked before another arm begins; the arm in force stays where it returns False. on_forward:
    called when the model's forward pass begins. model None: found at the first forward pass. optimizer None: found at
    its first step.

    An exception of the measuring is logged once and ends the recording; gradients travel on as before. Raises
    ValueError where "bare" is an arm and there is no user's own path.
    """

    def __init__(  # noqa: PLR0913 - all but three have a default that fits
        self,
        session: Session,
        gradients: Moving,
        optimizer: Any,
        *,
        model: torch.nn.Module | None = None,
        own_sync: bool = True,
        bare: Callable[[bool], None] | None = None,
        agree: Callable[[], bool] | None = None,
        on_forward: Callable[[], None] | None = None,
    ) -> None:
        if bare is None and BARE in session.blocks.arms:
            raise ValueError(
                f"NETBOTTLENECK_TRANSPORT={','.join(session.blocks.arms)}: netbottleneck alone moves the gradients of "
                "this loop, so there is no untouched path: leave bare out"
            )
        self.session = session
        self.gradients = gradients
        self.between: Callable[[], None] = _nothing  # called between two steps
        self._own_sync = own_sync
        self._bare = bare
        self._agree = agree
        self._on_forward = on_forward
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._leaves: list[str] = []  # names of the modules that are stamped in sampled steps
        self._calls: Calls | None = None
        self._seeking: Any = None
        self._sampling: list[Any] = []
        self._queued = False
        self._synced = False  # in this step
        self._in_backward = False  # the optimizer steps inside the backward pass
        self._late = False  # a step has ended inside the backward pass
        self._broken = False
        self.closed = False
        self._arm = ""
        self._version = -1
        put = session.recorder.stamper
        self._optimizer_begin, self._optimizer_end = put(EVENTS["OPTIMIZER_BEGIN"]), put(EVENTS["OPTIMIZER_END"])
        self._forward_begin, self._forward_end = put(EVENTS["FORWARD_BEGIN"]), put(EVENTS["FORWARD_END"])
        self._updates = Updates(gradients.parameters, optimizer, self._before_step, self._after_step)
        if own_sync:
            gradients.on_first = self._backward_begins  # type: ignore[attr-defined]
        if model is None:
            self._seeking = register_module_forward_pre_hook(self._seek)
        else:
            self._know(model)
        session.on_close.append(self.close)
        self._choose()
        session.begin()

    def begun_by(self, marks: Any) -> None:
        """Have the optimizer's part of a step begin when `marks` calls its pre-hook, instead of the optimizer."""
        self._updates.begun_by(marks)

    def close(self) -> None:
        """Take all hooks away, and leave the gradients to the user's own path."""
        if self.closed:
            return
        self.closed = True
        self.guarded(self._describe)
        self._updates.remove()
        self._watch(False)
        self._stop_seeking()
        if self._own_sync:
            self.gradients.close()
        if self._bare is not None:
            self._bare(True)

    def failed(self, error: Exception) -> None:
        """Stop recording, and say why once."""
        if not self._broken:
            self._broken = True
            logger.error("measuring has ended, the training goes on: %s: %s", type(error).__name__, error)
            logger.debug("measuring has ended", exc_info=error)
            self.session.notes.append(f"measuring ended at step {self.session.step}: {type(error).__name__}: {error}")

    def guarded(self, call: Callable[[], Any]) -> None:
        """Call something that only measures. An exception of it ends the recording, and nothing else."""
        if self._broken:
            return
        try:
            call()
        except Exception as error:
            self.failed(error)

    def _seek(self, module: torch.nn.Module, _args: Any) -> None:
        """Find the model: the outermost module that has all the parameters."""
        own = {id(parameter) for parameter in module.parameters()}
        if all(id(parameter) in own for parameter in self.gradients.parameters):
            self._stop_seeking()
            self._know(module)
            if self._arm != BARE:
                self._watch(True)
                self.guarded(self._forward_begin)

    def _stop_seeking(self) -> None:
        seeking, self._seeking = self._seeking, None
        if seeking is not None:
            seeking.remove()

    def _know(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._leaves = [name for name, _ in leaves(model)]
        self.guarded(self._describe)

    def _watch(self, on: bool) -> None:
        """Have the model's calls stamped, or not."""
        model = None if self._model is None else self._model()
        if on and self._calls is None and model is not None:
            self._calls = Calls(model, self._forward_begins, self._forward_ends)
        elif not on and self._calls is not None:
            self._calls.remove()
            self._calls = None
        if not on:
            self._stop_sampling()

    def _forward_begins(self) -> None:
        if self._late and _c._current_graph_task_id() == -1:
            self._late = False
            self._next_step()
        if self._on_forward is not None:
            self._on_forward()
        if self._arm != BARE:
            self.guarded(self._forward_begin)
            if self.session.sampled:
                self.guarded(self._sample)

    def _forward_ends(self) -> None:
        self._stop_sampling()
        if self._arm != BARE:
            self.guarded(self._forward_end)

    def _sample(self) -> None:
        """Stamp every module of this forward pass."""
        model = None if self._model is None else self._model()
        found = [] if model is None or self._sampling else list(leaves(model))
        if [name for name, _ in found] != self._leaves or compiled(model):
            return
        put = self.session.recorder.stamper
        for index, (_, module) in enumerate(found):
            self._sampling.append(module.register_forward_pre_hook(put(EVENTS["FORWARD_BEGIN"], index + 1)))
            self._sampling.append(module.register_forward_hook(put(EVENTS["FORWARD_END"], index + 1)))

    def _stop_sampling(self) -> None:
        for handle in self._sampling:
            handle.remove()
        self._sampling.clear()

    def _backward_begins(self) -> None:
        """The first gradient of a backward pass is there."""
        if not self._queued and self._arm != BARE and _c._current_graph_task_id() != -1:
            self._queued = True
            _engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        if self._queued:
            self._queued = False
            self._sync()

    def _sync(self) -> None:
        self._synced = True
        self.gradients.flush()
        self.gradients.wait()

    def _before_step(self) -> None:
        if (
            self._own_sync
            and not self.gradients.paused
            and (not self._synced or self._queued or self.gradients.pending)
        ):
            self._queued = False
            self._sync()
        self._synced = False
        self.guarded(self._optimizer_begin)

    def _after_step(self) -> None:
        if self.closed:
            return
        if _c._current_graph_task_id() != -1:
            # The path of the gradients must not change during a backward pass: the next forward ends this step.
            self._late = self._in_backward = True
            self._watch(True)
            return
        self._next_step()

    def _next_step(self) -> None:
        self._stop_seeking()  # a model that no module holds as a whole has no forward times
        self.guarded(self._optimizer_end)
        if self._broken:
            self.session.end(recorded=False)
        self.guarded(self.session.end)
        if self.gradients.version != self._version:
            self.guarded(self._describe)
        self.guarded(self.between)
        self._choose()
        self.guarded(self.session.begin)

    def _choose(self) -> None:
        """Let the arm of the step that comes next move the gradients."""
        arm = self.session.arm
        if arm == self._arm:
            return
        if self._arm and self._agree is not None and not self._agree():
            self.session.stay(self._arm)
            return
        before, self._arm = self._arm, arm
        if self._bare is not None and (BARE in (before, arm) or not before):
            self._bare(arm == BARE)
        self.gradients.paused = arm == BARE
        self._watch(arm != BARE or self._in_backward)
        if arm != BARE:
            self.session.arms[arm].target(self.gradients)

    def _describe(self) -> None:
        g = self.gradients
        told = described(g.tensors, g.buckets, key_of)
        earlier = self.session.described.get("buckets", []) if self._version not in (-1, g.version) else []
        names = {bucket["name"] for bucket in told["buckets"]}
        told["buckets"] += [bucket for bucket in earlier if bucket["name"] not in names]
        self._version = g.version
        self.session.describe(modules=self._leaves, **told)


def leaves(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules without children, by the names that they have without DDP's wrapper."""
    inner = getattr(model, "_orig_mod", model)
    inner = inner.module if isinstance(inner, torch.nn.parallel.DistributedDataParallel) else inner
    return ((name, module) for name, module in inner.named_modules() if not any(module.children()))


def compiled(model: torch.nn.Module | None) -> bool:
    """Return whether torch.compile has compiled a model, or a part of it: hooks would have it compiled anew."""
    parts = () if model is None else model.modules()
    return any(hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) for part in parts)


def _nothing() -> None:
    return
