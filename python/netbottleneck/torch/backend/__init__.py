"""The torch.distributed backend "nb": `import netbottleneck.torch`, then `init_process_group("nb")`.

Also "cpu:nb", and beside others for other devices: "cpu:nb,cuda:nccl". See docs/torch_distributed.md.
"""

from typing import Any

import torch.distributed as dist

NAME = "nb"


def register() -> None:
    """Make the name known to torch.distributed, where there is one; a second call changes nothing."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    """Return a process group of this backend: what torch.distributed calls."""
    from netbottleneck.torch.backend.opening import create

    return create(options, backend_options)
