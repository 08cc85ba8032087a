"""Trains a DDP model on one GPU a rank, over NCCL. The ranks' addresses are in the environment."""

import netbottleneck  # noqa: F401, I001 - before torch's first communicator
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

STEPS, WIDTH, BATCH = 60, 4096, 64


def main() -> None:
    """Train for STEPS steps."""
    torch.cuda.set_device(0)
    distributed.init_process_group("nccl")
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(BATCH, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
