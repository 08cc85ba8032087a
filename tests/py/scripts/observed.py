"""Trains a model whose gradients other code than DDP or FSDP2 moves, over gloo; prints a digest of its weights.

Arguments: what moves them, and how it is measured: `import` (by its variables), `attach`, `profile` or `framework`
(before the first step), or `unmeasured` (netbottleneck is not imported).

What moves them: `flat` and `original` (FSDP, with parameters of its own or the script's), `tensor` (tensor
parallelism), `engine` (a class as DeepSpeed's, whose optimizer updates a flat copy of the weights) or `script` (its own
all-reduces after the backward pass).
"""

import hashlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS, MOVER, HOW = 40, sys.argv[1], sys.argv[2]
if HOW != "unmeasured":
    import netbottleneck


class Engine(torch.nn.Module):
    """Averages gradients, and updates a flat copy of the weights, as DeepSpeed does with ZeRO."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self._flat = torch.nn.Parameter(torch.cat([p.detach().flatten() for p in module.parameters()]))
        self.basic_optimizer = torch.optim.AdamW([self._flat], lr=0.01)

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)

    def step(self) -> None:
        self._flat.grad = torch.cat([p.grad.flatten() for p in self.module.parameters() if p.grad is not None])
        dist.all_reduce(self._flat.grad)
        self.basic_optimizer.step()
        at = 0
        for p in self.module.parameters():
            p.data.copy_(self._flat.data[at : at + p.numel()].view_as(p))
            at += p.numel()


def made() -> torch.nn.Module:
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(96, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8))
    if MOVER in ("flat", "original"):
        return FullyShardedDataParallel(model, use_orig_params=MOVER == "original", device_id=torch.device("cpu"))
    if MOVER == "tensor":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if MOVER == "engine":
        sys.modules["deepspeed"] = sys.modules[__name__]
        return Engine(model)
    return model


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step if MOVER == "tensor" else 100 * step + dist.get_rank())
        model.zero_grad()
        model(torch.randn(32, 96, generator=generator)).square().mean().backward()
        if isinstance(model, Engine):
            model.step()
            continue
        if MOVER == "script":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = made()
    optimizer = model.basic_optimizer if isinstance(model, Engine) else torch.optim.AdamW(model.parameters(), lr=0.01)
    if HOW == "attach":
        assert netbottleneck.attach(model, optimizer) is not None
    if HOW == "profile":
        with netbottleneck.profile(model, optimizer) as session:
            assert session is not None
            trained(model, optimizer)
    elif HOW == "framework":
        from netbottleneck.hooks.loop import Run

        run = Run(model, optimizer)
        trained(model, optimizer)
        run.end()
    else:
        trained(model, optimizer)
    found = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found.update(whole.detach().numpy().tobytes())
    print(f"digest {found.hexdigest()}", flush=True)
    dist.destroy_process_group()


main()
