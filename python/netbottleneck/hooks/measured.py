"""Hooks on a model and its optimizer that make a session of a training loop.

Python runs once a step, never once a gradient: what is stamped inside a step is stamped by C callables.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from netbottleneck.comm import Buckets, key_of
from netbottleneck.hooks.updates import Updates
from netbottleneck.plan import described
from netbottleneck.recorder import EVENTS
from netbottleneck.session import Session

_engine: Any = torch.autograd.Variable._execution_engine


class Moving(Buckets, Protocol):
    """Gradients of a model on their way: torch's Gradients, or what stands between DDP or Horovod and their own way."""

    paused: bool

    @property
    def names(self) -> Sequence[str]:
        """The names of the parameters."""

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """Those that have a gradient."""

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

    own_sync: the gradients are sent and waited for at the end of each backward pass, by these hooks; False: somebody
    else does that (an optimizer of ours). bare: switches the user's own path on and off, where there is one; the
    arm "bare" then runs it with nothing of ours between. find_unused: a gradient that no rank has stays None, at the
    price of one small exchange a backward pass. model None: found at the first forward pass. optimizer None: found at
    its first step.
    """

    def __init__(  # noqa: PLR0913 - all but three have a default that fits
        self,
        session: Session,
        gradients: Moving,
        optimizer: torch.optim.Optimizer | None,
        *,
        model: torch.nn.Module | None = None,
        own_sync: bool = True,
        bare: Callable[[bool], None] | None = None,
        find_unused: bool = False,
    ) -> None:
        self.session = session
        self.gradients = gradients
        self._own_sync = own_sync
        self._bare = bare
        self._find_unused = find_unused
        self._handles: list[Any] = []
        self._sampling: list[Any] = []
        self._modules: list[tuple[str, torch.nn.Module]] = []
        self._queued = False
        self._synced = False  # in this step
        self._held = False
        self._arm = ""
        self._version = -1
        self.between: Callable[[], None] = _nothing  # called between two steps
        put = session.recorder.stamper
        self._optimizer_begin, self._optimizer_end = put(EVENTS["OPTIMIZER_BEGIN"]), put(EVENTS["OPTIMIZER_END"])
        self._updates = Updates(gradients.parameters, optimizer, self._before_step, self._after_step)
        if model is None:
            self._seeking = register_module_forward_pre_hook(self._seek)
            self._handles.append(self._seeking)
        else:
            self._watch(model)
        session.on_close.append(self.close)
        self._choose()
        session.begin()
        self._sample()

    @property
    def held(self) -> bool:
        """Whether gradients only add up now."""
        return self._held

    def hold(self, held: bool) -> None:
        """Gradients only add up while held, as inside DDP's no_sync()."""
        self._held = held
        self._pause()

    def begun_by(self, marks: Any) -> None:
        """Have the optimizer's part of a step begin when `marks` calls its pre-hook, instead of the optimizer."""
        self._updates.begun_by(marks)

    def close(self) -> None:
        """Take all hooks away."""
        self._describe()
        for handle in [self._updates, *self._handles, *self._sampling]:
            handle.remove()
        self._handles.clear()
        self._sampling.clear()
        if self._own_sync:
            self.gradients.close()
        if self._bare is not None:
            self._bare(True)

    def _seek(self, module: torch.nn.Module, _args: Any) -> None:
        """Find the model: the outermost module that has all the parameters."""
        own = {id(parameter) for parameter in module.parameters()}
        if all(id(parameter) in own for parameter in self.gradients.parameters):
            self._seeking.remove()
            self.session.recorder.put(EVENTS["FORWARD_BEGIN"])
            self._watch(module)

    def _watch(self, model: torch.nn.Module) -> None:
        put = self.session.recorder.stamper
        # By the names that the parameters have: without what DDP wraps around them.
        named = getattr(model, "module", model).named_modules() if self._bare is not None else model.named_modules()
        self._modules = [(name, module) for name, module in named if not any(module.children())]
        self._handles.append(model.register_forward_pre_hook(put(EVENTS["FORWARD_BEGIN"])))
        self._handles.append(model.register_forward_hook(put(EVENTS["FORWARD_END"])))
        if self._own_sync:
            self._handles.append(model.register_forward_hook(self._after_forward))
        self._describe()

    def _after_forward(self, _model: Any, _args: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._backward_begins)

    def _backward_begins(self, _gradient: Any) -> None:
        if not self._queued and not self._held and self._arm != "bare":
            self._queued = True
            _engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._queued = False
        self._sync()

    def _sync(self) -> None:
        self._synced = True
        unused = self._unused() if self._find_unused else []
        self.gradients.flush()
        self.gradients.wait()
        for parameter in unused:
            parameter.grad = None

    def _unused(self) -> list[torch.Tensor]:
        """Return the parameters that have a gradient on no rank."""
        parameters = self.gradients.parameters
        votes = self.session.control.exchange(bytes(p.grad is not None for p in parameters))
        return [p for index, p in enumerate(parameters) if not any(vote[index] for vote in votes)]

    def _before_step(self) -> None:
        if (
            self._own_sync
            and not self.gradients.paused
            and (not self._synced or self._queued or self.gradients.pending)
        ):
            # No output of the model was seen on its way back: another method was called, or it hides its tensors.
            self._queued = False
            self._sync()
        self._synced = False
        self._optimizer_begin()

    def _after_step(self) -> None:
        self._optimizer_end()
        self.session.end()
        for handle in self._sampling:
            handle.remove()
        self._sampling.clear()
        if self.gradients.version != self._version:
            self._describe()
        self.between()
        self._choose()
        self.session.begin()
        self._sample()

    def _choose(self) -> None:
        """Let the arm of the step that comes next move the gradients."""
        arm = self.session.arm
        if arm == self._arm:
            return
        before, self._arm = self._arm, arm
        if self._bare is not None and "bare" in (before, arm):
            self._bare(arm == "bare")
        self._pause()
        if arm != "bare":
            self.session.arms[arm].target(self.gradients)

    def _pause(self) -> None:
        self.gradients.paused = self._held or self._arm == "bare"

    def _sample(self) -> None:
        if not self.session.sampled:
            return
        put = self.session.recorder.stamper
        for index, (_, module) in enumerate(self._modules):
            self._sampling.append(module.register_forward_pre_hook(put(EVENTS["FORWARD_BEGIN"], index + 1)))
            self._sampling.append(module.register_forward_hook(put(EVENTS["FORWARD_END"], index + 1)))

    def _describe(self) -> None:
        g = self.gradients
        tensors = [(name, p.numel() * p.element_size(), p.dtype) for name, p in zip(g.names, g.parameters, strict=True)]
        told = described(tensors, g.buckets, key_of)
        earlier = self.session.described.get("buckets", []) if self._version not in (-1, g.version) else []
        names = {bucket["name"] for bucket in told["buckets"]}
        told["buckets"] += [bucket for bucket in earlier if bucket["name"] not in names]
        self._version = g.version
        self.session.describe(modules=[name for name, _ in self._modules], **told)


def _nothing() -> None:
    return


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    """Return the tensors in an output: alone, in a sequence or a mapping, or as attributes of a data class."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name))
