"""A callback for the Hugging Face Trainer."""

import gc
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from netbottleneck.hooks.callbacks.frameworks import framework
from netbottleneck.hooks.callbacks.run import Run

_transformers: Any = framework("TransformersCallback", "transformers")


class TransformersCallback(_transformers.TrainerCallback):  # type: ignore[misc]
    """Measures `Trainer.train`: on one process, or on several CPUs with torchrun.

    A step is one of the trainer's: accumulated batches belong to it. The report is written when training ends.
    """

    def __init__(self) -> None:
        self._run: Run | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **others: Any
    ) -> None:
        """Begin the run. Raises as callbacks.run.Run."""
        self._run = Run(wrapper(model), optimizer)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """End the run."""
        run, self._run = self._run, None
        if run is not None:
            run.end()


def wrapper(model: torch.nn.Module) -> torch.nn.Module:
    """Return the DistributedDataParallel around a model, which the trainer keeps to itself; the model without one."""
    around = (thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel))
    return next((ddp for ddp in around if ddp.__dict__.get("_modules", {}).get("module") is model), model)
