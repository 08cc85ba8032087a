"""Tensors on other devices: "cpu:nb,cuda:nccl" has a second process group under it, which torch makes."""

from typing import Any

import torch
import torch.distributed as dist

NAME = "nb"
_INNER = "_netbottleneck_others"


def _config(group: Any) -> dict[str, str]:
    """Return which backend serves which device, of those that are not ours; {} while torch does not know the group."""
    world = dist.distributed_c10d._world
    text = world.pg_backend_config.get(group, "")
    named = dict(pair.split(":") for pair in text.split(",") if ":" in pair)
    return {device: backend for device, backend in named.items() if backend != NAME}


def devices_of(group: Any) -> list[torch.device]:
    """Return the other devices that a backend was named for."""
    return [torch.device(device) for device in _config(group)]


def elsewhere_or_none(group: Any, device: torch.device) -> Any:
    """Return the process group for a device that is not the CPU; None where no backend was named for it."""
    config = _config(group)
    if device.type not in config:
        return None
    inner = group.__dict__.get(_INNER)
    if inner is None:
        # Every rank comes here with its first tensor of such a device.
        world = dist.distributed_c10d._world
        ranks = world.pg_group_ranks[group]
        inner, _ = dist.distributed_c10d._new_process_group_helper(
            group.size(),
            group.rank(),
            sorted(ranks, key=lambda rank: ranks[rank]),
            ",".join(f"{name}:{backend}" for name, backend in config.items()),
            world.pg_map[group][1],
            dist.distributed_c10d.GroupName(f"{group.group_name}/others"),
            timeout=dist.distributed_c10d._get_default_timeout(dist.Backend(config[device.type])),
        )
        world.pg_group_ranks[inner] = ranks
        group.__dict__[_INNER] = inner
    return inner


def elsewhere(group: Any, device: torch.device) -> Any:
    """The same; ValueError where no backend was named."""
    found = elsewhere_or_none(group, device)
    if found is None:
        raise ValueError(
            f'the backend "nb" moves host memory, and this tensor is on {device}: name a backend for it too, as in '
            f'init_process_group("cpu:nb,{device.type}:nccl"), or move the tensor to the CPU'
        )
    return found
