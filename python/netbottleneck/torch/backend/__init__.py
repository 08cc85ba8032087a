"""The torch.distributed backend "nb": `import netbottleneck.torch`, then `init_process_group("nb")`.

Also "cpu:nb", and beside others for other devices: "cpu:nb,cuda:nccl". See docs/reference/torch-distributed.md.
"""

from typing import Any


def create(options: Any, backend_options: Any) -> Any:
    """Return a process group of this backend. torch.distributed calls it."""
    from netbottleneck.torch.backend import group  # imported late: a script may need no group

    return group.create(options, backend_options)
