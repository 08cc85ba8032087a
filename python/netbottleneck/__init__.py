"""Is the network the bottleneck of this training job? Measured in the job itself.

`import netbottleneck` in a training script does nothing until the environment asks for it: NETBOTTLENECK=1, or a
NETBOTTLENECK_TRANSPORT. Then DDP models that the script builds, and Horovod's optimizers, are measured and their
gradients moved by the transports named. See README.md, and `netbottleneck env` for all variables.
"""

import importlib
from typing import TYPE_CHECKING, Any

from netbottleneck import env as _env
from netbottleneck._version import __version__
from netbottleneck.errors import (
    ClosedError,
    DeadlineError,
    Error,
    HorovodInternalError,
    MismatchError,
    PeerError,
    WireError,
)

if TYPE_CHECKING:
    from netbottleneck.bench import bench
    from netbottleneck.evidence import Evidence
    from netbottleneck.hooks.attaching import attach
    from netbottleneck.hooks.loop import profile
    from netbottleneck.ops import (
        allgather,
        allreduce,
        allreduce_,
        alltoall,
        barrier,
        broadcast,
        broadcast_,
        reducescatter,
    )
    from netbottleneck.report import Run
    from netbottleneck.verdict import Verdict

# Public names whose modules are imported when they are used: importing this package costs next to nothing.
_LATER = {
    "Evidence": "netbottleneck.evidence",
    "Run": "netbottleneck.report",
    "Verdict": "netbottleneck.verdict",
    "allgather": "netbottleneck.ops",
    "allreduce": "netbottleneck.ops",
    "allreduce_": "netbottleneck.ops",
    "alltoall": "netbottleneck.ops",
    "barrier": "netbottleneck.ops",
    "attach": "netbottleneck.hooks.attaching",
    "bench": "netbottleneck.bench",
    "broadcast": "netbottleneck.ops",
    "broadcast_": "netbottleneck.ops",
    "init": "netbottleneck.ops",
    "profile": "netbottleneck.hooks.loop",
    "rank": "netbottleneck.ops",
    "reducescatter": "netbottleneck.ops",
    "shutdown": "netbottleneck.ops",
    "size": "netbottleneck.ops",
}

__all__ = [
    "ClosedError",
    "DeadlineError",
    "Error",
    "Evidence",
    "HorovodInternalError",
    "MismatchError",
    "PeerError",
    "Run",
    "Verdict",
    "WireError",
    "__version__",
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "attach",
    "barrier",
    "bench",
    "broadcast",
    "broadcast_",
    "profile",
    "reducescatter",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


def _enabled() -> bool:
    """True when a variable of ours is set that asks for something; reads no more than it must."""
    import os

    return bool(os.environ.get("NETBOTTLENECK") or os.environ.get("NETBOTTLENECK_TRANSPORT"))


if _enabled() and _env.settings().enabled:
    from netbottleneck.hooks import imports

    imports.install()
