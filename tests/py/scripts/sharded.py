"""Trains a model that FSDP2 shards, on the CPU over gloo; prints a digest of its weights.

Arguments: steps, and how it is measured: `import` (by its variables), `two` (the same, with two optimizers), `attach`
or `profile` (before the first step), or `unmeasured` (netbottleneck is not imported). Then, if it is not the plain
model: `late` (its head runs from the sixth step on), `meshes` (weights and biases are on two meshes), `moved` (the
script converts and moves it between steps), `compiled` (by torch.compile, and warnings are errors) or `evaluated`
(before every fifth update, and sharded over two ranks then).
"""

import hashlib
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, HOW = int(sys.argv[1]), sys.argv[2]
KIND = sys.argv[3] if len(sys.argv) > 3 else "plain"
if HOW != "unmeasured":
    import netbottleneck


class Late(torch.nn.Module):
    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = torch.nn.Linear(7, 7)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        x = self.body(x)
        return self.head(x) if self.passes > 5 else x


def on_two_meshes() -> dict[str, Any]:
    """Return the arguments that shard weights over another process group than biases."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    mesh = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("weights",))
    other = ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh, shard_mesh_dim=0))
    return {"shard_placement_fn": lambda parameter: other if parameter.ndim > 1 else None}


def trained(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        if KIND == "moved" and step in (3, 9):
            model.float()
        if KIND == "moved" and step in (4, 10):
            model.to("cpu")
        model.zero_grad()
        model(torch.randn(32, 96, generator=generator)).square().mean().backward()
        if KIND == "evaluated" and step % 5 == 0:
            with torch.no_grad():
                model(torch.randn(32, 96, generator=generator))
        for optimizer in optimizers:
            optimizer.step()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.Linear(96, 128), torch.nn.Tanh(), torch.nn.Linear(128, 96)),
        torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Tanh()),
        torch.nn.Linear(64, 7),
    )
    parts = list(model.children())
    if KIND == "late":
        model = Late(model)
        parts.append(model.head)
    options = on_two_meshes() if KIND == "meshes" else {"reshard_after_forward": 2} if KIND == "evaluated" else {}
    for part in parts:
        fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if KIND == "compiled":
        model = torch.compile(model, backend="eager")
        warnings.filterwarnings("error", message="Using `torch.compile")
    if HOW == "attach":
        assert netbottleneck.attach(model, optimizer) is not None
    if HOW == "profile":
        with netbottleneck.profile(model, optimizer) as session:
            assert session is not None
            trained(model, optimizer)
    elif HOW == "two":
        first, *others = model.parameters()
        trained(model, torch.optim.AdamW(others, lr=0.01), torch.optim.AdamW([first], lr=0.01))
    else:
        trained(model, optimizer)
    found = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor()
        found.update(whole.detach().numpy().tobytes())
    print(f"digest {found.hexdigest()}", flush=True)
    dist.destroy_process_group()


main()
