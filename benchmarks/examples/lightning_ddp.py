"""Lightning, two processes on one machine, measured.

torchrun --nproc-per-node 2 benchmarks/examples/lightning_ddp.py
"""

from __future__ import annotations

import os
from typing import Any

import torch

from netbottleneck.callbacks import LightningCallback

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl

STEPS = 20


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.cross_entropy(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    torch.manual_seed(0)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    data = torch.utils.data.TensorDataset(torch.randn(STEPS * 16 * ranks, 64), torch.randint(10, (STEPS * 16 * ranks,)))
    options: dict[str, Any] = {"strategy": "ddp"} if ranks > 1 else {}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        max_epochs=1,
        callbacks=[LightningCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch_size=16))


if __name__ == "__main__":
    main()
