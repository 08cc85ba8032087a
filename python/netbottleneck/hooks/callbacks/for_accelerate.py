"""A loop with Accelerate's model and optimizer."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from netbottleneck.hooks.callbacks.frameworks import framework
from netbottleneck.hooks.callbacks.run import Run

framework("accelerate", "accelerate")


@contextmanager
def accelerate(model: torch.nn.Module, optimizer: Any) -> Generator[Run, None, None]:
    """Measure the loop inside; model and optimizer are what `Accelerator.prepare` returned.

    A step ends with the optimizer's; batches inside `Accelerator.accumulate` belong to it. The report is written at the
    end; after an exception the records say so. Raises as callbacks.run.Run.
    """
    run = Run(model, optimizer)
    try:
        yield run
    except BaseException as error:
        run.end(error)
        raise
    run.end()
