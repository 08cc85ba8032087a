"""One rank of the loops of training_loops.py, with DDP models that use our hooks.

LOOPS_TRANSPORT: what moves their buckets. The variable of ours would measure the models to compare with, too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import training_loops

from netbottleneck.hooks import ddp


class Hooked(training_loops.Way):
    """DDP with our hook, which finds the optimizer by itself."""

    def __init__(self, model: torch.nn.Module, passes: int = 1, **options: Any) -> None:
        super().__init__(model, passes, **options)
        self.measured = ddp.attach(self.model)

    def folder(self) -> Path:
        session = self.measured.session
        session.close()  # without a report
        found = session.described["ddp_times"]
        assert found["passes"] > 0, found
        assert found["apart"] == 0, found
        return session.folder


if __name__ == "__main__":
    os.environ["NETBOTTLENECK_TRANSPORT"] = os.environ["LOOPS_TRANSPORT"]  # read by attach, after the import
    training_loops.main(Hooked, ddp=True)
