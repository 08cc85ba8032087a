"""A Horovod script. E2E_IMPORT: alias, `import netbottleneck` above Horovod's own name; else our module in its place.

Every rank writes its weights to E2E_OUT, and rank 0 beside them what one process gets that plays both ranks.
"""

import copy
import os
from pathlib import Path

if os.environ["E2E_IMPORT"] == "alias":
    import netbottleneck  # noqa: F401 - what makes the next import find us where there is no Horovod
import torch

if os.environ["E2E_IMPORT"] == "alias":
    import horovod.torch as hvd
else:
    import netbottleneck.torch as hvd

STEPS = 12


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 4))


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    chosen = torch.Generator().manual_seed(rank)
    return [(torch.randn(8, 20, generator=chosen), torch.randint(4, (8,), generator=chosen)) for _ in range(STEPS)]


def backward(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


def content(model: torch.nn.Module) -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())


def played() -> bytes:
    """Train as two ranks in one process: gradients of both are divided by two, then added."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for pair in zip(batches(0), batches(1), strict=True):
        both = [copy.deepcopy(model) for _ in pair]
        for copied, batch in zip(both, pair, strict=True):
            copied.zero_grad()
            backward(copied, batch)
        for parameter, *twins in zip(model.parameters(), *[m.parameters() for m in both], strict=True):
            parameter.grad = twins[0].grad / 2 + twins[1].grad / 2
        optimizer.step()
    return content(model)


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    model = network()
    if hvd.rank() != 0:
        torch.nn.init.zeros_(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for batch in batches(hvd.rank()):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
    out = Path(os.environ["E2E_OUT"])
    (out / f"{hvd.rank()}.weights").write_bytes(content(model))
    if hvd.rank() == 0:
        (out / "reference").write_bytes(played())
    hvd.shutdown()


if __name__ == "__main__":
    main()
