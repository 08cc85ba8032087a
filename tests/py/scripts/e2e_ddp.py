"""A plain DDP training script with one added line: `import netbottleneck`, at the place that E2E_IMPORT names.

E2E_IMPORT: before or after torch's import; never: the untouched script. E2E_MODEL: linear, or norm, which has buffers.
Every rank writes its parameters and buffers to E2E_OUT.
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

STEPS = 12


def network() -> torch.nn.Module:
    if os.environ.get("E2E_MODEL") == "norm":
        return torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 4))
    return torch.nn.Sequential(
        torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 600), torch.nn.ReLU(), torch.nn.Linear(600, 4)
    )


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    plain = network()
    parameters = plain.parameters()
    if os.environ.get("E2E_OPTIMIZER") == "first":
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        model = DistributedDataParallel(plain)
    else:
        model = DistributedDataParallel(plain)
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        inputs, targets = torch.randn(8, 20), torch.randint(4, (8,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    state = b"".join(tensor.numpy().tobytes() for tensor in plain.state_dict().values())
    (Path(os.environ["E2E_OUT"]) / f"{dist.get_rank()}.weights").write_bytes(state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
