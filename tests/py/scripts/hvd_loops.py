"""One rank of the loops of training_loops.py, by Horovod's API. LOOPS_TRANSPORT: transport of the gradients."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import training_loops

import netbottleneck.torch as hvd
from netbottleneck.hooks.horovod import Measuring
from netbottleneck.runtime import job


class Telling(Measuring):
    """Keeps the folder of the run, and writes no report."""

    folder: Path

    def gradients(self, gradients: Any, optimizer: Any) -> None:
        super().gradients(gradients, optimizer)
        assert self._session is not None
        self.folder = self._session.folder

    def stopping(self, stopping: job.Job) -> None:
        if self._session is not None:
            self._session.close()


class Distributed(training_loops.Way):
    """DistributedOptimizer on a plain model, as in Horovod's guide. Each loop is its own job."""

    def __init__(self, model: torch.nn.Module, passes: int = 1, **_options: Any) -> None:
        self.passes = passes
        self.model = model
        self.observer = Telling()
        job.observe(self.observer)
        hvd.init()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        made = training_loops.sgd(model)
        self.optimizer = hvd.DistributedOptimizer(made, model.named_parameters(), backward_passes_per_step=passes)

    def adding(self, part: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def reduced(self) -> None:
        self.optimizer.synchronize()

    def updating(self) -> AbstractContextManager[Any]:
        return self.optimizer.skip_synchronize()  # type: ignore[no-any-return]

    def folder(self) -> Path:
        hvd.shutdown()
        return self.observer.folder


if __name__ == "__main__":
    os.environ["NETBOTTLENECK_TRANSPORT"] = os.environ["LOOPS_TRANSPORT"]  # read by init, after the import
    training_loops.main(Distributed, ddp=False)
