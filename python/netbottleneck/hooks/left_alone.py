"""Warnings for what is not measured: one log line for each model or training that runs without our hooks.

Never imports torch, whose import may still be in progress.
"""

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from netbottleneck import config
from netbottleneck.launch import connect
from netbottleneck.runtime import job

DEEPSPEED = "deepspeed"
STEPS = 3  # optimizer steps before the warning that nothing is measured

logger = logging.getLogger("netbottleneck")

_said: set[str] = set()


def left_alone(what: str, why: str) -> None:
    """Log once what is left alone and why. `why` names the remedy."""
    line = f"{what} is left alone: {why}"
    if line not in _said:
        _said.add(line)
        with contextlib.suppress(Exception):  # of a handler of the script
            logger.warning("%s", line)


class Unmeasured:
    """Warns at the third step of an optimizer if nothing is measured.

    register: torch's register_optimizer_step_post_hook. observed: called after the first step of each optimizer whose
    gradients other code moves, such as FSDP2; what it returns is called after the second. With NETBOTTLENECK_STRICT=1
    the step raises ValueError instead.
    """

    def __init__(self, register: Callable[[Any], Any], observed: Callable[[Any], Callable[[], None]]) -> None:
        self._observed = observed
        self._seeking: dict[int, Callable[[], None]] = {}  # by the optimizer that has stepped once
        self._steps = 0
        self._known: dict[int, weakref.ref[Any]] = {}  # the optimizers that have stepped
        register(self._after_step)  # never removed: torch does not allow a hook to remove a hook

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        functions = sys.modules.get("netbottleneck.torch.functions")
        if functions is not None and functions.makes_state(optimizer):
            return
        self._steps += 1
        known = self._known.get(id(optimizer))
        if known is None or known() is not optimizer:
            self._first_step(optimizer)
        elif self._seeking:
            self._seeking.pop(id(optimizer), _nothing)()
        if self._steps == STEPS and not _said and not _measured():
            self._say(why_not(optimizer))

    def _first_step(self, optimizer: Any) -> None:
        self._known[id(optimizer)] = weakref.ref(optimizer)
        if are_spread(held(optimizer)) or DEEPSPEED in sys.modules:
            self._seeking[id(optimizer)] = self._observed(optimizer)

    @staticmethod
    def _say(why: str) -> None:
        try:
            settings = config.settings()
            strict = settings.strict
            job.set_up_log(settings, connect.detect(settings))
        except Exception:  # other code reports invalid settings
            strict = False
        if strict:
            raise ValueError(f"NETBOTTLENECK_STRICT=1, and the training cannot be measured: {why}")
        left_alone("the training", why)


def _nothing() -> None:
    return


def _measured() -> bool:
    session = sys.modules.get("netbottleneck.runtime.session")
    return session is not None and bool(session.opened())


def held(optimizer: Any) -> list[Any]:
    """Return an optimizer's parameters; [] if its class keeps them in another way than torch's do."""
    try:
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]
    except Exception:  # code of the script's class
        return []


def are_spread(parameters: Iterable[Any]) -> bool:
    """Return whether other code spreads parameters over the ranks: DTensors, or the flat parameters of FSDP."""
    return any(
        getattr(parameter, "_fsdp_flattened", False) or type(parameter).__name__ in ("DTensor", "FlatParameter")
        for parameter in parameters
    )


def why_not(optimizer: Any) -> str:
    """Return why the training with this optimizer is not measured."""
    if are_spread(held(optimizer)):
        return (
            "its parameters are sharded, and no call of a module that holds them all was seen. If the script calls "
            "another method of it than forward, call netbottleneck.attach(model, optimizer)"
        )
    if any("Adasum" in cls.__name__ for cls in type(optimizer).__mro__):
        return "Horovod's Adasum combines steps, not gradients, which is not measured yet: use op=hvd.Average"
    among = getattr(getattr(optimizer, "_wanted", None), "process_set", None)
    if among is not None and job.is_started():  # a distributed optimizer of ours
        if job.current().place.size == 1:
            return "one rank: no gradient is reduced, so there is nothing to measure"
        return (
            f"its optimizer reduces gradients over process set {among.process_set_id}, and only one that reduces over "
            "all ranks is measured"
        )
    return (
        "it has no DistributedDataParallel model and no Horovod optimizer. If the script averages gradients itself, "
        "call netbottleneck.attach(model, optimizer), which observes it; else wrap the model, or, if all ranks train "
        "the same one, call netbottleneck.profile(model, optimizer), which averages their gradients"
    )
