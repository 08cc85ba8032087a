"""A loop with Accelerate, two processes on one machine, measured.

torchrun --nproc-per-node 2 benchmarks/examples/accelerate_ddp.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator

from netbottleneck.callbacks import accelerate

STEPS = 20


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    rows = 2 * STEPS * 16 * accelerator.num_processes
    data = torch.utils.data.TensorDataset(torch.randn(rows, 64), torch.randint(10, (rows,)))
    model, optimizer, loader = accelerator.prepare(
        layers, torch.optim.SGD(layers.parameters(), lr=0.01), torch.utils.data.DataLoader(data, batch_size=16)
    )
    with accelerate(model, optimizer):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
    accelerator.end_training()


if __name__ == "__main__":
    main()
