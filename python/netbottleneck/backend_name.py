"""The name `nb` among torch.distributed's backends. All else of the backend is imported with its first group."""

from typing import Any

NAME = "nb"


def register() -> None:
    """Make the name known to torch.distributed, where there is one; a second call changes nothing.

    torch itself may still be importing.
    """
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    """Return a process group of this backend: what torch.distributed calls."""
    from netbottleneck.torch.backend.opening import create

    return create(options, backend_options)
