"""What is left alone: one line in the log for each thing that runs as without us though a measurement was asked for.

Imports torch never: it may still be importing.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any

from netbottleneck import config
from netbottleneck.launch import connect
from netbottleneck.runtime import job

STEPS = 3  # of an optimizer, before a script without a measured run is spoken of

logger = logging.getLogger("netbottleneck")

_said: set[str] = set()


def left_alone(what: str, why: str) -> None:
    """Say what is left alone, why, and what would have to change. Once for each."""
    line = f"{what} is left alone: {why}"
    if line not in _said:
        _said.add(line)
        logger.warning("%s", line)


class Unmeasured:
    """Looks at the first steps of a script's optimizers, and says where nothing is measured.

    register: torch's register_optimizer_step_post_hook. With NETBOTTLENECK_STRICT=1 the step raises ValueError instead.
    """

    def __init__(self, register: Callable[[Any], Any]) -> None:
        self._steps = 0
        register(self._after_step)  # for good: torch does not allow a hook to remove one

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self._steps += 1
        if self._steps == STEPS and not _said and not _measured():
            self._say(why_not(optimizer))

    @staticmethod
    def _say(why: str) -> None:
        try:
            settings = config.settings()
            strict = settings.strict
            job.set_up_log(settings, connect.detect(settings))
        except Exception:  # what is wrong with the settings is not this step's to say
            strict = False
        if strict:
            raise ValueError(f"NETBOTTLENECK_STRICT=1, and the training cannot be measured: {why}")
        left_alone("the training", why)


def _measured() -> bool:
    session = sys.modules.get("netbottleneck.runtime.session")
    return session is not None and bool(session.opened())


def why_not(optimizer: Any) -> str:
    """Return why a training whose optimizer this is is not measured."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kinds = {type(p).__name__ for p in parameters}
    if "DTensor" in kinds:
        return "its parameters are sharded (FSDP2 or tensor parallelism), which is not measured yet: use DDP"
    if "FlatParameter" in kinds or any(getattr(p, "_fsdp_flattened", False) for p in parameters):
        return "FullyShardedDataParallel shards its parameters, which is not measured yet: use DDP"
    if type(optimizer).__module__.partition(".")[0] == "deepspeed":
        return "DeepSpeed moves its gradients, which is not measured yet: use DDP"
    return (
        "it has no DistributedDataParallel model and no Horovod optimizer: wrap the model, or measure the loop by "
        "netbottleneck.profile(model, optimizer)"
    )
