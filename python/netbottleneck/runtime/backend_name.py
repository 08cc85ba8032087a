"""The name `nb` among torch.distributed's backends. All else of the backend is imported with its first group."""

from collections.abc import Callable
from typing import Any

NAME = "nb"


def register(create: Callable[[Any, Any], Any]) -> None:
    """Make the name known to torch.distributed, where there is one; a second call changes nothing.

    create: called with a group's options and the backend's, it returns the process group. torch itself may still be
    importing.
    """
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
