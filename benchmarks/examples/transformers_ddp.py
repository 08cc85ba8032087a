"""The Hugging Face Trainer, two processes on one machine, measured.

torchrun --nproc-per-node 2 benchmarks/examples/transformers_ddp.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from netbottleneck.callbacks import TransformersCallback

STEPS = 20


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(inputs)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": torch.full((64,), index / 640), "labels": index % 10}


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            max_steps=STEPS,
            per_device_train_batch_size=16,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        Trainer(Classifier(), arguments, train_dataset=Rows(), callbacks=[TransformersCallback()]).train()


if __name__ == "__main__":
    main()
