"""A plain DDP training script. Its only line that is not any user's: `import netbottleneck`, where E2E_IMPORT puts it.

E2E_IMPORT: before or after torch's import; never: the untouched script. Every rank writes its weights to E2E_OUT.
"""

import os
from pathlib import Path

if os.environ["E2E_IMPORT"] == "before":
    import netbottleneck
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if os.environ["E2E_IMPORT"] == "after":
    import netbottleneck  # noqa: F401

STEPS = int(os.environ.get("E2E_STEPS", "12"))


def main() -> None:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        torch.nn.Sequential(
            torch.nn.Linear(20, 300),
            torch.nn.ReLU(),
            torch.nn.Linear(300, 600),
            torch.nn.ReLU(),
            torch.nn.Linear(600, 4),
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        inputs = torch.randn(8, 20, generator=data)
        targets = torch.randint(4, (8,), generator=data)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    torch.save(model.module.state_dict(), Path(os.environ["E2E_OUT"]) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
