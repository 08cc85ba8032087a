"""A user's Horovod script on the double of Horovod. WAY selects the only lines of ours.

WAY: import, before Horovod, or after: `import netbottleneck`; attach: its attach(). GROUPED, PASSES: options of the
optimizer. Each rank compares what it ended with with one process that has all batches, and prints it and what the
library was called for.
"""

import copy
import hashlib
import os
from typing import Any

if os.environ["WAY"] == "import":
    import netbottleneck
import horovod.torch as hvd
import torch

if os.environ["WAY"] in ("after", "attach"):
    import netbottleneck
if os.environ["WAY"] == "attach":
    netbottleneck.attach()

STEPS = 6
PASSES = int(os.environ.get("PASSES", "1"))
BOUND = 1e-10  # in float64: far below what one gradient that is left out, or counted twice, makes of it


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)


def passed(model: Any, generator: torch.Generator) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(4, 6, generator=generator)).square().mean()
    loss.backward()
    return loss.detach()


def clipped(model: torch.nn.Module, step: int) -> bool:
    if step % 2:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return bool(step % 2)


def train(model: torch.nn.Module) -> None:
    optimizer = hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), backward_passes_per_step=PASSES, grouped=bool(os.environ.get("GROUPED"))
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(PASSES):
            loss = passed(model, generator)
        if step % 2:
            optimizer.synchronize()
            clipped(model, step)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        hvd.allreduce(loss, name="loss")
        hvd.allreduce(torch.ones(3), process_set=1 + hvd.rank(), name="mine")


def train_alone(model: torch.nn.Module) -> None:
    optimizer = sgd(model)
    generators = [torch.Generator().manual_seed(rank) for rank in range(hvd.size())]
    for step in range(STEPS):
        optimizer.zero_grad()
        for generator in generators:
            for _ in range(PASSES):
                passed(model, generator)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= hvd.size()
        clipped(model, step)
        optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 40), torch.nn.ReLU(), torch.nn.Linear(40, 30), torch.nn.Linear(30, 3)
    )
    for name, parameter in model.named_parameters():
        hvd.broadcast_(parameter.detach(), 0, name)
    alone = copy.deepcopy(model)
    train(model)
    library = hvd.mpi_ops.mpi_lib.library  # what stands before it is not the library
    hvd.shutdown()
    train_alone(alone)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert (mine - theirs).abs().max() <= BOUND, (mine, theirs)
    print("ended", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
    print("library", " ".join(f"{name}={library.calls.count(name)}" for name in sorted(set(library.calls))))


if __name__ == "__main__":
    main()
