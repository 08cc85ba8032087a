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

    register: torch's register_optimizer_step_post_hook. sharded: called after the first step of each optimizer whose
    parameters are DTensors, such as those of FSDP2; what it returns is called after the second. With
    NETBOTTLENECK_STRICT=1 the step raises ValueError instead.
    """

    def __init__(self, register: Callable[[Any], Any], sharded: Callable[[Any], Callable[[], None]]) -> None:
        self._sharded = sharded
        self._seeking: dict[int, Callable[[], None]] = {}  # by the optimizer that has stepped once
        self._steps = 0
        self._known: dict[int, weakref.ref[Any]] = {}  # the optimizers that have stepped
        register(self._after_step)  # never removed: torch does not allow a hook to remove a hook

    def _after_step(self, optimizer: Any, *_: Any) -> None:
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
        if any(type(parameter).__name__ == "DTensor" for parameter in held(optimizer)):
            self._seeking[id(optimizer)] = self._sharded(optimizer)

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


def spread_as(parameters: Iterable[Any]) -> str:
    """Return the kind of tensor in which other code spreads parameters over the ranks, "" if they are plain."""
    kinds = set()
    for parameter in parameters:
        kinds.add("FlatParameter" if getattr(parameter, "_fsdp_flattened", False) else type(parameter).__name__)
    return next((kind for kind in ("DTensor", "FlatParameter") if kind in kinds), "")


def why_not(optimizer: Any) -> str:
    """Return why the training with this optimizer is not measured."""
    parameters = held(optimizer)
    spread = spread_as(parameters)
    if spread == "DTensor":
        return (
            "its parameters are sharded, and no call of an FSDP2 module that holds them all was seen: only DDP and "
            "FSDP2 are measured. If the script calls another method of such a module than forward, call "
            "netbottleneck.attach(model, optimizer)"
        )
    if spread:
        return "FullyShardedDataParallel shards its parameters, which is not measured yet: use DDP"
    if type(optimizer).__module__.partition(".")[0] == "deepspeed":
        return "DeepSpeed moves its gradients, which is not measured yet: use DDP"
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
        "it has no DistributedDataParallel model and no Horovod optimizer: wrap the model, or, if all ranks train the "
        "same one, call netbottleneck.profile(model, optimizer), which averages their gradients"
    )
