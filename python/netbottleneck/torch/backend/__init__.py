"""The torch.distributed backend "nb": `import netbottleneck.torch`, then `init_process_group("nb")`.

Also "cpu:nb", and beside others for other devices: "cpu:nb,cuda:nccl". See docs/torch_distributed.md.
"""

from typing import Any


def create(options: Any, backend_options: Any) -> Any:
    """Return a process group of this backend: what torch.distributed calls."""
    from netbottleneck.torch.backend import opening  # not at once: a script may need no group

    return opening.create(options, backend_options)
